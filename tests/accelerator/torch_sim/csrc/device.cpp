// The operations that the device does itself: tensors' memory, views, and copies; all others go to the fallback.
#include "fallback.h"

#include <chrono>
#include <thread>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>

namespace sim {
namespace {

REGISTER_ALLOCATOR(kDevice, &device_allocator);
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

using Sizes = c10::SymIntArrayRef;
using Type = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using Where = std::optional<at::Device>;
using Pinned = std::optional<bool>;
using Format = std::optional<at::MemoryFormat>;
const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

// ------------------------------------------------------------------------------------------------------------- memory

Tensor empty(Sizes sizes, Type type, Layout, Where device, Pinned, Format format) {
  c10::DeviceGuard guard(device.value_or(c10::Device(kDevice)));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(sizes), &device_allocator, kKeys, c10::dtype_or_default(type), format);
}

Tensor empty_strided(Sizes sizes, Sizes strides, Type type, Layout, Where device, Pinned) {
  c10::DeviceGuard guard(device.value_or(c10::Device(kDevice)));
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), &device_allocator, kKeys,
      c10::dtype_or_default(type));
}

const Tensor& resize_(const Tensor& tensor, Sizes sizes, Format) {
  auto impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(sizes));
  size_t needed = (impl->storage_offset() + impl->numel()) * tensor.element_size();
  auto storage = impl->unsafe_storage().unsafeGetStorageImpl();
  if (storage->nbytes() < needed) resize_bytes(storage, needed);
  return tensor;
}

Tensor& set_part(Tensor& tensor, at::Storage storage, c10::SymInt offset, Sizes sizes, Sizes strides) {
  auto impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_storage_offset(offset.expect_int());
  auto shape = C10_AS_INTARRAYREF_SLOW(sizes), steps = C10_AS_INTARRAYREF_SLOW(strides);
  if (steps.size() == shape.size()) {
    impl->set_sizes_and_strides(shape, steps);
  } else {
    impl->set_sizes_contiguous(shape);
  }
  return tensor;
}

Tensor& set_storage(Tensor& tensor, at::Storage storage) {
  int64_t elements = storage.nbytes() / tensor.element_size();
  return set_part(tensor, std::move(storage), 0, {elements}, {});
}

Tensor& set_tensor(Tensor& tensor, const Tensor& source) {
  return set_part(tensor, source.storage(), source.storage_offset(), source.sym_sizes(), source.sym_strides());
}

void record_stream(Tensor& tensor, c10::Stream stream) { record_use(tensor.storage().data_ptr(), stream_of(stream)); }

// -------------------------------------------------------------------------------------------------------------- views

Tensor as_strided(const Tensor& tensor, Sizes sizes, Sizes strides, std::optional<c10::SymInt> offset) {
  std::optional<int64_t> begin;
  if (offset) begin = offset->expect_int();
  return at::native::as_strided_tensorimpl(
      tensor, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), begin);
}

Tensor view(const Tensor& tensor, Sizes sizes) { return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(sizes)); }

Tensor reshape_alias(const Tensor& tensor, Sizes sizes, Sizes strides) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}

// ------------------------------------------------------------------------------------------------------------- copies

Mark queue_copy(Stream* stream, const char* name, Tensor from, Tensor to) {
  return push(stream, name, [from, to]() mutable {
    Plain plain;
    to.copy_(from);
  });
}

// Between the host and the device, over a link of a speed of its own if that was asked for.
Mark queue_over_link(Stream* stream, const char* name, Tensor from, Tensor to) {
  auto rate = settings().link_bytes_per_s;
  auto spent = std::chrono::microseconds(rate ? int64_t(to.nbytes()) * 1000000 / rate : 0);
  if (!rate) return queue_copy(stream, name, from, to);
  return push(stream, name, [from, to, spent]() mutable {
    Plain plain;
    to.copy_(from);
    std::this_thread::sleep_for(spent);
  });
}

// Pageable memory is read before the call returns; pinned memory when the stream gets there.
void copy_to_device(const Tensor& from, const Tensor& to, bool non_blocking) {
  auto stream = current_stream_of(to.device().index());
  auto address = from.storage().data();
  bool pinned = is_pinned(address);
  auto mark = queue_over_link(stream, "to device", pinned ? host_alias(from) : from.detach().clone(), host_alias(to));
  if (!pinned) return;
  note_copy(address, mark);
  if (!non_blocking) synchronize(stream);
}

void copy_to_host(const Tensor& from, const Tensor& to, bool non_blocking) {
  auto stream = current_stream_of(from.device().index());
  auto address = to.storage().data();
  bool deferred = non_blocking && is_pinned(address);
  if (deferred) {
    note_copy(address, queue_over_link(stream, "to host", host_alias(from), host_alias(to)));
    return;
  }
  queue_over_link(stream, "to host", host_alias(from), host_alias(to));
  synchronize(stream);
}

// On the source's stream, held until the target's is ready, which then is held until the copy is there.
void copy_across(const Tensor& from, const Tensor& to) {
  auto source = current_stream_of(from.device().index()), target = current_stream_of(to.device().index());
  hold(source, end_of(target));
  hold(target, queue_copy(source, "copy", host_alias(from), host_alias(to)));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  open_device();
  check_failure();
  if (to.numel() == 0) return to;
  Plain plain;
  if (!on_device(from)) {
    copy_to_device(from, to, non_blocking);
  } else if (!on_device(to)) {
    copy_to_host(from, to, non_blocking);
  } else {
    copy_across(from, to);
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const Tensor& tensor) {
  synchronize(current_stream_of(tensor.device().index()));
  return at::native::_local_scalar_dense_cpu(host_alias(tensor));
}

// ------------------------------------------------------------------------------------------------------ other kernels

Tensor& zero_(Tensor& tensor) { return tensor.fill_(0); }

// The CPU's kernel would draw from the host's generator whenever it runs.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double rate, std::optional<bool> train) {
  bool drops = train.value_or(true) && rate > 0;
  auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(drops ? 1 - rate : 1.0);
  double scale = !drops ? 1.0 : rate < 1 ? 1 / (1 - rate) : 0.0;
  return {input.mul(mask).mul_(scale), mask};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("resize_", resize_);
  library.impl("set_.source_Storage_storage_offset", set_part);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("record_stream", record_stream);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("alias", at::native::alias);
  library.impl("view_as_real", at::native::view_as_real);
  library.impl("view_as_complex", at::native::view_as_complex);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar_dense);
  library.impl("zero_", zero_);
  library.impl("native_dropout", native_dropout);
  // For devices without kernels torch composes these of others, with other roundings than those of the CPU's kernels.
  for (auto name : {"native_layer_norm", "native_group_norm", "silu_backward", "mish_backward"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

// One host thread for each kernel, as in the tests' ranks, so that sums have one order.
const bool prepared = (prepare_thread = [] { at::set_num_threads(1); }, true);

}  // namespace
}  // namespace sim

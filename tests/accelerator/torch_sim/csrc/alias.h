// The device's memory as tensors of the CPU, which is what computes.
#pragma once
#include "memory.h"

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

namespace sim {

inline bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kDevice; }

// The same memory as a tensor of the CPU that owns nothing: one that kept it would hide that nobody waited for its use.
inline at::Tensor host_alias(const at::Tensor& tensor) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  c10::DataPtr data(storage->mutable_data(), c10::Device(c10::kCPU));
  c10::Storage same(c10::Storage::use_byte_size_t{}, storage->nbytes(), std::move(data), nullptr, false);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      std::move(same), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

// A kernel's thread computes on plain tensors: no autograd, no autocast, none of Python's modes.
struct Plain {
  using Key = c10::DispatchKey;
  c10::impl::ExcludeDispatchKeyGuard no_autograd{c10::autograd_dispatch_keyset_with_ADInplaceOrView};
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
  c10::impl::ExcludeDispatchKeyGuard no_modes{c10::DispatchKeySet(
      {Key::Python, Key::PythonTLSSnapshot, Key::Functionalize, Key::FuncTorchDynamicLayerFrontMode,
       Key::FuncTorchDynamicLayerBackMode})};
  c10::NoGradGuard no_grad;
};

}  // namespace sim

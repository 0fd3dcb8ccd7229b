// Every operation of the device: its CPU kernel, queued on the current stream, on aliases of the device's memory.
#pragma once
#include "alias.h"
#include "guard.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include <set>
#include <unordered_map>

namespace sim {

using Values = std::vector<c10::IValue>;
using at::Tensor;

// A value with each of its tensors replaced.
template <class Replace>
c10::IValue with_tensors(const c10::IValue& value, Replace replace) {
  if (value.isTensor()) return replace(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(replace(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor ? std::optional<Tensor>(replace(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

template <class Look>
void each_tensor(const c10::IValue& value, Look look) {
  with_tensors(value, [&](const Tensor& tensor) {
    look(tensor);
    return tensor;
  });
}

// One call of an operation, and where it runs.
struct Call {
  const c10::OperatorHandle& op;
  const c10::FunctionSchema& schema;
  Values args;
  c10::Device device{kDevice, c10::DeviceIndex(current_device)};
  bool has_device_tensors = false, has_out = false;
  std::vector<int> returned;  // for each result: the argument that it is, or -1 for a new tensor

  Call(const c10::OperatorHandle& op, const torch::jit::Stack& stack)
      : op(op), schema(op.schema()), args(stack.end() - op.schema().arguments().size(), stack.end()) {
    for (auto& value : args) {
      each_tensor(value, [&](const Tensor& tensor) {
        if (!on_device(tensor) || has_device_tensors) return;
        device = tensor.device();
        has_device_tensors = true;
      });
    }
    for (auto& value : args) {
      bool factory = !has_device_tensors && value.isDevice() && value.toDevice().type() == kDevice;
      if (factory && value.toDevice().has_index()) device = value.toDevice();
    }
    for (auto& argument : schema.arguments()) has_out |= argument.is_out();
    for (auto& result : schema.returns()) returned.push_back(argument_of(result));
  }

  int argument_of(const c10::Argument& result) const {
    if (!result.alias_info()) return -1;
    for (size_t i = 0; i < args.size(); i++) {
      auto alias = schema.arguments()[i].alias_info();
      if (alias && alias->isWrite() && alias->beforeSets() == result.alias_info()->beforeSets()) return int(i);
    }
    return -1;
  }

  bool makes_tensors() const { return has_out || std::count(returned.begin(), returned.end(), -1) > 0; }
};

// As CUDA: tensors of other devices are refused, but for scalars, and for indices of the host.
inline void check_devices(const Call& call) {
  static const std::set<std::string> indexing = {
      "aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_", "aten::_unsafe_index",
      "aten::index.Tensor_out", "aten::_unsafe_index_put"};
  if (!call.has_device_tensors) return;
  bool host_indices = indexing.count(call.schema.name());
  for (size_t i = 0; i < call.args.size(); i++) {
    bool index = host_indices && call.schema.arguments()[i].name() == "indices";
    each_tensor(call.args[i], [&](const Tensor& tensor) {
      if (!tensor.defined() || tensor.device() == call.device) return;
      bool allowed = tensor.device().is_cpu() && (tensor.dim() == 0 || index);
      TORCH_CHECK(
          allowed, "Expected all tensors to be on the same device, but got ", call.schema.arguments()[i].name(),
          " is on ", tensor.device(), ", different from other tensors on ", call.device,
          " (when checking argument in method wrapper_SIM_", call.schema.name(), ")");
    });
  }
}

// A CPU generator for a kernel that draws random numbers, seeded from the device's when the kernel is queued.
inline void replace_generator(Call& call) {
  for (size_t i = 0; i < call.args.size(); i++) {
    auto type = call.schema.arguments()[i].type()->cast<c10::OptionalType>();
    bool asks = type && type->getElementType()->kind() == c10::TypeKind::GeneratorType;
    if (!asks && !call.args[i].isGenerator()) continue;
    auto source = call.args[i].isGenerator() ? call.args[i].toGenerator()
                                             : hooks.getDefaultGenerator(call.device.index());
    TORCH_CHECK(
        source.device().type() == kDevice, "Expected a 'sim' device type for generator but found '",
        source.device().type(), "'");
    auto theirs = at::check_generator<DeviceGenerator>(source);
    std::lock_guard<std::mutex> lock(theirs->mutex_);
    call.args[i] = c10::IValue(at::detail::createCPUGenerator(theirs->random64()));
  }
}

inline Values host_arguments(const Call& call) {
  Values found;
  for (auto& value : call.args) {
    if (value.isDevice()) {
      found.push_back(c10::Device(c10::kCPU));
      continue;
    }
    found.push_back(with_tensors(value, [](const Tensor& tensor) {
      if (on_device(tensor)) return host_alias(tensor);
      // The host may change its scalars as soon as the call returns.
      bool constant = !tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number();
      return constant ? tensor : tensor.detach().clone();
    }));
  }
  return found;
}

template <class Number>
void append(std::string& text, Number number) {
  text.append(reinterpret_cast<const char*>(&number), sizeof number);
}

template <class List>
void append_all(std::string& text, const List& list) {
  append(text, uint32_t(list.size()));
  for (auto each : list) append(text, each);
}

// All of a value that the shapes of results depend on, appended to a text. False for kinds of values not known here.
// What a floating-point number is decides no shape, and learning rates differ in each step.
inline bool describe(const c10::IValue& value, std::string& text) {
  text += char(value.isTensor() ? 't' : value.isInt() ? 'i' : value.isBool() ? 'b' : 'o');
  if (value.isTensor() || value.isTensorList() || value.isOptionalTensorList()) {
    each_tensor(value, [&](const Tensor& tensor) {
      append(text, tensor.defined());
      if (!tensor.defined()) return;
      append_all(text, tensor.sizes());
      append_all(text, tensor.strides());
      append(text, tensor.scalar_type());
      append(text, tensor.device().type());
      append(text, tensor.unsafeGetTensorImpl()->is_wrapped_number());
    });
    append(text, value.isTensor() ? size_t(1) : value.toListRef().size());
    return true;
  }
  if (value.isInt()) append(text, value.toInt());
  if (value.isBool()) append(text, value.toBool());
  if (value.isString()) text += value.toStringRef();
  if (value.isIntList()) append_all(text, value.toIntVector());
  return value.isInt() || value.isBool() || value.isString() || value.isIntList() || value.isNone() ||
         value.isDouble() || value.isDoubleList();
}

inline Values infer_now(const Call& call);

// What the call would return, as tensors without data. Raises for operations whose shapes depend on values. Each call
// is inferred once: torch does that of many operations in Python, for a hundred times as long as the kernel takes.
inline Values infer(const Call& call) {
  static thread_local std::unordered_map<std::string, Values> known;
  TORCH_CHECK(call.has_device_tensors, "a factory");
  std::string text = call.schema.name() + "." + call.schema.overload_name();
  for (auto& value : call.args) {
    if (!describe(value, text)) return infer_now(call);
  }
  auto found = known.find(text);
  if (found == known.end()) found = known.emplace(std::move(text), infer_now(call)).first;
  return found->second;
}

inline Values infer_now(const Call& call) {
  Plain plain;
  torch::jit::Stack stack;
  for (auto& value : call.args) {
    if (value.isDevice()) {
      stack.push_back(c10::Device(c10::kMeta));
    } else if (value.isGenerator()) {
      stack.push_back(c10::IValue());
    } else {
      stack.push_back(with_tensors(value, [](const Tensor& tensor) {
        if (!on_device(tensor)) return tensor;
        return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta));
      }));
    }
  }
  call.op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
  return Values(stack.begin(), stack.end());
}

inline void resize_outputs(const Call& call, const Values& inferred) {
  for (size_t i = 0; i < call.returned.size(); i++) {
    int argument = call.returned[i];
    if (argument < 0 || !call.schema.arguments()[argument].is_out() || !inferred[i].isTensor()) continue;
    auto& out = call.args[argument].toTensor();
    if (out.sizes() != inferred[i].toTensor().sizes()) out.resize_(inferred[i].toTensor().sizes());
  }
}

inline Tensor empty_like_result(const Tensor& result, c10::Device device) {
  return at::empty_strided(result.sizes(), result.strides(), result.options().device(device));
}

inline void count(const std::string& what) {
  Lock lock(state.mutex);
  state.counts[what]++;
}

// For what cannot be queued: the host waits for the stream and computes itself.
inline Values run_now(const Call& call, Stream* stream) {
  count("sync " + call.schema.name());
  synchronize(stream);
  Plain plain;
  auto host = host_arguments(call);
  torch::jit::Stack stack(host.begin(), host.end());
  {
    WithoutGil without_gil;
    std::unique_lock<std::recursive_mutex> one(state.one_kernel, std::defer_lock);
    if (!threaded()) one.lock();
    call.op.callBoxed(&stack);
  }
  Values results;
  for (size_t i = 0; i < call.returned.size(); i++) {
    if (call.returned[i] >= 0) {
      results.push_back(call.args[call.returned[i]]);
      continue;
    }
    results.push_back(with_tensors(stack[i], [&](const Tensor& value) {
      if (!value.defined()) return value;
      auto result = empty_like_result(value, call.device);
      // Queued, since the poison of its memory is.
      push(stream, "result", [to = host_alias(result), value]() mutable {
        Plain plain;
        to.copy_(value);
      });
      return result;
    }));
  }
  return results;
}

inline void store_result(const Tensor& value, Tensor& out, const std::string& name) {
  if (!out.defined()) return;
  TORCH_CHECK(value.defined() && value.numel() == out.numel(), name, ": a result has ", value.numel(), " elements, "
              "where ", out.numel(), " were inferred");
  out.copy_(value.sizes() == out.sizes() ? value : value.reshape(out.sizes()));
}

inline Values run_later(const Call& call, const Values& inferred, Stream* stream) {
  count("queued");
  Values results;
  std::vector<std::vector<Tensor>> outs(call.returned.size());  // aliases of the new tensors of each result
  for (size_t i = 0; i < call.returned.size(); i++) {
    if (call.returned[i] >= 0) {
      results.push_back(call.args[call.returned[i]]);
      continue;
    }
    results.push_back(with_tensors(inferred[i], [&](const Tensor& shape) {
      auto result = shape.defined() ? empty_like_result(shape, call.device) : shape;
      outs[i].push_back(shape.defined() ? host_alias(result) : shape);
      return result;
    }));
  }
  bool fail = fails_now("kernel"), hang = fails_now("hang/" + std::to_string(stream->device));
  push(stream, call.schema.name(),
       [op = call.op, host = host_arguments(call), outs = std::move(outs), name = call.schema.name(), fail,
        hang]() mutable {
         TORCH_CHECK(!fail, "asked to fail");
         while (hang) std::this_thread::sleep_for(std::chrono::hours(1));
         Plain plain;
         torch::jit::Stack stack(host.begin(), host.end());
         op.callBoxed(&stack);
         for (size_t i = 0; i < outs.size(); i++) {
           if (outs[i].empty()) continue;
           auto out = outs[i].begin();
           each_tensor(stack[i], [&](const Tensor& value) { store_result(value, *out++, name); });
         }
       });
  return results;
}

inline void fail_matrix_product_if_asked(const std::string& name) {
  static const std::set<std::string> products = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm",
                                                 "aten::_addmm_activation"};
  if (products.count(name)) fail_cublas_if_asked();
}

inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  open_device();
  check_failure();
  auto& name = op.schema().name();
  TORCH_CHECK_NOT_IMPLEMENTED(
      op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU), "the simulated device has no kernel for ", name);
  fail_matrix_product_if_asked(name);
  Call call(op, *stack);
  check_devices(call);
  c10::DeviceGuard guard(call.device);
  auto stream = current_stream_of(call.device.index());
  Values inferred;
  bool later = true;
  if (call.makes_tensors()) {
    try {
      inferred = infer(call);
    } catch (const std::exception&) {
      later = false;  // the kernel itself says what is wrong with its arguments, if anything is
    }
  }
  replace_generator(call);
  if (later) resize_outputs(call, inferred);
  auto results = later ? run_later(call, inferred, stream) : run_now(call, stream);
  torch::jit::drop(*stack, call.args.size());
  for (auto& result : results) stack->push_back(std::move(result));
}

}  // namespace sim

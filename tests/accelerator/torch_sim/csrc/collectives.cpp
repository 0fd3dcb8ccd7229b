// What each collective does on the host, once its turn on the group's stream has come.
#include "group.h"

#include <ATen/ops/zeros.h>

namespace sim {
namespace {

constexpr int kQueuedTag = 1, kAloneTag = 2;  // NCCL has no tags: messages of a stream meet in their order

template <class Options>
Options patient(Options options) {
  options.timeout = kNever;
  return options;
}

Tensors joined(Tensors first, const Tensors& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

// gloo's own does its last part when it is waited for, and cannot be stopped; and what it does is this.
c10d::AllreduceOptions reduction_of(const c10d::ReduceScatterOptions& options) {
  c10d::AllreduceOptions reduction;
  reduction.reduceOp = options.reduceOp;
  return patient(reduction);
}

}  // namespace

// Each is `run(host)` on aliases of the tensors, in the order in which they are listed.
#define COLLECTIVE(name, tensors, ...) queue({name, tensors, [=, this](Tensors& host) mutable __VA_ARGS__, nullptr})

WorkPtr Group::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return COLLECTIVE("BROADCAST", tensors, { finish(host_->broadcast(host, patient(options))); });
}

WorkPtr Group::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return COLLECTIVE("ALLREDUCE", tensors, { finish(host_->allreduce(host, patient(options))); });
}

WorkPtr Group::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return COLLECTIVE("ALLREDUCE_COALESCED", tensors, {
    for (auto& tensor : host) {
      Tensors one{tensor};
      finish(host_->allreduce(one, patient<c10d::AllreduceOptions>(options)));
    }
  });
}

WorkPtr Group::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return COLLECTIVE("REDUCE", tensors, {
    Tensors copy{host[0].clone()};  // gloo uses it for partial sums, also where the result is not asked for
    finish(host_->reduce(copy, patient(options)));
    if (rank_ == options.rootRank) host[0].copy_(copy[0]);
  });
}

// Parts of any sizes: each rank broadcasts its own.
WorkPtr Group::allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) {
  return COLLECTIVE("ALLGATHER", joined(outputs[0], inputs), {
    host[rank_].copy_(host[size_].clone());
    for (int root = 0; root < size_; root++) {
      if (!host[root].numel()) continue;
      c10d::BroadcastOptions options;
      options.rootRank = root;
      Tensors one{host[root]};
      finish(host_->broadcast(one, patient(options)));
    }
  });
}

WorkPtr Group::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  Tensors outputs{output}, inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, options);
}

WorkPtr Group::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  size_t count = outputs.size();
  auto name = count == 1 ? "_ALLGATHER_BASE" : "ALLGATHER_INTO_TENSOR_COALESCED";
  return COLLECTIVE(name, joined(outputs, inputs), {
    for (size_t i = 0; i < count; i++) {
      at::Tensor input = host[count + i].clone();  // which may be a part of the output
      finish(host_->_allgather_base(host[i], input, patient(options)));
    }
  });
}

// Parts of any sizes: each is reduced on all ranks, and kept by one.
WorkPtr Group::reduce_scatter(
    Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) {
  auto reduction = reduction_of(options);
  return COLLECTIVE("REDUCE_SCATTER", joined({outputs[0]}, inputs[0]), {
    for (int owner = 0; owner < size_; owner++) {
      Tensors part{host[1 + owner].clone()};
      if (!part[0].numel()) continue;
      finish(host_->allreduce(part, reduction));
      if (owner == rank_) host[0].copy_(part[0]);
    }
  });
}

WorkPtr Group::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  Tensors outputs{output}, inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

WorkPtr Group::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  size_t count = outputs.size();
  auto name = count == 1 ? "_REDUCE_SCATTER_BASE" : "REDUCE_SCATTER_TENSOR_COALESCED";
  auto reduction = reduction_of(options);
  return COLLECTIVE(name, joined(outputs, inputs), {
    for (size_t i = 0; i < count; i++) {
      Tensors whole{host[count + i].clone()};
      finish(host_->allreduce(whole, reduction));
      host[i].view(-1).copy_(whole[0].view(-1).chunk(size_)[rank_]);
    }
  });
}

WorkPtr Group::alltoall_base(
    at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_rows, std::vector<int64_t>& input_rows,
    const c10d::AllToAllOptions& options) {
  Tensors tensors{output, input};
  return COLLECTIVE("ALLTOALL_BASE", tensors, {
    finish(host_->alltoall_base(host[0], host[1], output_rows, input_rows, patient(options)));
  });
}

WorkPtr Group::barrier(const c10d::BarrierOptions& options) {
  auto device = options.device.value_or(bound_device_id_.value_or(Guard::at(current_device)));
  Tensors tensors{at::zeros({1}, at::TensorOptions().device(device))};
  auto work = COLLECTIVE("ALLREDUCE", tensors, { finish(host_->allreduce(host, patient(c10d::AllreduceOptions()))); });
  if (work) static_cast<SimWork*>(work.get())->is_barrier = true;
  return work;
}

// ------------------------------------------------------------------------------------------------------------ messages

WorkPtr Group::send(Tensors& tensors, int to, int) {
  int tag = coalesced_ || bound_device_id_ ? kQueuedTag : kAloneTag;
  auto begin = [=, this](Tensors& host) { return std::vector<WorkPtr>{send_buffered(host[0], to, tag)}; };
  return queue({"SEND", tensors, nullptr, begin}, to);
}

WorkPtr Group::recv(Tensors& tensors, int from, int) {
  int tag = coalesced_ || bound_device_id_ ? kQueuedTag : kAloneTag;
  auto begin = [=, this](Tensors& host) { return std::vector<WorkPtr>{host_->recv(host, from, tag)}; };
  return queue({"RECV", tensors, nullptr, begin}, from);
}

// A message to and from each rank at once; a tensor without elements stands for none.
WorkPtr Group::exchange(const char* name, Tensors outputs, Tensors inputs) {
  auto begin = [this](Tensors& host) {
    std::vector<WorkPtr> begun;
    for (int peer = 0; peer < size_; peer++) {
      Tensors output{host[peer]}, input{host[size_ + peer]};
      if (peer == rank_) {
        if (output[0].numel()) output[0].copy_(input[0]);
        continue;
      }
      if (input[0].numel()) begun.push_back(send_buffered(input[0], peer, kQueuedTag));
      if (output[0].numel()) begun.push_back(host_->recv(output, peer, kQueuedTag));
    }
    return begun;
  };
  return queue({name, joined(std::move(outputs), inputs), nullptr, begin});
}

WorkPtr Group::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) {
  return exchange("ALLTOALL", outputs, inputs);
}

WorkPtr Group::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  auto none = at::zeros({0}, inputs[0].options());
  Tensors gathered(size_, none), given(size_, none);
  if (rank_ == options.rootRank) gathered = outputs[0];
  given[options.rootRank] = inputs[0];
  return exchange("GATHER", gathered, given);
}

WorkPtr Group::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) {
  auto none = at::zeros({0}, outputs[0].options());
  Tensors taken(size_, none), given(size_, none);
  if (rank_ == options.rootRank) given = inputs[0];
  taken[options.rootRank] = outputs[0];
  return exchange("SCATTER", taken, given);
}

}  // namespace sim

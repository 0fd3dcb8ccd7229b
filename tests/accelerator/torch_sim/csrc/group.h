// One process group of the backend `simccl`: where its collectives run, how they fail, and who watches over them.
#pragma once
#include "work.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <iostream>
#include <optional>
#include <set>

namespace sim {

constexpr Milliseconds kNever = std::chrono::hours(24);  // gloo itself never gives up: the watchdog decides
constexpr int64_t kBufferedBytes = 4 << 20;  // of messages to a peer that a sender does not wait for, as in NCCL

struct GroupOptions final : c10d::Backend::Options {
  explicit GroupOptions(Milliseconds timeout) : c10d::Backend::Options("simccl", timeout) {}
};

// Outlives its group in the callbacks of gloo, whose threads must not be those that let go of the group.
struct Signal {
  std::mutex mutex;
  std::condition_variable changed;
};

// What is queued as one: collectives in their order, and messages, of which all begin before any is waited for.
struct Operation {
  std::string name;
  Tensors tensors;  // on the device
  std::function<void(Tensors& host)> run;
  std::function<std::vector<WorkPtr>(Tensors& host)> begin;  // instead of `run`, for messages
};

class Group : public c10d::Backend {
 public:
  Group(c10::intrusive_ptr<c10d::Store> store, c10::intrusive_ptr<c10d::Backend> host, Milliseconds timeout);
  ~Group() override;

  const std::string getBackendName() const override { return "simccl"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override {
    return c10::make_intrusive<GroupOptions>(timeout_);
  }
  void setTimeout(Milliseconds timeout) override { timeout_ = timeout; }
  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  c10d::ErrorType getError() override { return error_type_; }

  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<c10d::Backend::Options>& options) override;
  void meet_for_split();
  int64_t splits() const { return splits_; }
  void abort() override { stop("NCCL communicator was aborted on rank " + std::to_string(rank_) + "."); }
  void shutdown() override;
  void watch();

  WorkPtr broadcast(Tensors&, const c10d::BroadcastOptions&) override;
  WorkPtr allreduce(Tensors&, const c10d::AllreduceOptions&) override;
  WorkPtr allreduce_coalesced(Tensors&, const c10d::AllreduceCoalescedOptions&) override;
  WorkPtr reduce(Tensors&, const c10d::ReduceOptions&) override;
  WorkPtr allgather(std::vector<Tensors>&, Tensors&, const c10d::AllgatherOptions&) override;
  WorkPtr _allgather_base(at::Tensor&, at::Tensor&, const c10d::AllgatherOptions&) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors&, Tensors&, const c10d::AllgatherOptions&) override;
  WorkPtr gather(std::vector<Tensors>&, Tensors&, const c10d::GatherOptions&) override;
  WorkPtr scatter(Tensors&, std::vector<Tensors>&, const c10d::ScatterOptions&) override;
  WorkPtr reduce_scatter(Tensors&, std::vector<Tensors>&, const c10d::ReduceScatterOptions&) override;
  WorkPtr _reduce_scatter_base(at::Tensor&, at::Tensor&, const c10d::ReduceScatterOptions&) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors&, Tensors&, const c10d::ReduceScatterOptions&) override;
  WorkPtr alltoall_base(
      at::Tensor&, at::Tensor&, std::vector<int64_t>&, std::vector<int64_t>&, const c10d::AllToAllOptions&) override;
  WorkPtr alltoall(Tensors&, Tensors&, const c10d::AllToAllOptions&) override;
  WorkPtr send(Tensors&, int to, int tag) override;
  WorkPtr recv(Tensors&, int from, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions&) override;

 private:
  WorkPtr queue(Operation operation, int peer = -1);
  WorkPtr queue_all(std::vector<Operation> operations, int64_t stream_id);
  void execute_all(std::vector<Operation>& operations);
  WorkPtr exchange(const char* name, Tensors outputs, Tensors inputs);
  void finish(const WorkPtr& collective);
  void finish_message(const WorkPtr& message);
  WorkPtr send_buffered(const at::Tensor& tensor, int to, int tag);
  void connect();
  void check_alive();
  void stop(const std::string& reason);
  std::string lost(const std::string& error);
  int64_t stream_of_peer(int peer);

  c10::intrusive_ptr<c10d::Store> store_;
  c10::intrusive_ptr<c10d::Backend> host_;  // gloo, of the same ranks
  Milliseconds timeout_;
  int64_t stream_id_;
  std::map<int, int64_t> peer_streams_;
  std::optional<std::vector<Operation>> coalesced_;
  std::atomic<uint64_t> sequence_{0};
  std::atomic<int64_t> splits_{0};
  std::atomic<bool> connected_{false};  // the communicator of the whole group is there

  std::shared_ptr<Signal> signal_ = std::make_shared<Signal>();
  // Under the signal's lock:
  std::deque<ProgressPtr> pending_;  // in the order of their begin; finished ones until the next is queued
  std::set<WorkPtr> messages_;  // that a task waits for
  std::map<int, std::deque<std::pair<WorkPtr, at::Tensor>>> sent_;  // buffered, by peer
  std::string stopped_;         // why, once the group is no more
  std::string failure_;         // found by the watchdog
  double dies_at_ = 0;
  std::atomic<c10d::ErrorType> error_type_{c10d::ErrorType::SUCCESS};
};

// Makes the gloo group of a split; Python knows how.
inline std::function<c10::intrusive_ptr<c10d::Backend>(
    const c10::intrusive_ptr<c10d::Store>&, int rank, int size, Milliseconds)>
    make_host_group;

}  // namespace sim

// A collective that was queued, and what the host may ask of it.
#pragma once
#include "alias.h"
#include "guard.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace sim {

using Tensors = std::vector<at::Tensor>;
using Milliseconds = std::chrono::milliseconds;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Shared by the task that does a collective, its Work object and the watchdog.
struct Progress {
  std::string name;  // as NCCL calls it, such as ALLREDUCE
  uint64_t sequence;
  int64_t elements;
  Milliseconds timeout;
  double begun = seconds();
  std::mutex mutex;  // of what follows
  bool finished = false;
  std::string error;
  // Keeps the memory from being used again until somebody waits for the collective, or it is done and nobody will.
  Tensors stash;

  void finish(const std::string& problem) {
    std::lock_guard<std::mutex> lock(mutex);
    finished = true;
    if (error.empty()) error = problem;
  }
  bool is_finished() {
    std::lock_guard<std::mutex> lock(mutex);
    return finished;
  }
  int64_t milliseconds() const { return int64_t(1e3 * (seconds() - begun)); }
  std::string too_long(int rank) const {
    return c10::str(
        "[Rank ", rank, "] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=", sequence, ", OpType=", name,
        ", NumelIn=", elements, ", NumelOut=", elements, ", Timeout(ms)=", timeout.count(), ") ran for ",
        milliseconds(), " milliseconds before timing out.");
  }
};
using ProgressPtr = std::shared_ptr<Progress>;

struct SimWork final : c10d::Work {
  ProgressPtr progress;
  Mark mark;  // behind the collective
  Tensors outputs;
  bool is_barrier = false;  // whose wait holds the host, too
  c10::intrusive_ptr<c10::ivalue::Future> future;

  SimWork(int rank, c10d::OpType type) : Work(rank, type) {}

  // Errors of collectives are asynchronous: they are raised by whoever asks after they were found.
  void raise_error() const {
    std::lock_guard<std::mutex> lock(progress->mutex);
    TORCH_CHECK_WITH(DistBackendError, progress->error.empty(), progress->error);
  }
  bool isCompleted() override {
    if (!is_done(mark)) nudge(mark.stream);
    return is_done(mark);
  }
  bool isSuccess() const override {
    std::lock_guard<std::mutex> lock(progress->mutex);
    return progress->finished && progress->error.empty();
  }
  std::vector<at::Tensor> result() override { return outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }

  void synchronize() override {
    raise_error();
    auto stream = current_stream_of(mark.stream->device);
    hold(stream, mark);
    Tensors let_go;
    {
      std::lock_guard<std::mutex> lock(progress->mutex);
      let_go.swap(progress->stash);
    }
    if (is_barrier) {
      sim::synchronize(stream);
      raise_error();
    }
  }
  void blockCurrentStream() override { synchronize(); }

  // Without a timeout it holds the stream; with one the host, as NCCL's.
  bool wait(Milliseconds timeout = kNoTimeout) override {
    if (timeout > kNoTimeout) wait_on_host(timeout);
    synchronize();
    return true;
  }
  void wait_on_host(Milliseconds timeout) {
    WithoutGil without_gil;
    double until = seconds() + timeout.count() / 1e3;
    while (!isCompleted() && seconds() < until) std::this_thread::sleep_for(Milliseconds(1));
    TORCH_CHECK_WITH(DistBackendError, is_done(mark), progress->too_long(rank_));
  }
};

}  // namespace sim

// Streams: queues of tasks that run later, in the order that the settings ask for.
#pragma once
#include "faults.h"

#include <Python.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <vector>

namespace sim {

struct Task {
  std::string name;
  std::function<void()> run;
};

struct Stream {
  int device;
  int64_t id;  // 0: the default stream of the device
  std::deque<Task> queue;
  uint64_t queued = 0, done = 0;  // tasks so far
  std::condition_variable filled, passed;  // a task was queued, was done; each stream's own, for idle ones to sleep
};

// A place in a stream: after its first `position` tasks.
struct Mark {
  Stream* stream = nullptr;
  uint64_t position = 0;
  std::shared_ptr<double> time;  // when the device passed it; only of events that keep it
};

// Never destroyed: threads of streams outlive main.
struct State {
  std::mutex mutex;  // of all that follows
  std::map<std::pair<int, int64_t>, std::unique_ptr<Stream>> streams;
  std::map<std::string, int64_t> counts;  // kernels: "queued", or "sync NAME" for one that the host waited for
  std::string failure;                    // of a kernel; it stays
  std::mt19937 dice;                      // of the order `random`
  bool seeded = false;
  std::recursive_mutex one_kernel;  // runs at a time in every order but `threads`
};
inline State& state = *new State;
inline thread_local int current_device = 0;
inline thread_local std::map<int, int64_t> current_stream;  // by device

using Lock = std::unique_lock<std::mutex>;

// Who waits for kernels must not hold the GIL: they may be waiting for another Python thread.
struct WithoutGil {
  PyThreadState* saved = nullptr;
  WithoutGil() {
    if (Py_IsInitialized() && PyGILState_Check()) saved = PyEval_SaveThread();
  }
  ~WithoutGil() {
    if (saved) PyEval_RestoreThread(saved);
  }
};

inline double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// ----------------------------------------------------------------------------------------------------------- failures

inline void note_failure(const std::string& text) {
  Lock lock(state.mutex);
  if (state.failure.empty()) state.failure = text;
}

// As with CUDA, the failure of a kernel is found by a later call, and from then on by every one.
inline void check_failure() {
  Lock lock(state.mutex);
  auto failure = state.failure;
  lock.unlock();
  if (!failure.empty()) {
    raise_cuda_error(710, "cudaErrorAssert", "device-side assert triggered (simulated: " + failure + ")");
  }
}

inline void execute(Task& task) {
  Lock lock(state.mutex);
  bool broken = !state.failure.empty();
  lock.unlock();
  try {
    if (!broken) task.run();
  } catch (const c10::Error& error) {
    note_failure(task.name + ": " + error.what_without_backtrace());
  } catch (const std::exception& error) {
    note_failure(task.name + ": " + error.what());
  }
  task.run = nullptr;  // lets go of what it holds before it counts as done
}

// ------------------------------------------------------------------------------------------------------------ running

// The thread of a stream, in the order `threads`. One task in eight comes late, and with it all that follows.
inline void serve(Stream* stream, std::function<void()> prepare) {
  prepare();
  std::seed_seq seeds{settings().seed, uint32_t(stream->device), uint32_t(stream->id)};
  std::mt19937 dice(seeds);
  Lock lock(state.mutex);
  while (true) {
    stream->filled.wait(lock, [&] { return !stream->queue.empty(); });
    auto task = std::move(stream->queue.front());
    stream->queue.pop_front();
    lock.unlock();
    if (settings().delay_us && dice() % 8 == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(dice() % settings().delay_us));
    }
    execute(task);
    lock.lock();
    stream->done++;
    stream->passed.notify_all();
  }
}

inline std::function<void()> prepare_thread = [] {};  // what torch wants set in a thread; the device's file knows

inline Stream* stream_of(int device, int64_t id) {
  Lock lock(state.mutex);
  auto& stream = state.streams[{device, id}];
  if (!stream) {
    stream = std::make_unique<Stream>();
    stream->device = device;
    stream->id = id;
    if (threaded()) std::thread(serve, stream.get(), prepare_thread).detach();
  }
  return stream.get();
}

inline Stream* current_stream_of(int device) { return stream_of(device, current_stream[device]); }

inline bool is_done(const Mark& mark) {
  Lock lock(state.mutex);
  return !mark.stream || mark.stream->done >= mark.position;
}

// Let a stream run up to a position, and wait for that.
inline void run_until(Stream* stream, uint64_t position) {
  WithoutGil without_gil;
  if (threaded()) {
    Lock lock(state.mutex);
    stream->passed.wait(lock, [&] { return stream->done >= position; });
    return;
  }
  std::lock_guard<std::recursive_mutex> one(state.one_kernel);
  Lock lock(state.mutex);
  while (stream->done < position && !stream->queue.empty()) {
    auto task = std::move(stream->queue.front());
    stream->queue.pop_front();
    lock.unlock();
    execute(task);
    lock.lock();
    stream->done++;
  }
}

inline Mark end_of(Stream* stream) {
  Lock lock(state.mutex);
  return {stream, stream->queued, nullptr};
}

inline void synchronize(Stream* stream) {
  run_until(stream, end_of(stream).position);
  check_failure();
}

inline void synchronize_device(int device) {
  std::vector<Stream*> streams;
  {
    Lock lock(state.mutex);
    for (auto& [key, stream] : state.streams) {
      if (key.first == device) streams.push_back(stream.get());
    }
  }
  if (settings().order == Order::MainLast) std::reverse(streams.begin(), streams.end());
  for (auto stream : streams) run_until(stream, end_of(stream).position);
  check_failure();
}

// A poll: it lets a stream run one more task, so that who asks until something is done sees it in every order.
inline void nudge(Stream* stream) {
  if (threaded()) return;
  Lock lock(state.mutex);
  auto next = stream->done + 1;
  lock.unlock();
  run_until(stream, next);
}

inline bool at_once(Stream* stream) {
  switch (settings().order) {
    case Order::Eager: return true;
    case Order::SideLast: return stream->id == 0;
    case Order::MainLast: return stream->id != 0;
    default: return false;
  }
}

// In the order `random`, every fourth task that is queued lets some stream run some of its tasks.
inline void run_some() {
  Mark until;
  {
    Lock lock(state.mutex);
    if (!state.seeded) state.dice.seed(settings().seed);
    state.seeded = true;
    if (state.dice() % 4) return;
    std::vector<Stream*> ready;
    for (auto& [key, stream] : state.streams) {
      if (!stream->queue.empty()) ready.push_back(stream.get());
    }
    if (ready.empty()) return;
    until.stream = ready[state.dice() % ready.size()];
    until.position = until.stream->done + 1 + state.dice() % until.stream->queue.size();
  }
  run_until(until.stream, until.position);
}

inline Mark push(Stream* stream, std::string name, std::function<void()> run) {
  Mark mark{stream, 0, nullptr};
  {
    Lock lock(state.mutex);
    stream->queue.push_back({std::move(name), std::move(run)});
    mark.position = ++stream->queued;
  }
  if (threaded()) {
    stream->filled.notify_one();
  } else if (at_once(stream)) {
    run_until(stream, mark.position);
  } else if (settings().order == Order::Random) {
    run_some();
  }
  return mark;
}

// Hold a stream, not the host, until another one has passed a mark.
inline void hold(Stream* stream, const Mark& mark) {
  if (!mark.stream || mark.stream == stream) return;
  push(stream, "wait", [mark] { run_until(mark.stream, mark.position); });
}

}  // namespace sim

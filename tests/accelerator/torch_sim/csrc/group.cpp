// How a group queues its operations, and what becomes of them when a rank is late, lost or gives up.
#include "group.h"

namespace sim {
namespace {

// All groups, for the watchdog. Never destroyed: its thread outlives main.
struct Watched {
  std::mutex mutex;
  std::set<Group*> groups;
  bool runs = false;
};
Watched& watched = *new Watched;

// Where there is one connection to a device, its collectives run in the order in which they were queued, whatever their
// groups and streams: the last one of each device.
struct Connection {
  std::mutex mutex;
  std::map<int, Mark> last;
};
Connection& connection = *new Connection;

void watch_all() {
  while (true) {
    std::this_thread::sleep_for(Milliseconds(50));
    std::lock_guard<std::mutex> lock(watched.mutex);
    for (auto group : watched.groups) group->watch();
  }
}

int64_t new_stream_id() {
  static std::atomic<int64_t> last{Guard::kPool};
  return ++last;
}

}  // namespace

Group::Group(c10::intrusive_ptr<c10d::Store> store, c10::intrusive_ptr<c10d::Backend> host, Milliseconds timeout)
    : c10d::Backend(host->getRank(), host->getSize()),
      store_(std::move(store)),
      host_(std::move(host)),
      timeout_(timeout),
      stream_id_(new_stream_id()) {
  open_device();
  bool waits_for_others = !threaded() && settings().order != Order::Eager;
  TORCH_CHECK(
      size_ == 1 || !waits_for_others, "several ranks with collectives of the simulated device need SIM_ORDER=threads: "
      "in other orders nothing would run while a rank waits for another");
  std::lock_guard<std::mutex> lock(watched.mutex);
  watched.groups.insert(this);
  if (!watched.runs) std::thread(watch_all).detach();
  watched.runs = true;
}

Group::~Group() {
  std::lock_guard<std::mutex> lock(watched.mutex);
  watched.groups.erase(this);
}

// ------------------------------------------------------------------------------------------------------------ queueing

void Group::startCoalescing() { coalesced_.emplace(); }

WorkPtr Group::endCoalescing() {
  auto operations = std::move(*coalesced_);
  coalesced_.reset();
  if (operations.empty()) return nullptr;
  if (operations[0].begin) connect();
  return queue_all(std::move(operations), stream_id_);
}

// A batch of messages goes through the communicator of the whole group, which is made when the group is first used: all
// ranks have to be there then, also those that the batch is not for.
void Group::connect() {
  if (connected_.exchange(true) || bound_device_id_) return;
  WithoutGil without_gil;
  if (store_->add("connected", 1) == size_) store_->set("connected/all", std::string("1"));
  store_->wait({"connected/all"}, timeout_);
}

// Messages outside of a batch have a stream for each peer, unless the group is bound to its device, as with NCCL.
int64_t Group::stream_of_peer(int peer) {
  if (peer < 0 || bound_device_id_) return stream_id_;
  auto [entry, is_new] = peer_streams_.try_emplace(peer, 0);
  if (is_new) entry->second = new_stream_id();
  return entry->second;
}

WorkPtr Group::queue(Operation operation, int peer) {
  fail_nccl_if_asked();
  if (peer < 0) connected_ = true;
  for (auto& tensor : operation.tensors) {
    TORCH_CHECK(on_device(tensor), "No backend type associated with device type ", tensor.device().type());
    TORCH_CHECK_VALUE(tensor.is_contiguous(), "Tensors must be contiguous");
  }
  if (!coalesced_) {
    std::vector<Operation> one;
    one.push_back(std::move(operation));
    return queue_all(std::move(one), stream_of_peer(peer));
  }
  coalesced_->push_back(std::move(operation));
  return nullptr;  // the work is that of the batch
}

WorkPtr Group::queue_all(std::vector<Operation> operations, int64_t stream_id) {
  open_device();
  check_failure();
  check_alive();
  auto progress = std::make_shared<Progress>();
  progress->name = operations.size() == 1 ? operations[0].name : "COALESCED";
  progress->sequence = ++sequence_;
  progress->timeout = timeout_;
  progress->elements = operations[0].tensors[0].numel();
  for (auto& operation : operations) {
    progress->stash.insert(progress->stash.end(), operation.tensors.begin(), operation.tensors.end());
  }
  auto work = c10::make_intrusive<SimWork>(rank_, c10d::OpType::UNKNOWN);
  work->progress = progress;
  work->outputs = progress->stash;
  {
    // Not by the watchdog: to let go of a tensor can take the GIL, which nobody must wait for who holds a lock.
    std::vector<ProgressPtr> finished;
    std::lock_guard<std::mutex> lock(signal_->mutex);
    for (; !pending_.empty() && pending_.front()->is_finished(); pending_.pop_front()) finished.push_back(pending_.front());
    pending_.push_back(progress);
  }

  int device = progress->stash[0].device().index();
  auto stream = stream_of(device, stream_id);
  hold(stream, end_of(current_stream_of(device)));
  std::vector<Tensors> hosts;
  for (auto& operation : operations) {
    hosts.emplace_back();
    for (auto& tensor : operation.tensors) hosts.back().push_back(host_alias(tensor));
    operation.tensors = hosts.back();  // the stash keeps the device's
  }
  auto group = c10::intrusive_ptr<Group>::reclaim_copy(this);
  std::unique_lock<std::mutex> in_order(connection.mutex, std::defer_lock);
  if (settings().one_connection) {
    in_order.lock();
    hold(stream, connection.last[device]);
  }
  work->mark = push(stream, progress->name, [group, progress, operations = std::move(operations)]() mutable {
    std::string error;
    try {
      Plain plain;
      group->check_alive();
      group->execute_all(operations);
    } catch (const c10::Error& problem) {
      error = problem.what_without_backtrace();
    } catch (const std::exception& problem) {
      error = problem.what();
    }
    if (!error.empty()) error = group->lost(error);
    progress->finish(error);
  });
  if (in_order) connection.last[device] = work->mark;
  auto list = c10::ListType::create(c10::TensorType::get());
  work->future = c10::make_intrusive<c10::ivalue::Future>(list, std::vector<c10::Device>{Guard::at(device)});
  Guard guard;
  auto before = guard.exchangeStream(Guard::stream(device, stream_id));
  work->future->markCompleted(c10::IValue(work->outputs));
  guard.exchangeStream(before);
  return work;
}

void Group::execute_all(std::vector<Operation>& operations) {
  std::vector<WorkPtr> begun;
  for (auto& operation : operations) {
    if (!operation.begin) continue;
    auto works = operation.begin(operation.tensors);
    begun.insert(begun.end(), works.begin(), works.end());
  }
  for (auto& operation : operations) {
    if (operation.run) operation.run(operation.tensors);
  }
  for (auto& work : begun) finish_message(work);
}

// Wait for a collective of gloo, until the group is stopped.
void Group::finish(const WorkPtr& collective) {
  auto future = collective->getFuture();
  future->addCallback([signal = signal_](c10::ivalue::Future&) {
    std::lock_guard<std::mutex> lock(signal->mutex);
    signal->changed.notify_all();
  });
  {
    Lock lock(signal_->mutex);
    signal_->changed.wait(lock, [&] { return future->completed() || !stopped_.empty(); });
  }
  check_alive();
  collective->wait(kNever);  // it is done: this raises its error, if any
}

// Messages have no future; to stop one is to abort it.
void Group::finish_message(const WorkPtr& message) {
  if (!message) return;
  check_alive();
  {
    std::lock_guard<std::mutex> lock(signal_->mutex);
    messages_.insert(message);
  }
  message->wait(kNever);
  {
    std::lock_guard<std::mutex> lock(signal_->mutex);
    messages_.erase(message);
  }
  check_alive();
}

// Small messages are on their way as soon as they are sent; nobody waits for their receiver. Returns what to wait for.
WorkPtr Group::send_buffered(const at::Tensor& tensor, int to, int tag) {
  if (int64_t(tensor.nbytes()) > kBufferedBytes) {
    Tensors large{tensor};
    return host_->send(large, to, tag);
  }
  Tensors copy{tensor.clone()};
  auto work = host_->send(copy, to, tag);
  WorkPtr oldest;
  std::lock_guard<std::mutex> lock(signal_->mutex);
  auto& sent = sent_[to];
  sent.emplace_back(work, copy[0]);
  int64_t bytes = 0;
  for (auto& [_, message] : sent) bytes += message.nbytes();
  if (bytes <= kBufferedBytes) return nullptr;
  oldest = sent.front().first;
  sent.pop_front();
  return oldest;
}

// --------------------------------------------------------------------------------------------------------- the end of it

void Group::check_alive() {
  std::lock_guard<std::mutex> lock(signal_->mutex);
  TORCH_CHECK_WITH(DistBackendError, stopped_.empty(), stopped_);
}

// All that is under way ends with an error, and all that comes.
void Group::stop(const std::string& reason) {
  std::set<WorkPtr> messages;
  {
    std::lock_guard<std::mutex> lock(signal_->mutex);
    if (!stopped_.empty()) return;
    stopped_ = reason;
    messages = messages_;
    for (auto& progress : pending_) {
      std::lock_guard<std::mutex> theirs(progress->mutex);
      if (!progress->finished && progress->error.empty()) progress->error = reason;
    }
    signal_->changed.notify_all();
  }
  for (auto& message : messages) message->abort();
}

// Note, for the watchdog, that a collective has failed in gloo. Returns what the host is told of it.
std::string Group::lost(const std::string& error) {
  std::lock_guard<std::mutex> lock(signal_->mutex);
  if (!stopped_.empty()) return stopped_;
  if (failure_.empty()) {
    error_type_ = c10d::ErrorType::REMOTE_ERROR;
    failure_ =
        "NCCL error: remote process exited or there was a network error, NCCL version 2.28.9\nncclRemoteError: A call "
        "failed possibly due to a network error or a remote process exiting prematurely.\nLast error:\n" + error;
  }
  return failure_;
}

// What is queued is done before the group is gone, unless it was stopped.
void Group::shutdown() {
  WithoutGil without_gil;
  std::vector<int64_t> ids{stream_id_};
  for (auto& [_, id] : peer_streams_) ids.push_back(id);
  for (auto id : ids) {
    auto end = end_of(stream_of(bound_device_id_ ? bound_device_id_->index() : current_device, id));
    run_until(end.stream, end.position);
  }
  std::map<int, std::deque<std::pair<WorkPtr, at::Tensor>>> sent;
  {
    std::lock_guard<std::mutex> lock(signal_->mutex);
    if (!stopped_.empty()) return;
    sent.swap(sent_);
  }
  for (auto& [_, messages] : sent) {
    for (auto& [work, tensor] : messages) finish_message(work);
  }
}

// As NCCL's: a collective that takes too long, or has failed, is the end of the process, a moment later.
void Group::watch() {
  std::string found;
  {
    std::lock_guard<std::mutex> lock(signal_->mutex);
    if (dies_at_ && seconds() > dies_at_) {
      std::cerr << "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [PG ID 0 PG GUID "
                << getGroupUid() << "(" << getGroupDesc() << ") Rank " << rank_
                << "] Process group watchdog thread terminated with exception: " << failure_ << std::endl;
      std::abort();
    }
    if (dies_at_ || !stopped_.empty()) return;
    auto running = std::find_if(pending_.begin(), pending_.end(), [](auto& each) { return !each->is_finished(); });
    if (failure_.empty() && running != pending_.end() && (*running)->milliseconds() > (*running)->timeout.count()) {
      failure_ = (*running)->too_long(rank_);
      error_type_ = c10d::ErrorType::TIMEOUT;
    }
    if (failure_.empty()) return;
    found = failure_;
    if (settings().watchdog) dies_at_ = seconds() + settings().watchdog_grace_ms / 1e3;
  }
  std::cerr << "[rank" << rank_ << "]:[E] [PG ID 0 PG GUID " << getGroupUid() << "(" << getGroupDesc() << ") Rank "
            << rank_ << "] " << found << std::endl;
  if (settings().watchdog) {
    std::cerr << "[rank" << rank_ << "]:[E] [PG ID 0 PG GUID " << getGroupUid() << "(" << getGroupDesc() << ") Rank "
              << rank_ << "] To avoid data inconsistency, we are taking the entire process down." << std::endl;
  }
  stop(found);
}

// -------------------------------------------------------------------------------------------------------------- splits

// As ncclCommSplit, which all ranks of the parent must call as often as each other: those outside of the new group, too.
void Group::meet_for_split() {
  WithoutGil without_gil;
  auto name = "split/" + std::to_string(splits_++);
  if (store_->add(name, 1) == size_) store_->set(name + "/all", std::string("1"));
  store_->wait({name + "/all"}, timeout_);
}

c10::intrusive_ptr<c10d::Backend> Group::split(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<c10d::Backend::Options>& options) {
  meet_for_split();
  auto place = std::find(ranks.begin(), ranks.end(), rank_);
  if (place == ranks.end()) return nullptr;
  auto host = make_host_group(store, int(place - ranks.begin()), int(ranks.size()), options->timeout);
  return c10::make_intrusive<Group>(store, host, options->timeout);
}

}  // namespace sim

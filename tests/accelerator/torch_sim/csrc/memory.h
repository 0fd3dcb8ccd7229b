// The caching allocators of the device's memory and of pinned host memory.
#pragma once
#include "runtime.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <cstring>
#include <tuple>

namespace sim {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr int kPoison = 0xFF;  // bytes of a NaN in every floating type, and of -1

struct Block {
  void* data;
  size_t size;
  int device;
  Stream* owner;              // whose work may use it again as soon as it is let go of
  std::vector<Mark> used_by;  // other streams, by record_stream
};

struct Usage {
  int64_t allocated = 0, peak = 0, reserved = 0, total = 0, retries = 0;  // bytes, and retries after a flush
};

struct PinnedBlock {
  void* data;
  size_t size;
  std::vector<Mark> copies;
};

struct Memory {
  std::mutex mutex;  // of all that follows; taken before the one of the streams
  std::map<void*, Block*> live;
  std::map<std::tuple<int, Stream*, size_t>, std::vector<Block*>> cached;
  std::vector<Block*> awaited;  // let go of while other streams still use them
  std::map<int, Usage> usage;   // by device
  std::map<void*, PinnedBlock*> pinned;
  std::multimap<size_t, PinnedBlock*> pinned_free;
};
inline Memory& memory = *new Memory;

inline bool all_done(const std::vector<Mark>& marks) {
  return std::all_of(marks.begin(), marks.end(), [](auto& mark) { return is_done(mark); });
}

inline void* new_bytes(size_t size) {
  void* data = nullptr;
  TORCH_CHECK(!posix_memalign(&data, 512, size), "the host has no ", size, " bytes for the simulated device");
  return data;
}

// Keep a block for its owner's next allocation of this size. `memory.mutex` is held.
inline void put_into_cache(Block* block) {
  block->used_by.clear();
  memory.cached[{block->device, block->owner, block->size}].push_back(block);
}

// Blocks whose other users are done go back into the cache. `memory.mutex` is held.
inline void settle_awaited() {
  auto still_used = [](Block* block) {
    if (!all_done(block->used_by)) return true;
    put_into_cache(block);
    return false;
  };
  auto& awaited = memory.awaited;
  awaited.erase(std::partition(awaited.begin(), awaited.end(), still_used), awaited.end());
}

// Let go of a block; the deleter of its data.
inline void release(void* context) {
  if (!context || forked_after_opening) return;  // in a fork, locks may be held for ever
  auto block = static_cast<Block*>(context);
  std::lock_guard<std::mutex> lock(memory.mutex);
  memory.live.erase(block->data);
  memory.usage[block->device].allocated -= block->size;
  if (block->used_by.empty()) return put_into_cache(block);
  // As CUDA's allocator, which records its events now: all that those streams have been given until now.
  for (auto& mark : block->used_by) mark = end_of(mark.stream);
  memory.awaited.push_back(block);
}

inline void flush_cache(int device) {
  synchronize_device(device);
  std::lock_guard<std::mutex> lock(memory.mutex);
  settle_awaited();
  for (auto& [key, blocks] : memory.cached) {
    if (std::get<0>(key) != device) continue;
    for (auto block : blocks) {
      memory.usage[device].reserved -= block->size;
      std::free(block->data);
      delete block;
    }
    blocks.clear();
  }
}

// A cached block of the stream, else a new one, else null where the device is full.
inline Block* find_block(int device, Stream* owner, size_t size) {
  std::lock_guard<std::mutex> lock(memory.mutex);
  settle_awaited();
  auto& usage = memory.usage[device];
  auto& cached = memory.cached[{device, owner, size}];
  Block* block = nullptr;
  if (!cached.empty()) {
    block = cached.back();
    cached.pop_back();
  } else if (usage.reserved + int64_t(size) <= settings().memory_bytes) {
    block = new Block{new_bytes(size), size, device, owner, {}};
    usage.reserved += size;
  } else {
    return nullptr;
  }
  memory.live[block->data] = block;
  usage.allocated += size;
  usage.total += size;
  usage.peak = std::max(usage.peak, usage.allocated);
  return block;
}

inline c10::DataPtr allocate(size_t bytes) {
  open_device();
  check_failure();
  int device = current_device;
  c10::Device where(kDevice, device);
  if (bytes == 0) return {nullptr, nullptr, &release, where};
  size_t size = (bytes + 511) / 512 * 512;
  auto owner = current_stream_of(device);
  bool fails = fails_now("allocator");
  Block* block = fails ? nullptr : find_block(device, owner, size);
  if (!block && !fails) {
    {
      std::lock_guard<std::mutex> lock(memory.mutex);
      memory.usage[device].retries++;
    }
    flush_cache(device);
    block = find_block(device, owner, size);
  }
  if (!block) {
    std::lock_guard<std::mutex> lock(memory.mutex);
    raise_out_of_memory(device, bytes, memory.usage[device].allocated, memory.usage[device].reserved);
  }
  // Not when it was let go of: what other streams were given before may be held up until the owner's next use of it.
  if (settings().poison) {
    push(owner, "poison", [data = block->data, size] { std::memset(data, kPoison, size); });
  }
  return {block->data, block, &release, where};
}

inline void record_use(const c10::DataPtr& data, Stream* stream) {
  if (!data.get_context()) return;
  std::lock_guard<std::mutex> lock(memory.mutex);
  auto block = static_cast<Block*>(data.get_context());
  if (block->owner != stream) block->used_by.push_back({stream, 0, nullptr});
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override { return sim::allocate(bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    push(current_stream_of(current_device), "copy_data", [=] { std::memcpy(to, from, bytes); });
  }
  bool initialized() override { return opened; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    open_device();
    for (int device = 0; device < settings().devices; device++) flush_cache(device);
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    record_use(data, stream_of(stream.device_index(), stream.id()));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(memory.mutex);
    auto usage = memory.usage[device];
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto set = [](auto& kinds, int64_t current, int64_t peak, int64_t total) {
      for (auto& kind : kinds) {
        kind.current = current;
        kind.peak = peak;
        kind.allocated = total;
        kind.freed = total - current;
      }
    };
    set(stats.allocated_bytes, usage.allocated, usage.peak, usage.total);
    set(stats.active_bytes, usage.allocated, usage.peak, usage.total);
    set(stats.requested_bytes, usage.allocated, usage.peak, usage.total);
    set(stats.reserved_bytes, usage.reserved, usage.reserved, usage.reserved);
    stats.num_alloc_retries = usage.retries;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(memory.mutex);
    memory.usage[device].total = memory.usage[device].allocated;
    memory.usage[device].retries = 0;
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(memory.mutex);
    memory.usage[device].peak = memory.usage[device].allocated;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    open_device();
    std::lock_guard<std::mutex> lock(memory.mutex);
    auto total = settings().memory_bytes;
    return {size_t(total - memory.usage[device].reserved), size_t(total)};
  }
};
inline DeviceAllocator device_allocator;

// ------------------------------------------------------------------------------------------------- pinned host memory

// The pinned block that an address lies in, or null. `memory.mutex` is held.
inline PinnedBlock* pinned_at(const void* address) {
  auto after = memory.pinned.upper_bound(const_cast<void*>(address));
  if (after == memory.pinned.begin()) return nullptr;
  auto block = std::prev(after)->second;
  return static_cast<const char*>(address) < static_cast<char*>(block->data) + block->size ? block : nullptr;
}

inline bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> lock(memory.mutex);
  return pinned_at(address);
}

// Host memory of the caller's, as `cudaHostRegister` takes it; what is registered is not registered again.
inline bool register_host(void* data, size_t bytes) {
  std::lock_guard<std::mutex> lock(memory.mutex);
  if (pinned_at(data)) return false;
  memory.pinned[data] = new PinnedBlock{data, bytes, {}};
  return true;
}

inline void note_copy(const void* address, const Mark& mark) {
  std::lock_guard<std::mutex> lock(memory.mutex);
  if (auto block = pinned_at(address)) block->copies.push_back(mark);
}

inline void release_pinned(void* context) {
  if (!context || forked_after_opening) return;
  auto block = static_cast<PinnedBlock*>(context);
  std::lock_guard<std::mutex> lock(memory.mutex);
  memory.pinned.erase(block->data);
  memory.pinned_free.insert({block->size, block});
}

// Rounded up to a power of two, as torch does it, and not given out again before the copies of its last use are done.
inline PinnedBlock* find_pinned(size_t bytes) {
  size_t size = 512;
  while (size < bytes) size *= 2;
  std::lock_guard<std::mutex> lock(memory.mutex);
  auto [first, last] = memory.pinned_free.equal_range(size);
  auto found = std::find_if(first, last, [](auto& entry) { return all_done(entry.second->copies); });
  PinnedBlock* block;
  if (found != last) {
    block = found->second;
    memory.pinned_free.erase(found);
    block->copies.clear();
  } else {
    block = new PinnedBlock{new_bytes(size), size, {}};
  }
  if (settings().poison) std::memset(block->data, kPoison, size);
  memory.pinned[block->data] = block;
  return block;
}

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    open_device();
    fail_pinned_if_asked();
    if (!bytes) return {nullptr, nullptr, &release_pinned, c10::Device(c10::kCPU)};
    auto block = find_pinned(bytes);
    return {block->data, block, &release_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool record_event(void* data, void*, c10::Stream stream) override {
    if (!is_pinned(data)) return false;
    note_copy(data, end_of(stream_of(stream.device_index(), stream.id())));
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
inline PinnedAllocator pinned_allocator;

}  // namespace sim

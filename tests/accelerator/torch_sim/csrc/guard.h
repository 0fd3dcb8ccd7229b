// What torch asks of every accelerator: devices, streams, events and random generators.
#pragma once
#include "memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>

namespace sim {

inline int device_count() noexcept {
  if (forked_after_opening) return 0;
  opened = true;  // as CUDA, whose driver does not survive a fork once it was asked
  return settings().devices;
}

inline void set_device(int device) {
  open_device();
  if (device < 0) return;
  if (device >= settings().devices) raise_cuda_error(101, "cudaErrorInvalidDevice", "invalid device ordinal");
  current_device = device;
}

inline Stream* stream_of(const c10::Stream& stream) { return stream_of(stream.device_index(), stream.id()); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr int kPool = 32;  // streams of a device, given out in turn as torch does

  static c10::Device at(int device) { return {kDevice, c10::DeviceIndex(device)}; }
  static int index(c10::Device device) { return device.has_index() ? device.index() : current_device; }
  static c10::Stream stream(int device, int64_t id) { return c10::Stream(c10::Stream::UNSAFE, at(device), id); }

  c10::DeviceType type() const override { return kDevice; }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }
  c10::Device getDevice() const override { return at(current_device); }
  void setDevice(c10::Device device) const override { set_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = index(device); }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Stream getStream(c10::Device device) const override {
    return stream(index(device), current_stream[index(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(index(device), 0); }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    static std::atomic<int64_t> given{0};
    return stream(index(device), 1 + given++ % kPool);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override {
    return getNewStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return stream_of(stream); }
  bool queryStream(const c10::Stream& stream) const override {
    auto end = end_of(stream_of(stream));
    if (!is_done(end)) nudge(end.stream);
    return is_done(end);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    open_device();
    synchronize(stream_of(stream));
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    open_device();
    synchronize_device(device < 0 ? current_device : device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_use(data, stream_of(stream));
  }

  // An event is a mark, made when it is first recorded.
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag flag) const override {
    open_device();
    bool timed = flag == c10::EventFlag::BACKEND_DEFAULT;
    auto time = timed ? std::make_shared<double>(0) : nullptr;
    auto mark = push(stream_of(stream), "record", [time] {
      if (time) *time = seconds();
    });
    mark.time = time;
    if (!*event) *event = new Mark;
    *static_cast<Mark*>(*event) = mark;
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) hold(stream_of(stream), *static_cast<Mark*>(event));
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    auto mark = *static_cast<Mark*>(event);
    if (!is_done(mark)) nudge(mark.stream);
    return is_done(mark);
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    auto mark = *static_cast<Mark*>(event);
    run_until(mark.stream, mark.position);
    check_failure();
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Mark*>(event); }
  double elapsedTime(void* begin, void* end, c10::DeviceIndex) const override {
    auto first = *static_cast<Mark*>(begin), last = *static_cast<Mark*>(end);
    TORCH_CHECK_VALUE(
        first.time && last.time, "Both events must be created with argument 'enable_timing=True' to calculate elapsed "
        "time.");
    if (!is_done(first) || !is_done(last)) raise_cuda_error(600, "cudaErrorNotReady", "device not ready");
    return 1e3 * (*last.time - *first.time);
  }
};

// A generator of the CPU's numbers that says it is the device's. Kernels do not draw from it: each that needs random
// numbers takes a seed from it when it is queued, so that the generator's state does not depend on when kernels run.
struct DeviceGenerator final : at::CPUGeneratorImpl {
  explicit DeviceGenerator(c10::DeviceIndex device) {
    device_ = c10::Device(kDevice, device);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
  static c10::DeviceType device_type() { return kDevice; }
};

// The default generator of each device, made when it is first used; to seed them all does not touch the devices.
struct Generators {
  std::mutex mutex;
  uint64_t seed = c10::default_rng_seed_val;
  std::map<int, at::Generator> by_device;
};
inline Generators& generators = *new Generators;

inline void seed_all(uint64_t seed) {
  std::lock_guard<std::mutex> lock(generators.mutex);
  generators.seed = seed;
  for (auto& [device, generator] : generators.by_device) generator.set_current_seed(seed);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return opened && !forked_after_opening; }
  void init() const override { open_device(); }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = current_device;
    set_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::Device getDeviceFromPtr(void* address) const override {
    std::lock_guard<std::mutex> lock(memory.mutex);
    auto after = memory.live.upper_bound(address);
    TORCH_CHECK(after != memory.live.begin(), "this address is not of the simulated device");
    return Guard::at(std::prev(after)->second->device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    std::lock_guard<std::mutex> lock(generators.mutex);
    int index = device < 0 ? current_device : device;
    auto [entry, is_new] = generators.by_device.try_emplace(index, at::make_generator<DeviceGenerator>(index));
    if (is_new) entry->second.set_current_seed(generators.seed);
    return entry->second;
  }
  at::Generator getNewGenerator(c10::DeviceIndex device = -1) const override {
    return at::make_generator<DeviceGenerator>(device < 0 ? current_device : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override;
};
inline Hooks& hooks = *new Hooks;

// Another block for a storage, with what it held; the copy is queued like any kernel.
inline void resize_bytes(c10::StorageImpl* storage, size_t bytes) {
  c10::DeviceGuard guard(storage->device());
  auto fresh = allocate(bytes);
  size_t kept = std::min(bytes, storage->nbytes());
  if (kept) {
    push(current_stream_of(current_device), "resize",
         [to = fresh.get(), from = storage->mutable_data(), kept] { std::memcpy(to, from, kept); });
  }
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(bytes);
}

inline void Hooks::resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const {
  resize_bytes(storage.unsafeGetStorageImpl(), bytes);
}

}  // namespace sim

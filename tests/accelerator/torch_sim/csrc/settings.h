// What the environment asks of the device, and which processes may use it.
#pragma once
#include <c10/util/Exception.h>

#include <cstdlib>
#include <string>

namespace sim {

// When the tasks of a stream run; see the docstring of the Python package.
enum class Order { Eager, Lazy, SideLast, MainLast, Random, Threads };

struct Settings {
  Order order;
  int devices;
  int64_t memory_bytes, delay_us, watchdog_grace_ms, link_bytes_per_s;
  uint32_t seed;
  bool poison, watchdog, one_connection;
  std::string fail;
};

inline std::string variable(const char* name, const char* otherwise) {
  auto value = std::getenv(name);
  return value ? value : otherwise;
}

inline Order order_of(const std::string& name) {
  const char* names[] = {"eager", "lazy", "side_last", "main_last", "random", "threads"};
  for (int i = 0; i < 6; i++) {
    if (name == names[i]) return Order(i);
  }
  TORCH_CHECK(false, "SIM_ORDER is eager, lazy, side_last, main_last, random or threads, not ", name);
}

inline Settings read_environment() {
  return {
      order_of(variable("SIM_ORDER", "lazy")),
      std::stoi(variable("SIM_DEVICES", "1")),
      std::stoll(variable("SIM_MEMORY_MB", "4096")) << 20,
      std::stoll(variable("SIM_DELAY_US", "0")),
      std::stoll(variable("SIM_WATCHDOG_GRACE_MS", "500")),
      std::stoll(variable("SIM_LINK_MB_S", "0")) * 1000000,
      uint32_t(std::stoul(variable("SIM_SEED", "0"))),
      variable("SIM_POISON", "1") == "1",
      variable("SIM_WATCHDOG", "1") == "1",
      variable("SIM_CONNECTIONS", "8") == "1",
      variable("SIM_FAIL", ""),
  };
}

// As with CUDA, a process that has opened the device must not fork one that uses it.
inline bool opened = false;
inline bool forked_after_opening = false;

inline void open_device() {
  TORCH_CHECK(
      !forked_after_opening,
      "Cannot re-initialize SIM in forked subprocess. To use SIM with multiprocessing, you must use the 'spawn' "
      "start method");
  opened = true;
}

// Read once, when the process first touches the device: one that only loads the library leaves the choice to the
// processes that it forks.
inline const Settings& settings() {
  static const Settings all = read_environment();
  return all;
}

inline bool threaded() { return settings().order == Order::Threads; }

}  // namespace sim

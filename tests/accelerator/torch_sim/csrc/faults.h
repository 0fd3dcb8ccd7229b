// The errors of a real device, in the words of the libraries that report them, and failures by request.
#pragma once
#include "settings.h"

#include <map>
#include <mutex>
#include <sstream>

namespace sim {

// Calls until a failure that was asked for, by kind: "cublas", "nccl", "pinned", "allocator", "kernel", or "hang/1" of a
// kernel of device 1.
struct Countdown {
  std::mutex mutex;
  bool read = false;
  std::map<std::string, int> left;
};
inline Countdown& countdown = *new Countdown;

// SIM_FAIL="cublas:3,nccl:1": the third matrix product fails, and the first collective.
inline void read_faults() {
  std::stringstream list(settings().fail);
  for (std::string entry; std::getline(list, entry, ',');) {
    auto colon = entry.find(':');
    TORCH_CHECK(colon != std::string::npos, "SIM_FAIL is a list of KIND:NUMBER, not ", settings().fail);
    countdown.left[entry.substr(0, colon)] = std::stoi(entry.substr(colon + 1));
  }
  countdown.read = true;
}

inline void fail_at(const std::string& kind, int number) {
  std::lock_guard<std::mutex> lock(countdown.mutex);
  if (!countdown.read) read_faults();
  countdown.left[kind] = number;
}

// Whether this call is the one that was asked to fail.
inline bool fails_now(const std::string& kind) {
  std::lock_guard<std::mutex> lock(countdown.mutex);
  if (!countdown.read) read_faults();
  auto found = countdown.left.find(kind);
  return found != countdown.left.end() && --found->second == 0;
}

[[noreturn]] inline void raise_cuda_error(int code, const std::string& name, const std::string& what) {
  throw c10::AcceleratorError(
      {__func__, __FILE__, __LINE__}, code,
      "CUDA error: " + what + "\nSearch for `" + name +
          "' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information.\n"
          "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might "
          "be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
          "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n");
}

inline void fail_pinned_if_asked() {
  if (fails_now("pinned")) raise_cuda_error(2, "cudaErrorMemoryAllocation", "out of memory");
}

inline void fail_cublas_if_asked() {
  TORCH_CHECK(!fails_now("cublas"), "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`");
}

inline void fail_nccl_if_asked() {
  TORCH_CHECK_WITH(
      DistBackendError, !fails_now("nccl"),
      "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error (run with "
      "NCCL_DEBUG=INFO for details), NCCL version 2.28.9\nncclUnhandledCudaError: Call to CUDA function failed.\n"
      "Last error:\nCuda failure 2 'out of memory'");
}

inline std::string readable_bytes(double bytes) {
  const char* units[] = {"bytes", "KiB", "MiB", "GiB"};
  int unit = 0;
  for (; bytes >= 1024 && unit < 3; unit++) bytes /= 1024;
  char text[32];
  std::snprintf(text, sizeof text, unit ? "%.2f %s" : "%.0f %s", bytes, units[unit]);
  return text;
}

[[noreturn]] inline void raise_out_of_memory(int device, size_t wanted, int64_t allocated, int64_t reserved) {
  auto total = settings().memory_bytes;
  TORCH_CHECK_WITH(
      OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", readable_bytes(wanted), ". GPU ", device,
      " has a total capacity of ", readable_bytes(total), " of which ", readable_bytes(total - reserved),
      " is free. Including non-PyTorch memory, this process has ", readable_bytes(reserved),
      " memory in use. Of the allocated memory ", readable_bytes(allocated), " is allocated by PyTorch, and ",
      readable_bytes(reserved - allocated),
      " is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
      "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.");
  std::abort();  // not reached
}

}  // namespace sim

// What a launch needs once per GPU and not once per call.
#pragma once

#include <cuda_runtime_api.h>
#include <stdint.h>

#include <atomic>

namespace fa {

// Runs an action until it has succeeded once on the current GPU; the action may run twice where two threads come first.
class OncePerDevice {
 public:
  template <typename Action>
  int operator()(Action action) {
    int device = 0;
    if (cudaError_t status = cudaGetDevice(&device)) return static_cast<int>(status);
    const uint64_t bit = device < 64 ? uint64_t(1) << device : 0;
    if (done_.load(std::memory_order_acquire) & bit) return 0;
    if (int status = action()) return status;
    done_.fetch_or(bit, std::memory_order_release);
    return 0;
  }

 private:
  std::atomic<uint64_t> done_{0};
};

// The current GPU's number of SMs, asked for once per GPU; 0 after an error, which the launch that follows reports.
inline int sm_count() {
  static std::atomic<int> known[64];
  int device = 0, sms = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  if (device < 64 && (sms = known[device].load(std::memory_order_relaxed)) > 0) return sms;
  if (cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) return 0;
  if (device < 64) known[device].store(sms, std::memory_order_relaxed);
  return sms;
}

}  // namespace fa

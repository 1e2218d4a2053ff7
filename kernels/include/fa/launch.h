// Host helpers for work that a launcher needs to do once per GPU, not once per call.
#pragma once

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "fa_forward.h"

#include <algorithm>
#include <atomic>

namespace fa {

// Runs an action until it has succeeded once on the current GPU.  Two threads that make the first call at the same time may
// both run it.
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

// Allows a kernel so much dynamic shared memory, once per GPU.
template <auto KERNEL>
int allow_smem(const FaForwardArgs* args, int bytes) {
  static OncePerDevice once;
  return once([&] { return fa_allow_dynamic_smem(args, reinterpret_cast<const void*>(KERNEL), bytes); });
}

// The number of SMs of the current GPU, queried once per GPU.  Returns 0 after a CUDA error, which the following launch
// reports.
inline int sm_count() {
  static std::atomic<int> cached_sms[64];
  int device = 0, sms = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  if (device < 64 && (sms = cached_sms[device].load(std::memory_order_relaxed)) > 0) return sms;
  if (cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) return 0;
  if (device < 64) cached_sms[device].store(sms, std::memory_order_relaxed);
  return sms;
}

// The number of blocks that the GPU runs at the same time.
template <typename SHAPE>
int max_blocks() {
  return std::max(1, sm_count() * SHAPE::BLOCKS_PER_SM);
}

// Refuses a kernel whose warpgroups would wait for ever in setmaxnreg.inc.  A block has `warpgroups` of them, whose threads all
// start with the registers that the compiler gave the kernel; `needed` is the sum of what one thread of each has afterwards.
inline int require_registers(const FaForwardArgs* args, const void* kernel, int warpgroups, int needed) {
  cudaFuncAttributes attributes = {};
  if (cudaError_t status = cudaFuncGetAttributes(&attributes, kernel)) return static_cast<int>(status);
  if (warpgroups * attributes.numRegs >= needed) return FA_OK;
  return fa_refuse(args, "the kernel was compiled to start with %d registers per thread, its setmaxnreg needs %d; compile it without "
                         "-maxrregcount",
                   attributes.numRegs, (needed + warpgroups - 1) / warpgroups);
}

}  // namespace fa

// Deliberate omissions: a manifest builds a kernel without one of its barriers (OMIT_BARRIER, a planted fault, which the judge must
// find) or without one of its phases (OMIT_PHASE, an ablation, which shows what the phase costs).  A reader of a kernel may skip
// them: nothing is omitted from the kernel itself.
//
// A kernel names its barriers in `enum Barrier { NONE, ... }` and its phases in `enum Phase { NO_PHASE, ... }`.
#pragma once

#include "fa/ptx.cuh"

#ifndef OMIT_BARRIER
#define OMIT_BARRIER NONE
#endif
#ifndef OMIT_PHASE
#define OMIT_PHASE NO_PHASE
#endif

namespace fa {

template <auto BARRIER>
inline constexpr bool IS_OMITTED_BARRIER = BARRIER == decltype(BARRIER)::OMIT_BARRIER;

template <auto PHASE>
inline constexpr bool IS_OMITTED_PHASE = PHASE == decltype(PHASE)::OMIT_PHASE;

// Waits until a phase of an mbarrier has ended.
__device__ __forceinline__ void wait(uint64_t* barrier_smem, uint32_t parity) {
  while (!mbarrier_try_wait(barrier_smem, parity)) {
  }
}

template <auto BARRIER>
__device__ __forceinline__ void wait(uint64_t* barrier_smem, uint32_t parity) {
  if constexpr (!IS_OMITTED_BARRIER<BARRIER>) wait(barrier_smem, parity);
}

// Where BARRIER is omitted, waits for it when its data has been used.  Without any wait, a warpgroup would release the next buffer
// before the producer has written this one, and the producer would wait for ever.
template <auto BARRIER>
__device__ __forceinline__ void wait_late_if_omitted(uint64_t* barrier_smem, uint32_t parity) {
  if constexpr (IS_OMITTED_BARRIER<BARRIER>) wait(barrier_smem, parity);
}

// Where BARRIER is omitted, delays the thread for which it waits.  Otherwise the error would show rarely.
template <auto BARRIER>
__device__ __forceinline__ void delay_if_omitted() {
  if constexpr (IS_OMITTED_BARRIER<BARRIER>) __nanosleep(5000);
}

template <auto BARRIER>
__device__ __forceinline__ void sync_block() {
  if constexpr (!IS_OMITTED_BARRIER<BARRIER>) __syncthreads();
}

// Waits at a named barrier for THREADS threads, for example those of a warpgroup.
template <auto BARRIER, int THREADS>
__device__ __forceinline__ void sync_threads(int named_barrier) {
  if constexpr (!IS_OMITTED_BARRIER<BARRIER>) barrier_sync<THREADS>(named_barrier);
}

}  // namespace fa

// One PTX instruction per function, named after it; the section is that of the PTX ISA.  No policy lives here.
#pragma once

#include <stdint.h>

namespace fa {

// The 32-bit address that PTX's shared state space uses.
__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 9.7.9.25.3.1 cp.async: 16 bytes from global to shared memory, past L1; zeros where `valid` is false.
__device__ __forceinline__ void cp_async_16_or_zero(void* to_smem, const void* from_gmem, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"(smem_address(to_smem)), "l"(from_gmem), "r"(valid ? 16 : 0) : "memory");
}

// 9.7.9.25.3.3 cp.async.wait_all: this thread's copies have landed, for this thread.
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// 9.7.13.15.15 cp.async.mbarrier.arrive: arrive when this thread's copies so far have landed, as one of the expected.
__device__ __forceinline__ void cp_async_mbarrier_arrive(uint64_t* barrier_smem) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(smem_address(barrier_smem)) : "memory");
}

// 9.7.13.15.9 mbarrier.init: a phase completes with so many arrivals.
__device__ __forceinline__ void mbarrier_init(uint64_t* barrier_smem, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(smem_address(barrier_smem)), "r"(arrivals) : "memory");
}

// 9.7.13.15.13 mbarrier.arrive: releases what this thread did before.
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier_smem) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" :: "r"(smem_address(barrier_smem)) : "memory");
}

// 9.7.13.15.16 mbarrier.test_wait: whether the phase of this parity has completed; acquires what was released.
__device__ __forceinline__ bool mbarrier_test_wait(uint64_t* barrier_smem, uint32_t parity) {
  uint32_t done;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done) : "r"(smem_address(barrier_smem)), "r"(parity) : "memory");
  return done;
}

// 9.7.13.1 barrier.sync: a barrier of THREADS threads; number 0 is __syncthreads'.
template <int NUMBER, int THREADS>
__device__ __forceinline__ void barrier_sync() {
  asm volatile("barrier.sync %0, %1;" :: "n"(NUMBER), "n"(THREADS) : "memory");
}

}  // namespace fa

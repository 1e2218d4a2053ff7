// The functions of kernels/include/fa/ptx.cuh, emulated on the CPU.
#pragma once

#include "emulator.h"

namespace fa {

inline uint32_t smem_address(const void* pointer) { return static_cast<uint32_t>(emulator::smem_offset(pointer)); }

inline void mbarrier_init(uint64_t* barrier_smem, int arrivals) {
  emulator::Mbarrier& barrier = emulator::block().mbarriers[barrier_smem];
  barrier.arrivals = barrier.pending = arrivals;
}
inline void mbarrier_arrive(uint64_t* barrier_smem) { emulator::arrive(barrier_smem, 0); }
inline void mbarrier_arrive_expect_tx(uint64_t* barrier_smem, uint32_t bytes) { emulator::arrive(barrier_smem, bytes); }
inline bool mbarrier_test_wait(uint64_t* barrier_smem, uint32_t parity) { return emulator::mbarrier_of(barrier_smem).phase != parity; }
inline bool mbarrier_try_wait(uint64_t* barrier_smem, uint32_t parity) {
  emulator::Mbarrier& barrier = emulator::mbarrier_of(barrier_smem);
  if (barrier.phase == parity) emulator::wait(barrier.waiting, "an mbarrier");
  return barrier.phase != parity;
}
inline void fence_mbarrier_init() {}

template <int THREADS>
void barrier_sync(int number) { emulator::meet_at_barrier(number, THREADS, true); }
template <int NUMBER, int THREADS>
void barrier_sync() { emulator::meet_at_barrier(NUMBER, THREADS, true); }
template <int THREADS>
void barrier_arrive(int number) { emulator::meet_at_barrier(number, THREADS, false); }

template <typename T>
uint32_t cvt_rn_x2(float low, float high) {
  T numbers[2] = {T(low), T(high)};
  uint32_t packed;
  std::memcpy(&packed, numbers, sizeof packed);
  return packed;
}

inline float ex2_approx_ftz(float x) {
  const float power = std::exp2(x);
  return power < 0x1p-126f ? 0.0f : power;
}

}  // namespace fa

// The functions of kernels/include/fa/ptx.cuh, emulated on the CPU.
#pragma once

#include <cuda_fp8.h>

#include "emulator.h"

namespace fa {

inline uint32_t smem_address(const void* pointer) { return static_cast<uint32_t>(emulator::smem_offset(pointer)); }

inline void mbarrier_init(uint64_t* barrier_smem, int arrivals) {
  emulator::Mbarrier& barrier = emulator::block().mbarriers[barrier_smem];
  barrier.arrivals = barrier.pending = arrivals;
}
inline void mbarrier_arrive(uint64_t* barrier_smem) { emulator::arrive(barrier_smem, 0); }
inline void mbarrier_arrive_expect_tx(uint64_t* barrier_smem, uint32_t bytes) { emulator::arrive(barrier_smem, bytes); }
inline bool mbarrier_test_wait(uint64_t* barrier_smem, uint32_t parity) { return emulator::mbarrier_of(barrier_smem, emulator::block()).phase != parity; }
inline bool mbarrier_try_wait(uint64_t* barrier_smem, uint32_t parity) {
  emulator::Mbarrier& barrier = emulator::mbarrier_of(barrier_smem, emulator::block());
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

inline void cp_async_16_or_zero(void* to_smem, const void* from_gmem, bool valid) { emulator::copy_async(to_smem, from_gmem, 16, valid); }
inline void cp_async_4_or_zero(void* to_smem, const void* from_gmem, bool valid) { emulator::copy_async(to_smem, from_gmem, 4, valid); }
inline void cp_async_commit_group() { emulator::commit_copies(); }
template <int PENDING>
void cp_async_wait_group() { emulator::complete_copies(PENDING); }
inline void cp_async_wait_all() {
  emulator::commit_copies();
  emulator::complete_copies(0);
}

inline void barrier_cluster_arrive() { emulator::arrive_at_cluster(); }
inline void barrier_cluster_arrive_relaxed() { emulator::arrive_at_cluster(); }
inline void barrier_cluster_wait() { emulator::wait_for_cluster(); }
inline uint32_t mapa(uint32_t address, uint32_t rank) { return emulator::address_in(address, rank); }
template <typename T>
void st_async(uint32_t address, T value, uint32_t barrier_address) {
  emulator::store_async(address, &value, sizeof value, barrier_address);
}

inline ulonglong2 ld_relaxed_gpu(const ulonglong2* pointer_gmem) { return *pointer_gmem; }
inline void st_relaxed_gpu(ulonglong2* pointer_gmem, ulonglong2 value) { *pointer_gmem = value; }

// Row i % 8 of matrix i / 8 is at the address of lane i.
inline void ldmatrix_x4(uint32_t (&matrices)[4], uint32_t row_address) {
  const auto* addresses = emulator::exchange({row_address});
  for (int matrix = 0; matrix < 4; ++matrix) {
    const uint32_t address = addresses[matrix * 8 + emulator::lane() / 4][0] + emulator::lane() % 4 * 4;
    std::memcpy(&matrices[matrix], emulator::block_smem() + address, 4);
  }
}
inline void ldmatrix_x4_trans(uint32_t (&matrices)[4], uint32_t row_address) {
  const auto* addresses = emulator::exchange({row_address});
  for (int matrix = 0; matrix < 4; ++matrix) {
    uint16_t elements[2];
    for (int i = 0; i < 2; ++i) {
      const uint32_t address = addresses[matrix * 8 + emulator::lane() % 4 * 2 + i][0] + emulator::lane() / 4 * 2;
      std::memcpy(&elements[i], emulator::block_smem() + address, 2);
    }
    std::memcpy(&matrices[matrix], elements, 4);
  }
}

template <typename T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulator::multiply(d, a, b0, b1, std::is_same_v<T, __half> ? emulator::FP16 : emulator::BF16);
}

template <typename T>
uint32_t cvt_rn_x2(float low, float high) {
  T numbers[2] = {T(low), T(high)};
  uint32_t packed;
  std::memcpy(&packed, numbers, sizeof packed);
  return packed;
}

inline uint2 e4m3_to_halves(uint32_t four) {
  const auto pair = [](uint32_t two) {
    const __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two), __NV_E4M3);
    return uint32_t(halves.y) << 16 | halves.x;
  };
  return {pair(four & 0xffff), pair(four >> 16)};
}

inline float ex2_approx_ftz(float x) {
  const float power = std::exp2(x);
  return power < 0x1p-126f ? 0.0f : power;
}

}  // namespace fa

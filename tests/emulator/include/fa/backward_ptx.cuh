// The functions of kernels/include/fa/backward_ptx.cuh, emulated on the CPU.
#pragma once

#include <utility>

#include "fa/warpgroup.cuh"

namespace fa {

inline void cp_async_bulk(void* to_smem, const void* from_gmem, uint32_t bytes, uint64_t* barrier_smem) {
  emulator::load_bytes(to_smem, from_gmem, bytes, barrier_smem);
}
inline void cp_reduce_async_bulk_add(float* to_gmem, const float* from_smem, uint32_t bytes) {
  emulator::add_floats(to_gmem, from_smem, bytes / sizeof(float));
}
inline void cp_async_bulk_wait_group() { emulator::finish_additions(); }
inline void fence_proxy_async_global() {}
inline int atom_add(int* to_gmem, int value) { return std::exchange(*to_gmem, *to_gmem + value); }
inline int ld_acquire(const int* from_gmem) {
  emulator::poll();
  return *from_gmem;
}
inline void st_release(int* to_gmem, int value) {
  *to_gmem = value;
  emulator::grid()->polls = 0;
}
inline void red_add_x4(float* to_gmem, const float (&x)[4]) {
  for (int i = 0; i < 4; ++i) to_gmem[i] += x[i];
}

inline void stmatrix_x4_trans(uint32_t column_address, const uint32_t (&matrices)[4]) {
  const auto* values = emulator::exchange({column_address});
  for (int matrix = 0; matrix < 4; ++matrix) {
    for (int i = 0; i < 2; ++i) {  // this lane's two elements of each matrix, in adjacent columns
      const uint32_t address = values[matrix * 8 + emulator::lane() % 4 * 2 + i][0] + emulator::lane() / 4 * 2;
      const uint16_t bits = static_cast<uint16_t>(matrices[matrix] >> 16 * i);
      std::memcpy(emulator::block_smem() + address, &bits, sizeof bits);
    }
  }
}

}  // namespace fa

// The functions of kernels/include/fa/warpgroup.cuh, emulated on the CPU.
#pragma once

#include "fa/hopper.cuh"

namespace fa {

template <int REGISTERS>
void setmaxnreg_dec() {}
template <int REGISTERS>
void setmaxnreg_inc() {}

inline void stmatrix_x4(uint32_t row_address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const auto* values = emulator::exchange({row_address, a, b, c, d});
  for (int matrix = 0; matrix < 4; ++matrix) {  // this lane's two elements of each matrix
    const uint32_t address = values[matrix * 8 + emulator::lane() / 4][0] + emulator::lane() % 4 * 4;
    std::memcpy(emulator::block_smem() + address, &values[emulator::lane()][1 + matrix], 4);
  }
}

inline void cp_async_bulk_tensor_4d_store(const CUtensorMap& map, int x, int y, int z, int w, const void* from_smem) {
  emulator::store_box(map, {x, y, z, w}, from_smem);
}
inline void cp_async_bulk_commit_group() {}
inline void cp_async_bulk_wait_group_read() { emulator::finish_stores(); }

template <typename T, int B_BY_ROWS, int N_TILES>
void wgmma_any_n(float (&d)[N_TILES][4], uint64_t a, uint64_t b, bool accumulate) {
  wgmma_m64k16<T, B_BY_ROWS>(d, a, b, accumulate);
}
template <typename T, int B_BY_ROWS, int N_TILES>
void wgmma_any_n(float (&d)[N_TILES][4], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  wgmma_m64k16<T, B_BY_ROWS>(d, a, b, accumulate);
}

}  // namespace fa

// The functions of kernels/include/fa/wgmma_e4m3.cuh, emulated on the CPU.
#pragma once

#include "fa/hopper.cuh"

namespace fa {

template <int ROW_BYTES>
uint64_t k_major_descriptor(const void* matrix_smem) {
  const uint64_t swizzle = ROW_BYTES == 128 ? 1 : ROW_BYTES == 64 ? 2 : 3;
  return swizzle << 62 | uint64_t(8 * ROW_BYTES >> 4) << 32 | uint64_t(1) << 16 | (smem_address(matrix_smem) & 0x3ffff) >> 4;
}

template <int N_TILES>
void wgmma_m64k32_e4m3(float (&d)[N_TILES][4], uint64_t a, uint64_t b, bool accumulate) {
  emulator::fiber().wgmmas.push_back({&d[0][0], N_TILES, accumulate, false, emulator::E4M3, nullptr, a, b});
}
template <int N_TILES>
void wgmma_m64k32_e4m3(float (&d)[N_TILES][4], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  emulator::fiber().wgmmas.push_back({&d[0][0], N_TILES, accumulate, false, emulator::E4M3, a, 0, b});
}

}  // namespace fa

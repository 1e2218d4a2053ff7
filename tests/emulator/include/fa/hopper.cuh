// The functions of kernels/include/fa/hopper.cuh, emulated on the CPU.
#pragma once

#include "fa/ptx.cuh"

namespace fa {

inline void cp_async_bulk_tensor_4d(void* to_smem, const CUtensorMap& map, int x, int y, int z, int w, uint64_t* barrier_smem) {
  emulator::load_box(to_smem, map, {x, y, z, w}, barrier_smem, emulator::block());
}
inline void cp_async_bulk_tensor_4d_multicast(void* to_smem, const CUtensorMap& map, int x, int y, int z, int w,
                                              uint64_t* barrier_smem, uint16_t blocks) {
  auto& of_cluster = emulator::block().cluster->blocks;
  for (size_t rank = 0; rank < of_cluster.size(); ++rank) {
    if (blocks >> rank & 1) emulator::load_box(to_smem, map, {x, y, z, w}, barrier_smem, *of_cluster[rank]);
  }
}
inline bool elect_sync() { return emulator::lane() == 0; }
inline void prefetch_tensormap(const CUtensorMap&) {}
inline void fence_proxy_async() {}

inline void wgmma_fence() {}
inline void wgmma_commit_group() { emulator::commit_wgmma(); }
template <int PENDING>
void wgmma_wait_group() { emulator::wait_for_wgmma(PENDING); }
template <int PENDING, int N_TILES>
void wgmma_wait_group(float (&)[N_TILES][4]) { emulator::wait_for_wgmma(PENDING); }

inline uint64_t wgmma_descriptor(const void* matrix_smem, uint32_t next_columns_bytes = 16) {
  return uint64_t(1) << 62 | uint64_t(1024 >> 4) << 32 | uint64_t(next_columns_bytes >> 4 & 0x3fff) << 16 |
         (smem_address(matrix_smem) & 0x3ffff) >> 4;
}

template <typename T>
constexpr emulator::Number number_of() { return std::is_same_v<T, __half> ? emulator::FP16 : emulator::BF16; }

template <typename T, int B_BY_ROWS, int N_TILES>
void wgmma_m64k16(float (&d)[N_TILES][4], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  emulator::fiber().wgmmas.push_back({&d[0][0], N_TILES, accumulate, bool(B_BY_ROWS), number_of<T>(), a, 0, b});
}
template <typename T, int B_BY_ROWS, int N_TILES>
void wgmma_m64k16(float (&d)[N_TILES][4], uint64_t a, uint64_t b, bool accumulate) {
  emulator::fiber().wgmmas.push_back({&d[0][0], N_TILES, accumulate, bool(B_BY_ROWS), number_of<T>(), nullptr, a, b});
}

}  // namespace fa

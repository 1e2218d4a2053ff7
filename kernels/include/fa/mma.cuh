// The two matrix products of attention by mma.sync, for a warp with 16 queries.  Q, K and V are in swizzled tiles.
#pragma once

#include <stdint.h>

#include "fa/ptx.cuh"
#include "fa/swizzle.cuh"
#include "fa/tile.cuh"

namespace fa {

// Loads the warp's rows of Q, from `warp_row` on, as A fragments, and flips the signs in `sign_bits`.
template <typename T, int K_STEPS>
__device__ __forceinline__ void load_q(uint32_t (&q)[K_STEPS][4], const T* q_smem, int warp_row, int lane, uint32_t sign_bits) {
#pragma unroll
  for (int d = 0; d < K_STEPS; ++d) {
    const T* row_smem = q_smem + swizzle<K_STEPS * MMA_K>(warp_row + lane % 16, d * MMA_K + lane / 16 * 8);
    ldmatrix_x4(q[d], smem_address(row_smem));
    for (uint32_t& pair : q[d]) pair ^= sign_bits;
  }
}

// S += Q K^T
template <typename T, int K_STEPS, int N>
__device__ __forceinline__ void multiply_qk(float (&s)[N][4], const uint32_t (&q)[K_STEPS][4], const T* k_smem, int lane) {
#pragma unroll
  for (int d = 0; d < K_STEPS; ++d) {
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      uint32_t k[4];  // B fragments of 16 keys: 0 and 1 for the first mma, 2 and 3 for the second
      const int key = n * MMA_N + lane / 16 * 8 + lane % 8;
      ldmatrix_x4(k, smem_address(k_smem + swizzle<K_STEPS * MMA_K>(key, d * MMA_K + lane / 8 % 2 * 8)));
      mma_m16n8k16<T>(s[n], q[d], k[0], k[1]);
      mma_m16n8k16<T>(s[n + 1], q[d], k[2], k[3]);
    }
  }
}

// O += P V for 16 keys, from `first_key` of the tile on.
template <typename T, int D>
__device__ __forceinline__ void multiply_pv(float (&o)[D][4], const uint32_t (&p)[4], const T* v_smem, int first_key, int lane) {
#pragma unroll
  for (int d = 0; d < D; d += 2) {
    uint32_t v[4];  // B fragments of 16 dimensions: 0 and 1 for the first mma, 2 and 3 for the second
    ldmatrix_x4_trans(v, smem_address(v_smem + swizzle<D * MMA_N>(first_key + lane % 16, d * MMA_N + lane / 16 * 8)));
    mma_m16n8k16<T>(o[d], p, v[0], v[1]);
    mma_m16n8k16<T>(o[d + 1], p, v[2], v[3]);
  }
}

}  // namespace fa

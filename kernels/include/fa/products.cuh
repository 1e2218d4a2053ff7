// The two matrix products of a warpgroup: 64 queries, and one tile of K or V in shared memory, as TMA has written it: boxes of
// BOX_COLUMNS columns, each [rows, BOX_COLUMNS] with a 128-byte swizzle.
#pragma once

#include "fa/shape.cuh"
#include "fa/warpgroup.cuh"

namespace fa {

// Starts S = Q K^T, with the first COLUMNS of Q and K.  q and k are the descriptors of their first boxes.
template <typename T, int COLUMNS, int S_TILES>
__device__ __forceinline__ void start_qk(float (&s)[S_TILES][4], uint64_t q, uint64_t k) {
  constexpr int KEYS = S_TILES * MMA_N;
  wgmma_fence();
#pragma unroll
  for (int d = 0; d < COLUMNS; d += MMA_K) {
    const int q_offset = (d / BOX_COLUMNS * GROUP_M * BOX_COLUMNS + d % BOX_COLUMNS) * sizeof(T) >> 4;
    const int k_offset = (d / BOX_COLUMNS * KEYS * BOX_COLUMNS + d % BOX_COLUMNS) * sizeof(T) >> 4;
    wgmma_any_n<T, 0>(s, q + q_offset, k + k_offset, d > 0);
  }
  wgmma_commit_group();
}

// Starts O += P V, with the first KEYS of the tile.  v is the descriptor of the first box.
template <typename T, int KEYS, int P_TILES, int O_TILES>
__device__ __forceinline__ void start_pv(float (&o)[O_TILES][4], const uint32_t (&p)[P_TILES][4], uint64_t v) {
  wgmma_fence();
#pragma unroll
  for (int n = 0; n < KEYS / MMA_K; ++n) wgmma_any_n<T, 1>(o, p[n], v + n * (MMA_K * BOX_COLUMNS * sizeof(T) >> 4), true);
  wgmma_commit_group();
}

}  // namespace fa

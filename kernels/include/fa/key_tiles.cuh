// Keys in tiles of 64, for kernels whose warpgroups share the queries of a block and take several key tiles each: the loads, in the
// order of the warpgroups, S tile by tile, and the row max.
//
// The shared memory of a kernel has `q`, `k[group][tile]` and `v[group][tile]`, and the mbarriers `k_full[group][tile]`, of which the
// first one also counts the bytes of Q, and `v_full[group]`.
#pragma once

#include <stdint.h>

#include <type_traits>

#include "fa/hopper.cuh"
#include "fa/omit.cuh"
#include "fa/tile.cuh"
#include "fa/tma_tile.cuh"

namespace fa {

constexpr int KEY_TILE = 64;                         // keys per TMA box
constexpr int KEY_TILE_SCORES = KEY_TILE / MMA_N;    // 8-key tiles of S in a key tile

template <typename SMEM>
constexpr int GROUPS_OF = std::extent_v<decltype(SMEM::k_full), 0>;
template <typename SMEM>
constexpr int GROUP_TILES_OF = std::extent_v<decltype(SMEM::k_full), 1>;

// Loads K of one pass.  Called by one thread.  All tiles of the first warpgroup come before those of the second, so that the two
// take turns at the exponential unit: the first one uses it while K of the second one is still being loaded.  Without LOADS, which
// an ablation sets, nothing is loaded.
template <int HEAD_DIM, bool LOADS = true, typename SMEM>
__device__ __forceinline__ void load_k(
    SMEM& smem, const CUtensorMap& map, const TmaWorkTile& work, int block_first_key, int q_bytes) {
  constexpr int GROUP_TILES = GROUP_TILES_OF<SMEM>;
#pragma unroll
  for (int g = 0; g < GROUPS_OF<SMEM>; ++g) {
#pragma unroll
    for (int t = 0; t < GROUP_TILES; ++t) {
      mbarrier_arrive_expect_tx(&smem.k_full[g][t], (LOADS ? KEY_TILE * HEAD_DIM * 2 : 0) + (g + t > 0 ? 0 : q_bytes));
      const int tile_first_key = block_first_key + (g * GROUP_TILES + t) * KEY_TILE;
      if (LOADS) load_tile<HEAD_DIM, KEY_TILE>(smem.k[g][t], map, tile_first_key, work.kv_head, work.batch, &smem.k_full[g][t]);
    }
  }
}

// Loads V of one pass in the same order.  Called by one thread.
template <int HEAD_DIM, bool LOADS = true, typename SMEM>
__device__ __forceinline__ void load_v(SMEM& smem, const CUtensorMap& map, const TmaWorkTile& work, int block_first_key) {
  constexpr int GROUP_TILES = GROUP_TILES_OF<SMEM>;
#pragma unroll
  for (int g = 0; g < GROUPS_OF<SMEM>; ++g) {
    mbarrier_arrive_expect_tx(&smem.v_full[g], LOADS ? GROUP_TILES * KEY_TILE * HEAD_DIM * 2 : 0);
#pragma unroll
    for (int t = 0; t < GROUP_TILES; ++t) {
      const int tile_first_key = block_first_key + (g * GROUP_TILES + t) * KEY_TILE;
      if (LOADS) load_tile<HEAD_DIM, KEY_TILE>(smem.v[g][t], map, tile_first_key, work.kv_head, work.batch, &smem.v_full[g]);
    }
  }
}

// S = Q K^T for the key tiles of a warpgroup, one after another, as their K arrives.  The wgmmas of a tile are one group.  COLUMNS of
// Q and K are multiplied: all, but in an ablation.
template <auto Q_FULL, auto K_FULL, int COLUMNS, typename T, typename SMEM, int GROUP_TILES>
__device__ __forceinline__ void multiply_qk(float (&s)[GROUP_TILES][KEY_TILE_SCORES][4], SMEM& smem, int group, int pass) {
  if (group > 0) wait<Q_FULL>(&smem.k_full[0][0], pass % 2);
#pragma unroll
  for (int t = 0; t < GROUP_TILES; ++t) {
    wait<K_FULL>(&smem.k_full[group][t], pass % 2);
    const uint64_t q = wgmma_descriptor(smem.q), k = wgmma_descriptor(smem.k[group][t]);
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < COLUMNS; d += MMA_K) {
      const int offset = (d / BOX_COLUMNS * KEY_TILE * BOX_COLUMNS + d % BOX_COLUMNS) * sizeof(T) >> 4;  // in units of 16 bytes
      wgmma_m64k16<T, 0>(s[t], q + offset, k + offset, d > 0);
    }
    wgmma_commit_group();
  }
}

// Waits for S of key tile `t`, while the wgmmas of the next one may still run.
template <int GROUP_TILES>
__device__ __forceinline__ void wait_for_s(float (&s)[GROUP_TILES][KEY_TILE_SCORES][4], int t) {
  if (t < GROUP_TILES - 1) {
    wgmma_wait_group<1>(s[t]);
  } else {
    wgmma_wait_group<0>(s[t]);
  }
}

// The maximum of this lane's scores of row r.  A tree reduction has a shorter dependency chain than a loop.
__device__ __forceinline__ float tree_max(const float (&s)[KEY_TILE_SCORES][4], int r) {
  float partial_max[KEY_TILE_SCORES];
#pragma unroll
  for (int n = 0; n < KEY_TILE_SCORES; ++n) partial_max[n] = fmaxf(s[n][2 * r], s[n][2 * r + 1]);
#pragma unroll
  for (int stride = KEY_TILE_SCORES / 2; stride > 0; stride /= 2) {
#pragma unroll
    for (int n = 0; n < stride; ++n) partial_max[n] = fmaxf(partial_max[n], partial_max[n + stride]);
  }
  return partial_max[0];
}

// The descriptor of 16 keys of V, from 8-key tile n of a key tile on.
template <typename T>
__device__ __forceinline__ uint64_t v_descriptor(const T* v_smem, int n) {
  return wgmma_descriptor(v_smem + n * MMA_N * BOX_COLUMNS, KEY_TILE * BOX_COLUMNS * sizeof(T));
}

}  // namespace fa

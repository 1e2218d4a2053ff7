// The sizes of a work tile of kernels with wgmma, a producer warpgroup and GROUPS computing warpgroups.
#pragma once

#include "fa/fragment.cuh"

namespace fa {

// How many columns the boxes of TMA have that hold a row.
template <int COLUMNS>
inline constexpr int BOXED = (COLUMNS + BOX_COLUMNS - 1) / BOX_COLUMNS * BOX_COLUMNS;

// A work tile of GROUPS x 64 queries, with tiles of BLOCK_N keys, and BLOCKS blocks per SM.  V and O have HEAD_DIM_V columns.
template <int HEAD_DIM_, int GROUPS_, int BLOCK_N_, int BLOCKS = GROUPS_ == 1 ? 2 : 1, int HEAD_DIM_V_ = HEAD_DIM_>
struct Shape {
  static constexpr int HEAD_DIM = HEAD_DIM_, HEAD_DIM_V = HEAD_DIM_V_, GROUPS = GROUPS_, BLOCK_N = BLOCK_N_;
  static constexpr int BOXED_DIM = BOXED<HEAD_DIM>, BOXED_DIM_V = BOXED<HEAD_DIM_V>;  // columns in shared memory
  static constexpr bool O_OVER_Q = HEAD_DIM > 128;  // O is written where Q was, because shared memory has no room for both
  static constexpr int BLOCK_M = GROUPS * GROUP_M, THREADS = (GROUPS + 1) * GROUP_THREADS;
  static constexpr int COMPUTING_THREADS = GROUPS * GROUP_THREADS, COMPUTING_WARPS = COMPUTING_THREADS / WARP;
  static constexpr int BLOCKS_PER_SM = BLOCKS;
  // All threads of a block start with the same number of registers, a multiple of 8.  The producer then gives most of its own to
  // the others.  setmaxnreg.inc would wait for ever if there were not enough.
  static constexpr int START_REGISTERS = 65536 / BLOCKS_PER_SM / THREADS / 8 * 8;
  static constexpr int PRODUCER_REGISTERS = GROUPS == 3 ? 32 : 24;
  static constexpr int REGISTERS = BLOCKS == 3 ? 136 : GROUPS == 1 ? 232 : GROUPS == 2 ? 240 : GROUPS == 3 ? 160 : 112;
  static constexpr int ALL_REGISTERS = PRODUCER_REGISTERS + GROUPS * REGISTERS;  // of one thread of each warpgroup
  static_assert(ALL_REGISTERS <= (GROUPS + 1) * START_REGISTERS, "no registers are created");
  // The 8-column tiles of S and O, and the 16-column tiles of P.
  static constexpr int S_TILES = BLOCK_N / MMA_N, P_TILES = BLOCK_N / MMA_K, O_TILES = HEAD_DIM_V / MMA_N;
  // In bytes, for elements of two bytes: a tile of K, one of V, and Q of the block.
  static constexpr int TILE_BYTES = BLOCK_N * BOXED_DIM * 2, V_BYTES = BLOCK_N * BOXED_DIM_V * 2, Q_BYTES = BLOCK_M * BOXED_DIM * 2;
  static_assert(TILE_BYTES % 1024 == 0 && V_BYTES % 1024 == 0, "the swizzle pattern repeats every 1024 bytes");
};

}  // namespace fa

// The work tiles of a ragged batch, sorted by their number of key tiles, the most first.  Each block computes the order from the
// lengths, which only the device knows.  Dealt in this order, all blocks get nearly the same amount of work.
#pragma once

#include <algorithm>
#include <type_traits>

#include "fa/launch.h"
#include "fa/ragged.cuh"

namespace fa {

struct SortedTiles {
  static constexpr int MAX_TILES = 1024;    // work tiles of all sequences, and rounds of a block; a call with more is not sorted
  static constexpr int LEVELS = WARP;  // of lengths: work tiles of the same level stay in their order
  static constexpr int MAX_WARPS = 20;
  // The sorted work tiles of one head of each sequence.  The other heads have the same order.
  struct Place {
    uint16_t sequence, m_block;
  } order[MAX_TILES];
  union {
    struct {  // while they are sorted
      uint8_t levels[MAX_TILES];
      uint16_t counts[MAX_WARPS][LEVELS];
    };
    // By round, the numbers of this block's work tiles, as make_work_tile takes them, with sections of one head if they are sorted.
    // A larger one than any ends them.
    int numbers[MAX_TILES];
  };
};

// Shared memory with the order, if it is sorted.
template <typename SMEM>
struct SmemWithOrder : SMEM {
  SortedTiles sorted;
};
template <bool SORTS, typename SMEM>
using WithOrder = std::conditional_t<SORTS, SmemWithOrder<SMEM>, SMEM>;

// What the parameters of a kernel have besides those of its work tiles and its sequences.
struct SortedParams {
  int is_sorted;  // whether the work tiles of the call are sorted
};
struct NotSorted {};

// Fills `params` after the other parameters.
template <typename SHAPE, typename PARAMS>
void make_sorted_params(PARAMS* params) {
  const int blocks = std::min(params->work_tiles, max_blocks<SHAPE>()), sequences = params->batch_heads / params->heads;
  params->is_sorted = sequences <= SortedTiles::MAX_TILES / params->m_blocks && params->work_tiles < SortedTiles::MAX_TILES * blocks;
  if (params->is_sorted) params->section_heads = 1;
}

// Returns the level of a work tile.  first_tile(params, first_query) is the first key tile that its queries see.
template <typename SHAPE, typename PARAMS, typename FirstTile>
__device__ __forceinline__ int level_of(const PARAMS& params, int sequence, int m_block, FirstTile first_tile) {
  const auto key_tiles = [&](const PARAMS& own, int first_query) {
    const int tiles = visible_key_tiles<SHAPE>(own, min(own.seq_q, first_query + SHAPE::BLOCK_M));
    return tiles > 0 ? tiles - min(tiles - 1, first_tile(own, first_query)) : 0;
  };
  const int first_query = m_block * SHAPE::BLOCK_M, skipped = SortedTiles::LEVELS - 1, none = skipped - 1;
  const RaggedTile work = {
      {0, 0, 0}, params.queries.rows_of(sequence, params.seq_q), params.keys.rows_of(sequence, params.seq_k)};
  if (first_query >= work.queries.count) return skipped;
  const int most = max(1, key_tiles(params, (params.m_blocks - 1) * SHAPE::BLOCK_M));  // the last queries of the longest sequence
  return none - min(none, key_tiles(own_params(params, work), first_query) * none / most);
}

// Sorts the work tiles.  Called by all threads of a block, which then must wait for each other.
template <typename SHAPE, typename PARAMS, typename FirstTile>
__device__ __forceinline__ void sort_tiles(const PARAMS& params, SortedTiles& sorted, FirstTile first_tile) {
  static_assert(SHAPE::THREADS <= SortedTiles::MAX_WARPS * WARP, "each warp has counts");
  constexpr int WARPS = SHAPE::THREADS / WARP;
  const int tiles = params.batch_heads / params.heads * params.m_blocks, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
#pragma unroll 1
  for (int tile = threadIdx.x; tile < tiles; tile += SHAPE::THREADS) {
    const int sequence = tile / params.m_blocks;
    sorted.levels[tile] = level_of<SHAPE>(params, sequence, tile - sequence * params.m_blocks, first_tile);
  }
  __syncthreads();

  // A warp counts successive work tiles, each lane those of one level.
  const int of_warp = (tiles + WARPS - 1) / WARPS, begin = warp * of_warp, end = min(tiles, begin + of_warp);
  int count = 0;
#pragma unroll 1
  for (int tile = begin; tile < end; ++tile) count += sorted.levels[tile] == lane;
  sorted.counts[warp][lane] = count;
  __syncthreads();

  // The places of a level begin behind those of the levels before it, and in it behind those of the warps before this one.
  int before = 0, of_level = 0;
  for (int other = 0; other < WARPS; ++other) {
    if (other == warp) before = of_level;
    of_level += sorted.counts[other][lane];
  }
  int through = of_level;
#pragma unroll
  for (int lanes = 1; lanes < WARP; lanes *= 2) {
    const int lower = __shfl_sync(0xffffffffu, through, lane - lanes);
    if (lane >= lanes) through += lower;
  }
  int place = through - of_level + before;
#pragma unroll 1
  for (int tile = begin; tile < end; ++tile) {
    if (sorted.levels[tile] != lane) continue;
    const int sequence = tile / params.m_blocks;
    sorted.order[place++] = {static_cast<uint16_t>(sequence), static_cast<uint16_t>(tile - sequence * params.m_blocks)};
  }
}

// Writes the numbers of this block's work tiles.  Called by all threads of a block, which then must wait for each other.
template <typename SHAPE, typename PARAMS>
__device__ __forceinline__ void deal_tiles(const PARAMS& params, SortedTiles& sorted, bool is_sorted) {
  __syncthreads();
#pragma unroll 1
  for (int round = threadIdx.x; round < SortedTiles::MAX_TILES; round += SHAPE::THREADS) {
    const int number = dealt_number(round, blockIdx.x, gridDim.x);
    sorted.numbers[round] = number;
    if (!is_sorted || number >= params.work_tiles) continue;
    const int tile = number / params.heads, head = number - tile * params.heads;  // the heads of a work tile follow one another
    const SortedTiles::Place at = sorted.order[tile];
    const int batch_head = at.sequence * params.heads + head;
    const bool begins_with_first = (params.batch_heads - batch_head - 1) % 2;  // as in make_work_tile
    sorted.numbers[round] = batch_head * params.m_blocks + (begins_with_first ? at.m_block : params.m_blocks - 1 - at.m_block);
  }
}

// Sorts and deals the work tiles.  Called by all threads of a block, which then must wait for each other.
template <typename SHAPE, typename PARAMS, typename SMEM, typename FirstTile>
__device__ __forceinline__ void order_tiles(const PARAMS& params, SMEM& smem, FirstTile first_tile) {
  if (params.is_sorted) sort_tiles<SHAPE>(params, smem.sorted, first_tile);
  deal_tiles<SHAPE>(params, smem.sorted, params.is_sorted);
}

// The work tiles of this block.
template <bool SORTS, typename SMEM>
struct Deal {
  const SMEM& smem;
  // Returns the number of the work tile of a round, or a larger one than any if there is none.  Without a branch for calls that are
  // not sorted, the producer has enough registers.
  __device__ __forceinline__ int number(uint32_t round) const {
    constexpr uint32_t MAX_TILES = SortedTiles::MAX_TILES;
    if constexpr (SORTS) {
      return smem.sorted.numbers[round % MAX_TILES] + round / MAX_TILES * (MAX_TILES * gridDim.x);
    } else {
      return Dealt().number(round);
    }
  }
};

}  // namespace fa

// Work tiles of an incomplete last round whose keys are divided between blocks: which keys a block gets, and the marks by which the
// last block to finish a work tile knows that it merges the parts.
#pragma once

#include <stdint.h>

#include <algorithm>

#include "fa/fragment.cuh"
#include "fa/launch.h"
#include "fa/omit.cuh"
#include "fa/schedule.cuh"
#include "fa_forward.h"

namespace fa {

// Marks a part in the workspace as stored.  The workspace may contain anything before a call.  Any other value, such as NaN or
// the data of another call, means 'not stored'.
constexpr uint64_t STORED = 0x9e6c63d0876a9a47ull;
constexpr int MAX_PARTS = 8;  // of a work tile

// The work tiles of a block.  Those of an incomplete last round are divided between blocks by their keys.
struct SplitTiles {
  float4* results;   // [tiles, warpgroups, parts, vectors, GROUP_THREADS]
  uint64_t* stored;  // [tiles, warpgroups, parts]
  int first;         // number of the first of these work tiles; those before it are not divided
  int parts;         // of each tile

  __device__ __forceinline__ bool is_split(int round) const { return round * static_cast<int>(gridDim.x) >= first; }
  __device__ __forceinline__ int number(int round) const {
    const int number = Dealt().number(round);
    const bool is_last_round = round * static_cast<int>(gridDim.x) == first;
    if (is_split(round)) return is_last_round ? first + static_cast<int>(blockIdx.x) / parts : INT32_MAX;
    return number;
  }
  __device__ __forceinline__ KeyTiles key_tiles(const WorkTile& work, int round) const {
    const int part = blockIdx.x % parts;
    if (is_split(round)) return {work.key_tiles * part / parts, work.key_tiles * (part + 1) / parts};
    return {0, work.key_tiles};
  }
  // The first part of this block's work tile and warpgroup, and the part that this block computes.
  __device__ __forceinline__ int first_part(int group, int groups) const {
    return (static_cast<int>(blockIdx.x) / parts * groups + group) * parts;
  }
  __device__ __forceinline__ int own_part(int group, int groups) const { return first_part(group, groups) + blockIdx.x % parts; }
};

template <typename SHAPE>
struct Whole : SHAPE {  // for calls without such work tiles
  static constexpr bool HAS_SPLIT = false;
  using Deal = Dealt;
};
template <typename SHAPE>
struct Divided : SHAPE {  // for calls with them
  static constexpr bool HAS_SPLIT = true;
  using Deal = SplitTiles;
};

// Marks a part as stored, for all threads of a warpgroup.  Returns whether all parts of the work tile are, to all of them.  At
// least the last warpgroup finds all parts stored, because the fences have one order.  If several do, they merge the same bits in
// the same order.  They also clear the marks, so that the next call, which may be a replay with the same workspace, finds none.
template <auto PART_STORED>
__device__ __forceinline__ bool all_parts_are_stored(
    const SplitTiles& split, int first_part, int own_part, int named_barrier, int* all_are_stored_smem) {
  __threadfence();
  sync_threads<PART_STORED, GROUP_THREADS>(named_barrier);
  if (threadIdx.x % GROUP_THREADS == 0) {
    volatile uint64_t* stored = split.stored;
    stored[own_part] = STORED;
    __threadfence();
    int count = 0;
    for (int part = 0; part < split.parts; ++part) count += stored[first_part + part] == STORED;
    if (count == split.parts) {
      for (int part = 0; part < split.parts; ++part) stored[first_part + part] = 0;
    }
    __threadfence();
    *all_are_stored_smem = count == split.parts;
  }
  barrier_sync<GROUP_THREADS>(named_barrier);
  return *all_are_stored_smem;
}

// The work tiles from `first` on, those of an incomplete last round, are divided into as many parts by their keys.
struct Division {
  int first, parts, tiles;
};

// Divides the last round if that saves more time than it costs: the start of a work tile, and `merge_us` to merge its parts.
// Under a causal mask the lengths of work tiles differ, and they are dealt so that all SMs are busy until the end.
template <typename SHAPE, typename COSTS, typename PARAMS>
Division divide_last_round(const FaForwardArgs* args, const PARAMS& params, double merge_us) {
  const int blocks = max_blocks<SHAPE>(), tiles = params.work_tiles % blocks;
  const int key_tiles = (params.seq_k + SHAPE::BLOCK_N - 1) / SHAPE::BLOCK_N;
  const int parts = tiles > 0 ? std::min({MAX_PARTS, blocks / tiles, key_tiles}) : 1;
  const bool saves_time = (key_tiles - key_tiles / std::max(parts, 1)) * COSTS::KEY_TILE_US > COSTS::WORK_TILE_US + merge_us;
  if (args->causal != FA_CAUSAL_NONE || parts < 2 || !saves_time) return {params.work_tiles, 1, 0};
  return {params.work_tiles - tiles, parts, tiles};
}

}  // namespace fa

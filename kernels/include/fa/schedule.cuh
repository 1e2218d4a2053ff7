// How the work tiles of a call are numbered, and dealt to persistent blocks.  PARAMS is a struct of kernel parameters that has the
// fields of TileParams in fa/tile_params.cuh that these functions read.
#pragma once

#include <stdint.h>

namespace fa {

// BLOCK_M queries of one head, and the key tiles that they see.
struct WorkTile {
  int first_query, batch_head;  // first_query is negative if the tile begins before the first query
  int key_tiles;  // tiles with a key that any query of the block sees
};

// The key tiles [first, end) of a work tile.
struct KeyTiles {
  int first, end;
};

// The number of key tiles with a key that any query before `end_query` sees.
template <typename SHAPE, typename PARAMS>
__host__ __device__ __forceinline__ int visible_key_tiles(const PARAMS& params, int end_query) {
  const int last_diagonal = params.first_diagonal + end_query - 1;  // the last query sees this many keys, if there are as many
  const int visible_keys = last_diagonal < params.seq_k ? last_diagonal : params.seq_k;
  return visible_keys > 0 ? (visible_keys + SHAPE::BLOCK_N - 1) / SHAPE::BLOCK_N : 0;
}

// Whether the first work tile of a head may have rows before the first query.  If so, rows_before(params) says how many.
template <typename PARAMS>
inline constexpr bool HAS_ROWS_BEFORE = false;
template <typename PARAMS>
int rows_before(const PARAMS&);

// Work tiles are numbered by section, then by their queries, then by head.  Under a causal mask, the last queries see the most
// keys.  The last section begins with them, so that the shortest work tiles come at the end.  The sections before it alternate,
// so that the lengths change gradually from one section to the next, as dealt_number needs.
template <typename SHAPE, typename PARAMS>
__host__ __device__ __forceinline__ WorkTile make_work_tile(const PARAMS& params, uint32_t number) {
  const uint32_t section_tiles = params.section_heads * params.m_blocks, section = number / section_tiles;
  const uint32_t in_section = number - section * section_tiles, first_head = section * params.section_heads;
  const uint32_t left_heads = params.batch_heads - first_head, full_heads = params.section_heads;
  const uint32_t section_heads = left_heads < full_heads ? left_heads : full_heads;
  const uint32_t row = in_section / section_heads, sections_left = (left_heads - 1) / full_heads;
  const int first_query = (sections_left % 2 ? row : params.m_blocks - 1 - row) * SHAPE::BLOCK_M -
                          (HAS_ROWS_BEFORE<PARAMS> ? rows_before(params) : 0);
  const int end_query = params.seq_q < first_query + SHAPE::BLOCK_M ? params.seq_q : first_query + SHAPE::BLOCK_M;
  const int key_tiles = visible_key_tiles<SHAPE>(params, end_query);
  return {first_query, static_cast<int>(first_head + in_section % section_heads), key_tiles};
}

// The work tiles are dealt like cards, in alternating directions, so that all blocks get nearly the same amount of work.  Returns
// the number of the work tile that a block gets in a round.
__host__ __device__ __forceinline__ int dealt_number(int round, int block, int blocks) {
  return round * blocks + (round % 2 ? blocks - 1 - block : block);
}

// The work tiles of this block, each with all its keys.
struct Dealt {
  // Returns the number of the work tile of a round, or a larger one than any if there is none.
  __device__ __forceinline__ int number(int round) const { return dealt_number(round, blockIdx.x, gridDim.x); }
  // Returns the key tiles of a work tile that this block computes.
  __device__ __forceinline__ KeyTiles key_tiles(const WorkTile& work, int) const { return {0, work.key_tiles}; }
};

struct Head {
  int query_head, kv_head, batch;
};

template <typename PARAMS>
__device__ __forceinline__ Head make_head(const PARAMS& params, uint32_t batch_head) {
  const uint32_t batch = batch_head / params.heads, head = batch_head % params.heads;
  return {static_cast<int>(head), static_cast<int>(__umulhi(2 * head + 1, params.kv_head_factor)), static_cast<int>(batch)};
}

}  // namespace fa

// Packed rows: the queries of all heads that share a key/value head form one tile, so that K and V are read once for all of them.
// Row r is head r % group of query r / group, where `group` is the number of these heads.  FlashAttention calls this PackGQA.
#pragma once

#include <math_constants.h>

#include "fa/fragment.cuh"
#include "fa/params.cuh"

namespace fa {

constexpr int STEP_KEYS = 16;  // keys of a step, which one mma of P V takes
constexpr int KEY_TILES = STEP_KEYS / MMA_N;

// The place of a thread.
struct Thread {
  int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  int row = lane / QUAD;  // it holds rows `row` and `row` + 8 of each mma tile

  __device__ __forceinline__ Thread() {}
};

// How the host divides a call: into tiles of rows, and the keys of a tile over the gridDim.x blocks that share it.
struct PackedTiles {
  uint32_t count, per_batch;
  uint32_t even_steps, remaining_steps;  // steps per block, and how many blocks have one more, if no key is hidden from all rows
  int group;       // heads / kv_heads
  int row_blocks;  // tiles of rows per key/value head
};

// The work of one thread block: a tile of rows, and some of its keys.
struct PackedTile {
  uint32_t number;  // of the tile, over all batches
  int batch, kv_head;
  int first_row, rows;
  int visible;  // keys that at least one row sees
  int first_step, steps;
};

// The query of a row of all row tiles: row / group, as in kv_head_of.
__device__ __forceinline__ uint32_t query_of(const Params& params, uint32_t row) {
  return __umulhi(2 * row + 1, params.kv_head_factor);
}

__device__ __forceinline__ PackedTile make_packed_tile(const Params& params, const PackedTiles& tiles, int tile_rows) {
  PackedTile tile;
  tile.number = blockIdx.z * gridDim.y + blockIdx.y;
  tile.batch = tiles.count == tiles.per_batch ? 0 : tile.number / tiles.per_batch;
  const uint32_t tile_in_batch = tile.number - tile.batch * tiles.per_batch;
  tile.kv_head = tiles.row_blocks == 1 ? tile_in_batch : tile_in_batch / tiles.row_blocks;
  tile.first_row = (tile_in_batch - tile.kv_head * tiles.row_blocks) * tile_rows;
  tile.rows = min(tile_rows, params.seq_q * tiles.group - tile.first_row);
  return tile;
}

// Gives this block its part of the keys that the rows of the tile see.
__device__ __forceinline__ void divide_keys(PackedTile& tile, const Params& params, const PackedTiles& tiles) {
  tile.visible = params.seq_k;
  uint32_t even_steps = tiles.even_steps, remaining_steps = tiles.remaining_steps;
  if (params.first_diagonal < params.seq_k) {
    const int last_query = query_of(params, tile.first_row + tile.rows - 1);
    tile.visible = max(0, min(params.seq_k, params.first_diagonal + last_query));
    const uint32_t all_steps = (tile.visible + STEP_KEYS - 1) / STEP_KEYS;
    even_steps = all_steps / gridDim.x, remaining_steps = all_steps - even_steps * gridDim.x;
  }
  tile.first_step = blockIdx.x * even_steps + min(blockIdx.x, remaining_steps);
  tile.steps = even_steps + (blockIdx.x < remaining_steps ? 1 : 0);
}

// One 16-byte chunk of a row of Q; zero past the last row.
__device__ __forceinline__ uint4 load_q(const Params& params, const PackedTiles& tiles, const PackedTile& tile, int row, int chunk) {
  if (row >= tile.rows) return make_uint4(0, 0, 0, 0);
  const uint32_t query = query_of(params, tile.first_row + row), head = tile.first_row + row - query * tiles.group;
  return params.q[uint64_t(tile.batch) * params.q_strides.batch + uint64_t(tile.kv_head * tiles.group + head) * params.q_strides.head +
                  uint64_t(query) * params.q_strides.row + chunk];
}

// The queries of a tile as A fragments of a warp, in registers, or in shared memory if there is more than one row tile.  The
// columns are permuted, for Q and K alike: 16 bytes of a lane are its elements of two mma.
template <int HEAD_DIM, int ROW_TILES>
struct Queries {
  static constexpr int QUAD_CHUNKS = HEAD_DIM / 8 / QUAD;
  static constexpr bool IN_SMEM = ROW_TILES > 1;
  using Smem = uint4[IN_SMEM ? ROW_TILES * LANE_ROWS * QUAD_CHUNKS : 1][WARP];
  uint4 rmem[IN_SMEM ? 1 : LANE_ROWS][QUAD_CHUNKS];

  // Loads Q.  With IN_SMEM, the warps share the work, and other warps may read it after a barrier.
  __device__ __forceinline__ void load(const Params& params, const PackedTiles& tiles, const PackedTile& tile, Smem& smem, int warps,
                                       const Thread& thread) {
    if constexpr (IN_SMEM) {
      for (int i = thread.warp; i < ROW_TILES * LANE_ROWS * QUAD_CHUNKS; i += warps) {
        smem[i][thread.lane] =
            load_q(params, tiles, tile, i / QUAD_CHUNKS * 8 + thread.row, i % QUAD_CHUNKS * QUAD + thread.lane % QUAD);
      }
    } else {
#pragma unroll
      for (int r = 0; r < LANE_ROWS; ++r) {
#pragma unroll
        for (int j = 0; j < QUAD_CHUNKS; ++j) {
          rmem[r][j] = load_q(params, tiles, tile, r * 8 + thread.row, j * QUAD + thread.lane % QUAD);
        }
      }
    }
  }

  // The lane's chunk j of row r of a row tile.
  __device__ __forceinline__ uint4 chunk(const Smem& smem, int row_tile, int r, int j, int lane) const {
    if constexpr (IN_SMEM) {
      return smem[(row_tile * LANE_ROWS + r) * QUAD_CHUNKS + j][lane];
    } else {
      return rmem[r][j];
    }
  }
};

// The keys that this lane's rows see: a row sees those below its limit.
template <int ROW_TILES>
struct KeyLimits {
  static constexpr bool HAVE_BEGIN = false;  // whether there are keys that are too early for a row
  int least;  // of all rows of the tile
  int of_row[ROW_TILES][LANE_ROWS];

  __device__ __forceinline__ KeyLimits(const Params& params, const PackedTile& tile, const Thread& thread) : least(params.seq_k) {
#pragma unroll
    for (int t = 0; t < ROW_TILES; ++t) of_row[t][0] = of_row[t][1] = params.seq_k;
    if (params.first_diagonal < params.seq_k) {
      least = params.first_diagonal + static_cast<int>(query_of(params, tile.first_row));
#pragma unroll
      for (int t = 0; t < ROW_TILES; ++t) {
#pragma unroll
        for (int r = 0; r < LANE_ROWS; ++r) {
          const int query = query_of(params, tile.first_row + t * MMA_M + r * 8 + thread.row);
          of_row[t][r] = min(params.seq_k, params.first_diagonal + query);
        }
      }
    }
  }

  // Hides the keys of a step that the rows of a row tile do not see.
  template <typename Scores>
  __device__ __forceinline__ void mask(Scores& scores, int t, int lane_first_key) const {
    scores.mask(t, of_row[t], lane_first_key);
  }
};

}  // namespace fa

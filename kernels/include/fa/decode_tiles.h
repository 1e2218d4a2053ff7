// How the host divides a decode call into tiles of packed rows.
#pragma once

#include <algorithm>

#include "fa/decode_rows.cuh"
#include "fa_forward.h"

namespace fa {

// How a call is divided: rows into tiles, and the keys of a tile over blocks.
struct Plan {
  int64_t group, row_tiles, row_blocks, tiles_per_batch, tiles;
  bool is_wide;               // wide blocks, see decode_plan.h
  int cluster_log2, clusters;  // blocks per cluster, and clusters per tile
  int64_t vectors_per_block;  // float4 of O that each block of a cluster finishes
};

// The tiles of a call.
inline Plan make_tiles(const FaForwardArgs* args) {
  Plan plan = {};
  plan.group = args->heads / args->kv_heads;
  const int64_t rows = args->seq_q * plan.group;
  plan.row_tiles = rows > MMA_M ? 2 : 1;
  plan.row_blocks = (rows + plan.row_tiles * MMA_M - 1) / (plan.row_tiles * MMA_M);
  plan.tiles_per_batch = args->kv_heads * plan.row_blocks;
  plan.tiles = args->batch * plan.tiles_per_batch;
  plan.clusters = 1;
  return plan;
}

// Fills `params` and returns FA_OK, or refuses the call.
inline int make_decode_params(const FaForwardArgs* args, Params* params) {
  // The first query of a tile must not see more keys than there are.  Under a top-left mask, it can.
  if (args->causal == FA_CAUSAL_TOP_LEFT) return fa_refuse(args, "the top-left mask is not supported; the last query must see all keys");
  if (int status = make_params(args, MMA_M, 1, params)) return status;
  const Plan tiles = make_tiles(args);
  if (tiles.tiles <= INT32_MAX / 2 && args->seq_q * tiles.group <= INT32_MAX / 2 / tiles.group) return FA_OK;
  return fa_refuse(args, "the shape is too large: batch %lld, seq_q %lld, heads %lld", static_cast<long long>(args->batch),
                   static_cast<long long>(args->seq_q), static_cast<long long>(args->heads));
}

// What the kernel reads of a plan.
inline PackedTiles packed_tiles(const FaForwardArgs* args, const Plan& plan) {
  const int64_t all_steps = (args->seq_k + STEP_KEYS - 1) / STEP_KEYS, blocks = int64_t(plan.clusters) << plan.cluster_log2;
  return {static_cast<uint32_t>(plan.tiles),
          static_cast<uint32_t>(plan.tiles_per_batch),
          static_cast<uint32_t>(all_steps / blocks),
          static_cast<uint32_t>(all_steps % blocks),
          static_cast<int>(plan.group),
          static_cast<int>(plan.row_blocks)};
}

// The grid: the blocks of a tile in x, and the tiles in y and z.
inline dim3 grid_of(const Plan& plan) {
  const unsigned in_y = std::min<int64_t>(plan.tiles, 1 << 15), in_z = (plan.tiles + in_y - 1) / in_y;
  return dim3(static_cast<unsigned>(plan.clusters) << plan.cluster_log2, in_y, in_z);
}

}  // namespace fa

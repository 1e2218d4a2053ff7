// The parameters of kernels whose work tiles are numbered, and the host code of their launches.
#pragma once

#include <math.h>

#include <algorithm>

#include "fa/launch.h"
#include "fa/params.cuh"
#include "fa/sections.h"
#include "fa/shape.cuh"
#include "fa/tensor_map.h"
#include "fa_forward.h"

namespace fa {

struct TileParams {
  float* lse;               // [batch, heads, seq_q], or nullptr
  float scale_log2;         // |scale| * log2(e)
  float inverse_scale_log2;
  int is_negated;           // the scale is negative: S is negated
  int seq_q, seq_k;
  int first_diagonal;       // query i sees keys [0, min(seq_k, first_diagonal + i))
  int heads, batch_heads;
  int m_blocks;             // work tiles of a head
  int section_heads;        // heads whose work tiles are computed at the same time, the longest first
  int work_tiles;
  uint32_t kv_head_factor;  // about 2^31 / (heads / kv_heads), see kv_head_of
};

// The tensors of a call.
struct TensorMaps {
  CUtensorMap q, k, v, o;
};

// Fills `params` and returns FA_OK, or refuses the call.
template <typename SHAPE>
int make_tile_params(const FaForwardArgs* args, TileParams* params) {
  Params all_params;
  if (int status = make_params(args, SHAPE::BLOCK_M, 1, &all_params)) return status;
  const int64_t m_blocks = (args->seq_q + SHAPE::BLOCK_M - 1) / SHAPE::BLOCK_M, batch_heads = args->batch * args->heads;
  if (batch_heads > INT32_MAX / 4 / m_blocks) {
    return fa_refuse(args, "the shape is too large: batch %lld, heads %lld, seq_q %lld; the product of batch, heads and "
                           "seq_q / %d must be below 2^29",
                     static_cast<long long>(args->batch), static_cast<long long>(args->heads),
                     static_cast<long long>(args->seq_q), SHAPE::BLOCK_M);
  }
  const float scale_log2 = fabsf(all_params.signed_scale_log2);
  *params = {all_params.lse,
             scale_log2,
             1.0f / scale_log2,
             all_params.signed_scale_log2 < 0.0f,
             all_params.seq_q,
             all_params.seq_k,
             all_params.first_diagonal,
             static_cast<int>(args->heads),
             static_cast<int>(batch_heads),
             static_cast<int>(m_blocks),
             section_heads_of(args, 2),
             static_cast<int>(m_blocks * batch_heads),
             all_params.kv_head_factor};
  return FA_OK;
}

constexpr int PAGE_ROWS = 16;  // of a box, if keys lie in pages

// Describes K or V.  No kernel is told the number of pages, so their map has as many as fit in more memory than a GPU has.
template <typename SHAPE>
int make_key_map(CUtensorMap* map, const FaForwardArgs* args, const void* data, const FaStrides& stride) {
  constexpr int64_t MEMORY_BYTES = int64_t(1) << 40;
  FaForwardArgs all = fa_copy_args(args);
  const bool has_pages = all.features & FA_BLOCK_TABLE;
  if (has_pages) all.batch = std::min<int64_t>(INT32_MAX, MEMORY_BYTES / std::max<int64_t>(1, stride.batch * 2));
  const Box box = {has_pages ? PAGE_ROWS : SHAPE::BLOCK_N, BOX_COLUMNS};
  return make_tensor_map(map, &all, data, args->kv_heads, has_pages ? all.page_size : args->seq_k, stride, box);
}

// Fills `maps` and returns FA_OK, or refuses the call.  Boxes have the queries of a warpgroup, or the keys of a tile or PAGE_ROWS.
template <typename SHAPE>
int make_tensor_maps(const FaForwardArgs* args, TensorMaps* maps) {
  constexpr Box QUERIES = {GROUP_M, BOX_COLUMNS};
  FaForwardArgs values = fa_copy_args(args);
  if (values.head_dim_v != SHAPE::HEAD_DIM_V) {
    return fa_refuse(args, "head_dim_v is %lld, with head_dim %d it must be %d", static_cast<long long>(values.head_dim_v),
                     SHAPE::HEAD_DIM, SHAPE::HEAD_DIM_V);
  }
  values.head_dim = values.head_dim_v;
  *maps = {};
  if (int status = make_tensor_map(&maps->o, &values, args->out, args->heads, args->seq_q, args->out_stride, QUERIES)) return status;
  if (args->seq_k == 0) return FA_OK;  // the kernel reads no input
  if (int status = make_tensor_map(&maps->q, args, args->q, args->heads, args->seq_q, args->q_stride, QUERIES)) return status;
  if (int status = make_key_map<SHAPE>(&maps->k, args, args->k, args->k_stride)) return status;
  return make_key_map<SHAPE>(&maps->v, &values, args->v, args->v_stride);
}

// Allows a kernel to use `SMEM_BYTES` of shared memory per block.  Refuses one whose warpgroups would wait for registers for ever.
template <typename SHAPE, int SMEM_BYTES>
int prepare_kernel(const FaForwardArgs* args, const void* kernel) {
  static_assert(SMEM_BYTES * SHAPE::BLOCKS_PER_SM <= 227 * 1024, "an SM has 227 KB of shared memory for its blocks");
  if (int refusal = require_registers(args, kernel, SHAPE::GROUPS + 1, SHAPE::ALL_REGISTERS)) return refusal;
  return fa_allow_dynamic_smem(args, kernel, SMEM_BYTES);
}

}  // namespace fa

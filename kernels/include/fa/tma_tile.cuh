// The parameters, the work tiles and the loads of latency-bound kernels that load all of Q, K and V by TMA.
#pragma once

#include <cuda.h>
#include <stdint.h>

#include "fa/epilogue.cuh"
#include "fa/hopper.cuh"
#include "fa/params.cuh"
#include "fa/tile.cuh"

namespace fa {

// The kernel parameters other than the tensor maps.  They fit in one 64-byte line of the constant cache, because the first read
// of a line takes as long as 150 to 200 cycles.
struct TmaParams {
  uint4* out;  // [batch, heads, seq_q, head_dim] as 16-byte vectors
  float* lse;  // [batch, heads, seq_q], or nullptr
  VectorStrides out_strides;
  // 2^31 / (heads / kv_heads).  kv_head = head / (heads / kv_heads) is the upper half of (2 head + 1) * kv_head_factor, which
  // needs no division.
  uint32_t kv_head_factor;
  int seq_q, seq_k;
  int first_diagonal;       // query i sees keys [0, min(seq_k, first_diagonal + i))
  float signed_scale_log2;  // scale * log2(e)
};
static_assert(sizeof(TmaParams) == 48, "the parameters start at byte 16 of a 64-byte cache line");

inline TmaParams tma_params_of(const Params& params) {
  return {params.out,   params.lse,   params.out_strides,    params.kv_head_factor,
          params.seq_q, params.seq_k, params.first_diagonal, params.signed_scale_log2};
}

// The work of one thread block: a tile of queries of one head, and all keys that they see.
struct TmaWorkTile {
  int head, kv_head, batch;
  int first_query;
  int diagonal;  // query i of the block sees keys [0, min(seq_k, diagonal + i))
  int passes;    // number of passes over the keys that any query of the block sees
};

// The work of a block in a grid of heads x query tiles x batch, with CLUSTER blocks for each query tile of a head.
template <int TILE_QUERIES, int CLUSTER, int PASS_KEYS>
__device__ __forceinline__ TmaWorkTile make_tma_work_tile(const TmaParams& params) {
  const uint32_t head = blockIdx.x / CLUSTER;
  const int first_query = blockIdx.y * TILE_QUERIES;
  const int visible_keys = max(0, min(params.seq_k, params.first_diagonal + first_query + TILE_QUERIES - 1));
  return {
      static_cast<int>(head),
      static_cast<int>(__umulhi(2 * head + 1, params.kv_head_factor)),
      static_cast<int>(blockIdx.z),
      first_query,
      params.first_diagonal + first_query,
      (visible_keys + PASS_KEYS - 1) / PASS_KEYS,
  };
}

// Loads ROWS rows of Q, K or V of one head.  Called by one thread.
template <int HEAD_DIM, int ROWS, typename T>
__device__ __forceinline__ void load_tile(
    T* to_smem, const CUtensorMap& map, int first_row, int head, int batch, uint64_t* barrier_smem) {
#pragma unroll
  for (int d = 0; d < HEAD_DIM; d += BOX_COLUMNS) {
    cp_async_bulk_tensor_4d(to_smem + d * ROWS, map, d, first_row, head, batch, barrier_smem);
  }
}

// Stores row r of the fragments `o`, which a quad holds, and its log-sum-exp.  A row that sees no key is stored as zero and -inf.
template <typename T, int CLUSTER, int D_TILES>
__device__ __forceinline__ void store_row(const float (&o)[D_TILES][4], int r, float m, float l, const TmaParams& params,
                                          const TmaWorkTile& work, int query, int lane) {
  uint4* to_gmem =
      params.out + (uint64_t(work.batch) * params.out_strides.batch + uint64_t(work.head) * params.out_strides.head) +
      (uint64_t(query) * params.out_strides.row + lane % QUAD);
#pragma unroll
  for (int d = 0; d < D_TILES; d += QUAD) {
    uint32_t packed[QUAD];
#pragma unroll
    for (int i = 0; i < QUAD; ++i) packed[i] = cvt_rn_x2<T>(o[d + i][2 * r], o[d + i][2 * r + 1]);
    transpose_quad(packed, lane);  // so that each lane stores 16 contiguous bytes
    if (query < params.seq_q) to_gmem[d] = make_uint4(packed[0], packed[1], packed[2], packed[3]);
  }
  if (params.lse != nullptr && lane % QUAD == 0 && query < params.seq_q) {
    const uint32_t heads = gridDim.x / CLUSTER;
    float* lse_gmem = params.lse + (uint64_t(work.batch) * heads + work.head) * params.seq_q;
    lse_gmem[query] = lse_of(m, l);
  }
}

}  // namespace fa

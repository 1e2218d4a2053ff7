// The end of a work tile of a warpgroup: normalise O, store the log-sum-exp, and store O by TMA.
#pragma once

#include <math_constants.h>

#include "fa/omit.cuh"
#include "fa/shape.cuh"
#include "fa/warp.cuh"
#include "fa/warpgroup.cuh"

namespace fa {

// Whether a row of a work tile is not before the first query.
template <typename PARAMS>
__device__ __forceinline__ bool is_query(const PARAMS&, int) {
  return true;
}

// Divides a row of O by its row sum l, and stores its log-sum-exp.  A row that sees no key is zero, and its log-sum-exp is -inf.
// The lane's rows are `query` and `query` + 8.
template <int O_TILES, int TILES, typename PARAMS, typename HEAD>
__device__ __forceinline__ void normalise_row(
    float (&o)[TILES][4], int r, float l, float m_log2, const PARAMS& params, const HEAD& head, int query, int lane) {
  const float inverse_l = l == 0.0f ? 0.0f : 1.0f / l;
#pragma unroll
  for (int d = 0; d < O_TILES; ++d) o[d][2 * r] *= inverse_l, o[d][2 * r + 1] *= inverse_l;
  if (params.lse != nullptr && lane % QUAD == 0 && is_query(params, query + r * 8) && query + r * 8 < params.seq_q) {
    float* lse_gmem = params.lse + (uint64_t(head.batch) * params.heads + head.query_head) * params.seq_q;
    lse_gmem[query + r * 8] = l == 0.0f ? -CUDART_INF_F : (m_log2 + log2f(l)) * CUDART_LN2_F;
  }
}

template <int O_TILES, typename SOFTMAX, typename PARAMS, typename HEAD>
__device__ __forceinline__ void normalise(
    float (&o)[O_TILES][4], const SOFTMAX& softmax, const PARAMS& params, const HEAD& head, int query, int lane) {
#pragma unroll
  for (int r = 0; r < LANE_ROWS; ++r) {
    normalise_row<O_TILES>(o, r, sum_of_quad(softmax.l[r]), softmax.m_log2[r], params, head, query, lane);
  }
}

// Writes a warpgroup's rows of O to shared memory, in boxes of BOX_COLUMNS columns, swizzled as TMA reads them.
template <int O_TILES, typename T, int TILES>
__device__ __forceinline__ void write_o(T* o_smem, const float (&o)[TILES][4], int thread_in_group, int lane) {
#pragma unroll
  for (int d = 0; d < O_TILES; d += 2) {
    const int row = thread_in_group / WARP * MMA_M + lane % 16, column = d * MMA_N + lane / 16 * MMA_N;
    const T* to_smem =
        o_smem + column / BOX_COLUMNS * GROUP_M * BOX_COLUMNS + row * BOX_COLUMNS + (column % BOX_COLUMNS ^ row % 8 * 8);
    stmatrix_x4(smem_address(to_smem), cvt_rn_x2<T>(o[d][0], o[d][1]), cvt_rn_x2<T>(o[d][2], o[d][3]),
                cvt_rn_x2<T>(o[d + 1][0], o[d + 1][1]), cvt_rn_x2<T>(o[d + 1][2], o[d + 1][3]));
  }
  fence_proxy_async();
}

// Stores O of a warpgroup through shared memory, when the previous store has read it.  One thread gives it to TMA, which does not
// write rows past the last query.
template <auto O_WRITTEN, int O_TILES, typename T, int TILES, typename PARAMS, typename HEAD>
__device__ __forceinline__ void store_o(T* o_smem, const float (&o)[TILES][4], const CUtensorMap& o_map,
                                        const PARAMS& params, const HEAD& head, int block_query, int group, int named_barrier,
                                        int thread_in_group, int lane) {
  if (thread_in_group == 0) cp_async_bulk_wait_group_read();
  barrier_sync<GROUP_THREADS>(named_barrier);
  if (thread_in_group >= WARP) delay_if_omitted<O_WRITTEN>();
  write_o<O_TILES>(o_smem, o, thread_in_group, lane);
  sync_threads<O_WRITTEN, GROUP_THREADS>(named_barrier);
  const int first_query = block_query + group * GROUP_M;
  if (thread_in_group == 0 && is_query(params, first_query) && first_query < params.seq_q) {
#pragma unroll
    for (int d = 0; d < O_TILES * MMA_N; d += BOX_COLUMNS) {
      cp_async_bulk_tensor_4d_store(o_map, d, first_query, head.query_head, head.batch, o_smem + d * GROUP_M);
    }
    cp_async_bulk_commit_group();
  }
}

}  // namespace fa

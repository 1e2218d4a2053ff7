// O stored by the threads that computed it, in 16-byte vectors.
#pragma once

#include "fa/params.cuh"
#include "fa/ptx.cuh"
#include "fa/schedule.cuh"
#include "fa/shape.cuh"
#include "fa/warp.cuh"

namespace fa {

struct OutputRows {
  uint4* gmem;  // [batch, heads, seq_q, head_dim] as 16-byte vectors
  VectorStrides strides;
};

// For a call whose parameters make_params has accepted.
inline OutputRows output_rows_of(const FaForwardArgs* args) {
  OutputRows out = {static_cast<uint4*>(args->out), {}};
  vector_strides_of(args->out, args->out_stride, &out.strides);
  return out;
}

// Stores rows `query` and `query` + 8 of O.  The lanes of a quad exchange registers, so that each stores 16 contiguous bytes.
template <typename T, int O_TILES>
__device__ __forceinline__ void store_rows(
    const float (&o)[O_TILES][4], const OutputRows& out, const Head& head, int query, int seq_q, int lane) {
  uint4* head_gmem = out.gmem + (uint64_t(head.batch) * out.strides.batch + uint64_t(head.query_head) * out.strides.head);
#pragma unroll
  for (int r = 0; r < LANE_ROWS; ++r) {
    uint4* row_gmem = head_gmem + uint64_t(query + r * 8) * out.strides.row;
#pragma unroll
    for (int d = 0; d < O_TILES; d += QUAD) {
      uint32_t packed[QUAD];
#pragma unroll
      for (int i = 0; i < QUAD; ++i) packed[i] = cvt_rn_x2<T>(o[d + i][2 * r], o[d + i][2 * r + 1]);
      transpose_quad(packed, lane);
      if (query + r * 8 < seq_q) row_gmem[d + lane % QUAD] = make_uint4(packed[0], packed[1], packed[2], packed[3]);
    }
  }
}

}  // namespace fa

// The end of a row: its normalisation, its log-sum-exp, and its store.
#pragma once

#include <math_constants.h>
#include <stdint.h>

#include "fa/ptx.cuh"
#include "fa/tile.cuh"
#include "fa/warp.cuh"

namespace fa {

// The factor that normalises O.  A row that sees no key has l = 0 and becomes zero.
__device__ __forceinline__ float inverse_of(float l) { return l == 0.0f ? 0.0f : 1.0f / l; }

// The log-sum-exp of a row; -inf for one that sees no key.
__device__ __forceinline__ float lse_of(float m_log2, float l) {
  return l == 0.0f ? -CUDART_INF_F : (m_log2 + log2f(l)) * CUDART_LN2_F;
}

// The same for a row max before scaling.
__device__ __forceinline__ float lse_of(float m, float scale_log2, float l) {
  return l == 0.0f ? -CUDART_INF_F : (m * scale_log2 + log2f(l)) * CUDART_LN2_F;
}

// Stores row r of the fragments `o`, which a quad holds.  The lanes of a quad exchange registers, so that each stores 16 contiguous
// bytes.  All of them must call it; nothing is stored if the row is not valid.
template <typename T, int N>
__device__ __forceinline__ void store_row(uint4* row_gmem, const float (&o)[N][4], int r, int lane, bool is_valid) {
#pragma unroll
  for (int d = 0; d < N; d += QUAD) {
    uint32_t packed[QUAD];
#pragma unroll
    for (int i = 0; i < QUAD; ++i) packed[i] = cvt_rn_x2<T>(o[d + i][2 * r], o[d + i][2 * r + 1]);
    transpose_quad(packed, lane);
    if (is_valid) row_gmem[d + lane % QUAD] = make_uint4(packed[0], packed[1], packed[2], packed[3]);
  }
}

}  // namespace fa

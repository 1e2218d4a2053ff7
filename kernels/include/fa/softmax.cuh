// Online softmax on mma fragments.  `float s[N][4]` holds N tiles of eight keys; elements 2 r and 2 r + 1 of each are two adjacent
// scores in row r of this lane, r = 0 or 1.  The rows are eight apart.  A quad holds all scores of a row.
#pragma once

#include <math_constants.h>
#include <stdint.h>

#include "fa/ptx.cuh"
#include "fa/tile.cuh"
#include "fa/warp.cuh"

namespace fa {

template <int N>
__device__ __forceinline__ void negate(float (&s)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[n][i] = -s[n][i];
  }
}

// Hides the keys that the rows of a tile do not see.  `row_diagonal` is the number of keys before the diagonal in row 0.
template <int N>
__device__ __forceinline__ void mask(float (&s)[N][4], int seq_k, int row_diagonal, int first_key, int lane) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int limit = min(seq_k, row_diagonal + i / 2 * 8) - first_key;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if (n * MMA_N + lane % QUAD * 2 + i % 2 >= limit) s[n][i] = -CUDART_INF_F;
    }
  }
}

// The same, with the signs of all scores flipped if `is_negated`.
template <int N>
__device__ __forceinline__ void negate_and_mask(
    float (&s)[N][4], bool is_negated, int seq_k, int row_diagonal, int first_key, int lane) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int limit = min(seq_k, row_diagonal + i / 2 * 8) - first_key;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if (is_negated) s[n][i] = -s[n][i];
      if (n * MMA_N + lane % QUAD * 2 + i % 2 >= limit) s[n][i] = -CUDART_INF_F;
    }
  }
}

// Returns the maximum of m and of row r, to all lanes of the quad.
template <int N>
__device__ __forceinline__ float max_of_row(const float (&s)[N][4], int r, float m) {
#pragma unroll
  for (int n = 0; n < N; ++n) m = fmaxf(m, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
  return max_of_quad(m);
}

// The row max in log2, as P = exp2(S - m) needs it: 0 for a row that has seen no key, so that P is exp2(-inf - 0) = 0.
__device__ __forceinline__ float finite_log2(float m, float scale_log2) { return m == -CUDART_INF_F ? 0.0f : m * scale_log2; }

// Finds the new row max of both rows.  Returns whether P would exceed the threshold without a rescale.  If only m is -inf, the
// difference is inf and the comparison true.  If both are, it is NaN and the comparison false.
template <int N>
__device__ __forceinline__ bool max_of_rows(float (&m_new)[2], const float (&s)[N][4], const float (&m)[2], float scale_log2) {
  bool needs_rescale = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    m_new[r] = m[r];
#pragma unroll
    for (int n = 0; n < N; ++n) m_new[r] = fmaxf(m_new[r], fmaxf(s[n][2 * r], s[n][2 * r + 1]));
    m_new[r] = max_of_quad(m_new[r]);
    needs_rescale |= (m_new[r] - m[r]) * scale_log2 > RESCALE_THRESHOLD_LOG2;
  }
  return needs_rescale;
}

template <int N>
__device__ __forceinline__ void scale_row(float (&o)[N][4], int r, float factor) {
#pragma unroll
  for (int d = 0; d < N; ++d) {
    o[d][2 * r] *= factor;
    o[d][2 * r + 1] *= factor;
  }
}

// Replaces the row max m by m_new, and rescales O and the row sum l.
template <int N>
__device__ __forceinline__ void rescale(float (&o)[N][4], float (&m)[2], float (&l)[2], const float (&m_new)[2], float scale_log2) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float m_log2 = finite_log2(m_new[r], scale_log2);
    const float factor = ex2_approx_ftz(m[r] * scale_log2 - m_log2);
    m[r] = m_new[r];
    l[r] *= factor;
    scale_row(o, r, factor);
  }
}

// P = exp2(S - m) of the tiles n and n + 1, which form one A fragment, and the row sum l of this lane.
template <typename T, int N>
__device__ __forceinline__ void exp2_fragment(
    uint32_t (&p)[4], const float (&s)[N][4], int n, float scale_log2, const float (&m_log2)[2], float (&l)[2]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = i % 2;
    const float p0 = ex2_approx_ftz(s[n + i / 2][2 * r] * scale_log2 - m_log2[r]);
    const float p1 = ex2_approx_ftz(s[n + i / 2][2 * r + 1] * scale_log2 - m_log2[r]);
    l[r] += p0 + p1;
    p[i] = cvt_rn_x2<T>(p0, p1);
  }
}

}  // namespace fa

// The running softmax of a warp on wgmma fragments.  A lane holds rows r and r + 8 of a tile; a quad of lanes shares them.
#pragma once

#include <float.h>
#include <math_constants.h>

#include "fa/ptx.cuh"
#include "fa/shape.cuh"
#include "fa/warp.cuh"

namespace fa {

// Hides the scores of keys from `limit` on, and negates all scores if the scale is negative.
template <int S_TILES, typename PARAMS>
__device__ __forceinline__ void mask(float (&s)[S_TILES][4], const PARAMS& params, int query, int first_key, int lane) {
  if (params.is_negated) {
#pragma unroll
    for (int n = 0; n < S_TILES; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] = -s[n][i];
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int limit = min(params.seq_k, params.first_diagonal + query + i / 2 * 8) - first_key - lane % QUAD * 2 - i % 2;
#pragma unroll
    for (int n = 0; n < S_TILES; ++n) {
      if (n * MMA_N >= limit) s[n][i] = -CUDART_INF_F;
    }
  }
}

// The running softmax of a lane's rows.
struct OnlineSoftmax {
  float m_log2[LANE_ROWS];  // m * scale_log2; -FLT_MAX before the first key
  float limit[LANE_ROWS];   // scores above this need a new m
  float l[LANE_ROWS];       // this lane's part of the row sum
  float rescale[LANE_ROWS];

  __device__ __forceinline__ OnlineSoftmax() {
#pragma unroll
    for (int r = 0; r < LANE_ROWS; ++r) m_log2[r] = -FLT_MAX, l[r] = 0.0f;
  }

  // Returns this lane's maximum of a row, as a tree reduction, which has a shorter dependency chain than a loop.
  template <int S_TILES>
  static __device__ __forceinline__ float max_of_lane(const float (&s)[S_TILES][4], int r) {
    float partial[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) partial[n] = fmaxf(s[n][2 * r], s[n][2 * r + 1]);
#pragma unroll
    for (int n = 4; n < S_TILES; ++n) partial[n % 4] = fmaxf(partial[n % 4], fmaxf(s[n][2 * r], s[n][2 * r + 1]));
    return fmaxf(fmaxf(partial[0], partial[1]), fmaxf(partial[2], partial[3]));
  }

  // Sets m of a row to the maximum of m and the scores of the whole row, and l and `rescale` accordingly.
  template <int S_TILES>
  __device__ __forceinline__ void raise_m_of_row(const float (&s)[S_TILES][4], int r, float scale_log2, float inverse_scale_log2) {
    const float m_new_log2 = fmaxf(m_log2[r], max_of_quad(max_of_lane(s, r)) * scale_log2);
    rescale[r] = ex2_approx_ftz(m_log2[r] - m_new_log2);
    l[r] *= rescale[r];
    m_log2[r] = m_new_log2;
    limit[r] = (m_new_log2 + RESCALE_THRESHOLD_LOG2) * inverse_scale_log2;
  }

  template <int S_TILES>
  __device__ __forceinline__ void raise_m(const float (&s)[S_TILES][4], float scale_log2, float inverse_scale_log2) {
#pragma unroll
    for (int r = 0; r < LANE_ROWS; ++r) raise_m_of_row(s, r, scale_log2, inverse_scale_log2);
  }

  // Raises m if any score of the warp is above its limit.  No lane needs the maximum of another one for that.
  template <int S_TILES>
  __device__ __forceinline__ bool raise_m_if_needed(const float (&s)[S_TILES][4], float scale_log2, float inverse_scale_log2) {
    bool is_above = false;
#pragma unroll
    for (int r = 0; r < LANE_ROWS; ++r) is_above |= max_of_lane(s, r) > limit[r];
    const bool is_raised = __any_sync(0xffffffffu, is_above);
    if (is_raised) raise_m(s, scale_log2, inverse_scale_log2);
    return is_raised;
  }

  // P = exp2(S - m), in place, and the row sum.
  template <int S_TILES>
  __device__ __forceinline__ void exponentials(float (&s)[S_TILES][4], float scale_log2) {
#pragma unroll
    for (int n = 0; n < S_TILES; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[n][i] = ex2_approx_ftz(s[n][i] * scale_log2 - m_log2[i / 2]);
        l[i / 2] += s[n][i];
      }
    }
  }

  // Multiplies the rows of O after m was raised.
  template <int O_TILES>
  __device__ __forceinline__ void rescale_rows(float (&o)[O_TILES][4]) const {
#pragma unroll
    for (int d = 0; d < O_TILES; ++d) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o[d][i] *= rescale[i / 2];
    }
  }
};

// Rounds P to the input's dtype.  Two adjacent accumulator fragments form one A fragment.
template <typename T, int S_TILES>
__device__ __forceinline__ void round_p(uint32_t (&p)[S_TILES / 2][4], const float (&s)[S_TILES][4]) {
#pragma unroll
  for (int n = 0; n < S_TILES; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) p[n / 2][n % 2 * 2 + i] = cvt_rn_x2<T>(s[n][2 * i], s[n][2 * i + 1]);
  }
}

}  // namespace fa

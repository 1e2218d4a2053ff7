// The softmax of the e4m3 kernels, on the accumulator fragments of a warpgroup.
#pragma once

#include <float.h>
#include <math_constants.h>

#include "fa/e4m3_schedule.cuh"
#include "fa/fragment.cuh"
#include "fa/ptx.cuh"
#include "fa/warp.cuh"

namespace fa {

constexpr int E4M3_MMA_K = 32;  // the depth of an mma in e4m3

// How the row max is computed: with floats, or with integers, three at a time.
enum RowMax { FLOATS, INTEGERS };

// The running softmax of a lane's rows.  P is 2^P_SCALE_LOG2 at the row max, and O is rescaled only where P would exceed 2^4 times that: e4m3 holds numbers from 2^-9 to 448.
template <RowMax ROW_MAX_KIND, int P_SCALE>
struct Softmax {
  static constexpr float P_SCALE_LOG2 = P_SCALE, RESCALE_THRESHOLD_LOG2 = 4.0f;
  float m_log2[LANE_ROWS];  // m * scale_log2 - P_SCALE_LOG2, so that P and l are scaled; -FLT_MAX before the first key
  float limit[LANE_ROWS];   // scores above this need a new m; as an integer if ROW_MAX_KIND == INTEGERS
  float l[LANE_ROWS];
  float rescale[LANE_ROWS];

  __device__ __forceinline__ Softmax() {
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

  // The same for integers, three at a time.  Integers order positive floats like floats.
  template <int S_TILES>
  static __device__ __forceinline__ int max_of_lane_bits(const float (&s)[S_TILES][4], int r) {
    int partial[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) partial[n] = max(__float_as_int(s[n][2 * r]), __float_as_int(s[n][2 * r + 1]));
#pragma unroll
    for (int n = 4; n < S_TILES; ++n) {
      partial[n % 4] = __vimax3_s32(partial[n % 4], __float_as_int(s[n][2 * r]), __float_as_int(s[n][2 * r + 1]));
    }
    return max(__vimax3_s32(partial[0], partial[1], partial[2]), partial[3]);
  }

  // Sets m to the maximum of m and the scores of the whole row, and l and `rescale` accordingly.
  template <int S_TILES>
  __device__ __forceinline__ void raise_m(const float (&s)[S_TILES][4], const Scale& scale) {
#pragma unroll
    for (int r = 0; r < LANE_ROWS; ++r) {
      const float m_new_log2 = fmaxf(m_log2[r], fa::max_of_quad(max_of_lane(s, r)) * scale.log2 - P_SCALE_LOG2);
      rescale[r] = fa::ex2_approx_ftz(m_log2[r] - m_new_log2);
      l[r] *= rescale[r];
      m_log2[r] = m_new_log2;
      limit[r] = (m_new_log2 + (P_SCALE_LOG2 + RESCALE_THRESHOLD_LOG2)) * scale.inverse_log2;
      // Integers order negative floats in reverse.  Below zero, every tile therefore takes the exact path.
      if (ROW_MAX_KIND == INTEGERS && !(limit[r] >= 0.0f)) limit[r] = __int_as_float(INT32_MIN);
    }
  }

  // Raises m if any score of the warp is above its limit.  No lane needs the maximum of another one for that.
  template <int S_TILES>
  __device__ __forceinline__ bool raise_m_if_needed(const float (&s)[S_TILES][4], const Scale& scale) {
    bool is_above = false;
#pragma unroll
    for (int r = 0; r < LANE_ROWS; ++r) {
      if constexpr (ROW_MAX_KIND == INTEGERS) {
        is_above |= max_of_lane_bits(s, r) > __float_as_int(limit[r]);
      } else {
        is_above |= max_of_lane(s, r) > limit[r];
      }
    }
    const bool is_raised = __any_sync(0xffffffffu, is_above);
    if (is_raised) raise_m(s, scale);
    return is_raised;
  }
};

// Hides the scores of keys that a query does not see, and negates all scores if the factor is negative.
template <int S_TILES>
__device__ __forceinline__ void mask(
    float (&s)[S_TILES][4], const E4m3Params& params, bool is_negated, int query, int first_key, int lane) {
  if (is_negated) {
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

// P = exp2(S - m), and the row sum unless P V computes it; of the 8-key tiles from FIRST to END, or of all.
template <bool ADDS_UP, int FIRST = 0, int END = INT32_MAX, int S_TILES, typename SOFTMAX>
__device__ __forceinline__ void exponentials(float (&s)[S_TILES][4], SOFTMAX& softmax, float scale_log2) {
#pragma unroll
  for (int n = FIRST; n < (END < S_TILES ? END : S_TILES); ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[n][i] = ex2_approx_ftz(s[n][i] * scale_log2 - softmax.m_log2[i / 2]);
      if (ADDS_UP) softmax.l[i / 2] += s[n][i];
    }
  }
}

}  // namespace fa

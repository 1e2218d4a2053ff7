// The running softmax with the row max in integers.
#pragma once

#include "fa/online_softmax.cuh"

namespace fa {

// Compares scores as integers, three at a time.  Integers order positive floats like floats, and negative ones in reverse.
struct IntegerSoftmax : OnlineSoftmax {
  // Returns this lane's maximum of a row, if it is positive.
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

  // Below zero, every tile takes the exact path: all scores are above the least integer.
  template <int S_TILES>
  __device__ __forceinline__ void raise_m(const float (&s)[S_TILES][4], float scale_log2, float inverse_scale_log2) {
#pragma unroll
    for (int r = 0; r < LANE_ROWS; ++r) {
      raise_m_of_row(s, r, scale_log2, inverse_scale_log2);
      if (!(limit[r] >= 0.0f)) limit[r] = __int_as_float(INT32_MIN);
    }
  }

  template <int S_TILES>
  __device__ __forceinline__ bool raise_m_if_needed(const float (&s)[S_TILES][4], float scale_log2, float inverse_scale_log2) {
    bool is_above = false;
#pragma unroll
    for (int r = 0; r < LANE_ROWS; ++r) is_above |= max_of_lane_bits(s, r) > __float_as_int(limit[r]);
    const bool is_raised = __any_sync(0xffffffffu, is_above);
    if (is_raised) raise_m(s, scale_log2, inverse_scale_log2);
    return is_raised;
  }
};

}  // namespace fa

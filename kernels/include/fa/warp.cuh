// Warp operations on mma fragments.  A quad, four successive lanes, shares a row of a fragment.
#pragma once

#include <stdint.h>

namespace fa {

// Returns the maximum of x over the quad, to all four lanes.
__device__ __forceinline__ float max_of_quad(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// Returns the sum of x over the quad, to all four lanes.
__device__ __forceinline__ float sum_of_quad(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Transposes a 4x4 matrix over the quad: x[j] of lane i moves to x[i] of lane j.  Four rows of 16 bytes that are spread over
// the lanes become one row per lane.
__device__ __forceinline__ void transpose_quad(uint32_t (&x)[4], int lane) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool is_upper = lane & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const uint32_t received = __shfl_xor_sync(0xffffffffu, is_upper ? x[i] : x[i + step], step);
      x[i] = is_upper ? received : x[i];
      x[i + step] = is_upper ? x[i + step] : received;
    }
  }
}

}  // namespace fa

// Textbook operations of a warp whose lanes hold mma fragments: four lanes in a row, a quad, share a row.
#pragma once

#include <stdint.h>

namespace fa {

__device__ __forceinline__ float max_of_quad(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float sum_of_quad(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Lane i of a quad gives x[j] to lane j, which keeps it in x[i]: four rows of 16 bytes, cut across the lanes, become whole.
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

// What takes the place of a phase that an ablation omits.  A reader of a kernel may skip it.
#pragma once

#include <stdint.h>

#include "fa/ptx.cuh"
#include "fa/tile.cuh"

namespace fa {

// Without softmax, P is S: the A fragment of the tiles n and n + 1.
template <typename T, int N>
__device__ __forceinline__ void round_fragment(uint32_t (&p)[4], const float (&s)[N][4], int n) {
#pragma unroll
  for (int i = 0; i < 4; ++i) p[i] = cvt_rn_x2<T>(s[n + i / 2][2 * (i % 2)], s[n + i / 2][2 * (i % 2) + 1]);
}

// Without P V, uses P, so that the compiler does not remove its computation.
__device__ __forceinline__ void keep_p(uint32_t& sink, const uint32_t (&p)[4]) { sink ^= p[0] ^ p[1] ^ p[2] ^ p[3]; }

}  // namespace fa

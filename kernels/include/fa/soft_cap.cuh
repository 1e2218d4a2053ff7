// Soft caps on the scores of a tile.
#pragma once

#include <algorithm>
#include <math.h>
#include <math_constants.h>

#include "fa/ptx.cuh"
#include "fa_forward.h"

namespace fa {

// Returns tanh(x), also of a small x with a small relative error.
__device__ __forceinline__ float tanh_of(float x) {
  constexpr float SMALL = 0.1f;
  const float square = x * x, of_small = x + x * square * (square * (2.0f / 15) - 1.0f / 3);
  const float of_large = 1.0f - __fdividef(2.0f, ex2_approx_ftz(2.0f * CUDART_L2E_F * x) + 1.0f);
  return fabsf(x) < SMALL ? of_small : of_large;
}

// Replaces the scores by tanh(scale / soft cap * score), if there is a soft cap, which then is their scale.
template <int S_TILES, typename PARAMS>
__device__ __forceinline__ void cap_scores(float (&s)[S_TILES][4], const PARAMS& params) {
  if (params.cap_factor == 0.0f) return;
#pragma unroll
  for (int n = 0; n < S_TILES; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[n][i] = tanh_of(params.cap_factor * s[n][i]);
  }
}

// Sets the factor of a call, 0 without a soft cap, and the scale of its scores.
template <typename PARAMS>
void set_cap(const FaForwardArgs& args, PARAMS* params) {
  constexpr float MAX_FACTOR = 1e30f, MAX_CAP = 1e38f;  // times zero, they are zero, and MAX_CAP * log2(e) is finite
  params->cap_factor = 0.0f;
  if (!(args.features & FA_SOFTCAP) || args.scale == 0.0f) return;
  const float cap = std::min(fabsf(args.softcap), MAX_CAP);
  params->cap_factor = std::clamp(args.scale / cap, -MAX_FACTOR, MAX_FACTOR);
  params->scale_log2 = cap * CUDART_L2E_F;
  params->inverse_scale_log2 = 1.0f / params->scale_log2;
  params->is_negated = false;
}

}  // namespace fa

// An attention sink: one more score of each row, without a value.
#pragma once

#include "fa/integer_softmax.cuh"

namespace fa {

// Adds the sink to the row sums.  O is rescaled only if the sink is far above a row max of the warp.  IS_IN_MAX is false only in a
// planted fault.
template <bool IS_IN_MAX, int O_TILES>
__device__ __forceinline__ void add_sink(float (&o)[O_TILES][4], IntegerSoftmax& softmax, float sink_log2, int lane) {
  static_assert(LANE_ROWS == 2);
  constexpr float MAX_ABOVE_LOG2 = 64.0f;  // row sums up to 2^64 and their inverses are as exact as smaller ones
  if (!__any_sync(0xffffffffu, sink_log2 > fminf(softmax.m_log2[0], softmax.m_log2[1]) + MAX_ABOVE_LOG2)) {
#pragma unroll
    for (int r = 0; r < LANE_ROWS; ++r) softmax.l[r] += lane % QUAD == 0 ? ex2_approx_ftz(sink_log2 - softmax.m_log2[r]) : 0.0f;
    return;
  }
#pragma unroll
  for (int r = 0; r < LANE_ROWS; ++r) {
    const float m_new_log2 = IS_IN_MAX ? fmaxf(softmax.m_log2[r], sink_log2) : softmax.m_log2[r];
    softmax.rescale[r] = exp2f(softmax.m_log2[r] - m_new_log2);  // may be subnormal, as an output in bf16 may be
    softmax.l[r] = softmax.l[r] * softmax.rescale[r] + (lane % QUAD == 0 ? exp2f(sink_log2 - m_new_log2) : 0.0f);
    softmax.m_log2[r] = m_new_log2;
  }
  softmax.rescale_rows(o);
}

}  // namespace fa

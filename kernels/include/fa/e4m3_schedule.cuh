// The parameters of the persistent e4m3 kernels, and the factors of a head.
#pragma once

#include <float.h>
#include <stdint.h>

#include "fa/schedule.cuh"

namespace fa {

// What the kernel reads besides the tensor maps.
struct E4m3Params {
  float* lse;               // [batch, heads, seq_q], or nullptr
  const float *q_descale, *k_descale, *v_descale;  // [batch, heads], [batch, kv_heads], [batch, kv_heads]
  float signed_scale_log2;  // scale * log2(e), without descales
  int seq_q, seq_k;
  int first_diagonal;       // query i sees keys [0, min(seq_k, first_diagonal + i))
  int heads, kv_heads, batch_heads;
  int m_blocks;             // work tiles of a head
  int section_heads;        // heads whose work tiles are computed at the same time, the longest first
  int work_tiles;
  uint32_t kv_head_factor;  // about 2^31 / (heads / kv_heads), so that a head of K is a multiplication and no division
};

// The factors of a head's scores and of its output.
struct Scale {
  float log2, inverse_log2;  // |scale * descale of Q * descale of K| * log2(e), and its inverse
  bool is_negated;           // the factor is negative: S is negated
  float v_descale;
};

// Reads the descales of a head.  A factor of zero, as for a head of zeros, becomes FLT_MIN: all keys still get equal weights, and
// -inf times the factor stays -inf.  With IS_NEXT_V, which is wrong, the descale of V is that of the next head.
template <bool IS_NEXT_V>
__device__ __forceinline__ Scale make_scale(const E4m3Params& params, const Head& head) {
  const int kv_index = head.batch * params.kv_heads + head.kv_head;
  const int v_index = !IS_NEXT_V ? kv_index : head.batch * params.kv_heads + (head.kv_head + 1) % params.kv_heads;
  const float q_descale = __ldg(params.q_descale + head.batch * params.heads + head.query_head);
  const float factor = params.signed_scale_log2 * (q_descale * __ldg(params.k_descale + kv_index));
  const float log2 = fabsf(factor) < FLT_MIN ? FLT_MIN : fabsf(factor);
  return {log2, 1.0f / log2, factor < 0.0f, __ldg(params.v_descale + v_index)};
}

}  // namespace fa

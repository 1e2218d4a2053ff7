// A call as a latency-bound kernel wants it: few bytes of parameters, since a block misses the constant cache for every 64 that
// it reads; strides in 16 bytes and 32 bits, so that an address is one multiply-add; no division on the device.
#pragma once

#include <cuda_runtime_api.h>
#include <float.h>
#include <math.h>
#include <math_constants.h>
#include <stddef.h>
#include <stdint.h>

#include "fa_forward.h"

namespace fa {

struct VectorStrides {
  uint32_t row, head, batch;  // in 16 bytes
};

struct Params {
  // What K and V are loaded by, in the first line: the second comes while they do.
  const uint4 *k, *v;  // [batch, kv_heads, seq_k, head_dim] in 16 bytes
  VectorStrides k_strides, v_strides;
  uint32_t kv_head_factor;  // kv_head = (2 head + 1) kv_head_factor / 2^32
  int seq_k;

  const uint4* q;  // [batch, heads, seq_q, head_dim] in 16 bytes
  uint4* out;
  float* lse;
  VectorStrides q_strides, out_strides;
  uint32_t heads;
  int seq_q;
  int first_diagonal;       // query i sees keys [0, min(seq_k, first_diagonal + i))
  float signed_scale_log2;  // exp(x) = 2^(x log2 e)
};
static_assert(offsetof(Params, q) == 48 && sizeof(Params) == 112, "parameters begin 16 bytes into a line of 64");

__device__ __forceinline__ uint32_t kv_head_of(const Params& params, uint32_t head) {
  return __umulhi(2 * head + 1, params.kv_head_factor);
}

// The scale's sign goes to Q, so that the largest score is the largest product.
__device__ __forceinline__ float scale_log2_of(const Params& params) { return fabsf(params.signed_scale_log2); }
__device__ __forceinline__ bool negate_q(const Params& params) { return params.signed_scale_log2 < 0.0f; }
__device__ __forceinline__ uint32_t q_sign_bits(const Params& params) { return negate_q(params) ? 0x80008000u : 0u; }

// Fills `steps`; false where 16-byte copies cannot walk the tensor's rows.
inline bool vector_strides_of(const void* data, const FaStrides& stride, VectorStrides* steps) {
  const int64_t any = stride.batch | stride.head | stride.seq;
  *steps = {static_cast<uint32_t>(stride.seq / 8), static_cast<uint32_t>(stride.head / 8), static_cast<uint32_t>(stride.batch / 8)};
  return stride.dim == 1 && any % 8 == 0 && any >> 35 == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0;
}

// Fills `call`, or refuses.  `queries` is what one block in the grid's second dimension works on.
inline int make_params(const FaForwardArgs* args, int queries, int blocks_per_head, Params* params) {
  const bool aligned =
      vector_strides_of(args->q, args->q_stride, &params->q_strides) && vector_strides_of(args->k, args->k_stride, &params->k_strides) &&
      vector_strides_of(args->v, args->v_stride, &params->v_strides) && vector_strides_of(args->out, args->out_stride, &params->out_strides);
  if (!aligned) {
    return fa_refuse(args, "rows of q, k, v and out must be contiguous, start at multiples of 16 bytes, with strides below 2^35");
  }
  const int64_t group = args->heads / args->kv_heads;
  const bool fits = args->heads * group < INT32_MAX / 2 / blocks_per_head && args->batch <= UINT16_MAX &&
                    args->seq_q <= int64_t(UINT16_MAX) * queries && args->seq_k <= INT32_MAX / 2;
  if (!fits) {
    return fa_refuse(args, "batch %lld, heads %lld or seq_q %lld is over the grid, or seq_k %lld over 2^30",
                     static_cast<long long>(args->batch), static_cast<long long>(args->heads),
                     static_cast<long long>(args->seq_q), static_cast<long long>(args->seq_k));
  }
  params->k = static_cast<const uint4*>(args->k);
  params->v = static_cast<const uint4*>(args->v);
  params->q = static_cast<const uint4*>(args->q);
  params->out = static_cast<uint4*>(args->out);
  params->lse = args->lse;
  params->kv_head_factor = static_cast<uint32_t>(((int64_t(1) << 31) + group - 1) / group);
  params->seq_q = static_cast<int>(args->seq_q);
  params->seq_k = static_cast<int>(args->seq_k);
  const int shift = args->causal == FA_CAUSAL_BOTTOM_RIGHT ? params->seq_k - params->seq_q : 0;
  params->first_diagonal = args->causal == FA_CAUSAL_NONE ? INT32_MAX / 2 : shift + 1;
  // A scale of zero becomes tiny, which weighs all keys alike and still takes -inf to -inf.
  params->signed_scale_log2 = args->scale == 0.0f ? FLT_MIN : args->scale * CUDART_L2E_F;
  params->heads = static_cast<uint32_t>(args->heads);
  return FA_OK;
}

}  // namespace fa

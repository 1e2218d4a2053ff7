// Kernel parameters for latency-bound kernels.  They are small, because a block has a constant-cache miss for every 64 bytes
// that it reads.  Strides are 32-bit and count 16-byte vectors, so an address is one multiply-add.  The device needs no
// division.
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
  uint32_t row, head, batch;  // in units of 16 bytes
};

struct Params {
  // First cache line: what the loads of K and V need.  The miss on the second line overlaps with these loads.
  const uint4 *k, *v;  // [batch, kv_heads, seq_k, head_dim] as 16-byte vectors
  VectorStrides k_strides, v_strides;
  uint32_t kv_head_factor;  // about 2^31 / (heads / kv_heads), see kv_head_of
  int seq_k;

  const uint4* q;  // [batch, heads, seq_q, head_dim] as 16-byte vectors
  uint4* out;
  float* lse;
  VectorStrides q_strides, out_strides;
  uint32_t heads;
  int seq_q;
  int first_diagonal;       // query i sees keys [0, min(seq_k, first_diagonal + i))
  float signed_scale_log2;  // scale * log2(e), for exp2
};
static_assert(offsetof(Params, q) == 48 && sizeof(Params) == 112, "the parameters start at byte 16 of a 64-byte cache line");

// head / (heads / kv_heads), as the high word of a product: (2 head + 1) kv_head_factor / 2^32.
__device__ __forceinline__ uint32_t kv_head_of(const Params& params, uint32_t head) {
  return __umulhi(2 * head + 1, params.kv_head_factor);
}

// The sign of the scale is applied to Q, so a kernel can find the largest score first and then multiply by the scale's magnitude.
__device__ __forceinline__ float scale_log2_of(const Params& params) { return fabsf(params.signed_scale_log2); }
__device__ __forceinline__ bool negate_q(const Params& params) { return params.signed_scale_log2 < 0.0f; }
__device__ __forceinline__ uint32_t q_sign_bits(const Params& params) { return negate_q(params) ? 0x80008000u : 0u; }

// Fills `strides`.  Returns false if the rows of the tensor cannot be accessed with aligned 16-byte copies.
inline bool vector_strides_of(const void* data, const FaStrides& stride, VectorStrides* strides) {
  // The bitwise OR of the strides is divisible by a power of two if and only if every stride is.
  const int64_t strides_or = stride.batch | stride.head | stride.seq;
  *strides = {static_cast<uint32_t>(stride.seq / 8), static_cast<uint32_t>(stride.head / 8), static_cast<uint32_t>(stride.batch / 8)};
  return stride.dim == 1 && strides_or % 8 == 0 && strides_or >> 35 == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0;
}

// Fills `params` and returns FA_OK, or refuses the call.  The grid has `blocks_per_head` blocks per head in x, and one block
// per `block_queries` queries in y.
inline int make_params(const FaForwardArgs* args, int block_queries, int blocks_per_head, Params* params) {
  const bool aligned =
      vector_strides_of(args->q, args->q_stride, &params->q_strides) && vector_strides_of(args->k, args->k_stride, &params->k_strides) &&
      vector_strides_of(args->v, args->v_stride, &params->v_strides) && vector_strides_of(args->out, args->out_stride, &params->out_strides);
  if (!aligned) {
    return fa_refuse(args, "rows of q, k, v and out must be contiguous and start at multiples of 16 bytes; "
                           "strides must be below 2^35 elements");
  }
  const int64_t heads_per_kv_head = args->heads / args->kv_heads;
  const bool fits = args->heads * heads_per_kv_head < INT32_MAX / 2 / blocks_per_head && args->batch <= UINT16_MAX &&
                    args->seq_q <= int64_t(UINT16_MAX) * block_queries && args->seq_k <= INT32_MAX / 2;
  if (!fits) {
    return fa_refuse(args, "the shape is too large: batch %lld (at most %d), heads * heads / kv_heads %lld (below %d), "
                           "seq_q %lld (at most %d), seq_k %lld (below 2^30)",
                     static_cast<long long>(args->batch), UINT16_MAX, static_cast<long long>(args->heads * heads_per_kv_head),
                     INT32_MAX / 2 / blocks_per_head, static_cast<long long>(args->seq_q), UINT16_MAX * block_queries,
                     static_cast<long long>(args->seq_k));
  }
  params->k = static_cast<const uint4*>(args->k);
  params->v = static_cast<const uint4*>(args->v);
  params->q = static_cast<const uint4*>(args->q);
  params->out = static_cast<uint4*>(args->out);
  params->lse = args->lse;
  params->kv_head_factor = static_cast<uint32_t>(((int64_t(1) << 31) + heads_per_kv_head - 1) / heads_per_kv_head);
  params->seq_q = static_cast<int>(args->seq_q);
  params->seq_k = static_cast<int>(args->seq_k);
  const int shift = args->causal == FA_CAUSAL_BOTTOM_RIGHT ? params->seq_k - params->seq_q : 0;
  params->first_diagonal = args->causal == FA_CAUSAL_NONE ? INT32_MAX / 2 : shift + 1;
  // A scale of zero becomes FLT_MIN: all keys still get equal weights, and -inf * scale stays -inf.
  params->signed_scale_log2 = args->scale == 0.0f ? FLT_MIN : args->scale * CUDART_L2E_F;
  params->heads = static_cast<uint32_t>(args->heads);
  return FA_OK;
}

}  // namespace fa

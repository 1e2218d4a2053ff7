// minimal: one thread computes one query row, with an online softmax in fp32, straight from global memory.
// step:    the smallest correct kernel
// because: the ladder needs a first rung without tiles, shared memory or barriers that could be wrong
// expect:  correct everywhere; hundreds of microseconds at the target shape (1x8x512x64), because 4096 rows fill only 32 of
//          132 SMs
// tile:    1 query x 1 key per thread, BLOCK_THREADS rows per block; 0 bytes of shared memory
// takes:   fp16 and bf16, or fp32 (minimal_fp32), D = 64, any S_q >= 1 and S_kv >= 0, any strides, grouped heads, top-left and bottom-right causal
//          masks
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#include "fa_forward.h"
#include "fa_instantiations.h"  // FA_FOR_EACH_INSTANTIATION: the manifest's dtypes and head_dims

#ifndef BLOCK_THREADS
#define BLOCK_THREADS 128
#endif
static_assert(BLOCK_THREADS % 32 == 0 && BLOCK_THREADS <= 1024, "a block must be a whole number of warps and at most 1024 threads");

using fp16 = __half;
using bf16 = __nv_bfloat16;
using fp32 = float;

__device__ __forceinline__ float to_float(fp16 x) { return __half2float(x); }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(fp32 x) { return x; }
__device__ __forceinline__ void from_float(fp16* x, float value) { *x = __float2half_rn(value); }
__device__ __forceinline__ void from_float(bf16* x, float value) { *x = __float2bfloat16_rn(value); }
__device__ __forceinline__ void from_float(fp32* x, float value) { *x = value; }

// Returns how many keys query `row` sees: all, or those up to the causal diagonal.  The diagonal is aligned to the top-left or
// to the bottom-right corner of S.
__device__ __forceinline__ int64_t count_visible_keys(const FaForwardArgs& args, int64_t row) {
  if (args.causal == FA_CAUSAL_NONE) return args.seq_k;
  const int64_t shift = args.causal == FA_CAUSAL_TOP_LEFT ? 0 : args.seq_k - args.seq_q;
  return max(int64_t(0), min(args.seq_k, row + 1 + shift));
}

template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(BLOCK_THREADS) minimal_kernel(const FaForwardArgs args) {
  const int64_t row_of_all_heads = int64_t(blockIdx.x) * BLOCK_THREADS + threadIdx.x;
  if (row_of_all_heads >= args.batch * args.heads * args.seq_q) return;
  const int64_t row = row_of_all_heads % args.seq_q;
  const int64_t head = row_of_all_heads / args.seq_q % args.heads;
  const int64_t batch = row_of_all_heads / args.seq_q / args.heads;
  const int64_t kv_head = head / (args.heads / args.kv_heads);
  const T* q_gmem = static_cast<const T*>(args.q) + batch * args.q_stride.batch + head * args.q_stride.head + row * args.q_stride.seq;
  const T* k_gmem = static_cast<const T*>(args.k) + batch * args.k_stride.batch + kv_head * args.k_stride.head;
  const T* v_gmem = static_cast<const T*>(args.v) + batch * args.v_stride.batch + kv_head * args.v_stride.head;
  T* out_gmem = static_cast<T*>(args.out) + batch * args.out_stride.batch + head * args.out_stride.head + row * args.out_stride.seq;

  // Load Q, scaled for exp2: exp(x) = 2^(x log2 e).
  const float scale_log2 = args.scale * CUDART_L2E_F;
  float q[HEAD_DIM];
#pragma unroll
  for (int d = 0; d < HEAD_DIM; ++d) q[d] = to_float(q_gmem[d * args.q_stride.dim]) * scale_log2;

  float o[HEAD_DIM] = {};
  float m = -CUDART_INF_F;  // running row max, in log2
  float l = 0.0f;           // running row sum

  const int64_t visible_keys = count_visible_keys(args, row);
  for (int64_t key = 0; key < visible_keys; ++key) {
    // S = Q K^T
    float s = 0.0f;
#pragma unroll
    for (int d = 0; d < HEAD_DIM; ++d) s += q[d] * to_float(k_gmem[key * args.k_stride.seq + d * args.k_stride.dim]);

    // row max
    const float m_new = fmaxf(m, s);

    // rescale; at the first key m is -inf, and exp2(-inf) = 0
    const float rescale = exp2f(m - m_new);
    m = m_new;

    // P = exp2(S - m), row sum
    const float p = exp2f(s - m);
    l = l * rescale + p;

    // O += P V
#pragma unroll
    for (int d = 0; d < HEAD_DIM; ++d) {
      o[d] = o[d] * rescale + p * to_float(v_gmem[key * args.v_stride.seq + d * args.v_stride.dim]);
    }
  }

  // Normalise and store.  A row that sees no key is zero, and its log-sum-exp is -inf.
  const float inverse_l = l == 0.0f ? 0.0f : 1.0f / l;
#pragma unroll
  for (int d = 0; d < HEAD_DIM; ++d) from_float(&out_gmem[d * args.out_stride.dim], o[d] * inverse_l);
  if (args.lse != nullptr) args.lse[row_of_all_heads] = l == 0.0f ? -CUDART_INF_F : (m + log2f(l)) * CUDART_LN2_F;
}

template <typename T, int HEAD_DIM>
int launch(const FaForwardArgs* args, cudaStream_t stream) {
  const int64_t rows = args->batch * args->heads * args->seq_q;
  const int64_t blocks = (rows + BLOCK_THREADS - 1) / BLOCK_THREADS;
  if (blocks > INT32_MAX) {
    return fa_refuse(args, "batch * heads * seq_q is %lld, the maximum is %d blocks of %d", static_cast<long long>(rows),
                     INT32_MAX, BLOCK_THREADS);
  }
  minimal_kernel<T, HEAD_DIM><<<static_cast<unsigned>(blocks), BLOCK_THREADS, 0, stream>>>(*args);
  return static_cast<int>(cudaPeekAtLastError());
}

FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t stream) {
  if (int status = fa_check_abi(args)) return status;
#define LAUNCH_IF(DTYPE, HEAD_DIM) \
  if (args->dtype == FA_DTYPE_##DTYPE && args->head_dim == HEAD_DIM) return launch<DTYPE, HEAD_DIM>(args, stream);
  FA_FOR_EACH_INSTANTIATION(LAUNCH_IF)
#undef LAUNCH_IF
  return fa_refuse(args, "no instantiation for dtype %d with head_dim %lld", args->dtype, static_cast<long long>(args->head_dim));
}

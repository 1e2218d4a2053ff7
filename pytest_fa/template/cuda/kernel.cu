// NAME: a correct but slow starting point.  Replace the body of attention_kernel with your kernel.
#include <cuda_fp16.h>
#include <math_constants.h>

#include "fa_forward.h"
#include "fa_instantiations.h"  // FA_FOR_EACH_INSTANTIATION: the manifest's dtypes and head_dims

using fp16 = __half;
using fp32 = float;

// One thread computes one query row, with an online softmax.  Strides are in elements and may have any value.
template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(BLOCK_THREADS) attention_kernel(const FaForwardArgs args) {
  const int64_t row_of_all_heads = int64_t(blockIdx.x) * BLOCK_THREADS + threadIdx.x;
  if (row_of_all_heads >= args.batch * args.heads * args.seq_q) return;
  const int64_t row = row_of_all_heads % args.seq_q, head = row_of_all_heads / args.seq_q % args.heads;
  const int64_t batch = row_of_all_heads / args.seq_q / args.heads;
  const int64_t kv_head = head / (args.heads / args.kv_heads);
  const auto row_pointer = [](const void* base, const FaStrides& stride, int64_t b, int64_t h, int64_t s) {
    return static_cast<const T*>(base) + b * stride.batch + h * stride.head + s * stride.seq;
  };
  const T* q = row_pointer(args.q, args.q_stride, batch, head, row);                  // [head_dim]
  T* out = const_cast<T*>(row_pointer(args.out, args.out_stride, batch, head, row));  // [head_dim]
  const int64_t visible_keys = args.causal == FA_CAUSAL_TOP_LEFT ? min(args.seq_k, row + 1) : args.seq_k;

  float o[HEAD_DIM] = {}, row_max = -CUDART_INF_F, row_sum = 0.0f;
  for (int64_t key = 0; key < visible_keys; ++key) {
    const T* k = row_pointer(args.k, args.k_stride, batch, kv_head, key);  // [head_dim]
    const T* v = row_pointer(args.v, args.v_stride, batch, kv_head, key);  // [head_dim]

    // S = Q K^T
    float s = 0.0f;
    for (int d = 0; d < HEAD_DIM; ++d) s += float(q[d * args.q_stride.dim]) * float(k[d * args.k_stride.dim]);
    s *= args.scale;

    // row max, rescale, P = exp(S - max), row sum
    const float new_max = fmaxf(row_max, s), rescale = expf(row_max - new_max), p = expf(s - new_max);
    row_max = new_max;
    row_sum = row_sum * rescale + p;

    // O += P V
#pragma unroll
    for (int d = 0; d < HEAD_DIM; ++d) o[d] = o[d] * rescale + p * float(v[d * args.v_stride.dim]);
  }

  // Normalise and store.
#pragma unroll
  for (int d = 0; d < HEAD_DIM; ++d) out[d * args.out_stride.dim] = T(row_sum == 0.0f ? 0.0f : o[d] / row_sum);
  if (args.lse != nullptr) args.lse[row_of_all_heads] = row_max + logf(row_sum);
}

// The entry point, called on the host.  It must not allocate memory or synchronise.  It refuses calls that it does not
// support.
FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t stream) {
  if (int status = fa_check_abi(args)) return status;
  const int64_t blocks = (args->batch * args->heads * args->seq_q + BLOCK_THREADS - 1) / BLOCK_THREADS;
  if (blocks > INT32_MAX) {
    return fa_refuse(args, "the grid needs %lld blocks, the maximum is %d", static_cast<long long>(blocks), INT32_MAX);
  }
#define LAUNCH_IF(DTYPE, HEAD_DIM)                                                                       \
  if (args->dtype == FA_DTYPE_##DTYPE && args->head_dim == HEAD_DIM) {                                   \
    attention_kernel<DTYPE, HEAD_DIM>                                                                    \
        <<<static_cast<unsigned>(blocks), BLOCK_THREADS, 0, stream>>>(fa_copy_args(args));               \
    return static_cast<int>(cudaPeekAtLastError());                                                      \
  }
  FA_FOR_EACH_INSTANTIATION(LAUNCH_IF)
#undef LAUNCH_IF
  return fa_refuse(args, "no instantiation for dtype %d with head_dim %lld", args->dtype, static_cast<long long>(args->head_dim));
}

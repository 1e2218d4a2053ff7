// NAME: a start that is right and slow; replace what is in attention_kernel.
// step:    what NAME does that its parent does not
// because: what slows its parent down, and how you know
// expect:  what should come of it, written before it is measured
#include <cuda_fp16.h>
#include <math_constants.h>

#include "fa_forward.h"
#include "fa_instantiations.h"  // FA_FOR_EACH_INSTANTIATION: the manifest's dtypes and head_dims

using fp16 = __half;

// One thread for each query row, with online softmax.  Strides are in elements and may be anything.
template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(BLOCK_THREADS) attention_kernel(const FaForwardArgs args) {
  const int64_t row_of_all = int64_t(blockIdx.x) * BLOCK_THREADS + threadIdx.x;
  if (row_of_all >= args.batch * args.heads * args.seq_q) return;
  const int64_t row = row_of_all % args.seq_q, head = row_of_all / args.seq_q % args.heads;
  const int64_t batch = row_of_all / args.seq_q / args.heads;
  const int64_t kv_head = head / (args.heads / args.kv_heads);
  const auto at = [](const void* base, const FaStrides& stride, int64_t b, int64_t h, int64_t s) {
    return static_cast<const T*>(base) + b * stride.batch + h * stride.head + s * stride.seq;
  };
  const T* q = at(args.q, args.q_stride, batch, head, row);                                    // [head_dim]
  T* out = const_cast<T*>(at(args.out, args.out_stride, batch, head, row));                    // [head_dim]
  const int64_t visible = args.causal == FA_CAUSAL_TOP_LEFT ? min(args.seq_k, row + 1) : args.seq_k;

  float o[HEAD_DIM] = {}, row_max = -CUDART_INF_F, row_sum = 0.0f;
  for (int64_t key = 0; key < visible; ++key) {
    const T* k = at(args.k, args.k_stride, batch, kv_head, key);
    const T* v = at(args.v, args.v_stride, batch, kv_head, key);
    float s = 0.0f;
    for (int d = 0; d < HEAD_DIM; ++d) s += float(q[d * args.q_stride.dim]) * float(k[d * args.k_stride.dim]);
    s *= args.scale;
    const float new_max = fmaxf(row_max, s), rescale = expf(row_max - new_max), p = expf(s - new_max);
    row_max = new_max;
    row_sum = row_sum * rescale + p;
#pragma unroll
    for (int d = 0; d < HEAD_DIM; ++d) o[d] = o[d] * rescale + p * float(v[d * args.v_stride.dim]);
  }
#pragma unroll
  for (int d = 0; d < HEAD_DIM; ++d) out[d * args.out_stride.dim] = T(row_sum > 0.0f ? o[d] / row_sum : 0.0f);
  if (args.lse != nullptr) args.lse[row_of_all] = row_max + logf(row_sum);
}

// Called from the host.  It allocates nothing, waits for nothing, and refuses what it does not support.
FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t stream) {
  if (int status = fa_check_abi(args)) return status;
  const int64_t blocks = (args->batch * args->heads * args->seq_q + BLOCK_THREADS - 1) / BLOCK_THREADS;
  if (blocks > INT32_MAX) return fa_refuse(args, "%lld blocks are over the largest grid", static_cast<long long>(blocks));
#define LAUNCH_IF(DTYPE, HEAD_DIM)                                                                       \
  if (args->dtype == FA_DTYPE_##DTYPE && args->head_dim == HEAD_DIM) {                                   \
    attention_kernel<DTYPE, HEAD_DIM><<<static_cast<unsigned>(blocks), BLOCK_THREADS, 0, stream>>>(*args); \
    return static_cast<int>(cudaPeekAtLastError());                                                      \
  }
  FA_FOR_EACH_INSTANTIATION(LAUNCH_IF)
#undef LAUNCH_IF
  return fa_refuse(args, "no instantiation for this dtype and head_dim");
}

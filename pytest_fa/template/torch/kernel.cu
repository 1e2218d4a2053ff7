// NAME: a correct but slow starting point.  Replace the body of attention_kernel with your kernel.
#include <cuda_fp16.h>
#include <math_constants.h>

#include "kernel.h"

// One thread computes one query row, with an online softmax.  `heads` is batch * heads.
__global__ void __launch_bounds__(BLOCK_THREADS)
    attention_kernel(const __half* q,  // [heads, seq_q, HEAD_DIM]
                     const __half* k,  // [heads, seq_k, HEAD_DIM]
                     const __half* v,  // [heads, seq_k, HEAD_DIM]
                     __half* out,      // [heads, seq_q, HEAD_DIM]
                     int64_t rows, int64_t seq_q, int64_t seq_k, float scale, bool causal) {
  const int64_t row = int64_t(blockIdx.x) * BLOCK_THREADS + threadIdx.x;
  if (row >= rows) return;
  const int64_t head = row / seq_q, visible_keys = causal ? min(seq_k, row % seq_q + 1) : seq_k;
  q += row * HEAD_DIM, out += row * HEAD_DIM, k += head * seq_k * HEAD_DIM, v += head * seq_k * HEAD_DIM;

  float o[HEAD_DIM] = {}, row_max = -CUDART_INF_F, row_sum = 0.0f;
  for (int64_t key = 0; key < visible_keys; ++key) {
    // S = Q K^T
    float s = 0.0f;
    for (int d = 0; d < HEAD_DIM; ++d) s += __half2float(q[d]) * __half2float(k[key * HEAD_DIM + d]);
    s *= scale;

    // row max, rescale, P = exp(S - max), row sum
    const float new_max = fmaxf(row_max, s), rescale = expf(row_max - new_max), p = expf(s - new_max);
    row_max = new_max;
    row_sum = row_sum * rescale + p;

    // O += P V
#pragma unroll
    for (int d = 0; d < HEAD_DIM; ++d) o[d] = o[d] * rescale + p * __half2float(v[key * HEAD_DIM + d]);
  }

  // Normalise and store.
#pragma unroll
  for (int d = 0; d < HEAD_DIM; ++d) out[d] = __float2half(row_sum == 0.0f ? 0.0f : o[d] / row_sum);
}

void launch_attention(const void* q, const void* k, const void* v, void* out, int64_t heads, int64_t seq_q, int64_t seq_k,
                      float scale, bool causal, cudaStream_t stream) {
  const int64_t rows = heads * seq_q, blocks = (rows + BLOCK_THREADS - 1) / BLOCK_THREADS;
  attention_kernel<<<static_cast<unsigned>(blocks), BLOCK_THREADS, 0, stream>>>(
      static_cast<const __half*>(q), static_cast<const __half*>(k), static_cast<const __half*>(v), static_cast<__half*>(out),
      rows, seq_q, seq_k, scale, causal);
}

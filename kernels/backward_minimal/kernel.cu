// backward_minimal: one thread computes one row of dQ, dK or dV in fp32, straight from global memory.
// step:    the smallest correct backward kernel
// because: backward kernels need a first rung without tiles, shared memory, barriers or atomics that could be wrong
// expect:  correct everywhere, and the same bits in each call; three times as long as minimal or more, because each of dQ, dK and
//          dV computes P again, and its rows read two tensors more
// tile:    1 row x 1 row of the other sequence per thread, BLOCK_THREADS rows per block; 0 bytes of shared memory; a workspace
//          of 4 bytes for each row of Q
// takes:   fp16 and bf16, D = 64, D of V >= 64, any S_q >= 1 and S_kv >= 0, any strides, grouped heads, top-left and bottom-right
//          causal masks, windows, soft caps, biases, ALiBi, boolean masks, sinks, ragged batches, gradients of the log-sum-exp
//
// With S the scores, slope their derivative by scale * Q K^T, and L the log-sum-exp of the forward pass:
//
//   P = exp(S - L)    delta = sum(dO * O) - dL    dS = slope * P * (dO V^T - delta)
//   dQ = scale * dS K    dK = scale * dS^T Q    dV = P^T dO
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#include "fa_backward.h"
#include "fa_instantiations.h"  // FA_FOR_EACH_INSTANTIATION: the manifest's dtypes and head_dims

#ifndef BLOCK_THREADS
#define BLOCK_THREADS 128
#endif
static_assert(BLOCK_THREADS % 32 == 0 && BLOCK_THREADS <= 1024, "a block must be a whole number of warps and at most 1024 threads");

using fp16 = __half;
using bf16 = __nv_bfloat16;

__device__ __forceinline__ float to_float(fp16 x) { return __half2float(x); }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ void from_float(fp16* x, float value) { *x = __float2half_rn(value); }
__device__ __forceinline__ void from_float(bf16* x, float value) { *x = __float2bfloat16_rn(value); }

// The arguments of both passes, and delta, [batch, heads, seq_q].
struct Call {
  FaForwardArgs forward;
  FaBackwardArgs backward;
  float* delta;
};

// The keys begin, begin + 1, ..., end - 1; none if end <= begin.
struct VisibleKeys {
  int64_t begin, end;
};

// The numbers of queries and keys of a sequence.
struct Sequence {
  int64_t queries, keys;

  // The key at which query `row` stands, so that the last query stands at the last key.
  __device__ __forceinline__ int64_t position(int64_t row) const { return row + keys - queries; }
};

__device__ __forceinline__ Sequence find_sequence(const FaForwardArgs& args, int64_t batch) {
  return {args.features & FA_SEQLENS_Q ? args.seqlens_q[batch] : args.seq_q,
          args.features & FA_SEQLENS_K ? args.seqlens_k[batch] : args.seq_k};
}

// Returns the keys that query `row` of a sequence sees.  A causal diagonal is aligned to the top-left or to the bottom-right
// corner of S, a window to the bottom-right one.
__device__ __forceinline__ VisibleKeys find_visible_keys(const FaForwardArgs& args, const Sequence& sequence, int64_t row) {
  const int64_t position = sequence.position(row);
  VisibleKeys keys = {0, sequence.keys};
  if (args.causal != FA_CAUSAL_NONE) keys.end = min(keys.end, (args.causal == FA_CAUSAL_TOP_LEFT ? row : position) + 1);
  if (args.features & FA_WINDOW_LEFT) keys.begin = max(keys.begin, position - args.window_left);
  if (args.features & FA_WINDOW_RIGHT) keys.end = min(keys.end, position + args.window_right + 1);
  return keys;
}

// The first element of a row, and the distance of its elements.
template <typename T>
struct Row {
  T* first;
  int64_t step;

  __device__ __forceinline__ T& operator[](int64_t d) const { return first[d * step]; }
};

template <typename T>
__device__ __forceinline__ Row<const T> row_of(const void* tensor, const FaStrides& stride, int64_t batch, int64_t head, int64_t row) {
  return {static_cast<const T*>(tensor) + batch * stride.batch + head * stride.head + row * stride.seq, stride.dim};
}

template <typename T>
__device__ __forceinline__ Row<T> row_of(void* tensor, const FaStrides& stride, int64_t batch, int64_t head, int64_t row) {
  return {static_cast<T*>(tensor) + batch * stride.batch + head * stride.head + row * stride.seq, stride.dim};
}

// A query of a head, with what the backward pass has for it.
template <typename T>
struct Query {
  int64_t batch, head, row;
  Row<const T> q, dout;
  float lse, delta;
};

template <typename T>
__device__ __forceinline__ Query<T> find_query(const Call& call, int64_t batch, int64_t head, int64_t row) {
  const FaForwardArgs& args = call.forward;
  const int64_t row_of_all_heads = (batch * args.heads + head) * args.seq_q + row;
  return {batch, head, row, row_of<T>(args.q, args.q_stride, batch, head, row),
          row_of<T>(call.backward.dout, call.backward.dout_stride, batch, head, row), args.lse[row_of_all_heads],
          call.delta[row_of_all_heads]};
}

template <typename T, int HEAD_DIM>
__device__ __forceinline__ float dot(Row<const T> left, Row<const T> right) {
  float sum = 0.0f;
#pragma unroll
  for (int d = 0; d < HEAD_DIM; ++d) sum += to_float(left[d]) * to_float(right[d]);
  return sum;
}

template <typename T>
__device__ __forceinline__ float dot(Row<const T> left, Row<const T> right, int64_t dim) {
  float sum = 0.0f;
#pragma unroll 8
  for (int64_t d = 0; d < dim; ++d) sum += to_float(left[d]) * to_float(right[d]);
  return sum;
}

// The weight of a key for a query, and the derivative of its score by scale * q k.
struct Weight {
  float p, slope;
};

// The weight of a visible key, with everything that changes scores, in their order.
template <typename T, int HEAD_DIM>
__device__ __forceinline__ Weight find_weight(const FaForwardArgs& args, const Sequence& sequence, const Query<T>& query,
                                              Row<const T> k, int64_t key) {
  const auto offset = [&](const FaStrides& stride) {
    return query.batch * stride.batch + query.head * stride.head + query.row * stride.seq + key * stride.dim;
  };
  if (args.features & FA_MASK && !args.mask[offset(args.mask_stride)]) return {0.0f, 0.0f};
  float s = args.scale * dot<T, HEAD_DIM>(query.q, k), slope = 1.0f;
  if (args.features & FA_SOFTCAP) {
    const float t = tanhf(s / args.softcap);
    s = args.softcap * t;
    slope = 1.0f - t * t;
  }
  if (args.features & FA_BIAS) s += to_float(static_cast<const T*>(args.bias)[offset(args.bias_stride)]);
  if (args.features & FA_ALIBI) s -= args.alibi_slopes[query.head] * fabsf(static_cast<float>(key - sequence.position(query.row)));
  if (s == -CUDART_INF_F) return {0.0f, 0.0f};  // L may be -inf, too
  return {expf(s - query.lse), slope};
}

template <typename T>
__device__ __forceinline__ float find_ds(const FaForwardArgs& args, const Query<T>& query, Row<const T> v, Weight weight) {
  return weight.slope * weight.p * (dot(query.dout, v, args.head_dim_v) - query.delta);
}

template <typename T>
__global__ void __launch_bounds__(BLOCK_THREADS) delta_kernel(const Call call) {
  const FaForwardArgs& args = call.forward;
  const int64_t row_of_all_heads = int64_t(blockIdx.x) * BLOCK_THREADS + threadIdx.x;
  if (row_of_all_heads >= args.batch * args.heads * args.seq_q) return;
  const int64_t row = row_of_all_heads % args.seq_q;
  const int64_t head = row_of_all_heads / args.seq_q % args.heads;
  const int64_t batch = row_of_all_heads / args.seq_q / args.heads;
  if (row >= find_sequence(args, batch).queries) return;  // padding
  const Row<const T> dout = row_of<T>(call.backward.dout, call.backward.dout_stride, batch, head, row);
  const Row<const T> out = row_of<T>(static_cast<const void*>(args.out), args.out_stride, batch, head, row);
  const float dlse = call.backward.dlse == nullptr ? 0.0f : call.backward.dlse[row_of_all_heads];
  call.delta[row_of_all_heads] = dot(dout, out, args.head_dim_v) - dlse;
}

// A thread computes dQ of a query.
template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(BLOCK_THREADS) dq_kernel(const Call call) {
  const FaForwardArgs& args = call.forward;
  const int64_t row_of_all_heads = int64_t(blockIdx.x) * BLOCK_THREADS + threadIdx.x;
  if (row_of_all_heads >= args.batch * args.heads * args.seq_q) return;
  const int64_t row = row_of_all_heads % args.seq_q;
  const int64_t head = row_of_all_heads / args.seq_q % args.heads;
  const int64_t batch = row_of_all_heads / args.seq_q / args.heads;
  const int64_t kv_head = head / (args.heads / args.kv_heads);
  const Sequence sequence = find_sequence(args, batch);
  if (row >= sequence.queries) return;  // padding
  const Query<T> query = find_query<T>(call, batch, head, row);
  const VisibleKeys keys = find_visible_keys(args, sequence, row);

  float dq[HEAD_DIM] = {};
  for (int64_t key = keys.begin; key < keys.end; ++key) {
    const Row<const T> k = row_of<T>(args.k, args.k_stride, batch, kv_head, key);
    const Weight weight = find_weight<T, HEAD_DIM>(args, sequence, query, k, key);
    if (weight.p == 0.0f) continue;
    const float ds = find_ds(args, query, row_of<T>(args.v, args.v_stride, batch, kv_head, key), weight);
#pragma unroll
    for (int d = 0; d < HEAD_DIM; ++d) dq[d] += ds * to_float(k[d]);
  }
  const Row<T> written = row_of<T>(call.backward.dq, call.backward.dq_stride, batch, head, row);
#pragma unroll
  for (int d = 0; d < HEAD_DIM; ++d) from_float(&written[d], args.scale * dq[d]);
}

// A thread computes dK of a key, or HEAD_DIM columns of its dV, from the queries of all heads that read it.  The last block of
// columns ends at the last one, so that two threads may write the same results.
template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(BLOCK_THREADS) dk_dv_kernel(const Call call) {
  const FaForwardArgs& args = call.forward;
  const int64_t key_of_all_heads = int64_t(blockIdx.x) * BLOCK_THREADS + threadIdx.x;
  if (key_of_all_heads >= args.batch * args.kv_heads * args.seq_k) return;
  const int64_t key = key_of_all_heads % args.seq_k;
  const int64_t kv_head = key_of_all_heads / args.seq_k % args.kv_heads;
  const int64_t batch = key_of_all_heads / args.seq_k / args.kv_heads;
  const int64_t group = args.heads / args.kv_heads;
  const Sequence sequence = find_sequence(args, batch);
  if (key >= sequence.keys) return;  // padding
  const bool is_dk = blockIdx.y == 0;
  const int64_t column = is_dk ? 0 : min(int64_t(blockIdx.y - 1) * HEAD_DIM, args.head_dim_v - HEAD_DIM);  // the first one
  const Row<const T> k = row_of<T>(args.k, args.k_stride, batch, kv_head, key);
  const Row<const T> v = row_of<T>(args.v, args.v_stride, batch, kv_head, key);

  float sum[HEAD_DIM] = {};
  for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    for (int64_t row = 0; row < sequence.queries; ++row) {
      const VisibleKeys keys = find_visible_keys(args, sequence, row);
      if (key < keys.begin || key >= keys.end) continue;
      const Query<T> query = find_query<T>(call, batch, head, row);
      const Weight weight = find_weight<T, HEAD_DIM>(args, sequence, query, k, key);
      if (weight.p == 0.0f) continue;
      const float factor = is_dk ? args.scale * find_ds(args, query, v, weight) : weight.p;
      const Row<const T> source = is_dk ? query.q : Row<const T>{&query.dout[column], query.dout.step};
#pragma unroll
      for (int d = 0; d < HEAD_DIM; ++d) sum[d] += factor * to_float(source[d]);
    }
  }
  Row<T> written = row_of<T>(call.backward.dk, call.backward.dk_stride, batch, kv_head, key);
  if (!is_dk) {
    written = row_of<T>(call.backward.dv, call.backward.dv_stride, batch, kv_head, key);
    written.first += column * written.step;
  }
#pragma unroll
  for (int d = 0; d < HEAD_DIM; ++d) from_float(&written[d], sum[d]);
}

// The number of blocks that have a thread for each row.
int64_t blocks_for(int64_t rows) { return (rows + BLOCK_THREADS - 1) / BLOCK_THREADS; }

template <typename T, int HEAD_DIM>
int launch(const Call& call, cudaStream_t stream) {
  const FaForwardArgs& args = call.forward;
  const int64_t query_blocks = blocks_for(args.batch * args.heads * args.seq_q);
  const int64_t key_blocks = blocks_for(args.batch * args.kv_heads * args.seq_k);
  if (max(query_blocks, key_blocks) > INT32_MAX) {
    return fa_refuse(&args, "a launch has %lld blocks of %d rows, the maximum is %d",
                     static_cast<long long>(max(query_blocks, key_blocks)), BLOCK_THREADS, INT32_MAX);
  }
  if (args.head_dim_v < HEAD_DIM) {
    return fa_refuse(&args, "head_dim_v is %lld, it must be %d or more", static_cast<long long>(args.head_dim_v), HEAD_DIM);
  }
  delta_kernel<T><<<static_cast<unsigned>(query_blocks), BLOCK_THREADS, 0, stream>>>(call);
  dq_kernel<T, HEAD_DIM><<<static_cast<unsigned>(query_blocks), BLOCK_THREADS, 0, stream>>>(call);
  if (key_blocks > 0) {
    const dim3 grid(static_cast<unsigned>(key_blocks), 1 + static_cast<unsigned>((args.head_dim_v + HEAD_DIM - 1) / HEAD_DIM));
    dk_dv_kernel<T, HEAD_DIM><<<grid, BLOCK_THREADS, 0, stream>>>(call);
  }
  return static_cast<int>(cudaPeekAtLastError());
}

FA_EXPORT size_t fa_backward_workspace_bytes(const FaBackwardArgs* args) {
  return args->forward->batch * args->forward->heads * args->forward->seq_q * sizeof(float);
}

FA_EXPORT int fa_backward(const FaBackwardArgs* args, cudaStream_t stream) {
  const uint32_t windows = FA_WINDOW_LEFT | FA_WINDOW_RIGHT, scores = FA_SOFTCAP | FA_BIAS | FA_ALIBI | FA_MASK;
  const uint32_t lengths = FA_SEQLENS_Q | FA_SEQLENS_K;
  if (int status = fa_check_backward(args, windows | scores | lengths | FA_SINK | FA_HEAD_DIM_V)) return status;
  const Call call = {fa_copy_args(args->forward), *args, static_cast<float*>(args->forward->workspace)};
#define LAUNCH_IF(DTYPE, HEAD_DIM) \
  if (call.forward.dtype == FA_DTYPE_##DTYPE && call.forward.head_dim == HEAD_DIM) return launch<DTYPE, HEAD_DIM>(call, stream);
  FA_FOR_EACH_INSTANTIATION(LAUNCH_IF)
#undef LAUNCH_IF
  return fa_refuse(args->forward, "no instantiation for dtype %d with head_dim %lld", call.forward.dtype,
                   static_cast<long long>(call.forward.head_dim));
}

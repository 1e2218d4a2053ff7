// minimal: one thread computes one query row, with an online softmax in fp32, straight from global memory.
// step:    the smallest correct kernel
// because: the ladder needs a first rung without tiles, shared memory or barriers that could be wrong
// expect:  correct everywhere; hundreds of microseconds at the target shape (1x8x512x64), because 4096 rows fill only 32 of
//          132 SMs
// tile:    1 query x 1 key per thread, BLOCK_THREADS rows per block; 0 bytes of shared memory
// takes:   fp16 and bf16, or fp32 (minimal_fp32), D = 64, D of V >= 64, any S_q >= 1 and S_kv >= 0, any strides, grouped heads,
//          top-left and bottom-right causal masks, windows, soft caps, biases, ALiBi, boolean masks, sinks, ragged batches, also
//          behind one another, pages, caches in e4m3 and int8, new keys, which it appends
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <float.h>
#include <math_constants.h>

#include "fa/features.cuh"
#include "fa/to_float.cuh"
#include "fa_forward.h"
#include "fa_instantiations.h"  // FA_FOR_EACH_INSTANTIATION: the manifest's dtypes and head_dims

#ifndef BLOCK_THREADS
#define BLOCK_THREADS 128
#endif
static_assert(BLOCK_THREADS % 32 == 0 && BLOCK_THREADS <= 1024, "a block must be a whole number of warps and at most 1024 threads");

using fp16 = __half;
using bf16 = __nv_bfloat16;
using fp32 = float;
using e4m3 = __nv_fp8_e4m3;
using int8 = int8_t;

// A block computes HEAD_DIM columns of the output.  The last one for a row ends at the last column, so that two blocks may
// write the same results.  With IS_PLAIN, change_score changes nothing, V has HEAD_DIM columns, too, and there are neither pages
// nor starts nor new keys.  K and V are a CACHE; one of single bytes has scales, and gets no new keys.
template <typename T, typename CACHE, int HEAD_DIM, bool IS_PLAIN>
__global__ void __launch_bounds__(BLOCK_THREADS) minimal_kernel(const FaForwardArgs args) {
  const int64_t row_of_all_heads = int64_t(blockIdx.x) * BLOCK_THREADS + threadIdx.x;
  if (row_of_all_heads >= args.batch * args.heads * args.seq_q) return;
  const int64_t row = row_of_all_heads % args.seq_q;
  const int64_t head = row_of_all_heads / args.seq_q % args.heads;
  const int64_t batch = row_of_all_heads / args.seq_q / args.heads;
  const int64_t kv_head = head / (args.heads / args.kv_heads);
  const fa::Sequence sequence = fa::find_sequence<IS_PLAIN>(args, batch);
  if (row >= sequence.queries) return;  // padding
  const int64_t row_in_memory = sequence.first_query + row;
  const int64_t column = IS_PLAIN ? 0 : min(int64_t(blockIdx.y) * HEAD_DIM, args.head_dim_v - HEAD_DIM);  // the first one
  const T* q_gmem = static_cast<const T*>(args.q) + batch * args.q_stride.batch + head * args.q_stride.head + row_in_memory * args.q_stride.seq;
  const CACHE* k_gmem = static_cast<const CACHE*>(args.k) + kv_head * args.k_stride.head;
  const CACHE* v_gmem = static_cast<const CACHE*>(args.v) + kv_head * args.v_stride.head + column * args.v_stride.dim;
  constexpr bool HAS_SCALES = sizeof(CACHE) == 1;
  const float* k_scales = args.k_scale + kv_head * args.k_scale_stride.head;
  const float* v_scales = args.v_scale + kv_head * args.v_scale_stride.head;
  T* out_gmem = static_cast<T*>(args.out) + batch * args.out_stride.batch + head * args.out_stride.head +
                row_in_memory * args.out_stride.seq + column * args.out_stride.dim;

  // Of the heads that share a head of K and V, the first one appends, in the first block of columns.
  const int64_t first_new = !IS_PLAIN && args.features & FA_APPEND ? sequence.keys - args.seq_q : INT64_MAX;
  if (!IS_PLAIN && !HAS_SCALES && first_new != INT64_MAX && blockIdx.y == 0 && head % (args.heads / args.kv_heads) == 0) {
    fa::append<T, HEAD_DIM>(args, batch, kv_head, row, first_new + row);
  }

  // Load Q, scaled for exp2: exp(x) = 2^(x log2 e).  What changes scores comes between the scale and log2 e.
  const float q_scale = IS_PLAIN ? args.scale * CUDART_L2E_F : args.scale;
  float q[HEAD_DIM];
#pragma unroll
  for (int d = 0; d < HEAD_DIM; ++d) q[d] = fa::to_float(q_gmem[d * args.q_stride.dim]) * q_scale;

  // The sink is like a first key whose value is 0.
  const float sink = args.features & FA_SINK ? args.sink[head] * CUDART_L2E_F : -CUDART_INF_F;
  float o[HEAD_DIM] = {};
  float m = fmaxf(sink, -FLT_MAX);  // running row max, in log2; never -inf, so that S - m is not NaN for a hidden key
  float l = exp2f(sink - m);        // running row sum

  const fa::VisibleKeys keys = fa::find_visible_keys(args, sequence, row);
  for (int64_t key = keys.begin; key < keys.end; ++key) {
    // S = Q K^T
    float s = 0.0f;
    const fa::Place place = fa::find_key<IS_PLAIN>(args, sequence, batch, key);
    const bool is_new = !IS_PLAIN && !HAS_SCALES && key >= first_new;
    fa::Row<const CACHE> k = {k_gmem + place.offset(args.k_stride), args.k_stride.dim};
    if (is_new) k = fa::new_row<CACHE>(args.k_new, args.k_new_stride, batch, kv_head, key - first_new);
#pragma unroll
    for (int d = 0; d < HEAD_DIM; ++d) s += q[d] * fa::to_float(k[d]);
    if (HAS_SCALES) s *= k_scales[place.offset(args.k_scale_stride)];
    if (!IS_PLAIN) s = fa::change_score<T>(args, sequence, s, batch, head, row, key) * CUDART_L2E_F;

    // row max
    const float m_new = fmaxf(m, s);

    // rescale; at the first key m may be far below S, and exp2 is 0
    const float rescale = exp2f(m - m_new);
    m = m_new;

    // P = exp2(S - m), row sum
    float p = exp2f(s - m);
    l = l * rescale + p;

    // O += P V
    if (HAS_SCALES) p *= v_scales[place.offset(args.v_scale_stride)];
    fa::Row<const CACHE> v = {v_gmem + place.offset(args.v_stride), args.v_stride.dim};
    if (is_new) {
      v = fa::new_row<CACHE>(args.v_new, args.v_new_stride, batch, kv_head, key - first_new);
      v.first += column * v.step;
    }
#pragma unroll
    for (int d = 0; d < HEAD_DIM; ++d) o[d] = o[d] * rescale + p * fa::to_float(v[d]);
  }

  // Normalise and store.  A row that sees neither a key nor a sink is zero, and its log-sum-exp is -inf.
  const float inverse_l = l == 0.0f ? 0.0f : 1.0f / l;
#pragma unroll
  for (int d = 0; d < HEAD_DIM; ++d) fa::from_float(&out_gmem[d * args.out_stride.dim], o[d] * inverse_l);
  const bool has_starts = !IS_PLAIN && args.features & FA_CU_SEQLENS_Q;
  const int64_t row_of_lse = has_starts ? head * args.rows_q + row_in_memory : row_of_all_heads;
  if (args.lse != nullptr) args.lse[row_of_lse] = l == 0.0f ? -CUDART_INF_F : (m + log2f(l)) * CUDART_LN2_F;
}

template <typename T, int HEAD_DIM>
auto find_kernel(const FaForwardArgs& args) {
  if (args.features & FA_CACHE_DTYPE) {
    return args.cache_dtype == FA_DTYPE_int8 ? minimal_kernel<T, int8, HEAD_DIM, false> : minimal_kernel<T, e4m3, HEAD_DIM, false>;
  }
  const uint32_t places = FA_BLOCK_TABLE | FA_CU_SEQLENS_Q | FA_CU_SEQLENS_K | FA_APPEND;
  const bool is_plain = !(args.features & (FA_SOFTCAP | FA_BIAS | FA_ALIBI | FA_MASK | FA_HEAD_DIM_V | places));
  return is_plain ? minimal_kernel<T, T, HEAD_DIM, true> : minimal_kernel<T, T, HEAD_DIM, false>;
}

template <typename T, int HEAD_DIM>
int launch(const FaForwardArgs& args, cudaStream_t stream) {
  const int64_t rows = args.batch * args.heads * args.seq_q;
  const int64_t blocks = (rows + BLOCK_THREADS - 1) / BLOCK_THREADS;
  if (blocks > INT32_MAX) {
    return fa_refuse(&args, "batch * heads * seq_q is %lld, the maximum is %d blocks of %d", static_cast<long long>(rows),
                     INT32_MAX, BLOCK_THREADS);
  }
  if (args.head_dim_v < HEAD_DIM) {
    return fa_refuse(&args, "head_dim_v is %lld, it must be %d or more", static_cast<long long>(args.head_dim_v), HEAD_DIM);
  }
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>((args.head_dim_v + HEAD_DIM - 1) / HEAD_DIM));
  const auto kernel = find_kernel<T, HEAD_DIM>(args);
  kernel<<<grid, BLOCK_THREADS, 0, stream>>>(args);
  return static_cast<int>(cudaPeekAtLastError());
}

FA_EXPORT int fa_forward(const FaForwardArgs* caller_args, cudaStream_t stream) {
  const uint32_t windows = FA_WINDOW_LEFT | FA_WINDOW_RIGHT, scores = FA_SOFTCAP | FA_BIAS | FA_ALIBI | FA_MASK;
  const uint32_t caches = FA_SEQLENS_Q | FA_SEQLENS_K | FA_BLOCK_TABLE | FA_CACHE_DTYPE | FA_APPEND, starts = FA_CU_SEQLENS_Q | FA_CU_SEQLENS_K;
  if (int status = fa_check_features(caller_args, windows | scores | caches | starts | FA_SINK | FA_HEAD_DIM_V)) return status;
  const FaForwardArgs args = fa_copy_args(caller_args);  // the caller's struct may end before its features
#define LAUNCH_IF(DTYPE, HEAD_DIM) \
  if (args.dtype == FA_DTYPE_##DTYPE && args.head_dim == HEAD_DIM) return launch<DTYPE, HEAD_DIM>(args, stream);
  FA_FOR_EACH_INSTANTIATION(LAUNCH_IF)
#undef LAUNCH_IF
  return fa_refuse(&args, "no instantiation for dtype %d with head_dim %lld", args.dtype, static_cast<long long>(args.head_dim));
}

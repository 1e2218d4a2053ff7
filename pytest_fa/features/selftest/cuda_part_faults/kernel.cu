// cuda_part_faults: attention with windows, soft caps and caches, one mistake in them, selected by FAULT, and a correct twin.
// step:    one thread per query row, straight from global memory, and one mistake
// because: the checks must be tested with the mistakes that kernels make in windows, soft caps and caches
// expect:  every mistake is caught by its check, and the correct twin passes every check
// tile:    1 query x 1 key per thread, BLOCK rows per block; 0 bytes of shared memory
// takes:   fp16, D = 64, any lengths, any strides, grouped heads, top-left and bottom-right causal masks, windows, soft caps,
//          caches in e4m3 and int8
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <math_constants.h>

#include "fa_forward.h"

enum Fault {
  NONE,                 // no mistake: a correct twin
  LEFT_TOO_LONG,        // one key too many before a query
  LEFT_COUNTS_OWN_KEY,  // one key too few before a query: the window's length is taken for its left side
  RIGHT_TOO_LONG,       // one key too many after a query
  RIGHT_TOO_SHORT,      // one key too few after a query
  SIDES_EXCHANGED,      // left and right are exchanged
  TOP_LEFT,             // the window is aligned to the first key
  CHUNKS,               // queries see chunks of keys, not a sliding window
  WINDOW_IGNORED,       // the window is not applied
  ZERO_IS_OPEN,         // a side of 0 is taken for an open one
  OPEN_IS_ZERO,         // an open side is taken for 0: its bit is not read
  NEGATIVE_IS_OPEN,     // a negative side is taken for an open one
  SKIPS_FIRST_TILE,     // the first tile of keys of a window is skipped if only a part of it is visible
  WHOLE_FIRST_TILE,     // all keys of the first tile of a window count
  EMPTY_ROW_DIVIDES,    // a query without a key divides 0 by 0
  CAP_IGNORED,          // the soft cap is not applied
  CAP_TOO_LARGE,        // the soft cap is 1 % too large
  CAP_BEFORE_SCALE,     // the soft cap is applied before the scale
  CAP_TWICE,            // the soft cap is applied twice
  CAP_NOT_MULTIPLIED,   // tanh is not multiplied by the cap
  CAP_OF_LOG2,          // scores in base 2 get the cap of natural ones
  CAP_IN_HALF,          // tanh has the precision of fp16
  CAP_AFTER_MASK,       // hidden keys have the score -cap: the soft cap comes after the mask
  SCALE_IGNORED,        // numbers of a cache are taken for values
  SCALE_OF_NEXT_HEAD,   // each head has the scale of the next one
  SCALE_OF_FIRST_KEY,   // all keys of a head have the scale of the first one
  INT8_UNSIGNED,        // int8 numbers are taken for unsigned ones
};

constexpr int BLOCK = 128, TILE = 32, DIM = 64;

// The keys begin, begin + 1, ..., end - 1.
struct VisibleKeys {
  int64_t begin, end;
};

__device__ __forceinline__ VisibleKeys find_visible_keys(const FaForwardArgs& args, int64_t row) {
  const int64_t aligned_last = row + args.seq_k - args.seq_q, position = FAULT == TOP_LEFT ? row : aligned_last;
  bool has_left = args.features & FA_WINDOW_LEFT, has_right = args.features & FA_WINDOW_RIGHT;
  int64_t left = args.window_left, right = args.window_right;
  const bool has_window = has_left || has_right, is_causal = has_left && left > 0 && has_right && right == 0;
  if (FAULT == LEFT_TOO_LONG) ++left;
  if (FAULT == LEFT_COUNTS_OWN_KEY) --left;
  if (FAULT == RIGHT_TOO_LONG) ++right;
  if (FAULT == RIGHT_TOO_SHORT) --right;
  if (FAULT == SIDES_EXCHANGED && has_left && has_right) left = args.window_right, right = args.window_left;
  if (FAULT == WINDOW_IGNORED) has_left = has_right = false;
  if (FAULT == ZERO_IS_OPEN) has_left = has_left && left != 0, has_right = has_right && right != 0;
  if (FAULT == OPEN_IS_ZERO) has_left = has_right = has_window;
  if (FAULT == NEGATIVE_IS_OPEN) has_left = has_left && left >= 0, has_right = has_right && right >= 0;

  VisibleKeys keys = {0, args.seq_k};
  if (args.causal != FA_CAUSAL_NONE) keys.end = min(keys.end, (args.causal == FA_CAUSAL_TOP_LEFT ? row : aligned_last) + 1);
  if (has_left) keys.begin = max(keys.begin, position - left);
  if (has_right) keys.end = min(keys.end, position + right + 1);
  if (FAULT == CHUNKS && is_causal) keys.begin = max(int64_t(0), position / (left + 1) * (left + 1));
  if (FAULT == SKIPS_FIRST_TILE) keys.begin = (keys.begin + TILE - 1) / TILE * TILE;
  if (FAULT == WHOLE_FIRST_TILE) keys.begin = keys.begin / TILE * TILE;
  return keys;
}

__device__ __forceinline__ float tanh_of(float x) {
  return FAULT == CAP_IN_HALF ? __half2float(__float2half(tanhf(__half2float(__float2half(x))))) : tanhf(x);
}

// The score after scale and soft cap, from q k^T.
__device__ __forceinline__ float find_score(const FaForwardArgs& args, float qk) {
  const float s = qk * args.scale, cap = args.softcap * (FAULT == CAP_TOO_LARGE ? 1.01f : 1.0f);
  if (FAULT == CAP_IGNORED || !(args.features & FA_SOFTCAP)) return s;
  if (FAULT == CAP_BEFORE_SCALE) return cap * tanh_of(qk / cap) * args.scale;
  if (FAULT == CAP_OF_LOG2) return cap * tanh_of(s * CUDART_L2E_F / cap) * CUDART_LN2_F;
  if (FAULT == CAP_NOT_MULTIPLIED) return tanh_of(s / cap);
  const float capped = cap * tanh_of(s / cap);
  return FAULT == CAP_TWICE ? cap * tanh_of(capped / cap) : capped;
}

// A number of K or V.
__device__ __forceinline__ float load(const FaForwardArgs& args, const void* numbers, int64_t index) {
  if (!(args.features & FA_CACHE_DTYPE)) return __half2float(static_cast<const __half*>(numbers)[index]);
  if (args.cache_dtype == FA_DTYPE_e4m3) return static_cast<float>(static_cast<const __nv_fp8_e4m3*>(numbers)[index]);
  const int8_t number = static_cast<const int8_t*>(numbers)[index];
  return FAULT == INT8_UNSIGNED ? uint8_t(number) : number;
}

// The factor of the numbers of a key.
__device__ __forceinline__ float find_scale(const FaForwardArgs& args, const float* scales, const FaStrides& stride, int64_t batch,
                                            int64_t kv_head, int64_t key) {
  if (!(args.features & FA_CACHE_DTYPE) || FAULT == SCALE_IGNORED) return 1.0f;
  if (FAULT == SCALE_OF_NEXT_HEAD) kv_head = (kv_head + 1) % args.kv_heads;
  if (FAULT == SCALE_OF_FIRST_KEY) key = 0;
  return scales[batch * stride.batch + kv_head * stride.head + key * stride.seq];
}

__global__ void __launch_bounds__(BLOCK) part_fault_kernel(const FaForwardArgs args) {
  const int64_t row_of_all_heads = int64_t(blockIdx.x) * BLOCK + threadIdx.x;
  if (row_of_all_heads >= args.batch * args.heads * args.seq_q) return;
  const int64_t row = row_of_all_heads % args.seq_q, head = row_of_all_heads / args.seq_q % args.heads;
  const int64_t batch = row_of_all_heads / args.seq_q / args.heads, kv_head = head / (args.heads / args.kv_heads);
  const __half* q = static_cast<const __half*>(args.q) + batch * args.q_stride.batch + head * args.q_stride.head + row * args.q_stride.seq;
  const int64_t k_first = batch * args.k_stride.batch + kv_head * args.k_stride.head;
  const int64_t v_first = batch * args.v_stride.batch + kv_head * args.v_stride.head;
  __half* out = static_cast<__half*>(args.out) + batch * args.out_stride.batch + head * args.out_stride.head + row * args.out_stride.seq;

  const VisibleKeys keys = find_visible_keys(args, row);
  const bool hides_first = FAULT == CAP_AFTER_MASK && args.features & FA_SOFTCAP;
  float o[DIM] = {}, m = -CUDART_INF_F, l = 0.0f;
  for (int64_t key = hides_first ? 0 : keys.begin; key < (hides_first ? args.seq_k : keys.end); ++key) {
    float s = 0.0f;
#pragma unroll
    for (int d = 0; d < DIM; ++d) s += __half2float(q[d * args.q_stride.dim]) * load(args, args.k, k_first + key * args.k_stride.seq + d * args.k_stride.dim);
    s *= find_scale(args, args.k_scale, args.k_scale_stride, batch, kv_head, key);
    s = key < keys.begin || key >= keys.end ? -args.softcap : find_score(args, s);
    const float m_new = fmaxf(m, s), rescale = expf(m - m_new), p = expf(s - m_new);
    m = m_new;
    l = l * rescale + p;
    const float p_scaled = p * find_scale(args, args.v_scale, args.v_scale_stride, batch, kv_head, key);
#pragma unroll
    for (int d = 0; d < DIM; ++d) o[d] = o[d] * rescale + p_scaled * load(args, args.v, v_first + key * args.v_stride.seq + d * args.v_stride.dim);
  }
  const bool is_empty = l == 0.0f && FAULT != EMPTY_ROW_DIVIDES;
#pragma unroll
  for (int d = 0; d < DIM; ++d) out[d * args.out_stride.dim] = __float2half(is_empty ? 0.0f : o[d] / l);
  if (args.lse != nullptr) args.lse[row_of_all_heads] = m + logf(l);
}

FA_EXPORT int fa_forward(const FaForwardArgs* caller_args, cudaStream_t stream) {
  if (int status = fa_check_features(caller_args, FA_SOFTCAP | FA_WINDOW_LEFT | FA_WINDOW_RIGHT | FA_CACHE_DTYPE)) return status;
  const FaForwardArgs args = fa_copy_args(caller_args);
  if (args.dtype != FA_DTYPE_fp16 || args.head_dim != DIM) return fa_refuse(&args, "only fp16 with head_dim 64 is supported");
  const unsigned blocks = unsigned((args.batch * args.heads * args.seq_q + BLOCK - 1) / BLOCK);
  part_fault_kernel<<<blocks, BLOCK, 0, stream>>>(args);
  return static_cast<int>(cudaPeekAtLastError());
}

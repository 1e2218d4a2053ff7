// What a call may ask for beyond plain attention: which keys a query sees, what changes its scores, and where its rows are.
#pragma once

#include <math_constants.h>
#include <stdint.h>

#include "fa/to_float.cuh"
#include "fa_forward.h"

namespace fa {

// The keys begin, begin + 1, ..., end - 1; none if end <= begin.
struct VisibleKeys {
  int64_t begin, end;
};

// The numbers of queries and keys of a sequence, and its first rows: others than 0 if sequences lie behind one another.
struct Sequence {
  int64_t queries, keys, first_query, first_key;

  // The key at which query `row` stands, so that the last query stands at the last key.
  __device__ __forceinline__ int64_t position(int64_t row) const { return row + keys - queries; }
};

template <bool IS_PLAIN>
__device__ __forceinline__ Sequence find_sequence(const FaForwardArgs& args, int64_t batch) {
  Sequence sequence = {args.features & FA_SEQLENS_Q ? args.seqlens_q[batch] : args.seq_q,
                       args.features & FA_SEQLENS_K ? args.seqlens_k[batch] : args.seq_k, 0, 0};
  if (!IS_PLAIN && args.features & FA_CU_SEQLENS_Q) {
    sequence.first_query = args.cu_seqlens_q[batch];
    sequence.queries = args.cu_seqlens_q[batch + 1] - sequence.first_query;
  }
  if (!IS_PLAIN && args.features & FA_CU_SEQLENS_K) {
    sequence.first_key = args.cu_seqlens_k[batch];
    sequence.keys = args.cu_seqlens_k[batch + 1] - sequence.first_key;
  }
  return sequence;
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

// Returns the score of a key with everything that changes scores, in their order; -inf hides the key.
template <typename T>
__device__ __forceinline__ float change_score(const FaForwardArgs& args, const Sequence& sequence, float s, int64_t batch,
                                              int64_t head, int64_t row, int64_t key) {
  const auto offset = [=](const FaStrides& stride) {
    return batch * stride.batch + head * stride.head + row * stride.seq + key * stride.dim;
  };
  if (args.features & FA_SOFTCAP) s = args.softcap * tanhf(s / args.softcap);
  if (args.features & FA_BIAS) s += to_float(static_cast<const T*>(args.bias)[offset(args.bias_stride)]);
  if (args.features & FA_ALIBI) s -= args.alibi_slopes[head] * fabsf(static_cast<float>(key - sequence.position(row)));
  if (args.features & FA_MASK && !args.mask[offset(args.mask_stride)]) s = -CUDART_INF_F;
  return s;
}

// Where a key of a sequence is: its batch, or with pages its page, and the row there.
struct Place {
  int64_t block, row;

  __device__ __forceinline__ int64_t offset(const FaStrides& stride) const { return block * stride.batch + row * stride.seq; }
};

template <bool IS_PLAIN>
__device__ __forceinline__ Place find_key(const FaForwardArgs& args, const Sequence& sequence, int64_t batch, int64_t key) {
  if (IS_PLAIN || !(args.features & FA_BLOCK_TABLE)) return {batch, sequence.first_key + key};
  const uint32_t page_size = args.page_size, page = uint32_t(key) / page_size;
  return {args.block_table[batch * args.block_table_stride + page], uint32_t(key) - page * page_size};
}

// The first element of a row, and the distance of its elements.
template <typename T>
struct Row {
  T* first;
  int64_t step;

  __device__ __forceinline__ T& operator[](int64_t d) const { return first[d * step]; }
};

// The row of `name`, k or v, that a call brings as its new key `number`.
template <typename T>
__device__ __forceinline__ Row<const T> new_row(const void* rows, const FaStrides& stride, int64_t batch, int64_t kv_head,
                                                int64_t number) {
  const T* first = static_cast<const T*>(rows) + batch * stride.batch + kv_head * stride.head + number * stride.seq;
  return {first, stride.dim};
}

// Writes new key `row` of a sequence, and its value, into the caches.  No thread reads them there.
template <typename T, int HEAD_DIM>
__device__ __forceinline__ void append(const FaForwardArgs& args, int64_t batch, int64_t kv_head, int64_t row, int64_t key) {
  const Place place = find_key<false>(args, {}, batch, key);
  const auto slot = [&](const void* cache, const FaStrides& stride) {
    return Row<T>{static_cast<T*>(const_cast<void*>(cache)) + kv_head * stride.head + place.offset(stride), stride.dim};
  };
  const Row<T> k = slot(args.k, args.k_stride), v = slot(args.v, args.v_stride);
  const Row<const T> k_new = new_row<T>(args.k_new, args.k_new_stride, batch, kv_head, row);
  const Row<const T> v_new = new_row<T>(args.v_new, args.v_new_stride, batch, kv_head, row);
  for (int d = 0; d < HEAD_DIM; ++d) k[d] = k_new[d];
  for (int64_t d = 0; d < args.head_dim_v; ++d) v[d] = v_new[d];
}

}  // namespace fa

// The work of one thread block.
#pragma once

#include <stdint.h>

#include "fa/fragment.cuh"
#include "fa/params.cuh"
#include "fa_forward.h"

namespace fa {

constexpr int VECTOR = 8;  // 16-bit elements in 16 bytes

// The work of one thread block: a tile of queries of one head, and all keys that they see.
template <typename T>
struct WorkTile {
  const T* q_gmem;  // [seq_q, head_dim]
  const T* k_gmem;  // [seq_k, head_dim]
  const T* v_gmem;  // [seq_k, head_dim]
  int first_query;
  int seq_q, seq_k;
  int diagonal;   // query i of the block sees keys [0, min(seq_k, diagonal + i))
  int key_tiles;  // number of key tiles that any query of the block sees
};

// The work of a block in a grid of heads x query tiles x batch.
template <typename T, int TILE_QUERIES, int TILE_KEYS>
__device__ WorkTile<T> make_work_tile(const FaForwardArgs& args, unsigned heads_per_kv_head) {
  const unsigned head = blockIdx.x, batch = blockIdx.z;
  const unsigned kv_head = head / heads_per_kv_head;
  const int first_query = blockIdx.y * TILE_QUERIES, seq_q = args.seq_q, seq_k = args.seq_k;
  const int shift = args.causal == FA_CAUSAL_BOTTOM_RIGHT ? seq_k - seq_q : 0;
  const int diagonal = args.causal == FA_CAUSAL_NONE ? seq_k : first_query + shift + 1;
  const int visible_keys = max(0, min(seq_k, diagonal + TILE_QUERIES - 1));
  return {
      static_cast<const T*>(args.q) + batch * args.q_stride.batch + head * args.q_stride.head,
      static_cast<const T*>(args.k) + batch * args.k_stride.batch + kv_head * args.k_stride.head,
      static_cast<const T*>(args.v) + batch * args.v_stride.batch + kv_head * args.v_stride.head,
      first_query,
      seq_q,
      seq_k,
      diagonal,
      (visible_keys + TILE_KEYS - 1) / TILE_KEYS,
  };
}

// The same for the parameters of latency-bound kernels, where a row has 16-byte vectors.
template <int TILE_QUERIES, int TILE_KEYS>
__device__ __forceinline__ WorkTile<uint4> make_work_tile(const Params& params, uint32_t head) {
  const uint32_t batch = blockIdx.z, kv_head = kv_head_of(params, head);
  const int first_query = blockIdx.y * TILE_QUERIES;
  const int diagonal = params.first_diagonal + first_query;
  const int visible_keys = max(0, min(params.seq_k, diagonal + TILE_QUERIES - 1));
  return {
      params.q + (uint64_t(batch) * params.q_strides.batch + uint64_t(head) * params.q_strides.head),
      params.k + (uint64_t(batch) * params.k_strides.batch + uint64_t(kv_head) * params.k_strides.head),
      params.v + (uint64_t(batch) * params.v_strides.batch + uint64_t(kv_head) * params.v_strides.head),
      first_query,
      params.seq_q,
      params.seq_k,
      diagonal,
      (visible_keys + TILE_KEYS - 1) / TILE_KEYS,
  };
}

}  // namespace fa

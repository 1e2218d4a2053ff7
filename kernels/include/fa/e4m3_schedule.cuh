// The work of the persistent e4m3 kernels: work tiles, their order, and the factors of a head.
#pragma once

#include <float.h>
#include <stdint.h>

namespace fa {

// What the kernel reads besides the tensor maps.
struct E4m3Params {
  float* lse;               // [batch, heads, seq_q], or nullptr
  const float *q_descale, *k_descale, *v_descale;  // [batch, heads], [batch, kv_heads], [batch, kv_heads]
  float signed_scale_log2;  // scale * log2(e), without descales
  int seq_q, seq_k;
  int first_diagonal;       // query i sees keys [0, min(seq_k, first_diagonal + i))
  int heads, kv_heads, batch_heads;
  int m_blocks;             // work tiles of a head
  int section_heads;        // heads whose work tiles are computed at the same time, the longest first
  int work_tiles;
  uint32_t kv_head_factor;  // about 2^31 / (heads / kv_heads), so that a head of K is a multiplication and no division
};

// BLOCK_M queries of one head, and the key tiles that they see.
struct WorkTile {
  int first_query, batch_head;
  int key_tiles;  // tiles with a key that any query of the block sees
};

// Work tiles are numbered by section, then by their queries, then by head.  Under a causal mask, the last queries see the most
// keys.  The last section begins with them, so that the shortest work tiles come at the end.  The sections before it alternate,
// so that the lengths change gradually from one section to the next, as dealt_number needs.
template <int BLOCK_M, int BLOCK_N>
__host__ __device__ __forceinline__ WorkTile make_work_tile(const E4m3Params& params, uint32_t number) {
  const uint32_t section_tiles = params.section_heads * params.m_blocks, section = number / section_tiles;
  const uint32_t in_section = number - section * section_tiles, first_head = section * params.section_heads;
  const uint32_t left_heads = params.batch_heads - first_head, full_heads = params.section_heads;
  const uint32_t section_heads = left_heads < full_heads ? left_heads : full_heads;
  const uint32_t row = in_section / section_heads, sections_left = (left_heads - 1) / full_heads;
  const int first_query = (sections_left % 2 ? row : params.m_blocks - 1 - row) * BLOCK_M;
  const int end_query = params.seq_q < first_query + BLOCK_M ? params.seq_q : first_query + BLOCK_M;
  const int last_diagonal = params.first_diagonal + end_query - 1;  // the last query sees this many keys, if there are as many
  const int visible_keys = last_diagonal < params.seq_k ? last_diagonal : params.seq_k;
  const int key_tiles = visible_keys > 0 ? (visible_keys + BLOCK_N - 1) / BLOCK_N : 0;
  return {first_query, static_cast<int>(first_head + in_section % section_heads), key_tiles};
}

struct Head {
  int query_head, kv_head, batch;
};

// The factors of a head's scores and of its output.
struct Scale {
  float log2, inverse_log2;  // |scale * descale of Q * descale of K| * log2(e), and its inverse
  bool is_negated;           // the factor is negative: S is negated
  float v_descale;
};

__device__ __forceinline__ Head make_head(const E4m3Params& params, uint32_t batch_head) {
  const uint32_t batch = batch_head / params.heads, head = batch_head % params.heads;
  return {static_cast<int>(head), static_cast<int>(__umulhi(2 * head + 1, params.kv_head_factor)), static_cast<int>(batch)};
}

// Reads the descales of a head.  A factor of zero, as for a head of zeros, becomes FLT_MIN: all keys still get equal weights, and
// -inf times the factor stays -inf.  With IS_NEXT_V, which is wrong, the descale of V is that of the next head.
template <bool IS_NEXT_V>
__device__ __forceinline__ Scale make_scale(const E4m3Params& params, const Head& head) {
  const int kv_index = head.batch * params.kv_heads + head.kv_head;
  const int v_index = !IS_NEXT_V ? kv_index : head.batch * params.kv_heads + (head.kv_head + 1) % params.kv_heads;
  const float q_descale = __ldg(params.q_descale + head.batch * params.heads + head.query_head);
  const float factor = params.signed_scale_log2 * (q_descale * __ldg(params.k_descale + kv_index));
  const float log2 = fabsf(factor) < FLT_MIN ? FLT_MIN : fabsf(factor);
  return {log2, 1.0f / log2, factor < 0.0f, __ldg(params.v_descale + v_index)};
}

// The work tiles are dealt like cards, in alternating directions, so that all blocks get nearly the same amount of work.  Returns
// the number of the work tile that a block gets in a round.
__host__ __device__ __forceinline__ int dealt_number(int round, int block, int blocks) {
  return round * blocks + (round % 2 ? blocks - 1 - block : block);
}

// The position in a ring of STAGES key tiles.  It goes on from one work tile to the next.
template <int STAGES>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
};

}  // namespace fa

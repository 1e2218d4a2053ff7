// Partial results (O, m and l) that are handed on row by row: to another warpgroup through shared memory, or to another block of the
// cluster by st.async.
#pragma once

#include <math_constants.h>
#include <stdint.h>

#include "fa/ptx.cuh"

namespace fa {

constexpr int WARPGROUP_THREADS = 128;

// One row of every lane of a warpgroup: the lane's elements of O as 16-byte vectors, m times scale * log2(e), and the lane's part
// of l.
template <int D_TILES>  // the 8-column tiles of O
struct PartialRow {
  float4 o[D_TILES / 2][WARPGROUP_THREADS];
  float2 m_and_l[WARPGROUP_THREADS];
};

// The same, in the format in which it is sent to the other block.  The transfer is bound by its
// bytes, so O is cut to 24 bits.  The relative error is then below 2^-15, which is small next to the 2^-11 of the output in fp16.
template <int D_TILES>
struct PackedPartialRow {
  static constexpr int VECTORS = D_TILES * 2 * 3 / 16;  // two values per fragment, 3 bytes each
  uint4 o[VECTORS][WARPGROUP_THREADS];
  float2 m_and_l[WARPGROUP_THREADS];
};

// Returns the four values of a lane's row in the fragments d and d + 1 of O.
template <int D_TILES>
__device__ __forceinline__ float4 o_vector(const float (&o)[D_TILES][4], int row, int d) {
  return make_float4(o[d][2 * row], o[d][2 * row + 1], o[d + 1][2 * row], o[d + 1][2 * row + 1]);
}

// Stores both rows of a lane, with m in log2 and the lane's part of l, for another warpgroup.
template <int D_TILES>
__device__ __forceinline__ void store_partial_rows(
    PartialRow<D_TILES> (&partial_smem)[2], const float (&o)[D_TILES][4], const float (&m)[2], const float (&l)[2], int thread_in_group) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    partial_smem[r].m_and_l[thread_in_group] = make_float2(m[r], l[r]);
#pragma unroll
    for (int d = 0; d < D_TILES; d += 2) partial_smem[r].o[d / 2][thread_in_group] = o_vector(o, r, d);
  }
}

// Merges four incoming values into the same four values of O: o = o * weight + incoming * incoming_weight.
template <int D_TILES>
__device__ __forceinline__ void merge_vector(
    float (&o)[D_TILES][4], int row, int d, float weight, float4 incoming, float incoming_weight) {
  o[d][2 * row] = o[d][2 * row] * weight + incoming.x * incoming_weight;
  o[d][2 * row + 1] = o[d][2 * row + 1] * weight + incoming.y * incoming_weight;
  o[d + 1][2 * row] = o[d + 1][2 * row] * weight + incoming.z * incoming_weight;
  o[d + 1][2 * row + 1] = o[d + 1][2 * row + 1] * weight + incoming.w * incoming_weight;
}

// Merges an incoming row into a lane's row of O: o = o * weight + incoming * incoming_weight.
template <int D_TILES>
__device__ __forceinline__ void merge_row(
    float (&o)[D_TILES][4], int row, float weight, const PartialRow<D_TILES>& incoming, float incoming_weight) {
#pragma unroll
  for (int d = 0; d < D_TILES; d += 2) {
    merge_vector(o, row, d, weight, incoming.o[d / 2][threadIdx.x % WARPGROUP_THREADS], incoming_weight);
  }
}

// Packs the upper 24 bits of four floats into three words.  Word i holds the upper three bytes of float i, and below them one of
// the upper three bytes of the fourth float.
__device__ __forceinline__ void pack_24(uint32_t* words, float4 values) {
  const uint32_t fourth = __float_as_uint(values.w);
  words[0] = __byte_perm(__float_as_uint(values.x), fourth, 0x3215);
  words[1] = __byte_perm(__float_as_uint(values.y), fourth, 0x3216);
  words[2] = __byte_perm(__float_as_uint(values.z), fourth, 0x3217);
}

__device__ __forceinline__ float4 unpack_24(const uint32_t* words) {
  constexpr uint32_t UPPER = ~0xffu;
  const uint32_t fourth = __byte_perm(__byte_perm(words[0], words[1], 0x0040), words[2], 0x4100);
  return make_float4(__uint_as_float(words[0] & UPPER), __uint_as_float(words[1] & UPPER), __uint_as_float(words[2] & UPPER),
                     __uint_as_float(fourth & UPPER));
}

// Sends a row of a lane's O, packed, to the other block, whose mbarrier counts the bytes.  `peer_address` is a function from an
// address in the shared memory of this block to the corresponding address in the other block.
template <int D_TILES, typename PEER_ADDRESS>
__device__ __forceinline__ void send_row(const float (&o)[D_TILES][4], int row, PackedPartialRow<D_TILES>& partial_smem,
                                         uint64_t* barrier_smem, PEER_ADDRESS peer_address) {
  constexpr int VECTORS = PackedPartialRow<D_TILES>::VECTORS;
  uint32_t words[VECTORS * 4];
#pragma unroll
  for (int d = 0; d < D_TILES; d += 2) pack_24(words + d / 2 * 3, o_vector(o, row, d));
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const uint4 vector = make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
    st_async(peer_address(&partial_smem.o[i][threadIdx.x % WARPGROUP_THREADS]), vector, peer_address(barrier_smem));
  }
}

// Merges an incoming packed row into a lane's row of O.
template <int D_TILES>
__device__ __forceinline__ void merge_row(
    float (&o)[D_TILES][4], int row, float weight, const PackedPartialRow<D_TILES>& incoming, float incoming_weight) {
  constexpr int VECTORS = PackedPartialRow<D_TILES>::VECTORS;
  uint32_t words[VECTORS * 4];
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const uint4 vector = incoming.o[i][threadIdx.x % WARPGROUP_THREADS];
    words[4 * i] = vector.x, words[4 * i + 1] = vector.y, words[4 * i + 2] = vector.z, words[4 * i + 3] = vector.w;
  }
#pragma unroll
  for (int d = 0; d < D_TILES; d += 2) merge_vector(o, row, d, weight, unpack_24(words + d / 2 * 3), incoming_weight);
}

struct MergeWeights {
  float own, incoming;
};

// Merges m (in log2) and l of an incoming partial result into `m` and `l`.  Returns the weights for the sum of the two O.
__device__ __forceinline__ MergeWeights merge_m_and_l(float& m, float& l, float2 incoming_m_and_l) {
  const float m_merged = fmaxf(m, incoming_m_and_l.x), m_finite = m_merged == -CUDART_INF_F ? 0.0f : m_merged;
  const MergeWeights weights = {ex2_approx_ftz(m - m_finite), ex2_approx_ftz(incoming_m_and_l.x - m_finite)};
  m = m_merged;
  l = l * weights.own + incoming_m_and_l.y * weights.incoming;
  return weights;
}

// 1 / l, with a relative error of 2^-22; 0 for a row that sees no key.
__device__ __forceinline__ float fast_inverse_of(float l) { return l == 0.0f ? 0.0f : __fdividef(1.0f, l); }

}  // namespace fa

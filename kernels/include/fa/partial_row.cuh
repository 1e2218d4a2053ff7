// Partial results (O, m and l) that are handed on row by row: by a warpgroup to another one, and by a block of a cluster to the other
// one.
#pragma once

#include <math_constants.h>
#include <stdint.h>

#include "fa/omit.cuh"
#include "fa/ptx.cuh"
#include "fa/tma_tile.cuh"
#include "fa/warp.cuh"

namespace fa {

constexpr int WARPGROUP_THREADS = 128;

// One row of every lane of a warpgroup: the lane's elements of O as 16-byte vectors, m times scale * log2(e), and the lane's part
// of l.
template <int D_TILES>  // the 8-column tiles of O
struct PartialRow {
  float4 o[D_TILES / 2][WARPGROUP_THREADS];
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

// Merges the rows of the two blocks of a cluster: sends row 1 - KEPT to the other block, and merges and stores row KEPT.  The shared
// memory of a kernel has `group_partial`, of the first warpgroup, `peer_partial`, of the other block, and the mbarriers
// `peer_m_and_l_full` and `peer_o_full` of the latter.  Without MERGES, which an ablation sets, row KEPT is stored as it is.
template <int KEPT, auto PEER_M_AND_L_FULL, auto PEER_O_FULL, typename T, bool MERGES = true, typename SMEM, int D_TILES>
__device__ __forceinline__ void exchange_partial_rows(
    float (&o)[D_TILES][4], float (&m)[2], float (&l)[2], const MergeWeights (&weights)[2], SMEM& smem, const TmaParams& params,
    const TmaWorkTile& work, int lane_row, int lane) {
  constexpr int SENT = 1 - KEPT, PEER_RANK = SENT;  // the other block finishes row SENT
  const int thread_in_group = threadIdx.x % WARPGROUP_THREADS, query = work.first_query + lane_row + KEPT * 8;
  if constexpr (!MERGES) {
    store_row<T, 2>(o, KEPT, m[KEPT], l[KEPT], params, work, query, lane);
    return;
  }
  const auto peer_address = [](const void* address_smem) { return mapa(smem_address(address_smem), PEER_RANK); };
  st_async(peer_address(&smem.peer_partial.m_and_l[thread_in_group]), make_float2(m[SENT], l[SENT]),
               peer_address(&smem.peer_m_and_l_full));
  merge_row(o, SENT, weights[SENT].own, smem.group_partial[SENT], weights[SENT].incoming);
  send_row(o, SENT, smem.peer_partial, &smem.peer_o_full, peer_address);
  merge_row(o, KEPT, weights[KEPT].own, smem.group_partial[KEPT], weights[KEPT].incoming);
  wait<PEER_M_AND_L_FULL>(&smem.peer_m_and_l_full, 0);
  const MergeWeights peer_weights = merge_m_and_l(m[KEPT], l[KEPT], smem.peer_partial.m_and_l[thread_in_group]);
  l[KEPT] = sum_of_quad(l[KEPT]);
  const float inverse_l = fast_inverse_of(l[KEPT]);
  wait<PEER_O_FULL>(&smem.peer_o_full, 0);  // this block must not exit earlier, because the other one sends to it
  merge_row(o, KEPT, peer_weights.own * inverse_l, smem.peer_partial, peer_weights.incoming * inverse_l);
  store_row<T, 2>(o, KEPT, m[KEPT], l[KEPT], params, work, query, lane);
}

}  // namespace fa

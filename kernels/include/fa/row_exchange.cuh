// The merge of two blocks of a cluster that have the same queries and different keys.  Each block finishes one of the two rows of
// every lane, the one whose number is its rank, and sends the other row to the other block.
//
// The shared memory of a kernel has `peer_partial`, a PeerPartial, and `peer_partial_full`, an mbarrier that counts its bytes.
#pragma once

#include <math_constants.h>
#include <stdint.h>

#include "fa/epilogue.cuh"
#include "fa/group_merge.cuh"
#include "fa/params.cuh"
#include "fa/ptx.cuh"
#include "fa/tile.cuh"
#include "fa/warp.cuh"

namespace fa {

// The merged part of a row of every lane of a block: pairs of O, m in log2 and l.
template <int ROW_PAIRS, int THREADS>
struct PeerPartial {
  float4 o[ROW_PAIRS / 2][THREADS];
  float2 m_and_l[THREADS];
};

// The row of this lane that this block finishes.
template <int ROW_PAIRS>
struct Row {
  float2 o[ROW_PAIRS];
  float m_log2, l;
};

// Sends one row of this lane's columns to the block that finishes it.
template <typename SMEM, int ROW_PAIRS>
__device__ __forceinline__ void send_row(SMEM& smem, const Merged<ROW_PAIRS>& merged, int row, uint32_t to_rank) {
  const auto peer_address = [&](const void* address_smem) { return mapa(smem_address(address_smem), to_rank); };
  const uint32_t peer_barrier = peer_address(&smem.peer_partial_full);
#pragma unroll
  for (int i = 0; i < ROW_PAIRS; i += 2) {
    const float2 a = merged.o[row * ROW_PAIRS + i], b = merged.o[row * ROW_PAIRS + i + 1];
    st_async(peer_address(&smem.peer_partial.o[i / 2][threadIdx.x]), make_float4(a.x, a.y, b.x, b.y), peer_barrier);
  }
  const float m = merged.l[row] > 0.0f ? merged.m_log2[row] : -CUDART_INF_F;
  st_async(peer_address(&smem.peer_partial.m_and_l[threadIdx.x]), make_float2(m, merged.l[row]), peer_barrier);
}

// Sends the other block's row, and returns this block's.
template <typename SMEM, int ROW_PAIRS>
__device__ __forceinline__ Row<ROW_PAIRS> exchange_rows(SMEM& smem, const Merged<ROW_PAIRS>& merged, int rank) {
  Row<ROW_PAIRS> kept;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    if (row == rank) {
#pragma unroll
      for (int i = 0; i < ROW_PAIRS; ++i) kept.o[i] = merged.o[row * ROW_PAIRS + i];
      kept.m_log2 = merged.l[row] > 0.0f ? merged.m_log2[row] : -CUDART_INF_F;
      kept.l = merged.l[row];
    } else {
      send_row(smem, merged, row, row);
    }
  }
  return kept;
}

// Merges what the other block has sent, and normalises.  A row that sees no key is zero.
template <int ROW_PAIRS, int THREADS>
__device__ __forceinline__ void merge_peer(Row<ROW_PAIRS>& row, const PeerPartial<ROW_PAIRS, THREADS>& peer) {
  const float2 peer_m_and_l = peer.m_and_l[threadIdx.x];
  const float m_merged = fmaxf(row.m_log2, peer_m_and_l.x), m_finite = m_merged == -CUDART_INF_F ? 0.0f : m_merged;
  const float weight = ex2_approx_ftz(row.m_log2 - m_finite), peer_weight = ex2_approx_ftz(peer_m_and_l.x - m_finite);
  row.m_log2 = m_finite;
  row.l = row.l * weight + peer_m_and_l.y * peer_weight;
  const float inverse_l = inverse_of(row.l), own_factor = weight * inverse_l, peer_factor = peer_weight * inverse_l;
#pragma unroll
  for (int i = 0; i < ROW_PAIRS; i += 2) {
    const float4 incoming = peer.o[i / 2][threadIdx.x];
    row.o[i].x = row.o[i].x * own_factor + incoming.x * peer_factor;
    row.o[i].y = row.o[i].y * own_factor + incoming.y * peer_factor;
    row.o[i + 1].x = row.o[i + 1].x * own_factor + incoming.z * peer_factor;
    row.o[i + 1].y = row.o[i + 1].y * own_factor + incoming.w * peer_factor;
  }
}

// Stores the columns of this group of a row, and the log-sum-exp.  The lanes of a quad exchange registers, so that each lane stores
// 16 contiguous bytes.
template <typename T, typename PARAMS, int ROW_PAIRS>
__device__ __forceinline__ void store_row(
    const Row<ROW_PAIRS>& row, const PARAMS& params, uint32_t head, uint32_t heads, int query, int group, int lane) {
  uint4* to_gmem = params.out + (uint64_t(blockIdx.z) * params.out_strides.batch + uint64_t(head) * params.out_strides.head) +
                   (uint64_t(query) * params.out_strides.row + group * ROW_PAIRS + lane % QUAD);
#pragma unroll
  for (int i = 0; i < ROW_PAIRS; i += QUAD) {
    uint32_t packed[QUAD];
#pragma unroll
    for (int j = 0; j < QUAD; ++j) packed[j] = cvt_rn_x2<T>(row.o[i + j].x, row.o[i + j].y);
    transpose_quad(packed, lane);
    if (query < params.seq_q) to_gmem[i] = make_uint4(packed[0], packed[1], packed[2], packed[3]);
  }
  if (params.lse != nullptr && group == 0 && lane % QUAD == 0 && query < params.seq_q) {
    float* lse_gmem = params.lse + (uint64_t(blockIdx.z) * heads + head) * params.seq_q;
    lse_gmem[query] = lse_of(row.m_log2, row.l);
  }
}

}  // namespace fa

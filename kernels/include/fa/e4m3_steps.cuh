// What a computing warpgroup of the e4m3 kernels does: the two products of a key tile, and the end of a work tile.
#pragma once

#include <type_traits>

#include "fa/e4m3.cuh"
#include "fa/e4m3_tile.cuh"
#include "fa/wgmma_e4m3.cuh"

namespace fa {

// The phases of the e4m3 kernels.
enum E4m3Phase { NO_PHASE, QK, SOFTMAX, PV, PRODUCTS };

constexpr int FIRST_TURN_BARRIER = 1, FIRST_GROUP_BARRIER = 8;  // named barriers, one per computing warpgroup

// The descriptors of the operands in shared memory.
template <typename SHAPE>
struct Operands {
  uint64_t q, first_k, first_v;
  __device__ __forceinline__ uint64_t k(int stage) const { return first_k + stage * (SHAPE::K_BYTES >> 4); }  // in units of 16 bytes
  __device__ __forceinline__ uint64_t v(int stage) const { return first_v + stage * (SHAPE::V_BYTES >> 4); }
};

// Releases a buffer that this warp has read.  Where BARRIER is omitted, it is released early: before it is read.
template <E4m3Barrier BARRIER>
__device__ __forceinline__ void release(uint64_t* barrier_smem, bool is_early, int lane) {
  if (is_early == IS_OMITTED_BARRIER<BARRIER> && lane == 0) mbarrier_arrive(barrier_smem);
  if (is_early) delay_if_omitted<BARRIER>();  // the producer overwrites the buffer meanwhile
}

// Starts S = Q K^T.
template <typename SHAPE>
__device__ __forceinline__ void start_s(float (&s)[SHAPE::S_TILES][4], uint64_t q, uint64_t k) {
  constexpr bool IS_OMITTED = IS_OMITTED_PHASE<QK> || IS_OMITTED_PHASE<PRODUCTS>;
  wgmma_fence();
#pragma unroll
  for (int d = 0; d < (IS_OMITTED ? E4M3_MMA_K : SHAPE::HEAD_DIM); d += E4M3_MMA_K) {
    wgmma_m64k32_e4m3(s, q + SHAPE::qk_step_bytes(d) / 16, k + SHAPE::qk_step_bytes(d) / 16, d > 0);
  }
  wgmma_commit_group();
}

// Starts O += P V, or P V alone.  `o` may have fewer columns; `v` is then the first row of V^T that belongs to them.
template <typename SHAPE, bool ADDS_UP, int TILES>
__device__ __forceinline__ void start_pv(float (&o)[TILES][4], const uint32_t (&p)[SHAPE::P_TILES][4], uint64_t v) {
  constexpr bool IS_OMITTED = IS_OMITTED_PHASE<PV> || IS_OMITTED_PHASE<PRODUCTS>;
  wgmma_fence();
#pragma unroll
  for (int n = 0; n < (IS_OMITTED ? 1 : SHAPE::P_TILES); ++n) {
    wgmma_m64k32_e4m3(o, p[n], v + SHAPE::pv_step_bytes(n * E4M3_MMA_K) / 16, ADDS_UP || n > 0);
  }
  wgmma_commit_group();
}

// Rounds P.  Four adjacent accumulator fragments of S form one A fragment of P.
template <typename SHAPE>
__device__ __forceinline__ void round_p(uint32_t (&p)[SHAPE::P_TILES][4], const float (&s)[SHAPE::S_TILES][4]) {
#pragma unroll
  for (int n = 0; n < SHAPE::P_TILES; ++n) make_p_fragment(p[n], s, n * E4M3_MMA_K / MMA_N);
}

// Adds P V of a key tile to O, from its 8-column tile FIRST on.
template <int FIRST = 0, int TILES, int PV_TILES>
__device__ __forceinline__ void add_tile(float (&o)[PV_TILES][4], const float (&o_of_tile)[TILES][4]) {
#pragma unroll
  for (int d = 0; d < TILES; ++d) {
#pragma unroll
    for (int i = 0; i < 4; ++i) o[FIRST + d][i] += o_of_tile[d][i];
  }
}

template <int PV_TILES>
__device__ __forceinline__ void rescale_o(float (&o)[PV_TILES][4], const float (&rescale)[LANE_ROWS]) {
#pragma unroll
  for (int d = 0; d < PV_TILES; ++d) {
#pragma unroll
    for (int i = 0; i < 4; ++i) o[d][i] *= rescale[i / 2];
  }
}

// Normalises O, and stores the log-sum-exp.  A row that sees no key is zero, and its log-sum-exp is -inf.
template <typename SHAPE, typename SOFTMAX>
__device__ __forceinline__ void normalise(float (&o)[SHAPE::PV_TILES][4], const SOFTMAX& softmax, const Scale& scale,
                                          const E4m3Params& params, const Head& head, int query, int lane) {
#pragma unroll
  for (int r = 0; r < LANE_ROWS; ++r) {
    const float l = SHAPE::HAS_ONES ? o[SHAPE::PV_TILES - 1][2 * r] : sum_of_quad(softmax.l[r]);
    const float inverse_l = l == 0.0f ? 0.0f : scale.v_descale / l;
#pragma unroll
    for (int d = 0; d < SHAPE::O_TILES; ++d) o[d][2 * r] *= inverse_l, o[d][2 * r + 1] *= inverse_l;
    if (params.lse != nullptr && lane % QUAD == 0 && query + r * 8 < params.seq_q) {
      float* lse_gmem = params.lse + (uint64_t(head.batch) * params.heads + head.query_head) * params.seq_q;
      lse_gmem[query + r * 8] = l == 0.0f ? -CUDART_INF_F : (softmax.m_log2[r] + log2f(l)) * CUDART_LN2_F;
    }
  }
}

// Stores O through shared memory, when the previous store has read it.
template <typename SHAPE, typename Out>
__device__ __forceinline__ void store_o(const float (&o)[SHAPE::PV_TILES][4], Smem<Out, SHAPE>& smem, const CUtensorMap& o_map,
                                        const E4m3Params& params, const WorkTile& work, const Head& head, int group,
                                        int thread_in_group, int lane) {
  Out* const o_smem = smem.o[group];
  const int group_barrier = FIRST_GROUP_BARRIER + group;
  if (thread_in_group == 0) cp_async_bulk_wait_group_read();
  barrier_sync<GROUP_THREADS>(group_barrier);
  if (thread_in_group >= WARP) delay_if_omitted<O_WRITTEN>();
#pragma unroll
  for (int d = 0; d < SHAPE::O_TILES; d += 2) {
    const int row = thread_in_group / WARP * MMA_M + lane % 16, column = d * MMA_N + lane / 16 * MMA_N;
    const Out* to_smem = o_smem + column / BOX_COLUMNS * GROUP_M * BOX_COLUMNS + row * BOX_COLUMNS + (column % BOX_COLUMNS ^ row % 8 * 8);
    stmatrix_x4(smem_address(to_smem), cvt_rn_x2<Out>(o[d][0], o[d][1]), cvt_rn_x2<Out>(o[d][2], o[d][3]),
                    cvt_rn_x2<Out>(o[d + 1][0], o[d + 1][1]), cvt_rn_x2<Out>(o[d + 1][2], o[d + 1][3]));
  }
  fence_proxy_async();
  sync_threads<O_WRITTEN, GROUP_THREADS>(group_barrier);
  const int group_query = work.first_query + group * GROUP_M;
  if (thread_in_group == 0 && group_query < params.seq_q) {
#pragma unroll
    for (int d = 0; d < SHAPE::HEAD_DIM; d += BOX_COLUMNS) {
      cp_async_bulk_tensor_4d_store(o_map, d, group_query, head.query_head, head.batch, o_smem + d * GROUP_M);
    }
    cp_async_bulk_commit_group();
  }
}

}  // namespace fa

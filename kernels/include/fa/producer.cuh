// The producer of long_ring: one thread that loads Q, K and V of all work tiles of a block, through rings of key tiles.
#pragma once

#include "fa/omit.cuh"
#include "fa/ragged.cuh"
#include "fa/ring.cuh"
#include "fa/schedule.cuh"
#include "fa/shape.cuh"

namespace fa {

// The shared memory of a block.  Q and K are [BOXED_DIM / BOX_COLUMNS, rows, BOX_COLUMNS], swizzled by TMA, V and O
// the same with BOXED_DIM_V.  Where HEAD_DIM ends inside a box, TMA fills its other columns with zeros.
template <typename T, typename SHAPE, int STAGES>
struct RingSmem {
  alignas(1024) T q[SHAPE::GROUPS][GROUP_M * SHAPE::BOXED_DIM];
  alignas(1024) T o[SHAPE::GROUPS][GROUP_M * SHAPE::BOXED_DIM_V];
  alignas(1024) T k[STAGES][SHAPE::BLOCK_N * SHAPE::BOXED_DIM];
  alignas(1024) T v[STAGES][SHAPE::BLOCK_N * SHAPE::BOXED_DIM_V];
  uint64_t unused;  // keeps the places of the mbarriers, and with them the machine code whose times are recorded
  uint64_t q_full, q_empty, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};

// Initialises the mbarriers of the tiles of K and V, after all others.  Called by one thread.
template <typename SHAPE, typename SMEM>
__device__ __forceinline__ void init_key_mbarriers(SMEM& smem) {
  constexpr int STAGES = sizeof(smem.k_full) / sizeof(uint64_t);
#pragma unroll
  for (int stage = 0; stage < STAGES; ++stage) {
    mbarrier_init(&smem.k_full[stage], 1);
    mbarrier_init(&smem.v_full[stage], 1);
    mbarrier_init(&smem.k_empty[stage], SHAPE::COMPUTING_WARPS);
    mbarrier_init(&smem.v_empty[stage], SHAPE::COMPUTING_WARPS);
  }
  fence_mbarrier_init();
}

// Initialises the mbarriers.  Called by one thread.
template <typename SHAPE, typename SMEM>
__device__ __forceinline__ void init_mbarriers(SMEM& smem) {
  mbarrier_init(&smem.q_full, 1);
  mbarrier_init(&smem.q_empty, SHAPE::COMPUTING_WARPS);
  init_key_mbarriers<SHAPE>(smem);
}

// Loads Q, K and V of the work tiles that `deal` gives to this block, K one tile ahead of V.  Called by one thread.  Q_FULL and
// V_FULL are the barriers that a planted fault may omit.
template <auto Q_FULL, auto V_FULL, typename SHAPE, typename DEAL, typename PARAMS, typename SMEM>
__device__ __forceinline__ void produce(const DEAL& deal, const PARAMS& params, const CUtensorMap& q_map, const CUtensorMap& k_map,
                                        const CUtensorMap& v_map, SMEM& smem) {
  constexpr int HEAD_DIM = SHAPE::HEAD_DIM, STAGES = sizeof(smem.k_full) / sizeof(uint64_t);
  Ring<STAGES> k_ring, v_ring;
  uint32_t q_phase = 0;
#pragma unroll 1
  for (int round = 0, number; (number = deal.number(round)) < params.work_tiles; ++round) {
    const auto work = find_work_tile<SHAPE>(params, number);
    if (work.key_tiles == 0) {
      if constexpr (SHAPE::O_OVER_Q) {  // the place of Q is given to O all the same
        wait(&smem.q_empty, q_phase ^ 1);
        q_phase ^= 1;
        mbarrier_arrive(&smem.q_full);
      }
      continue;
    }
    const KeyTiles keys = deal.key_tiles(work, round);
    const Head head = make_head(params, work.batch_head);
    const Origin queries = origin_of_queries(work, head);
    auto load_k = [&](int j) {
      wait(&smem.k_empty[k_ring.stage], k_ring.phase ^ 1);
      load_keys<SHAPE, HEAD_DIM>(smem.k[k_ring.stage], k_map, params, work, j, head, &smem.k_full[k_ring.stage]);
      k_ring.advance();
    };
    wait(&smem.q_empty, q_phase ^ 1);
    q_phase ^= 1;
    auto load_q = [&] {
      mbarrier_arrive_expect_tx(&smem.q_full, SHAPE::Q_BYTES);
#pragma unroll
      for (int g = 0; g < SHAPE::GROUPS; ++g) {
        const int first_query = queries.row + work.first_query + g * GROUP_M;
        load_rows<HEAD_DIM, GROUP_M>(smem.q[g], q_map, first_query, head.query_head, queries.batch, &smem.q_full);
      }
    };
    if (!IS_OMITTED_BARRIER<Q_FULL>) load_q();
    load_k(keys.end - 1);
    if (IS_OMITTED_BARRIER<Q_FULL>) delay_if_omitted<Q_FULL>(), load_q();  // K arrives before Q, so that the error shows
#pragma unroll 1
    for (int j = keys.end - 1; j >= keys.first; --j) {
      if (j > keys.first) load_k(j - 1);
      wait(&smem.v_empty[v_ring.stage], v_ring.phase ^ 1);
      delay_if_omitted<V_FULL>();
      load_keys<SHAPE, SHAPE::HEAD_DIM_V>(smem.v[v_ring.stage], v_map, params, work, j, head, &smem.v_full[v_ring.stage]);
      v_ring.advance();
    }
  }
}

}  // namespace fa

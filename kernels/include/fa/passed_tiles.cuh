// Work tiles that the producer finds and passes to one computing warpgroup in shared memory, one ahead, each with its Q.
#pragma once

#include "fa/producer.cuh"

namespace fa {

// What the warpgroup needs to know of a work tile.
struct PassedTile {
  static constexpr int NONE = -1;
  int first_query;  // NONE behind the last work tile
  int has_key_tiles;  // 0 if no query sees a key because of the end of its window or of the keys
  KeyTiles keys;      // at least one, even then
  Head head;
  float sink_log2;  // of the head; -inf without one
};

constexpr int PASSED = 2;  // work tiles in shared memory at the same time

// The shared memory of a block, as in RingSmem.
template <typename T, typename SHAPE, int STAGES>
struct PassedSmem {
  static_assert(SHAPE::GROUPS == 1, "one warpgroup reads Q");
  alignas(1024) T q[PASSED][GROUP_M * SHAPE::BOXED_DIM];
  alignas(1024) T o[GROUP_M * SHAPE::BOXED_DIM_V];
  alignas(1024) T k[STAGES][SHAPE::BLOCK_N * SHAPE::BOXED_DIM];
  alignas(1024) T v[STAGES][SHAPE::BLOCK_N * SHAPE::BOXED_DIM_V];
  PassedTile tiles[PASSED];
  // q_full: TMA has written Q, and the producer the work tile; q_empty: the warpgroup needs neither any more.
  uint64_t q_full[PASSED], q_empty[PASSED], k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};

// Initialises the mbarriers.  Called by one thread.
template <typename SHAPE, typename T, int STAGES>
__device__ __forceinline__ void init_mbarriers(PassedSmem<T, SHAPE, STAGES>& smem) {
#pragma unroll
  for (int i = 0; i < PASSED; ++i) {
    mbarrier_init(&smem.q_full[i], 1);
    mbarrier_init(&smem.q_empty[i], SHAPE::COMPUTING_WARPS);
  }
  init_key_mbarriers<SHAPE>(smem);
}

// Passes the work tiles that `deal` gives to this block, and loads their Q, K and V, K one tile ahead of V.  There must be keys.
// Called by one thread.
template <typename SHAPE, typename DEAL, typename PARAMS, typename T, int STAGES>
__device__ __forceinline__ void produce_passed(const DEAL& deal, const PARAMS& params, const CUtensorMap& q_map,
                                               const CUtensorMap& k_map, const CUtensorMap& v_map,
                                               PassedSmem<T, SHAPE, STAGES>& smem) {
  constexpr int HEAD_DIM = SHAPE::HEAD_DIM;
  Ring<PASSED> passed;
  Ring<STAGES> k_ring, v_ring;
#pragma unroll 1
  for (int round = 0, number; (number = deal.number(round)) < params.work_tiles; ++round, passed.advance()) {
    const WorkTile work = make_work_tile<SHAPE>(params, number);
    const Head head = make_head(params, work.batch_head);
    const KeyTiles seen = deal.key_tiles(work, round), keys = work.key_tiles > 0 ? seen : KeyTiles{0, 1};
    const float sink_log2 = params.sink != nullptr ? __ldg(params.sink + head.query_head) * CUDART_L2E_F : -CUDART_INF_F;
    auto load_k = [&](int j) {
      wait(&smem.k_empty[k_ring.stage], k_ring.phase ^ 1);
      load_keys<SHAPE, HEAD_DIM>(smem.k[k_ring.stage], k_map, params, work, j, head, &smem.k_full[k_ring.stage]);
      k_ring.advance();
    };
    uint64_t* const q_full = &smem.q_full[passed.stage];
    wait(&smem.q_empty[passed.stage], passed.phase ^ 1);
    smem.tiles[passed.stage] = {work.first_query, work.key_tiles > 0, keys, head, sink_log2};
    mbarrier_arrive_expect_tx(q_full, SHAPE::Q_BYTES);
    load_rows<HEAD_DIM, GROUP_M>(smem.q[passed.stage], q_map, work.first_query, head.query_head, head.batch, q_full);
    load_k(keys.end - 1);
#pragma unroll 1
    for (int j = keys.end - 1; j >= keys.first; --j) {
      if (j > keys.first) load_k(j - 1);
      wait(&smem.v_empty[v_ring.stage], v_ring.phase ^ 1);
      load_keys<SHAPE, SHAPE::HEAD_DIM_V>(smem.v[v_ring.stage], v_map, params, work, j, head, &smem.v_full[v_ring.stage]);
      v_ring.advance();
    }
  }
  wait(&smem.q_empty[passed.stage], passed.phase ^ 1);
  smem.tiles[passed.stage].first_query = PassedTile::NONE;
  mbarrier_arrive(&smem.q_full[passed.stage]);
}

}  // namespace fa

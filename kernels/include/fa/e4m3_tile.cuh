// The memory of the persistent e4m3 kernels: the sizes of a work tile, its buffers and barriers, and the producer that fills them.
#pragma once

#include "fa/e4m3_softmax.cuh"
#include "fa/omit.cuh"
#include "fa/ring.cuh"
#include "fa/warpgroup.cuh"

namespace fa {

// The barriers of the e4m3 kernels and what each guarantees.
// Omitting an _EMPTY barrier means to release the memory before it is read, because without any release the phases of the
// mbarriers would no longer match.
enum E4m3Barrier {
  NONE,
  Q_FULL,      // TMA has written Q
  K_FULL,      // TMA has written a tile of K
  V_FULL,      // TMA has written a tile of V
  Q_EMPTY,     // all warpgroups have read Q
  K_EMPTY,     // all warpgroups have read the tile of K
  V_EMPTY,     // all warpgroups have read the tile of V
  O_WRITTEN,   // all threads of the warpgroup have written O to shared memory
  V_WRITTEN,   // all threads of a block have written the tile of V that they transpose to shared memory
  PART_STORED  // all threads of the warpgroup have stored their partial result in the workspace
};

// The sizes of one work tile.  With HAS_ONES_, V has eight more columns that are one.
template <int HEAD_DIM_, int GROUPS_, int BLOCK_N_, bool HAS_ONES_>
struct Shape {
  static constexpr int HEAD_DIM = HEAD_DIM_, GROUPS = GROUPS_, BLOCK_N = BLOCK_N_, STAGES = 2;
  static constexpr int BLOCK_M = GROUPS * GROUP_M, THREADS = (GROUPS + 1) * GROUP_THREADS;
  static constexpr int BLOCKS_PER_SM = GROUPS == 1 ? 2 : 1;
  // All threads of a block start with the same number of registers, a multiple of 8.  The producer then gives most of its own to
  // the others.  setmaxnreg.inc would wait for ever if there were not enough.
  static constexpr int START_REGISTERS = 65536 / BLOCKS_PER_SM / THREADS / 8 * 8;
  static constexpr int PRODUCER_REGISTERS = GROUPS == 3 ? 32 : 24;
  static constexpr int REGISTERS = GROUPS == 1 ? 232 : GROUPS == 2 ? 240 : GROUPS == 3 ? 160 : 112;
  static_assert(1 <= GROUPS && GROUPS <= 4, "the registers are given for one to four computing warpgroups");
  static constexpr int ALL_REGISTERS = PRODUCER_REGISTERS + GROUPS * REGISTERS;  // of one thread of each warpgroup
  static_assert(ALL_REGISTERS <= (GROUPS + 1) * START_REGISTERS, "no registers are created");
  static constexpr bool HAS_ONES = HAS_ONES_;
  static constexpr int S_TILES = BLOCK_N / MMA_N, P_TILES = BLOCK_N / E4M3_MMA_K, O_TILES = HEAD_DIM / MMA_N;
  static constexpr int PV_TILES = O_TILES + HAS_ONES;
  // Rows of Q and K have HEAD_DIM bytes, which is also the span of their swizzle.  V^T has a panel [V_ROWS, PANEL_KEYS] for each
  // PANEL_KEYS keys of a tile, with a swizzle of that span.
  static constexpr int PANEL_KEYS = BLOCK_N % 128 == 0 ? 128 : BLOCK_N % 64 == 0 ? 64 : 32, V_ROWS = PV_TILES * MMA_N;
  static_assert(BLOCK_N % PANEL_KEYS == 0 && PANEL_KEYS % E4M3_MMA_K == 0, "a tile has whole panels, and a panel whole steps of P V");
  static constexpr int Q_BYTES = BLOCK_M * HEAD_DIM, K_BYTES = BLOCK_N * HEAD_DIM;
  static constexpr int V_LOADED_BYTES = BLOCK_N * HEAD_DIM, PANEL_BYTES = V_ROWS * PANEL_KEYS, V_BYTES = BLOCK_N * V_ROWS;
  static_assert(GROUP_M * HEAD_DIM % 1024 == 0 && K_BYTES % 1024 == 0, "the pattern of a swizzle repeats every 1024 bytes or less");
  static_assert(PANEL_BYTES % (8 * PANEL_KEYS) == 0 && V_BYTES % (8 * PANEL_KEYS) == 0, "a panel begins where the pattern does");
  // The distances of the operands of successive wgmma from the first one, in bytes.
  static __host__ __device__ constexpr int qk_step_bytes(int d) { return d; }
  static __host__ __device__ constexpr int pv_step_bytes(int key) { return key / PANEL_KEYS * PANEL_BYTES + key % PANEL_KEYS; }
};

template <typename Out, typename SHAPE>
struct Smem {
  alignas(1024) uint8_t q[SHAPE::GROUPS][GROUP_M * SHAPE::HEAD_DIM];   // [rows, HEAD_DIM], swizzled by TMA
  alignas(1024) Out o[SHAPE::GROUPS][GROUP_M * SHAPE::HEAD_DIM];    // [HEAD_DIM / BOX_COLUMNS, rows, BOX_COLUMNS], swizzled
  alignas(1024) uint8_t k[SHAPE::STAGES][SHAPE::K_BYTES];              // [keys, HEAD_DIM], swizzled by TMA
  alignas(1024) uint8_t v[SHAPE::STAGES][SHAPE::V_BYTES];              // [panels, V_ROWS, PANEL_KEYS], swizzled by TMA
  uint64_t q_full, q_empty, k_full[SHAPE::STAGES], k_empty[SHAPE::STAGES], v_full[SHAPE::STAGES], v_empty[SHAPE::STAGES];
};

// Initialises the barriers, and the rows of ones.
template <typename Out, typename SHAPE>
__device__ __forceinline__ void initialise(Smem<Out, SHAPE>& smem) {
  constexpr int COMPUTING_WARPS = SHAPE::GROUPS * GROUP_THREADS / WARP;  // one lane of each releases a buffer
  if (threadIdx.x == 0) {
    mbarrier_init(&smem.q_full, 1);
    mbarrier_init(&smem.q_empty, COMPUTING_WARPS);
#pragma unroll
    for (int stage = 0; stage < SHAPE::STAGES; ++stage) {
      mbarrier_init(&smem.k_full[stage], 1);
      mbarrier_init(&smem.v_full[stage], 1);
      mbarrier_init(&smem.k_empty[stage], COMPUTING_WARPS);
      mbarrier_init(&smem.v_empty[stage], COMPUTING_WARPS);
    }
    fence_mbarrier_init();
  }
  if constexpr (SHAPE::HAS_ONES) {  // the rows of each panel after those that TMA writes
    constexpr int ONES_BYTES = MMA_N * SHAPE::PANEL_KEYS, PANELS = SHAPE::STAGES * SHAPE::BLOCK_N / SHAPE::PANEL_KEYS;
    constexpr uint8_t E4M3_ONE = 0x38;
    uint8_t* const first_ones = smem.v[0] + SHAPE::HEAD_DIM * SHAPE::PANEL_KEYS;  // the panels of all stages are contiguous
    for (int i = threadIdx.x; i < PANELS * ONES_BYTES; i += SHAPE::THREADS) {
      first_ones[i / ONES_BYTES * SHAPE::PANEL_BYTES + i % ONES_BYTES] = E4M3_ONE;
    }
    fence_proxy_async();
  }
}

// The producer: loads Q, K and V of the work tiles that `deal` gives to this block.  K is loaded one tile ahead of V.
template <typename DEAL, typename Out, typename SHAPE>
__device__ __forceinline__ void produce(const DEAL& deal, const E4m3Params& params, const CUtensorMap& q_map,
                                        const CUtensorMap& k_map, const CUtensorMap& v_map, Smem<Out, SHAPE>& smem) {
  constexpr int BLOCK_N = SHAPE::BLOCK_N;
  Ring<SHAPE::STAGES> k_ring, v_ring;
  uint32_t q_phase = 0;
#pragma unroll 1
  for (int round = 0, number; (number = deal.number(round)) < params.work_tiles; ++round) {
    const WorkTile work = make_work_tile<SHAPE>(params, number);
    if (work.key_tiles == 0) continue;
    const KeyTiles keys = deal.key_tiles(work, round);
    const Head head = make_head(params, work.batch_head);
    auto load_k = [&](int j) {
      wait(&smem.k_empty[k_ring.stage], k_ring.phase ^ 1);
      mbarrier_arrive_expect_tx(&smem.k_full[k_ring.stage], SHAPE::K_BYTES);
      cp_async_bulk_tensor_4d(smem.k[k_ring.stage], k_map, 0, j * BLOCK_N, head.kv_head, head.batch, &smem.k_full[k_ring.stage]);
      k_ring.advance();
    };
    wait(&smem.q_empty, q_phase ^ 1);
    q_phase ^= 1;
    auto load_q = [&] {
      mbarrier_arrive_expect_tx(&smem.q_full, SHAPE::Q_BYTES);
#pragma unroll
      for (int g = 0; g < SHAPE::GROUPS; ++g) {
        cp_async_bulk_tensor_4d(smem.q[g], q_map, 0, work.first_query + g * GROUP_M, head.query_head, head.batch, &smem.q_full);
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
      mbarrier_arrive_expect_tx(&smem.v_full[v_ring.stage], SHAPE::V_LOADED_BYTES);
#pragma unroll
      for (int key = 0; key < BLOCK_N; key += SHAPE::PANEL_KEYS) {
        cp_async_bulk_tensor_4d(smem.v[v_ring.stage] + SHAPE::pv_step_bytes(key), v_map, j * BLOCK_N + key, 0, head.kv_head,
                                    head.batch, &smem.v_full[v_ring.stage]);
      }
      v_ring.advance();
    }
  }
}

}  // namespace fa

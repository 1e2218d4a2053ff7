// The sums of dQ by the copy engine: a computing warpgroup writes its part of a step to shared memory, from where a thread of the
// producer adds it to the sums in memory.
#pragma once

#include "fa/backward_step.cuh"

namespace fa {

template <typename T, int HEAD_DIM>
struct BulkSmem : BackwardSmem<T, HEAD_DIM> {
  alignas(128) float dq[BackwardShape::GROUPS][PANEL];
  uint64_t dq_full[BackwardShape::GROUPS], dq_empty[BackwardShape::GROUPS];
};

// Initialises the mbarriers.  Called by one thread.
template <typename T, int HEAD_DIM>
__device__ __forceinline__ void init_bulk_mbarriers(BulkSmem<T, HEAD_DIM>& smem) {
#pragma unroll
  for (int group = 0; group < BackwardShape::GROUPS; ++group) {
    mbarrier_init(&smem.dq_full[group], GROUP_THREADS / WARP);
    mbarrier_init(&smem.dq_empty[group], 1);
  }
  init_backward_mbarriers(smem);
}

// Waits until the blocks before this one have added their parts of a panel of dQ.  TURN is the barrier that a planted fault may omit.
template <auto... TURN>
__device__ __forceinline__ void await_turn(const int* turn, int block) {
  if constexpr ((IS_OMITTED_BARRIER<TURN> || ...)) return;
  while (ld_acquire(turn) < block) {
  }
  fence_proxy_async_global();
}

// Lets the next block add its part, when memory has that of this one.
__device__ __forceinline__ void end_turn(int* turn, int block) {
  cp_async_bulk_wait_group();  // and a fence between the proxies, which the end of a bulk operation includes
  st_release(turn, block + 1);
}

// Adds the parts of dQ of a computing warpgroup.  Called by one thread.  DQ_FULL, DQ_EMPTY and TURN are the barriers that a planted
// fault may omit.
template <auto DQ_FULL, auto DQ_EMPTY, auto... TURN, typename T, int HEAD_DIM>
__device__ __forceinline__ void add_dq(
    const BackwardCall& call, const BackwardWalk& walk, BulkSmem<T, HEAD_DIM>& smem, int group) {
  using Sizes = BackwardStep<HEAD_DIM>;
  uint32_t phase = 0;
#pragma unroll 1
  for (BackwardWalk::Visit visit = walk.first(); walk.has(visit); visit = walk.after(visit), phase ^= 1) {
    const int64_t first_row = (walk.batch * call.forward.heads + visit.head) * call.padded_q + walk.tile_of(visit) * Sizes::QUERIES;
    const int64_t panel = first_row * HEAD_DIM / PANEL + group;
    wait<DQ_FULL>(&smem.dq_full[group], phase);
    for (int i = 0; i < 8; ++i) delay_if_omitted<DQ_EMPTY>();  // longer than a step
    if constexpr (IN_TURNS) await_turn<TURN...>(call.turns + panel, walk.first_key / BLOCK_KEYS);
    cp_reduce_async_bulk_add(call.dq_sums + panel * PANEL, smem.dq[group], sizeof(smem.dq[group]));
    cp_async_bulk_commit_group();
    cp_async_bulk_wait_group_read();
    wait_late_if_omitted<DQ_FULL>(&smem.dq_full[group], phase);
    mbarrier_arrive(&smem.dq_empty[group]);
    if constexpr (IN_TURNS) end_turn(call.turns + panel, walk.first_key / BLOCK_KEYS);
  }
}

// Writes a part of dQ to shared memory, when the one before it has been read.
template <auto DQ_EMPTY>
__device__ __forceinline__ void write_dq(
    float* dq_smem, const float (&dq)[S_TILES][4], uint64_t* full, uint64_t* empty, uint32_t phase, int thread_in_group) {
  wait<DQ_EMPTY>(empty, phase ^ 1);
#pragma unroll
  for (int n = 0; n < S_TILES; ++n) {
    float4* const to_smem = reinterpret_cast<float4*>(dq_smem) + n * GROUP_THREADS + thread_in_group;
    *to_smem = make_float4(dq[n][0], dq[n][1], dq[n][2], dq[n][3]);
  }
  wait_late_if_omitted<DQ_EMPTY>(empty, phase ^ 1);
  fence_proxy_async();
  __syncwarp();
  if (thread_in_group % WARP == 0) mbarrier_arrive(full);
}

}  // namespace fa

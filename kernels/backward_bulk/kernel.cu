// backward_bulk: dQ is added by the copy engine.
// step:    a warpgroup writes its part of dQ to shared memory, from where a thread of the producer adds it by bulk reductions
// because: in backward_overlap, each thread issues eight atomic additions in a step, and the next fence may wait for them
// expect:  at b1h16s4096d128, 580 TFLOP/s without a mask and 480 with a causal one; slower if the bandwidth of shared memory, of which
//          dQ then takes a fifth, is the limit
// diff:    dQ's buffers, their barriers and the loop over them
// tile:    as in backward_overlap, with 193 KB of shared memory
// takes:   as backward_mma, with strides that TMA accepts; two calls may differ in the last bits of dQ
//
// With S the scores and L the log-sum-exp of the forward pass:
//
//   P = exp(S - L)    delta = sum(dO * O) - dL    dS = P * (dO V^T - delta)
//   dQ = scale * dS K    dK = scale * dS^T Q    dV = P^T dO
#include "fa/backward.cuh"
#include "fa/backward_step.cuh"
#include "fa/omit.cuh"
#include "fa/products.cuh"
#include "fa/ring.cuh"
#include "fa/warpgroup.cuh"

using fa::BOX_COLUMNS, fa::GROUP_M, fa::GROUP_THREADS, fa::MMA_M, fa::MMA_N, fa::P_TILES, fa::QUAD, fa::S_TILES, fa::WARP;
using Shape = fa::BackwardShape;

constexpr int DS_BARRIER = 1;  // named barrier of the computing warpgroups

// The barriers of gradients_kernel and what each guarantees.
enum Barrier {
  NONE,
  KV_FULL,     // TMA has written K and V
  Q_FULL,      // TMA has written a tile of Q and dO
  Q_EMPTY,     // all warpgroups have read the tile of Q and dO
  DS_WRITTEN,  // both warpgroups have written dS, and have read the dS before the last one
  DQ_FULL,     // the warpgroup has written its part of dQ
  DQ_EMPTY     // the bulk reduction has read it
};

template <typename T, int HEAD_DIM>
struct Smem : fa::BackwardSmem<T, HEAD_DIM> {
  alignas(128) float dq[Shape::GROUPS][GROUP_M * BOX_COLUMNS];
  uint64_t dq_full[Shape::GROUPS], dq_empty[Shape::GROUPS];
};

// Adds the parts of dQ of a computing warpgroup.  Called by one thread.
template <typename T, int HEAD_DIM>
__device__ __forceinline__ void add_dq(
    const fa::BackwardCall& call, const fa::BackwardWalk& walk, Smem<T, HEAD_DIM>& smem, int group) {
  using Sizes = fa::BackwardStep<HEAD_DIM>;
  uint32_t phase = 0;
#pragma unroll 1
  for (int head = walk.kv_head * walk.group_heads; head < (walk.kv_head + 1) * walk.group_heads; ++head) {
    float* const dq_sums = call.dq_sums + (walk.batch * call.forward.heads + head) * call.padded_q * HEAD_DIM + group * Sizes::PANEL;
#pragma unroll 1
    for (int tile = walk.first_tile; tile < walk.tiles; ++tile, phase ^= 1) {
      fa::wait<DQ_FULL>(&smem.dq_full[group], phase);
      for (int i = 0; i < 8; ++i) fa::delay_if_omitted<DQ_EMPTY>();  // longer than a step
      fa::cp_reduce_async_bulk_add(dq_sums + int64_t(tile) * Sizes::TILE, smem.dq[group], sizeof(smem.dq[group]));
      fa::cp_async_bulk_commit_group();
      fa::cp_async_bulk_wait_group_read();
      fa::wait_late_if_omitted<DQ_FULL>(&smem.dq_full[group], phase);
      fa::mbarrier_arrive(&smem.dq_empty[group]);
    }
  }
}

// Writes a part of dQ to shared memory, when the one before it has been read.
__device__ __forceinline__ void write_dq(
    float* dq_smem, const float (&dq)[S_TILES][4], uint64_t* full, uint64_t* empty, uint32_t phase, int thread_in_group) {
  fa::wait<DQ_EMPTY>(empty, phase ^ 1);
#pragma unroll
  for (int n = 0; n < S_TILES; ++n) {
    float4* const to_smem = reinterpret_cast<float4*>(dq_smem) + n * GROUP_THREADS + thread_in_group;
    *to_smem = make_float4(dq[n][0], dq[n][1], dq[n][2], dq[n][3]);
  }
  fa::wait_late_if_omitted<DQ_EMPTY>(empty, phase ^ 1);
  fa::fence_proxy_async();
  __syncwarp();
  if (thread_in_group % WARP == 0) fa::mbarrier_arrive(full);
}

// A computing warpgroup: dK and dV of 64 keys, and a panel of dQ in each step.
template <typename T, int HEAD_DIM>
__device__ __forceinline__ void compute(
    const fa::BackwardCall& call, const fa::BackwardWalk& walk, Smem<T, HEAD_DIM>& smem, int group) {
  using Sizes = fa::BackwardStep<HEAD_DIM>;
  constexpr int QUERIES = Sizes::QUERIES, HALVES = Sizes::HALVES, HALF = Sizes::PANEL * sizeof(T) >> 4;  // in a descriptor
  const int thread_in_group = threadIdx.x % GROUP_THREADS, lane = threadIdx.x % WARP;
  const int group_key = walk.first_key + group * GROUP_M, lane_key = group_key + thread_in_group / WARP * MMA_M + lane / QUAD;
  const uint64_t k = fa::wgmma_descriptor(smem.k + group * Sizes::PANEL), v = fa::wgmma_descriptor(smem.v + group * Sizes::PANEL);
  // A warpgroup computes half of the columns of dQ, or half of its rows.
  const uint64_t dq_k = fa::wgmma_descriptor(smem.k + (HALVES == 1 ? group * fa::BLOCK_KEYS * BOX_COLUMNS : 0));
  fa::Ring<fa::STAGES> ring;
  uint32_t dq_phase = 0;
  float dk[HEAD_DIM / MMA_N][4] = {}, dv[HEAD_DIM / MMA_N][4] = {}, s[S_TILES][4];
  const int last_head = (walk.kv_head + 1) * walk.group_heads - 1;
  fa::wait<KV_FULL>(&smem.kv_full, 0);
  if (walk.first_tile < walk.tiles) fa::wait<Q_FULL>(&smem.q_full[0], 0);
  fa::start_scores<T, HEAD_DIM>(s, k, fa::wgmma_descriptor(smem.q[0]));
  fa::wgmma_wait_group<0>(s);

#pragma unroll 1
  for (int head = walk.kv_head * walk.group_heads; head <= last_head; ++head) {
#pragma unroll 1
    for (int tile = walk.first_tile; tile < walk.tiles; ++tile) {
      const fa::Ring<fa::STAGES> next = ring.next();
      const float* const lse = smem.lse[ring.stage];
      const uint64_t q = fa::wgmma_descriptor(smem.q[ring.stage], QUERIES * BOX_COLUMNS * sizeof(T));
      const uint64_t dout = fa::wgmma_descriptor(smem.dout[ring.stage], QUERIES * BOX_COLUMNS * sizeof(T));
      T* const ds_smem = smem.ds[ring.stage];
      uint32_t p[HALVES][P_TILES][4], ds[HALVES][P_TILES][4];
#pragma unroll
      for (int half = 0; half < HALVES; ++half) {
        float dp[S_TILES][4];
        fa::start_scores<T, HEAD_DIM>(dp, v, dout + half * HALF);
        if (half > 0) fa::wgmma_wait_group<2>(s);  // not for dP, nor for dK before it
        if (half == 0) fa::release_early_if_omitted<Q_EMPTY>(&smem.q_empty[ring.stage]);
        fa::exponentials(s, lse + half * GROUP_M, call.forward.scale, lane);
        const int diagonal = call.first_diagonal + tile * QUERIES + half * GROUP_M;  // the first query sees keys [0, diagonal)
        if (group_key + GROUP_M > min(call.seq_k, diagonal)) fa::hide(s, diagonal - lane_key, call.seq_k - lane_key, lane);
        fa::make_fragments<T>(p[half], s);
        fa::wgmma_wait_group<0>(dp);
        fa::start_pv<T, GROUP_M>(dv, p[half], dout + half * HALF);
        fa::differentiate(dp, s, lse + QUERIES + half * GROUP_M, lane);
        fa::make_fragments<T>(ds[half], dp);
        if (half + 1 < HALVES) fa::start_scores<T, HEAD_DIM>(s, k, q + (half + 1) * HALF);
        fa::start_pv<T, GROUP_M>(dk, ds[half], q + half * HALF);
        if (group > 0) fa::delay_if_omitted<DS_WRITTEN>();
        fa::write_ds(ds_smem + group * QUERIES * BOX_COLUMNS + half * Sizes::PANEL, ds[half], thread_in_group, lane);
      }
      fa::sync_threads<DS_WRITTEN, Shape::COMPUTING_THREADS>(DS_BARRIER);
      float dq[S_TILES][4];
      fa::start_dq<T, HEAD_DIM>(dq, fa::wgmma_descriptor(ds_smem + (HALVES == 1 ? 0 : group * Sizes::PANEL)), dq_k);
      // S of the next step, while dQ is added.  After the last step it is computed from an old tile, and not used.
      if (tile + 1 < walk.tiles || head < last_head) fa::wait<Q_FULL>(&smem.q_full[next.stage], next.phase);
      fa::wgmma_wait_group<1>();  // for dK, so that P and dS need no registers
      fa::start_scores<T, HEAD_DIM>(s, k, fa::wgmma_descriptor(smem.q[next.stage]));
      fa::wgmma_wait_group<1>(dq);
      fa::wait_late_if_omitted<Q_FULL>(&smem.q_full[ring.stage], ring.phase);
      fa::release<Q_EMPTY>(&smem.q_empty[ring.stage]);
      write_dq(smem.dq[group], dq, &smem.dq_full[group], &smem.dq_empty[group], dq_phase, thread_in_group);
      dq_phase ^= 1;
      fa::wgmma_wait_group<0>(s);
      ring = next;
    }
  }
  fa::wait_late_if_omitted<KV_FULL>(&smem.kv_full, 0);
  fa::wgmma_wait_group<0>(dk);
  fa::wgmma_wait_group<0>(dv);
  const FaBackwardArgs& backward = call.backward;
  const fa::HeadRows<T> dk_rows(static_cast<T*>(backward.dk), backward.dk_stride, walk.batch, walk.kv_head);
  const fa::HeadRows<T> dv_rows(static_cast<T*>(backward.dv), backward.dv_stride, walk.batch, walk.kv_head);
  fa::store_gradient(dk_rows, dk, call.forward.scale, lane_key, call.seq_k, lane);
  fa::store_gradient(dv_rows, dv, 1.0f, lane_key, call.seq_k, lane);
}

// dK and dV of 128 keys of a head, from all queries that see them, of all heads that share it, and the keys' part of dQ.
template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(Shape::THREADS, 1)
gradients_kernel(const __grid_constant__ fa::BackwardCall call, const __grid_constant__ CUtensorMap q_map,
                 const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                 const __grid_constant__ CUtensorMap dout_map) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<Smem<T, HEAD_DIM>*>(smem_bytes);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / GROUP_THREADS, 0);
  if (threadIdx.x == 0) {
#pragma unroll
    for (int group = 0; group < Shape::GROUPS; ++group) {
      fa::mbarrier_init(&smem.dq_full[group], GROUP_THREADS / WARP);
      fa::mbarrier_init(&smem.dq_empty[group], 1);
    }
    fa::init_backward_mbarriers(smem);
  }
  __syncthreads();
  const fa::BackwardWalk walk = fa::make_walk<HEAD_DIM>(call);
  if (warpgroup == 0) {
    fa::setmaxnreg_dec<Shape::PRODUCER_REGISTERS>();
    if (threadIdx.x < WARP && fa::elect_sync()) {
      fa::load_queries<Q_FULL>(call, walk, q_map, dout_map, smem);
    } else if (threadIdx.x / WARP == 1 && fa::elect_sync()) {
      fa::load_keys<KV_FULL>(walk, k_map, v_map, smem);
    } else if (threadIdx.x / WARP >= 2 && fa::elect_sync()) {
      add_dq(call, walk, smem, threadIdx.x / WARP - 2);
    }
  } else {
    fa::setmaxnreg_inc<Shape::REGISTERS>();
    compute<T, HEAD_DIM>(call, walk, smem, warpgroup - 1);
  }
}

template <typename T, int HEAD_DIM>
int launch(const fa::BackwardCall& call, dim3 grid, cudaStream_t stream) {
  return fa::launch_gradients<&gradients_kernel<T, HEAD_DIM>, sizeof(Smem<T, HEAD_DIM>), HEAD_DIM>(call, grid, stream);
}

FA_BACKWARD(launch)

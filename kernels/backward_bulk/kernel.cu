// backward_bulk: dQ is added by the copy engine.
// step:    a warpgroup writes its part of dQ to shared memory, from where a thread of the producer adds it by bulk reductions
// because: in backward_wgmma, each thread issues eight atomic additions in a step, and the next fence may wait for them
// expect:  a few percent faster; slower if the bandwidth of shared memory, of which dQ then takes a fifth, is the limit
// diff:    dQ's barriers; fa/backward_bulk.cuh has its buffers, their writes and the loop over them
// tile:    as in backward_wgmma, with 193 KB of shared memory
// takes:   as backward_mma, with strides that TMA accepts; two calls may differ in the last bits of dQ
//
// With S the scores and L the log-sum-exp of the forward pass:
//
//   P = exp(S - L)    delta = sum(dO * O) - dL    dS = P * (dO V^T - delta)
//   dQ = scale * dS K    dK = scale * dS^T Q    dV = P^T dO
#include "fa/backward.cuh"
#include "fa/backward_bulk.cuh"
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

// A computing warpgroup: dK and dV of 64 keys, and a panel of dQ in each step.
template <typename T, int HEAD_DIM>
__device__ __forceinline__ void compute(
    const fa::BackwardCall& call, const fa::BackwardWalk& walk, fa::BulkSmem<T, HEAD_DIM>& smem, int group) {
  using Sizes = fa::BackwardStep<HEAD_DIM>;
  constexpr int QUERIES = Sizes::QUERIES, HALVES = Sizes::HALVES, HALF = fa::PANEL * sizeof(T) >> 4;  // in a descriptor
  const int thread_in_group = threadIdx.x % GROUP_THREADS, lane = threadIdx.x % WARP;
  const int group_key = walk.first_key + group * GROUP_M, lane_key = group_key + thread_in_group / WARP * MMA_M + lane / QUAD;
  const uint64_t k = fa::wgmma_descriptor(smem.k + group * fa::PANEL), v = fa::wgmma_descriptor(smem.v + group * fa::PANEL);
  // A warpgroup computes half of the columns of dQ, or half of its rows.
  const uint64_t dq_k = fa::wgmma_descriptor(smem.k + (HALVES == 1 ? group * fa::BLOCK_KEYS * BOX_COLUMNS : 0));
  fa::Ring<fa::STAGES> ring;
  uint32_t dq_phase = 0;
  float dk[HEAD_DIM / MMA_N][4] = {}, dv[HEAD_DIM / MMA_N][4] = {};
  fa::wait<KV_FULL>(&smem.kv_full, 0);

#pragma unroll 1
  for (fa::BackwardWalk::Visit visit = walk.first(); walk.has(visit); visit = walk.after(visit), ring.advance()) {
    const float* const lse = smem.lse[ring.stage];
    const uint64_t q = fa::wgmma_descriptor(smem.q[ring.stage], QUERIES * BOX_COLUMNS * sizeof(T));
    const uint64_t dout = fa::wgmma_descriptor(smem.dout[ring.stage], QUERIES * BOX_COLUMNS * sizeof(T));
    T* const ds_smem = smem.ds[ring.stage];
    fa::wait<Q_FULL>(&smem.q_full[ring.stage], ring.phase);
    uint32_t p[HALVES][P_TILES][4], ds[HALVES][P_TILES][4];
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      float s[S_TILES][4], dp[S_TILES][4];
      fa::start_scores<T, HEAD_DIM>(s, k, q + half * HALF);
      fa::start_scores<T, HEAD_DIM>(dp, v, dout + half * HALF);
      fa::wgmma_wait_group<1>(s);
      if (half == 0) fa::release_early_if_omitted<Q_EMPTY>(&smem.q_empty[ring.stage]);
      fa::exponentials(s, lse + half * GROUP_M, call.forward.scale, lane);
      const int diagonal = call.first_diagonal + walk.tile_of(visit) * QUERIES + half * GROUP_M;  // the first query sees keys [0, diagonal)
      if (group_key + GROUP_M > min(call.seq_k, diagonal)) fa::hide(s, diagonal - lane_key, call.seq_k - lane_key, lane);
      fa::make_fragments<T>(p[half], s);
      fa::wgmma_wait_group<0>(dp);
      fa::start_pv<T, GROUP_M>(dv, p[half], dout + half * HALF);
      fa::differentiate(dp, s, lse + QUERIES + half * GROUP_M, lane);
      fa::make_fragments<T>(ds[half], dp);
      fa::start_pv<T, GROUP_M>(dk, ds[half], q + half * HALF);
      if (group > 0) fa::delay_if_omitted<DS_WRITTEN>();
      fa::write_ds(ds_smem + group * QUERIES * BOX_COLUMNS + half * fa::PANEL, ds[half], thread_in_group, lane);
    }
    fa::sync_threads<DS_WRITTEN, Shape::COMPUTING_THREADS>(DS_BARRIER);
    float dq[S_TILES][4];
    fa::start_dq<T, HEAD_DIM>(dq, fa::wgmma_descriptor(ds_smem + (HALVES == 1 ? 0 : group * fa::PANEL)), dq_k);
    fa::wgmma_wait_group<0>(dq);
    fa::wait_late_if_omitted<Q_FULL>(&smem.q_full[ring.stage], ring.phase);
    fa::release<Q_EMPTY>(&smem.q_empty[ring.stage]);
    fa::write_dq<DQ_EMPTY>(smem.dq[group], dq, &smem.dq_full[group], &smem.dq_empty[group], dq_phase, thread_in_group);
    dq_phase ^= 1;
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
  auto& smem = *reinterpret_cast<fa::BulkSmem<T, HEAD_DIM>*>(smem_bytes);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / GROUP_THREADS, 0);
  if (threadIdx.x == 0) fa::init_bulk_mbarriers(smem);
  __syncthreads();
  const fa::BackwardWalk walk = fa::make_walk(call, smem);
  if (warpgroup == 0) {
    fa::setmaxnreg_dec<Shape::PRODUCER_REGISTERS>();
    if (threadIdx.x < WARP && fa::elect_sync()) {
      fa::load_queries<Q_FULL>(call, walk, q_map, dout_map, smem);
    } else if (threadIdx.x / WARP == 1 && fa::elect_sync()) {
      fa::load_keys<KV_FULL>(walk, k_map, v_map, smem);
    } else if (threadIdx.x / WARP >= 2 && fa::elect_sync()) {
      fa::add_dq<DQ_FULL, DQ_EMPTY>(call, walk, smem, threadIdx.x / WARP - 2);
    }
  } else {
    fa::setmaxnreg_inc<Shape::REGISTERS>();
    compute<T, HEAD_DIM>(call, walk, smem, warpgroup - 1);
  }
}

template <typename T, int HEAD_DIM>
int launch(const fa::BackwardCall& call, dim3 grid, cudaStream_t stream) {
  return fa::launch_gradients<&gradients_kernel<T, HEAD_DIM>, sizeof(fa::BulkSmem<T, HEAD_DIM>), HEAD_DIM>(call, grid, stream);
}

FA_BACKWARD(launch)

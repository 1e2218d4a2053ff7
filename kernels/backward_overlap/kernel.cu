// backward_overlap: the products that a warpgroup does not wait for run during its exponentials and while it writes dQ.
// step:    S of the next step is computed while dQ of this one is written, and dP during the exponentials
// because: in backward_bulk, a warpgroup gives the tensor cores nothing to do while it writes dQ, and waits for S in each step
// expect:  at b1h16s4096d128, 560 TFLOP/s without a mask and 460 with a causal one
// diff:    S, which a step hands to the next one, and the order of products; KV_IN_REGISTERS and IN_TURNS are of later rungs
// tile:    as in backward_bulk; with IN_TURNS, the workspace has 4 bytes more for each 4096 elements of dQ
// takes:   as backward_mma, with strides that TMA accepts; without IN_TURNS, two calls may differ in the last bits of dQ
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
  DQ_EMPTY,    // the bulk reduction has read it
  TURN         // with IN_TURNS: the blocks before this one have added their parts of dQ
};

// A computing warpgroup: dK and dV of 64 keys, and a panel of dQ in each step.
template <typename T, int HEAD_DIM>
__device__ __forceinline__ void compute(
    const fa::BackwardCall& call, const fa::BackwardWalk& walk, fa::BulkSmem<T, HEAD_DIM>& smem, int group) {
  using Sizes = fa::BackwardStep<HEAD_DIM>;
  constexpr int QUERIES = Sizes::QUERIES, HALVES = Sizes::HALVES, HALF = fa::PANEL * sizeof(T) >> 4;  // in a descriptor
  const int thread_in_group = threadIdx.x % GROUP_THREADS, lane = threadIdx.x % WARP;
  const int group_key = walk.first_key + group * GROUP_M, lane_key = group_key + thread_in_group / WARP * MMA_M + lane / QUAD;
  // A warpgroup computes half of the columns of dQ, or half of its rows.
  const uint64_t dq_k = fa::wgmma_descriptor(smem.k + (HALVES == 1 ? group * fa::BLOCK_KEYS * BOX_COLUMNS : 0));
  fa::Ring<fa::STAGES> ring;
  uint32_t dq_phase = 0;
  float dk[HEAD_DIM / MMA_N][4] = {}, dv[HEAD_DIM / MMA_N][4] = {}, s[S_TILES][4];
  fa::wait<KV_FULL>(&smem.kv_full, 0);
  constexpr bool IN_REGISTERS = KV_IN_REGISTERS && HEAD_DIM == BOX_COLUMNS;  // with more columns there are too few
  const auto k = fa::left_operand<T, HEAD_DIM, IN_REGISTERS>(smem.k + group * fa::PANEL, thread_in_group, lane);
  const auto v = fa::left_operand<T, HEAD_DIM, IN_REGISTERS>(smem.v + group * fa::PANEL, thread_in_group, lane);
  if (walk.has(walk.first())) fa::wait<Q_FULL>(&smem.q_full[0], 0);
  fa::start_scores<T, HEAD_DIM>(s, k, fa::wgmma_descriptor(smem.q[0]));
  fa::wgmma_wait_group<0>(s);

#pragma unroll 1
  for (fa::BackwardWalk::Visit visit = walk.first(); walk.has(visit); visit = walk.after(visit)) {
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
      const int diagonal = call.first_diagonal + walk.tile_of(visit) * QUERIES + half * GROUP_M;  // the first query sees keys [0, diagonal)
      if (group_key + GROUP_M > min(call.seq_k, diagonal)) fa::hide(s, diagonal - lane_key, call.seq_k - lane_key, lane);
      fa::make_fragments<T>(p[half], s);
      fa::wgmma_wait_group<0>(dp);
      fa::start_pv<T, GROUP_M>(dv, p[half], dout + half * HALF);
      fa::differentiate(dp, s, lse + QUERIES + half * GROUP_M, lane);
      fa::make_fragments<T>(ds[half], dp);
      if (half + 1 < HALVES) fa::start_scores<T, HEAD_DIM>(s, k, q + (half + 1) * HALF);
      fa::start_pv<T, GROUP_M>(dk, ds[half], q + half * HALF);
      if (group > 0) fa::delay_if_omitted<DS_WRITTEN>();
      fa::write_ds(ds_smem + group * QUERIES * BOX_COLUMNS + half * fa::PANEL, ds[half], thread_in_group, lane);
    }
    fa::sync_threads<DS_WRITTEN, Shape::COMPUTING_THREADS>(DS_BARRIER);
    float dq[S_TILES][4];
    fa::start_dq<T, HEAD_DIM>(dq, fa::wgmma_descriptor(ds_smem + (HALVES == 1 ? 0 : group * fa::PANEL)), dq_k);
    // S of the next step, while dQ is written.  After the last step it is computed from an old tile, and not used.
    if (walk.has(walk.after(visit))) fa::wait<Q_FULL>(&smem.q_full[next.stage], next.phase);
    fa::wgmma_wait_group<1>();  // for dK, so that P and dS need no registers
    fa::start_scores<T, HEAD_DIM>(s, k, fa::wgmma_descriptor(smem.q[next.stage]));
    fa::wgmma_wait_group<1>(dq);
    fa::wait_late_if_omitted<Q_FULL>(&smem.q_full[ring.stage], ring.phase);
    fa::release<Q_EMPTY>(&smem.q_empty[ring.stage]);
    fa::write_dq<DQ_EMPTY>(smem.dq[group], dq, &smem.dq_full[group], &smem.dq_empty[group], dq_phase, thread_in_group);
    dq_phase ^= 1;
    fa::wgmma_wait_group<0>(s);
    ring = next;
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
  if (threadIdx.x == 0) {
    fa::init_bulk_mbarriers(smem);
    if constexpr (IN_TURNS) smem.block = fa::atom_add(call.started, 1);
  }
  __syncthreads();
  const fa::BackwardWalk walk = fa::make_walk(call, smem);
  if (warpgroup == 0) {
    fa::setmaxnreg_dec<Shape::PRODUCER_REGISTERS>();
    if (threadIdx.x < WARP && fa::elect_sync()) {
      fa::load_queries<Q_FULL>(call, walk, q_map, dout_map, smem);
    } else if (threadIdx.x / WARP == 1 && fa::elect_sync()) {
      fa::load_keys<KV_FULL>(walk, k_map, v_map, smem);
    } else if (threadIdx.x / WARP >= 2 && fa::elect_sync()) {
      fa::add_dq<DQ_FULL, DQ_EMPTY, TURN>(call, walk, smem, threadIdx.x / WARP - 2);
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

// long_ring: two tiles of K and of V are in flight.
// step:    K and V go through rings of two tiles each, and K is loaded one tile ahead of V
// because: in long_store, the next tile of K is requested only when both warpgroups have read the one before it, and likewise V
// expect:  at b2h16s4096d64, 370 us without a mask; at D = 128, 486 us: no warp waits for copies, but the tensor cores wait for the
//          softmax
// diff:    Ring, which holds the place in the ring and the parity of its mbarriers, and what uses it
// tile:    128 queries x 128 keys with two computing warpgroups; 97 KB of shared memory per block at D = 64, 193 KB at D = 128
// takes:   fp16 and bf16, D = 64 and 128, any S_q >= 1 and S_kv >= 0, top-left and bottom-right causal masks, grouped heads; rows
//          contiguous and 16-byte aligned, with strides that TMA accepts
#include "fa/entry.h"
#include "fa/hopper.cuh"
#include "fa/launch_persistent.cuh"
#include "fa/omit.cuh"
#include "fa/online_softmax.cuh"
#include "fa/products.cuh"
#include "fa/ring.cuh"
#include "fa/schedule.cuh"
#include "fa/shape.cuh"
#include "fa/tile_store.cuh"
#include "fa/warpgroup.cuh"

using fa::BOX_COLUMNS, fa::GROUP_M, fa::GROUP_THREADS, fa::MMA_M, fa::QUAD, fa::WARP;

// The barriers of this kernel and what each guarantees.
enum Barrier {
  NONE,
  Q_FULL,    // TMA has written Q
  K_FULL,    // TMA has written a tile of K
  V_FULL,    // TMA has written a tile of V
  Q_EMPTY,   // all warpgroups have read Q
  K_EMPTY,   // all warpgroups have read the tile of K
  V_EMPTY,   // all warpgroups have read the tile of V
  O_WRITTEN  // all threads of the warpgroup have written O to shared memory
};

constexpr int STAGES = 2;  // key tiles in flight
constexpr int FIRST_GROUP_BARRIER = 8;  // named barriers, one per computing warpgroup

template <typename T, typename SHAPE>
struct Smem {
  // [HEAD_DIM / BOX_COLUMNS, rows, BOX_COLUMNS], swizzled by TMA
  alignas(1024) T q[SHAPE::GROUPS][GROUP_M * SHAPE::HEAD_DIM];
  alignas(1024) T o[SHAPE::GROUPS][GROUP_M * SHAPE::HEAD_DIM];
  alignas(1024) T k[STAGES][SHAPE::BLOCK_N * SHAPE::HEAD_DIM];
  alignas(1024) T v[STAGES][SHAPE::BLOCK_N * SHAPE::HEAD_DIM];
  uint64_t unused;  // keeps the places of the mbarriers, and with them the machine code whose times are recorded
  uint64_t q_full, q_empty, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};

// The producer: loads Q, K and V of all work tiles of this block.  K is loaded one tile ahead of V.
template <typename T, typename SHAPE>
__device__ __forceinline__ void produce(const fa::TileParams& params, const CUtensorMap& q_map, const CUtensorMap& k_map,
                                        const CUtensorMap& v_map, Smem<T, SHAPE>& smem) {
  constexpr int HEAD_DIM = SHAPE::HEAD_DIM, BLOCK_N = SHAPE::BLOCK_N;
  fa::Ring<STAGES> k_ring, v_ring;
  uint32_t q_phase = 0;
#pragma unroll 1
  for (int round = 0, number; (number = fa::dealt_number(round, blockIdx.x, gridDim.x)) < params.work_tiles; ++round) {
    const fa::WorkTile work = fa::make_work_tile<SHAPE>(params, number);
    if (work.key_tiles == 0) continue;
    const fa::Head head = fa::make_head(params, work.batch_head);
    auto load_k = [&](int j) {
      fa::wait(&smem.k_empty[k_ring.stage], k_ring.phase ^ 1);
      fa::mbarrier_arrive_expect_tx(&smem.k_full[k_ring.stage], SHAPE::TILE_BYTES);
      fa::load_rows<HEAD_DIM, BLOCK_N>(
          smem.k[k_ring.stage], k_map, j * BLOCK_N, head.kv_head, head.batch, &smem.k_full[k_ring.stage]);
      k_ring.advance();
    };
    fa::wait(&smem.q_empty, q_phase ^ 1);
    q_phase ^= 1;
    fa::mbarrier_arrive_expect_tx(&smem.q_full, SHAPE::Q_BYTES);
#pragma unroll
    for (int g = 0; g < SHAPE::GROUPS; ++g) {
      const int first_query = work.first_query + g * GROUP_M;
      fa::load_rows<HEAD_DIM, GROUP_M>(smem.q[g], q_map, first_query, head.query_head, head.batch, &smem.q_full);
    }
    load_k(work.key_tiles - 1);
#pragma unroll 1
    for (int j = work.key_tiles - 1; j >= 0; --j) {
      if (j > 0) load_k(j - 1);
      fa::wait(&smem.v_empty[v_ring.stage], v_ring.phase ^ 1);
      fa::mbarrier_arrive_expect_tx(&smem.v_full[v_ring.stage], SHAPE::TILE_BYTES);
      fa::load_rows<HEAD_DIM, BLOCK_N>(
          smem.v[v_ring.stage], v_map, j * BLOCK_N, head.kv_head, head.batch, &smem.v_full[v_ring.stage]);
      v_ring.advance();
    }
  }
}

// A computing warpgroup: 64 queries of each work tile of this block.
template <typename T, typename SHAPE>
__device__ __forceinline__ void compute(
    const fa::TileParams& params, const CUtensorMap& o_map, Smem<T, SHAPE>& smem, int group) {
  constexpr int HEAD_DIM = SHAPE::HEAD_DIM, BLOCK_N = SHAPE::BLOCK_N;
  const int thread_in_group = threadIdx.x % GROUP_THREADS, lane = threadIdx.x % WARP;
  const int lane_row = thread_in_group / WARP * MMA_M + lane / QUAD;  // this lane holds rows lane_row and lane_row + 8
  const uint64_t q = fa::wgmma_descriptor(smem.q[group]);
  const uint64_t first_k = fa::wgmma_descriptor(smem.k[0]);
  const uint64_t first_v = fa::wgmma_descriptor(smem.v[0], BLOCK_N * BOX_COLUMNS * 2);
  constexpr int STAGE_STEP = SHAPE::TILE_BYTES >> 4;  // in descriptors, addresses are in units of 16 bytes
  fa::Ring<STAGES> ring;
  uint32_t q_phase = 0;

#pragma unroll 1
  for (int round = 0, number; (number = fa::dealt_number(round, blockIdx.x, gridDim.x)) < params.work_tiles; ++round) {
    const fa::WorkTile work = fa::make_work_tile<SHAPE>(params, number);
    const int query = work.first_query + group * GROUP_M + lane_row;
    float o[SHAPE::O_TILES][4] = {};
    fa::OnlineSoftmax softmax;
    if (work.key_tiles > 0) {
      // The tiles from first_masked on contain keys that some query of the warpgroup does not see.  The last tile is the first to
      // be computed, so that masked tiles come first and the main loop has no mask.
      const int first_diagonal = params.first_diagonal + work.first_query + group * GROUP_M;
      const int first_masked = params.is_negated ? 0 : max(0, min(params.seq_k, first_diagonal)) / BLOCK_N;
      int j = work.key_tiles - 1;
      auto step = [&](auto is_masked, auto is_first) {
        float s[SHAPE::S_TILES][4];
        fa::wait<K_FULL>(&smem.k_full[ring.stage], ring.phase);
        fa::start_qk<T, HEAD_DIM>(s, q, first_k + ring.stage * STAGE_STEP);
        fa::wgmma_wait_group<0>(s);
        fa::release<K_EMPTY>(&smem.k_empty[ring.stage]);
        if (decltype(is_masked)::value) fa::mask(s, params, query, j * BLOCK_N, lane);
        if (decltype(is_first)::value) {
          softmax.raise_m(s, params.scale_log2, params.inverse_scale_log2);
        } else if (softmax.raise_m_if_needed(s, params.scale_log2, params.inverse_scale_log2)) {
          softmax.rescale_rows(o);
        }
        softmax.exponentials(s, params.scale_log2);
        fa::wait<V_FULL>(&smem.v_full[ring.stage], ring.phase);  // ptxas moves no exponential across this loop
        uint32_t p[SHAPE::P_TILES][4];
        fa::round_p<T>(p, s);
        fa::start_pv<T, BLOCK_N>(o, p, first_v + ring.stage * STAGE_STEP);
        fa::wgmma_wait_group<0>(o);
        fa::release<V_EMPTY>(&smem.v_empty[ring.stage]);
        ring.advance();
        --j;
      };
      fa::wait<Q_FULL>(&smem.q_full, q_phase);
      q_phase ^= 1;
      step(std::true_type(), std::true_type());
#pragma unroll 1
      while (j >= first_masked) step(std::true_type(), std::false_type());
#pragma unroll 1
      while (j >= 0) step(std::false_type(), std::false_type());
      fa::release<Q_EMPTY>(&smem.q_empty);
    }

    const fa::Head head = fa::make_head(params, work.batch_head);
    fa::normalise(o, softmax, params, head, query, lane);
    fa::store_o<O_WRITTEN, SHAPE::O_TILES>(smem.o[group], o, o_map, params, head, work.first_query, group,
                                           FIRST_GROUP_BARRIER + group, thread_in_group, lane);
  }
  if (thread_in_group == 0) fa::cp_async_bulk_wait_group_read();  // before the block's shared memory is given to another one
}

template <typename T, typename SHAPE>
__global__ void __launch_bounds__(SHAPE::THREADS, SHAPE::BLOCKS_PER_SM)
long_ring_kernel(const __grid_constant__ fa::TileParams params, const __grid_constant__ CUtensorMap q_map,
                 const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                 const __grid_constant__ CUtensorMap o_map) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<Smem<T, SHAPE>*>(smem_bytes);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / GROUP_THREADS, 0);
  if (threadIdx.x == 0) {
    fa::mbarrier_init(&smem.q_full, 1);
    fa::mbarrier_init(&smem.q_empty, SHAPE::COMPUTING_WARPS);
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) {
      fa::mbarrier_init(&smem.k_full[stage], 1);
      fa::mbarrier_init(&smem.v_full[stage], 1);
      fa::mbarrier_init(&smem.k_empty[stage], SHAPE::COMPUTING_WARPS);
      fa::mbarrier_init(&smem.v_empty[stage], SHAPE::COMPUTING_WARPS);
    }
    fa::fence_mbarrier_init();
  }
  __syncthreads();
  if (warpgroup == 0) {
    fa::setmaxnreg_dec<SHAPE::PRODUCER_REGISTERS>();
    if (threadIdx.x < WARP && fa::elect_sync()) produce(params, q_map, k_map, v_map, smem);
  } else {
    fa::setmaxnreg_inc<SHAPE::REGISTERS>();
    compute(params, o_map, smem, warpgroup - 1);
  }
}

template <typename T, int HEAD_DIM>
int launch(const FaForwardArgs* args, cudaStream_t stream) {
  using SHAPE = fa::Shape<HEAD_DIM, 2, 128>;
  return fa::launch_persistent<&long_ring_kernel<T, SHAPE>, SHAPE, sizeof(Smem<T, SHAPE>)>(args, stream);
}

FA_FORWARD(launch)

// long_sum: the tensor cores add up the rows of P.
// step:    the row sum is computed by P V, with eight more columns of V that are one
// because: in long_overlap, 64 of 365 instructions per key tile and warp are additions of the row sum
// expect:  about 4 % less time than long_overlap at D = 64; P V takes an eighth longer, but the warps issue a sixth less
// diff:    start_pv, the exponentials without additions, and the normalisation; the planted faults of the parent are left out
// tile:    128 queries x 128 keys with two computing warpgroups; 97 KB of shared memory per block at D = 64, 193 KB at D = 128
// takes:   fp16 and bf16, D = 64, any S_q >= 1 and S_kv >= 0, top-left and bottom-right causal masks, grouped heads; rows
//          contiguous and 16-byte aligned, with strides that TMA accepts
#include "fa/entry.h"
#include "fa/hopper.cuh"
#include "fa/launch_persistent.cuh"
#include "fa/omit.cuh"
#include "fa/online_softmax.cuh"
#include "fa/producer.cuh"
#include "fa/products.cuh"
#include "fa/ring.cuh"
#include "fa/schedule.cuh"
#include "fa/shape.cuh"
#include "fa/tile_store.cuh"
#include "fa/warpgroup.cuh"

using fa::BOX_COLUMNS, fa::GROUP_M, fa::GROUP_THREADS, fa::LANE_ROWS, fa::MMA_K, fa::MMA_M, fa::QUAD, fa::WARP;

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
constexpr int FIRST_TURN_BARRIER = 1, FIRST_GROUP_BARRIER = 8;  // named barriers, one per computing warpgroup

template <typename T, typename SHAPE>
struct Smem {
  // [HEAD_DIM / BOX_COLUMNS, rows, BOX_COLUMNS], swizzled by TMA
  alignas(1024) T q[SHAPE::GROUPS][GROUP_M * SHAPE::HEAD_DIM];
  alignas(1024) T o[SHAPE::GROUPS][GROUP_M * SHAPE::HEAD_DIM];
  alignas(1024) T k[STAGES][SHAPE::BLOCK_N * SHAPE::HEAD_DIM];
  alignas(1024) T v[STAGES][SHAPE::BLOCK_N * SHAPE::HEAD_DIM];
  alignas(1024) T ones[MMA_K * BOX_COLUMNS];
  uint64_t q_full, q_empty, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};

// P = exp2(S - m), in place.
template <int S_TILES>
__device__ __forceinline__ void exponentials(float (&s)[S_TILES][4], const fa::OnlineSoftmax& softmax, float scale_log2) {
#pragma unroll
  for (int n = 0; n < S_TILES; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[n][i] = fa::ex2_approx_ftz(s[n][i] * scale_log2 - softmax.m_log2[i / 2]);
  }
}

// Starts O += P V, with eight more columns of V, which are those of `ones`.
template <typename T, int KEYS, int P_TILES, int O_TILES>
__device__ __forceinline__ void start_pv(
    float (&o)[O_TILES][4], const uint32_t (&p)[P_TILES][4], const T* v_smem, const T* ones_smem) {
  const uint64_t v = fa::wgmma_descriptor(v_smem, fa::smem_address(ones_smem) - fa::smem_address(v_smem));
  constexpr uint64_t ROWS_STEP = MMA_K * BOX_COLUMNS * sizeof(T) >> 4, ONES_STEP = ROWS_STEP << 16;
  fa::wgmma_fence();
#pragma unroll
  for (int n = 0; n < KEYS / MMA_K; ++n) fa::wgmma_any_n<T, 1>(o, p[n], v + n * (ROWS_STEP - ONES_STEP), true);
  fa::wgmma_commit_group();
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
  constexpr int STAGE_STEP = SHAPE::TILE_BYTES >> 4;  // in descriptors, addresses are in units of 16 bytes
  fa::Ring<STAGES> ring;
  uint32_t q_phase = 0;
  // The named barrier of a turn has the threads of the warpgroup that takes it, and those of the one that passes it on.
  const int own_turn = FIRST_TURN_BARRIER + group, next_turn = FIRST_TURN_BARRIER + (group + 1) % SHAPE::GROUPS;
  auto take_turn = [&] { fa::barrier_sync<2 * GROUP_THREADS>(own_turn); };
  auto pass_turn = [&] { fa::barrier_arrive<2 * GROUP_THREADS>(next_turn); };
  if (group == 0) fa::barrier_arrive<2 * GROUP_THREADS>(own_turn);  // the first turn

#pragma unroll 1
  for (int round = 0, number; (number = fa::dealt_number(round, blockIdx.x, gridDim.x)) < params.work_tiles; ++round) {
    const fa::WorkTile work = fa::make_work_tile<SHAPE>(params, number);
    const int query = work.first_query + group * GROUP_M + lane_row;
    float o[SHAPE::O_TILES + 1][4] = {};  // the last tile is the row sum, in each of its columns
    fa::OnlineSoftmax softmax;  // its l is not used
    if (work.key_tiles > 0) {
      // The tiles from first_masked on contain keys that some query of the warpgroup does not see.  The last tile is the first to
      // be computed, so that masked tiles come first and the main loop has no mask.
      const int first_diagonal = params.first_diagonal + work.first_query + group * GROUP_M;
      const int first_masked = params.is_negated ? 0 : max(0, min(params.seq_k, first_diagonal)) / BLOCK_N;
      int j = work.key_tiles - 1;
      uint32_t p[SHAPE::P_TILES][4];
      fa::wait<Q_FULL>(&smem.q_full, q_phase);
      q_phase ^= 1;

      // The softmax of the last key tile, while nothing else runs.
      {
        float s[SHAPE::S_TILES][4];
        fa::wait<K_FULL>(&smem.k_full[ring.stage], ring.phase);
        fa::start_qk<T, HEAD_DIM>(s, q, first_k + ring.stage * STAGE_STEP);
        fa::wgmma_wait_group<0>(s);
        fa::release<K_EMPTY>(&smem.k_empty[ring.stage]);
        fa::mask(s, params, query, j * BLOCK_N, lane);
        softmax.raise_m(s, params.scale_log2, params.inverse_scale_log2);
        exponentials(s, softmax, params.scale_log2);
        fa::round_p<T>(p, s);
        const fa::Ring<STAGES> next = ring.next();
        if (j > 0) fa::wait<K_FULL>(&smem.k_full[next.stage], next.phase);
        --j;
      }

      // S of this key tile, with P V of the previous one, and then the softmax of this one during P V.
      auto step = [&](auto is_masked) {
        const fa::Ring<STAGES> previous = ring;
        ring.advance();
        float s[SHAPE::S_TILES][4];
        take_turn();
        fa::start_qk<T, HEAD_DIM>(s, q, first_k + ring.stage * STAGE_STEP);
        fa::wait<V_FULL>(&smem.v_full[previous.stage], previous.phase);
        start_pv<T, BLOCK_N>(o, p, smem.v[previous.stage], smem.ones);
        pass_turn();
        fa::wgmma_wait_group<1>(s);
        fa::release<K_EMPTY>(&smem.k_empty[ring.stage]);
        if (decltype(is_masked)::value) fa::mask(s, params, query, j * BLOCK_N, lane);
        const bool is_raised = softmax.raise_m_if_needed(s, params.scale_log2, params.inverse_scale_log2);
        exponentials(s, softmax, params.scale_log2);
        // ptxas would move the exponentials below the wait for P V, but not across the loop of this wait.
        const fa::Ring<STAGES> next = ring.next();
        if (j > 0) fa::wait<K_FULL>(&smem.k_full[next.stage], next.phase);
        fa::wgmma_wait_group<0>(o);
        fa::release<V_EMPTY>(&smem.v_empty[previous.stage]);
        fa::round_p<T>(p, s);
        if (is_raised) softmax.rescale_rows(o);
      };
#pragma unroll 1
      for (; j >= first_masked; --j) step(std::true_type());
#pragma unroll 1
      for (; j >= 0; --j) step(std::false_type());
      fa::release<Q_EMPTY>(&smem.q_empty);

      // P V of the first key tile.
      fa::wait<V_FULL>(&smem.v_full[ring.stage], ring.phase);
      start_pv<T, BLOCK_N>(o, p, smem.v[ring.stage], smem.ones);
      fa::wgmma_wait_group<0>(o);
      fa::release<V_EMPTY>(&smem.v_empty[ring.stage]);
      ring.advance();
    }

    const fa::Head head = fa::make_head(params, work.batch_head);
#pragma unroll
    for (int r = 0; r < LANE_ROWS; ++r) {
      fa::normalise_row<SHAPE::O_TILES>(o, r, o[SHAPE::O_TILES][2 * r], softmax.m_log2[r], params, head, query, lane);
    }
    fa::store_o<O_WRITTEN, SHAPE::O_TILES>(smem.o[group], o, o_map, params, head, work.first_query, group,
                                           FIRST_GROUP_BARRIER + group, thread_in_group, lane);
  }
  if (thread_in_group == 0) fa::cp_async_bulk_wait_group_read();  // before the block's shared memory is given to another one
}

template <typename T, typename SHAPE>
__global__ void __launch_bounds__(SHAPE::THREADS, SHAPE::BLOCKS_PER_SM)
long_sum_kernel(const __grid_constant__ fa::TileParams params, const __grid_constant__ CUtensorMap q_map,
                const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                const __grid_constant__ CUtensorMap o_map) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<Smem<T, SHAPE>*>(smem_bytes);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / GROUP_THREADS, 0);
  if (threadIdx.x == 0) fa::init_mbarriers<SHAPE>(smem);
  for (int i = threadIdx.x; i < MMA_K * BOX_COLUMNS; i += SHAPE::THREADS) smem.ones[i] = T(1.0f);
  fa::fence_proxy_async();
  __syncthreads();
  if (warpgroup == 0) {
    fa::setmaxnreg_dec<SHAPE::PRODUCER_REGISTERS>();
    if (threadIdx.x < WARP && fa::elect_sync()) {
      fa::produce<Q_FULL, V_FULL, SHAPE>(fa::Dealt(), params, q_map, k_map, v_map, smem);
    }
  } else {
    fa::setmaxnreg_inc<SHAPE::REGISTERS>();
    compute(params, o_map, smem, warpgroup - 1);
  }
}

template <typename T, int HEAD_DIM>
int launch(const FaForwardArgs* args, cudaStream_t stream) {
  using SHAPE = fa::Shape<HEAD_DIM, 2, 128>;
  return fa::launch_persistent<&long_sum_kernel<T, SHAPE>, SHAPE, sizeof(Smem<T, SHAPE>)>(args, stream);
}

FA_FORWARD(launch)

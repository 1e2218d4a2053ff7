// long_max: the row max in integers.
// step:    the row max is computed with integers, three values per instruction
// because: in long_overlap, 68 of 365 instructions per key tile and warp compute the row max
// expect:  about 4 % less time than long_overlap at D = 64, 1.5 % at D = 128
// diff:    IntegerSoftmax is new, and two ablations; the planted faults of the parent are left out
// tile:    128 queries x 128 keys with two computing warpgroups; 97 KB of shared memory per block at D = 64, 193 KB at D = 128
// takes:   fp16 and bf16, D = 64 and 128, any S_q >= 1 and S_kv >= 0, top-left and bottom-right causal masks, grouped heads; rows
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

// The phases of this kernel that an ablation omits.
enum Phase { NO_PHASE, SOFTMAX, PRODUCTS };

constexpr int STAGES = 2;  // key tiles in flight
constexpr int FIRST_TURN_BARRIER = 1, FIRST_GROUP_BARRIER = 8;  // named barriers, one per computing warpgroup

template <typename T, typename SHAPE>
using Smem = fa::RingSmem<T, SHAPE, STAGES>;

// The running softmax with the row max in integers.
// It compares scores as integers, three at a time.  Integers order positive floats like floats, and negative ones in reverse.
struct IntegerSoftmax : fa::OnlineSoftmax {
  // Returns this lane's maximum of a row, if it is positive.
  template <int S_TILES>
  static __device__ __forceinline__ int max_of_lane_bits(const float (&s)[S_TILES][4], int r) {
    int partial[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) partial[n] = max(__float_as_int(s[n][2 * r]), __float_as_int(s[n][2 * r + 1]));
#pragma unroll
    for (int n = 4; n < S_TILES; ++n) {
      partial[n % 4] = __vimax3_s32(partial[n % 4], __float_as_int(s[n][2 * r]), __float_as_int(s[n][2 * r + 1]));
    }
    return max(__vimax3_s32(partial[0], partial[1], partial[2]), partial[3]);
  }

  // Below zero, every tile takes the exact path: all scores are above the least integer.
  template <int S_TILES>
  __device__ __forceinline__ void raise_m(const float (&s)[S_TILES][4], float scale_log2, float inverse_scale_log2) {
#pragma unroll
    for (int r = 0; r < LANE_ROWS; ++r) {
      raise_m_of_row(s, r, scale_log2, inverse_scale_log2);
      if (!(limit[r] >= 0.0f)) limit[r] = __int_as_float(INT32_MIN);
    }
  }

  template <int S_TILES>
  __device__ __forceinline__ bool raise_m_if_needed(const float (&s)[S_TILES][4], float scale_log2, float inverse_scale_log2) {
    bool is_above = false;
#pragma unroll
    for (int r = 0; r < LANE_ROWS; ++r) is_above |= max_of_lane_bits(s, r) > __float_as_int(limit[r]);
    const bool is_raised = __any_sync(0xffffffffu, is_above);
    if (is_raised) raise_m(s, scale_log2, inverse_scale_log2);
    return is_raised;
  }
};

// A computing warpgroup: 64 queries of each work tile of this block.
template <typename T, typename SHAPE>
__device__ __forceinline__ void compute(
    const fa::TileParams& params, const CUtensorMap& o_map, Smem<T, SHAPE>& smem, int group) {
  constexpr int BLOCK_N = SHAPE::BLOCK_N;
  constexpr int QK_COLUMNS = fa::IS_OMITTED_PHASE<PRODUCTS> ? MMA_K : SHAPE::HEAD_DIM;
  constexpr int PV_KEYS = fa::IS_OMITTED_PHASE<PRODUCTS> ? MMA_K : BLOCK_N;
  const int thread_in_group = threadIdx.x % GROUP_THREADS, lane = threadIdx.x % WARP;
  const int lane_row = thread_in_group / WARP * MMA_M + lane / QUAD;  // this lane holds rows lane_row and lane_row + 8
  const uint64_t q = fa::wgmma_descriptor(smem.q[group]);
  const uint64_t first_k = fa::wgmma_descriptor(smem.k[0]);
  const uint64_t first_v = fa::wgmma_descriptor(smem.v[0], BLOCK_N * BOX_COLUMNS * 2);
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
    float o[SHAPE::O_TILES][4] = {};
    IntegerSoftmax softmax;
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
        fa::start_qk<T, QK_COLUMNS>(s, q, first_k + ring.stage * STAGE_STEP);
        fa::wgmma_wait_group<0>(s);
        fa::release<K_EMPTY>(&smem.k_empty[ring.stage]);
        fa::mask(s, params, query, j * BLOCK_N, lane);
        softmax.raise_m(s, params.scale_log2, params.inverse_scale_log2);
        if (!fa::IS_OMITTED_PHASE<SOFTMAX>) softmax.exponentials(s, params.scale_log2);
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
        fa::start_qk<T, QK_COLUMNS>(s, q, first_k + ring.stage * STAGE_STEP);
        fa::wait<V_FULL>(&smem.v_full[previous.stage], previous.phase);
        fa::start_pv<T, PV_KEYS>(o, p, first_v + previous.stage * STAGE_STEP);
        pass_turn();
        fa::wgmma_wait_group<1>(s);
        fa::release<K_EMPTY>(&smem.k_empty[ring.stage]);
        if (decltype(is_masked)::value) fa::mask(s, params, query, j * BLOCK_N, lane);
        const bool is_raised =
            !fa::IS_OMITTED_PHASE<SOFTMAX> && softmax.raise_m_if_needed(s, params.scale_log2, params.inverse_scale_log2);
        if (!fa::IS_OMITTED_PHASE<SOFTMAX>) softmax.exponentials(s, params.scale_log2);
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
      fa::start_pv<T, PV_KEYS>(o, p, first_v + ring.stage * STAGE_STEP);
      fa::wgmma_wait_group<0>(o);
      fa::release<V_EMPTY>(&smem.v_empty[ring.stage]);
      ring.advance();
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
long_max_kernel(const __grid_constant__ fa::TileParams params, const __grid_constant__ CUtensorMap q_map,
                const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                const __grid_constant__ CUtensorMap o_map) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<Smem<T, SHAPE>*>(smem_bytes);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / GROUP_THREADS, 0);
  if (threadIdx.x == 0) fa::init_mbarriers<SHAPE>(smem);
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
  return fa::launch_persistent<&long_max_kernel<T, SHAPE>, SHAPE, sizeof(Smem<T, SHAPE>)>(args, stream);
}

FA_FORWARD(launch)

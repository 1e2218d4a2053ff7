// long_causal: warpgroups skip the key tiles that a causal mask hides from them.
// step:    under a causal mask, a warpgroup skips the key tiles that none of its own queries sees
// because: in long_shapes, the key tiles of a block are those that its last warpgroup sees: at 2048 keys and D = 128, 5 % of all
//          products are of tiles that are hidden from the whole warpgroup
// expect:  with a causal mask at D = 128, 130 us at b4h16s2048 and 227 us at b2h16s4096; at D = 64, 78 us at b4h16s2048 and 145 us
//          at b2h16s4096; without a mask the same time as long_shapes
// diff:    the loop over hidden tiles, and their part in the estimate of a shape's time
// tile:    as in long_shapes
// takes:   fp16 and bf16, D = 64 and 128, any S_q >= 1 and S_kv >= 0, top-left and bottom-right causal masks, grouped heads; rows
//          contiguous and 16-byte aligned, with strides that TMA accepts
#include "fa/entry.h"
#include "fa/fitted_costs.h"
#include "fa/hopper.cuh"
#include "fa/integer_softmax.cuh"
#include "fa/launch_persistent.cuh"
#include "fa/omit.cuh"
#include "fa/producer.cuh"
#include "fa/products.cuh"
#include "fa/ring.cuh"
#include "fa/schedule.cuh"
#include "fa/shape.cuh"
#include "fa/shape_choice.h"
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
constexpr int FIRST_TURN_BARRIER = 1, FIRST_GROUP_BARRIER = 8;  // named barriers, one per computing warpgroup

template <typename T, typename SHAPE>
using Smem = fa::RingSmem<T, SHAPE, STAGES>;

// Releases a tile of K and of V that this warpgroup does not read.
template <typename T, typename SHAPE>
__device__ __forceinline__ void release_unread(Smem<T, SHAPE>& smem, const fa::Ring<STAGES>& ring, int lane) {
  if (lane == 0) {  // without its waits, one phase could get the arrivals of two
    fa::wait<K_FULL>(&smem.k_full[ring.stage], ring.phase);
    fa::release<K_EMPTY>(&smem.k_empty[ring.stage]);
    fa::wait<V_FULL>(&smem.v_full[ring.stage], ring.phase);
    fa::release<V_EMPTY>(&smem.v_empty[ring.stage]);
  }
  __syncwarp();  // no lane may wait for a phase before the one before it is complete
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
  // The named barrier of a turn has the threads of the warpgroup that takes it, and those of the one that passes it on.
  const int own_turn = FIRST_TURN_BARRIER + group, next_turn = FIRST_TURN_BARRIER + (group + 1) % SHAPE::GROUPS;
  constexpr bool HAS_TURNS = SHAPE::GROUPS > 1;
  auto take_turn = [&] {
    if (HAS_TURNS) fa::barrier_sync<2 * GROUP_THREADS>(own_turn);
  };
  auto pass_turn = [&] {
    if (HAS_TURNS) fa::barrier_arrive<2 * GROUP_THREADS>(next_turn);
  };
  if (HAS_TURNS && group == 0) fa::barrier_arrive<2 * GROUP_THREADS>(own_turn);  // the first turn

#pragma unroll 1
  for (int round = 0, number; (number = fa::dealt_number(round, blockIdx.x, gridDim.x)) < params.work_tiles; ++round) {
    const fa::WorkTile work = fa::make_work_tile<SHAPE>(params, number);
    const int query = work.first_query + group * GROUP_M + lane_row;
    float o[SHAPE::O_TILES][4] = {};
    fa::IntegerSoftmax softmax;
    if (work.key_tiles > 0) {
      // The tiles from first_masked on contain keys that some query of the warpgroup does not see.  The last tile is the first to
      // be computed, so that masked tiles come first and the main loop has no mask.
      const int first_diagonal = params.first_diagonal + work.first_query + group * GROUP_M;
      const int first_masked = params.is_negated ? 0 : max(0, min(params.seq_k, first_diagonal)) / BLOCK_N;
      int j = work.key_tiles - 1;
      uint32_t p[SHAPE::P_TILES][4];
      fa::wait<Q_FULL>(&smem.q_full, q_phase);
      q_phase ^= 1;

      // The queries of this warpgroup see none of these tiles.  It releases them, and passes its turns on.
      const int group_tiles = max(1, fa::visible_key_tiles<SHAPE>(params, work.first_query + group * GROUP_M + GROUP_M));
#pragma unroll 1
      for (; j >= group_tiles; --j) {
        take_turn();
        pass_turn();
        release_unread(smem, ring, lane);
        ring.advance();
      }

      // The softmax of the last key tile, while nothing else runs.
      {
        float s[SHAPE::S_TILES][4];
        fa::wait<K_FULL>(&smem.k_full[ring.stage], ring.phase);
        fa::start_qk<T, HEAD_DIM>(s, q, first_k + ring.stage * STAGE_STEP);
        fa::wgmma_wait_group<0>(s);
        fa::release<K_EMPTY>(&smem.k_empty[ring.stage]);
        fa::mask(s, params, query, j * BLOCK_N, lane);
        softmax.raise_m(s, params.scale_log2, params.inverse_scale_log2);
        softmax.exponentials(s, params.scale_log2);
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
        fa::start_pv<T, BLOCK_N>(o, p, first_v + previous.stage * STAGE_STEP);
        pass_turn();
        fa::wgmma_wait_group<1>(s);
        fa::release<K_EMPTY>(&smem.k_empty[ring.stage]);
        if (decltype(is_masked)::value) fa::mask(s, params, query, j * BLOCK_N, lane);
        const bool is_raised = softmax.raise_m_if_needed(s, params.scale_log2, params.inverse_scale_log2);
        softmax.exponentials(s, params.scale_log2);
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
      fa::start_pv<T, BLOCK_N>(o, p, first_v + ring.stage * STAGE_STEP);
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
long_causal_kernel(const __grid_constant__ fa::TileParams params, const __grid_constant__ CUtensorMap q_map,
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

template <typename T, typename SHAPE>
int launch_shape(const FaForwardArgs* args, cudaStream_t stream) {
  return fa::launch_persistent<&long_causal_kernel<T, SHAPE>, SHAPE, sizeof(Smem<T, SHAPE>)>(args, stream);
}

// Returns the key tiles of a work tile that each of its warpgroups sees, added up.
template <typename SHAPE>
int group_tiles(const fa::TileParams& params, int number) {
  const fa::WorkTile work = fa::make_work_tile<SHAPE>(params, number);
  int tiles = 0;
  for (int group = 1; group <= SHAPE::GROUPS; ++group) {
    tiles += std::min(work.key_tiles, fa::visible_key_tiles<SHAPE>(params, work.first_query + group * GROUP_M));
  }
  return tiles;
}

// Estimates the time of a call.  Returns infinity if the shape refuses the call.
template <typename SHAPE>
double estimated_us(const FaForwardArgs* args) {
  using Costs = std::conditional_t<HAS_FITTED_COSTS, fa::FittedCosts<SHAPE>, fa::Costs<SHAPE>>;
  fa::TileParams params;
  if (fa::make_tile_params<SHAPE>(args, &params) != FA_OK) return INFINITY;
  return fa::busiest_sm_us<SHAPE>(params, params.work_tiles, [&](int number) {
    return group_tiles<SHAPE>(params, number) * Costs::KEY_TILE_US / SHAPE::GROUPS + Costs::WORK_TILE_US;
  });
}

// The shapes among which a call chooses.
template <typename... SHAPES>
struct Shapes {
  static int choose(const FaForwardArgs* args) {
    if (ONLY_SHAPE >= 0) return ONLY_SHAPE;
    return fa::fastest_shape(args, {&estimated_us<SHAPES>...});
  }
  template <typename T>
  static int launch(const FaForwardArgs* args, cudaStream_t stream) {
    static constexpr int (*LAUNCHES[])(const FaForwardArgs*, cudaStream_t) = {&launch_shape<T, SHAPES>...};
    return LAUNCHES[choose(args)](args, stream);
  }
};

using ShapesOf64 = Shapes<fa::Shape<64, 2, 128>, fa::Shape<64, 3, 128>, fa::Shape<64, 4, 64>, fa::Shape<64, 1, 128>>;
using ShapesOf128 = Shapes<fa::Shape<128, 2, 128>, fa::Shape<128, 3, 80>, fa::Shape<128, 1, 64>>;

template <typename T, int HEAD_DIM>
int launch(const FaForwardArgs* args, cudaStream_t stream) {
  return std::conditional_t<HEAD_DIM == 64, ShapesOf64, ShapesOf128>::template launch<T>(args, stream);
}

FA_FORWARD(launch)

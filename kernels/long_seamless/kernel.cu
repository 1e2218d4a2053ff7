// long_seamless: a warpgroup begins its next work tile before it has finished the last one.
// step:    S of the first key tile of the next work tile is computed together with the last P V of this one, and its softmax during
//          that product; then O is stored
// because: in long_causal, no product of the same warpgroup overlaps with the first softmax of a work tile and with the store of O:
//          about 3 us per work tile, of 20 us at 2048 keys with a causal mask
// expect:  1.5 to 2 us less per work tile: at b4h16s2048d128 208 us, with a causal mask 125 us; at b2h16s4096d128 with a causal
//          mask 214 us
// diff:    two buffers of Q and their producer, and the end of a work tile
// tile:    as in long_causal
// takes:   fp16 and bf16, D = 64 and 128, any S_q >= 1 and S_kv >= 0, top-left and bottom-right causal masks, grouped heads; rows
//          contiguous and 16-byte aligned, with strides that TMA accepts
#include "fa/entry.h"
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
  Q_EMPTY,   // all warpgroups have read a buffer of Q
  K_EMPTY,   // all warpgroups have read the tile of K
  V_EMPTY,   // all warpgroups have read the tile of V
  O_WRITTEN  // all threads of the warpgroup have written O to shared memory
};

constexpr int STAGES = 2;  // key tiles in flight
constexpr int FIRST_TURN_BARRIER = 1, FIRST_GROUP_BARRIER = 8;  // named barriers, one per computing warpgroup

// Q of this work tile and of the next one.
template <typename T, typename SHAPE>
struct Smem {
  alignas(1024) T q[STAGES][SHAPE::GROUPS][GROUP_M * SHAPE::BOXED_DIM];
  alignas(1024) T o[SHAPE::GROUPS][GROUP_M * SHAPE::BOXED_DIM_V];
  alignas(1024) T k[STAGES][SHAPE::BLOCK_N * SHAPE::BOXED_DIM];
  alignas(1024) T v[STAGES][SHAPE::BLOCK_N * SHAPE::BOXED_DIM_V];
  uint64_t q_full[STAGES], q_empty[STAGES], k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};

template <typename SHAPE, typename SMEM>
__device__ __forceinline__ void init_all_mbarriers(SMEM& smem) {
  for (int stage = 0; stage < STAGES; ++stage) {
    fa::mbarrier_init(&smem.q_full[stage], 1);
    fa::mbarrier_init(&smem.k_full[stage], 1);
    fa::mbarrier_init(&smem.v_full[stage], 1);
    fa::mbarrier_init(&smem.q_empty[stage], SHAPE::COMPUTING_WARPS);
    fa::mbarrier_init(&smem.k_empty[stage], SHAPE::COMPUTING_WARPS);
    fa::mbarrier_init(&smem.v_empty[stage], SHAPE::COMPUTING_WARPS);
  }
  fa::fence_mbarrier_init();
}

// Loads Q, K and V of the work tiles of this block, K one tile ahead of V.  Called by one thread.
template <typename T, typename SHAPE>
__device__ __forceinline__ void produce_all(const fa::TileParams& params, const CUtensorMap& q_map, const CUtensorMap& k_map,
                                        const CUtensorMap& v_map, Smem<T, SHAPE>& smem) {
  constexpr int HEAD_DIM = SHAPE::HEAD_DIM, BLOCK_N = SHAPE::BLOCK_N;
  fa::Ring<STAGES> q_ring, k_ring, v_ring;
#pragma unroll 1
  for (int round = 0, number; (number = fa::dealt_number(round, blockIdx.x, gridDim.x)) < params.work_tiles; ++round) {
    const fa::WorkTile work = fa::make_work_tile<SHAPE>(params, number);
    if (work.key_tiles == 0) continue;
    const fa::Head head = fa::make_head(params, work.batch_head);
    auto load_k = [&](int j) {
      fa::wait(&smem.k_empty[k_ring.stage], k_ring.phase ^ 1);
      uint64_t* full_smem = &smem.k_full[k_ring.stage];
      fa::mbarrier_arrive_expect_tx(full_smem, SHAPE::TILE_BYTES);
      fa::load_rows<HEAD_DIM, BLOCK_N>(smem.k[k_ring.stage], k_map, j * BLOCK_N, head.kv_head, head.batch, full_smem);
      k_ring.advance();
    };
    auto load_q = [&] {
      uint64_t* full_smem = &smem.q_full[q_ring.stage];
      fa::mbarrier_arrive_expect_tx(full_smem, SHAPE::Q_BYTES);
#pragma unroll
      for (int g = 0; g < SHAPE::GROUPS; ++g) {
        const int first_query = work.first_query + g * GROUP_M;
        fa::load_rows<HEAD_DIM, GROUP_M>(smem.q[q_ring.stage][g], q_map, first_query, head.query_head, head.batch, full_smem);
      }
    };
    fa::wait(&smem.q_empty[q_ring.stage], q_ring.phase ^ 1);
    if (!fa::IS_OMITTED_BARRIER<Q_FULL>) load_q();
    load_k(work.key_tiles - 1);
    if (fa::IS_OMITTED_BARRIER<Q_FULL>) fa::delay_if_omitted<Q_FULL>(), load_q();  // K arrives before Q, so that the error shows
    q_ring.advance();
#pragma unroll 1
    for (int j = work.key_tiles - 1; j >= 0; --j) {
      if (j > 0) load_k(j - 1);
      fa::wait(&smem.v_empty[v_ring.stage], v_ring.phase ^ 1);
      fa::delay_if_omitted<V_FULL>();
      uint64_t* full_smem = &smem.v_full[v_ring.stage];
      fa::mbarrier_arrive_expect_tx(full_smem, SHAPE::V_BYTES);
      fa::load_rows<HEAD_DIM, BLOCK_N>(smem.v[v_ring.stage], v_map, j * BLOCK_N, head.kv_head, head.batch, full_smem);
      v_ring.advance();
    }
  }
}

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

// Sets what the rows of O are to be multiplied by, and stores their log-sum-exps, after the last softmax.
__device__ __forceinline__ void finish_rows(float (&inverse_l)[fa::LANE_ROWS], const fa::IntegerSoftmax& softmax,
                                            const fa::TileParams& params, const fa::WorkTile& work, int query, int lane) {
#pragma unroll
  for (int r = 0; r < fa::LANE_ROWS; ++r) {
    const float l = fa::sum_of_quad(softmax.l[r]);
    inverse_l[r] = l == 0.0f ? 0.0f : 1.0f / l;
    if (params.lse != nullptr && lane % QUAD == 0 && query + r * 8 < params.seq_q) {
      params.lse[uint64_t(work.batch_head) * params.seq_q + query + r * 8] =
          l == 0.0f ? -INFINITY : (softmax.m_log2[r] + log2f(l)) * float(M_LN2);
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
  const uint64_t first_q = fa::wgmma_descriptor(smem.q[0][group]);
  const uint64_t first_k = fa::wgmma_descriptor(smem.k[0]);
  const uint64_t first_v = fa::wgmma_descriptor(smem.v[0], BLOCK_N * BOX_COLUMNS * 2);
  constexpr int STAGE_STEP = SHAPE::TILE_BYTES >> 4, Q_STEP = SHAPE::Q_BYTES >> 4;  // descriptors count 16 bytes
  fa::Ring<STAGES> ring, q_ring;
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

  float o[SHAPE::O_TILES][4];
  uint32_t p[SHAPE::P_TILES][4];
  fa::IntegerSoftmax softmax;
  bool is_begun = false;  // p and softmax have the first key tile of the work tile

  // S and the softmax of the first key tile that this warpgroup sees of a work tile.  start() and end() stand before and after the
  // softmax.  The last key tile comes first, so that masked tiles come first and the main loop has no mask.
  auto first_softmax = [&](float (&s)[SHAPE::S_TILES][4], const fa::WorkTile& work, int j) {
    fa::release<K_EMPTY>(&smem.k_empty[ring.stage]);
    fa::mask(s, params, work.first_query + group * GROUP_M + lane_row, j * BLOCK_N, lane);
    softmax = fa::IntegerSoftmax();
    softmax.raise_m(s, params.scale_log2, params.inverse_scale_log2);
    softmax.exponentials(s, params.scale_log2);
    const fa::Ring<STAGES> next = ring.next();
    if (j > 0) fa::wait<K_FULL>(&smem.k_full[next.stage], next.phase);
  };
  auto visible_tiles = [&](const fa::WorkTile& work) {
    return max(1, fa::visible_key_tiles<SHAPE>(params, work.first_query + group * GROUP_M + GROUP_M));
  };

#pragma unroll 1
  for (int round = 0, number; (number = fa::dealt_number(round, blockIdx.x, gridDim.x)) < params.work_tiles; ++round) {
    fa::WorkTile work = fa::make_work_tile<SHAPE>(params, number);
    const int query = work.first_query + group * GROUP_M + lane_row;
    float inverse_l[fa::LANE_ROWS] = {};
    if (work.key_tiles > 0) {
      const uint64_t q = first_q + q_ring.stage * Q_STEP;
      int j = work.key_tiles - 1;
      if (!is_begun) {
        fa::wait<Q_FULL>(&smem.q_full[q_ring.stage], q_ring.phase);
        // The queries of this warpgroup see none of these tiles.  It releases them, and passes its turns on.
        const int group_tiles = visible_tiles(work);
#pragma unroll 1
        for (; j >= group_tiles; --j) {
          take_turn();
          pass_turn();
          release_unread(smem, ring, lane);
          ring.advance();
        }
        float s[SHAPE::S_TILES][4];
        fa::wait<K_FULL>(&smem.k_full[ring.stage], ring.phase);
        fa::start_qk<T, HEAD_DIM>(s, q, first_k + ring.stage * STAGE_STEP);
        fa::wgmma_wait_group<0>(s);
        first_softmax(s, work, j);
        fa::round_p<T>(p, s);
      }
      --j;
#pragma unroll
      for (int d = 0; d < SHAPE::O_TILES; ++d) o[d][0] = o[d][1] = o[d][2] = o[d][3] = 0.0f;

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
      // The tiles from first_masked on contain keys that some query of the warpgroup does not see.
      const int first_diagonal = params.first_diagonal + work.first_query + group * GROUP_M;
      const int first_masked = params.is_negated ? 0 : max(0, min(params.seq_k, first_diagonal)) / BLOCK_N;
#pragma unroll 1
      for (; j >= first_masked; --j) step(std::true_type());
#pragma unroll 1
      for (; j >= 0; --j) step(std::false_type());
      fa::release<Q_EMPTY>(&smem.q_empty[q_ring.stage]);
      q_ring.advance();
      finish_rows(inverse_l, softmax, params, work, query, lane);

      // P V of the first key tile, together with S of the next work tile where the warpgroup sees its last key tile.
      const int next_number = fa::dealt_number(round + 1, blockIdx.x, gridDim.x);
      const fa::WorkTile next_work = fa::make_work_tile<SHAPE>(params, min(next_number, params.work_tiles - 1));
      const bool has_next = next_number < params.work_tiles && next_work.key_tiles > 0;
      is_begun = has_next && visible_tiles(next_work) >= next_work.key_tiles;
      const fa::Ring<STAGES> previous = ring;
      ring.advance();
      if (is_begun) {
        fa::wait<Q_FULL>(&smem.q_full[q_ring.stage], q_ring.phase);
        fa::wait<K_FULL>(&smem.k_full[ring.stage], ring.phase);
        float s[SHAPE::S_TILES][4];
        take_turn();
        fa::start_qk<T, HEAD_DIM>(s, first_q + q_ring.stage * Q_STEP, first_k + ring.stage * STAGE_STEP);
        fa::wait<V_FULL>(&smem.v_full[previous.stage], previous.phase);
        fa::start_pv<T, BLOCK_N>(o, p, first_v + previous.stage * STAGE_STEP);
        pass_turn();
        fa::wgmma_wait_group<1>(s);
        first_softmax(s, next_work, next_work.key_tiles - 1);
        fa::wgmma_wait_group<0>(o);
        fa::round_p<T>(p, s);
      } else {
        if (has_next) take_turn();
        fa::wait<V_FULL>(&smem.v_full[previous.stage], previous.phase);
        fa::start_pv<T, BLOCK_N>(o, p, first_v + previous.stage * STAGE_STEP);
        if (has_next) pass_turn();
        fa::wgmma_wait_group<0>(o);
      }
      fa::release<V_EMPTY>(&smem.v_empty[previous.stage]);
    } else {
      finish_rows(inverse_l, fa::IntegerSoftmax(), params, work, query, lane);
#pragma unroll
      for (int d = 0; d < SHAPE::O_TILES; ++d) o[d][0] = o[d][1] = o[d][2] = o[d][3] = 0.0f;
    }

#pragma unroll
    for (int d = 0; d < SHAPE::O_TILES; ++d) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o[d][i] *= inverse_l[i / 2];
    }
    // The place of this work tile is computed again, so that no register holds it meanwhile.
    int same_number = number;
    asm volatile("" : "+r"(same_number));
    work = fa::make_work_tile<SHAPE>(params, same_number);
    fa::store_o<O_WRITTEN, SHAPE::O_TILES>(smem.o[group], o, o_map, params, fa::make_head(params, work.batch_head), work.first_query,
                                           group, FIRST_GROUP_BARRIER + group, thread_in_group, lane);
  }
  if (thread_in_group == 0) fa::cp_async_bulk_wait_group_read();  // before the block's shared memory is given to another one
}

template <typename T, typename SHAPE>
__global__ void __launch_bounds__(SHAPE::THREADS, SHAPE::BLOCKS_PER_SM)
long_seamless_kernel(const __grid_constant__ fa::TileParams params, const __grid_constant__ CUtensorMap q_map,
                   const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                   const __grid_constant__ CUtensorMap o_map) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<Smem<T, SHAPE>*>(smem_bytes);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / GROUP_THREADS, 0);
  if (threadIdx.x == 0) init_all_mbarriers<SHAPE>(smem);
  __syncthreads();
  if (warpgroup == 0) {
    fa::setmaxnreg_dec<SHAPE::PRODUCER_REGISTERS>();
    if (threadIdx.x < WARP && fa::elect_sync()) {
      produce_all(params, q_map, k_map, v_map, smem);
    }
  } else {
    fa::setmaxnreg_inc<SHAPE::REGISTERS>();
    compute(params, o_map, smem, warpgroup - 1);
  }
}

template <typename T, typename SHAPE>
int launch_shape(const FaForwardArgs* args, cudaStream_t stream) {
  return fa::launch_persistent<&long_seamless_kernel<T, SHAPE>, SHAPE, sizeof(Smem<T, SHAPE>)>(args, stream);
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
  using Costs = fa::Costs<SHAPE>;
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

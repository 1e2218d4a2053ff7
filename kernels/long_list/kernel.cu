// long_list: under a causal mask, the host assigns the work tiles by list scheduling.  Also the source of long_tail, long_next_q,
// long_from_end and long_heads_tail.
// step:    the host lists the work tiles of each block, the longest first and evened out, where that takes less time than dealing
// because: dealt like cards, the work tiles of three warpgroups at D = 128 give the busiest SM 7 % more work than the average at
//          b4h16s2048 with a causal mask, and 5 % at b2h16s4096; by calculation, lists leave about 1 %
// expect:  with a causal mask at D = 128, 5 % less time than long_fitted at b4h16s2048, and 3 % at b2h16s4096; with 8192 keys or
//          more, at D = 64, and without a mask the same time
// diff:    the lists, which are a parameter of the kernel, and the times of work tiles under a causal mask
// tile:    as in long_shapes
// takes:   fp16 and bf16, D = 64 and 128 (long_heads_tail: 80, 96 and 112), any S_q >= 1 and S_kv >= 0, top-left and bottom-right
//          causal masks, grouped heads; rows contiguous and 16-byte aligned, with strides that TMA accepts
#include "fa/entry.h"
#include "fa/fitted_costs.h"
#include "fa/hopper.cuh"
#include "fa/integer_softmax.cuh"
#include "fa/listed_tiles.cuh"
#include "fa/omit.cuh"
#include "fa/producer.cuh"
#include "fa/products.cuh"
#include "fa/ring.cuh"
#include "fa/schedule.cuh"
#include "fa/shape.cuh"
#include "fa/shape_choice.h"
#include "fa/split_tiles.cuh"
#include "fa/tile_params.cuh"
#include "fa/tile_store.cuh"
#include "fa/tiles_from_end.cuh"
#include "fa/warpgroup.cuh"

using fa::BOX_COLUMNS, fa::GROUP_M, fa::GROUP_THREADS, fa::LANE_ROWS, fa::MMA_M, fa::QUAD, fa::WARP;

// The barriers of this kernel and what each guarantees.
enum Barrier {
  NONE,
  Q_FULL,      // TMA has written Q
  K_FULL,      // TMA has written a tile of K
  V_FULL,      // TMA has written a tile of V
  Q_EMPTY,     // all warpgroups have read Q
  K_EMPTY,     // all warpgroups have read the tile of K
  V_EMPTY,     // all warpgroups have read the tile of V
  O_WRITTEN,   // all threads of the warpgroup have written O to shared memory
  PART_STORED  // all threads of the warpgroup have stored their partial result in the workspace
};

constexpr int STAGES = 2;  // key tiles in flight
constexpr int FIRST_TURN_BARRIER = 1, FIRST_GROUP_BARRIER = 8;  // named barriers, one per computing warpgroup

// In long_from_end, the first work tile of a head may have warpgroups without queries.
using Params = std::conditional_t<TILES_FROM_END, fa::TilesFromEnd, fa::TileParams>;

// In long_tail, the work tiles of an incomplete last round may be divided by their keys.  At D = 64, ptxas would move the
// exponentials.
template <int HEAD_DIM>
constexpr bool MAY_DIVIDE = DIVIDES_LAST_ROUND && HEAD_DIM > 64;
template <typename DEAL>
constexpr bool HAS_PARTS = std::is_same_v<DEAL, fa::SplitTiles>;

template <typename T, typename SHAPE>
struct SplitSmem : fa::RingSmem<T, SHAPE, STAGES> {
  int all_are_stored[SHAPE::GROUPS];
};
template <typename T, typename SHAPE>
using Smem = std::conditional_t<MAY_DIVIDE<SHAPE::HEAD_DIM>, SplitSmem<T, SHAPE>, fa::RingSmem<T, SHAPE, STAGES>>;

// A part in the workspace: O of each thread, then m (in log2) and l of its rows.
template <typename SHAPE>
constexpr int PART_VECTORS = (SHAPE::O_TILES + 1) * GROUP_THREADS;

// Stores a warpgroup's part of a work tile, and merges all parts if they are stored.  Returns whether they are.
template <typename SHAPE>
__device__ __forceinline__ bool merge_parts(const fa::SplitTiles& split, int group, float (&o)[SHAPE::O_TILES][4],
                                            fa::IntegerSoftmax& softmax, int* all_are_stored_smem) {
  const int thread = threadIdx.x % GROUP_THREADS;
  const int first_part = split.first_part(group, SHAPE::GROUPS), own_part = split.own_part(group, SHAPE::GROUPS);
  float4* own = split.results + int64_t(own_part) * PART_VECTORS<SHAPE> + thread;
  if (thread >= WARP && own_part == first_part) fa::delay_if_omitted<PART_STORED>();
#pragma unroll
  for (int d = 0; d < SHAPE::O_TILES; ++d) __stcg(own + d * GROUP_THREADS, make_float4(o[d][0], o[d][1], o[d][2], o[d][3]));
  __stcg(own + SHAPE::O_TILES * GROUP_THREADS, make_float4(softmax.m_log2[0], softmax.m_log2[1], softmax.l[0], softmax.l[1]));
  const int named_barrier = FIRST_GROUP_BARRIER + group;
  if (!fa::all_parts_are_stored<PART_STORED>(split, first_part, own_part, named_barrier, all_are_stored_smem)) return false;
#pragma unroll
  for (int d = 0; d < SHAPE::O_TILES; ++d) o[d][0] = o[d][1] = o[d][2] = o[d][3] = 0.0f;
  softmax = fa::IntegerSoftmax();
  const float4* part_gmem = split.results + int64_t(first_part) * PART_VECTORS<SHAPE> + thread;
#pragma unroll 1
  for (int part = 0; part < split.parts; ++part, part_gmem += PART_VECTORS<SHAPE>) {
    const float4 m_and_l = __ldcg(part_gmem + SHAPE::O_TILES * GROUP_THREADS);
    float rescale_part[LANE_ROWS];
#pragma unroll
    for (int r = 0; r < LANE_ROWS; ++r) {
      const float m_part_log2 = r == 0 ? m_and_l.x : m_and_l.y, l_part = r == 0 ? m_and_l.z : m_and_l.w;
      const float m_new_log2 = fmaxf(softmax.m_log2[r], m_part_log2);
      softmax.rescale[r] = fa::ex2_approx_ftz(softmax.m_log2[r] - m_new_log2);
      rescale_part[r] = fa::ex2_approx_ftz(m_part_log2 - m_new_log2);
      softmax.m_log2[r] = m_new_log2;
      softmax.l[r] = softmax.l[r] * softmax.rescale[r] + l_part * rescale_part[r];
    }
#pragma unroll
    for (int d = 0; d < SHAPE::O_TILES; ++d) {
      const float4 o_part = __ldcg(part_gmem + d * GROUP_THREADS);
      o[d][0] = o[d][0] * softmax.rescale[0] + o_part.x * rescale_part[0];
      o[d][1] = o[d][1] * softmax.rescale[0] + o_part.y * rescale_part[0];
      o[d][2] = o[d][2] * softmax.rescale[1] + o_part.z * rescale_part[1];
      o[d][3] = o[d][3] * softmax.rescale[1] + o_part.w * rescale_part[1];
    }
  }
  return true;
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

// A computing warpgroup: 64 queries of each work tile of this block.
template <typename T, typename SHAPE, typename DEAL>
__device__ __forceinline__ void compute(
    const Params& params, const CUtensorMap& o_map, const DEAL& deal, Smem<T, SHAPE>& smem, int group) {
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

  float o[SHAPE::O_TILES][4];
  fa::IntegerSoftmax softmax;
  auto finish = [&](const fa::WorkTile& work) {
    const fa::Head head = fa::make_head(params, work.batch_head);
    fa::normalise(o, softmax, params, head, work.first_query + group * GROUP_M + lane_row, lane);
    fa::store_o<O_WRITTEN, SHAPE::O_TILES>(smem.o[group], o, o_map, params, head, work.first_query, group,
                                           FIRST_GROUP_BARRIER + group, thread_in_group, lane);
  };
  int number;
#pragma unroll 1
  for (int round = 0; (number = deal.number(round)) < params.work_tiles; ++round) {
    const fa::WorkTile work = fa::make_work_tile<SHAPE>(params, number);
    const fa::KeyTiles keys = deal.key_tiles(work, round);
    const int query = work.first_query + group * GROUP_M + lane_row;
#pragma unroll
    for (int d = 0; d < SHAPE::O_TILES; ++d) o[d][0] = o[d][1] = o[d][2] = o[d][3] = 0.0f;
    softmax = fa::IntegerSoftmax();
    if (work.key_tiles > 0) {
      // The tiles from first_masked on contain keys that some query of the warpgroup does not see.  The last tile is the first to
      // be computed, so that masked tiles come first and the main loop has no mask.
      const int first_key = keys.first * BLOCK_N;
      const int first_diagonal = params.first_diagonal + work.first_query + group * GROUP_M;
      const int first_masked = params.is_negated ? 0 : max(0, min(params.seq_k, first_diagonal) - first_key) / BLOCK_N;
      int j = keys.end - keys.first - 1;
      uint32_t p[SHAPE::P_TILES][4];
      fa::wait<Q_FULL>(&smem.q_full, q_phase);
      q_phase ^= 1;

      // The queries of this warpgroup see none of these tiles.  It releases them, and passes its turns on.
      const int group_tiles = max(1, fa::visible_key_tiles<SHAPE>(params, work.first_query + group * GROUP_M + GROUP_M));
#pragma unroll 1
      for (; j >= group_tiles; --j) {
        take_turn();
        pass_turn();
        release_unread<T, SHAPE>(smem, ring, lane);
        ring.advance();
      }

      // The softmax of the last key tile, while nothing else runs.
      {
        float s[SHAPE::S_TILES][4];
        fa::wait<K_FULL>(&smem.k_full[ring.stage], ring.phase);
        fa::start_qk<T, HEAD_DIM>(s, q, first_k + ring.stage * STAGE_STEP);
        fa::wgmma_wait_group<0>(s);
        fa::release<K_EMPTY>(&smem.k_empty[ring.stage]);
        if (RELEASE_Q_EARLY && j == 0) fa::release<Q_EMPTY>(&smem.q_empty);
        fa::mask(s, params, query, first_key + j * BLOCK_N, lane);
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
        if (RELEASE_Q_EARLY && j == 0) fa::release<Q_EMPTY>(&smem.q_empty);
        if (decltype(is_masked)::value) fa::mask(s, params, query, first_key + j * BLOCK_N, lane);
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
      if (!RELEASE_Q_EARLY) fa::release<Q_EMPTY>(&smem.q_empty);

      // P V of the first key tile.
      fa::wait<V_FULL>(&smem.v_full[ring.stage], ring.phase);
      fa::start_pv<T, BLOCK_N>(o, p, first_v + ring.stage * STAGE_STEP);
      fa::wgmma_wait_group<0>(o);
      fa::release<V_EMPTY>(&smem.v_empty[ring.stage]);
      ring.advance();
    }

    if constexpr (HAS_PARTS<DEAL>) {
      // This block has no other work tile.  With the merge in the loop, ptxas 13.0 keeps the addresses of key tiles per lane.
      if (deal.is_split(round)) break;
    }
    finish(work);
  }
  if constexpr (HAS_PARTS<DEAL>) {
    if (number < params.work_tiles && merge_parts<SHAPE>(deal, group, o, softmax, &smem.all_are_stored[group])) {
      finish(fa::make_work_tile<SHAPE>(params, number));
    }
  }
  if (thread_in_group == 0) fa::cp_async_bulk_wait_group_read();  // before the block's shared memory is given to another one
}

template <typename T, typename SHAPE, typename DEAL>
__global__ void __launch_bounds__(SHAPE::THREADS, SHAPE::BLOCKS_PER_SM)
long_list_kernel(const __grid_constant__ Params params, const __grid_constant__ CUtensorMap q_map,
                 const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                 const __grid_constant__ CUtensorMap o_map, const __grid_constant__ DEAL deal) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<Smem<T, SHAPE>*>(smem_bytes);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / GROUP_THREADS, 0);
  if (threadIdx.x == 0) fa::init_mbarriers<SHAPE>(smem);
  __syncthreads();
  if (warpgroup == 0) {
    fa::setmaxnreg_dec<SHAPE::PRODUCER_REGISTERS>();
    if (threadIdx.x < WARP && fa::elect_sync()) {
      fa::produce<Q_FULL, V_FULL, SHAPE>(deal, params, q_map, k_map, v_map, smem);
    }
  } else {
    fa::setmaxnreg_inc<SHAPE::REGISTERS>();
    compute<T, SHAPE>(params, o_map, deal, smem, warpgroup - 1);
  }
}

// The estimated time of a work tile.
template <typename SHAPE>
double work_tile_us(const Params& params, int number) {
  using Fitted = fa::FittedCosts<SHAPE>;
  using Causal = fa::CausalCosts<SHAPE>;
  const int key_tiles = fa::make_work_tile<SHAPE>(params, number).key_tiles;
  const bool hides_keys = params.first_diagonal < params.seq_k;
  return hides_keys ? key_tiles * Causal::KEY_TILE_US + Causal::WORK_TILE_US
                    : key_tiles * Fitted::KEY_TILE_US + Fitted::WORK_TILE_US;
}

// How the blocks get the work tiles of a call.
template <typename SHAPE>
fa::TilePlan plan_of(const Params& params) {
  return fa::remembered_plan<SHAPE>(params, [&](int number) { return work_tile_us<SHAPE>(params, number); });
}

constexpr double MERGE_US = 6.0;  // to merge the parts of a work tile; calculated

template <typename SHAPE>
fa::Division division_of(const FaForwardArgs* args, const Params& params) {
  return fa::divide_last_round<SHAPE, fa::FittedCosts<SHAPE>>(args, params, MERGE_US);
}

// The time of the SM with the most work.
template <typename SHAPE>
double shape_us(const FaForwardArgs* args, const Params& params) {
  if constexpr (MAY_DIVIDE<SHAPE::HEAD_DIM>) {
    const fa::Division division = division_of<SHAPE>(args, params);
    if (division.tiles > 0 && !fa::has_many_rounds<SHAPE>(params)) {
      const auto us_of = [&](int number) { return work_tile_us<SHAPE>(params, number); };
      constexpr double WORK_TILE_US = fa::FittedCosts<SHAPE>::WORK_TILE_US;
      const double part_us = (us_of(division.first) - WORK_TILE_US) / division.parts + WORK_TILE_US + MERGE_US;
      return fa::busiest_sm_us<SHAPE>(params, division.first, us_of) + part_us * SHAPE::BLOCKS_PER_SM;
    }
  }
  return plan_of<SHAPE>(params).us;
}

// Estimates the time of a call.  Returns infinity if the shape refuses the call.
template <typename SHAPE>
double estimated_us(const FaForwardArgs* args) {
  Params params;
  return fa::make_tile_params<SHAPE>(args, &params) == FA_OK ? shape_us<SHAPE>(args, params) : INFINITY;
}

// The workspace holds the results of all parts, then their marks.
template <typename SHAPE>
size_t result_bytes(const fa::Division& division) {
  return size_t(division.tiles) * SHAPE::GROUPS * division.parts * PART_VECTORS<SHAPE> * sizeof(float4);
}

template <typename SHAPE>
size_t workspace_bytes(const FaForwardArgs* args) {
  Params params;
  if (fa::make_tile_params<SHAPE>(args, &params) != FA_OK) return 0;
  const fa::Division division = division_of<SHAPE>(args, params);
  return result_bytes<SHAPE>(division) + size_t(division.tiles) * SHAPE::GROUPS * division.parts * sizeof(uint64_t);
}

// Fills `split` and returns FA_OK, or refuses the call.
template <typename SHAPE>
int make_split(const FaForwardArgs* args, const Params& params, fa::SplitTiles* split) {
  const fa::Division division = division_of<SHAPE>(args, params);
  const size_t bytes = workspace_bytes<SHAPE>(args);
  if (args->workspace_bytes < bytes || reinterpret_cast<uintptr_t>(args->workspace) % alignof(float4) != 0) {
    return fa_refuse(args, "the workspace has %llu bytes at %p; it needs %zu bytes, aligned to %zu",
                     static_cast<unsigned long long>(args->workspace_bytes), args->workspace, bytes, alignof(float4));
  }
  char* marks = static_cast<char*>(args->workspace) + result_bytes<SHAPE>(division);
  *split = {static_cast<float4*>(args->workspace), reinterpret_cast<uint64_t*>(marks), division.first, division.parts};
  return FA_OK;
}

template <typename T, typename SHAPE, typename DEAL>
int launch_kernel(const FaForwardArgs* args, const Params& params, const DEAL& deal, cudaStream_t stream) {
  fa::TensorMaps maps;
  if (int status = fa::make_tensor_maps<SHAPE>(args, &maps)) return status;
  const auto kernel = &long_list_kernel<T, SHAPE, DEAL>;
  constexpr int smem_bytes = sizeof(Smem<T, SHAPE>);
  static fa::OncePerDevice prepare;
  const auto prepare_once = [&] { return fa::prepare_kernel<SHAPE, smem_bytes>(args, reinterpret_cast<const void*>(kernel)); };
  if (int status = prepare(prepare_once)) return status;
  const int blocks = HAS_PARTS<DEAL> ? fa::max_blocks<SHAPE>() : std::min(params.work_tiles, fa::max_blocks<SHAPE>());
  kernel<<<blocks, SHAPE::THREADS, smem_bytes, stream>>>(params, maps.q, maps.k, maps.v, maps.o, deal);
  return static_cast<int>(cudaPeekAtLastError());
}

template <typename T, typename SHAPE>
int launch_shape(const FaForwardArgs* args, cudaStream_t stream) {
  Params params;
  if (int status = fa::make_tile_params<SHAPE>(args, &params)) return status;
  if constexpr (SHAPE::BLOCKS_PER_SM == 1) {
    const fa::TilePlan plan = plan_of<SHAPE>(params);
    if (plan.listed) return launch_kernel<T, SHAPE>(args, params, *plan.listed, stream);
  }
  if constexpr (MAY_DIVIDE<SHAPE::HEAD_DIM>) {
    fa::SplitTiles split;
    if (int status = make_split<SHAPE>(args, params, &split)) return status;
    if (split.parts > 1) return launch_kernel<T, SHAPE>(args, params, split, stream);
  }
  return launch_kernel<T, SHAPE>(args, params, fa::Dealt(), stream);
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
  static size_t workspace_bytes_of_call(const FaForwardArgs* args) {
    static constexpr size_t (*WORKSPACES[])(const FaForwardArgs*) = {&workspace_bytes<SHAPES>...};
    return WORKSPACES[choose(args)](args);
  }
};

template <int HEAD_DIM>
struct ShapesOf {  // with fewer columns, three warpgroups have registers for more keys
  static constexpr int KEYS = HEAD_DIM == 80 ? 112 : HEAD_DIM == 96 ? 96 : 80;
  using type = Shapes<fa::Shape<HEAD_DIM, 2, 128>, fa::Shape<HEAD_DIM, 3, KEYS>, fa::Shape<HEAD_DIM, 1, 64>>;
};
template <>
struct ShapesOf<64> {
  using type = Shapes<fa::Shape<64, 2, 128>, fa::Shape<64, 3, 128>, fa::Shape<64, 4, 64>, fa::Shape<64, 1, 128>>;
};

template <typename T, int HEAD_DIM>
int launch(const FaForwardArgs* args, cudaStream_t stream) {
  return ShapesOf<HEAD_DIM>::type::template launch<T>(args, stream);
}

FA_FORWARD(launch)

#if DIVIDES_LAST_ROUND
FA_EXPORT size_t fa_workspace_bytes(const FaForwardArgs* args) {
#define FA_RETURN_IF(DTYPE, HEAD_DIM)                                                               \
  if constexpr (MAY_DIVIDE<HEAD_DIM>) {                                                             \
    if (args->head_dim == HEAD_DIM) return ShapesOf<HEAD_DIM>::type::workspace_bytes_of_call(args); \
  }
  FA_FOR_EACH_INSTANTIATION(FA_RETURN_IF)
#undef FA_RETURN_IF
  return 0;
}
#endif

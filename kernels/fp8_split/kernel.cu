// fp8_split: the keys of the last work tiles are divided between blocks.  Also the source of fp8_four and fp8_stages.
// step:    without a mask, the work tiles of an incomplete last round are divided by their keys, so that all SMs have work until the
//          end
// because: at D = 64, 2048 to 8192 keys and 16 heads, there are 5.2 or 5.3 rounds of work tiles of 192 queries, and in the sixth, two
//          thirds of the SMs are idle; the clock is not throttled there
// expect:  at D = 64 without a mask, 229 us at b2h16s4096, 435 us at b1h16s8192, 129 us at b4h16s2048 and 65 us at b1h8s4096; with a
//          causal mask the same time as fp8_causal
// diff:    merge_parts, the part of the keys in compute, the host code that divides the last round, and its time in the estimate
// tile:    as in fp8_shapes
// takes:   e4m3 with an output in fp16 or bf16, D = 64 and 128, any S_q >= 1 and S_kv >= 0, top-left and bottom-right causal
//          masks, grouped heads; rows contiguous and 16-byte aligned, with strides that TMA accepts
#include <algorithm>

#include "fa/e4m3_costs.h"
#include "fa/e4m3_host.cuh"
#include "fa/e4m3_steps.cuh"
#include "fa/e4m3_transpose.cuh"
#include "fa/entry.h"
#include "fa/shape_choice.h"
#include "fa/split_tiles.cuh"

// How the work is divided:
// - A block computes 64 queries per computing warpgroup, and all keys that they see, from the last key tile to the first.  Masked
//   tiles therefore come first, and the main loop has no mask.
// - One thread of the first warpgroup, the producer, loads Q, K and V by TMA.  K and V go through a ring of STAGES key tiles.
// - A block is persistent: the work tiles are dealt to the blocks, the longest first.  Those of an incomplete last round may be
//   divided by their keys; the block that stores the last part merges all.
// - S of the next key tile is computed by the tensor cores during the softmax of the current one.
// - wgmma in e4m3 reads both operands along K only, which for P V are the keys.  transpose_v_tile therefore writes V^T to the
//   workspace first.
// - The row sum is computed by P V, with eight more columns of V that are one.
// - P V of each key tile is added to O in float32, because the accumulator of wgmma in e4m3 keeps only 13 bits after the leading
//   one.

using fa::GROUP_M, fa::GROUP_THREADS, fa::LANE_ROWS, fa::E4M3_MMA_K, fa::MMA_M, fa::MMA_N, fa::QUAD, fa::Ring, fa::Smem, fa::WARP;
using Softmax = fa::Softmax<fa::INTEGERS, 4>;

// A work tile with KEY_TILES key tiles in shared memory.  With one warpgroup, two blocks share an SM.
template <int HEAD_DIM, int GROUPS, int BLOCK_N>
struct Shape : fa::Shape<HEAD_DIM, GROUPS, BLOCK_N, true> {
  static constexpr int STAGES = HEAD_DIM == 128 && GROUPS == 1 ? std::min(KEY_TILES, 3) : KEY_TILES;
  static_assert(KEY_TILES >= 2, "S of a tile is computed with P V of the one before it");
};

template <typename Out, typename SHAPE>
struct SplitSmem : Smem<Out, SHAPE> {
  int all_are_stored[SHAPE::GROUPS];
};

// A part in the workspace: O and the row sum of each thread, then m (in log2) of its rows.
template <typename SHAPE>
constexpr int PART_VECTORS = (SHAPE::PV_TILES + 1) * GROUP_THREADS;

// Stores a warpgroup's part of a work tile, and merges all parts if they are stored.  Returns whether they are.
template <typename SHAPE>
__device__ __forceinline__ bool merge_parts(const fa::SplitTiles& split, int group, float (&o)[SHAPE::PV_TILES][4],
                                            Softmax& softmax, int* all_are_stored_smem) {
  constexpr int PV_TILES = SHAPE::PV_TILES;
  const int thread = threadIdx.x % GROUP_THREADS;
  const int first_part = split.first_part(group, SHAPE::GROUPS), own_part = split.own_part(group, SHAPE::GROUPS);
  float4* own = split.results + int64_t(own_part) * PART_VECTORS<SHAPE> + thread;
  if (thread >= WARP && own_part == first_part) fa::delay_if_omitted<fa::PART_STORED>();
#pragma unroll
  for (int d = 0; d < PV_TILES; ++d) __stcg(own + d * GROUP_THREADS, make_float4(o[d][0], o[d][1], o[d][2], o[d][3]));
  __stcg(own + PV_TILES * GROUP_THREADS, make_float4(softmax.m_log2[0], softmax.m_log2[1], 0.0f, 0.0f));
  if (!fa::all_parts_are_stored<fa::PART_STORED>(split, first_part, own_part, fa::FIRST_GROUP_BARRIER + group, all_are_stored_smem)) {
    return false;
  }
#pragma unroll
  for (int d = 0; d < PV_TILES; ++d) o[d][0] = o[d][1] = o[d][2] = o[d][3] = 0.0f;
  softmax = Softmax();
  const float4* part_gmem = split.results + int64_t(first_part) * PART_VECTORS<SHAPE> + thread;
#pragma unroll 1
  for (int part = 0; part < split.parts; ++part, part_gmem += PART_VECTORS<SHAPE>) {
    const float4 m_part_log2 = __ldcg(part_gmem + PV_TILES * GROUP_THREADS);
    float rescale_part[LANE_ROWS];
#pragma unroll
    for (int r = 0; r < LANE_ROWS; ++r) {
      const float m_of_part = r == 0 ? m_part_log2.x : m_part_log2.y, m_new_log2 = fmaxf(softmax.m_log2[r], m_of_part);
      softmax.rescale[r] = fa::ex2_approx_ftz(softmax.m_log2[r] - m_new_log2);
      rescale_part[r] = fa::ex2_approx_ftz(m_of_part - m_new_log2);
      softmax.m_log2[r] = m_new_log2;
    }
#pragma unroll
    for (int d = 0; d < PV_TILES; ++d) {
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
template <typename Out, typename SHAPE>
__device__ __forceinline__ void release_unread(Smem<Out, SHAPE>& smem, const Ring<SHAPE::STAGES>& ring, int lane) {
  if (lane == 0) {  // without its waits, one phase could get the arrivals of two
    fa::wait<fa::K_FULL>(&smem.k_full[ring.stage], ring.phase);
    fa::release<fa::K_EMPTY>(&smem.k_empty[ring.stage]);
    fa::wait<fa::V_FULL>(&smem.v_full[ring.stage], ring.phase);
    fa::release<fa::V_EMPTY>(&smem.v_empty[ring.stage]);
  }
  __syncwarp();  // no lane may wait for a phase before the one before it is complete
}

// At D = 64, four warpgroups have 112 registers per thread.  In the loop over key tiles, they compute P V in two halves of its
// columns, one after the other, so that its accumulator takes 20 registers instead of 36.
template <typename SHAPE>
constexpr bool HALVES_PV = SHAPE::GROUPS == 4;

// Hides from the compiler that a number is the same as before.  It then computes again what follows from it, and does not keep the
// results in registers, which are scarce at D = 64.
__device__ __forceinline__ int recomputed(int number) {
  asm volatile("" : "+r"(number));
  return number;
}

// A computing warpgroup: 64 queries of each work tile of this block.
template <typename Out, typename SHAPE>
__device__ __forceinline__ void compute(const fa::E4m3Params& params, const CUtensorMap& o_map, const typename SHAPE::Deal& deal,
                                        SplitSmem<Out, SHAPE>& smem, int group) {
  constexpr int BLOCK_N = SHAPE::BLOCK_N, S_TILES = SHAPE::S_TILES;
  const int thread_in_group = threadIdx.x % GROUP_THREADS, lane = threadIdx.x % WARP;
  const int group_row = thread_in_group / WARP * MMA_M + lane / QUAD;  // the first of the lane's two rows
  const int own_turn = fa::FIRST_TURN_BARRIER + group;
  const fa::Operands<SHAPE> operands = {fa::k_major_descriptor<SHAPE::HEAD_DIM>(smem.q[group]),
                                        fa::k_major_descriptor<SHAPE::HEAD_DIM>(smem.k[0]),
                                        fa::k_major_descriptor<SHAPE::PANEL_KEYS>(smem.v[0])};
  Ring<SHAPE::STAGES> ring;
  uint32_t q_phase = 0;
  constexpr bool HAS_TURNS = SHAPE::GROUPS > 1 && SHAPE::GROUPS < 4;  // four warpgroups are faster without
  auto take_turn = [&] {
    if (HAS_TURNS) fa::barrier_sync<2 * GROUP_THREADS>(own_turn);
  };
  auto pass_turn = [&] {
    if (HAS_TURNS) fa::barrier_arrive<2 * GROUP_THREADS>(fa::FIRST_TURN_BARRIER + (recomputed(group) + 1) % SHAPE::GROUPS);
  };
  if (HAS_TURNS && group == 0) fa::barrier_arrive<2 * GROUP_THREADS>(own_turn);  // the first turn

#pragma unroll 1
  for (int round = 0, number; (number = deal.number(round)) < params.work_tiles; ++round) {
    const fa::WorkTile work = fa::make_work_tile<SHAPE>(params, number);
    const fa::KeyTiles keys = deal.key_tiles(work, round);
    const fa::Head head = fa::make_head(params, work.batch_head);
    const fa::Scale scale = fa::make_scale<false>(params, head);
    const int query = work.first_query + group * GROUP_M + group_row;
    float o[SHAPE::PV_TILES][4] = {}, o_of_tile[SHAPE::PV_TILES][4];  // the second is the accumulator of wgmma
    Softmax softmax;
    if (work.key_tiles > 0) {
      uint32_t p[SHAPE::P_TILES][4];
      // The tiles from first_masked on contain keys that some query of the warpgroup does not see.
      const int first_diagonal = params.first_diagonal + work.first_query + group * GROUP_M;
      const int first_key = keys.first * BLOCK_N;
      const int first_masked = scale.is_negated ? 0 : max(0, min(params.seq_k, first_diagonal) - first_key) / BLOCK_N;
      int j = keys.end - keys.first - 1;
      fa::wait<fa::Q_FULL>(&smem.q_full, q_phase);
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
        float s[S_TILES][4];
        fa::wait<fa::K_FULL>(&smem.k_full[ring.stage], ring.phase);
        fa::start_s<SHAPE>(s, operands.q, operands.k(ring.stage));
        fa::wgmma_wait_group<0>(s);
        fa::release<fa::K_EMPTY>(&smem.k_empty[ring.stage]);
        fa::mask(s, params, scale.is_negated, query, first_key + j * BLOCK_N, lane);
        softmax.raise_m(s, scale);
        fa::exponentials<false>(s, softmax, scale.log2);
        fa::round_p<SHAPE>(p, s);
        const Ring<SHAPE::STAGES> next = ring.next();
        if (j > 0) fa::wait<fa::K_FULL>(&smem.k_full[next.stage], next.phase);
        --j;
      }

      // S of this key tile, with P V of the previous one, and then the softmax of this one during P V.
      auto step = [&](auto is_masked) {
        const Ring<SHAPE::STAGES> previous = ring;
        ring.advance();
        float s[S_TILES][4];
        take_turn();
        fa::start_s<SHAPE>(s, operands.q, operands.k(ring.stage));
        fa::wait<fa::V_FULL>(&smem.v_full[previous.stage], previous.phase);
        constexpr int LOW_TILES = SHAPE::PV_TILES / 2, LOW_KEYS = HALVES_PV<SHAPE> ? S_TILES / 2 : S_TILES;
        float low[LOW_TILES][4], high[SHAPE::PV_TILES - LOW_TILES][4];
        const uint64_t v = operands.v(previous.stage);
        if constexpr (HALVES_PV<SHAPE>) {
          fa::start_pv<SHAPE, false>(low, p, v);
        } else {
          fa::start_pv<SHAPE, false>(o_of_tile, p, v);
        }
        pass_turn();
        fa::wgmma_wait_group<1>(s);
        fa::release<fa::K_EMPTY>(&smem.k_empty[ring.stage]);
        if (decltype(is_masked)::value) fa::mask(s, params, scale.is_negated, query, first_key + j * BLOCK_N, lane);
        const bool is_raised = softmax.raise_m_if_needed(s, scale);
        fa::exponentials<false, 0, LOW_KEYS>(s, softmax, scale.log2);
        // ptxas would move the exponentials below the wait for P V, but not across the loop of this wait.
        const Ring<SHAPE::STAGES> next = ring.next();
        if (j > 0) fa::wait<fa::K_FULL>(&smem.k_full[next.stage], next.phase);
        if constexpr (HALVES_PV<SHAPE>) {
          fa::wgmma_wait_group<0>(low);
          fa::add_tile(o, low);
          fa::start_pv<SHAPE, false>(high, p, v + LOW_TILES * MMA_N * SHAPE::PANEL_KEYS / 16);
          fa::exponentials<false, LOW_KEYS>(s, softmax, scale.log2);
          fa::wait<fa::V_FULL>(&smem.v_full[ring.stage], ring.phase);  // a loop, as above
          fa::wgmma_wait_group<0>(high);
        } else {
          fa::wgmma_wait_group<0>(o_of_tile);
        }
        fa::release<fa::V_EMPTY>(&smem.v_empty[previous.stage]);
        fa::round_p<SHAPE>(p, s);
        if constexpr (HALVES_PV<SHAPE>) {
          fa::add_tile<LOW_TILES>(o, high);
        } else {
          fa::add_tile(o, o_of_tile);
        }
        if (is_raised) fa::rescale_o(o, softmax.rescale);
      };
#pragma unroll 1
      for (; j >= first_masked; --j) step(std::true_type());
#pragma unroll 1
      for (; j >= 0; --j) step(std::false_type());
      fa::release<fa::Q_EMPTY>(&smem.q_empty);

      // P V of the first key tile.
      fa::wait<fa::V_FULL>(&smem.v_full[ring.stage], ring.phase);
      fa::start_pv<SHAPE, false>(o_of_tile, p, operands.v(ring.stage));
      fa::wgmma_wait_group<0>(o_of_tile);
      fa::release<fa::V_EMPTY>(&smem.v_empty[ring.stage]);
      fa::add_tile(o, o_of_tile);
      ring.advance();
    }
    if constexpr (SHAPE::HAS_SPLIT) {
      if (deal.is_split(round) && !merge_parts<SHAPE>(deal, group, o, softmax, &smem.all_are_stored[group])) continue;
    }
    const fa::WorkTile done = fa::make_work_tile<SHAPE>(params, deal.number(recomputed(round)));
    const fa::Head done_head = fa::make_head(params, done.batch_head);
    const int done_query = done.first_query + group * GROUP_M + group_row;
    fa::normalise<SHAPE>(o, softmax, fa::make_scale<false>(params, done_head), params, done_head, done_query, lane);
    fa::store_o<SHAPE>(o, smem, o_map, params, done, done_head, group, thread_in_group, lane);
  }
  if (thread_in_group == 0) fa::cp_async_bulk_wait_group_read();  // before the block's shared memory is given to another one
}

template <typename Out, typename SHAPE>
__global__ void __launch_bounds__(SHAPE::THREADS, SHAPE::BLOCKS_PER_SM)
fp8_split_kernel(const __grid_constant__ fa::E4m3Params params, const __grid_constant__ CUtensorMap q_map,
                 const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                 const __grid_constant__ CUtensorMap o_map, const __grid_constant__ typename SHAPE::Deal deal) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<SplitSmem<Out, SHAPE>*>(smem_bytes);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / GROUP_THREADS, 0);
  fa::initialise(smem);
  __syncthreads();
  if (warpgroup == 0) {
    fa::setmaxnreg_dec<SHAPE::PRODUCER_REGISTERS>();
    if (threadIdx.x < WARP && fa::elect_sync()) fa::produce(deal, params, q_map, k_map, v_map, smem);
  } else {
    fa::setmaxnreg_inc<SHAPE::REGISTERS>();
    compute(params, o_map, deal, smem, warpgroup - 1);
  }
}

constexpr double MERGE_US = 6.0;  // to merge the parts of a work tile; calculated

// Two warpgroups at D = 128 have no registers for parts, nor have four.
template <typename SHAPE>
constexpr bool DIVIDES = SHAPE::HEAD_DIM == 64 && SHAPE::GROUPS < 4 || SHAPE::GROUPS == 1;

template <typename SHAPE>
fa::Division divide_last_round(const FaForwardArgs* args, const fa::E4m3Params& params) {
  if (!DIVIDES<SHAPE>) return {params.work_tiles, 1, 0};
  return fa::divide_last_round<SHAPE, fa::E4m3Costs<SHAPE>>(args, params, MERGE_US);
}

// The bytes of all parts in the workspace.  V^T stands before them, the marks behind them.
template <typename SHAPE>
int64_t result_bytes(const fa::Division& division) {
  return int64_t(division.tiles) * SHAPE::GROUPS * division.parts * PART_VECTORS<SHAPE> * int64_t(sizeof(float4));
}

template <typename SHAPE>
int64_t workspace_bytes(const FaForwardArgs* args) {
  fa::E4m3Params params;
  if (fa::make_e4m3_params<SHAPE>(args, &params) != FA_OK) return fa::v_t_bytes(args);
  const fa::Division division = divide_last_round<SHAPE>(args, params);
  const int64_t mark_bytes = int64_t(division.tiles) * SHAPE::GROUPS * division.parts * int64_t(sizeof(uint64_t));
  return fa::v_t_bytes(args) + result_bytes<SHAPE>(division) + mark_bytes;
}

template <typename Out, typename SHAPE>
int launch_kernel(const FaForwardArgs* args, cudaStream_t stream, int min_blocks, const typename SHAPE::Deal& deal) {
  constexpr auto TRANSPOSE = &fa::launch_transpose_v_tile<SHAPE::HEAD_DIM>;
  constexpr int SMEM_BYTES = sizeof(SplitSmem<Out, SHAPE>);
  return fa::launch_e4m3<Out, SHAPE, TRANSPOSE, SMEM_BYTES>(args, stream, &fp8_split_kernel<Out, SHAPE>, min_blocks, deal);
}

template <typename Out, typename SHAPE>
int launch_shape(const FaForwardArgs* args, cudaStream_t stream) {
  fa::E4m3Params params;
  if (int status = fa::make_e4m3_params<SHAPE>(args, &params)) return status;
  const fa::Division division = divide_last_round<SHAPE>(args, params);
  if constexpr (DIVIDES<SHAPE>) {
    if (division.parts > 1) {
      if (int refusal = fa::check_workspace(args, workspace_bytes<SHAPE>(args))) return refusal;
      char* const results = static_cast<char*>(args->workspace) + fa::v_t_bytes(args);
      uint64_t* const marks = reinterpret_cast<uint64_t*>(results + result_bytes<SHAPE>(division));
      const fa::SplitTiles split = {reinterpret_cast<float4*>(results), marks, division.first, division.parts};
      return launch_kernel<Out, fa::Divided<SHAPE>>(args, stream, fa::max_blocks<SHAPE>(), split);
    }
  }
  return launch_kernel<Out, fa::Whole<SHAPE>>(args, stream, 0, {});
}

// Returns the key tiles of a work tile that each of its warpgroups sees, added up.
template <typename SHAPE>
int group_tiles(const fa::E4m3Params& params, int number) {
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
  using Costs = fa::E4m3Costs<SHAPE>;
  fa::E4m3Params params;
  if (fa::make_e4m3_params<SHAPE>(args, &params) != FA_OK) return INFINITY;
  const auto us_of = [&](int number) {
    return group_tiles<SHAPE>(params, number) * Costs::KEY_TILE_US / SHAPE::GROUPS + Costs::WORK_TILE_US;
  };
  const fa::Division division = divide_last_round<SHAPE>(args, params);
  const double whole_us = fa::busiest_sm_us<SHAPE>(params, division.first, us_of);
  if (division.tiles == 0 || fa::has_many_rounds<SHAPE>(params)) return whole_us;
  const double part_us = (us_of(division.first) - Costs::WORK_TILE_US) / division.parts + Costs::WORK_TILE_US + MERGE_US;
  return whole_us + part_us * SHAPE::BLOCKS_PER_SM;
}

// The shapes among which a call chooses.
template <typename... SHAPES>
struct Shapes {
  static constexpr int COUNT = sizeof...(SHAPES);
  static int choose(const FaForwardArgs* args) {
    if (ONLY_SHAPE >= 0) return std::min(ONLY_SHAPE, COUNT - 1);
    return fa::fastest_shape(args, {&estimated_us<SHAPES>...});
  }
  template <typename Out>
  static int launch(const FaForwardArgs* args, cudaStream_t stream) {
    static constexpr int (*LAUNCHES[])(const FaForwardArgs*, cudaStream_t) = {&launch_shape<Out, SHAPES>...};
    return LAUNCHES[choose(args)](args, stream);
  }
  static int64_t workspace_bytes_of_call(const FaForwardArgs* args) {
    static constexpr int64_t (*WORKSPACES[])(const FaForwardArgs*) = {&workspace_bytes<SHAPES>...};
    return WORKSPACES[choose(args)](args);
  }
};

using ShapesOf64 = std::conditional_t<TAKES_FOUR, Shapes<Shape<64, 3, 96>, Shape<64, 2, 128>, Shape<64, 1, 128>, Shape<64, 4, 64>>,
                                      Shapes<Shape<64, 3, 96>, Shape<64, 2, 128>, Shape<64, 1, 128>>>;
using ShapesOf128 = Shapes<Shape<128, 2, 128>, Shape<128, 1, 96>>;
static_assert(ONLY_SHAPE < ShapesOf64::COUNT, "ONLY_SHAPE is the index of a shape at D = 64, or -1");

template <typename DTYPE, int HEAD_DIM>
int launch(const FaForwardArgs* args, cudaStream_t stream) {
  using ShapesOf = std::conditional_t<HEAD_DIM == 64, ShapesOf64, ShapesOf128>;
  if (args->out_dtype == FA_DTYPE_fp16) return ShapesOf::template launch<fp16>(args, stream);
  if (args->out_dtype == FA_DTYPE_bf16) return ShapesOf::template launch<bf16>(args, stream);
  return fa_refuse(args, "no instantiation for an output of dtype %d", args->out_dtype);
}

FA_EXPORT size_t fa_workspace_bytes(const FaForwardArgs* args) {
  const auto bytes = args->head_dim == 64 ? &ShapesOf64::workspace_bytes_of_call : &ShapesOf128::workspace_bytes_of_call;
  return static_cast<size_t>(bytes(args));
}

FA_FORWARD(launch)

// fp8_causal: warpgroups skip the key tiles that a causal mask hides from them.
// step:    under a causal mask, a warpgroup skips the key tiles that none of its own queries sees; the log-sum-exp is returned
// because: in fp8_shapes, the key tiles of a block are those that its last warpgroup sees: at b4h16s2048d64, 5 % of all products
//          are of tiles that are hidden from the whole warpgroup
// expect:  with a causal mask, 80 us at b4h16s2048d64 and 91 us at b4h16s2048d128, where fp8_max takes 85 and 108; 130 us at
//          b2h16s4096d64 and 149 us at b2h16s4096d128; without a mask the same time as fp8_shapes
// diff:    the loop over hidden tiles, and their part in the estimate of a shape's time
// tile:    as in fp8_shapes
// takes:   e4m3 with an output in fp16 or bf16, D = 64 and 128, any S_q >= 1 and S_kv >= 0, top-left and bottom-right causal
//          masks, grouped heads; rows contiguous and 16-byte aligned, with strides that TMA accepts
#include "fa/e4m3_costs.h"
#include "fa/e4m3_host.cuh"
#include "fa/e4m3_steps.cuh"
#include "fa/e4m3_transpose.cuh"
#include "fa/entry.h"
#include "fa/shape_choice.h"

// How the work is divided:
// - A block computes 64 queries per computing warpgroup, and all keys that they see, from the last key tile to the first.  Masked
//   tiles therefore come first, and the main loop has no mask.
// - One thread of the first warpgroup, the producer, loads Q, K and V by TMA.  K and V go through a ring of STAGES key tiles.
// - A block is persistent: the work tiles are dealt to the blocks, the longest first.
// - S of the next key tile is computed by the tensor cores during the softmax of the current one.
// - wgmma in e4m3 reads both operands along K only, which for P V are the keys.  transpose_v_tile therefore writes V^T to the
//   workspace first.
// - The row sum is computed by P V, with eight more columns of V that are one.
// - P V of each key tile is added to O in float32, because the accumulator of wgmma in e4m3 keeps only 13 bits after the leading
//   one.

using fa::GROUP_M, fa::GROUP_THREADS, fa::LANE_ROWS, fa::E4M3_MMA_K, fa::MMA_M, fa::MMA_N, fa::QUAD, fa::Ring, fa::Smem, fa::WARP;
using Softmax = fa::Softmax<fa::INTEGERS, 4>;

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

// A computing warpgroup: 64 queries of each work tile of this block.
template <typename Out, typename SHAPE>
__device__ __forceinline__ void compute(const fa::E4m3Params& params, const CUtensorMap& o_map, Smem<Out, SHAPE>& smem, int group) {
  constexpr int BLOCK_N = SHAPE::BLOCK_N, S_TILES = SHAPE::S_TILES;
  const int thread_in_group = threadIdx.x % GROUP_THREADS, lane = threadIdx.x % WARP;
  const int group_row = thread_in_group / WARP * MMA_M + lane / QUAD;  // the first of the lane's two rows
  const int own_turn = fa::FIRST_TURN_BARRIER + group, next_turn = fa::FIRST_TURN_BARRIER + (group + 1) % SHAPE::GROUPS;
  const fa::Operands<SHAPE> operands = {fa::k_major_descriptor<SHAPE::HEAD_DIM>(smem.q[group]),
                                        fa::k_major_descriptor<SHAPE::HEAD_DIM>(smem.k[0]),
                                        fa::k_major_descriptor<SHAPE::PANEL_KEYS>(smem.v[0])};
  Ring<SHAPE::STAGES> ring;
  uint32_t q_phase = 0;
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
    const fa::Head head = fa::make_head(params, work.batch_head);
    const fa::Scale scale = fa::make_scale<false>(params, head);
    const int query = work.first_query + group * GROUP_M + group_row;
    float o[SHAPE::PV_TILES][4] = {}, o_of_tile[SHAPE::PV_TILES][4];  // the second is the accumulator of wgmma
    Softmax softmax;
    if (work.key_tiles > 0) {
      uint32_t p[SHAPE::P_TILES][4];
      // The tiles from first_masked on contain keys that some query of the warpgroup does not see.
      const int first_diagonal = params.first_diagonal + work.first_query + group * GROUP_M;
      const int first_masked = scale.is_negated ? 0 : max(0, min(params.seq_k, first_diagonal)) / BLOCK_N;
      int j = work.key_tiles - 1;
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
        fa::mask(s, params, scale.is_negated, query, j * BLOCK_N, lane);
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
        fa::start_pv<SHAPE, false>(o_of_tile, p, operands.v(previous.stage));
        pass_turn();
        fa::wgmma_wait_group<1>(s);
        fa::release<fa::K_EMPTY>(&smem.k_empty[ring.stage]);
        if (decltype(is_masked)::value) fa::mask(s, params, scale.is_negated, query, j * BLOCK_N, lane);
        const bool is_raised = softmax.raise_m_if_needed(s, scale);
        fa::exponentials<false>(s, softmax, scale.log2);
        // ptxas would move the exponentials below the wait for P V, but not across the loop of this wait.
        const Ring<SHAPE::STAGES> next = ring.next();
        if (j > 0) fa::wait<fa::K_FULL>(&smem.k_full[next.stage], next.phase);
        fa::wgmma_wait_group<0>(o_of_tile);
        fa::release<fa::V_EMPTY>(&smem.v_empty[previous.stage]);
        fa::round_p<SHAPE>(p, s);
        fa::add_tile(o, o_of_tile);
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
    fa::normalise<SHAPE>(o, softmax, scale, params, head, query, lane);
    fa::store_o<SHAPE>(o, smem, o_map, params, work, head, group, thread_in_group, lane);
  }
  if (thread_in_group == 0) fa::cp_async_bulk_wait_group_read();  // before the block's shared memory is given to another one
}

template <typename Out, typename SHAPE>
__global__ void __launch_bounds__(SHAPE::THREADS, SHAPE::BLOCKS_PER_SM)
fp8_causal_kernel(const __grid_constant__ fa::E4m3Params params, const __grid_constant__ CUtensorMap q_map,
                  const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                  const __grid_constant__ CUtensorMap o_map) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<Smem<Out, SHAPE>*>(smem_bytes);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / GROUP_THREADS, 0);
  fa::initialise(smem);
  __syncthreads();
  if (warpgroup == 0) {
    fa::setmaxnreg_dec<SHAPE::PRODUCER_REGISTERS>();
    if (threadIdx.x < WARP && fa::elect_sync()) fa::produce(fa::Dealt(), params, q_map, k_map, v_map, smem);
  } else {
    fa::setmaxnreg_inc<SHAPE::REGISTERS>();
    compute(params, o_map, smem, warpgroup - 1);
  }
}

template <typename Out, typename SHAPE>
int launch_shape(const FaForwardArgs* args, cudaStream_t stream) {
  return fa::launch_e4m3<Out, SHAPE, &fa::launch_transpose_v_tile<SHAPE::HEAD_DIM>>(args, stream, &fp8_causal_kernel<Out, SHAPE>);
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
  template <typename Out>
  static int launch(const FaForwardArgs* args, cudaStream_t stream) {
    static_assert(ONLY_SHAPE < int(sizeof...(SHAPES)), "ONLY_SHAPE is the index of a shape, or -1");
    static constexpr int (*LAUNCHES[])(const FaForwardArgs*, cudaStream_t) = {&launch_shape<Out, SHAPES>...};
    return LAUNCHES[choose(args)](args, stream);
  }
};

using ShapesOf64 = Shapes<fa::Shape<64, 3, 96, true>, fa::Shape<64, 2, 128, true>, fa::Shape<64, 1, 128, true>>;
using ShapesOf128 = Shapes<fa::Shape<128, 2, 128, true>, fa::Shape<128, 1, 96, true>>;

template <typename DTYPE, int HEAD_DIM>
int launch(const FaForwardArgs* args, cudaStream_t stream) {
  using ShapesOf = std::conditional_t<HEAD_DIM == 64, ShapesOf64, ShapesOf128>;
  if (args->out_dtype == FA_DTYPE_fp16) return ShapesOf::template launch<fp16>(args, stream);
  if (args->out_dtype == FA_DTYPE_bf16) return ShapesOf::template launch<bf16>(args, stream);
  return fa_refuse(args, "no instantiation for an output of dtype %d", args->out_dtype);
}

FA_EXPORT size_t fa_workspace_bytes(const FaForwardArgs* args) { return static_cast<size_t>(fa::v_t_bytes(args)); }

FA_FORWARD(launch)

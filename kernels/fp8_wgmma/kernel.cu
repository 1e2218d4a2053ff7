// fp8_wgmma: both matrix products in e4m3 on Hopper's tensor cores.
// step:    both matrix products in e4m3; P is rounded to e4m3, V is transposed by a kernel before, and P V of each key tile
//          is added to O in float32 registers
// because: the tensor cores do twice as many products in e4m3 as in fp16, and a tile of K and V has half the bytes
// expect:  at b2h16s4096d128, 360 us without a mask, 10 us of them for V^T: per key tile, the products then take as long as those
//          in fp16 at D = 64, where long_ring takes 347 us; at D = 64, 255 us
// diff:    one operand type in place of two; descales, P's scale, the second accumulator and V^T are new
// tile:    128 queries x 128 keys with two computing warpgroups; 57 KB of shared memory per block at D = 64, 115 KB at D = 128
// takes:   e4m3 with an output in fp16 or bf16, D = 64 and 128, any S_q >= 1 and S_kv >= 0, top-left and bottom-right causal
//          masks, grouped heads; rows contiguous and 16-byte aligned, with strides that TMA accepts
#include "fa/e4m3_host.cuh"
#include "fa/e4m3_steps.cuh"
#include "fa/entry.h"

// How the work is divided:
// - A block computes 64 queries per computing warpgroup, and all keys that they see, from the last key tile to the first.  Masked
//   tiles therefore come first, and the main loop has no mask.
// - One thread of the first warpgroup, the producer, loads Q, K and V by TMA.  K and V go through a ring of STAGES key tiles.
// - A block is persistent: the work tiles are dealt to the blocks, the longest first.
// - S, softmax and P V of a key tile follow one another; warpgroups do not wait for each other.
// - wgmma in e4m3 reads both operands along K only, which for P V are the keys.  transpose_v therefore writes V^T to the
//   workspace first.

using fa::GROUP_M, fa::GROUP_THREADS, fa::LANE_ROWS, fa::E4M3_MMA_K, fa::MMA_M, fa::MMA_N, fa::QUAD, fa::Ring, fa::Smem, fa::WARP;

// What a deliberately wrong kernel does.
enum Mistake {
  NO_MISTAKE,
  KEYS_IN_ORDER,    // V^T has the keys in their order, and not in that of P
  P_NOT_SCALED,     // P is 1 at the row max, as in fp16
  P_PAST_448,       // P is 512 at the row max
  NEXT_V_DESCALE,   // the descale of V is that of the next head
};

constexpr int P_SCALE_LOG2 = MISTAKE == P_NOT_SCALED ? 0 : MISTAKE == P_PAST_448 ? 9 : 4;
using Softmax = fa::Softmax<fa::FLOATS, P_SCALE_LOG2>;

// The accumulator of wgmma in e4m3 keeps 13 bits after the leading one.  What is cut off a product depends on the accumulator, so
// that a long sum of numbers of one sign becomes too small: by up to 1.4 % over 600 keys, and by 9 % over 4096.  P V of each key
// tile is therefore added to O in float32 registers.

// A computing warpgroup: 64 queries of each work tile of this block.
template <typename Out, typename SHAPE>
__device__ __forceinline__ void compute(const fa::E4m3Params& params, const CUtensorMap& o_map, Smem<Out, SHAPE>& smem, int group) {
  constexpr int BLOCK_N = SHAPE::BLOCK_N, S_TILES = SHAPE::S_TILES;
  const int thread_in_group = threadIdx.x % GROUP_THREADS, lane = threadIdx.x % WARP;
  const int group_row = thread_in_group / WARP * MMA_M + lane / QUAD;  // the first of the lane's two rows
  const fa::Operands<SHAPE> operands = {fa::k_major_descriptor<SHAPE::HEAD_DIM>(smem.q[group]),
                                        fa::k_major_descriptor<SHAPE::HEAD_DIM>(smem.k[0]),
                                        fa::k_major_descriptor<SHAPE::PANEL_KEYS>(smem.v[0])};
  Ring<SHAPE::STAGES> ring;
  uint32_t q_phase = 0;

#pragma unroll 1
  for (int round = 0, number; (number = fa::dealt_number(round, blockIdx.x, gridDim.x)) < params.work_tiles; ++round) {
    const fa::WorkTile work = fa::make_work_tile<SHAPE>(params, number);
    const fa::Head head = fa::make_head(params, work.batch_head);
    const fa::Scale scale = fa::make_scale<MISTAKE == NEXT_V_DESCALE>(params, head);
    const int query = work.first_query + group * GROUP_M + group_row;
    float o[SHAPE::PV_TILES][4], o_of_tile[SHAPE::PV_TILES][4];  // the second is the accumulator of wgmma
#pragma unroll
    for (int d = 0; d < SHAPE::PV_TILES; ++d) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o[d][i] = 0.0f;
    }
    Softmax softmax;
    if (work.key_tiles > 0) {
      uint32_t p[SHAPE::P_TILES][4];
      bool is_raised = false;
      // The tiles from first_masked on contain keys that some query of the warpgroup does not see.
      const int first_diagonal = params.first_diagonal + work.first_query + group * GROUP_M;
      const int first_masked = scale.is_negated ? 0 : max(0, min(params.seq_k, first_diagonal)) / BLOCK_N;
      int j = work.key_tiles - 1;
      fa::wait<fa::Q_FULL>(&smem.q_full, q_phase);
      q_phase ^= 1;
      fa::release<fa::Q_EMPTY>(&smem.q_empty, true, lane);
      auto step = [&](auto is_masked, auto is_first) {
        float s[S_TILES][4];
        fa::wait<fa::K_FULL>(&smem.k_full[ring.stage], ring.phase);
        fa::release<fa::K_EMPTY>(&smem.k_empty[ring.stage], true, lane);
        fa::start_s<SHAPE>(s, operands.q, operands.k(ring.stage));
        fa::wgmma_wait_group<0>(s);
        fa::release<fa::K_EMPTY>(&smem.k_empty[ring.stage], false, lane);
        if (decltype(is_masked)::value) fa::mask(s, params, scale.is_negated, query, j * BLOCK_N, lane);
        if (decltype(is_first)::value) {
          softmax.raise_m(s, scale);
        } else {
          is_raised = softmax.raise_m_if_needed(s, scale);
          if (is_raised) fa::rescale_o(o, softmax.rescale);
        }
        fa::exponentials<true>(s, softmax, scale.log2);
        fa::wait<fa::V_FULL>(&smem.v_full[ring.stage], ring.phase);
        fa::release<fa::V_EMPTY>(&smem.v_empty[ring.stage], true, lane);
        fa::round_p<SHAPE>(p, s);
        fa::start_pv<SHAPE, false>(o_of_tile, p, operands.v(ring.stage));
        fa::wgmma_wait_group<0>(o_of_tile);
        fa::release<fa::V_EMPTY>(&smem.v_empty[ring.stage], false, lane);
        fa::add_tile(o, o_of_tile);
        ring.advance();
        --j;
      };
      step(std::true_type(), std::true_type());
#pragma unroll 1
      while (j >= first_masked) step(std::true_type(), std::false_type());
#pragma unroll 1
      while (j >= 0) step(std::false_type(), std::false_type());
      fa::release<fa::Q_EMPTY>(&smem.q_empty, false, lane);
    }
    fa::normalise<SHAPE>(o, softmax, scale, params, head, query, lane);
    fa::store_o<SHAPE>(o, smem, o_map, params, work, head, group, thread_in_group, lane);
  }
  if (thread_in_group == 0) fa::cp_async_bulk_wait_group_read();  // before the block's shared memory is given to another one
}

template <typename Out, typename SHAPE>
__global__ void __launch_bounds__(SHAPE::THREADS, 1)
fp8_wgmma_kernel(const __grid_constant__ fa::E4m3Params params, const __grid_constant__ CUtensorMap q_map,
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

template <int HEAD_DIM>
using ShapeOf = fa::Shape<HEAD_DIM, 2, 128, false>;

template <typename DTYPE, int HEAD_DIM>
int launch(const FaForwardArgs* args, cudaStream_t stream) {
  using SHAPE = ShapeOf<HEAD_DIM>;
  constexpr auto TRANSPOSE = &fa::launch_transpose_v<HEAD_DIM, MISTAKE == KEYS_IN_ORDER>;
  if (args->out_dtype == FA_DTYPE_fp16) return fa::launch_e4m3<fp16, SHAPE, TRANSPOSE>(args, stream, &fp8_wgmma_kernel<fp16, SHAPE>);
  if (args->out_dtype == FA_DTYPE_bf16) return fa::launch_e4m3<bf16, SHAPE, TRANSPOSE>(args, stream, &fp8_wgmma_kernel<bf16, SHAPE>);
  return fa_refuse(args, "no instantiation for an output of dtype %d", args->out_dtype);
}

FA_EXPORT size_t fa_workspace_bytes(const FaForwardArgs* args) { return static_cast<size_t>(fa::v_t_bytes(args)); }

FA_FORWARD(launch)

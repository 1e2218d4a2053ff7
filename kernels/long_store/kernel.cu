// long_store: TMA stores O.
// step:    O is written to shared memory by stmatrix and stored by TMA, during the next work tile
// because: in long_persistent, the lanes exchange registers and compute an address for each 16 bytes that they store
// expect:  about 0.5 us less per work tile: at b2h16s4096d64, 380 us without a mask; at D = 128, 540 us
// diff:    store_o instead of store_rows
// tile:    128 queries x 128 keys with two computing warpgroups; 65 KB of shared memory per block at D = 64, 129 KB at D = 128
// takes:   fp16 and bf16, D = 64 and 128, any S_q >= 1 and S_kv >= 0, top-left and bottom-right causal masks, grouped heads; rows
//          contiguous and 16-byte aligned, with strides that TMA accepts
#include "fa/entry.h"
#include "fa/hopper.cuh"
#include "fa/omit.cuh"
#include "fa/online_softmax.cuh"
#include "fa/products.cuh"
#include "fa/ring.cuh"
#include "fa/schedule.cuh"
#include "fa/shape.cuh"
#include "fa/tile_params.cuh"
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

constexpr int FIRST_GROUP_BARRIER = 8;  // named barriers, one per computing warpgroup

template <typename T, typename SHAPE>
struct Smem {
  // [HEAD_DIM / BOX_COLUMNS, rows, BOX_COLUMNS], swizzled by TMA
  alignas(1024) T q[SHAPE::GROUPS][GROUP_M * SHAPE::HEAD_DIM];
  alignas(1024) T o[SHAPE::GROUPS][GROUP_M * SHAPE::HEAD_DIM];
  alignas(1024) T k[SHAPE::BLOCK_N * SHAPE::HEAD_DIM];
  alignas(1024) T v[SHAPE::BLOCK_N * SHAPE::HEAD_DIM];
  uint64_t q_full, q_empty, k_full, k_empty, v_full, v_empty;
};

// The producer: loads Q, K and V of all work tiles of this block.
template <typename T, typename SHAPE>
__device__ __forceinline__ void produce(const fa::TileParams& params, const CUtensorMap& q_map, const CUtensorMap& k_map,
                                        const CUtensorMap& v_map, Smem<T, SHAPE>& smem) {
  constexpr int HEAD_DIM = SHAPE::HEAD_DIM, BLOCK_N = SHAPE::BLOCK_N;
  uint32_t q_phase = 0, phase = 0;
#pragma unroll 1
  for (int round = 0, number; (number = fa::dealt_number(round, blockIdx.x, gridDim.x)) < params.work_tiles; ++round) {
    const fa::WorkTile work = fa::make_work_tile<SHAPE>(params, number);
    if (work.key_tiles == 0) continue;
    const fa::Head head = fa::make_head(params, work.batch_head);
    fa::wait(&smem.q_empty, q_phase ^ 1);
    q_phase ^= 1;
    fa::mbarrier_arrive_expect_tx(&smem.q_full, SHAPE::Q_BYTES);
#pragma unroll
    for (int g = 0; g < SHAPE::GROUPS; ++g) {
      const int first_query = work.first_query + g * GROUP_M;
      fa::load_rows<HEAD_DIM, GROUP_M>(smem.q[g], q_map, first_query, head.query_head, head.batch, &smem.q_full);
    }
#pragma unroll 1
    for (int j = work.key_tiles - 1; j >= 0; --j) {
      fa::wait(&smem.k_empty, phase ^ 1);
      fa::mbarrier_arrive_expect_tx(&smem.k_full, SHAPE::TILE_BYTES);
      fa::load_rows<HEAD_DIM, BLOCK_N>(smem.k, k_map, j * BLOCK_N, head.kv_head, head.batch, &smem.k_full);
      fa::wait(&smem.v_empty, phase ^ 1);
      fa::mbarrier_arrive_expect_tx(&smem.v_full, SHAPE::TILE_BYTES);
      fa::load_rows<HEAD_DIM, BLOCK_N>(smem.v, v_map, j * BLOCK_N, head.kv_head, head.batch, &smem.v_full);
      phase ^= 1;
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
  const uint64_t k = fa::wgmma_descriptor(smem.k), v = fa::wgmma_descriptor(smem.v, BLOCK_N * BOX_COLUMNS * 2);
  uint32_t q_phase = 0, phase = 0;

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
        fa::wait<K_FULL>(&smem.k_full, phase);
        fa::start_qk<T, HEAD_DIM>(s, q, k);
        fa::wgmma_wait_group<0>(s);
        fa::release<K_EMPTY>(&smem.k_empty);
        if (decltype(is_masked)::value) fa::mask(s, params, query, j * BLOCK_N, lane);
        if (decltype(is_first)::value) {
          softmax.raise_m(s, params.scale_log2, params.inverse_scale_log2);
        } else if (softmax.raise_m_if_needed(s, params.scale_log2, params.inverse_scale_log2)) {
          softmax.rescale_rows(o);
        }
        softmax.exponentials(s, params.scale_log2);
        fa::wait<V_FULL>(&smem.v_full, phase);  // ptxas moves no exponential across this loop
        uint32_t p[SHAPE::P_TILES][4];
        fa::round_p<T>(p, s);
        fa::start_pv<T, BLOCK_N>(o, p, v);
        fa::wgmma_wait_group<0>(o);
        fa::release<V_EMPTY>(&smem.v_empty);
        phase ^= 1;
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
long_store_kernel(const __grid_constant__ fa::TileParams params, const __grid_constant__ CUtensorMap q_map,
                 const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                 const __grid_constant__ CUtensorMap o_map) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<Smem<T, SHAPE>*>(smem_bytes);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / GROUP_THREADS, 0);
  if (threadIdx.x == 0) {
    fa::mbarrier_init(&smem.q_full, 1);
    fa::mbarrier_init(&smem.q_empty, SHAPE::COMPUTING_WARPS);
    fa::mbarrier_init(&smem.k_full, 1);
    fa::mbarrier_init(&smem.v_full, 1);
    fa::mbarrier_init(&smem.k_empty, SHAPE::COMPUTING_WARPS);
    fa::mbarrier_init(&smem.v_empty, SHAPE::COMPUTING_WARPS);
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
  fa::TileParams params;
  fa::TensorMaps maps;
  if (int status = fa::make_tile_params<SHAPE>(args, &params)) return status;
  if (int status = fa::make_tensor_maps<SHAPE>(args, &maps)) return status;
  const auto kernel = &long_store_kernel<T, SHAPE>;
  constexpr int smem_bytes = sizeof(Smem<T, SHAPE>);
  static fa::OncePerDevice prepare;
  const auto prepare_once = [&] { return fa::prepare_kernel<SHAPE, smem_bytes>(args, reinterpret_cast<const void*>(kernel)); };
  if (int status = prepare(prepare_once)) return status;
  const int blocks = std::min(params.work_tiles, fa::max_blocks<SHAPE>());
  kernel<<<blocks, SHAPE::THREADS, smem_bytes, stream>>>(params, maps.q, maps.k, maps.v, maps.o);
  return static_cast<int>(cudaPeekAtLastError());
}

FA_FORWARD(launch)

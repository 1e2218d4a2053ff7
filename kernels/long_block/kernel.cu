// long_block: a block computes 128 queries with all keys.
// step:    each warpgroup of a block computes 64 queries with all keys that they see, without a cluster; TMA loads Q, too
// because: in cluster_tma, warpgroups and blocks share 64 queries and take different keys, so that each key tile is read for 64
//          queries only and partial results are merged; with many work tiles, all SMs have work without that
// expect:  at b2h16s4096d64, 540 us without a mask; at D = 128, 750 us: half the reads of K and V, but all warps wait for each tile
// diff:    most of the file: the merges and the cluster are gone; the two products and the running softmax stand in headers
// tile:    128 queries x 128 keys with two warpgroups; 49 KB of shared memory per block at D = 64, 97 KB at D = 128
// takes:   fp16 and bf16, D = 64 and 128, any S_q >= 1 and S_kv >= 0, top-left and bottom-right causal masks, grouped heads; rows
//          contiguous and 16-byte aligned, with strides that TMA accepts
#include "fa/entry.h"
#include "fa/hopper.cuh"
#include "fa/omit.cuh"
#include "fa/online_softmax.cuh"
#include "fa/output_rows.cuh"
#include "fa/products.cuh"
#include "fa/ring.cuh"
#include "fa/schedule.cuh"
#include "fa/tile_params.cuh"
#include "fa/tile_store.cuh"

using fa::BOX_COLUMNS, fa::GROUP_M, fa::GROUP_THREADS, fa::MMA_M, fa::QUAD, fa::WARP;

// The barriers of this kernel and what each guarantees.
enum Barrier {
  NONE,
  Q_FULL,    // TMA has written Q
  K_FULL,    // TMA has written a tile of K
  V_FULL     // TMA has written a tile of V
};

template <typename T, typename SHAPE>
struct Smem {
  // [HEAD_DIM / BOX_COLUMNS, rows, BOX_COLUMNS], swizzled by TMA
  alignas(1024) T q[SHAPE::GROUPS][GROUP_M * SHAPE::HEAD_DIM];
  alignas(1024) T k[SHAPE::BLOCK_N * SHAPE::HEAD_DIM];
  alignas(1024) T v[SHAPE::BLOCK_N * SHAPE::HEAD_DIM];
  uint64_t q_full, k_full, v_full;
};

// Loads a tile of K and of V.  Called by one thread.
template <typename T, typename SHAPE>
__device__ __forceinline__ void load_kv(
    Smem<T, SHAPE>& smem, const CUtensorMap& k_map, const CUtensorMap& v_map, const fa::Head& head, int j) {
  fa::mbarrier_arrive_expect_tx(&smem.k_full, SHAPE::TILE_BYTES);
  fa::load_rows<SHAPE::HEAD_DIM, SHAPE::BLOCK_N>(smem.k, k_map, j * SHAPE::BLOCK_N, head.kv_head, head.batch, &smem.k_full);
  fa::mbarrier_arrive_expect_tx(&smem.v_full, SHAPE::TILE_BYTES);
  fa::load_rows<SHAPE::HEAD_DIM, SHAPE::BLOCK_N>(smem.v, v_map, j * SHAPE::BLOCK_N, head.kv_head, head.batch, &smem.v_full);
}

template <typename T, typename SHAPE>
__global__ void __launch_bounds__(SHAPE::COMPUTING_THREADS, 1)
long_block_kernel(const __grid_constant__ fa::TileParams params, const __grid_constant__ CUtensorMap q_map,
                  const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                  const __grid_constant__ fa::OutputRows out) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<Smem<T, SHAPE>*>(smem_bytes);
  constexpr int HEAD_DIM = SHAPE::HEAD_DIM, BLOCK_N = SHAPE::BLOCK_N;
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / GROUP_THREADS, 0);  // one value per warp, as the descriptors need
  const int thread_in_group = threadIdx.x % GROUP_THREADS, lane = threadIdx.x % WARP;
  const int lane_row = thread_in_group / WARP * MMA_M + lane / QUAD;  // this lane holds rows lane_row and lane_row + 8
  const fa::WorkTile work = fa::make_work_tile<SHAPE>(params, blockIdx.x);
  const fa::Head head = fa::make_head(params, work.batch_head);

  // One thread loads Q, and the last tile of K and V.
  if (threadIdx.x == 0) {
    fa::mbarrier_init(&smem.q_full, 1);
    fa::mbarrier_init(&smem.k_full, 1);
    fa::mbarrier_init(&smem.v_full, 1);
    fa::fence_mbarrier_init();
    if (work.key_tiles > 0) {
      fa::mbarrier_arrive_expect_tx(&smem.q_full, SHAPE::Q_BYTES);
#pragma unroll
      for (int g = 0; g < SHAPE::GROUPS; ++g) {
        fa::load_rows<HEAD_DIM, GROUP_M>(smem.q[g], q_map, work.first_query + g * GROUP_M, head.query_head, head.batch, &smem.q_full);
      }
      load_kv(smem, k_map, v_map, head, work.key_tiles - 1);
    }
  }
  __syncthreads();  // the mbarriers are initialised

  const uint64_t q = fa::wgmma_descriptor(smem.q[group]);
  const uint64_t k = fa::wgmma_descriptor(smem.k), v = fa::wgmma_descriptor(smem.v, BLOCK_N * BOX_COLUMNS * 2);
  uint32_t phase = 0;
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
      __syncthreads();  // all warps have read K and V
      if (threadIdx.x == 0 && j > 0) load_kv(smem, k_map, v_map, head, j - 1);
      __syncwarp();
      phase ^= 1;
      --j;
    };
    fa::wait<Q_FULL>(&smem.q_full, 0);
    step(std::true_type(), std::true_type());
#pragma unroll 1
    while (j >= first_masked) step(std::true_type(), std::false_type());
#pragma unroll 1
    while (j >= 0) step(std::false_type(), std::false_type());
  }

  fa::normalise(o, softmax, params, head, query, lane);
  fa::store_rows<T>(o, out, head, query, params.seq_q, lane);
}

template <typename T, int HEAD_DIM>
int launch(const FaForwardArgs* args, cudaStream_t stream) {
  using SHAPE = fa::Shape<HEAD_DIM, 2, 128>;
  fa::TileParams params;
  fa::TensorMaps maps;
  if (int status = fa::make_tile_params<SHAPE>(args, &params)) return status;
  if (int status = fa::make_tensor_maps<SHAPE>(args, &maps)) return status;
  const auto kernel = &long_block_kernel<T, SHAPE>;
  constexpr int smem_bytes = sizeof(Smem<T, SHAPE>);
  static fa::OncePerDevice allow_smem;
  const auto allow = [&] { return fa_allow_dynamic_smem(args, reinterpret_cast<const void*>(kernel), smem_bytes); };
  if (int status = allow_smem(allow)) return status;
  kernel<<<params.work_tiles, SHAPE::COMPUTING_THREADS, smem_bytes, stream>>>(params, maps.q, maps.k, maps.v, fa::output_rows_of(args));
  return static_cast<int>(cudaPeekAtLastError());
}

FA_FORWARD(launch)

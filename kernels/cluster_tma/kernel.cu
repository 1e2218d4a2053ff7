// cluster_tma: one thread requests all of K and V; TMA writes them in the layout that wgmma reads.
// step:    TMA instead of cp.async for K and V
// because: in cluster_wgmma, every thread issues 16 copies of K and V and computes the addresses of each
// expect:  0.4 to 0.8 us less than cluster_split at the target shape (1x8x512x64)
// diff:    the host encodes tensor maps; the barriers of K and V are mbarriers, which count bytes
// tile:    64 queries x GROUP_KEYS keys per warpgroup and block; 84 KB of shared memory per block
// takes:   fp16 and bf16, D = 64, any S_q >= 1 and S_kv >= 0, top-left and bottom-right causal masks, grouped heads; rows
//          contiguous and 16-byte aligned, with strides that TMA accepts
#include <math_constants.h>

#include "fa/copy.cuh"
#include "fa/entry.h"
#include "fa/group_merge.cuh"
#include "fa/hopper.cuh"
#include "fa/launch.h"
#include "fa/omit.cuh"
#include "fa/params.cuh"
#include "fa/ptx.cuh"
#include "fa/row_exchange.cuh"
#include "fa/softmax.cuh"
#include "fa/tensor_map.h"
#include "fa/tile.cuh"

using fa::MMA_K, fa::MMA_M, fa::MMA_N, fa::QUAD, fa::WARP;

// How the work is divided:
// - A block computes 64 queries of one head, because a wgmma always computes 64 rows.
// - The warpgroups of a block share these queries and take different keys, so that one warpgroup computes while the other is
//   stalled.
// - The blocks of a cluster also share the queries and take different keys, because an SM loads only 64 bytes per cycle.  At
//   the target shape, 8 heads x 8 query tiles x 2 blocks occupy 128 of 132 SMs.
// - A pass is one iteration of the main loop: the cluster loads PASS_KEYS keys at once, and each warpgroup computes S, P and O
//   for its GROUP_KEYS of them.
// - After the last pass, the partial results (O, m and l) are merged: first those of the warpgroups, then those of the blocks.

// The barriers of this kernel and what each guarantees.
enum Barrier {
  NONE,
  Q_FULL,                 // Q has been copied to shared memory, and the mbarriers are initialised
  K_FULL,                 // TMA has written K of the warpgroup
  V_FULL,                 // TMA has written V of the warpgroup
  K_EMPTY,                // all threads of the warpgroup are done with the last K, and its partial O may overwrite it
  GROUP_PARTIALS_STORED,  // all warpgroups have stored their partial O, m and l
  PEER_PARTIAL_FULL,      // the partial O, m and l of the other block have arrived
};

constexpr int HEAD_DIM = 64;
constexpr int CLUSTER = 2;   // blocks
constexpr int BLOCK_M = 64;  // the rows of a wgmma
constexpr int N_TILES = GROUP_KEYS / MMA_N;
constexpr int D_TILES = HEAD_DIM / MMA_N;
constexpr int PASS_KEYS = CLUSTER * KEY_GROUPS * GROUP_KEYS;  // keys that a cluster loads in one pass
constexpr int LANE_ROWS = 2;                                  // rows that a lane holds: r and r + 8
constexpr int ROW_PAIRS = D_TILES / KEY_GROUPS;  // 8-column tiles of O that a warpgroup merges: pairs of a lane in each of its rows
constexpr int GROUP_THREADS = 128;
constexpr int THREADS = KEY_GROUPS * GROUP_THREADS;
constexpr int TILE_BYTES = GROUP_KEYS * HEAD_DIM * 2;  // K or V of a warpgroup

static_assert(GROUP_KEYS == 64 || GROUP_KEYS == 128, "the keys of a warpgroup are N of a wgmma");
static_assert(D_TILES % KEY_GROUPS == 0, "every warpgroup must merge the same number of columns of O");
static_assert(ROW_PAIRS % QUAD == 0, "a lane must store 16 bytes at a time");
static_assert(KEY_GROUPS <= 15, "every warpgroup needs a named barrier of its own");

template <typename T>
struct Smem {
  alignas(1024) T q[BLOCK_M * HEAD_DIM];
  struct alignas(1024) Group {
    T v[GROUP_KEYS * HEAD_DIM];
    union {
      T k[GROUP_KEYS * HEAD_DIM];
      fa::PartialO<KEY_GROUPS, D_TILES, GROUP_THREADS> partial_o;
    };
  } group[KEY_GROUPS];
  float m[KEY_GROUPS][BLOCK_M];                      // O and l are sums of exp2(S - m)
  float l[KEY_GROUPS][BLOCK_M];                      // row sum
  fa::PeerPartial<ROW_PAIRS, THREADS> peer_partial;  // of the other block, which alone writes here
  uint64_t k_full[KEY_GROUPS];                       // mbarriers of K_FULL
  uint64_t v_full[KEY_GROUPS];                       // mbarriers of V_FULL
  uint64_t peer_partial_full;                        // mbarrier of PEER_PARTIAL_FULL
};

// Loads K and V of one pass from `first_key` on.  Called by one thread.
template <typename T>
__device__ __forceinline__ void load_kv(
    Smem<T>& smem, const CUtensorMap& k_map, const CUtensorMap& v_map, int first_key, int kv_head) {
#pragma unroll
  for (int g = 0; g < KEY_GROUPS; ++g) {
    fa::mbarrier_arrive_expect_tx(&smem.k_full[g], TILE_BYTES);
    fa::cp_async_bulk_tensor_4d(smem.group[g].k, k_map, 0, first_key + g * GROUP_KEYS, kv_head, blockIdx.z, &smem.k_full[g]);
  }
#pragma unroll
  for (int g = 0; g < KEY_GROUPS; ++g) {
    fa::mbarrier_arrive_expect_tx(&smem.v_full[g], TILE_BYTES);
    fa::cp_async_bulk_tensor_4d(smem.group[g].v, v_map, 0, first_key + g * GROUP_KEYS, kv_head, blockIdx.z, &smem.v_full[g]);
  }
}

template <typename T>
__global__ void __cluster_dims__(CLUSTER) __launch_bounds__(THREADS) cluster_tma_kernel(
    const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map, const fa::Params params) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  Smem<T>& smem = *reinterpret_cast<Smem<T>*>(smem_bytes);
  const int group = threadIdx.x / GROUP_THREADS, thread_in_group = threadIdx.x % GROUP_THREADS, lane = threadIdx.x % WARP;
  const uint32_t head = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER;
  const fa::WorkTile<uint4> work = fa::make_work_tile<BLOCK_M, PASS_KEYS>(params, head);
  const int lane_row = thread_in_group / WARP * MMA_M + lane / QUAD;  // this lane holds rows lane_row and lane_row + 8
  const float scale_log2 = fa::scale_log2_of(params);
  const int block_first_key = rank * KEY_GROUPS * GROUP_KEYS, kv_head = fa::kv_head_of(params, head);

  // Load Q, then the keys of the first pass.
  fa::copy_rows_async<BLOCK_M, HEAD_DIM, THREADS>(smem.q, work.q_gmem, params.q_strides.row, work.first_query, params.seq_q, threadIdx.x);
  fa::cp_async_commit_group();
  if (threadIdx.x == 0) {
    fa::prefetch_tensormap(k_map);
    fa::prefetch_tensormap(v_map);
    for (int g = 0; g < KEY_GROUPS; ++g) {
      fa::mbarrier_init(&smem.k_full[g], 1);
      fa::mbarrier_init(&smem.v_full[g], 1);
    }
    fa::mbarrier_init(&smem.peer_partial_full, 1);
    fa::fence_mbarrier_init();
    if (work.key_tiles > 0) load_kv(smem, k_map, v_map, block_first_key, kv_head);
    fa::mbarrier_arrive_expect_tx(&smem.peer_partial_full, sizeof(smem.peer_partial));
  }
  __syncwarp();
  fa::barrier_cluster_arrive_relaxed();  // this block runs and its mbarrier is initialised, so that the other one may send to it
  fa::cp_async_wait_group<0>();
  fa::fence_proxy_async();
  fa::sync_block<Q_FULL>();

  float o[D_TILES][4] = {};
  float m[LANE_ROWS] = {-CUDART_INF_F, -CUDART_INF_F};  // unscaled row max at the last rescale
  float l[LANE_ROWS] = {};                              // this lane's part of the running row sum

  for (int pass = 0; pass < work.key_tiles; ++pass) {
    const int first_key = block_first_key + pass * PASS_KEYS + group * GROUP_KEYS;

    // Load K and V; the loads of the first pass are in flight.
    if (pass > 0) {
      __syncthreads();  // all threads of this block are done with the previous K and V
      if (threadIdx.x == 0) load_kv(smem, k_map, v_map, block_first_key + pass * PASS_KEYS, kv_head);
      __syncwarp();
    }
    fa::wait<K_FULL>(&smem.k_full[group], pass % 2);

    // S = Q K^T
    float s[N_TILES][4];
    const uint64_t q = fa::wgmma_descriptor(smem.q), k = fa::wgmma_descriptor(smem.group[group].k);
    fa::wgmma_fence();
#pragma unroll
    for (int d = 0; d < HEAD_DIM * sizeof(T) >> 4; d += MMA_K * sizeof(T) >> 4) fa::wgmma_m64k16<T, 0>(s, q + d, k + d, d > 0);
    fa::wgmma_commit_group();
    fa::wgmma_wait_group<0>();
    if (fa::negate_q(params)) fa::negate(s);  // below, S is multiplied by the absolute value of the scale

    // mask; tiles that every query of the block sees completely are skipped
    if (first_key + GROUP_KEYS > min(params.seq_k, work.diagonal)) {
      fa::mask(s, params.seq_k, work.diagonal + lane_row, first_key, lane);
    }

    // row max
    float m_new[LANE_ROWS];
    const bool needs_rescale = fa::max_of_rows(m_new, s, m, scale_log2);

    // rescale, if any row of the warp needs it
    if (__any_sync(0xffffffffu, needs_rescale)) fa::rescale(o, m, l, m_new, scale_log2);

    const float m_log2[LANE_ROWS] = {fa::finite_log2(m[0], scale_log2), fa::finite_log2(m[1], scale_log2)};
    fa::wait<V_FULL>(&smem.v_full[group], pass % 2);
    uint32_t p[N_TILES / 2][4];
#pragma unroll
    for (int n = 0; n < N_TILES; n += 2) {
      // P = exp2(S - m), row sum; two adjacent accumulator fragments of S form one A fragment of P
      fa::exp2_fragment<T>(p[n / 2], s, n, scale_log2, m_log2, l);

      // O += P V, overlapping with the computation of the next P
      fa::wgmma_fence();
      fa::wgmma_m64k16<T, 1>(o, p[n / 2], fa::wgmma_descriptor(smem.group[group].v + n * MMA_N * HEAD_DIM), true);
      fa::wgmma_commit_group();
    }
    fa::wgmma_wait_group<0>();
  }

  // Merge the warpgroups.
  fa::sync_threads<K_EMPTY, GROUP_THREADS>(1 + group);
  float4 own_o[ROW_PAIRS];
  fa::store_partial(smem, own_o, o, m, l, group, thread_in_group, lane_row);
  fa::sync_block<GROUP_PARTIALS_STORED>();
  const auto merged = fa::merge_groups<KEY_GROUPS>(smem, own_o, group, thread_in_group, lane_row, scale_log2);

  // Merge the blocks.  Each block finishes one of the two rows of every lane, the one whose number is its rank, and sends the other
  // row to the other block.  So both blocks send at the same time, and each writes half of the output.
  fa::barrier_cluster_wait();  // both blocks run and have initialised their mbarriers
  auto row = fa::exchange_rows(smem, merged, rank);
  fa::wait<PEER_PARTIAL_FULL>(&smem.peer_partial_full, 0);
  fa::merge_peer(row, smem.peer_partial);
  fa::store_row<T>(row, params, head, params.heads, work.first_query + lane_row + rank * 8, group, lane);
}

template <typename T, int>
int launch(const FaForwardArgs* args, cudaStream_t stream) {
  fa::Params params;
  if (int status = fa::make_params(args, BLOCK_M, CLUSTER, &params)) return status;
  CUtensorMap k_map = {}, v_map = {};
  if (args->seq_k > 0) {
    constexpr fa::Box BOX = {GROUP_KEYS, HEAD_DIM};
    if (int status = fa::make_tensor_map(&k_map, args, args->k, args->kv_heads, args->seq_k, args->k_stride, BOX)) return status;
    if (int status = fa::make_tensor_map(&v_map, args, args->v, args->kv_heads, args->seq_k, args->v_stride, BOX)) return status;
  }
  constexpr auto kernel = &cluster_tma_kernel<T>;
  constexpr int smem_bytes = sizeof(Smem<T>);
  if (int status = fa::allow_smem<kernel>(args, smem_bytes)) return status;
  const dim3 grid(params.heads * CLUSTER, (params.seq_q + BLOCK_M - 1) / BLOCK_M, static_cast<unsigned>(args->batch));
  kernel<<<grid, THREADS, smem_bytes, stream>>>(k_map, v_map, params);
  return static_cast<int>(cudaPeekAtLastError());
}

FA_FORWARD(launch)

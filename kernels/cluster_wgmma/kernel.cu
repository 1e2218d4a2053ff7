// cluster_wgmma: a warpgroup replaces four warps; the tensor cores read Q, K and V from shared memory themselves.
// step:    wgmma instead of mma.sync and ldmatrix; each group of warps is a warpgroup, and P V runs while the next P is computed
// because: in cluster_split, S = Q K^T, the exponentials and P V run one after another
// expect:  4.2 to 4.6 us at the target shape (1x8x512x64); only the exponentials still take time, and the two
//          matrix products are hidden behind them
// diff:    the loop has no fragments of Q, K and V; the second merge is that of cluster_split (fa/row_exchange.cuh)
// tile:    64 queries x GROUP_KEYS keys per warpgroup and block; 84 KB of shared memory per block
// takes:   fp16 and bf16, D = 64, any S_q >= 1 and S_kv >= 0, top-left and bottom-right causal masks, grouped heads; rows
//          contiguous and 16-byte aligned
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
  K_FULL,                 // Q, and K of the warpgroup, have been copied to shared memory
  V_FULL,                 // V of the warpgroup has been copied to shared memory
  KV_EMPTY,               // all threads of the warpgroup are done with K and V, and the next keys may overwrite them
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
  uint64_t peer_partial_full;                        // mbarrier of PEER_PARTIAL_FULL
};

// Loads K and V of the keys of a warpgroup, as one cp.async group each.
template <typename T>
__device__ __forceinline__ void load_kv(
    typename Smem<T>::Group& smem, const fa::WorkTile<uint4>& work, const fa::Params& params, int first_key, uint32_t thread_in_group) {
  fa::copy_rows_async<GROUP_KEYS, HEAD_DIM, GROUP_THREADS>(
      smem.k, work.k_gmem, params.k_strides.row, first_key, params.seq_k, thread_in_group);
  fa::cp_async_commit_group();
  fa::copy_rows_async<GROUP_KEYS, HEAD_DIM, GROUP_THREADS>(
      smem.v, work.v_gmem, params.v_strides.row, first_key, params.seq_k, thread_in_group);
  fa::cp_async_commit_group();
}

template <typename T>
__global__ void __cluster_dims__(CLUSTER) __launch_bounds__(THREADS) cluster_wgmma_kernel(const fa::Params params) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  Smem<T>& smem = *reinterpret_cast<Smem<T>*>(smem_bytes);
  const int group = threadIdx.x / GROUP_THREADS, thread_in_group = threadIdx.x % GROUP_THREADS, lane = threadIdx.x % WARP;
  const uint32_t head = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER;
  const fa::WorkTile<uint4> work = fa::make_work_tile<BLOCK_M, PASS_KEYS>(params, head);
  const int lane_row = thread_in_group / WARP * MMA_M + lane / QUAD;  // this lane holds rows lane_row and lane_row + 8
  const float scale_log2 = fa::scale_log2_of(params);
  const int group_first_key = (rank * KEY_GROUPS + group) * GROUP_KEYS;

  // Load Q, then the keys of the first pass.
  fa::copy_rows_async<BLOCK_M, HEAD_DIM, THREADS>(smem.q, work.q_gmem, params.q_strides.row, work.first_query, params.seq_q, threadIdx.x);
  load_kv<T>(smem.group[group], work, params, group_first_key, thread_in_group);
  if (threadIdx.x == 0) {
    fa::mbarrier_init(&smem.peer_partial_full, 1);
    fa::fence_mbarrier_init();
    fa::mbarrier_arrive_expect_tx(&smem.peer_partial_full, sizeof(smem.peer_partial));
  }
  __syncwarp();
  fa::barrier_cluster_arrive_relaxed();  // this block runs and its mbarrier is initialised, so that the other one may send to it

  float o[D_TILES][4] = {};
  float m[LANE_ROWS] = {-CUDART_INF_F, -CUDART_INF_F};  // unscaled row max at the last rescale
  float l[LANE_ROWS] = {};                              // this lane's part of the running row sum

  for (int pass = 0; pass < work.key_tiles; ++pass) {
    const int first_key = group_first_key + pass * PASS_KEYS;

    // Load K and V; the copies of the first pass are in flight.
    if (pass > 0) {
      fa::sync_threads<KV_EMPTY, GROUP_THREADS>(1 + group);
      load_kv<T>(smem.group[group], work, params, first_key, thread_in_group);
    }
    fa::cp_async_wait_group<1>();
    fa::fence_proxy_async();
    fa::sync_block<K_FULL>();

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
    fa::cp_async_wait_group<0>();
    fa::fence_proxy_async();
    fa::sync_threads<V_FULL, GROUP_THREADS>(1 + group);
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
  constexpr auto kernel = &cluster_wgmma_kernel<T>;
  constexpr int smem_bytes = sizeof(Smem<T>);
  if (int status = fa::allow_smem<kernel>(args, smem_bytes)) return status;
  const dim3 grid(params.heads * CLUSTER, (params.seq_q + BLOCK_M - 1) / BLOCK_M, static_cast<unsigned>(args->batch));
  kernel<<<grid, THREADS, smem_bytes, stream>>>(params);
  return static_cast<int>(cudaPeekAtLastError());
}

FA_FORWARD(launch)

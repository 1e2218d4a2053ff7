// cluster_tiles: keys are loaded and multiplied in tiles of 64, all tiles of the first warpgroup before those of the second.
// step:    K and V in tiles of 64 keys, each with an mbarrier for K, all tiles of the first warpgroup before those of the second;
//          the row max by a tree reduction; two waits for V, between the exponentials
// because: in cluster_early, S of a warpgroup starts when its 128 keys are there, both warpgroups need the exponential unit at the
//          same time, and ptxas computes all exponentials before the first P V
// expect:  0.1 to 0.3 us less than cluster_early at the target shape (1x8x512x64)
// tile:    64 queries x 128 keys per warpgroup and block; 84 KB of shared memory per block
// takes:   fp16 and bf16, D = 64, any S_q >= 1 and S_kv >= 0, top-left and bottom-right causal masks, grouped heads; rows
//          contiguous and 16-byte aligned, with strides that TMA accepts
#include <math_constants.h>

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
#include "fa/tma_tile.cuh"
#include "fa/warp.cuh"

using fa::BOX_COLUMNS, fa::MMA_K, fa::MMA_M, fa::MMA_N, fa::QUAD, fa::WARP;

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
  Q_FULL,                 // TMA has written Q
  K_FULL,                 // TMA has written one key tile of K
  V_FULL,                 // TMA has written V of the warpgroup
  K_EMPTY,                // all threads of the warpgroup are done with the last K, and its partial O may overwrite it
  GROUP_PARTIALS_STORED,  // all warpgroups have stored their partial O, m and l
  PEER_PARTIAL_FULL,      // the partial O, m and l of the other block have arrived
};

constexpr int HEAD_DIM = 64;
constexpr int CLUSTER = 2;      // blocks
constexpr int BLOCK_M = 64;     // the rows of a wgmma
constexpr int KEY_TILE = 64;    // keys per TMA box
constexpr int GROUP_TILES = 2;  // key tiles of a warpgroup
constexpr int GROUP_KEYS = GROUP_TILES * KEY_TILE, BLOCK_KEYS = KEY_GROUPS * GROUP_KEYS;
constexpr int N_TILES = KEY_TILE / MMA_N;  // 8-key tiles of S in a key tile
constexpr int D_TILES = HEAD_DIM / MMA_N;
constexpr int PASS_KEYS = CLUSTER * BLOCK_KEYS;  // keys that a cluster loads in one pass
constexpr int LANE_ROWS = 2;                     // rows that a lane holds: r and r + 8
constexpr int ROW_PAIRS = D_TILES / KEY_GROUPS;  // 8-column tiles of O that a warpgroup merges: pairs of a lane in each of its rows
constexpr int GROUP_THREADS = 128;
constexpr int THREADS = KEY_GROUPS * GROUP_THREADS;
constexpr int TILE_BYTES = KEY_TILE * HEAD_DIM * 2;  // 64 rows of Q, K or V

static_assert(KEY_TILE == BLOCK_M, "the boxes of Q, K and V have the same number of rows");
static_assert(D_TILES % KEY_GROUPS == 0, "every warpgroup must merge the same number of columns of O");
static_assert(ROW_PAIRS % QUAD == 0, "a lane must store 16 bytes at a time");
static_assert(KEY_GROUPS <= 15, "every warpgroup needs a named barrier of its own");

template <typename T>
struct Smem {
  alignas(1024) T q[BLOCK_M * HEAD_DIM];
  struct alignas(1024) Group {
    T v[GROUP_TILES][KEY_TILE * HEAD_DIM];
    union {
      T k[GROUP_TILES][KEY_TILE * HEAD_DIM];
      fa::PartialO<KEY_GROUPS, D_TILES, GROUP_THREADS> partial_o;
    };
  } group[KEY_GROUPS];
  float m[KEY_GROUPS][BLOCK_M];                      // O and l are sums of exp2(S - m)
  float l[KEY_GROUPS][BLOCK_M];                      // row sum
  fa::PeerPartial<ROW_PAIRS, THREADS> peer_partial;  // of the other block, which alone writes here
  uint64_t k_full[KEY_GROUPS][GROUP_TILES];          // mbarriers of K_FULL; the first one also counts the bytes of Q
  uint64_t v_full[KEY_GROUPS];                       // mbarriers of V_FULL
  uint64_t peer_partial_full;                        // mbarrier of PEER_PARTIAL_FULL
};

// Loads K of one pass.  Called by one thread.  All tiles of the first warpgroup come before those of the second, so that the two
// take turns at the exponential unit: the first one uses it while K of the second one is still being loaded.
template <typename T>
__device__ __forceinline__ void load_k(Smem<T>& smem, const CUtensorMap& map, const fa::TmaWorkTile& work, int first_key, int q_bytes) {
#pragma unroll
  for (int g = 0; g < KEY_GROUPS; ++g) {
#pragma unroll
    for (int t = 0; t < GROUP_TILES; ++t) {
      fa::mbarrier_arrive_expect_tx(&smem.k_full[g][t], TILE_BYTES + (g + t > 0 ? 0 : q_bytes));
      const int tile_first_key = first_key + (g * GROUP_TILES + t) * KEY_TILE;
      fa::load_tile<HEAD_DIM, KEY_TILE>(smem.group[g].k[t], map, tile_first_key, work.kv_head, work.batch, &smem.k_full[g][t]);
    }
  }
}

// Loads V of one pass in the same order.  Called by one thread.
template <typename T>
__device__ __forceinline__ void load_v(Smem<T>& smem, const CUtensorMap& map, const fa::TmaWorkTile& work, int first_key) {
#pragma unroll
  for (int g = 0; g < KEY_GROUPS; ++g) {
    fa::mbarrier_arrive_expect_tx(&smem.v_full[g], GROUP_TILES * TILE_BYTES);
#pragma unroll
    for (int t = 0; t < GROUP_TILES; ++t) {
      const int tile_first_key = first_key + (g * GROUP_TILES + t) * KEY_TILE;
      fa::load_tile<HEAD_DIM, KEY_TILE>(smem.group[g].v[t], map, tile_first_key, work.kv_head, work.batch, &smem.v_full[g]);
    }
  }
}

// Initialises the mbarriers and loads Q, and K and V of the first pass.  Called by one thread.  It issues the loads of Q and K first;
// the rest of the setup overlaps with them.
template <typename T>
__device__ __forceinline__ void load_first_pass(Smem<T>& smem, const CUtensorMap& q_map, const CUtensorMap& k_map,
                                                const CUtensorMap& v_map, const fa::TmaWorkTile& work, int rank) {
#pragma unroll
  for (int i = 0; i < KEY_GROUPS * GROUP_TILES; ++i) fa::mbarrier_init(&smem.k_full[i / GROUP_TILES][i % GROUP_TILES], 1);
  fa::fence_mbarrier_init();
  if (work.passes > 0) {
    fa::load_tile<HEAD_DIM, BLOCK_M>(smem.q, q_map, work.first_query, work.head, work.batch, &smem.k_full[0][0]);
    load_k(smem, k_map, work, rank * BLOCK_KEYS, TILE_BYTES);
  }
#pragma unroll
  for (int g = 0; g < KEY_GROUPS; ++g) fa::mbarrier_init(&smem.v_full[g], 1);
  fa::mbarrier_init(&smem.peer_partial_full, 1);
  fa::fence_mbarrier_init();
  if (work.passes > 0) load_v(smem, v_map, work, rank * BLOCK_KEYS);
  fa::mbarrier_arrive_expect_tx(&smem.peer_partial_full, sizeof(smem.peer_partial));
}

// S = Q K^T for the key tiles of a warpgroup, one after another, as their K arrives.  The wgmmas of a tile are one group.
template <typename T>
__device__ __forceinline__ void multiply_qk(float (&s)[GROUP_TILES][N_TILES][4], Smem<T>& smem, int group, int pass) {
  if (group > 0) fa::wait<Q_FULL>(&smem.k_full[0][0], pass % 2);  // this mbarrier also counts the bytes of Q
#pragma unroll
  for (int t = 0; t < GROUP_TILES; ++t) {
    fa::wait<K_FULL>(&smem.k_full[group][t], pass % 2);
    const uint64_t q = fa::wgmma_descriptor(smem.q), k = fa::wgmma_descriptor(smem.group[group].k[t]);
    fa::wgmma_fence();
#pragma unroll
    for (int d = 0; d < HEAD_DIM * sizeof(T) >> 4; d += MMA_K * sizeof(T) >> 4) fa::wgmma_m64k16<T, 0>(s[t], q + d, k + d, d > 0);
    fa::wgmma_commit_group();
  }
}

// The maximum of this lane's scores of row r.  A tree reduction has a shorter dependency chain than a loop.
__device__ __forceinline__ float tree_max(const float (&s)[N_TILES][4], int r) {
  float partial_max[N_TILES];
#pragma unroll
  for (int n = 0; n < N_TILES; ++n) partial_max[n] = fmaxf(s[n][2 * r], s[n][2 * r + 1]);
#pragma unroll
  for (int stride = N_TILES / 2; stride > 0; stride /= 2) {
#pragma unroll
    for (int n = 0; n < stride; ++n) partial_max[n] = fmaxf(partial_max[n], partial_max[n + stride]);
  }
  return partial_max[0];
}

// Waits for S of the key tiles, one after another, masks it, and finds the row max of this lane.
__device__ __forceinline__ void mask_and_max(float (&m_new)[LANE_ROWS], float (&s)[GROUP_TILES][N_TILES][4], const fa::TmaParams& params,
                                             const fa::TmaWorkTile& work, int group_first_key, int lane_row, int lane) {
#pragma unroll
  for (int t = 0; t < GROUP_TILES; ++t) {
    if (t < GROUP_TILES - 1) {
      fa::wgmma_wait_group<1>(s[t]);
    } else {
      fa::wgmma_wait_group<0>(s[t]);
    }
    // Tiles that every query of the block sees completely are not masked.  S is negated if the scale is negative, because P is
    // computed with the absolute value of the scale.
    const int tile_first_key = group_first_key + t * KEY_TILE;
    const bool is_negated = params.signed_scale_log2 < 0.0f;
    const bool is_masked = tile_first_key + KEY_TILE > min(params.seq_k, work.diagonal);
    if (is_negated || is_masked) fa::negate_and_mask(s[t], is_negated, params.seq_k, work.diagonal + lane_row, tile_first_key, lane);
#pragma unroll
    for (int r = 0; r < LANE_ROWS; ++r) m_new[r] = fmaxf(m_new[r], tree_max(s[t], r));
  }
}

template <typename T>
__global__ void __cluster_dims__(CLUSTER) __launch_bounds__(THREADS) cluster_tiles_kernel(
    const fa::TmaParams params, const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
    const __grid_constant__ CUtensorMap v_map) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<Smem<T>*>(smem_bytes);
  const int group = threadIdx.x / GROUP_THREADS, thread_in_group = threadIdx.x % GROUP_THREADS, lane = threadIdx.x % WARP;
  const int rank = blockIdx.x % CLUSTER;
  const fa::TmaWorkTile work = fa::make_tma_work_tile<BLOCK_M, CLUSTER, PASS_KEYS>(params);

  // Load Q, K and V.
  if (threadIdx.x < WARP && fa::elect_sync()) load_first_pass(smem, q_map, k_map, v_map, work, rank);
  __syncwarp();
  fa::barrier_cluster_arrive_relaxed();  // this block runs and its mbarrier is initialised, so that the other one may send to it
  __syncthreads();                       // the mbarriers of this block are initialised

  const int lane_row = thread_in_group / WARP * MMA_M + lane / QUAD;  // this lane holds rows lane_row and lane_row + 8
  const float scale_log2 = fabsf(params.signed_scale_log2);
  float o[D_TILES][4] = {};
  float m[LANE_ROWS] = {-CUDART_INF_F, -CUDART_INF_F};  // unscaled row max at the last rescale
  float l[LANE_ROWS] = {};                              // this lane's part of the running row sum

  for (int pass = 0; pass < work.passes; ++pass) {
    const int block_first_key = pass * PASS_KEYS + rank * BLOCK_KEYS;
    const int group_first_key = block_first_key + group * GROUP_KEYS;

    // Load K and V; the loads of the first pass are in flight.
    if (pass > 0) {
      __syncthreads();  // no thread still reads the previous K and V or waits for their mbarriers
      if (threadIdx.x < WARP && fa::elect_sync()) {
        load_k(smem, k_map, work, block_first_key, 0);
        load_v(smem, v_map, work, block_first_key);
      }
      __syncwarp();
    }

    // S = Q K^T
    float s[GROUP_TILES][N_TILES][4];
    multiply_qk(s, smem, group, pass);

    // mask, row max
    float m_new[LANE_ROWS] = {m[0], m[1]};
    mask_and_max(m_new, s, params, work, group_first_key, lane_row, lane);
    bool needs_rescale = false;
#pragma unroll
    for (int r = 0; r < LANE_ROWS; ++r) {
      m_new[r] = fa::max_of_quad(m_new[r]);
      // If only m is -inf, the difference is inf and the comparison true.  If both are, it is NaN and the comparison false.
      needs_rescale |= (m_new[r] - m[r]) * scale_log2 > fa::RESCALE_THRESHOLD_LOG2;
    }

    // rescale, if any row of the warp needs it; the first pass has nothing to rescale
    if (pass == 0) {
      m[0] = m_new[0], m[1] = m_new[1];
    } else if (__any_sync(0xffffffffu, needs_rescale)) {
      fa::rescale(o, m, l, m_new, scale_log2);
    }

    const float m_log2[LANE_ROWS] = {fa::finite_log2(m[0], scale_log2), fa::finite_log2(m[1], scale_log2)};
    uint32_t p[GROUP_TILES][N_TILES / 2][4];
#pragma unroll
    for (int t = 0; t < GROUP_TILES; ++t) {
#pragma unroll
      for (int n = 0; n < N_TILES; n += 2) {
        // P = exp2(S - m), row sum; two adjacent accumulator fragments of S form one A fragment of P
        fa::exp2_fragment<T>(p[t][n / 2], s[t], n, scale_log2, m_log2, l);

        // O += P V, overlapping with the computation of the next P.  The wait for V is repeated, because ptxas moves no
        // exponential across a wait.  With a single wait, it would compute all exponentials before the first P V.
        if (n % (N_TILES / 2) == 0) fa::wait<V_FULL>(&smem.v_full[group], pass % 2);
        fa::wgmma_fence();
        fa::wgmma_m64k16<T, 1>(o, p[t][n / 2], fa::wgmma_descriptor(smem.group[group].v[t] + n * MMA_N * HEAD_DIM), true);
        fa::wgmma_commit_group();
      }
    }
    fa::wgmma_wait_group<0>(o);
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
  fa::store_row<T>(row, params, work.head, gridDim.x / CLUSTER, work.first_query + lane_row + rank * 8, group, lane);
}

template <typename T, int>
int launch(const FaForwardArgs* args, cudaStream_t stream) {
  fa::Params all_params;
  if (int status = fa::make_params(args, BLOCK_M, CLUSTER, &all_params)) return status;
  const fa::TmaParams params = fa::tma_params_of(all_params);
  CUtensorMap q_map = {}, k_map = {}, v_map = {};
  if (args->seq_k > 0) {
    constexpr fa::Box BOX = {KEY_TILE, BOX_COLUMNS};
    if (int status = fa::make_tensor_map(&q_map, args, args->q, args->heads, args->seq_q, args->q_stride, BOX)) return status;
    if (int status = fa::make_tensor_map(&k_map, args, args->k, args->kv_heads, args->seq_k, args->k_stride, BOX)) return status;
    if (int status = fa::make_tensor_map(&v_map, args, args->v, args->kv_heads, args->seq_k, args->v_stride, BOX)) return status;
  }
  constexpr auto kernel = &cluster_tiles_kernel<T>;
  constexpr int smem_bytes = sizeof(Smem<T>);
  if (int status = fa::allow_smem<kernel>(args, smem_bytes)) return status;
  const int query_tiles = (params.seq_q + BLOCK_M - 1) / BLOCK_M;
  const dim3 grid(all_params.heads * CLUSTER, query_tiles, static_cast<unsigned>(args->batch));
  kernel<<<grid, THREADS, smem_bytes, stream>>>(params, q_map, k_map, v_map);
  return static_cast<int>(cudaPeekAtLastError());
}

FA_FORWARD(launch)

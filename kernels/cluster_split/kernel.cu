// cluster_split: the blocks of a cluster also divide the keys; they merge their results through distributed shared memory.
// step:    two blocks share the queries and divide the keys, all of which are in flight at once; one more merge at the end
// because: an SM loads 64 bytes per cycle, and in split_warps each SM loads all keys and values of a head, 132 KB
// expect:  below 5 us at the target shape (1x8x512x64); 128 SMs are used, each group of warps has one tile, and no tile waits
//          for another
// diff:    most of it is the second merge; the first one is that of split_warps (fa/group_merge.cuh)
// tile:    BLOCK_M queries x BLOCK_N keys per group and block, 16 queries per warp; 84 KB of shared memory per block
// takes:   fp16 and bf16, D = 64, any S_q >= 1 and S_kv >= 0, top-left and bottom-right causal masks, grouped heads; rows
//          contiguous and 16-byte aligned
#include <math_constants.h>

#include "fa/copy.cuh"
#include "fa/entry.h"
#include "fa/epilogue.cuh"
#include "fa/group_merge.cuh"
#include "fa/launch.h"
#include "fa/mma.cuh"
#include "fa/omit.cuh"
#include "fa/params.cuh"
#include "fa/ptx.cuh"
#include "fa/softmax.cuh"
#include "fa/tile.cuh"
#include "fa/warp.cuh"

using fa::MMA_K, fa::MMA_M, fa::MMA_N, fa::QUAD, fa::WARP;

// How the work is divided:
// - A block computes 64 queries of one head (BLOCK_M), 16 per warp.
// - The groups of warps of a block share these queries and take different keys, so that one group computes while the other is
//   stalled.
// - The blocks of a cluster also share the queries and take different keys, because an SM loads only 64 bytes per cycle.  At
//   the target shape, 8 heads x 8 query tiles x 2 blocks occupy 128 of 132 SMs.
// - At the end, the partial results (O, m and l) are merged: first those of the groups, then those of the blocks.

// The barriers of this kernel and what each guarantees.
enum Barrier {
  NONE,
  Q_FULL,                 // Q has been copied to shared memory
  K_FULL,                 // K of the group's tile has been copied to shared memory
  K_EMPTY,                // all threads of the group are done with K, and the next tile may overwrite it
  V_FULL,                 // V of the group's tile has been copied to shared memory
  V_EMPTY,                // all threads of the group are done with V, and the next tile may overwrite it
  RING_EMPTY,             // all threads of the group are done with the ring, and its partial O may overwrite it
  GROUP_PARTIALS_STORED,  // all groups have stored their partial O, m and l
  PEER_PARTIAL_FULL,      // the partial O, m and l of the other block have arrived
};

constexpr int HEAD_DIM = 64;
constexpr int CLUSTER = 2;  // blocks
constexpr int N_TILES = BLOCK_N / MMA_N;
constexpr int D_TILES = HEAD_DIM / MMA_N;
constexpr int LANE_ROWS = 2;                     // rows that a lane holds: r and r + 8
constexpr int ROW_PAIRS = D_TILES / KEY_GROUPS;  // 8-column tiles of O that a group merges: pairs of a lane in each of its rows
constexpr int GROUP_THREADS = BLOCK_M / MMA_M * WARP;
constexpr int THREADS = KEY_GROUPS * GROUP_THREADS;

static_assert(BLOCK_M % MMA_M == 0, "every warp must own 16 queries");
static_assert(BLOCK_N % MMA_K == 0, "ldmatrix reads 16 keys at a time");
static_assert(D_TILES % KEY_GROUPS == 0, "every group must merge the same number of columns of O");
static_assert(CLUSTER == LANE_ROWS, "each block finishes one of the rows of every lane");
static_assert(ROW_PAIRS % QUAD == 0, "a lane must store 16 bytes at a time");
static_assert(KEY_GROUPS <= 15, "every group needs a named barrier of its own");

template <typename T>
struct Ring {
  T k[STAGES][BLOCK_N * HEAD_DIM];
  T v[STAGES][BLOCK_N * HEAD_DIM];
};

// The merged part of a row of every lane of a block: pairs of O, m in log2 and l.
struct PeerPartial {
  float4 o[ROW_PAIRS / 2][THREADS];
  float2 m_and_l[THREADS];
};

template <typename T>
struct Smem {
  alignas(128) T q[BLOCK_M * HEAD_DIM];
  union {
    Ring<T> ring;
    fa::PartialO<KEY_GROUPS, D_TILES, GROUP_THREADS> partial_o;
  } group[KEY_GROUPS];
  float m[KEY_GROUPS][BLOCK_M];  // O and l are sums of exp2(S - m)
  float l[KEY_GROUPS][BLOCK_M];  // row sum
  PeerPartial peer_partial;      // of the other block, which alone writes here
  uint64_t peer_partial_full;    // mbarrier of PEER_PARTIAL_FULL
};

// Load K or V of one key tile of a group of warps, as one cp.async group.  Past the last tile the cp.async group is empty.
template <typename T>
__device__ __forceinline__ void load_tile(
    T* to_smem, const uint4* from_gmem, uint32_t row_stride, int key_tile, int key_tiles, int seq_k, uint32_t thread_in_group) {
  if (key_tile < key_tiles) {
    fa::copy_rows_async<BLOCK_N, HEAD_DIM, GROUP_THREADS>(to_smem, from_gmem, row_stride, key_tile * BLOCK_N, seq_k, thread_in_group);
  }
  fa::cp_async_commit_group();
}

// Sends one row of this lane's columns to the block that finishes it.
template <typename T>
__device__ __forceinline__ void send_row(Smem<T>& smem, const fa::Merged<ROW_PAIRS>& merged, int row, uint32_t to_rank) {
  const auto peer_address = [&](const void* address_smem) { return fa::mapa(fa::smem_address(address_smem), to_rank); };
  const uint32_t peer_barrier = peer_address(&smem.peer_partial_full);
#pragma unroll
  for (int i = 0; i < ROW_PAIRS; i += 2) {
    const float2 a = merged.o[row * ROW_PAIRS + i], b = merged.o[row * ROW_PAIRS + i + 1];
    fa::st_async(peer_address(&smem.peer_partial.o[i / 2][threadIdx.x]), make_float4(a.x, a.y, b.x, b.y), peer_barrier);
  }
  const float m = merged.l[row] > 0.0f ? merged.m_log2[row] : -CUDART_INF_F;
  fa::st_async(peer_address(&smem.peer_partial.m_and_l[threadIdx.x]), make_float2(m, merged.l[row]), peer_barrier);
}

// The row of this lane that this block finishes.
struct Row {
  float2 o[ROW_PAIRS];
  float m_log2, l;
};

// Sends the other block's row, and returns this block's.
template <typename T>
__device__ __forceinline__ Row exchange_rows(Smem<T>& smem, const fa::Merged<ROW_PAIRS>& merged, int rank) {
  Row kept;
#pragma unroll
  for (int row = 0; row < LANE_ROWS; ++row) {
    if (row == rank) {
#pragma unroll
      for (int i = 0; i < ROW_PAIRS; ++i) kept.o[i] = merged.o[row * ROW_PAIRS + i];
      kept.m_log2 = merged.l[row] > 0.0f ? merged.m_log2[row] : -CUDART_INF_F;
      kept.l = merged.l[row];
    } else {
      send_row(smem, merged, row, row);
    }
  }
  return kept;
}

// Merges what the other block has sent, and normalises.  A row that sees no key is zero.
__device__ __forceinline__ void merge_peer(Row& row, const PeerPartial& peer) {
  const float2 peer_m_and_l = peer.m_and_l[threadIdx.x];
  const float m_merged = fmaxf(row.m_log2, peer_m_and_l.x), m_finite = m_merged == -CUDART_INF_F ? 0.0f : m_merged;
  const float weight = fa::ex2_approx_ftz(row.m_log2 - m_finite), peer_weight = fa::ex2_approx_ftz(peer_m_and_l.x - m_finite);
  row.m_log2 = m_finite;
  row.l = row.l * weight + peer_m_and_l.y * peer_weight;
  const float inverse_l = fa::inverse_of(row.l), own_factor = weight * inverse_l, peer_factor = peer_weight * inverse_l;
#pragma unroll
  for (int i = 0; i < ROW_PAIRS; i += 2) {
    const float4 incoming = peer.o[i / 2][threadIdx.x];
    row.o[i].x = row.o[i].x * own_factor + incoming.x * peer_factor;
    row.o[i].y = row.o[i].y * own_factor + incoming.y * peer_factor;
    row.o[i + 1].x = row.o[i + 1].x * own_factor + incoming.z * peer_factor;
    row.o[i + 1].y = row.o[i + 1].y * own_factor + incoming.w * peer_factor;
  }
}

// Stores this group's columns of a row.  The lanes of a quad exchange registers, so that each lane stores 16 contiguous bytes.
template <typename T>
__device__ __forceinline__ void store(const Row& row, const fa::Params& params, uint32_t head, int query, int group, int lane) {
  uint4* out_gmem = params.out + (uint64_t(blockIdx.z) * params.out_strides.batch + uint64_t(head) * params.out_strides.head) +
                    (uint64_t(query) * params.out_strides.row + group * ROW_PAIRS + lane % QUAD);
#pragma unroll
  for (int i = 0; i < ROW_PAIRS; i += QUAD) {
    uint32_t packed[QUAD];
#pragma unroll
    for (int j = 0; j < QUAD; ++j) packed[j] = fa::cvt_rn_x2<T>(row.o[i + j].x, row.o[i + j].y);
    fa::transpose_quad(packed, lane);
    if (query < params.seq_q) out_gmem[i] = make_uint4(packed[0], packed[1], packed[2], packed[3]);
  }
  if (params.lse != nullptr && group == 0 && lane % QUAD == 0 && query < params.seq_q) {
    float* lse_gmem = params.lse + (uint64_t(blockIdx.z) * params.heads + head) * params.seq_q;
    lse_gmem[query] = fa::lse_of(row.m_log2, row.l);
  }
}

template <typename T>
__global__ void __cluster_dims__(CLUSTER) __launch_bounds__(THREADS) cluster_split_kernel(const fa::Params params) {
  extern __shared__ __align__(128) unsigned char smem_bytes[];
  Smem<T>& smem = *reinterpret_cast<Smem<T>*>(smem_bytes);
  const int group = threadIdx.x / GROUP_THREADS, thread_in_group = threadIdx.x % GROUP_THREADS, lane = threadIdx.x % WARP;
  const uint32_t head = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER;
  const fa::WorkTile<uint4> work = fa::make_work_tile<BLOCK_M, BLOCK_N>(params, head);
  Ring<T>& ring = smem.group[group].ring;
  const int warp_row = thread_in_group / WARP * MMA_M;  // first of the 16 rows of this warp
  const int lane_row = warp_row + lane / QUAD;          // this lane holds rows lane_row and lane_row + 8 of S, P and O
  const float scale_log2 = fa::scale_log2_of(params);
  const int first_tile = rank * KEY_GROUPS + group;

  // Load Q, then the first STAGES tiles of K and V of this group.
  fa::copy_rows_async<BLOCK_M, HEAD_DIM, THREADS>(smem.q, work.q_gmem, params.q_strides.row, work.first_query, params.seq_q, threadIdx.x);
  fa::cp_async_commit_group();
#pragma unroll
  for (int stage = 0; stage < STAGES; ++stage) {
    const int key_tile = first_tile + stage * CLUSTER * KEY_GROUPS;
    load_tile(ring.k[stage], work.k_gmem, params.k_strides.row, key_tile, work.key_tiles, params.seq_k, thread_in_group);
    load_tile(ring.v[stage], work.v_gmem, params.v_strides.row, key_tile, work.key_tiles, params.seq_k, thread_in_group);
  }
  if (threadIdx.x == 0) {
    fa::mbarrier_init(&smem.peer_partial_full, 1);
    fa::fence_mbarrier_init();
    fa::mbarrier_arrive_expect_tx(&smem.peer_partial_full, sizeof(PeerPartial));
  }
  __syncwarp();
  fa::barrier_cluster_arrive_relaxed();  // this block runs and its mbarrier is initialised, so that the other one may send to it

  fa::cp_async_wait_group<2 * STAGES>();
  fa::sync_block<Q_FULL>();
  uint32_t q[HEAD_DIM / MMA_K][4];
  fa::load_q(q, smem.q, warp_row, lane, fa::q_sign_bits(params));

  float o[D_TILES][4] = {};
  float m[LANE_ROWS] = {-CUDART_INF_F, -CUDART_INF_F};  // unscaled row max at the last rescale
  float l[LANE_ROWS] = {};                              // this lane's part of the running row sum

  for (int i = 0, key_tile = first_tile; key_tile < work.key_tiles; ++i, key_tile += CLUSTER * KEY_GROUPS) {
    const int first_key = key_tile * BLOCK_N;
    T* k_smem = ring.k[i % STAGES];
    T* v_smem = ring.v[i % STAGES];
    const int next_tile = key_tile + STAGES * CLUSTER * KEY_GROUPS;  // the tile that is loaded into the same stage

    // Load K and V: the copies of this tile are in flight.
    fa::cp_async_wait_group<2 * STAGES - 1>();
    fa::sync_threads<K_FULL, GROUP_THREADS>(1 + group);

    // S = Q K^T
    float s[N_TILES][4] = {};
    fa::multiply_qk(s, q, k_smem, lane);

    // Load the next K.
    if (next_tile < work.key_tiles) fa::sync_threads<K_EMPTY, GROUP_THREADS>(1 + group);
    load_tile(k_smem, work.k_gmem, params.k_strides.row, next_tile, work.key_tiles, params.seq_k, thread_in_group);

    // mask; only tiles that cross the diagonal or the last key need it
    if (first_key + BLOCK_N > min(params.seq_k, work.diagonal)) {
      fa::mask(s, params.seq_k, work.diagonal + lane_row, first_key, lane);
    }

    // row max
    float m_new[LANE_ROWS];
    const bool needs_rescale = fa::max_of_rows(m_new, s, m, scale_log2);

    // rescale, if any row of the warp needs it
    if (__any_sync(0xffffffffu, needs_rescale)) fa::rescale(o, m, l, m_new, scale_log2);

    const float m_log2[LANE_ROWS] = {fa::finite_log2(m[0], scale_log2), fa::finite_log2(m[1], scale_log2)};
    fa::cp_async_wait_group<2 * STAGES - 1>();
    fa::sync_threads<V_FULL, GROUP_THREADS>(1 + group);
#pragma unroll
    for (int n = 0; n < N_TILES; n += 2) {
      // P = exp2(S - m), row sum; two adjacent accumulator fragments of S form one A fragment of P
      uint32_t p[4];
      fa::exp2_fragment<T>(p, s, n, scale_log2, m_log2, l);

      // O += P V, overlapping with the computation of the next P
      fa::multiply_pv(o, p, v_smem, n * MMA_N, lane);
    }

    // Load the next V.
    if (next_tile < work.key_tiles) fa::sync_threads<V_EMPTY, GROUP_THREADS>(1 + group);
    load_tile(v_smem, work.v_gmem, params.v_strides.row, next_tile, work.key_tiles, params.seq_k, thread_in_group);
  }

  // Merge the groups.
  fa::sync_threads<RING_EMPTY, GROUP_THREADS>(1 + group);
  float4 own_o[ROW_PAIRS];
  fa::store_partial(smem, own_o, o, m, l, group, thread_in_group, lane_row);
  fa::sync_block<GROUP_PARTIALS_STORED>();
  const auto merged = fa::merge_groups<KEY_GROUPS>(smem, own_o, group, thread_in_group, lane_row, scale_log2);

  // Merge the blocks.  Each block finishes one of the two rows of every lane, the one whose number is its rank, and sends the other
  // row to the other block.  So both blocks send at the same time, and each writes half of the output.
  fa::barrier_cluster_wait();  // both blocks run and have initialised their mbarriers
  Row row = exchange_rows(smem, merged, rank);
  fa::wait<PEER_PARTIAL_FULL>(&smem.peer_partial_full, 0);
  merge_peer(row, smem.peer_partial);
  store<T>(row, params, head, work.first_query + lane_row + rank * 8, group, lane);
}

template <typename T, int>
int launch(const FaForwardArgs* args, cudaStream_t stream) {
  fa::Params params;
  if (int status = fa::make_params(args, BLOCK_M, CLUSTER, &params)) return status;
  constexpr auto kernel = &cluster_split_kernel<T>;
  constexpr int smem_bytes = sizeof(Smem<T>);
  if (int status = fa::allow_smem<kernel>(args, smem_bytes)) return status;
  const dim3 grid(params.heads * CLUSTER, (params.seq_q + BLOCK_M - 1) / BLOCK_M, static_cast<unsigned>(args->batch));
  kernel<<<grid, THREADS, smem_bytes, stream>>>(params);
  return static_cast<int>(cudaPeekAtLastError());
}

FA_FORWARD(launch)

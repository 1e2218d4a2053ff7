// cluster_tma: one thread requests all of K and V; TMA writes them in the layout that wgmma reads.
// step:    TMA instead of cp.async for K and V; optionally (CLUSTER_M = 2), two blocks share one copy of their keys by multicast
// because: in cluster_wgmma, every thread issues 16 copies of K and V and computes the addresses of each
// expect:  0.4 to 0.8 us less than cluster_split at the target shape (1x8x512x64); the L2 traffic is halved where two blocks share
//          a copy
// diff:    large: the host encodes tensor maps, and multicast can be enabled
// tile:    64 queries x GROUP_KEYS keys per warpgroup and block; 93 KB of shared memory per block
// takes:   fp16 and bf16, D = 64, any S_q >= 1 and S_kv >= 0, top-left and bottom-right causal masks, grouped heads; rows
//          contiguous and 16-byte aligned, with strides that TMA accepts
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#include "fa/hopper.cuh"
#include "fa/launch.h"
#include "fa/params.cuh"
#include "fa/ptx.cuh"
#include "fa/swizzle.cuh"
#include "fa/warp.cuh"
#include "fa_forward.h"
#include "fa_instantiations.h"  // FA_FOR_EACH_INSTANTIATION: the manifest's dtypes and head_dims

using fp16 = __half;
using bf16 = __nv_bfloat16;

// How the work is divided:
// - A block computes 64 queries of one head, because a wgmma always computes 64 rows.
// - The warpgroups of a block share these queries and take different keys, so that one warpgroup computes while the other is
//   stalled.
// - The CLUSTER_K blocks of a cluster also share the queries and take different keys, because an SM loads only 64 bytes per
//   cycle.  At the target shape, 8 heads x 8 query tiles x 2 blocks occupy 128 of 132 SMs.
// - With CLUSTER_M > 1, a cluster has CLUSTER_M such sets of blocks, each with its own queries.  The blocks that take the same
//   keys load them together: each loads a part and multicasts it to the others.
// - A pass is one iteration of the main loop: the cluster loads PASS_KEYS keys at once, and each warpgroup computes S, P and O
//   for its GROUP_KEYS of them.
// - After the last pass, the partial results (O, m and l) are merged: first those of the warpgroups, then those of the blocks.

// The barriers of this kernel and what each guarantees.  A test omits one with OMIT_BARRIER, to check that the error is detected.
enum Barrier {
  NONE,
  Q_FULL,                 // Q has been copied to shared memory, and the mbarriers are initialised
  K_FULL,                 // TMA has written K of the warpgroup
  V_FULL,                 // TMA has written V of the warpgroup
  K_EMPTY,                // all threads of the warpgroup are done with the last K, and its partial O may overwrite it
  GROUP_PARTIALS_STORED,  // all warpgroups have stored their partial O, m and l
  PEER_PARTIALS_FULL,     // the partial O, m and l of the other blocks have arrived
};

constexpr int HEAD_DIM = 64;
constexpr int WARP = 32;
constexpr int QUAD = 4;  // lanes that share a row of an mma fragment
constexpr int MMA_M = 16, MMA_N = 8, MMA_K = 16;
constexpr int VECTOR = 8;  // 16-bit elements in 16 bytes
constexpr int BLOCK_M = 64;  // the rows of a wgmma
constexpr int N_TILES = GROUP_KEYS / MMA_N;
constexpr int D_TILES = HEAD_DIM / MMA_N;
constexpr int CLUSTER = CLUSTER_K * CLUSTER_M;                  // blocks: CLUSTER_M sets of queries, CLUSTER_K sets of keys
constexpr int PASS_KEYS = CLUSTER_K * KEY_GROUPS * GROUP_KEYS;  // keys that a cluster loads in one pass
constexpr int BOX_KEYS = GROUP_KEYS / CLUSTER_M;                // keys per TMA box: a block's part of a warpgroup's keys
constexpr int D_TILES_PER_GROUP = D_TILES / KEY_GROUPS;         // 8-column tiles of O that a warpgroup merges
constexpr int LANE_ROWS = 2;                                    // rows that a lane holds: r and r + 8
constexpr int LANE_PAIRS = LANE_ROWS * D_TILES_PER_GROUP;       // pairs of adjacent elements that a lane merges, row by row
constexpr int BLOCK_PAIRS = LANE_PAIRS / CLUSTER_K;             // the pairs of a lane that one block of the cluster finishes
constexpr int BLOCK_ROWS = LANE_ROWS / CLUSTER_K > 0 ? LANE_ROWS / CLUSTER_K : 1;  // the rows of a lane that contain these pairs
constexpr int GROUP_THREADS = 128;
constexpr int THREADS = KEY_GROUPS * GROUP_THREADS;
constexpr int TILE_BYTES = GROUP_KEYS * HEAD_DIM * 2;  // K or V of a warpgroup
constexpr int PEER_PARTIAL_BYTES = (CLUSTER_K - 1) * THREADS * (BLOCK_PAIRS + BLOCK_ROWS) * 8;  // from the other blocks

// O is rescaled only where P would exceed 2^8.  fp16 holds values up to 2^15 with the same relative error.
constexpr float RESCALE_THRESHOLD_LOG2 = 8.0f;

static_assert(GROUP_KEYS == 64 || GROUP_KEYS == 128, "the keys of a warpgroup are N of a wgmma");
static_assert(CLUSTER_M == 1 || CLUSTER_M == 2 || CLUSTER_M == 4, "1, 2 or 4 blocks may share their keys");
static_assert(BOX_KEYS % 8 == 0, "a box must be a multiple of the 1024 bytes of a swizzle pattern");
static_assert(D_TILES % KEY_GROUPS == 0, "every warpgroup must merge the same number of columns of O");
static_assert(BLOCK_PAIRS * CLUSTER_K == LANE_PAIRS && BLOCK_PAIRS % 2 == 0, "every block must get whole 16-byte vectors");
static_assert(BLOCK_ROWS * CLUSTER_K == LANE_ROWS || BLOCK_PAIRS * (CLUSTER_K / LANE_ROWS) == D_TILES_PER_GROUP,
              "every block must get whole rows or equal parts of one row");
static_assert(BLOCK_PAIRS % QUAD == 0 || BLOCK_PAIRS < QUAD, "a lane must store 16 bytes at a time, or fewer than 16 in all");
static_assert(CLUSTER <= 8, "larger clusters are not portable");
static_assert(KEY_GROUPS <= 15, "every warpgroup needs a named barrier of its own");

// The partial O of one warpgroup, indexed by the warpgroup that merges these columns; one float4 per fragment and lane.
using PartialO = float4[KEY_GROUPS][D_TILES_PER_GROUP][GROUP_THREADS];

template <typename T>
struct Smem {
  alignas(1024) T q[BLOCK_M * HEAD_DIM];
  struct alignas(1024) Group {
    T v[GROUP_KEYS * HEAD_DIM];
    union {
      T k[GROUP_KEYS * HEAD_DIM];
      PartialO partial_o;
    };
  } group[KEY_GROUPS];
  float m[KEY_GROUPS][BLOCK_M];  // O and l are sums of exp2(S - m)
  float l[KEY_GROUPS][BLOCK_M];  // row sum
  struct PeerPartial {           // what one other block sends: only that block writes here
    float4 o[BLOCK_PAIRS / 2][THREADS];
    float2 m_and_l[BLOCK_ROWS][THREADS];
  } peer_partials[CLUSTER_K];   // indexed by the k_rank of the sender
  uint64_t k_full[KEY_GROUPS];  // mbarriers of K_FULL
  uint64_t v_full[KEY_GROUPS];  // mbarriers of V_FULL
  uint64_t peer_partials_full;  // mbarrier of PEER_PARTIALS_FULL
};

// The work of one thread block: BLOCK_M queries of one head, and all keys that they see.
struct WorkTile {
  const uint4* q_gmem;  // [seq_q, HEAD_DIM / VECTOR], row stride q_strides.row
  int kv_head;
  int first_query;
  int diagonal;  // query i of the block sees keys [0, min(seq_k, diagonal + i))
  int passes;    // number of passes over the keys that any query of the cluster sees
};

__device__ __forceinline__ WorkTile make_work_tile(const fa::Params& params, int m_rank) {
  const uint32_t head = blockIdx.x / CLUSTER, batch = blockIdx.z;
  const int cluster_query = blockIdx.y * (CLUSTER_M * BLOCK_M), first_query = cluster_query + m_rank * BLOCK_M;
  const int visible_keys = max(0, min(params.seq_k, params.first_diagonal + cluster_query + CLUSTER_M * BLOCK_M - 1));
  return {
      params.q + (uint64_t(batch) * params.q_strides.batch + uint64_t(head) * params.q_strides.head),
      static_cast<int>(fa::kv_head_of(params, head)),
      first_query,
      params.first_diagonal + first_query,
      (visible_keys + PASS_KEYS - 1) / PASS_KEYS,
  };
}

// Copies rows [first_row, first_row + ROWS) of a [seq, HEAD_DIM] tensor; rows from seq on are filled with zeros.
// COPY_THREADS threads copy together; `thread` is the index of this one.
template <int ROWS, int COPY_THREADS, typename T>
__device__ __forceinline__ void copy_rows(
    T* to_smem, const uint4* from_gmem, uint32_t row_stride, uint32_t first_row, uint32_t seq, uint32_t thread) {
  const uint32_t thread_row = thread / (HEAD_DIM / VECTOR), column = thread % (HEAD_DIM / VECTOR);
  from_gmem += uint64_t(first_row + thread_row) * row_stride + column;
#pragma unroll
  for (int i = 0; i < ROWS * HEAD_DIM / VECTOR; i += COPY_THREADS) {
    const uint32_t row = thread_row + i / (HEAD_DIM / VECTOR);
    if (ROWS * HEAD_DIM / VECTOR % COPY_THREADS != 0 && row >= ROWS) break;
    fa::cp_async_16_or_zero(to_smem + fa::swizzle<HEAD_DIM>(row, column * VECTOR), from_gmem, first_row + row < seq);
    from_gmem += uint64_t(COPY_THREADS / (HEAD_DIM / VECTOR)) * row_stride;
  }
}

// Loads a box of K or V into every block of the cluster that takes the same keys.
template <typename T>
__device__ __forceinline__ void load_box(
    T* to_smem, const CUtensorMap& map, int first_key, int kv_head, uint64_t* barrier_smem, int k_rank) {
  if constexpr (CLUSTER_M == 1) {
    fa::cp_async_bulk_tensor_4d(to_smem, map, 0, first_key, kv_head, blockIdx.z, barrier_smem);
  } else {
    // Bit r selects the block of rank r.  The ranks of the blocks that take the same keys differ by CLUSTER_K.
    constexpr uint16_t TWO_BLOCKS = 1 | 1 << CLUSTER_K;
    constexpr uint16_t SAME_KEYS = CLUSTER_M == 2 ? TWO_BLOCKS : TWO_BLOCKS | TWO_BLOCKS << 2 * CLUSTER_K;
    fa::cp_async_bulk_tensor_4d_multicast(to_smem, map, 0, first_key, kv_head, blockIdx.z, barrier_smem, SAME_KEYS << k_rank);
  }
}

// Loads K and V of one pass: this block's part of the keys of each warpgroup.  Called by one thread.
template <typename T>
__device__ __forceinline__ void load_kv(
    Smem<T>& smem, const CUtensorMap& k_map, const CUtensorMap& v_map, int kv_head, int k_rank, int m_rank, int pass) {
  const int first_key = (pass * CLUSTER_K + k_rank) * KEY_GROUPS * GROUP_KEYS + m_rank * BOX_KEYS;
#pragma unroll
  for (int g = 0; g < KEY_GROUPS; ++g) {
    load_box(smem.group[g].k + m_rank * BOX_KEYS * HEAD_DIM, k_map, first_key + g * GROUP_KEYS, kv_head, &smem.k_full[g], k_rank);
  }
#pragma unroll
  for (int g = 0; g < KEY_GROUPS; ++g) {
    load_box(smem.group[g].v + m_rank * BOX_KEYS * HEAD_DIM, v_map, first_key + g * GROUP_KEYS, kv_head, &smem.v_full[g], k_rank);
  }
}

template <Barrier BARRIER>
__device__ __forceinline__ void sync_block() {
  if (BARRIER != OMIT_BARRIER) __syncthreads();
}

template <Barrier BARRIER>
__device__ __forceinline__ void sync_group(int group) {
  if (BARRIER != OMIT_BARRIER) fa::barrier_sync<GROUP_THREADS>(1 + group);
}

// Arms the mbarriers of the next pass with the bytes of K and V.  Called by one thread.
template <typename T>
__device__ void expect_kv(Smem<T>& smem) {
#pragma unroll
  for (int g = 0; g < KEY_GROUPS; ++g) {
    fa::mbarrier_arrive_expect_tx(&smem.k_full[g], TILE_BYTES);
    fa::mbarrier_arrive_expect_tx(&smem.v_full[g], TILE_BYTES);
  }
}

template <Barrier BARRIER>
__device__ __forceinline__ void wait(uint64_t* barrier_smem, uint32_t parity) {
  if (BARRIER == OMIT_BARRIER) return;
  while (!fa::mbarrier_try_wait(barrier_smem, parity)) {
  }
}

template <typename T>
__global__ void __launch_bounds__(THREADS) cluster_tma_kernel(
    const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map, const fa::Params params) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  Smem<T>& smem = *reinterpret_cast<Smem<T>*>(smem_bytes);
  const int group = threadIdx.x / GROUP_THREADS, thread_in_group = threadIdx.x % GROUP_THREADS, lane = threadIdx.x % WARP;
  const int k_rank = blockIdx.x % CLUSTER_K, m_rank = blockIdx.x % CLUSTER / CLUSTER_K;
  const WorkTile work = make_work_tile(params, m_rank);
  const int lane_row = thread_in_group / WARP * MMA_M + lane / QUAD;  // this lane holds rows lane_row and lane_row + 8
  const float scale_log2 = fa::scale_log2_of(params);
  const uint32_t head = blockIdx.x / CLUSTER;

  // Load Q, then the keys of the first pass.  With multicast, the mbarriers of all blocks must be initialised before.
  copy_rows<BLOCK_M, THREADS>(smem.q, work.q_gmem, params.q_strides.row, work.first_query, params.seq_q, threadIdx.x);
  fa::cp_async_commit_group();
  if (threadIdx.x == 0) {
    fa::prefetch_tensormap(k_map);
    fa::prefetch_tensormap(v_map);
    for (int g = 0; g < KEY_GROUPS; ++g) {
      fa::mbarrier_init(&smem.k_full[g], 1);
      fa::mbarrier_init(&smem.v_full[g], 1);
    }
    fa::mbarrier_init(&smem.peer_partials_full, 1);
    fa::fence_mbarrier_init();
    expect_kv(smem);
    fa::mbarrier_arrive_expect_tx(&smem.peer_partials_full, PEER_PARTIAL_BYTES);
  }
  __syncwarp();
  if (CLUSTER > 1) fa::barrier_cluster_arrive_relaxed();
  if (CLUSTER_M > 1) fa::barrier_cluster_wait();
  if (threadIdx.x == 0 && work.passes > 0) load_kv(smem, k_map, v_map, work.kv_head, k_rank, m_rank, 0);
  fa::cp_async_wait_group<0>();
  fa::fence_proxy_async();
  sync_block<Q_FULL>();

  float o[D_TILES][4] = {};
  float m[2] = {-CUDART_INF_F, -CUDART_INF_F};  // unscaled row max at the last rescale
  float l[2] = {};                              // this lane's part of the running row sum

  for (int pass = 0; pass < work.passes; ++pass) {
    const int first_key = ((pass * CLUSTER_K + k_rank) * KEY_GROUPS + group) * GROUP_KEYS;

    // Load K and V.
    if (pass > 0) {
      if (CLUSTER_M > 1) {
        fa::barrier_cluster_arrive();
        fa::barrier_cluster_wait();  // all threads of all blocks are done with the previous K and V
      } else {
        __syncthreads();  // all threads of this block are done with the previous K and V
      }
      if (threadIdx.x == 0) {
        expect_kv(smem);  // not earlier, because the arrival would then count for the previous phase
        load_kv(smem, k_map, v_map, work.kv_head, k_rank, m_rank, pass);
      }
      __syncwarp();
    }
    wait<K_FULL>(&smem.k_full[group], pass % 2);

    // S = Q K^T
    float s[N_TILES][4];
    const uint64_t q = fa::wgmma_descriptor(smem.q), k = fa::wgmma_descriptor(smem.group[group].k);
    fa::wgmma_fence();
#pragma unroll
    for (int d = 0; d < HEAD_DIM * sizeof(T) >> 4; d += MMA_K * sizeof(T) >> 4) fa::wgmma_m64k16<T, 0>(s, q + d, k + d, d > 0);
    fa::wgmma_commit_group();
    fa::wgmma_wait_group<0>();
    if (fa::negate_q(params)) {  // below, S is multiplied by the absolute value of the scale
#pragma unroll
      for (int n = 0; n < N_TILES; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] = -s[n][i];
      }
    }

    // mask; tiles that every query of the block sees completely are skipped
    if (first_key + GROUP_KEYS > min(params.seq_k, work.diagonal)) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int limit = min(params.seq_k, work.diagonal + lane_row + i / 2 * 8) - first_key;
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) {
          if (n * MMA_N + lane % QUAD * 2 + i % 2 >= limit) s[n][i] = -CUDART_INF_F;
        }
      }
    }

    // row max
    float m_new[2];
    bool needs_rescale = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      m_new[r] = m[r];
#pragma unroll
      for (int n = 0; n < N_TILES; ++n) m_new[r] = fmaxf(m_new[r], fmaxf(s[n][2 * r], s[n][2 * r + 1]));
      m_new[r] = fa::max_of_quad(m_new[r]);
      // If only m is -inf, the difference is inf and the comparison true.  If both are, it is NaN and the comparison false.
      needs_rescale |= (m_new[r] - m[r]) * scale_log2 > RESCALE_THRESHOLD_LOG2;
    }

    // rescale, if any row of the warp needs it
    if (__any_sync(0xffffffffu, needs_rescale)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float m_log2 = m_new[r] == -CUDART_INF_F ? 0.0f : m_new[r] * scale_log2;
        const float rescale = fa::ex2_approx_ftz(m[r] * scale_log2 - m_log2);
        m[r] = m_new[r];
        l[r] *= rescale;
#pragma unroll
        for (int d = 0; d < D_TILES; ++d) {
          o[d][2 * r] *= rescale;
          o[d][2 * r + 1] *= rescale;
        }
      }
    }

    float m_log2[2];  // 0 for a row that has seen no key; its P is then exp2(-inf - 0) = 0
#pragma unroll
    for (int r = 0; r < 2; ++r) m_log2[r] = m[r] == -CUDART_INF_F ? 0.0f : m[r] * scale_log2;
    wait<V_FULL>(&smem.v_full[group], pass % 2);
    uint32_t p[N_TILES / 2][4];
#pragma unroll
    for (int n = 0; n < N_TILES; n += 2) {
      // P = exp2(S - m), row sum; two adjacent accumulator fragments of S form one A fragment of P
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float(&fragment)[4] = s[n + i / 2];
        const int r = i % 2;
        fragment[2 * r] = fa::ex2_approx_ftz(fragment[2 * r] * scale_log2 - m_log2[r]);
        fragment[2 * r + 1] = fa::ex2_approx_ftz(fragment[2 * r + 1] * scale_log2 - m_log2[r]);
        l[r] += fragment[2 * r] + fragment[2 * r + 1];
        p[n / 2][i] = fa::cvt_rn_x2<T>(fragment[2 * r], fragment[2 * r + 1]);
      }

      // O += P V, overlapping with the computation of the next P
      fa::wgmma_fence();
      fa::wgmma_m64k16<T, 1>(o, p[n / 2], fa::wgmma_descriptor(smem.group[group].v + n * MMA_N * HEAD_DIM), true);
      fa::wgmma_commit_group();
    }
    fa::wgmma_wait_group<0>();
  }

  // Merge the warpgroups.  Each one merges the columns of D_TILES_PER_GROUP fragments.  It hands its other columns to the other
  // warpgroups through the memory of its K.
  sync_group<K_EMPTY>(group);
  PartialO& partial_o_smem = smem.group[group].partial_o;
  float4 own_o[D_TILES_PER_GROUP];
#pragma unroll
  for (int d = 0; d < D_TILES; ++d) {
    const float4 partial = make_float4(o[d][0], o[d][1], o[d][2], o[d][3]);
    if (d / D_TILES_PER_GROUP == group) {
      own_o[d % D_TILES_PER_GROUP] = partial;
    } else {
      partial_o_smem[d / D_TILES_PER_GROUP][d % D_TILES_PER_GROUP][thread_in_group] = partial;
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    l[r] = fa::sum_of_quad(l[r]);
    if (lane % QUAD != 0) continue;
    smem.m[group][lane_row + r * 8] = m[r];
    smem.l[group][lane_row + r * 8] = l[r];
  }
  sync_block<GROUP_PARTIALS_STORED>();

  float2 merged_o[LANE_PAIRS];
  float m_log2[LANE_ROWS], sum[LANE_ROWS];
  float weight[KEY_GROUPS][2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float m_all = -CUDART_INF_F;
#pragma unroll
    for (int g = 0; g < KEY_GROUPS; ++g) m_all = fmaxf(m_all, smem.m[g][lane_row + r * 8]);
    m_log2[r] = m_all == -CUDART_INF_F ? 0.0f : m_all * scale_log2;
    sum[r] = 0.0f;
#pragma unroll
    for (int g = 0; g < KEY_GROUPS; ++g) {
      weight[g][r] = fa::ex2_approx_ftz(smem.m[g][lane_row + r * 8] * scale_log2 - m_log2[r]);
      sum[r] += smem.l[g][lane_row + r * 8] * weight[g][r];
    }
  }
#pragma unroll
  for (int d = 0; d < D_TILES_PER_GROUP; ++d) {
    float2 rows[2] = {};
#pragma unroll
    for (int g = 0; g < KEY_GROUPS; ++g) {
      const float4 partial = g == group ? own_o[d] : smem.group[g].partial_o[group][d][thread_in_group];
      rows[0].x += partial.x * weight[g][0];
      rows[0].y += partial.y * weight[g][0];
      rows[1].x += partial.z * weight[g][1];
      rows[1].y += partial.w * weight[g][1];
    }
    merged_o[d] = rows[0];
    merged_o[D_TILES_PER_GROUP + d] = rows[1];
  }

  // Merge the blocks.  Each block finishes BLOCK_PAIRS pairs of every lane (with CLUSTER_K = 2, one of the two rows), and sends
  // the other pairs to the blocks that finish them.  So all blocks send at the same time, and all write an equal part of the
  // output.
  float2 final_o[BLOCK_PAIRS];
  float own_m[BLOCK_ROWS], own_l[BLOCK_ROWS];  // own_m is in log2
  if (CLUSTER_M == 1 && CLUSTER_K > 1) fa::barrier_cluster_wait();  // all blocks run and have initialised their mbarriers
#pragma unroll
  for (int to_rank = 0; to_rank < CLUSTER_K; ++to_rank) {
    const int first_pair = to_rank * BLOCK_PAIRS, first_pair_row = first_pair / D_TILES_PER_GROUP;
    if (to_rank == k_rank) {
#pragma unroll
      for (int i = 0; i < BLOCK_PAIRS; ++i) final_o[i] = merged_o[first_pair + i];
#pragma unroll
      for (int i = 0; i < BLOCK_ROWS; ++i) {
        own_m[i] = sum[first_pair_row + i] > 0.0f ? m_log2[first_pair_row + i] : -CUDART_INF_F;
        own_l[i] = sum[first_pair_row + i];
      }
    } else {
      const uint32_t peer_rank = m_rank * CLUSTER_K + to_rank;
      const uint32_t peer_barrier = fa::mapa(fa::smem_address(&smem.peer_partials_full), peer_rank);
#pragma unroll
      for (int i = 0; i < BLOCK_PAIRS; i += 2) {
        const float2 a = merged_o[first_pair + i], b = merged_o[first_pair + i + 1];
        const uint32_t peer_address = fa::mapa(fa::smem_address(&smem.peer_partials[k_rank].o[i / 2][threadIdx.x]), peer_rank);
        fa::st_async(peer_address, make_float4(a.x, a.y, b.x, b.y), peer_barrier);
      }
#pragma unroll
      for (int i = 0; i < BLOCK_ROWS; ++i) {
        const float sent_m = sum[first_pair_row + i] > 0.0f ? m_log2[first_pair_row + i] : -CUDART_INF_F;
        const uint32_t peer_address = fa::mapa(fa::smem_address(&smem.peer_partials[k_rank].m_and_l[i][threadIdx.x]), peer_rank);
        fa::st_async(peer_address, make_float2(sent_m, sum[first_pair_row + i]), peer_barrier);
      }
    }
  }
  if (CLUSTER_K > 1) {
    wait<PEER_PARTIALS_FULL>(&smem.peer_partials_full, 0);
  }
#pragma unroll
  for (int i = 0; i < BLOCK_ROWS; ++i) {
    constexpr int PAIRS_PER_ROW = BLOCK_PAIRS / BLOCK_ROWS;
    float2 m_and_l[CLUSTER_K];
    float m_all = -CUDART_INF_F, sum_all = 0.0f, weight[CLUSTER_K];
#pragma unroll
    for (int from_rank = 0; from_rank < CLUSTER_K; ++from_rank) {
      m_and_l[from_rank] =
          from_rank == k_rank ? make_float2(own_m[i], own_l[i]) : smem.peer_partials[from_rank].m_and_l[i][threadIdx.x];
      m_all = fmaxf(m_all, m_and_l[from_rank].x);
    }
    const float m_finite = m_all == -CUDART_INF_F ? 0.0f : m_all;
#pragma unroll
    for (int from_rank = 0; from_rank < CLUSTER_K; ++from_rank) {
      weight[from_rank] = fa::ex2_approx_ftz(m_and_l[from_rank].x - m_finite);
      sum_all += m_and_l[from_rank].y * weight[from_rank];
    }

    // Normalise.  A row that sees no key is zero, and its log-sum-exp is -inf.
    const int row = k_rank * BLOCK_PAIRS / D_TILES_PER_GROUP + i;
    const int query = work.first_query + lane_row + row * 8;
    const float inverse_l = sum_all == 0.0f ? 0.0f : 1.0f / sum_all;
#pragma unroll
    for (int j = i * PAIRS_PER_ROW; j < (i + 1) * PAIRS_PER_ROW; j += 2) {
      float4 two_pairs = {};
#pragma unroll
      for (int from_rank = 0; from_rank < CLUSTER_K; ++from_rank) {
        const float4 own = make_float4(final_o[j].x, final_o[j].y, final_o[j + 1].x, final_o[j + 1].y);
        const float4 partial = from_rank == k_rank ? own : smem.peer_partials[from_rank].o[j / 2][threadIdx.x];
        two_pairs.x += partial.x * weight[from_rank];
        two_pairs.y += partial.y * weight[from_rank];
        two_pairs.z += partial.z * weight[from_rank];
        two_pairs.w += partial.w * weight[from_rank];
      }
      final_o[j] = make_float2(two_pairs.x * inverse_l, two_pairs.y * inverse_l);
      final_o[j + 1] = make_float2(two_pairs.z * inverse_l, two_pairs.w * inverse_l);
    }
    const bool is_first_of_row = k_rank * BLOCK_PAIRS % D_TILES_PER_GROUP == 0 && group == 0 && lane % QUAD == 0;
    if (params.lse != nullptr && is_first_of_row && query < params.seq_q) {
      float* lse_gmem = params.lse + (uint64_t(blockIdx.z) * params.heads + head) * params.seq_q;
      lse_gmem[query] = sum_all == 0.0f ? -CUDART_INF_F : (m_finite + log2f(sum_all)) * CUDART_LN2_F;
    }
  }

  // Store.  The lanes of a quad exchange registers, so that each lane stores 16 contiguous bytes.  A lane with fewer than four
  // pairs stores 4 bytes at a time.
  uint4* out_gmem = params.out + (uint64_t(blockIdx.z) * params.out_strides.batch + uint64_t(head) * params.out_strides.head);
#pragma unroll
  for (int i = 0; i < BLOCK_PAIRS; i += QUAD) {
    uint32_t packed[QUAD];
#pragma unroll
    for (int j = 0; j < QUAD; ++j) packed[j] = i + j < BLOCK_PAIRS ? fa::cvt_rn_x2<T>(final_o[i + j].x, final_o[i + j].y) : 0;
    constexpr bool HAS_FOUR = BLOCK_PAIRS % QUAD == 0;
    if (HAS_FOUR) fa::transpose_quad(packed, lane);
#pragma unroll
    for (int j = 0; j < (HAS_FOUR ? 1 : BLOCK_PAIRS % QUAD); ++j) {
      const int pair = k_rank * BLOCK_PAIRS + i + (HAS_FOUR ? lane % QUAD : j);
      const int query = work.first_query + lane_row + pair / D_TILES_PER_GROUP * 8;
      if (query >= params.seq_q) continue;
      const uint32_t column = group * D_TILES_PER_GROUP + pair % D_TILES_PER_GROUP;
      uint4* to_gmem = out_gmem + (uint64_t(query) * params.out_strides.row + column);
      if (HAS_FOUR) {
        *to_gmem = make_uint4(packed[0], packed[1], packed[2], packed[3]);
      } else {
        reinterpret_cast<uint32_t*>(to_gmem)[lane % QUAD] = packed[j];
      }
    }
  }
}

// Describes a tensor [batch, kv_heads, seq_k, HEAD_DIM] to TMA, in boxes of BOX_KEYS rows.  Returns FA_OK, or refuses the call.
int make_tensor_map(
    CUtensorMap* map, CUtensorMapDataType dtype, const FaForwardArgs* args, const void* data, const FaStrides& stride) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult query_result;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &query_result);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  if (encode == nullptr) return fa_refuse(args, "the driver has no cuTensorMapEncodeTiled");
  const cuuint64_t sizes[4] = {HEAD_DIM, static_cast<cuuint64_t>(args->seq_k), static_cast<cuuint64_t>(args->kv_heads),
                               static_cast<cuuint64_t>(args->batch)};
  const cuuint64_t stride_bytes[3] = {static_cast<cuuint64_t>(stride.seq) * 2, static_cast<cuuint64_t>(stride.head) * 2,
                                      static_cast<cuuint64_t>(stride.batch) * 2};
  const cuuint32_t box[4] = {HEAD_DIM, BOX_KEYS, 1, 1}, element_strides[4] = {1, 1, 1, 1};
  const CUresult status =
      encode(map, dtype, 4, const_cast<void*>(data), sizes, stride_bytes, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status == CUDA_SUCCESS) return FA_OK;
  return fa_refuse(args, "TMA does not accept strides of %lld, %lld and %lld elements (batch, head, row): CUresult %d",
                   static_cast<long long>(stride.batch), static_cast<long long>(stride.head),
                   static_cast<long long>(stride.seq), status);
}

template <typename T>
int launch(const FaForwardArgs* args, cudaStream_t stream) {
  fa::Params params;
  if (int status = fa::make_params(args, CLUSTER_M * BLOCK_M, CLUSTER, &params)) return status;
  CUtensorMap k_map = {}, v_map = {};
  if (args->seq_k > 0) {
    const auto dtype = args->dtype == FA_DTYPE_fp16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    if (int status = make_tensor_map(&k_map, dtype, args, args->k, args->k_stride)) return status;
    if (int status = make_tensor_map(&v_map, dtype, args, args->v, args->v_stride)) return status;
  }
  auto* kernel = &cluster_tma_kernel<T>;
  constexpr int smem_bytes = sizeof(Smem<T>);
  static fa::OncePerDevice allow_smem;
  if (int status = allow_smem([&] { return fa_allow_dynamic_smem(args, reinterpret_cast<const void*>(kernel), smem_bytes); })) {
    return status;
  }
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {CLUSTER, 1, 1};
  cudaLaunchConfig_t config = {};
  const int clusters_per_head = (params.seq_q + CLUSTER_M * BLOCK_M - 1) / (CLUSTER_M * BLOCK_M);
  config.gridDim = dim3(params.heads * CLUSTER, clusters_per_head, static_cast<unsigned>(args->batch));
  config.blockDim = dim3(THREADS);
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = CLUSTER > 1;
  return static_cast<int>(cudaLaunchKernelEx(&config, kernel, k_map, v_map, params));
}

FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t stream) {
  if (int status = fa_check_abi(args)) return status;
#define LAUNCH_IF(DTYPE, HEAD_DIM_) \
  if (args->dtype == FA_DTYPE_##DTYPE && args->head_dim == HEAD_DIM_) return launch<DTYPE>(args, stream);
  FA_FOR_EACH_INSTANTIATION(LAUNCH_IF)
#undef LAUNCH_IF
  return fa_refuse(args, "no instantiation for dtype %d with head_dim %lld", args->dtype, static_cast<long long>(args->head_dim));
}

// cluster_wgmma: a warpgroup replaces four warps; the tensor cores read Q, K and V from shared memory themselves.
// step:    wgmma instead of mma.sync and ldmatrix; each group of warps is a warpgroup, and P V runs while the next P is computed
// because: in cluster_split, S = Q K^T, the exponentials and P V run one after another
// expect:  4.2 to 4.6 us at the target shape (1x8x512x64); only the exponentials still take time, and the two
//          matrix products are hidden behind them
// diff:    large: the loop no longer has fragments of Q, K and V, and the index of a second fragment of rows is gone
// tile:    64 queries x GROUP_KEYS keys per warpgroup and block; 93 KB of shared memory per block
// takes:   fp16 and bf16, D = 64, any S_q >= 1 and S_kv >= 0, top-left and bottom-right causal masks, grouped heads; rows
//          contiguous and 16-byte aligned
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
// - The blocks of a cluster also share the queries and take different keys, because an SM loads only 64 bytes per cycle.  At
//   the target shape, 8 heads x 8 query tiles x 2 blocks occupy 128 of 132 SMs.
// - A pass is one iteration of the main loop: the cluster loads PASS_KEYS keys at once, and each warpgroup computes S, P and O
//   for its GROUP_KEYS of them.
// - After the last pass, the partial results (O, m and l) are merged: first those of the warpgroups, then those of the blocks.

// The barriers of this kernel and what each guarantees.  A test omits one with OMIT_BARRIER, to check that the error is detected.
enum Barrier {
  NONE,
  K_FULL,                 // Q, and K of the warpgroup, have been copied to shared memory
  V_FULL,                 // V of the warpgroup has been copied to shared memory
  KV_EMPTY,               // all threads of the warpgroup are done with K and V, and the next keys may overwrite them
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
constexpr int PASS_KEYS = CLUSTER * KEY_GROUPS * GROUP_KEYS;  // keys that a cluster loads in one pass
constexpr int D_TILES_PER_GROUP = D_TILES / KEY_GROUPS;       // 8-column tiles of O that a warpgroup merges
constexpr int LANE_ROWS = 2;                                  // rows that a lane holds: r and r + 8
constexpr int LANE_PAIRS = LANE_ROWS * D_TILES_PER_GROUP;     // pairs of adjacent elements that a lane merges, row by row
constexpr int BLOCK_PAIRS = LANE_PAIRS / CLUSTER;             // the pairs of a lane that one block of the cluster finishes
constexpr int BLOCK_ROWS = LANE_ROWS / CLUSTER > 0 ? LANE_ROWS / CLUSTER : 1;  // the rows of a lane that contain these pairs
constexpr int GROUP_THREADS = 128;
constexpr int THREADS = KEY_GROUPS * GROUP_THREADS;
constexpr int PEER_PARTIAL_BYTES = (CLUSTER - 1) * THREADS * (BLOCK_PAIRS + BLOCK_ROWS) * 8;  // from the other blocks

// O is rescaled only where P would exceed 2^8.  fp16 holds values up to 2^15 with the same relative error.
constexpr float RESCALE_THRESHOLD_LOG2 = 8.0f;

static_assert(GROUP_KEYS == 64 || GROUP_KEYS == 128, "the keys of a warpgroup are N of a wgmma");
static_assert(D_TILES % KEY_GROUPS == 0, "every warpgroup must merge the same number of columns of O");
static_assert(BLOCK_PAIRS * CLUSTER == LANE_PAIRS && BLOCK_PAIRS % 2 == 0, "every block must get whole 16-byte vectors");
static_assert(BLOCK_ROWS * CLUSTER == LANE_ROWS || BLOCK_PAIRS * (CLUSTER / LANE_ROWS) == D_TILES_PER_GROUP,
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
  } peer_partials[CLUSTER];     // indexed by the rank of the sender
  uint64_t peer_partials_full;  // mbarrier of PEER_PARTIALS_FULL
};

// The work of one thread block: BLOCK_M queries of one head, and all keys that they see.
struct WorkTile {
  const uint4* q_gmem;  // [seq_q, HEAD_DIM / VECTOR], row stride q_strides.row
  const uint4* k_gmem;  // [seq_k, HEAD_DIM / VECTOR]
  const uint4* v_gmem;  // [seq_k, HEAD_DIM / VECTOR]
  int first_query;
  int diagonal;  // query i of the block sees keys [0, min(seq_k, diagonal + i))
  int passes;    // number of passes over the keys that any query of the block sees
};

__device__ __forceinline__ WorkTile make_work_tile(const fa::Params& params) {
  const uint32_t head = blockIdx.x / CLUSTER, batch = blockIdx.z, kv_head = fa::kv_head_of(params, head);
  const int first_query = blockIdx.y * BLOCK_M;
  const int diagonal = params.first_diagonal + first_query;
  const int visible_keys = max(0, min(params.seq_k, diagonal + BLOCK_M - 1));
  return {
      params.q + (uint64_t(batch) * params.q_strides.batch + uint64_t(head) * params.q_strides.head),
      params.k + (uint64_t(batch) * params.k_strides.batch + uint64_t(kv_head) * params.k_strides.head),
      params.v + (uint64_t(batch) * params.v_strides.batch + uint64_t(kv_head) * params.v_strides.head),
      first_query,
      diagonal,
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

template <Barrier BARRIER>
__device__ __forceinline__ void sync_block() {
  if (BARRIER != OMIT_BARRIER) __syncthreads();
}

template <Barrier BARRIER>
__device__ __forceinline__ void sync_group(int group) {
  if (BARRIER != OMIT_BARRIER) fa::barrier_sync<GROUP_THREADS>(1 + group);
}

// Loads K and V of the keys of a warpgroup, as one cp.async group each.
template <typename T>
__device__ __forceinline__ void load_kv(
    typename Smem<T>::Group& smem, const WorkTile& work, const fa::Params& params, int first_key, uint32_t thread_in_group) {
  copy_rows<GROUP_KEYS, GROUP_THREADS>(smem.k, work.k_gmem, params.k_strides.row, first_key, params.seq_k, thread_in_group);
  fa::cp_async_commit_group();
  copy_rows<GROUP_KEYS, GROUP_THREADS>(smem.v, work.v_gmem, params.v_strides.row, first_key, params.seq_k, thread_in_group);
  fa::cp_async_commit_group();
}

template <typename T>
__global__ void __launch_bounds__(THREADS) cluster_wgmma_kernel(const fa::Params params) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  Smem<T>& smem = *reinterpret_cast<Smem<T>*>(smem_bytes);
  const int group = threadIdx.x / GROUP_THREADS, thread_in_group = threadIdx.x % GROUP_THREADS, lane = threadIdx.x % WARP;
  const WorkTile work = make_work_tile(params);
  const int lane_row = thread_in_group / WARP * MMA_M + lane / QUAD;  // this lane holds rows lane_row and lane_row + 8
  const float scale_log2 = fa::scale_log2_of(params);
  const uint32_t head = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER;
  const int group_first_key = (rank * KEY_GROUPS + group) * GROUP_KEYS;

  // Load Q, then the keys of the first pass.
  copy_rows<BLOCK_M, THREADS>(smem.q, work.q_gmem, params.q_strides.row, work.first_query, params.seq_q, threadIdx.x);
  load_kv<T>(smem.group[group], work, params, group_first_key, thread_in_group);
  if (CLUSTER > 1) {
    if (threadIdx.x == 0) {
      fa::mbarrier_init(&smem.peer_partials_full, 1);
      fa::fence_mbarrier_init();
      fa::mbarrier_arrive_expect_tx(&smem.peer_partials_full, PEER_PARTIAL_BYTES);
    }
    __syncwarp();
    fa::barrier_cluster_arrive_relaxed();  // this block runs and its mbarrier is initialised, so that others may send to it
  }

  float o[D_TILES][4] = {};
  float m[2] = {-CUDART_INF_F, -CUDART_INF_F};  // unscaled row max at the last rescale
  float l[2] = {};                              // this lane's part of the running row sum

  for (int pass = 0; pass < work.passes; ++pass) {
    const int first_key = group_first_key + pass * PASS_KEYS;

    // Load K and V; the copies of the first pass are in flight.
    if (pass > 0) {
      sync_group<KV_EMPTY>(group);
      load_kv<T>(smem.group[group], work, params, first_key, thread_in_group);
    }
    fa::cp_async_wait_group<1>();
    fa::fence_proxy_async();
    sync_block<K_FULL>();

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
    fa::cp_async_wait_group<0>();
    fa::fence_proxy_async();
    sync_group<V_FULL>(group);
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

  // Merge the blocks.  Each block finishes BLOCK_PAIRS pairs of every lane (with CLUSTER = 2, one of the two rows), and sends the
  // other pairs to the blocks that finish them.  So all blocks send at the same time, and all write an equal part of the output.
  float2 final_o[BLOCK_PAIRS];
  float own_m[BLOCK_ROWS], own_l[BLOCK_ROWS];  // own_m is in log2
  if (CLUSTER > 1) fa::barrier_cluster_wait();  // all blocks run and have initialised their mbarriers
#pragma unroll
  for (int to_rank = 0; to_rank < CLUSTER; ++to_rank) {
    const int first_pair = to_rank * BLOCK_PAIRS, first_pair_row = first_pair / D_TILES_PER_GROUP;
    if (to_rank == rank) {
#pragma unroll
      for (int i = 0; i < BLOCK_PAIRS; ++i) final_o[i] = merged_o[first_pair + i];
#pragma unroll
      for (int i = 0; i < BLOCK_ROWS; ++i) {
        own_m[i] = sum[first_pair_row + i] > 0.0f ? m_log2[first_pair_row + i] : -CUDART_INF_F;
        own_l[i] = sum[first_pair_row + i];
      }
    } else {
      const uint32_t peer_barrier = fa::mapa(fa::smem_address(&smem.peer_partials_full), to_rank);
#pragma unroll
      for (int i = 0; i < BLOCK_PAIRS; i += 2) {
        const float2 a = merged_o[first_pair + i], b = merged_o[first_pair + i + 1];
        const uint32_t peer_address = fa::mapa(fa::smem_address(&smem.peer_partials[rank].o[i / 2][threadIdx.x]), to_rank);
        fa::st_async(peer_address, make_float4(a.x, a.y, b.x, b.y), peer_barrier);
      }
#pragma unroll
      for (int i = 0; i < BLOCK_ROWS; ++i) {
        const float sent_m = sum[first_pair_row + i] > 0.0f ? m_log2[first_pair_row + i] : -CUDART_INF_F;
        const uint32_t peer_address = fa::mapa(fa::smem_address(&smem.peer_partials[rank].m_and_l[i][threadIdx.x]), to_rank);
        fa::st_async(peer_address, make_float2(sent_m, sum[first_pair_row + i]), peer_barrier);
      }
    }
  }
  if (CLUSTER > 1 && OMIT_BARRIER != PEER_PARTIALS_FULL) {
    while (!fa::mbarrier_try_wait(&smem.peer_partials_full, 0)) {
    }
  }
#pragma unroll
  for (int i = 0; i < BLOCK_ROWS; ++i) {
    constexpr int PAIRS_PER_ROW = BLOCK_PAIRS / BLOCK_ROWS;
    float2 m_and_l[CLUSTER];
    float m_all = -CUDART_INF_F, sum_all = 0.0f, weight[CLUSTER];
#pragma unroll
    for (int from_rank = 0; from_rank < CLUSTER; ++from_rank) {
      m_and_l[from_rank] =
          from_rank == rank ? make_float2(own_m[i], own_l[i]) : smem.peer_partials[from_rank].m_and_l[i][threadIdx.x];
      m_all = fmaxf(m_all, m_and_l[from_rank].x);
    }
    const float m_finite = m_all == -CUDART_INF_F ? 0.0f : m_all;
#pragma unroll
    for (int from_rank = 0; from_rank < CLUSTER; ++from_rank) {
      weight[from_rank] = fa::ex2_approx_ftz(m_and_l[from_rank].x - m_finite);
      sum_all += m_and_l[from_rank].y * weight[from_rank];
    }

    // Normalise.  A row that sees no key is zero, and its log-sum-exp is -inf.
    const int row = rank * BLOCK_PAIRS / D_TILES_PER_GROUP + i;
    const int query = work.first_query + lane_row + row * 8;
    const float inverse_l = sum_all == 0.0f ? 0.0f : 1.0f / sum_all;
#pragma unroll
    for (int j = i * PAIRS_PER_ROW; j < (i + 1) * PAIRS_PER_ROW; j += 2) {
      float4 two_pairs = {};
#pragma unroll
      for (int from_rank = 0; from_rank < CLUSTER; ++from_rank) {
        const float4 own = make_float4(final_o[j].x, final_o[j].y, final_o[j + 1].x, final_o[j + 1].y);
        const float4 partial = from_rank == rank ? own : smem.peer_partials[from_rank].o[j / 2][threadIdx.x];
        two_pairs.x += partial.x * weight[from_rank];
        two_pairs.y += partial.y * weight[from_rank];
        two_pairs.z += partial.z * weight[from_rank];
        two_pairs.w += partial.w * weight[from_rank];
      }
      final_o[j] = make_float2(two_pairs.x * inverse_l, two_pairs.y * inverse_l);
      final_o[j + 1] = make_float2(two_pairs.z * inverse_l, two_pairs.w * inverse_l);
    }
    const bool is_first_of_row = rank * BLOCK_PAIRS % D_TILES_PER_GROUP == 0 && group == 0 && lane % QUAD == 0;
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
      const int pair = rank * BLOCK_PAIRS + i + (HAS_FOUR ? lane % QUAD : j);
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

template <typename T>
int launch(const FaForwardArgs* args, cudaStream_t stream) {
  fa::Params params;
  if (int status = fa::make_params(args, BLOCK_M, CLUSTER, &params)) return status;
  auto* kernel = &cluster_wgmma_kernel<T>;
  constexpr int smem_bytes = sizeof(Smem<T>);
  static fa::OncePerDevice allow_smem;
  if (int status = allow_smem([&] { return fa_allow_dynamic_smem(args, reinterpret_cast<const void*>(kernel), smem_bytes); })) {
    return status;
  }
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {CLUSTER, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(params.heads * CLUSTER, (params.seq_q + BLOCK_M - 1) / BLOCK_M, static_cast<unsigned>(args->batch));
  config.blockDim = dim3(THREADS);
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = CLUSTER > 1;
  return static_cast<int>(cudaLaunchKernelEx(&config, kernel, params));
}

FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t stream) {
  if (int status = fa_check_abi(args)) return status;
#define LAUNCH_IF(DTYPE, HEAD_DIM_) \
  if (args->dtype == FA_DTYPE_##DTYPE && args->head_dim == HEAD_DIM_) return launch<DTYPE>(args, stream);
  FA_FOR_EACH_INSTANTIATION(LAUNCH_IF)
#undef LAUNCH_IF
  return fa_refuse(args, "no instantiation for dtype %d with head_dim %lld", args->dtype, static_cast<long long>(args->head_dim));
}

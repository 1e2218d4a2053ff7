// cluster_tma: one thread asks for all of K and V; TMA brings them as wgmma reads them.
// step:    K and V by TMA in place of cp.async; CLUSTER_M = 2 blocks may share one copy of their keys by multicast
// because: in cluster_wgmma every thread issues 16 copies of K and V, and the address arithmetic of each
// expect:  0.4 to 0.8 us less than cluster_split at the mission shape; half the L2 traffic where two blocks share a copy
// diff:    large by what the host must describe and by multicast, which may be switched on
// tile:    64 queries x GROUP_KEYS keys per group and block; 93 KB of shared memory per block
// takes:   fp16 and bf16, D = 64, any S_q >= 1 and S_kv >= 0, both causal corners, grouped heads; rows contiguous and
//          16-byte aligned, with strides that TMA takes
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#include "fa/params.cuh"
#include "fa/hopper.cuh"
#include "fa/launch.h"
#include "fa/ptx.cuh"
#include "fa/swizzle.cuh"
#include "fa/warp.cuh"
#include "fa_forward.h"
#include "fa_instantiations.h"  // FA_FOR_EACH_INSTANTIATION: the manifest's dtypes and head_dims

using fp16 = __half;
using bf16 = __nv_bfloat16;

// Barriers have names, so that a test can leave one out and see that it is missed.
enum Barrier { NONE, Q_THERE, K_THERE, V_THERE, PV_LEFT, O_THERE, EXCHANGED };

constexpr int HEAD_DIM = 64;
constexpr int WARP = 32;
constexpr int QUAD = 4;  // lanes that share a row of a fragment
constexpr int MMA_M = 16, MMA_N = 8, MMA_K = 16;
constexpr int VECTOR = 8;  // 16-bit elements in 16 bytes
constexpr int BLOCK_M = 64;  // what wgmma takes
constexpr int N_TILES = GROUP_KEYS / MMA_N;
constexpr int D_TILES = HEAD_DIM / MMA_N;
constexpr int CLUSTER = CLUSTER_K * CLUSTER_M;            // blocks: CLUSTER_M with different queries, CLUSTER_K with different keys
constexpr int PASS_KEYS = CLUSTER_K * KEY_GROUPS * GROUP_KEYS;  // that a cluster holds at once
constexpr int BOX_KEYS = GROUP_KEYS / CLUSTER_M;          // of each group that a block loads for all that need them
constexpr int D_TILES_PER_GROUP = D_TILES / KEY_GROUPS;   // of the merged O
constexpr int ROWS = 2;                                   // of a lane: every eighth of its warp's
constexpr int PIECES = ROWS * D_TILES_PER_GROUP;          // of a lane after the merge: 2 neighbours in a row, row by row
constexpr int BLOCK_PIECES = PIECES / CLUSTER_K;          // of a lane after the merge over the cluster
constexpr int BLOCK_ROWS = ROWS / CLUSTER_K > 0 ? ROWS / CLUSTER_K : 1;  // that these lie in
constexpr int GROUP_THREADS = 128;
constexpr int THREADS = KEY_GROUPS * GROUP_THREADS;
constexpr int TILE_BYTES = GROUP_KEYS * HEAD_DIM * 2;
constexpr int EXCHANGE_BYTES = (CLUSTER_K - 1) * THREADS * (BLOCK_PIECES + BLOCK_ROWS) * 8;  // that a block gets from the others
constexpr float RESCALE_THRESHOLD_LOG2 = 8.0f;  // P may grow to 2^8 before O is rescaled: fp16 holds 2^15, and its precision is relative

static_assert(GROUP_KEYS == 64 || GROUP_KEYS == 128, "N of a wgmma");
static_assert(CLUSTER_M == 1 || CLUSTER_M == 2 || CLUSTER_M == 4, "blocks that share keys");
static_assert(BOX_KEYS % 8 == 0, "a box is whole times the 1024 bytes of a swizzle");
static_assert(D_TILES % KEY_GROUPS == 0, "every group merges as many columns of O");
static_assert(BLOCK_PIECES * CLUSTER_K == PIECES && BLOCK_PIECES % 2 == 0, "every block gets as many pieces, 16 bytes at a time");
static_assert(BLOCK_ROWS * CLUSTER_K == ROWS || BLOCK_PIECES * (CLUSTER_K / ROWS) == D_TILES_PER_GROUP, "rows are cut evenly");
static_assert(BLOCK_PIECES % QUAD == 0 || BLOCK_PIECES < QUAD, "whole or few");
static_assert(CLUSTER <= 8, "larger clusters are not portable");
static_assert(KEY_GROUPS <= 15, "a named barrier for every group");

// The merge: what a group found for the columns that another group will store, one float4 per fragment and lane.
using Partial = float4[KEY_GROUPS][D_TILES_PER_GROUP][GROUP_THREADS];

template <typename T>
struct Smem {
  alignas(1024) T q[BLOCK_M * HEAD_DIM];
  struct alignas(1024) Group {
    T v[GROUP_KEYS * HEAD_DIM];
    union {
      T k[GROUP_KEYS * HEAD_DIM];
      Partial o;
    };
  } group[KEY_GROUPS];
  float m[KEY_GROUPS][BLOCK_M];  // row max, before the scale
  float l[KEY_GROUPS][BLOCK_M];  // row sum
  struct Exchange {              // what the block of each rank sends: nobody but the others writes here
    float4 pieces[BLOCK_PIECES / 2][THREADS];
    float2 m_and_l[BLOCK_ROWS][THREADS];
  } exchange[CLUSTER_K];
  uint64_t k_full[KEY_GROUPS], v_full[KEY_GROUPS];  // barriers: a group's keys have come
  uint64_t exchanged;                               // barrier: all of the exchange has come
};

// What one block works on: BLOCK_M queries of one head.
struct Block {
  const uint4* q_gmem;  // [seq_q, HEAD_DIM / VECTOR], in steps of q_strides.row
  int kv_head;
  int first_query;
  int diagonal;  // query i of the block sees keys [0, min(seq_k, diagonal + i))
  int passes;    // over the keys that any query of the cluster sees
};

__device__ __forceinline__ Block find_block(const fa::Params& params, int m_rank) {
  const uint32_t head = blockIdx.x / CLUSTER, batch = blockIdx.z;
  const int cluster_query = blockIdx.y * (CLUSTER_M * BLOCK_M), first_query = cluster_query + m_rank * BLOCK_M;
  const int keys = max(0, min(params.seq_k, params.first_diagonal + cluster_query + CLUSTER_M * BLOCK_M - 1));
  return {
      params.q + (uint64_t(batch) * params.q_strides.batch + uint64_t(head) * params.q_strides.head),
      static_cast<int>(fa::kv_head_of(params, head)),
      first_query,
      params.first_diagonal + first_query,
      (keys + PASS_KEYS - 1) / PASS_KEYS,
  };
}

// Copy rows [first, first + ROWS) of [seq, HEAD_DIM], zeros past the end, by LOADERS threads of which this is number `loader`.
template <int ROWS, int LOADERS, typename T>
__device__ __forceinline__ void copy_rows(
    T* to_smem, const uint4* from_gmem, uint32_t row_step, uint32_t first, uint32_t seq, uint32_t loader) {
  const uint32_t first_row = loader / (HEAD_DIM / VECTOR), column = loader % (HEAD_DIM / VECTOR);
  from_gmem += uint64_t(first + first_row) * row_step + column;
#pragma unroll
  for (int i = 0; i < ROWS * HEAD_DIM / VECTOR; i += LOADERS) {
    const uint32_t row = first_row + i / (HEAD_DIM / VECTOR);
    if (ROWS * HEAD_DIM / VECTOR % LOADERS != 0 && row >= ROWS) break;
    fa::cp_async_16_or_zero(to_smem + fa::swizzle<HEAD_DIM>(row, column * VECTOR), from_gmem, first + row < seq);
    from_gmem += uint64_t(LOADERS / (HEAD_DIM / VECTOR)) * row_step;
  }
}

// Load a box of K or V: to every block of the cluster that has the same keys.
template <typename T>
__device__ __forceinline__ void load_box(
    T* to_smem, const CUtensorMap& map, int first_key, int kv_head, uint64_t* barrier_smem, int k_rank) {
  if constexpr (CLUSTER_M == 1) {
    fa::cp_async_bulk_tensor_4d(to_smem, map, 0, first_key, kv_head, blockIdx.z, barrier_smem);
  } else {
    constexpr uint16_t TWO = 1 | 1 << CLUSTER_K, SAME_KEYS = CLUSTER_M == 2 ? TWO : TWO | TWO << 2 * CLUSTER_K;
    fa::cp_async_bulk_tensor_4d_multicast(to_smem, map, 0, first_key, kv_head, blockIdx.z, barrier_smem, SAME_KEYS << k_rank);
  }
}

// Load K and V of one pass, this block's part of each group's keys.  One thread.
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

template <Barrier WHICH>
__device__ __forceinline__ void sync_block() {
  if (WHICH != OMIT_BARRIER) __syncthreads();
}

template <Barrier WHICH>
__device__ __forceinline__ void sync_group(int group) {
  if (WHICH != OMIT_BARRIER) fa::barrier_sync<GROUP_THREADS>(1 + group);
}

template <typename T>
__device__ void expect_kv(Smem<T>& smem) {
#pragma unroll
  for (int g = 0; g < KEY_GROUPS; ++g) {
    fa::mbarrier_arrive_expect_tx(&smem.k_full[g], TILE_BYTES);
    fa::mbarrier_arrive_expect_tx(&smem.v_full[g], TILE_BYTES);
  }
}

template <Barrier WHICH>
__device__ __forceinline__ void wait(uint64_t* barrier_smem, uint32_t parity) {
  if (WHICH == OMIT_BARRIER) return;
  while (!fa::mbarrier_try_wait(barrier_smem, parity)) {
  }
}

template <typename T>
__global__ void __launch_bounds__(THREADS) cluster_tma_kernel(
    const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map, const fa::Params params) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  Smem<T>& smem = *reinterpret_cast<Smem<T>*>(smem_bytes);
  const int group = threadIdx.x / GROUP_THREADS, loader = threadIdx.x % GROUP_THREADS, lane = threadIdx.x % WARP;
  const int k_rank = blockIdx.x % CLUSTER_K, m_rank = blockIdx.x % CLUSTER / CLUSTER_K;
  const Block block = find_block(params, m_rank);
  const int first_row = loader / WARP * MMA_M + lane / QUAD;  // this lane's rows of S, P and O: this one and the eighth after it
  const float scale_log2 = fa::scale_log2_of(params);
  const uint32_t head = blockIdx.x / CLUSTER;

  // Load Q, and the first keys when the barriers of all blocks are there to count them.
  copy_rows<BLOCK_M, THREADS>(smem.q, block.q_gmem, params.q_strides.row, block.first_query, params.seq_q, threadIdx.x);
  fa::cp_async_commit_group();
  if (threadIdx.x == 0) {
    fa::prefetch_tensormap(k_map);
    fa::prefetch_tensormap(v_map);
    for (int g = 0; g < KEY_GROUPS; ++g) {
      fa::mbarrier_init(&smem.k_full[g], 1);
      fa::mbarrier_init(&smem.v_full[g], 1);
    }
    fa::mbarrier_init(&smem.exchanged, 1);
    fa::fence_mbarrier_init();
    expect_kv(smem);
    fa::mbarrier_arrive_expect_tx(&smem.exchanged, EXCHANGE_BYTES);
  }
  __syncwarp();
  if (CLUSTER > 1) fa::barrier_cluster_arrive_relaxed();
  if (CLUSTER_M > 1) fa::barrier_cluster_wait();
  if (threadIdx.x == 0 && block.passes > 0) load_kv(smem, k_map, v_map, block.kv_head, k_rank, m_rank, 0);
  fa::cp_async_wait_group<0>();
  fa::fence_proxy_async();
  sync_block<Q_THERE>();  // Q and the barriers are there for everyone

  float o[D_TILES][4] = {};
  float m[2] = {-CUDART_INF_F, -CUDART_INF_F};  // row max that P is relative to, before the scale
  float l[2] = {};                              // this lane's part of the running row sum

  for (int pass = 0; pass < block.passes; ++pass) {
    const int first_key = ((pass * CLUSTER_K + k_rank) * KEY_GROUPS + group) * GROUP_KEYS;

    // Load K and V.
    if (pass > 0) {
      if (CLUSTER_M > 1) {
        fa::barrier_cluster_arrive();
        fa::barrier_cluster_wait();  // every block has left the last pass
      } else {
        __syncthreads();
      }
      if (threadIdx.x == 0) {
        expect_kv(smem);  // now: every group has seen its last phase end, and an arrival too early would count for that one
        load_kv(smem, k_map, v_map, block.kv_head, k_rank, m_rank, pass);
      }
      __syncwarp();
    }
    wait<K_THERE>(&smem.k_full[group], pass % 2);

    // S = Q K^T
    float s[N_TILES][4];
    const uint64_t q = fa::wgmma_descriptor(smem.q), k = fa::wgmma_descriptor(smem.group[group].k);
    fa::wgmma_fence();
#pragma unroll
    for (int d = 0; d < HEAD_DIM * sizeof(T) >> 4; d += MMA_K * sizeof(T) >> 4) fa::wgmma_m64k16<T, 0>(s, q + d, k + d, d > 0);
    fa::wgmma_commit_group();
    fa::wgmma_wait_group<0>();
    if (fa::negate_q(params)) {  // a negative scale turns the scores around
#pragma unroll
      for (int n = 0; n < N_TILES; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] = -s[n][i];
      }
    }

    // mask; the tile's first keys are seen by every query of the block
    if (first_key + GROUP_KEYS > min(params.seq_k, block.diagonal)) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int limit = min(params.seq_k, block.diagonal + first_row + i / 2 * 8) - first_key;
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) {
          if (n * MMA_N + lane % QUAD * 2 + i % 2 >= limit) s[n][i] = -CUDART_INF_F;
        }
      }
    }

    // row max
    float m_new[2];
    bool rises = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      m_new[r] = m[r];
#pragma unroll
      for (int n = 0; n < N_TILES; ++n) m_new[r] = fmaxf(m_new[r], fmaxf(s[n][2 * r], s[n][2 * r + 1]));
      m_new[r] = fa::max_of_quad(m_new[r]);
      rises |= (m_new[r] - m[r]) * scale_log2 > RESCALE_THRESHOLD_LOG2;  // from -inf it does, -inf itself gives NaN: it does not
    }

    // rescale, where a row of the warp needs it
    if (__any_sync(0xffffffffu, rises)) {
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

    float m_log2[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) m_log2[r] = m[r] == -CUDART_INF_F ? 0.0f : m[r] * scale_log2;  // no key seen yet: 2^(-inf - 0) = 0
    wait<V_THERE>(&smem.v_full[group], pass % 2);
    uint32_t p[N_TILES / 2][4];
#pragma unroll
    for (int n = 0; n < N_TILES; n += 2) {
      // P = exp2(S - m), row sum; two neighbouring fragments of S are one of P
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float(&pair)[4] = s[n + i / 2];
        const int r = i % 2;
        pair[2 * r] = fa::ex2_approx_ftz(pair[2 * r] * scale_log2 - m_log2[r]);
        pair[2 * r + 1] = fa::ex2_approx_ftz(pair[2 * r + 1] * scale_log2 - m_log2[r]);
        l[r] += pair[2 * r] + pair[2 * r + 1];
        p[n / 2][i] = fa::cvt_rn_x2<T>(pair[2 * r], pair[2 * r + 1]);
      }

      // O += P V, while the next P is being computed
      fa::wgmma_fence();
      fa::wgmma_m64k16<T, 1>(o, p[n / 2], fa::wgmma_descriptor(smem.group[group].v + n * MMA_N * HEAD_DIM), true);
      fa::wgmma_commit_group();
    }
    fa::wgmma_wait_group<0>();
  }

  // Merge: each group gets some columns of O from all others; what it gives them goes where its keys were.
  sync_group<PV_LEFT>(group);  // the group has left its keys
  Partial& given = smem.group[group].o;
  float4 kept[D_TILES_PER_GROUP];
#pragma unroll
  for (int d = 0; d < D_TILES; ++d) {
    const float4 part = make_float4(o[d][0], o[d][1], o[d][2], o[d][3]);
    if (d / D_TILES_PER_GROUP == group) {
      kept[d % D_TILES_PER_GROUP] = part;
    } else {
      given[d / D_TILES_PER_GROUP][d % D_TILES_PER_GROUP][loader] = part;
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    l[r] = fa::sum_of_quad(l[r]);
    if (lane % QUAD != 0) continue;
    smem.m[group][first_row + r * 8] = m[r];
    smem.l[group][first_row + r * 8] = l[r];
  }
  sync_block<O_THERE>();  // every group's O, m and l are there for everyone

  float2 piece[PIECES];
  float m_log2[ROWS], sum[ROWS];
  float weight[KEY_GROUPS][2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float m_all = -CUDART_INF_F;
#pragma unroll
    for (int g = 0; g < KEY_GROUPS; ++g) m_all = fmaxf(m_all, smem.m[g][first_row + r * 8]);
    m_log2[r] = m_all == -CUDART_INF_F ? 0.0f : m_all * scale_log2;
    sum[r] = 0.0f;
#pragma unroll
    for (int g = 0; g < KEY_GROUPS; ++g) {
      weight[g][r] = fa::ex2_approx_ftz(smem.m[g][first_row + r * 8] * scale_log2 - m_log2[r]);
      sum[r] += smem.l[g][first_row + r * 8] * weight[g][r];
    }
  }
#pragma unroll
  for (int d = 0; d < D_TILES_PER_GROUP; ++d) {
    float2 merged[2] = {};
#pragma unroll
    for (int g = 0; g < KEY_GROUPS; ++g) {
      const float4 part = g == group ? kept[d] : smem.group[g].o[group][d][loader];
      merged[0].x += part.x * weight[g][0];
      merged[0].y += part.y * weight[g][0];
      merged[1].x += part.z * weight[g][1];
      merged[1].y += part.w * weight[g][1];
    }
    piece[d] = merged[0];
    piece[D_TILES_PER_GROUP + d] = merged[1];
  }

  // Merge over the cluster: each block gets some pieces from all others, by rows and then by columns.
  if (CLUSTER_M == 1 && CLUSTER_K > 1) fa::barrier_cluster_wait();
  float2 mine[BLOCK_PIECES];
  float m_mine[BLOCK_ROWS], l_mine[BLOCK_ROWS];  // m in log2
#pragma unroll
  for (int to = 0; to < CLUSTER_K; ++to) {
    const int first_piece = to * BLOCK_PIECES, first_row_of = first_piece / D_TILES_PER_GROUP;
    if (to == k_rank) {
#pragma unroll
      for (int i = 0; i < BLOCK_PIECES; ++i) mine[i] = piece[first_piece + i];
#pragma unroll
      for (int i = 0; i < BLOCK_ROWS; ++i) {
        m_mine[i] = sum[first_row_of + i] > 0.0f ? m_log2[first_row_of + i] : -CUDART_INF_F;
        l_mine[i] = sum[first_row_of + i];
      }
    } else {
      const uint32_t barrier = fa::mapa(fa::smem_address(&smem.exchanged), m_rank * CLUSTER_K + to);
#pragma unroll
      for (int i = 0; i < BLOCK_PIECES; i += 2) {
        const float2 a = piece[first_piece + i], b = piece[first_piece + i + 1];
        float4* here = &smem.exchange[k_rank].pieces[i / 2][threadIdx.x];
        const uint32_t there = fa::mapa(fa::smem_address(here), m_rank * CLUSTER_K + to);
        fa::st_async(there, make_float4(a.x, a.y, b.x, b.y), barrier);
      }
#pragma unroll
      for (int i = 0; i < BLOCK_ROWS; ++i) {
        const float m_sent = sum[first_row_of + i] > 0.0f ? m_log2[first_row_of + i] : -CUDART_INF_F;
        const uint32_t there = fa::mapa(fa::smem_address(&smem.exchange[k_rank].m_and_l[i][threadIdx.x]), m_rank * CLUSTER_K + to);
        fa::st_async(there, make_float2(m_sent, sum[first_row_of + i]), barrier);
      }
    }
  }
  if (CLUSTER_K > 1) {
    wait<EXCHANGED>(&smem.exchanged, 0);
  }
#pragma unroll
  for (int i = 0; i < BLOCK_ROWS; ++i) {
    constexpr int PIECES_PER_ROW = BLOCK_PIECES / BLOCK_ROWS;
    float2 m_and_l[CLUSTER_K];
    float m_all = -CUDART_INF_F, sum_all = 0.0f, weight[CLUSTER_K];
#pragma unroll
    for (int from = 0; from < CLUSTER_K; ++from) {
      m_and_l[from] = from == k_rank ? make_float2(m_mine[i], l_mine[i]) : smem.exchange[from].m_and_l[i][threadIdx.x];
      m_all = fmaxf(m_all, m_and_l[from].x);
    }
    const float m_finite = m_all == -CUDART_INF_F ? 0.0f : m_all;
#pragma unroll
    for (int from = 0; from < CLUSTER_K; ++from) {
      weight[from] = fa::ex2_approx_ftz(m_and_l[from].x - m_finite);
      sum_all += m_and_l[from].y * weight[from];
    }

    // Normalise; a row that sees no key is zero and its log-sum-exp is -inf.
    const int row = k_rank * BLOCK_PIECES / D_TILES_PER_GROUP + i;
    const int query = block.first_query + first_row + row * 8;
    const float inverse_l = sum_all > 0.0f ? 1.0f / sum_all : 0.0f;
#pragma unroll
    for (int j = i * PIECES_PER_ROW; j < (i + 1) * PIECES_PER_ROW; j += 2) {
      float4 merged = {};
#pragma unroll
      for (int from = 0; from < CLUSTER_K; ++from) {
        const float4 own = make_float4(mine[j].x, mine[j].y, mine[j + 1].x, mine[j + 1].y);
        const float4 part = from == k_rank ? own : smem.exchange[from].pieces[j / 2][threadIdx.x];
        merged.x += part.x * weight[from];
        merged.y += part.y * weight[from];
        merged.z += part.z * weight[from];
        merged.w += part.w * weight[from];
      }
      mine[j] = make_float2(merged.x * inverse_l, merged.y * inverse_l);
      mine[j + 1] = make_float2(merged.z * inverse_l, merged.w * inverse_l);
    }
    const bool is_first_of_row = k_rank * BLOCK_PIECES % D_TILES_PER_GROUP == 0 && group == 0 && lane % QUAD == 0;
    if (params.lse != nullptr && is_first_of_row && query < params.seq_q) {
      float* lse_gmem = params.lse + (uint64_t(blockIdx.z) * params.heads + head) * params.seq_q;
      lse_gmem[query] = sum_all > 0.0f ? (m_finite + log2f(sum_all)) * CUDART_LN2_F : -CUDART_INF_F;
    }
  }

  // Store: the lanes of a quad trade pieces, so that each has 16 bytes in a row; where there are too few, 4 bytes each.
  uint4* out_gmem = params.out + (uint64_t(blockIdx.z) * params.out_strides.batch + uint64_t(head) * params.out_strides.head);
#pragma unroll
  for (int i = 0; i < BLOCK_PIECES; i += QUAD) {
    uint32_t rounded[QUAD];
#pragma unroll
    for (int j = 0; j < QUAD; ++j) rounded[j] = i + j < BLOCK_PIECES ? fa::cvt_rn_x2<T>(mine[i + j].x, mine[i + j].y) : 0;
    constexpr bool IS_WHOLE = BLOCK_PIECES % QUAD == 0;
    if (IS_WHOLE) fa::transpose_quad(rounded, lane);
#pragma unroll
    for (int j = 0; j < (IS_WHOLE ? 1 : BLOCK_PIECES % QUAD); ++j) {
      const int stored = k_rank * BLOCK_PIECES + i + (IS_WHOLE ? lane % QUAD : j);
      const int query = block.first_query + first_row + stored / D_TILES_PER_GROUP * 8;
      if (query >= params.seq_q) continue;
      const uint32_t column = group * D_TILES_PER_GROUP + stored % D_TILES_PER_GROUP;
      uint4* to_gmem = out_gmem + (uint64_t(query) * params.out_strides.row + column);
      if (IS_WHOLE) {
        *to_gmem = make_uint4(rounded[0], rounded[1], rounded[2], rounded[3]);
      } else {
        reinterpret_cast<uint32_t*>(to_gmem)[lane % QUAD] = rounded[j];
      }
    }
  }
}

// A tensor [batch, kv_heads, seq_k, HEAD_DIM] for TMA, BOX_KEYS rows at a time; 0, or why not.
int describe(CUtensorMap* map, CUtensorMapDataType dtype, const FaForwardArgs* args, const void* data, const FaStrides& stride) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  if (encode == nullptr) return fa_refuse(args, "the driver has no cuTensorMapEncodeTiled");
  const cuuint64_t sizes[4] = {HEAD_DIM, static_cast<cuuint64_t>(args->seq_k), static_cast<cuuint64_t>(args->kv_heads),
                               static_cast<cuuint64_t>(args->batch)};
  const cuuint64_t bytes[3] = {static_cast<cuuint64_t>(stride.seq) * 2, static_cast<cuuint64_t>(stride.head) * 2,
                               static_cast<cuuint64_t>(stride.batch) * 2};
  const cuuint32_t box[4] = {HEAD_DIM, BOX_KEYS, 1, 1}, steps[4] = {1, 1, 1, 1};
  const CUresult status = encode(map, dtype, 4, const_cast<void*>(data), sizes, bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                 CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status == CUDA_SUCCESS) return FA_OK;
  return fa_refuse(args, "TMA does not take strides of %lld, %lld and %lld elements (batch, head, row): CUresult %d",
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
    if (int status = describe(&k_map, dtype, args, args->k, args->k_stride)) return status;
    if (int status = describe(&v_map, dtype, args, args->v, args->v_stride)) return status;
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

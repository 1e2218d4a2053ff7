// cluster_split: the keys are split over the blocks of a cluster too; what they found is merged through their shared memory.
// step:    CLUSTER blocks share the queries and split the keys, which all are in flight at once; one more merge at the end
// because: an SM takes 64 bytes per cycle, and in split_warps each loads all keys of a head: 132 KB
// expect:  below 5 us at the mission shape: 128 SMs, one tile for each group of warps, no tile waits for another
// diff:    large by the exchange: three quarters of it are the second merge
// tile:    BLOCK_M queries x BLOCK_N keys per group and block, WARP_ROWS queries per warp; 93 KB of shared memory per block
// takes:   fp16 and bf16, D = 64, any S_q >= 1 and S_kv >= 0, both causal corners, grouped heads; rows contiguous and
//          16-byte aligned
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#include "fa/params.cuh"
#include "fa/launch.h"
#include "fa/ptx.cuh"
#include "fa/swizzle.cuh"
#include "fa/warp.cuh"
#include "fa_forward.h"
#include "fa_instantiations.h"  // FA_FOR_EACH_INSTANTIATION: the manifest's dtypes and head_dims

using fp16 = __half;
using bf16 = __nv_bfloat16;

// Barriers have names, so that a test can leave one out and see that it is missed.
enum Barrier { NONE, Q_THERE, K_THERE, K_LEFT, V_THERE, V_LEFT, RING_LEFT, O_THERE, EXCHANGED };

constexpr int HEAD_DIM = 64;
constexpr int WARP = 32;
constexpr int QUAD = 4;  // lanes that share a row of a fragment
constexpr int MMA_M = 16, MMA_N = 8, MMA_K = 16;
constexpr int VECTOR = 8;  // 16-bit elements in 16 bytes
constexpr int M_TILES = WARP_ROWS / MMA_M;
constexpr int N_TILES = BLOCK_N / MMA_N;
constexpr int D_TILES = HEAD_DIM / MMA_N;
constexpr int D_TILES_PER_GROUP = D_TILES / KEY_GROUPS;  // of the merged O
constexpr int ROWS = 2 * M_TILES;                        // of a lane: every eighth of its warp's
constexpr int PIECES = ROWS * D_TILES_PER_GROUP;         // of a lane after the merge: 2 neighbours in a row, row by row
constexpr int BLOCK_PIECES = PIECES / CLUSTER;           // of a lane after the merge over the cluster
constexpr int BLOCK_ROWS = ROWS / CLUSTER > 0 ? ROWS / CLUSTER : 1;  // that these lie in
constexpr int GROUP_THREADS = BLOCK_M / WARP_ROWS * WARP;
constexpr int THREADS = KEY_GROUPS * GROUP_THREADS;
constexpr int EXCHANGE_BYTES = (CLUSTER - 1) * THREADS * (BLOCK_PIECES + BLOCK_ROWS) * 8;  // that a block gets from the others
constexpr float RESCALE_THRESHOLD_LOG2 = 8.0f;  // P may grow to 2^8 before O is rescaled: fp16 holds 2^15, and its precision is relative

static_assert(BLOCK_M % WARP_ROWS == 0 && WARP_ROWS % MMA_M == 0, "every warp owns whole fragments of queries");
static_assert(BLOCK_N % MMA_K == 0, "ldmatrix takes 16 keys at a time");
static_assert(D_TILES % KEY_GROUPS == 0, "every group merges as many columns of O");
static_assert(BLOCK_PIECES * CLUSTER == PIECES && BLOCK_PIECES % 2 == 0, "every block gets as many pieces, 16 bytes at a time");
static_assert(BLOCK_ROWS * CLUSTER == ROWS || BLOCK_PIECES * (CLUSTER / ROWS) == D_TILES_PER_GROUP, "rows are cut evenly");
static_assert(BLOCK_PIECES % QUAD == 0 || BLOCK_PIECES < QUAD, "whole or few");
static_assert(CLUSTER <= 8, "larger clusters are not portable");
static_assert(KEY_GROUPS <= 15, "a named barrier for every group");

// The merge: what a group found for the columns that another group will store, one float4 per fragment and lane.
using Partial = float4[KEY_GROUPS][M_TILES][D_TILES_PER_GROUP][GROUP_THREADS];

template <typename T>
struct Ring {
  T k[STAGES][BLOCK_N * HEAD_DIM];
  T v[STAGES][BLOCK_N * HEAD_DIM];
};

template <typename T>
struct Smem {
  alignas(128) T q[BLOCK_M * HEAD_DIM];
  union {
    Ring<T> ring;
    Partial o;
  } group[KEY_GROUPS];
  float m[KEY_GROUPS][BLOCK_M];  // row max, before the scale
  float l[KEY_GROUPS][BLOCK_M];  // row sum
  struct Exchange {              // what the block of each rank sends: nobody but the others writes here
    float4 pieces[BLOCK_PIECES / 2][THREADS];
    float2 m_and_l[BLOCK_ROWS][THREADS];
  } exchange[CLUSTER];
  uint64_t exchanged;            // barrier: all of it has come
};

// What one block works on: BLOCK_M queries of one head.
struct Block {
  const uint4* q_gmem;  // [seq_q, HEAD_DIM / VECTOR], in steps of q_strides.row
  const uint4* k_gmem;  // [seq_k, HEAD_DIM / VECTOR]
  const uint4* v_gmem;  // [seq_k, HEAD_DIM / VECTOR]
  int first_query;
  int diagonal;  // query i of the block sees keys [0, min(seq_k, diagonal + i))
  int tiles;     // of keys that any of these queries sees
};

__device__ __forceinline__ Block find_block(const fa::Params& params) {
  const uint32_t head = blockIdx.x / CLUSTER, batch = blockIdx.z, kv_head = fa::kv_head_of(params, head);
  const int first_query = blockIdx.y * BLOCK_M;
  const int diagonal = params.first_diagonal + first_query;
  const int keys = max(0, min(params.seq_k, diagonal + BLOCK_M - 1));
  return {
      params.q + (uint64_t(batch) * params.q_strides.batch + uint64_t(head) * params.q_strides.head),
      params.k + (uint64_t(batch) * params.k_strides.batch + uint64_t(kv_head) * params.k_strides.head),
      params.v + (uint64_t(batch) * params.v_strides.batch + uint64_t(kv_head) * params.v_strides.head),
      first_query,
      diagonal,
      (keys + BLOCK_N - 1) / BLOCK_N,
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

template <Barrier WHICH>
__device__ __forceinline__ void sync_block() {
  if (WHICH != OMIT_BARRIER) __syncthreads();
}

template <Barrier WHICH>
__device__ __forceinline__ void sync_group(int group) {
  if (WHICH != OMIT_BARRIER) fa::barrier_sync<GROUP_THREADS>(1 + group);
}

// Load K or V of a group's tile, a cp.async group; past the last tile it is empty.
template <typename T>
__device__ __forceinline__ void load_tile(
    T* to_smem, const uint4* from_gmem, uint32_t row_step, int tile, int tiles, int seq_k, uint32_t loader) {
  if (tile < tiles) copy_rows<BLOCK_N, GROUP_THREADS>(to_smem, from_gmem, row_step, tile * BLOCK_N, seq_k, loader);
  fa::cp_async_commit_group();
}

template <typename T>
__global__ void __launch_bounds__(THREADS) cluster_split_kernel(const fa::Params params) {
  extern __shared__ __align__(128) unsigned char smem_bytes[];
  Smem<T>& smem = *reinterpret_cast<Smem<T>*>(smem_bytes);
  const int group = threadIdx.x / GROUP_THREADS, loader = threadIdx.x % GROUP_THREADS, lane = threadIdx.x % WARP;
  const Block block = find_block(params);
  Ring<T>& ring = smem.group[group].ring;
  const int warp_row = loader / WARP * WARP_ROWS;  // the first of this warp's rows
  const int first_row = warp_row + lane / QUAD;    // the first of this lane's rows of S, P and O: every eighth
  const float scale_log2 = fa::scale_log2_of(params);
  const uint32_t head = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER;
  const int first_tile = rank * KEY_GROUPS + group;

  // Load Q, and the first tiles behind it.
  copy_rows<BLOCK_M, THREADS>(smem.q, block.q_gmem, params.q_strides.row, block.first_query, params.seq_q, threadIdx.x);
  fa::cp_async_commit_group();
#pragma unroll
  for (int stage = 0; stage < STAGES; ++stage) {
    const int tile = first_tile + stage * CLUSTER * KEY_GROUPS;
    load_tile(ring.k[stage], block.k_gmem, params.k_strides.row, tile, block.tiles, params.seq_k, loader);
    load_tile(ring.v[stage], block.v_gmem, params.v_strides.row, tile, block.tiles, params.seq_k, loader);
  }
  if (CLUSTER > 1) {
    if (threadIdx.x == 0) {
      fa::mbarrier_init(&smem.exchanged, 1);
      fa::fence_mbarrier_init();
      fa::mbarrier_arrive_expect_tx(&smem.exchanged, EXCHANGE_BYTES);
    }
    __syncwarp();
    fa::barrier_cluster_arrive_relaxed();  // this block runs and has its barrier: the others may send when all have come this far
  }

  fa::cp_async_wait_group<2 * STAGES>();
  sync_block<Q_THERE>();  // Q is there for everyone
  uint32_t q[M_TILES][HEAD_DIM / MMA_K][4];
#pragma unroll
  for (int t = 0; t < M_TILES; ++t) {
#pragma unroll
    for (int d = 0; d < HEAD_DIM; d += MMA_K) {
      uint32_t(&q_of_d)[4] = q[t][d / MMA_K];
      const int row = warp_row + t * MMA_M + lane % 16;
      fa::ldmatrix_x4(q_of_d, fa::smem_address(smem.q + fa::swizzle<HEAD_DIM>(row, d + lane / 16 * 8)));
      for (uint32_t& each : q_of_d) each ^= fa::q_sign_bits(params);
    }
  }

  float o[M_TILES][D_TILES][4] = {};
  float m[M_TILES][2];       // row max that P is relative to, before the scale
  float l[M_TILES][2] = {};  // this lane's part of the running row sum
  for (auto& each : m) each[0] = each[1] = -CUDART_INF_F;

  for (int i = 0, tile = first_tile; tile < block.tiles; ++i, tile += CLUSTER * KEY_GROUPS) {
    const int first_key = tile * BLOCK_N;
    T* k_smem = ring.k[i % STAGES];
    T* v_smem = ring.v[i % STAGES];
    const int next_tile = tile + STAGES * CLUSTER * KEY_GROUPS;  // that comes to this one's place

    // Load K and V: this tile's are on their way.
    fa::cp_async_wait_group<2 * STAGES - 1>();
    sync_group<K_THERE>(group);  // K is there for the group

    // S = Q K^T
    float s[M_TILES][N_TILES][4] = {};
#pragma unroll
    for (int d = 0; d < HEAD_DIM; d += MMA_K) {
#pragma unroll
      for (int n = 0; n < N_TILES; n += 2) {
        uint32_t k[4];  // of 16 keys: two for the first mma, two for the second
        const int key = n * MMA_N + lane / 16 * 8 + lane % 8;
        fa::ldmatrix_x4(k, fa::smem_address(k_smem + fa::swizzle<HEAD_DIM>(key, d + lane / 8 % 2 * 8)));
#pragma unroll
        for (int t = 0; t < M_TILES; ++t) {
          fa::mma_m16n8k16<T>(s[t][n], q[t][d / MMA_K], k[0], k[1]);
          fa::mma_m16n8k16<T>(s[t][n + 1], q[t][d / MMA_K], k[2], k[3]);
        }
      }
    }

    // Load the next K.
    if (next_tile < block.tiles) sync_group<K_LEFT>(group);  // the group has left K
    load_tile(k_smem, block.k_gmem, params.k_strides.row, next_tile, block.tiles, params.seq_k, loader);

    // mask; the tile's first keys are seen by every query of the block
    if (first_key + BLOCK_N > min(params.seq_k, block.diagonal)) {
#pragma unroll
      for (int t = 0; t < M_TILES; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int limit = min(params.seq_k, block.diagonal + first_row + t * MMA_M + i / 2 * 8) - first_key;
#pragma unroll
          for (int n = 0; n < N_TILES; ++n) {
            if (n * MMA_N + lane % QUAD * 2 + i % 2 >= limit) s[t][n][i] = -CUDART_INF_F;
          }
        }
      }
    }

    // row max
    float m_new[M_TILES][2];
    bool rises = false;
#pragma unroll
    for (int t = 0; t < M_TILES; ++t) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        m_new[t][r] = m[t][r];
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) m_new[t][r] = fmaxf(m_new[t][r], fmaxf(s[t][n][2 * r], s[t][n][2 * r + 1]));
        m_new[t][r] = fa::max_of_quad(m_new[t][r]);
        rises |= (m_new[t][r] - m[t][r]) * scale_log2 > RESCALE_THRESHOLD_LOG2;  // from -inf it does, -inf itself gives NaN: it does not
      }
    }

    // rescale, where a row of the warp needs it
    if (__any_sync(0xffffffffu, rises)) {
#pragma unroll
      for (int t = 0; t < M_TILES; ++t) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float m_log2 = m_new[t][r] == -CUDART_INF_F ? 0.0f : m_new[t][r] * scale_log2;
          const float rescale = fa::ex2_approx_ftz(m[t][r] * scale_log2 - m_log2);
          m[t][r] = m_new[t][r];
          l[t][r] *= rescale;
#pragma unroll
          for (int d = 0; d < D_TILES; ++d) {
            o[t][d][2 * r] *= rescale;
            o[t][d][2 * r + 1] *= rescale;
          }
        }
      }
    }

    float m_log2[M_TILES][2];
#pragma unroll
    for (int t = 0; t < M_TILES; ++t) {
#pragma unroll
      for (int r = 0; r < 2; ++r) m_log2[t][r] = m[t][r] == -CUDART_INF_F ? 0.0f : m[t][r] * scale_log2;  // 2^(-inf - 0) = 0
    }
    fa::cp_async_wait_group<2 * STAGES - 1>();
    sync_group<V_THERE>(group);  // V is there for the group
#pragma unroll
    for (int n = 0; n < N_TILES; n += 2) {
      // P = exp2(S - m), row sum; two neighbouring fragments of S are one of P
      uint32_t p[M_TILES][4];
#pragma unroll
      for (int t = 0; t < M_TILES; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int r = i % 2;
          const float p0 = fa::ex2_approx_ftz(s[t][n + i / 2][2 * r] * scale_log2 - m_log2[t][r]);
          const float p1 = fa::ex2_approx_ftz(s[t][n + i / 2][2 * r + 1] * scale_log2 - m_log2[t][r]);
          l[t][r] += p0 + p1;
          p[t][i] = fa::cvt_rn_x2<T>(p0, p1);
        }
      }

      // O += P V, while the next P is being computed
#pragma unroll
      for (int d = 0; d < D_TILES; d += 2) {
        uint32_t v[4];  // of 16 dimensions: two for the first mma, two for the second
        const int key = n * MMA_N + lane % 16;
        fa::ldmatrix_x4_trans(v, fa::smem_address(v_smem + fa::swizzle<HEAD_DIM>(key, d * MMA_N + lane / 16 * 8)));
#pragma unroll
        for (int t = 0; t < M_TILES; ++t) {
          fa::mma_m16n8k16<T>(o[t][d], p[t], v[0], v[1]);
          fa::mma_m16n8k16<T>(o[t][d + 1], p[t], v[2], v[3]);
        }
      }
    }

    // Load the next V.
    if (next_tile < block.tiles) sync_group<V_LEFT>(group);  // the group has left V
    load_tile(v_smem, block.v_gmem, params.v_strides.row, next_tile, block.tiles, params.seq_k, loader);
  }

  // Merge: each group gets some columns of O from all others; what it gives them goes where its ring was.
  sync_group<RING_LEFT>(group);  // the group has left its ring
  Partial& given = smem.group[group].o;
  float4 kept[M_TILES][D_TILES_PER_GROUP];
#pragma unroll
  for (int t = 0; t < M_TILES; ++t) {
#pragma unroll
    for (int d = 0; d < D_TILES; ++d) {
      const float4 part = make_float4(o[t][d][0], o[t][d][1], o[t][d][2], o[t][d][3]);
      if (d / D_TILES_PER_GROUP == group) {
        kept[t][d % D_TILES_PER_GROUP] = part;
      } else {
        given[d / D_TILES_PER_GROUP][t][d % D_TILES_PER_GROUP][loader] = part;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      l[t][r] = fa::sum_of_quad(l[t][r]);
      if (lane % QUAD != 0) continue;
      smem.m[group][first_row + (2 * t + r) * 8] = m[t][r];
      smem.l[group][first_row + (2 * t + r) * 8] = l[t][r];
    }
  }
  sync_block<O_THERE>();  // every group's O, m and l are there for everyone

  float2 piece[PIECES];
  float m_log2[ROWS], sum[ROWS];
#pragma unroll
  for (int t = 0; t < M_TILES; ++t) {
    float weight[KEY_GROUPS][2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = 2 * t + r;
      float m_all = -CUDART_INF_F;
#pragma unroll
      for (int g = 0; g < KEY_GROUPS; ++g) m_all = fmaxf(m_all, smem.m[g][first_row + row * 8]);
      m_log2[row] = m_all == -CUDART_INF_F ? 0.0f : m_all * scale_log2;
      sum[row] = 0.0f;
#pragma unroll
      for (int g = 0; g < KEY_GROUPS; ++g) {
        weight[g][r] = fa::ex2_approx_ftz(smem.m[g][first_row + row * 8] * scale_log2 - m_log2[row]);
        sum[row] += smem.l[g][first_row + row * 8] * weight[g][r];
      }
    }
#pragma unroll
    for (int d = 0; d < D_TILES_PER_GROUP; ++d) {
      float2 merged[2] = {};
#pragma unroll
      for (int g = 0; g < KEY_GROUPS; ++g) {
        const float4 part = g == group ? kept[t][d] : smem.group[g].o[group][t][d][loader];
        merged[0].x += part.x * weight[g][0];
        merged[0].y += part.y * weight[g][0];
        merged[1].x += part.z * weight[g][1];
        merged[1].y += part.w * weight[g][1];
      }
      piece[(2 * t + 0) * D_TILES_PER_GROUP + d] = merged[0];
      piece[(2 * t + 1) * D_TILES_PER_GROUP + d] = merged[1];
    }
  }

  // Merge over the cluster: each block gets some pieces from all others, by rows and then by columns.
  float2 mine[BLOCK_PIECES];
  float m_mine[BLOCK_ROWS], l_mine[BLOCK_ROWS];  // m in log2
  if (CLUSTER > 1) fa::barrier_cluster_wait();
#pragma unroll
  for (int to = 0; to < CLUSTER; ++to) {
    const int first_piece = to * BLOCK_PIECES, first_row_of = first_piece / D_TILES_PER_GROUP;
    if (to == rank) {
#pragma unroll
      for (int i = 0; i < BLOCK_PIECES; ++i) mine[i] = piece[first_piece + i];
#pragma unroll
      for (int i = 0; i < BLOCK_ROWS; ++i) {
        m_mine[i] = sum[first_row_of + i] > 0.0f ? m_log2[first_row_of + i] : -CUDART_INF_F;
        l_mine[i] = sum[first_row_of + i];
      }
    } else {
      const uint32_t barrier = fa::mapa(fa::smem_address(&smem.exchanged), to);
#pragma unroll
      for (int i = 0; i < BLOCK_PIECES; i += 2) {
        const float2 a = piece[first_piece + i], b = piece[first_piece + i + 1];
        const uint32_t there = fa::mapa(fa::smem_address(&smem.exchange[rank].pieces[i / 2][threadIdx.x]), to);
        fa::st_async(there, make_float4(a.x, a.y, b.x, b.y), barrier);
      }
#pragma unroll
      for (int i = 0; i < BLOCK_ROWS; ++i) {
        const float m_sent = sum[first_row_of + i] > 0.0f ? m_log2[first_row_of + i] : -CUDART_INF_F;
        const uint32_t there = fa::mapa(fa::smem_address(&smem.exchange[rank].m_and_l[i][threadIdx.x]), to);
        fa::st_async(there, make_float2(m_sent, sum[first_row_of + i]), barrier);
      }
    }
  }
  if (CLUSTER > 1 && OMIT_BARRIER != EXCHANGED) {
    while (!fa::mbarrier_try_wait(&smem.exchanged, 0)) {
    }
  }
#pragma unroll
  for (int i = 0; i < BLOCK_ROWS; ++i) {
    constexpr int PIECES_PER_ROW = BLOCK_PIECES / BLOCK_ROWS;
    float2 m_and_l[CLUSTER];
    float m_all = -CUDART_INF_F, sum_all = 0.0f, weight[CLUSTER];
#pragma unroll
    for (int from = 0; from < CLUSTER; ++from) {
      m_and_l[from] = from == rank ? make_float2(m_mine[i], l_mine[i]) : smem.exchange[from].m_and_l[i][threadIdx.x];
      m_all = fmaxf(m_all, m_and_l[from].x);
    }
    const float m_finite = m_all == -CUDART_INF_F ? 0.0f : m_all;
#pragma unroll
    for (int from = 0; from < CLUSTER; ++from) {
      weight[from] = fa::ex2_approx_ftz(m_and_l[from].x - m_finite);
      sum_all += m_and_l[from].y * weight[from];
    }

    // Normalise; a row that sees no key is zero and its log-sum-exp is -inf.
    const int row = rank * BLOCK_PIECES / D_TILES_PER_GROUP + i;
    const int query = block.first_query + first_row + row * 8;
    const float inverse_l = sum_all > 0.0f ? 1.0f / sum_all : 0.0f;
#pragma unroll
    for (int j = i * PIECES_PER_ROW; j < (i + 1) * PIECES_PER_ROW; j += 2) {
      float4 merged = {};
#pragma unroll
      for (int from = 0; from < CLUSTER; ++from) {
        const float4 own = make_float4(mine[j].x, mine[j].y, mine[j + 1].x, mine[j + 1].y);
        const float4 part = from == rank ? own : smem.exchange[from].pieces[j / 2][threadIdx.x];
        merged.x += part.x * weight[from];
        merged.y += part.y * weight[from];
        merged.z += part.z * weight[from];
        merged.w += part.w * weight[from];
      }
      mine[j] = make_float2(merged.x * inverse_l, merged.y * inverse_l);
      mine[j + 1] = make_float2(merged.z * inverse_l, merged.w * inverse_l);
    }
    const bool is_first_of_row = rank * BLOCK_PIECES % D_TILES_PER_GROUP == 0 && group == 0 && lane % QUAD == 0;
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
      const int stored = rank * BLOCK_PIECES + i + (IS_WHOLE ? lane % QUAD : j);
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

template <typename T>
int launch(const FaForwardArgs* args, cudaStream_t stream) {
  fa::Params params;
  if (int status = fa::make_params(args, BLOCK_M, CLUSTER, &params)) return status;
  auto* kernel = &cluster_split_kernel<T>;
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

// cluster_split: the blocks of a cluster also divide the keys; they merge their results through distributed shared memory.
// step:    CLUSTER blocks share the queries and divide the keys, all of which are in flight at once; one more merge at the end
// because: an SM loads 64 bytes per cycle, and in split_warps each SM loads all keys and values of a head, 132 KB
// expect:  below 5 us at the target shape (1x8x512x64); 128 SMs are used, each group of warps has one tile, and no tile waits
//          for another
// diff:    large: three quarters of it are the second merge
// tile:    BLOCK_M queries x BLOCK_N keys per group and block, WARP_ROWS queries per warp; 93 KB of shared memory per block
// takes:   fp16 and bf16, D = 64, any S_q >= 1 and S_kv >= 0, top-left and bottom-right causal masks, grouped heads; rows
//          contiguous and 16-byte aligned
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

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
// - A block computes 64 queries of one head (BLOCK_M), 16 per warp.
// - The groups of warps of a block share these queries and take different keys, so that one group computes while the other is
//   stalled.
// - The blocks of a cluster also share the queries and take different keys, because an SM loads only 64 bytes per cycle.  At
//   the target shape, 8 heads x 8 query tiles x 2 blocks occupy 128 of 132 SMs.
// - At the end, the partial results (O, m and l) are merged: first those of the groups, then those of the blocks.

// The barriers of this kernel and what each guarantees.  A test omits one with OMIT_BARRIER, to check that the error is detected.
enum Barrier {
  NONE,
  Q_FULL,                 // Q has been copied to shared memory
  K_FULL,                 // K of the group's tile has been copied to shared memory
  K_EMPTY,                // all threads of the group are done with K, and the next tile may overwrite it
  V_FULL,                 // V of the group's tile has been copied to shared memory
  V_EMPTY,                // all threads of the group are done with V, and the next tile may overwrite it
  RING_EMPTY,             // all threads of the group are done with the ring, and its partial O may overwrite it
  GROUP_PARTIALS_STORED,  // all groups have stored their partial O, m and l
  PEER_PARTIALS_FULL,     // the partial O, m and l of the other blocks have arrived
};

constexpr int HEAD_DIM = 64;
constexpr int WARP = 32;
constexpr int QUAD = 4;  // lanes that share a row of an mma fragment
constexpr int MMA_M = 16, MMA_N = 8, MMA_K = 16;
constexpr int VECTOR = 8;  // 16-bit elements in 16 bytes
constexpr int M_TILES = WARP_ROWS / MMA_M;
constexpr int N_TILES = BLOCK_N / MMA_N;
constexpr int D_TILES = HEAD_DIM / MMA_N;
constexpr int D_TILES_PER_GROUP = D_TILES / KEY_GROUPS;    // 8-column tiles of O that a group merges
constexpr int LANE_ROWS = 2 * M_TILES;                     // rows that a lane holds: every eighth row of its warp
constexpr int LANE_PAIRS = LANE_ROWS * D_TILES_PER_GROUP;  // pairs of adjacent elements that a lane merges, row by row
constexpr int BLOCK_PAIRS = LANE_PAIRS / CLUSTER;          // the pairs of a lane that one block of the cluster finishes
constexpr int BLOCK_ROWS = LANE_ROWS / CLUSTER > 0 ? LANE_ROWS / CLUSTER : 1;  // the rows of a lane that contain these pairs
constexpr int GROUP_THREADS = BLOCK_M / WARP_ROWS * WARP;
constexpr int THREADS = KEY_GROUPS * GROUP_THREADS;
constexpr int PEER_PARTIAL_BYTES = (CLUSTER - 1) * THREADS * (BLOCK_PAIRS + BLOCK_ROWS) * 8;  // from the other blocks

// O is rescaled only where P would exceed 2^8.  fp16 holds values up to 2^15 with the same relative error.
constexpr float RESCALE_THRESHOLD_LOG2 = 8.0f;

static_assert(BLOCK_M % WARP_ROWS == 0 && WARP_ROWS % MMA_M == 0, "every warp must own whole fragments of queries");
static_assert(BLOCK_N % MMA_K == 0, "ldmatrix reads 16 keys at a time");
static_assert(D_TILES % KEY_GROUPS == 0, "every group must merge the same number of columns of O");
static_assert(BLOCK_PAIRS * CLUSTER == LANE_PAIRS && BLOCK_PAIRS % 2 == 0, "every block must get whole 16-byte vectors");
static_assert(BLOCK_ROWS * CLUSTER == LANE_ROWS || BLOCK_PAIRS * (CLUSTER / LANE_ROWS) == D_TILES_PER_GROUP,
              "every block must get whole rows or equal parts of one row");
static_assert(BLOCK_PAIRS % QUAD == 0 || BLOCK_PAIRS < QUAD, "a lane must store 16 bytes at a time, or fewer than 16 in all");
static_assert(CLUSTER <= 8, "larger clusters are not portable");
static_assert(KEY_GROUPS <= 15, "every group needs a named barrier of its own");

// The partial O of one group, indexed by the group that merges these columns; one float4 per fragment and lane.
using PartialO = float4[KEY_GROUPS][M_TILES][D_TILES_PER_GROUP][GROUP_THREADS];

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
    PartialO partial_o;
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
  int diagonal;   // query i of the block sees keys [0, min(seq_k, diagonal + i))
  int key_tiles;  // number of key tiles that any query of the block sees
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
      (visible_keys + BLOCK_N - 1) / BLOCK_N,
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

// Loads K or V of one key tile of a group of warps, as one cp.async group.  Past the last tile the cp.async group is empty.
template <typename T>
__device__ __forceinline__ void load_tile(
    T* to_smem, const uint4* from_gmem, uint32_t row_stride, int key_tile, int key_tiles, int seq_k, uint32_t thread_in_group) {
  if (key_tile < key_tiles) {
    copy_rows<BLOCK_N, GROUP_THREADS>(to_smem, from_gmem, row_stride, key_tile * BLOCK_N, seq_k, thread_in_group);
  }
  fa::cp_async_commit_group();
}

template <typename T>
__global__ void __launch_bounds__(THREADS) cluster_split_kernel(const fa::Params params) {
  extern __shared__ __align__(128) unsigned char smem_bytes[];
  Smem<T>& smem = *reinterpret_cast<Smem<T>*>(smem_bytes);
  const int group = threadIdx.x / GROUP_THREADS, thread_in_group = threadIdx.x % GROUP_THREADS, lane = threadIdx.x % WARP;
  const WorkTile work = make_work_tile(params);
  Ring<T>& ring = smem.group[group].ring;
  const int warp_row = thread_in_group / WARP * WARP_ROWS;  // first of the WARP_ROWS rows of this warp
  const int lane_row = warp_row + lane / QUAD;              // this lane holds rows lane_row, lane_row + 8, ... of S, P and O
  const float scale_log2 = fa::scale_log2_of(params);
  const uint32_t head = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER;
  const int first_tile = rank * KEY_GROUPS + group;

  // Load Q, then the first STAGES tiles of K and V of this group.
  copy_rows<BLOCK_M, THREADS>(smem.q, work.q_gmem, params.q_strides.row, work.first_query, params.seq_q, threadIdx.x);
  fa::cp_async_commit_group();
#pragma unroll
  for (int stage = 0; stage < STAGES; ++stage) {
    const int key_tile = first_tile + stage * CLUSTER * KEY_GROUPS;
    load_tile(ring.k[stage], work.k_gmem, params.k_strides.row, key_tile, work.key_tiles, params.seq_k, thread_in_group);
    load_tile(ring.v[stage], work.v_gmem, params.v_strides.row, key_tile, work.key_tiles, params.seq_k, thread_in_group);
  }
  if (CLUSTER > 1) {
    if (threadIdx.x == 0) {
      fa::mbarrier_init(&smem.peer_partials_full, 1);
      fa::fence_mbarrier_init();
      fa::mbarrier_arrive_expect_tx(&smem.peer_partials_full, PEER_PARTIAL_BYTES);
    }
    __syncwarp();
    fa::barrier_cluster_arrive_relaxed();  // this block runs and its mbarrier is initialised, so that others may send to it
  }

  fa::cp_async_wait_group<2 * STAGES>();
  sync_block<Q_FULL>();
  uint32_t q[M_TILES][HEAD_DIM / MMA_K][4];
#pragma unroll
  for (int t = 0; t < M_TILES; ++t) {
#pragma unroll
    for (int d = 0; d < HEAD_DIM; d += MMA_K) {
      uint32_t(&fragment)[4] = q[t][d / MMA_K];
      const int row = warp_row + t * MMA_M + lane % 16;
      fa::ldmatrix_x4(fragment, fa::smem_address(smem.q + fa::swizzle<HEAD_DIM>(row, d + lane / 16 * 8)));
      for (uint32_t& pair : fragment) pair ^= fa::q_sign_bits(params);
    }
  }

  float o[M_TILES][D_TILES][4] = {};
  float m[M_TILES][2];       // unscaled row max at the last rescale
  float l[M_TILES][2] = {};  // this lane's part of the running row sum
  for (auto& row_max : m) row_max[0] = row_max[1] = -CUDART_INF_F;

  for (int i = 0, key_tile = first_tile; key_tile < work.key_tiles; ++i, key_tile += CLUSTER * KEY_GROUPS) {
    const int first_key = key_tile * BLOCK_N;
    T* k_smem = ring.k[i % STAGES];
    T* v_smem = ring.v[i % STAGES];
    const int next_tile = key_tile + STAGES * CLUSTER * KEY_GROUPS;  // the tile that is loaded into the same stage

    // Load K and V: the copies of this tile are in flight.
    fa::cp_async_wait_group<2 * STAGES - 1>();
    sync_group<K_FULL>(group);

    // S = Q K^T
    float s[M_TILES][N_TILES][4] = {};
#pragma unroll
    for (int d = 0; d < HEAD_DIM; d += MMA_K) {
#pragma unroll
      for (int n = 0; n < N_TILES; n += 2) {
        uint32_t k[4];  // B fragments of 16 keys: 0 and 1 for the first mma, 2 and 3 for the second
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
    if (next_tile < work.key_tiles) sync_group<K_EMPTY>(group);
    load_tile(k_smem, work.k_gmem, params.k_strides.row, next_tile, work.key_tiles, params.seq_k, thread_in_group);

    // mask; tiles that every query of the block sees completely are skipped
    if (first_key + BLOCK_N > min(params.seq_k, work.diagonal)) {
#pragma unroll
      for (int t = 0; t < M_TILES; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int limit = min(params.seq_k, work.diagonal + lane_row + t * MMA_M + i / 2 * 8) - first_key;
#pragma unroll
          for (int n = 0; n < N_TILES; ++n) {
            if (n * MMA_N + lane % QUAD * 2 + i % 2 >= limit) s[t][n][i] = -CUDART_INF_F;
          }
        }
      }
    }

    // row max
    float m_new[M_TILES][2];
    bool needs_rescale = false;
#pragma unroll
    for (int t = 0; t < M_TILES; ++t) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        m_new[t][r] = m[t][r];
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) m_new[t][r] = fmaxf(m_new[t][r], fmaxf(s[t][n][2 * r], s[t][n][2 * r + 1]));
        m_new[t][r] = fa::max_of_quad(m_new[t][r]);
        // If only m is -inf, the difference is inf and the comparison true.  If both are, it is NaN and the comparison false.
        needs_rescale |= (m_new[t][r] - m[t][r]) * scale_log2 > RESCALE_THRESHOLD_LOG2;
      }
    }

    // rescale, if any row of the warp needs it
    if (__any_sync(0xffffffffu, needs_rescale)) {
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

    float m_log2[M_TILES][2];  // 0 for a row that has seen no key; its P is then exp2(-inf - 0) = 0
#pragma unroll
    for (int t = 0; t < M_TILES; ++t) {
#pragma unroll
      for (int r = 0; r < 2; ++r) m_log2[t][r] = m[t][r] == -CUDART_INF_F ? 0.0f : m[t][r] * scale_log2;
    }
    fa::cp_async_wait_group<2 * STAGES - 1>();
    sync_group<V_FULL>(group);
#pragma unroll
    for (int n = 0; n < N_TILES; n += 2) {
      // P = exp2(S - m), row sum; two adjacent accumulator fragments of S form one A fragment of P
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

      // O += P V, overlapping with the computation of the next P
#pragma unroll
      for (int d = 0; d < D_TILES; d += 2) {
        uint32_t v[4];  // B fragments of 16 dimensions: 0 and 1 for the first mma, 2 and 3 for the second
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
    if (next_tile < work.key_tiles) sync_group<V_EMPTY>(group);
    load_tile(v_smem, work.v_gmem, params.v_strides.row, next_tile, work.key_tiles, params.seq_k, thread_in_group);
  }

  // Merge the groups.  Each group merges the columns of D_TILES_PER_GROUP fragments.  It hands its other columns to the other
  // groups through the memory of its ring.
  sync_group<RING_EMPTY>(group);
  PartialO& partial_o_smem = smem.group[group].partial_o;
  float4 own_o[M_TILES][D_TILES_PER_GROUP];
#pragma unroll
  for (int t = 0; t < M_TILES; ++t) {
#pragma unroll
    for (int d = 0; d < D_TILES; ++d) {
      const float4 partial = make_float4(o[t][d][0], o[t][d][1], o[t][d][2], o[t][d][3]);
      if (d / D_TILES_PER_GROUP == group) {
        own_o[t][d % D_TILES_PER_GROUP] = partial;
      } else {
        partial_o_smem[d / D_TILES_PER_GROUP][t][d % D_TILES_PER_GROUP][thread_in_group] = partial;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      l[t][r] = fa::sum_of_quad(l[t][r]);
      if (lane % QUAD != 0) continue;
      smem.m[group][lane_row + (2 * t + r) * 8] = m[t][r];
      smem.l[group][lane_row + (2 * t + r) * 8] = l[t][r];
    }
  }
  sync_block<GROUP_PARTIALS_STORED>();

  float2 merged_o[LANE_PAIRS];
  float m_log2[LANE_ROWS], sum[LANE_ROWS];
#pragma unroll
  for (int t = 0; t < M_TILES; ++t) {
    float weight[KEY_GROUPS][2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = 2 * t + r;
      float m_all = -CUDART_INF_F;
#pragma unroll
      for (int g = 0; g < KEY_GROUPS; ++g) m_all = fmaxf(m_all, smem.m[g][lane_row + row * 8]);
      m_log2[row] = m_all == -CUDART_INF_F ? 0.0f : m_all * scale_log2;
      sum[row] = 0.0f;
#pragma unroll
      for (int g = 0; g < KEY_GROUPS; ++g) {
        weight[g][r] = fa::ex2_approx_ftz(smem.m[g][lane_row + row * 8] * scale_log2 - m_log2[row]);
        sum[row] += smem.l[g][lane_row + row * 8] * weight[g][r];
      }
    }
#pragma unroll
    for (int d = 0; d < D_TILES_PER_GROUP; ++d) {
      float2 rows[2] = {};
#pragma unroll
      for (int g = 0; g < KEY_GROUPS; ++g) {
        const float4 partial = g == group ? own_o[t][d] : smem.group[g].partial_o[group][t][d][thread_in_group];
        rows[0].x += partial.x * weight[g][0];
        rows[0].y += partial.y * weight[g][0];
        rows[1].x += partial.z * weight[g][1];
        rows[1].y += partial.w * weight[g][1];
      }
      merged_o[(2 * t + 0) * D_TILES_PER_GROUP + d] = rows[0];
      merged_o[(2 * t + 1) * D_TILES_PER_GROUP + d] = rows[1];
    }
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

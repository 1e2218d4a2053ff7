// decode_cluster: few queries and many keys, in one kernel.  All SMs share the keys of a head, and merge in shared memory.
// step:    each warp has 24 KB of K and V on the way instead of 8 KB; where a cluster of 16 blocks cannot keep the GPU busy,
//          several clusters share the keys and the last one to finish merges them, in the same kernel
// because: an SM needs about 36 KB on the way to reach the bandwidth of the memory, and decode_one_cluster has 32 KB, part of
//          which has already arrived; a call with one key/value head uses 16 of 132 SMs
// expect:  3.6 us at 1024 keys, 5.5 us at 4096 keys and 34 us at 32768 keys, for 1 batch, 32 heads, 8 key/value heads and D =
//          128; 490 us for 64 batches and 8192 keys
// diff:    all of the file, because the parent computes 64 queries of one head per block
// tile:    16 or 32 rows (queries x heads of one group) x 16 keys per warp and step, 4 warps per block, up to 16 blocks per
//          cluster and 16 clusters per head; 109 KB of shared memory per block, so that an SM holds two
// takes:   fp16 and bf16, D = 64 and 128, any S_q >= 1 and S_kv >= 0, top-left and bottom-right causal masks, grouped heads;
//          rows contiguous and 16-byte aligned
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#include <algorithm>
#include <type_traits>
#include <utility>

#include "fa/launch.h"
#include "fa/params.cuh"
#include "fa/ptx.cuh"
#include "fa/warp.cuh"
#include "fa_forward.h"
#include "fa_instantiations.h"  // FA_FOR_EACH_INSTANTIATION: the manifest's dtypes and head_dims

using fp16 = __half;
using bf16 = __nv_bfloat16;

// How the work is divided:
// - The queries of all heads that share a key/value head are packed into one tile of rows: row = query * group + head.
// - The keys of the tile are split over the blocks of a cluster, and over several clusters if one cannot keep the GPU busy.
// - The warps of a block take its keys in turn, 16 at a time.  Each warp has a ring of its own for K and V and waits for
//   nothing but its own copies, so the main loop has no barrier.
// - Three merges follow, each of (O, m, l): of the warps in shared memory; of the blocks of the cluster, each of which
//   finishes an equal part of O and receives that part of all others through distributed shared memory; and of the clusters,
//   if there are several, through the workspace.

// What a deliberately wrong kernel omits with OMIT, to check that the error is detected.
enum Omission {
  NONE,
  Q_STORED,             // the barrier after Q has been written to shared memory
  K_COPIED,             // the wait for the copy of K
  V_COPIED,             // the wait for the copy of V
  WARP_PARTIAL_STORED,  // the barrier after the warps have stored their partial results
  INCOMING_FULL,        // the wait for the partial results of the other blocks of the cluster
  RECORDS_STORED,       // the barrier between the stores to the workspace and the flag that announces them
  EMPTY_SPLIT,          // the check that a block had keys: without it, the block passes on what its shared memory contains
  LAST_FLAG,            // the flag of the last cluster, so that no block sees all flags
  OWN_COUNT,            // the number of clusters of this call: that of the call before is used
};

constexpr int WARP = 32;
constexpr int QUAD = 4;  // lanes that share a row of an mma fragment
constexpr int MMA_M = 16, MMA_N = 8;
constexpr int STEP_KEYS = 16;  // keys of a warp per step, which one mma of P V takes
constexpr int KEY_TILES = STEP_KEYS / MMA_N;
constexpr int LANE_ROWS = 2;  // rows of an mma tile that a lane holds: r and r + 8
constexpr int WARPS = 4, THREADS = WARPS * WARP;
constexpr int MAX_CLUSTER_LOG2 = 4;   // blocks per cluster; 16 needs cudaFuncAttributeNonPortableClusterSizeAllowed
constexpr int MAX_CLUSTERS_LOG2 = 4;  // clusters per tile
constexpr int LANE_SOURCES = 4;       // partial results that one lane of a quad merges
static_assert(1 << MAX_CLUSTER_LOG2 <= QUAD * LANE_SOURCES && 1 << MAX_CLUSTERS_LOG2 <= QUAD * LANE_SOURCES);

// O is rescaled only where P would exceed 2^8.  fp16 holds values up to 2^15 with the same relative error.
constexpr float RESCALE_THRESHOLD_LOG2 = 8.0f;

// Announces in the workspace that a block has stored its records.  The workspace may contain anything before a call.  Any
// other value of a flag, such as NaN or the data of another call, therefore means 'not stored'.
constexpr unsigned long long STORED = 0x9e6c63d0876a9a47ull;

// Four columns of a row of O before the division by l, and m (in log2) and l of the row: what a cluster leaves in the
// workspace for the one that finishes last.
struct alignas(32) Record {
  float4 o;
  float2 m_and_l;
};

// How the host has divided the work.
struct Split {
  Record* records;            // [tiles, cluster size, clusters, vectors per block]
  unsigned long long* flags;  // [tiles, cluster size, clusters]
  int group;                  // heads / kv_heads
  int row_blocks;             // tiles of rows per key/value head
  int cluster_log2, clusters_log2;
  int clusters_to_merge;
};

template <typename T, int HEAD_DIM, int ROW_TILES>
struct Smem {
  static constexpr int ROWS = ROW_TILES * MMA_M;
  static constexpr int CHUNKS = HEAD_DIM / 8;       // 16-byte chunks per row of Q, K or V
  static constexpr int ROW_VECTORS = HEAD_DIM / 4;  // float4 per row of O
  static constexpr int DEPTH = std::max(ROW_TILES, (STAGES - ROW_TILES + 1) * 128 / HEAD_DIM);  // steps in the ring
  static constexpr int TILE_CHUNKS = STEP_KEYS * CHUNKS;
  uint4 ring[WARPS][DEPTH][2][TILE_CHUNKS];  // K and V of one step, with swizzled chunks
  // Q in the order of the mma fragments, if registers cannot hold it: [row tile, half, chunk / 4][lane]
  uint4 q[ROW_TILES > 1 ? ROW_TILES * LANE_ROWS * CHUNKS / QUAD : 1][WARP];
  float4 incoming_o[ROWS * ROW_VECTORS];       // [source block, vectors that this block finishes]
  float2 incoming_m_and_l[ROWS * ROW_VECTORS];  // the same
  float2 warp_m_and_l[WARPS][ROWS];
  uint64_t incoming_full;  // the mbarrier that counts the bytes of the two incoming arrays
  int is_last;
  static_assert(sizeof(ring[0]) >= ROWS * HEAD_DIM * sizeof(float), "the ring of a warp must hold its partial O");
};

// The work of one thread block.
struct Work {
  uint64_t tile;  // number of the tile of rows, over all batches
  int batch, kv_head;
  int first_row, rows;  // the rows of the tile: row r is head r % group of query r / group
  int rank, cluster;    // which part of the keys
  int visible;          // keys that at least one row sees
  int first_step, steps;
};

__device__ __forceinline__ Work make_work(const fa::Params& params, const Split& split, int tile_rows) {
  const int splits_log2 = split.cluster_log2 + split.clusters_log2;
  const uint32_t tile = blockIdx.x >> splits_log2, part = blockIdx.x & ((1u << splits_log2) - 1);
  Work work;
  work.tile = uint64_t(blockIdx.y) * (gridDim.x >> splits_log2) + tile;
  work.batch = blockIdx.y;
  work.rank = part & ((1u << split.cluster_log2) - 1);
  work.cluster = part >> split.cluster_log2;
  work.kv_head = split.row_blocks == 1 ? tile : tile / split.row_blocks;
  work.first_row = (tile - work.kv_head * split.row_blocks) * tile_rows;
  work.rows = min(tile_rows, params.seq_q * split.group - work.first_row);
  work.visible = params.seq_k;
  if (params.first_diagonal < params.seq_k) {
    const int last_query = (work.first_row + work.rows - 1) / split.group;
    work.visible = max(0, min(params.seq_k, params.first_diagonal + last_query));
  }
  const uint64_t all_steps = (work.visible + STEP_KEYS - 1) / STEP_KEYS;
  work.first_step = static_cast<int>(all_steps * part >> splits_log2);
  work.steps = static_cast<int>(all_steps * (part + 1) >> splits_log2) - work.first_step;
  return work;
}

// Starts the copy of K or V of one step, by all lanes of a warp.  `lane_gmem` points to this lane's chunk of row 0.  Rows from
// `visible` on become zero.  The swizzle of K serves 16-byte loads, that of V serves ldmatrix.
template <int HEAD_DIM, bool IS_V>
__device__ __forceinline__ void copy_step(uint4* to_smem, const uint4* lane_gmem, uint32_t row_stride, int step, int visible, int lane) {
  constexpr int CHUNKS = HEAD_DIM / 8, COPY_ROWS = WARP / CHUNKS;
  const int lane_row = lane / CHUNKS, chunk = lane % CHUNKS, first_key = step * STEP_KEYS + lane_row;
  const uint4* from_gmem = lane_gmem + uint64_t(first_key) * row_stride;
#pragma unroll
  for (int i = 0; i < STEP_KEYS / COPY_ROWS; ++i) {
    const int row = i * COPY_ROWS + lane_row;
    const int swizzled_chunk = chunk ^ (IS_V ? row % 8 : row % 2 * 4);
    fa::cp_async_16_or_zero(&to_smem[row * CHUNKS + swizzled_chunk], from_gmem + uint64_t(i * COPY_ROWS) * row_stride,
                            first_key + i * COPY_ROWS < visible);
  }
}

// One 16-byte chunk of a row of Q, with the sign of the scale; zero past the last row.
__device__ __forceinline__ uint4 load_q(const fa::Params& params, const Split& split, const Work& work, int row, int chunk) {
  if (row >= work.rows) return make_uint4(0, 0, 0, 0);
  const uint32_t tile_row = work.first_row + row, query = tile_row / split.group, head = tile_row - query * split.group;
  uint4 q = params.q[uint64_t(work.batch) * params.q_strides.batch +
                     uint64_t(work.kv_head * split.group + head) * params.q_strides.head +
                     uint64_t(query) * params.q_strides.row + chunk];
  const uint32_t sign = fa::q_sign_bits(params);
  q.x ^= sign, q.y ^= sign, q.z ^= sign, q.w ^= sign;
  return q;
}

struct Merged {
  float4 o;
  float m, l;
};

__device__ __forceinline__ void add_weighted(float4& sum, float weight, float4 o) {
  sum.x += weight * o.x, sum.y += weight * o.y, sum.z += weight * o.z, sum.w += weight * o.w;
}

__device__ __forceinline__ float finite_or_zero(float m) { return m == -CUDART_INF_F ? 0.0f : m; }

// Merges up to 16 partial results, which the lanes of a quad share, in an order that does not depend on time.  All lanes receive
// the result.  `m_and_l(source)` and `o(source)` load a partial result.
template <typename LOAD_M_AND_L, typename LOAD_O>
__device__ __forceinline__ Merged merge_over_quad(int sources, int lane, LOAD_M_AND_L m_and_l, LOAD_O o) {
  float2 lane_m_and_l[LANE_SOURCES];
  Merged merged = {make_float4(0, 0, 0, 0), -CUDART_INF_F, 0.0f};
#pragma unroll
  for (int i = 0; i < LANE_SOURCES; ++i) {
    const int source = lane % QUAD + i * QUAD;
    lane_m_and_l[i] = source < sources ? m_and_l(source) : make_float2(-CUDART_INF_F, 0.0f);
    merged.m = fmaxf(merged.m, lane_m_and_l[i].x);
  }
  merged.m = fa::max_of_quad(merged.m);
  const float m_finite = finite_or_zero(merged.m);
#pragma unroll
  for (int i = 0; i < LANE_SOURCES; ++i) {
    const int source = lane % QUAD + i * QUAD;
    if (source >= sources) continue;
    const float weight = fa::ex2_approx_ftz(lane_m_and_l[i].x - m_finite);
    merged.l += weight * lane_m_and_l[i].y;
    add_weighted(merged.o, weight, o(source));
  }
  merged.l = fa::sum_of_quad(merged.l);
  merged.o.x = fa::sum_of_quad(merged.o.x), merged.o.y = fa::sum_of_quad(merged.o.y);
  merged.o.z = fa::sum_of_quad(merged.o.z), merged.o.w = fa::sum_of_quad(merged.o.w);
  return merged;
}

// Stores four columns of a row of the output, and the row's log-sum-exp with the first four.  A row that sees no key is stored
// as zero and -inf.
template <typename T, int HEAD_DIM>
__device__ __forceinline__ void store(const fa::Params& params, const Split& split, const Work& work, int vector, const Merged& merged) {
  constexpr int ROW_VECTORS = HEAD_DIM / 4;
  const uint32_t row = work.first_row + vector / ROW_VECTORS, query = row / split.group;
  const uint32_t head = work.kv_head * split.group + (row - query * split.group);
  const float inverse_l = merged.l == 0.0f ? 0.0f : __fdividef(1.0f, merged.l);
  uint4* row_gmem = params.out + uint64_t(work.batch) * params.out_strides.batch + uint64_t(head) * params.out_strides.head +
                    uint64_t(query) * params.out_strides.row;
  reinterpret_cast<uint2*>(row_gmem)[vector % ROW_VECTORS] = make_uint2(
      fa::cvt_rn_x2<T>(merged.o.x * inverse_l, merged.o.y * inverse_l), fa::cvt_rn_x2<T>(merged.o.z * inverse_l, merged.o.w * inverse_l));
  if (params.lse != nullptr && vector % ROW_VECTORS == 0) {
    params.lse[(uint64_t(work.batch) * params.heads + head) * params.seq_q + query] =
        merged.l == 0.0f ? -CUDART_INF_F : (merged.m + log2f(merged.l)) * CUDART_LN2_F;
  }
}

// The index of a vector of a partial O in shared memory.  The swizzle lets the lanes of an mma fragment store without conflicts.
template <int ROW_VECTORS>
__device__ __forceinline__ int partial_index(int row, int vector_in_row) {
  return row * ROW_VECTORS + (vector_in_row ^ row % 4 * 2);
}

template <typename T, int HEAD_DIM, int ROW_TILES>
__global__ void __launch_bounds__(THREADS, 2) decode_cluster_kernel(const fa::Params params, const Split split) {
  using BlockSmem = Smem<T, HEAD_DIM, ROW_TILES>;
  extern __shared__ __align__(128) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<BlockSmem*>(smem_bytes);
  constexpr int CHUNKS = BlockSmem::CHUNKS, ROW_VECTORS = BlockSmem::ROW_VECTORS, DEPTH = BlockSmem::DEPTH;
  constexpr int D_TILES = HEAD_DIM / MMA_N, QUAD_CHUNKS = CHUNKS / QUAD;
  constexpr bool Q_IN_SMEM = ROW_TILES > 1;
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const int fragment_row = lane / QUAD;  // this lane holds rows fragment_row and fragment_row + 8 of each row tile
  const Work work = make_work(params, split, BlockSmem::ROWS);
  const int warp_steps = (work.steps - warp + WARPS - 1) / WARPS;  // at most 0 if this warp has no keys

  // Start the copies of K and V: each of the first DEPTH steps of the warp is one group of copies for K and one for V.
  const uint4* k_gmem = params.k + uint64_t(work.batch) * params.k_strides.batch + uint64_t(work.kv_head) * params.k_strides.head + lane % CHUNKS;
  const uint4* v_gmem = params.v + uint64_t(work.batch) * params.v_strides.batch + uint64_t(work.kv_head) * params.v_strides.head + lane % CHUNKS;
  auto& ring = smem.ring[warp];
  const auto copy_k = [&](int i, int stage) {
    if (i < warp_steps) {
      copy_step<HEAD_DIM, false>(ring[stage][0], k_gmem, params.k_strides.row, work.first_step + warp + i * WARPS, work.visible, lane);
    }
    fa::cp_async_commit_group();
  };
  const auto copy_v = [&](int i, int stage) {
    if (i < warp_steps) {
      copy_step<HEAD_DIM, true>(ring[stage][1], v_gmem, params.v_strides.row, work.first_step + warp + i * WARPS, work.visible, lane);
    }
    fa::cp_async_commit_group();
  };
  copy_k(0, 0);
  copy_v(0, 0);

  // Load Q as A fragments.  The columns are permuted, for Q and K alike: a lane's 16 bytes are its elements of two mma.
  uint4 q_rmem[Q_IN_SMEM ? 1 : LANE_ROWS][QUAD_CHUNKS];
  if constexpr (Q_IN_SMEM) {
    for (int i = warp; i < ROW_TILES * LANE_ROWS * QUAD_CHUNKS; i += WARPS) {
      smem.q[i][lane] = load_q(params, split, work, i / QUAD_CHUNKS * 8 + fragment_row, i % QUAD_CHUNKS * QUAD + lane % QUAD);
    }
  } else {
#pragma unroll
    for (int r = 0; r < LANE_ROWS; ++r) {
#pragma unroll
      for (int j = 0; j < QUAD_CHUNKS; ++j) q_rmem[r][j] = load_q(params, split, work, r * 8 + fragment_row, j * QUAD + lane % QUAD);
    }
  }
#pragma unroll
  for (int stage = 1; stage < DEPTH; ++stage) {
    copy_k(stage, stage);
    copy_v(stage, stage);
  }

  // The rest of the setup overlaps with the copies.
  const int cluster_size = 1 << split.cluster_log2;
  const int vectors = work.rows * ROW_VECTORS;  // float4 of the tile's O
  if (cluster_size > 1) {
    if (threadIdx.x == 0) {
      fa::mbarrier_init(&smem.incoming_full, 1);
      fa::fence_mbarrier_init();
      fa::mbarrier_arrive_expect_tx(&smem.incoming_full, vectors * (sizeof(float4) + sizeof(float2)));
    }
    __syncwarp();
    fa::barrier_cluster_arrive_relaxed();
  }
  if (Q_IN_SMEM && OMIT != Q_STORED) __syncthreads();

  const float scale_log2 = fa::scale_log2_of(params);
  int limits[ROW_TILES][LANE_ROWS];  // the row sees the keys below its limit
  int least_limit = params.seq_k;
#pragma unroll
  for (int t = 0; t < ROW_TILES; ++t) limits[t][0] = limits[t][1] = params.seq_k;
  if (params.first_diagonal < params.seq_k) {
    least_limit = params.first_diagonal + work.first_row / split.group;
#pragma unroll
    for (int t = 0; t < ROW_TILES; ++t) {
#pragma unroll
      for (int r = 0; r < LANE_ROWS; ++r) {
        const int query = (work.first_row + t * MMA_M + r * 8 + fragment_row) / split.group;
        limits[t][r] = min(params.seq_k, params.first_diagonal + query);
      }
    }
  }

  float o[ROW_TILES][D_TILES][4] = {};
  float m[ROW_TILES][LANE_ROWS];       // unscaled row max at the last rescale
  float l[ROW_TILES][LANE_ROWS] = {};  // this lane's part of the running row sum
#pragma unroll
  for (int t = 0; t < ROW_TILES; ++t) m[t][0] = m[t][1] = -CUDART_INF_F;

  for (int i = 0, stage = 0; i < warp_steps; ++i, stage = stage + 1 < DEPTH ? stage + 1 : 0) {
    const int first_key = (work.first_step + warp + i * WARPS) * STEP_KEYS;

    // S = Q K^T.  With one row tile, even and odd mma have their own accumulators, which halves the chain of dependent mma.
    constexpr int CHAINS = ROW_TILES == 1 ? 2 : 1;
    float s[ROW_TILES][KEY_TILES][4], s_chain[CHAINS][ROW_TILES][KEY_TILES][4] = {};
    if (OMIT != K_COPIED) fa::cp_async_wait_group<2 * DEPTH - 1>();
    __syncwarp();  // the copies of all lanes are visible to all lanes
#pragma unroll
    for (int j = 0; j < QUAD_CHUNKS; ++j) {
#pragma unroll
      for (int n = 0; n < KEY_TILES; ++n) {
        const int swizzled_chunk = (j * QUAD + lane % QUAD) ^ fragment_row % 2 * 4;
        const uint4 k = ring[stage][0][(n * MMA_N + fragment_row) * CHUNKS + swizzled_chunk];
#pragma unroll
        for (int t = 0; t < ROW_TILES; ++t) {
          uint4 q[LANE_ROWS];
#pragma unroll
          for (int r = 0; r < LANE_ROWS; ++r) {
            if constexpr (Q_IN_SMEM) {
              q[r] = smem.q[(t * LANE_ROWS + r) * QUAD_CHUNKS + j][lane];
            } else {
              q[r] = q_rmem[r][j];
            }
          }
          const uint32_t even[4] = {q[0].x, q[1].x, q[0].y, q[1].y}, odd[4] = {q[0].z, q[1].z, q[0].w, q[1].w};
          fa::mma_m16n8k16<T>(s_chain[0][t][n], even, k.x, k.y);
          fa::mma_m16n8k16<T>(s_chain[CHAINS - 1][t][n], odd, k.z, k.w);
        }
      }
    }
    __syncwarp();  // all lanes have read K, so it may be overwritten
    copy_k(i + DEPTH, stage);

    bool needs_rescale = false;
    float m_new[ROW_TILES][LANE_ROWS];
#pragma unroll
    for (int t = 0; t < ROW_TILES; ++t) {
#pragma unroll
      for (int n = 0; n < KEY_TILES; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[t][n][e] = CHAINS == 1 ? s_chain[0][t][n][e] : s_chain[0][t][n][e] + s_chain[CHAINS - 1][t][n][e];
      }
      // mask, unless every row sees all keys of the step
      if (first_key + STEP_KEYS > least_limit) {
#pragma unroll
        for (int n = 0; n < KEY_TILES; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            if (first_key + n * MMA_N + lane % QUAD * 2 + e % 2 >= limits[t][e / 2]) s[t][n][e] = -CUDART_INF_F;
          }
        }
      }
      // row max of this lane's keys
#pragma unroll
      for (int r = 0; r < LANE_ROWS; ++r) {
        m_new[t][r] = fmaxf(fmaxf(s[t][0][2 * r], s[t][0][2 * r + 1]), fmaxf(s[t][1][2 * r], s[t][1][2 * r + 1]));
        // If only m is -inf, the difference is inf and the comparison true.  If both are, it is NaN and the comparison false.
        needs_rescale |= (m_new[t][r] - m[t][r]) * scale_log2 > RESCALE_THRESHOLD_LOG2;
      }
    }

    // rescale, if any row of the warp needs it
    if (__any_sync(0xffffffffu, needs_rescale)) {
#pragma unroll
      for (int t = 0; t < ROW_TILES; ++t) {
#pragma unroll
        for (int r = 0; r < LANE_ROWS; ++r) {
          // Each row decides for itself, so that no bit of a head depends on the other heads of the tile.
          const float row_max = fa::max_of_quad(m_new[t][r]);
          if (!((row_max - m[t][r]) * scale_log2 > RESCALE_THRESHOLD_LOG2)) continue;
          const float rescale = fa::ex2_approx_ftz(m[t][r] * scale_log2 - row_max * scale_log2);
          m[t][r] = row_max;
          l[t][r] *= rescale;
#pragma unroll
          for (int d = 0; d < D_TILES; ++d) o[t][d][2 * r] *= rescale, o[t][d][2 * r + 1] *= rescale;
        }
      }
    }

    // P = exp2(S - m), row sum; the two accumulator fragments of S form one A fragment of P
    uint32_t p[ROW_TILES][4];
#pragma unroll
    for (int t = 0; t < ROW_TILES; ++t) {
#pragma unroll
      for (int r = 0; r < LANE_ROWS; ++r) {
        const float m_log2 = finite_or_zero(m[t][r]) * scale_log2;  // 0 for a row that has seen no key: P is exp2(-inf) = 0
#pragma unroll
        for (int n = 0; n < KEY_TILES; ++n) {
          const float low = fa::ex2_approx_ftz(s[t][n][2 * r] * scale_log2 - m_log2);
          const float high = fa::ex2_approx_ftz(s[t][n][2 * r + 1] * scale_log2 - m_log2);
          l[t][r] += low + high;
          p[t][n * 2 + r] = fa::cvt_rn_x2<T>(low, high);
        }
      }
    }

    // O += P V
    if (OMIT != V_COPIED) fa::cp_async_wait_group<2 * DEPTH - 1>();
    __syncwarp();  // the copies of all lanes are visible to all lanes
    const int v_key = lane % 16;  // lane i passes the address of row i % 8 of matrix i / 8: two key tiles, then the next columns
    const uint32_t v_address = fa::smem_address(&ring[stage][1][v_key * CHUNKS]);
#pragma unroll
    for (int d = 0; d < D_TILES; d += 2) {
      uint32_t v[4];
      fa::ldmatrix_x4_trans(v, v_address + ((d + lane / 16) ^ v_key % 8) * sizeof(uint4));
#pragma unroll
      for (int t = 0; t < ROW_TILES; ++t) {
        fa::mma_m16n8k16<T>(o[t][d], p[t], v[0], v[1]);
        fa::mma_m16n8k16<T>(o[t][d + 1], p[t], v[2], v[3]);
      }
    }
    __syncwarp();  // all lanes have read V, so it may be overwritten
    copy_v(i + DEPTH, stage);
  }

  // Store the partial result of the warp.  Its ring is free: every copy has been waited for.
  const auto partial_o = [&](int of_warp) { return reinterpret_cast<float4*>(&smem.ring[of_warp]); };
  if (warp_steps > 0) {
#pragma unroll
    for (int t = 0; t < ROW_TILES; ++t) {
#pragma unroll
      for (int r = 0; r < LANE_ROWS; ++r) {
        const int row = t * MMA_M + r * 8 + fragment_row;
        const float row_l = fa::sum_of_quad(l[t][r]);
        if (row >= work.rows) continue;
        if (lane % QUAD == 0) {
          smem.warp_m_and_l[warp][row] = make_float2(m[t][r] == -CUDART_INF_F ? -CUDART_INF_F : m[t][r] * scale_log2, row_l);
        }
#pragma unroll
        for (int d = 0; d < D_TILES; ++d) {
          float4* vector = &partial_o(warp)[partial_index<ROW_VECTORS>(row, d * 2 + lane % QUAD / 2)];
          reinterpret_cast<float2*>(vector)[lane % 2] = make_float2(o[t][d][2 * r], o[t][d][2 * r + 1]);
        }
      }
    }
  }
  __syncwarp();
  if (cluster_size > 1) fa::barrier_cluster_wait();  // all blocks run and have initialised their mbarriers
  if (OMIT != WARP_PARTIAL_STORED) __syncthreads();

  // Merge the warps that had keys, and send each vector to the block of the cluster that finishes it.
  const int warps_with_keys = OMIT == EMPTY_SPLIT ? max(1, min(WARPS, work.steps)) : min(WARPS, work.steps);
  for (int vector = threadIdx.x; vector < vectors; vector += THREADS) {
    const int row = vector / ROW_VECTORS;
    Merged merged = {make_float4(0, 0, 0, 0), -CUDART_INF_F, 0.0f};
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      if (w < warps_with_keys) merged.m = fmaxf(merged.m, smem.warp_m_and_l[w][row].x);
    }
    const float m_finite = finite_or_zero(merged.m);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      if (w >= warps_with_keys) continue;
      const float2 m_and_l = smem.warp_m_and_l[w][row];
      const float weight = fa::ex2_approx_ftz(m_and_l.x - m_finite);
      merged.l += weight * m_and_l.y;
      add_weighted(merged.o, weight, partial_o(w)[partial_index<ROW_VECTORS>(row, vector % ROW_VECTORS)]);
    }
    if (cluster_size == 1) {
      store<T, HEAD_DIM>(params, split, work, vector, merged);
      continue;
    }
    const int owner = vector & (cluster_size - 1);
    const int slot = (vectors >> split.cluster_log2) * work.rank + (vector >> split.cluster_log2);
    const uint32_t barrier_address = fa::mapa(fa::smem_address(&smem.incoming_full), owner);
    fa::st_async(fa::mapa(fa::smem_address(&smem.incoming_o[slot]), owner), merged.o, barrier_address);
    fa::st_async(fa::mapa(fa::smem_address(&smem.incoming_m_and_l[slot]), owner), make_float2(merged.m, merged.l), barrier_address);
  }
  if (cluster_size == 1) return;

  // Merge the blocks of the cluster.  No block exits before it has received everything, so none sends to one that has exited.
  if (OMIT != INCOMING_FULL) {
    while (!fa::mbarrier_try_wait(&smem.incoming_full, 0)) {
    }
  }
  const int own_vectors = vectors >> split.cluster_log2, clusters = 1 << split.clusters_log2;
  const uint64_t own_group = (work.tile << split.cluster_log2 | work.rank) << split.clusters_log2;  // its records and flags
  const int record_stride = min(BlockSmem::ROWS, params.seq_q * split.group) * ROW_VECTORS >> split.cluster_log2;
  for (int first = 0; first < own_vectors; first += THREADS / QUAD) {
    const int slot = min(first + static_cast<int>(threadIdx.x) / QUAD, own_vectors - 1);  // all lanes take part in the shuffles
    const Merged merged = merge_over_quad(
        cluster_size, lane, [&](int source) { return smem.incoming_m_and_l[source * own_vectors + slot]; },
        [&](int source) { return smem.incoming_o[source * own_vectors + slot]; });
    if (lane % QUAD != 0 || first + static_cast<int>(threadIdx.x) / QUAD >= own_vectors) continue;
    if (LEVELS == 1 || clusters == 1) {
      store<T, HEAD_DIM>(params, split, work, slot << split.cluster_log2 | work.rank, merged);
    } else {
      Record* record = &split.records[(own_group + work.cluster) * record_stride + slot];
      record->o = merged.o;
      record->m_and_l = make_float2(merged.m, merged.l);
    }
  }
  if (LEVELS == 1 || clusters == 1) return;

  // Merge the clusters.  Every block sets its flag and then reads the flags of all clusters.  The fence orders the two, so the
  // block that comes last sees all flags.  If several do, they store the same bits.  A block that has seen all flags clears
  // them: the next call, which may be a replay with the same workspace, finds none.
  if (OMIT != RECORDS_STORED) __syncthreads();
  if (warp == 0) {
    unsigned long long* flags = split.flags + own_group;
    volatile unsigned long long* volatile_flags = flags;
    __threadfence();
    if (lane == 0 && !(OMIT == LAST_FLAG && work.cluster == clusters - 1)) volatile_flags[work.cluster] = STORED;
    __syncwarp();
    __threadfence();
    const bool is_stored = lane >= clusters || volatile_flags[lane] == STORED;
    const bool is_last = __all_sync(0xffffffffu, is_stored);
    if (lane == 0) smem.is_last = is_last;
    __threadfence();
  }
  __syncthreads();
  if (!smem.is_last) return;
  for (int first = 0; first < own_vectors; first += THREADS / QUAD) {
    const int slot = min(first + static_cast<int>(threadIdx.x) / QUAD, own_vectors - 1);
    const Record* records = &split.records[own_group * record_stride + slot];
    const Merged merged = merge_over_quad(
        split.clusters_to_merge, lane, [&](int source) { return __ldcg(&records[uint64_t(source) * record_stride].m_and_l); },
        [&](int source) { return __ldcg(&records[uint64_t(source) * record_stride].o); });
    if (lane % QUAD != 0 || first + static_cast<int>(threadIdx.x) / QUAD >= own_vectors) continue;
    store<T, HEAD_DIM>(params, split, work, slot << split.cluster_log2 | work.rank, merged);
  }
  if (threadIdx.x < clusters) split.flags[own_group + threadIdx.x] = 0;
}

// How a call is divided: rows into tiles, and the keys of a tile over blocks.
struct Plan {
  int64_t group, row_tiles, row_blocks, tiles;  // `tiles` is the number of tiles of all batches
  int cluster_log2, clusters_log2;
  int64_t vectors_per_block;  // float4 of O that each block of a cluster finishes
};

// The share of the GPU that this number of blocks uses.  One block per SM is enough, because its ring has 64 to 96 KB in flight.
double used_share(int64_t blocks, int64_t sms) {
  const int64_t slots = 2 * sms;
  if (blocks <= slots) return std::min(1.0, static_cast<double>(blocks) / (0.9 * static_cast<double>(sms)));
  const int64_t waves = (blocks + slots - 1) / slots;
  return static_cast<double>(blocks) / static_cast<double>(waves * slots);
}

Plan make_plan(const FaForwardArgs* args) {
  Plan plan = {};
  plan.group = args->heads / args->kv_heads;
  const int64_t rows = args->seq_q * plan.group;
  plan.row_tiles = rows > MMA_M ? 2 : 1;
  const int64_t tile_rows = plan.row_tiles * MMA_M;
  plan.row_blocks = (rows + tile_rows - 1) / tile_rows;
  plan.tiles = args->batch * args->kv_heads * plan.row_blocks;
  const int64_t keys = args->causal == FA_CAUSAL_TOP_LEFT ? std::min(args->seq_q, args->seq_k) : args->seq_k;
  const int64_t steps = (keys + STEP_KEYS - 1) / STEP_KEYS;
  const int64_t sms = std::max(1, fa::sm_count());
  // Split further only where that uses more of the GPU.  A block should have a step for each warp, and many steps to be worth
  // a merge of clusters.
  constexpr int MAX_LOG2 = LEVELS == 1 ? MAX_CLUSTER_LOG2 : MAX_CLUSTER_LOG2 + MAX_CLUSTERS_LOG2;
  int splits_log2 = 0;
  for (int log2 = 1; log2 <= MAX_LOG2; ++log2) {
    const int least_steps = log2 <= MAX_CLUSTER_LOG2 ? WARPS : 4 * WARPS;
    if ((steps + (1 << log2) - 1) >> log2 < least_steps || (log2 > MAX_CLUSTER_LOG2 && plan.tiles << log2 > 2 * sms)) break;
    if (used_share(plan.tiles << log2, sms) > 1.05 * used_share(plan.tiles << splits_log2, sms)) splits_log2 = log2;
  }
  plan.cluster_log2 = std::min(splits_log2, MAX_CLUSTER_LOG2);
  plan.clusters_log2 = splits_log2 - plan.cluster_log2;
  plan.vectors_per_block = std::min(rows, tile_rows) * args->head_dim / 4 >> plan.cluster_log2;
  return plan;
}

// The number of clusters whose records are merged.  The deliberately wrong kernel takes that of the call before.
int clusters_to_merge(const Plan& plan) {
  static int previous = 1;
  const int own = 1 << plan.clusters_log2;
  return OMIT == OWN_COUNT ? std::exchange(previous, own) : own;
}

int64_t record_groups(const Plan& plan) { return plan.tiles << (plan.cluster_log2 + plan.clusters_log2); }

FA_EXPORT size_t fa_workspace_bytes(const FaForwardArgs* args) {
  const Plan plan = make_plan(args);
  if (plan.clusters_log2 == 0) return 0;
  return record_groups(plan) * (plan.vectors_per_block * sizeof(Record) + sizeof(unsigned long long));
}

template <typename T, int HEAD_DIM, int ROW_TILES>
int launch(const FaForwardArgs* args, const Plan& plan, cudaStream_t stream) {
  fa::Params params;
  if (int status = fa::make_params(args, MMA_M, 1, &params)) return status;
  const int splits_log2 = plan.cluster_log2 + plan.clusters_log2;
  const int64_t blocks = args->kv_heads * plan.row_blocks << splits_log2;
  if (blocks > INT32_MAX || args->seq_q * plan.group > INT32_MAX / 2) {
    return fa_refuse(args, "the shape is too large: seq_q %lld, heads %lld", static_cast<long long>(args->seq_q),
                     static_cast<long long>(args->heads));
  }
  if (args->workspace_bytes < fa_workspace_bytes(args) || reinterpret_cast<uintptr_t>(args->workspace) % alignof(Record) != 0) {
    return fa_refuse(args, "the workspace has %llu bytes at %p; it needs %zu bytes, aligned to %zu",
                     static_cast<unsigned long long>(args->workspace_bytes), args->workspace, fa_workspace_bytes(args), alignof(Record));
  }
  auto* records = static_cast<Record*>(args->workspace);
  const int64_t all_records = plan.clusters_log2 == 0 ? 0 : record_groups(plan) * plan.vectors_per_block;
  auto* flags = reinterpret_cast<unsigned long long*>(records + all_records);
  const Split split = {records, flags, static_cast<int>(plan.group), static_cast<int>(plan.row_blocks), plan.cluster_log2,
                       plan.clusters_log2, clusters_to_merge(plan)};
  const auto kernel = &decode_cluster_kernel<T, HEAD_DIM, ROW_TILES>;
  constexpr int smem_bytes = sizeof(Smem<T, HEAD_DIM, ROW_TILES>);
  static fa::OncePerDevice set_up;
  const int status = set_up([&] {
    const auto* function = reinterpret_cast<const void*>(kernel);
    if (int error = fa_allow_dynamic_smem(args, function, smem_bytes)) return error;
    return static_cast<int>(cudaFuncSetAttribute(function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  });
  if (status != 0) return status;
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = 1u << plan.cluster_log2, cluster.val.clusterDim.y = 1, cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(args->batch));
  config.blockDim = dim3(THREADS);
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = plan.cluster_log2 > 0 ? 1 : 0;
  return static_cast<int>(cudaLaunchKernelEx(&config, kernel, params, split));
}

FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t stream) {
  if (int status = fa_check_abi(args)) return status;
  const Plan plan = make_plan(args);
#define LAUNCH_IF(DTYPE, HEAD_DIM_)                                                                                              \
  if (args->dtype == FA_DTYPE_##DTYPE && args->head_dim == HEAD_DIM_) {                                                          \
    return plan.row_tiles == 1 ? launch<DTYPE, HEAD_DIM_, 1>(args, plan, stream) : launch<DTYPE, HEAD_DIM_, 2>(args, plan, stream); \
  }
  FA_FOR_EACH_INSTANTIATION(LAUNCH_IF)
#undef LAUNCH_IF
  return fa_refuse(args, "no instantiation for dtype %d with head_dim %lld", args->dtype, static_cast<long long>(args->head_dim));
}

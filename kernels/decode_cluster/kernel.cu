// decode_cluster: few queries and many keys, in one kernel.  All SMs share the keys of a head, and merge in shared memory.
// step:    each warp has the keys of two steps on the way instead of one; where one cluster cannot keep the GPU busy, several
//          clusters share the keys, and the one that finishes last merges them, in the same kernel
// because: a warp of decode_one_cluster requests its next keys only when it has read the last ones, and a call with one
//          key/value head uses 16 of 132 SMs; a second kernel for the merge would take longer than the rest of a short call
// expect:  3.6 us at 1024 keys, 5.5 us at 4096 keys and 34 us at 32768 keys, for 1 batch, 32 heads, 8 key/value heads and D =
//          128; 490 us for 64 batches and 8192 keys
// diff:    the defines STAGES and LEVELS, and SHORT_CALLS for decode_short; decode_one_cluster shares no code with
//          cluster_latency but the order of its merges
// tile:    16 or 32 rows (queries x heads of a group) x 16 keys per warp and step; 8 warps per block and one block per SM, or 4
//          warps and two blocks if there are more tiles than SMs; up to 16 blocks per cluster and 16 clusters per tile; at most
//          162 KB of shared memory per block
// takes:   fp16 and bf16, D = 64 and 128, any S_q >= 1 and S_kv >= 0, the bottom-right causal mask, grouped heads; rows
//          contiguous and 16-byte aligned
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#include <algorithm>
#include <atomic>
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
// - The warps of a block take its keys in turn, 16 at a time.  Each warp has a ring of its own for K and V and waits for nothing
//   but its own copies, so the main loop has no barrier of the block.
// - Three merges follow, each of (O, m, l): of the warps, in shared memory; of the blocks of the cluster, each of which finishes
//   an equal part of O and receives that part of all others through distributed shared memory; and of the clusters, if there
//   are several, through the workspace.

// What a deliberately wrong kernel omits with OMIT, to check that the error is detected.
enum Omission {
  NONE,
  K_COPIED,             // the wait for the copy of K
  V_COPIED,             // the wait for the copy of V
  WARP_PARTIAL_STORED,  // the barrier after the warps have stored their partial results
  INCOMING_FULL,        // the wait for the partial results of the other blocks of the cluster
  EMPTY_SPLIT,          // the partial result of a warp without keys
  LAST_TAG,             // the tag of the last cluster, so that no cluster sees all tags
  OWN_COUNT,            // the number of clusters of this call: that of the call before is used
};

constexpr int WARP = 32;
constexpr int QUAD = 4;  // lanes that share a row of an mma fragment
constexpr int MMA_M = 16, MMA_N = 8;
constexpr int STEP_KEYS = 16;  // keys of a warp per step, which one mma of P V takes
constexpr int KEY_TILES = STEP_KEYS / MMA_N;
constexpr int LANE_ROWS = 2;  // rows of an mma tile that a lane holds: r and r + 8
constexpr int NARROW = 4, WIDE = 8;  // warps per block: an SM holds two narrow blocks or one wide block
constexpr int MAX_CLUSTER_LOG2 = 4;   // blocks per cluster; 16 needs cudaFuncAttributeNonPortableClusterSizeAllowed
constexpr int MAX_CLUSTERS = 16;      // clusters per tile
constexpr int MERGED_AT_ONCE = 4;     // partial results whose loads are in flight together

// O is rescaled only where P would exceed 2^8.  fp16 holds values up to 2^15 with the same relative error.
constexpr float RESCALE_THRESHOLD_LOG2 = 8.0f;

// Marks a packet in the workspace as stored.  The workspace may contain anything before a call.  Any other value, such as NaN or
// the data of another call, means 'not stored'.
constexpr uint64_t STORED = 0x9e6c63d0876a9a47ull;

// 8 bytes of a partial result and their tag, which one instruction stores and loads.
struct alignas(16) Packet {
  uint64_t payload, tag;
};
constexpr int PACKETS = 3;  // per vector of a partial O: columns 0 and 1, columns 2 and 3, and m (in log2) and l of the row

// How the host has divided the work.
struct Split {
  Packet* packets;  // [tiles, cluster size, clusters, vectors per block, PACKETS]
  uint32_t tiles, tiles_per_batch;
  uint32_t even_steps, remaining_steps;  // steps per block, and how many blocks have one more, if no key is hidden from all rows
  int group;       // heads / kv_heads
  int row_blocks;  // tiles of rows per key/value head
  int cluster_log2, clusters;
  int clusters_to_merge;
};

template <int WARPS, int HEAD_DIM, int ROW_TILES>
struct Smem {
  static constexpr int ROWS = ROW_TILES * MMA_M;
  static constexpr int CHUNKS = HEAD_DIM / 8;       // 16-byte chunks per row of Q, K or V
  static constexpr int ROW_VECTORS = HEAD_DIM / 4;  // float4 per row of O
  static constexpr int DEPTH = std::max(ROW_TILES, (STAGES - ROW_TILES + 1) * 128 / HEAD_DIM);  // steps in the ring
  alignas(256) uint4 ring[WARPS][DEPTH][2][STEP_KEYS * CHUNKS];  // K and V of one step, with swizzled chunks
  // Q in the order of the mma fragments, if registers cannot hold it: [row tile, half, chunk / 4][lane]
  uint4 q[ROW_TILES > 1 ? ROW_TILES * LANE_ROWS * CHUNKS / QUAD : 1][WARP];
  float4 incoming_o[ROWS * ROW_VECTORS];        // [source block, vectors that this block finishes], without those of this block
  float2 incoming_m_and_l[ROWS * ROW_VECTORS];  // the same
  float2 warp_m_and_l[WARPS][ROWS];
  uint64_t incoming_full;  // the mbarrier that counts the bytes of the two incoming arrays
  static_assert(sizeof(ring[0]) >= ROWS * HEAD_DIM * sizeof(float), "the ring of a warp must hold its partial O");
};

// The work of one thread block.
struct Work {
  uint32_t tile;  // number of the tile of rows, over all batches
  int batch, kv_head;
  int first_row, rows;  // the rows of the tile: row r is head r % group of query r / group
  int rank, cluster;    // which part of the keys
  int visible;          // keys that at least one row sees
  int first_step, steps;
};

// The query of a row of all row tiles: row / group, as in fa::kv_head_of.
__device__ __forceinline__ uint32_t query_of(const fa::Params& params, uint32_t row) {
  return __umulhi(2 * row + 1, params.kv_head_factor);
}

__device__ __forceinline__ Work make_work(const fa::Params& params, const Split& split, int tile_rows) {
  Work work;
  work.tile = blockIdx.z * gridDim.y + blockIdx.y;
  work.batch = split.tiles == split.tiles_per_batch ? 0 : work.tile / split.tiles_per_batch;
  const uint32_t tile_in_batch = work.tile - work.batch * split.tiles_per_batch;
  work.kv_head = split.row_blocks == 1 ? tile_in_batch : tile_in_batch / split.row_blocks;
  work.first_row = (tile_in_batch - work.kv_head * split.row_blocks) * tile_rows;
  work.rows = min(tile_rows, params.seq_q * split.group - work.first_row);
  work.rank = blockIdx.x & ((1u << split.cluster_log2) - 1);
  work.cluster = blockIdx.x >> split.cluster_log2;
  work.visible = params.seq_k;
  uint32_t even_steps = split.even_steps, remaining_steps = split.remaining_steps;
  if (params.first_diagonal < params.seq_k) {
    const int last_query = query_of(params, work.first_row + work.rows - 1);
    work.visible = max(0, min(params.seq_k, params.first_diagonal + last_query));
    const uint32_t all_steps = (work.visible + STEP_KEYS - 1) / STEP_KEYS;
    even_steps = all_steps / gridDim.x, remaining_steps = all_steps - even_steps * gridDim.x;
  }
  work.first_step = blockIdx.x * even_steps + min(blockIdx.x, remaining_steps);
  work.steps = even_steps + (blockIdx.x < remaining_steps ? 1 : 0);
  return work;
}

// Copies K or V of every WARPS-th step to the ring of a warp, one step per call.  The swizzle of K serves 16-byte loads, that of V
// serves ldmatrix.
template <int WARPS, int HEAD_DIM, bool IS_V>
struct StepCopier {
  static constexpr int CHUNKS = HEAD_DIM / 8, COPY_ROWS = WARP / CHUNKS;  // rows per copy of the whole warp
  const uint4* from_gmem;  // this lane's chunk of its first row of the next step
  uint64_t copy_stride;    // from one copy to the next, in 16-byte vectors
  int key;                 // of that row

  __device__ __forceinline__ StepCopier(const uint4* head_gmem, uint32_t row_stride, int first_step, int lane)
      : copy_stride(uint64_t(COPY_ROWS) * row_stride), key(first_step * STEP_KEYS + lane / CHUNKS) {
    from_gmem = head_gmem + uint64_t(key) * row_stride + lane % CHUNKS;
  }

  // Starts the copy of the next step.  Rows from `visible` on become zero.
  __device__ __forceinline__ void operator()(uint4* tile_smem, int visible, int lane) {
    if (copy_stride == WARP && key + STEP_KEYS - lane / CHUNKS <= visible) {  // contiguous rows: the offsets are constants
      copy<true>(tile_smem, visible, lane);
    } else {
      copy<false>(tile_smem, visible, lane);
    }
    key += WARPS * STEP_KEYS;
    from_gmem += WARPS * STEP_KEYS / COPY_ROWS * copy_stride;
  }

  template <bool IS_SIMPLE>
  __device__ __forceinline__ void copy(uint4* tile_smem, int visible, int lane) {
#pragma unroll
    for (int i = 0; i < STEP_KEYS / COPY_ROWS; ++i) {
      const int row = i * COPY_ROWS + lane / CHUNKS;
      const int swizzled_chunk = lane % CHUNKS ^ (IS_V ? row % 8 : row % 2 * 4);
      const uint64_t offset = IS_SIMPLE ? i * WARP : i * copy_stride;
      fa::cp_async_16_or_zero(&tile_smem[row * CHUNKS + swizzled_chunk], from_gmem + offset, IS_SIMPLE || key + i * COPY_ROWS < visible);
    }
  }
};

// One 16-byte chunk of a row of Q; zero past the last row.
__device__ __forceinline__ uint4 load_q(const fa::Params& params, const Split& split, const Work& work, int row, int chunk) {
  if (row >= work.rows) return make_uint4(0, 0, 0, 0);
  const uint32_t query = query_of(params, work.first_row + row), head = work.first_row + row - query * split.group;
  return params.q[uint64_t(work.batch) * params.q_strides.batch + uint64_t(work.kv_head * split.group + head) * params.q_strides.head +
                  uint64_t(query) * params.q_strides.row + chunk];
}

// Four columns of a partial result of a row.
struct Partial {
  float4 o;    // before the division by l
  float m, l;  // m in log2
};

__device__ __forceinline__ float finite_or_zero(float m) { return m == -CUDART_INF_F ? 0.0f : m; }

// Merges COUNT partial results into another one.  The loads of all of them are in flight together.
template <int COUNT>
__device__ __forceinline__ void merge(Partial& merged, const Partial (&sources)[COUNT]) {
  float m = merged.m;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) m = fmaxf(m, sources[i].m);
  const float m_finite = finite_or_zero(m), own_weight = fa::ex2_approx_ftz(merged.m - m_finite);
  merged.m = m;
  merged.l *= own_weight;
  merged.o.x *= own_weight, merged.o.y *= own_weight, merged.o.z *= own_weight, merged.o.w *= own_weight;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const float weight = fa::ex2_approx_ftz(sources[i].m - m_finite);
    const float4 o = sources[i].o;
    merged.l += weight * sources[i].l;
    merged.o.x += weight * o.x, merged.o.y += weight * o.y, merged.o.z += weight * o.z, merged.o.w += weight * o.w;
  }
}

__device__ __forceinline__ Partial no_partial() {
  return {make_float4(0, 0, 0, 0), -CUDART_INF_F, 0.0f};
}

__device__ __forceinline__ Packet load_packet(const Packet* packet_gmem) {
  const ulonglong2 bits = fa::ld_relaxed_gpu(reinterpret_cast<const ulonglong2*>(packet_gmem));
  return {bits.x, bits.y};
}

__device__ __forceinline__ void store_packet(Packet* packet_gmem, Packet packet) {
  fa::st_relaxed_gpu(reinterpret_cast<ulonglong2*>(packet_gmem), make_ulonglong2(packet.payload, packet.tag));
}

__device__ __forceinline__ uint64_t pack(float low, float high) {
  return uint64_t(__float_as_uint(high)) << 32 | __float_as_uint(low);
}
__device__ __forceinline__ float low_of(uint64_t payload) { return __uint_as_float(static_cast<uint32_t>(payload)); }
__device__ __forceinline__ float high_of(uint64_t payload) { return __uint_as_float(static_cast<uint32_t>(payload >> 32)); }

// Stores four columns of a row of the output, and the row's log-sum-exp with the first four.  A row that sees no key is stored
// as zero and -inf.
template <typename T, int HEAD_DIM>
__device__ __forceinline__ void store(const fa::Params& params, const Split& split, const Work& work, int vector, const Partial& merged) {
  constexpr int ROW_VECTORS = HEAD_DIM / 4;
  const uint32_t row = work.first_row + vector / ROW_VECTORS, query = query_of(params, row);
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

// Merges the clusters, for one vector of O per lane with `is_valid`, of which the lane passes the partial result of this cluster.
// Every cluster first stores its packets and then loads those of all clusters.  The fence orders the two, so at least the last
// cluster finds all tags.  Every cluster that does stores the output.  If several do, they store the same bits.  They also clear
// the tags, so that the next call, which may be a replay with the same workspace, finds none.
template <typename T, int HEAD_DIM>
__device__ __forceinline__ void merge_clusters(const fa::Params& params, const Split& split, const Work& work, const Partial& own,
                                               Packet* slot_gmem, uint64_t cluster_stride, int vector, bool is_valid, int lane) {
  if (is_valid && !(OMIT == LAST_TAG && work.cluster == split.clusters - 1)) {
    Packet* own_gmem = slot_gmem + work.cluster * cluster_stride;
    store_packet(own_gmem, {pack(own.o.x, own.o.y), STORED});
    store_packet(own_gmem + 1, {pack(own.o.z, own.o.w), STORED});
    store_packet(own_gmem + 2, {pack(own.m, own.l), STORED});
  }
  __syncwarp();
  if (lane == 0) __threadfence();  // one fence per warp: all fences have one order, and the warp with the last one finds all tags
  __syncwarp();
  if (!is_valid) return;
  Partial merged = no_partial();
  bool all_are_stored = true;
  for (int first = 0; first < split.clusters_to_merge; first += MERGED_AT_ONCE) {
    Packet packets[MERGED_AT_ONCE][PACKETS];
#pragma unroll
    for (int i = 0; i < MERGED_AT_ONCE; ++i) {
#pragma unroll
      for (int p = 0; p < PACKETS; ++p) {
        packets[i][p] = load_packet(slot_gmem + min(first + i, split.clusters_to_merge - 1) * cluster_stride + p);
      }
    }
    Partial sources[MERGED_AT_ONCE];
#pragma unroll
    for (int i = 0; i < MERGED_AT_ONCE; ++i) {
      const Packet(&source)[PACKETS] = packets[i];
      all_are_stored &= source[0].tag == STORED && source[1].tag == STORED && source[2].tag == STORED;
      sources[i] = no_partial();
      if (first + i >= split.clusters_to_merge) continue;
      sources[i].o = make_float4(low_of(source[0].payload), high_of(source[0].payload), low_of(source[1].payload), high_of(source[1].payload));
      sources[i].m = low_of(source[2].payload), sources[i].l = high_of(source[2].payload);
    }
    merge(merged, sources);
  }
  if (!all_are_stored) return;
  store<T, HEAD_DIM>(params, split, work, vector, merged);
  for (int i = 0; i < split.clusters * PACKETS; ++i) store_packet(slot_gmem + i / PACKETS * cluster_stride + i % PACKETS, {0, 0});
}

// The index of a vector of a partial O in shared memory.  The swizzle lets the lanes of an mma fragment store without conflicts.
template <int ROW_VECTORS>
__device__ __forceinline__ int partial_index(int row, int vector_in_row) {
  return row * ROW_VECTORS + (vector_in_row ^ row % 4 * 2);
}

template <typename T, int WARPS, int HEAD_DIM, int ROW_TILES>
__global__ void __launch_bounds__(WARPS * WARP, WIDE / WARPS) decode_cluster_kernel(const fa::Params params, const Split split) {
  using BlockSmem = Smem<WARPS, HEAD_DIM, ROW_TILES>;
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<BlockSmem*>(smem_bytes);
  constexpr int THREADS = WARPS * WARP, CHUNKS = BlockSmem::CHUNKS, ROW_VECTORS = BlockSmem::ROW_VECTORS, DEPTH = BlockSmem::DEPTH;
  constexpr int D_TILES = HEAD_DIM / MMA_N, QUAD_CHUNKS = CHUNKS / QUAD;
  constexpr bool Q_IN_SMEM = ROW_TILES > 1;
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const int fragment_row = lane / QUAD;  // this lane holds rows fragment_row and fragment_row + 8 of each row tile
  const Work work = make_work(params, split, BlockSmem::ROWS);
  if (work.tile >= split.tiles) return;  // the last blocks of a grid with more than 2^15 tiles
  const int warp_steps = (work.steps - warp + WARPS - 1) / WARPS;  // at most 0 if this warp has no keys

  // Start the copies of K and V: each of the first DEPTH steps of the warp is one group of copies for K and one for V.
  StepCopier<WARPS, HEAD_DIM, false> k_copier(
      params.k + uint64_t(work.batch) * params.k_strides.batch + uint64_t(work.kv_head) * params.k_strides.head, params.k_strides.row,
      work.first_step + warp, lane);
  StepCopier<WARPS, HEAD_DIM, true> v_copier(
      params.v + uint64_t(work.batch) * params.v_strides.batch + uint64_t(work.kv_head) * params.v_strides.head, params.v_strides.row,
      work.first_step + warp, lane);
  auto& ring = smem.ring[warp];
  const auto copy_k = [&](int i, int stage) {
    if (i < warp_steps) k_copier(ring[stage][0], work.visible, lane);
    fa::cp_async_commit_group();
  };
  const auto copy_v = [&](int i, int stage) {
    if (i < warp_steps) v_copier(ring[stage][1], work.visible, lane);
    fa::cp_async_commit_group();
  };
  copy_k(0, 0);
  if (!SHORT_CALLS || Q_IN_SMEM) copy_v(0, 0);

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
    if (SHORT_CALLS) copy_v(0, 0);  // S needs Q, and not V
  }
#pragma unroll 1
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
      const int incoming_vectors = (vectors >> split.cluster_log2) * (cluster_size - 1);
      fa::mbarrier_arrive_expect_tx(&smem.incoming_full, incoming_vectors * (sizeof(float4) + sizeof(float2)));
    }
    __syncwarp();
    fa::barrier_cluster_arrive_relaxed();
  }
  if (Q_IN_SMEM) __syncthreads();

  const float scale_log2 = fa::scale_log2_of(params);
  const bool is_negated = fa::negate_q(params);
  int limits[ROW_TILES][LANE_ROWS];  // the row sees the keys below its limit
  int least_limit = params.seq_k;
#pragma unroll
  for (int t = 0; t < ROW_TILES; ++t) limits[t][0] = limits[t][1] = params.seq_k;
  if (params.first_diagonal < params.seq_k) {
    least_limit = params.first_diagonal + static_cast<int>(query_of(params, work.first_row));
#pragma unroll
    for (int t = 0; t < ROW_TILES; ++t) {
#pragma unroll
      for (int r = 0; r < LANE_ROWS; ++r) {
        const int query = query_of(params, work.first_row + t * MMA_M + r * 8 + fragment_row);
        limits[t][r] = min(params.seq_k, params.first_diagonal + query);
      }
    }
  }

  // This lane's first 16 bytes of K and row of V in the first stage.  The swizzles become XORs of constants, because the rings are
  // aligned to 256 bytes.
  const uint32_t k_lane = fragment_row * CHUNKS + (lane % QUAD ^ fragment_row % 2 * 4);
  const int v_key = lane % 16;  // lane i passes the address of row i % 8 of matrix i / 8: two key tiles, then the next columns
  const uint32_t v_lane_address = fa::smem_address(&ring[0][1][v_key * CHUNKS]) ^ (lane / 16 ^ v_key % 8) * sizeof(uint4);

  float o[ROW_TILES][D_TILES][4] = {};
  float m[ROW_TILES][LANE_ROWS];       // unscaled row max at the last rescale
  float l[ROW_TILES][LANE_ROWS] = {};  // this lane's part of the running row sum
#pragma unroll
  for (int t = 0; t < ROW_TILES; ++t) m[t][0] = m[t][1] = -CUDART_INF_F;

  int step_last_key = (work.first_step + warp) * STEP_KEYS + STEP_KEYS - 1;
  for (int i = 0, stage = 0; i < warp_steps; ++i, stage = stage + 1 < DEPTH ? stage + 1 : 0, step_last_key += WARPS * STEP_KEYS) {
    // S = Q K^T.  With one row tile, even and odd mma have their own accumulators, which halves the chain of dependent mma.
    constexpr int CHAINS = ROW_TILES == 1 ? 2 : 1;
    float s[ROW_TILES][KEY_TILES][4], s_chain[CHAINS][ROW_TILES][KEY_TILES][4] = {};
    if (OMIT != K_COPIED) fa::cp_async_wait_group<2 * DEPTH - 1>();
    __syncwarp();  // the copies of all lanes are visible to all lanes
#pragma unroll
    for (int j = 0; j < QUAD_CHUNKS; ++j) {
#pragma unroll
      for (int n = 0; n < KEY_TILES; ++n) {
        const uint4 k = ring[stage][0][(k_lane ^ j * QUAD) + n * MMA_N * CHUNKS];
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
        for (int e = 0; e < 4; ++e) {
          s[t][n][e] = CHAINS == 1 ? s_chain[0][t][n][e] : s_chain[0][t][n][e] + s_chain[CHAINS - 1][t][n][e];
          if (is_negated) s[t][n][e] = -s[t][n][e];  // because P is computed with the absolute value of the scale
        }
      }
      // mask, unless every row sees all keys of the step
      if (step_last_key >= least_limit) {
        const int lane_first_key = step_last_key - (STEP_KEYS - 1) + lane % QUAD * 2;
#pragma unroll
        for (int n = 0; n < KEY_TILES; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            if (lane_first_key + n * MMA_N + e % 2 >= limits[t][e / 2]) s[t][n][e] = -CUDART_INF_F;
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
          if (i == 0) continue;  // O is still zero
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
    const uint32_t v_address = v_lane_address + stage * static_cast<uint32_t>(sizeof(ring[0]));
#pragma unroll
    for (int d = 0; d < D_TILES; d += 2) {
      uint32_t v[4];
      fa::ldmatrix_x4_trans(v, v_address ^ d * sizeof(uint4));
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
  if (warp_steps > 0 || OMIT != EMPTY_SPLIT) {
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

  // Merge the warps, and send each vector to the block of the cluster that finishes it.  Each block finishes an equal, contiguous
  // part of the vectors.
  const auto merge_warps = [&](int vector) {
    const int row = vector / ROW_VECTORS, index = partial_index<ROW_VECTORS>(row, vector % ROW_VECTORS);
    Partial merged = no_partial(), sources[WARPS];
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const float2 m_and_l = smem.warp_m_and_l[w][row];
      sources[w].o = partial_o(w)[index], sources[w].m = m_and_l.x, sources[w].l = m_and_l.y;
    }
    merge(merged, sources);
    return merged;
  };
  if (cluster_size == 1) {
    for (int vector = threadIdx.x; vector < vectors; vector += THREADS) {
      store<T, HEAD_DIM>(params, split, work, vector, merge_warps(vector));
    }
    return;
  }
  const int own_vectors = vectors >> split.cluster_log2, sent_vectors = vectors - own_vectors;
  const auto send = [&](int vector, const Partial& merged) {
    int owner = 0, slot = vector;
    for (int half = cluster_size / 2; half > 0; half /= 2) {  // owner = vector / own_vectors, and slot is the remainder
      if (slot >= half * own_vectors) owner += half, slot -= half * own_vectors;
    }
    slot += own_vectors * (work.rank - (work.rank > owner ? 1 : 0));  // a block has no slots for itself
    const uint32_t barrier_address = fa::mapa(fa::smem_address(&smem.incoming_full), owner);
    fa::st_async(fa::mapa(fa::smem_address(&smem.incoming_o[slot]), owner), merged.o, barrier_address);
    fa::st_async(fa::mapa(fa::smem_address(&smem.incoming_m_and_l[slot]), owner), make_float2(merged.m, merged.l), barrier_address);
  };
  // Merges the blocks of the cluster, for one vector per lane with `is_valid`, of which the lane passes the merge of its own warps.
  // No block exits before it has received everything, so none sends to one that has exited.
  const uint64_t cluster_stride = (min(BlockSmem::ROWS, params.seq_q * split.group) * ROW_VECTORS >> split.cluster_log2) * PACKETS;
  const auto finish = [&](int slot, bool is_valid, Partial merged) {
    const int vector = work.rank * own_vectors + slot;
    if (OMIT != INCOMING_FULL) {
      while (!fa::mbarrier_try_wait(&smem.incoming_full, 0)) {
      }
    }
    for (int first_source = 0; first_source < cluster_size - 1 && is_valid; first_source += MERGED_AT_ONCE) {
      Partial sources[MERGED_AT_ONCE];
#pragma unroll
      for (int i = 0; i < MERGED_AT_ONCE; ++i) {
        const int index = min(first_source + i, cluster_size - 2) * own_vectors + slot;
        const float4 incoming_o = smem.incoming_o[index];
        const float2 m_and_l = smem.incoming_m_and_l[index];
        const bool is_source = first_source + i < cluster_size - 1;  // the last one is loaded again in place of those that do not exist
        sources[i].o = incoming_o, sources[i].m = is_source ? m_and_l.x : -CUDART_INF_F, sources[i].l = m_and_l.y;
      }
      merge(merged, sources);
    }
    if (LEVELS == 2 && split.clusters > 1) {
      const uint64_t group = ((uint64_t(work.tile) << split.cluster_log2) + work.rank) * split.clusters;  // of packets
      Packet* slot_gmem = split.packets + group * cluster_stride + slot * PACKETS;
      merge_clusters<T, HEAD_DIM>(params, split, work, merged, slot_gmem, cluster_stride, vector, is_valid, lane);
    } else if (is_valid) {
      store<T, HEAD_DIM>(params, split, work, vector, merged);
    }
  };
  if constexpr (SHORT_CALLS) {
    // One pass: the vectors of this block come last, and other threads merge them while the first ones send.
    for (int first = 0; first < vectors; first += THREADS) {
      const int i = first + threadIdx.x, slot = i - sent_vectors;
      const bool is_own = slot >= 0 && i < vectors;
      Partial merged = no_partial();
      if (i < vectors) {
        const int vector = is_own ? work.rank * own_vectors + slot : i + (i >= work.rank * own_vectors ? own_vectors : 0);
        merged = merge_warps(vector);
        if (!is_own) send(vector, merged);
      }
      __syncwarp();  // no lane waits for other blocks before all lanes have sent
      if (first + THREADS > sent_vectors) finish(slot, is_own, merged);
    }
  } else {
    for (int i = threadIdx.x; i < sent_vectors; i += THREADS) {
      const int vector = i + (i >= work.rank * own_vectors ? own_vectors : 0);  // skips the vectors of this block
      send(vector, merge_warps(vector));
    }
    for (int first = 0; first < own_vectors; first += THREADS) {
      const int slot = first + threadIdx.x;
      const bool is_valid = slot < own_vectors;
      finish(slot, is_valid, is_valid ? merge_warps(work.rank * own_vectors + slot) : no_partial());
    }
  }
}

// How a call is divided: rows into tiles, and the keys of a tile over blocks.
struct Plan {
  int64_t group, row_tiles, row_blocks, tiles_per_batch, tiles;
  bool is_wide;
  int cluster_log2, clusters;
  int64_t vectors_per_block;  // float4 of O that each block of a cluster finishes
};

template <typename T, int WARPS, int HEAD_DIM, int ROW_TILES>
struct Launcher {
  static constexpr auto KERNEL = &decode_cluster_kernel<T, WARPS, HEAD_DIM, ROW_TILES>;
  static constexpr int SMEM_BYTES = sizeof(Smem<WARPS, HEAD_DIM, ROW_TILES>);

  static int set_up(const FaForwardArgs* args) {
    static fa::OncePerDevice once;
    return once([&] {
      const auto* function = reinterpret_cast<const void*>(KERNEL);
      if (int error = fa_allow_dynamic_smem(args, function, SMEM_BYTES)) return error;
      return static_cast<int>(cudaFuncSetAttribute(function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    });
  }

  static cudaLaunchConfig_t config(dim3 grid, int cluster_log2, cudaLaunchAttribute* cluster) {
    cluster->id = cudaLaunchAttributeClusterDimension;
    cluster->val.clusterDim.x = 1u << cluster_log2, cluster->val.clusterDim.y = 1, cluster->val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(WARPS * WARP);
    config.dynamicSmemBytes = SMEM_BYTES;
    config.attrs = cluster;
    config.numAttrs = cluster_log2 > 0 ? 1 : 0;
    return config;
  }

  // The number of clusters that run at once, queried once per GPU; 0 after an error.  A GPU has fewer SMs in some of its clusters'
  // places than in others, so this is less than the number of SMs divided by the size.
  static int clusters_at_once(int cluster_log2) {
    static std::atomic<int> cached[64][MAX_CLUSTER_LOG2 + 1];
    int device = 0, clusters = 0;
    if (cudaGetDevice(&device) != cudaSuccess || device >= 64) return 0;
    std::atomic<int>& known = cached[device][cluster_log2];
    if ((clusters = known.load(std::memory_order_relaxed)) > 0) return clusters;
    cudaLaunchAttribute cluster;
    const cudaLaunchConfig_t launch_config = config(dim3(1u << cluster_log2), cluster_log2, &cluster);
    if (cudaOccupancyMaxActiveClusters(&clusters, KERNEL, &launch_config) != cudaSuccess) return 0;
    known.store(clusters, std::memory_order_relaxed);
    return clusters;
  }

  static int launch(const FaForwardArgs* args, const Plan& plan, const Split& split, const fa::Params& params, cudaStream_t stream) {
    const unsigned columns = static_cast<unsigned>(plan.clusters) << plan.cluster_log2;
    const unsigned in_y = std::min<int64_t>(plan.tiles, 1 << 15), in_z = (plan.tiles + in_y - 1) / in_y;
    cudaLaunchAttribute cluster;
    cudaLaunchConfig_t launch_config = config(dim3(columns, in_y, in_z), plan.cluster_log2, &cluster);
    launch_config.stream = stream;
    return static_cast<int>(cudaLaunchKernelEx(&launch_config, KERNEL, params, split));
  }
};

// The tiles of a call.
Plan make_tiles(const FaForwardArgs* args) {
  Plan plan = {};
  plan.group = args->heads / args->kv_heads;
  const int64_t rows = args->seq_q * plan.group;
  plan.row_tiles = rows > MMA_M ? 2 : 1;
  plan.row_blocks = (rows + plan.row_tiles * MMA_M - 1) / (plan.row_tiles * MMA_M);
  plan.tiles_per_batch = args->kv_heads * plan.row_blocks;
  plan.tiles = args->batch * plan.tiles_per_batch;
  return plan;
}

// Chooses the number of blocks per tile with the least expected time.  All blocks must run at once, each on an SM of its own.  If
// there are more tiles than SMs, narrow blocks take one tile each: of the two on an SM, one computes while the other one starts.
template <typename T, int HEAD_DIM, int ROW_TILES>
Plan make_plan(const FaForwardArgs* args) {
  using Wide = Launcher<T, WIDE, HEAD_DIM, ROW_TILES>;
  Plan plan = make_tiles(args);
  plan.clusters = 1;
  plan.is_wide = plan.tiles <= fa::sm_count();
  const int64_t steps = (args->seq_k + STEP_KEYS - 1) / STEP_KEYS;
  const double tile_kb = static_cast<double>(args->seq_k * HEAD_DIM * 4) / 1e3;
  // Measured on an H200: what an SM, a GPC and the GPU read, and what the merges of blocks and of clusters take.
  constexpr double SM_KB_PER_US = 65, GPC_KB_PER_US = 690, GPU_KB_PER_US = 4500;
  constexpr double CLUSTER_US = 0.7, CLUSTERS_US = 2.5, EACH_CLUSTER_US = 0.1;
  double best_us = 0;
  for (int log2 = 0; log2 <= MAX_CLUSTER_LOG2 && plan.is_wide; ++log2) {
    const int64_t at_once = log2 == 0 ? fa::sm_count() : Wide::clusters_at_once(log2);
    const int64_t most = LEVELS == 1 || log2 == 0 ? 1 : std::min<int64_t>(at_once / plan.tiles, MAX_CLUSTERS);
    for (int64_t clusters = 1; clusters <= most && clusters * plan.tiles <= at_once; ++clusters) {
      const int64_t blocks = clusters << log2;
      if (blocks > 1 && steps < blocks * WIDE / 2) break;  // at least half of the warps have keys
      const double call_kb = tile_kb * static_cast<double>(plan.tiles);
      double us = std::max(tile_kb / static_cast<double>(blocks) / SM_KB_PER_US, call_kb / GPU_KB_PER_US);
      // A cluster lies in one GPC.
      if (log2 > 0) us = std::max(us, call_kb / static_cast<double>(plan.tiles * clusters) / GPC_KB_PER_US) + CLUSTER_US;
      if (clusters > 1) us += CLUSTERS_US + EACH_CLUSTER_US * static_cast<double>(clusters);
      if (best_us > 0 && us >= best_us) continue;
      best_us = us, plan.cluster_log2 = log2, plan.clusters = static_cast<int>(clusters);
    }
  }
  // With at most one step per warp of a wide block, the merge of eight warps takes longer than a second step of four.
  if (SHORT_CALLS && steps <= (int64_t(plan.clusters) << plan.cluster_log2) * WIDE) plan.is_wide = false;
  const int64_t rows = std::min(args->seq_q * plan.group, plan.row_tiles * MMA_M);
  plan.vectors_per_block = rows * HEAD_DIM / 4 >> plan.cluster_log2;
  return plan;
}

size_t workspace_bytes(const Plan& plan) {
  if (plan.clusters == 1) return 0;
  return (plan.tiles << plan.cluster_log2) * plan.clusters * plan.vectors_per_block * PACKETS * sizeof(Packet);
}

// The number of clusters that are merged.  The deliberately wrong kernel takes that of the call before.
int clusters_to_merge(const Plan& plan) {
  static int previous = 1;
  return OMIT == OWN_COUNT ? std::exchange(previous, plan.clusters) : plan.clusters;
}

template <typename T, int HEAD_DIM, int ROW_TILES>
int forward(const FaForwardArgs* args, cudaStream_t stream) {
  using Wide = Launcher<T, WIDE, HEAD_DIM, ROW_TILES>;
  using Narrow = Launcher<T, NARROW, HEAD_DIM, ROW_TILES>;
  // The first query of a tile must not see more keys than there are.  Under a top-left mask, it can.
  if (args->causal == FA_CAUSAL_TOP_LEFT) return fa_refuse(args, "the top-left mask is not supported; the last query must see all keys");
  fa::Params params;
  if (int status = fa::make_params(args, MMA_M, 1, &params)) return status;
  const Plan tiles = make_tiles(args);
  if (tiles.tiles > INT32_MAX / 2 || args->seq_q * tiles.group > INT32_MAX / 2 / tiles.group) {
    return fa_refuse(args, "the shape is too large: batch %lld, seq_q %lld, heads %lld", static_cast<long long>(args->batch),
                     static_cast<long long>(args->seq_q), static_cast<long long>(args->heads));
  }
  if (int status = Wide::set_up(args)) return status;
  if (int status = Narrow::set_up(args)) return status;
  const Plan plan = make_plan<T, HEAD_DIM, ROW_TILES>(args);
  if (args->workspace_bytes < workspace_bytes(plan) || reinterpret_cast<uintptr_t>(args->workspace) % alignof(Packet) != 0) {
    return fa_refuse(args, "the workspace has %llu bytes at %p; it needs %zu bytes, aligned to %zu",
                     static_cast<unsigned long long>(args->workspace_bytes), args->workspace, workspace_bytes(plan), alignof(Packet));
  }
  const int64_t all_steps = (args->seq_k + STEP_KEYS - 1) / STEP_KEYS, blocks = int64_t(plan.clusters) << plan.cluster_log2;
  const Split split = {static_cast<Packet*>(args->workspace),
                       static_cast<uint32_t>(plan.tiles),
                       static_cast<uint32_t>(plan.tiles_per_batch),
                       static_cast<uint32_t>(all_steps / blocks),
                       static_cast<uint32_t>(all_steps % blocks),
                       static_cast<int>(plan.group),
                       static_cast<int>(plan.row_blocks),
                       plan.cluster_log2,
                       plan.clusters,
                       clusters_to_merge(plan)};
  return plan.is_wide ? Wide::launch(args, plan, split, params, stream) : Narrow::launch(args, plan, split, params, stream);
}

template <typename T, int HEAD_DIM, int ROW_TILES>
size_t workspace_of(const FaForwardArgs* args) {
  return Launcher<T, WIDE, HEAD_DIM, ROW_TILES>::set_up(args) == 0 ? workspace_bytes(make_plan<T, HEAD_DIM, ROW_TILES>(args)) : 0;
}

FA_EXPORT size_t fa_workspace_bytes(const FaForwardArgs* args) {
  const bool is_one_tile = make_tiles(args).row_tiles == 1;
#define WORKSPACE_IF(DTYPE, HEAD_DIM_)                                                                   \
  if (args->dtype == FA_DTYPE_##DTYPE && args->head_dim == HEAD_DIM_) {                                  \
    return is_one_tile ? workspace_of<DTYPE, HEAD_DIM_, 1>(args) : workspace_of<DTYPE, HEAD_DIM_, 2>(args); \
  }
  FA_FOR_EACH_INSTANTIATION(WORKSPACE_IF)
#undef WORKSPACE_IF
  return 0;  // fa_forward refuses the call
}

FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t stream) {
  if (int status = fa_check_abi(args)) return status;
  const bool is_one_tile = make_tiles(args).row_tiles == 1;
#define LAUNCH_IF(DTYPE, HEAD_DIM_)                                                                                    \
  if (args->dtype == FA_DTYPE_##DTYPE && args->head_dim == HEAD_DIM_) {                                                \
    return is_one_tile ? forward<DTYPE, HEAD_DIM_, 1>(args, stream) : forward<DTYPE, HEAD_DIM_, 2>(args, stream); \
  }
  FA_FOR_EACH_INSTANTIATION(LAUNCH_IF)
#undef LAUNCH_IF
  return fa_refuse(args, "no instantiation for dtype %d with head_dim %lld", args->dtype, static_cast<long long>(args->head_dim));
}

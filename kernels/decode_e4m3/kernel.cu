// decode_e4m3: caches in e4m3 beside queries in fp16 or bf16, with scales for the tensor, each head, or each key.
// step:    K and V are copied as bytes and converted in registers; scales of K multiply S, and those of V multiply P
// because: decode takes the time of the bytes of K and V, and e4m3 has half of them
// expect:  with 32 heads, 8 key/value heads and D = 128, 18 us at 32768 keys and 33 us for 16 batches of 4096 keys, where
//          decode_paged reads twice as many bytes; at 1024 keys, the time of decode_paged
// diff:    rings of bytes and scales, the conversions, and the columns of O, which alternate between two tiles
// tile:    as in decode_paged, with as many bytes in a ring
// takes:   fp16 and bf16 with K and V in e4m3, D = 64 and 128, any S_q >= 1, the bottom-right causal mask, grouped heads, lengths of
//          keys, pages of 16, 64, 128 or 256 keys in either order; rows contiguous and 16-byte aligned
#include "fa/decode_exchange.cuh"
#include "fa/decode_numbers.cuh"
#include "fa/decode_packets.cuh"
#include "fa/decode_pages.cuh"
#include "fa/decode_plan.h"
#include "fa/entry.h"

using fa::Cache, fa::KEY_TILES, fa::LANE_ROWS, fa::MMA_N, fa::NARROW, fa::PackedTile, fa::Packet, fa::PACKETS, fa::Pages, fa::Partial,
    fa::Plan, fa::QUAD, fa::Split, fa::STEP_KEYS, fa::WARP, fa::WIDE;

// K and V of up to AT_ONCE steps, as chunks of 16 numbers, and the scales of both.
template <int HEAD_DIM, int AT_ONCE_>
struct Stage {
  static constexpr int CHUNKS = HEAD_DIM / 16, AT_ONCE = AT_ONCE_;
  uint4 k[AT_ONCE][STEP_KEYS * CHUNKS], v[AT_ONCE][STEP_KEYS * CHUNKS];
  float scales[AT_ONCE][2][STEP_KEYS];  // of K and of V
};

// Copies K or V of every WARPS-th step to the ring of a warp, one step per call.  A step lies in one page.
template <int WARPS, int HEAD_DIM, bool IS_V>
struct NumberCopier {
  static constexpr int CHUNKS = HEAD_DIM / 16, COPY_ROWS = WARP / CHUNKS;  // rows per copy of the whole warp
  const uint4* head_gmem;  // this lane's chunk of its first row of the head in page 0
  fa::VectorStrides strides;
  Pages pages;
  int first_key, page;  // of the next step; the page is looked up one step ahead

  __device__ __forceinline__ NumberCopier(const fa::Numbers& numbers, const Cache& cache, const PackedTile& tile, const fa::Thread& thread)
      : head_gmem(numbers.gmem + uint64_t(tile.kv_head) * numbers.strides.head +
                  uint64_t(thread.lane / CHUNKS) * numbers.strides.row + thread.lane % CHUNKS),
        strides(numbers.strides),
        pages(cache, tile.batch),
        first_key((tile.first_step + thread.warp) * STEP_KEYS),
        page(pages.of(first_key, tile.visible)) {}

  __device__ __forceinline__ int first_slot() const { return first_key & ((1u << pages.log2) - 1); }  // in the page

  // Starts the copy of the next step.  Rows from `visible` on become zero.
  __device__ __forceinline__ void operator()(uint4* tile_smem, int visible, int lane) {
    const uint4* from_gmem = head_gmem + uint64_t(page) * strides.batch + uint64_t(first_slot()) * strides.row;
#pragma unroll
    for (int i = 0; i < STEP_KEYS / COPY_ROWS; ++i) {
      const int row = i * COPY_ROWS + lane / CHUNKS;
      fa::cp_async_16_or_zero(&tile_smem[row * CHUNKS + fa::swizzled<CHUNKS, IS_V>(row, lane % CHUNKS)],
                              from_gmem + uint64_t(i * COPY_ROWS) * strides.row, first_key + row < visible);
    }
    first_key += WARPS * STEP_KEYS;
    page = pages.of(first_key, visible);
  }
};

// The ring of a warp, which takes every WARPS-th step of its block.
template <int WARPS, int HEAD_DIM, int DEPTH, int AT_ONCE>
struct NumberRing {
  using Smem = Stage<HEAD_DIM, AT_ONCE>[DEPTH];
  Smem& stages;
  int steps;  // of this warp; at most 0 if it has no keys
  int visible, lane;
  NumberCopier<WARPS, HEAD_DIM, false> k_copier;
  NumberCopier<WARPS, HEAD_DIM, true> v_copier;
  const float* scale_gmem;  // of this lane's key of a step, in slot 0 of page 0: of K in the lower half of the warp, of V in the upper one
  int64_t scale_page, scale_key;  // strides

  __device__ __forceinline__ NumberRing(Smem& stages, const fa::Numbers& k, const fa::Numbers& v, const Cache& cache, const PackedTile& tile,
                                        const fa::Thread& thread)
      : stages(stages),
        steps((tile.steps - thread.warp + WARPS - 1) / WARPS),
        visible(tile.visible),
        lane(thread.lane),
        k_copier(k, cache, tile, thread),
        v_copier(v, cache, tile, thread) {
    const fa::Numbers& own = lane < STEP_KEYS ? k : v;
    scale_page = own.scale_strides.batch, scale_key = own.scale_strides.seq;
    scale_gmem = own.scales + tile.kv_head * own.scale_strides.head + lane % STEP_KEYS * scale_key;
  }

  // Start the copies of the steps from `first` on into a stage, as one group of copies for K and all scales, because P needs those of
  // V, and one for V.
  __device__ __forceinline__ void copy_k(int first, int stage) {
#pragma unroll
    for (int s = 0; s < AT_ONCE; ++s) {
      if (first + s >= steps) break;
      const float* from_gmem = scale_gmem + k_copier.page * scale_page + k_copier.first_slot() * scale_key;
      fa::cp_async_4_or_zero(&stages[stage].scales[s][0][lane], from_gmem, k_copier.first_key + lane % STEP_KEYS < visible);
      k_copier(stages[stage].k[s], visible, lane);
    }
    fa::cp_async_commit_group();
  }
  __device__ __forceinline__ void copy_v(int first, int stage) {
#pragma unroll
    for (int s = 0; s < AT_ONCE; ++s) {
      if (first + s < steps) v_copier(stages[stage].v[s], visible, lane);
    }
    fa::cp_async_commit_group();
  }
};

// The largest scale of V so far, and its inverse.
struct LargestScale {
  float value = FLT_MIN, inverse = 1.0f / FLT_MIN;

  // Raises it to the scales of V of a step, which a quad has all of, and keeps O as a multiple of it.
  template <int ROW_TILES, int D_TILES>
  __device__ __forceinline__ void raise(float (&o)[ROW_TILES][D_TILES][4], float lane_scale) {
    if (!__any_sync(0xffffffffu, lane_scale > value)) return;
    const float raised = fmaxf(value, fa::max_of_quad(lane_scale));
    fa::scale_rows(o, value / raised);
    value = raised, inverse = 1.0f / raised;
  }
};

// What the steps of a warp need.
template <typename T, int WARPS, int HEAD_DIM, int ROW_TILES, int DEPTH, int AT_ONCE>
struct Attention {
  const fa::RowState<ROW_TILES, HEAD_DIM / MMA_N>& state;
  NumberRing<WARPS, HEAD_DIM, DEPTH, AT_ONCE>& ring;
  const fa::Queries<HEAD_DIM, ROW_TILES>& queries;
  const typename fa::Queries<HEAD_DIM, ROW_TILES>::Smem& q_smem;
  const fa::KeyLimits<ROW_TILES>& limits;
  float scale_log2;
  bool is_negated;
  const fa::Thread& thread;
  LargestScale largest;

  // N steps from step `first` of the warp on, in a stage of the ring; the last key of the first one is `last_key`.  The products and
  // conversions of a step do not wait for those of another.  P is multiplied by the scales of V over the largest one so far, so that
  // it neither overflows nor loses precision.
  template <int N>
  __device__ __forceinline__ void add_steps(int first, int stage, int last_key) {
    Stage<HEAD_DIM, AT_ONCE>& smem = ring.stages[stage];
    fa::Scores<ROW_TILES> scores[N];
    float2 v_scales[N][KEY_TILES];
    float lane_scale = 0.0f;
    fa::wait_copies<fa::K_COPIED, 2 * DEPTH - 1>();
    __syncwarp();  // the copies of all lanes are visible to all lanes
#pragma unroll
    for (int s = 0; s < N; ++s) {
      float2 k_scales[KEY_TILES];
#pragma unroll
      for (int n = 0; n < KEY_TILES; ++n) {
        k_scales[n] = reinterpret_cast<const float2*>(smem.scales[s][0])[n * QUAD + thread.lane % QUAD];
        v_scales[s][n] = reinterpret_cast<const float2*>(smem.scales[s][1])[n * QUAD + thread.lane % QUAD];
        lane_scale = fmaxf(lane_scale, fmaxf(v_scales[s][n].x, v_scales[s][n].y));
      }
      fa::multiply_qk<T>(scores[s], queries, q_smem, smem.k[s], k_scales, thread);
    }
    __syncwarp();  // all lanes have read K and the scales, so they may be overwritten
    ring.copy_k(first + DEPTH * AT_ONCE, stage);

    uint32_t p[N][ROW_TILES][4];
    largest.raise(state.o, lane_scale);
#pragma unroll
    for (int s = 0; s < N; ++s) {
      const int last = last_key + s * WARPS * STEP_KEYS;
      fa::raise_max(state, scores[s], limits, last >= limits.least, last, scale_log2, is_negated, first + s == 0, thread.lane);
    }
#pragma unroll
    for (int s = 0; s < N; ++s) {
#pragma unroll
      for (int n = 0; n < KEY_TILES; ++n) v_scales[s][n].x *= largest.inverse, v_scales[s][n].y *= largest.inverse;
      fa::exponentials<T, true>(p[s], state, scores[s], scale_log2, v_scales[s]);
    }

    fa::wait_copies<fa::V_COPIED, 2 * DEPTH - 1>();
    __syncwarp();  // the copies of all lanes are visible to all lanes
#pragma unroll
    for (int s = 0; s < N; ++s) fa::add_pv<T>(state, p[s], smem.v[s], thread.lane);
    __syncwarp();  // all lanes have read V, so it may be overwritten
    ring.copy_v(first + DEPTH * AT_ONCE, stage);
  }

  // The main loop: all steps of a warp.  It has no barrier of the block.  Returns the scale by which O must be multiplied.
  __device__ __forceinline__ float run(int first_step) {
    int last_key = first_step * STEP_KEYS + STEP_KEYS - 1;
    for (int i = 0, stage = 0; i < ring.steps; i += AT_ONCE, stage = stage + 1 < DEPTH ? stage + 1 : 0) {
      i + AT_ONCE <= ring.steps ? add_steps<AT_ONCE>(i, stage, last_key) : add_steps<1>(i, stage, last_key);
      last_key += AT_ONCE * WARPS * STEP_KEYS;
    }
    return fa::HAS_MISTAKE<fa::V_SCALES> ? 1.0f : largest.value;
  }
};

// The steps of a ring.  Two row tiles need shared memory for their O.
constexpr int ring_depth(int head_dim, int row_tiles) {
  const int depth = STAGES * 128 / head_dim;
  return depth > 4 * (row_tiles - 1) ? depth : 4 * (row_tiles - 1);
}

template <int WARPS, int HEAD_DIM, int ROW_TILES>
struct Smem {
  static constexpr int ROWS = ROW_TILES * fa::MMA_M, VECTORS = ROWS * HEAD_DIM / 4;  // float4 of the tile's O
  static constexpr int AT_ONCE = ROW_TILES == 1 ? 2 : 1;  // steps; with two row tiles, the registers suffice for one
  static constexpr int DEPTH = ring_depth(HEAD_DIM, ROW_TILES) / AT_ONCE;
  using Ring = NumberRing<WARPS, HEAD_DIM, DEPTH, AT_ONCE>;
  alignas(256) typename Ring::Smem rings[WARPS];
  typename fa::Queries<HEAD_DIM, ROW_TILES>::Smem q;
  float4 incoming_o[VECTORS];        // [source block, vectors that this block finishes], without those of this block
  float2 incoming_m_and_l[VECTORS];  // the same
  float2 warp_m_and_l[WARPS][ROWS];
  uint64_t incoming_full;  // the mbarrier that counts the bytes of the two incoming arrays
  static_assert(sizeof(rings[0]) >= VECTORS * sizeof(float4), "the ring of a warp must hold its partial O");
};

template <typename T, int WARPS, int HEAD_DIM, int ROW_TILES>
__global__ void __launch_bounds__(WARPS * WARP, WIDE / WARPS) decode_e4m3_kernel(const fa::Params call, const Cache cache, const fa::Numbers k,
                                                                                         const fa::Numbers v, const Split split) {
  using BlockSmem = Smem<WARPS, HEAD_DIM, ROW_TILES>;
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<BlockSmem*>(smem_bytes);
  constexpr int THREADS = WARPS * WARP, ROW_VECTORS = HEAD_DIM / 4;
  const fa::Thread thread;
  PackedTile tile = fa::make_packed_tile(call, split.tiles, BlockSmem::ROWS);
  const int rank = blockIdx.x & ((1u << split.cluster_log2) - 1), cluster = blockIdx.x >> split.cluster_log2;
  if (tile.number >= split.tiles.count) return;  // the last blocks of a grid with more than 2^15 tiles
  const fa::Params params = fa::params_of_sequence(call, cache, tile.batch);
  fa::divide_keys(tile, params);

  // Start the copies of K and V, and load Q.
  typename BlockSmem::Ring ring(smem.rings[thread.warp], k, v, cache, tile, thread);
  ring.copy_k(0, 0);
  ring.copy_v(0, 0);
  fa::Queries<HEAD_DIM, ROW_TILES> queries;
  queries.load(params, split.tiles, tile, smem.q, WARPS, thread);
#pragma unroll 1
  for (int stage = 1; stage < BlockSmem::DEPTH; ++stage) {
    ring.copy_k(stage * BlockSmem::AT_ONCE, stage);
    ring.copy_v(stage * BlockSmem::AT_ONCE, stage);
  }

  // The rest of the setup overlaps with the copies.
  const int cluster_size = 1 << split.cluster_log2;
  const int vectors = tile.rows * ROW_VECTORS;
  if (cluster_size > 1) fa::expect_incoming(&smem.incoming_full, vectors, split.cluster_log2, cluster_size);
  if (queries.IN_SMEM) __syncthreads();
  const float scale_log2 = fa::scale_log2_of(params);
  const bool is_negated = fa::negate_q(params);
  const fa::KeyLimits<ROW_TILES> limits(params, tile, thread);

  // All keys of the warp.
  float o[ROW_TILES][HEAD_DIM / fa::MMA_N][4] = {};
  float m[ROW_TILES][fa::LANE_ROWS];       // unscaled row max at the last rescale
  float l[ROW_TILES][fa::LANE_ROWS] = {};  // this lane's part of the running row sum
#pragma unroll
  for (int t = 0; t < ROW_TILES; ++t) m[t][0] = m[t][1] = -CUDART_INF_F;
  const fa::RowState<ROW_TILES, HEAD_DIM / fa::MMA_N> state{o, m, l};
  Attention<T, WARPS, HEAD_DIM, ROW_TILES, BlockSmem::DEPTH, BlockSmem::AT_ONCE> attention{
      state, ring, queries, smem.q, limits, scale_log2, is_negated, thread, {}};
  const float v_scale = attention.run(tile.first_step + thread.warp);
  fa::order_columns(o, v_scale, thread.lane);

  // Store the partial result of the warp.  Its ring is free: every copy has been waited for.
  const fa::WarpPartials<WARPS, HEAD_DIM, typename BlockSmem::Ring::Smem> partials{smem.rings};
  if (ring.steps > 0 || !fa::HAS_MISTAKE<fa::EMPTY_SPLIT>) partials.store(smem.warp_m_and_l, state, tile.rows, scale_log2, thread);
  __syncwarp();
  if (cluster_size > 1) fa::barrier_cluster_wait();  // all blocks run and have initialised their mbarriers
  fa::sync_block<fa::WARP_PARTIAL_STORED>();
  if (cluster_size == 1) {
    for (int vector = threadIdx.x; vector < vectors; vector += THREADS) {
      fa::store_vector<T, HEAD_DIM>(params, split.tiles, tile, vector, partials.merge_vector(smem.warp_m_and_l, vector));
    }
    return;
  }

  // Merge the warps, and send each vector to the block of the cluster that finishes it.
  const fa::Exchange<BlockSmem> exchange(smem, vectors, split.cluster_log2, rank);
  const uint64_t cluster_stride =
      (min(BlockSmem::ROWS, params.seq_q * split.tiles.group) * ROW_VECTORS >> split.cluster_log2) * PACKETS;
  for (int i = threadIdx.x; i < exchange.sent_vectors; i += THREADS) {
    const int vector = i + (i >= rank * exchange.own_vectors ? exchange.own_vectors : 0);  // skips the vectors of this block
    exchange.send(vector, partials.merge_vector(smem.warp_m_and_l, vector));
  }

  // Merge the blocks of the cluster, and then the clusters.
  for (int first = 0; first < exchange.own_vectors; first += THREADS) {
    const int slot = first + threadIdx.x;
    const bool is_valid = slot < exchange.own_vectors;
    const Partial of_block = is_valid ? partials.merge_vector(smem.warp_m_and_l, rank * exchange.own_vectors + slot) : fa::no_partial();
    const int vector = rank * exchange.own_vectors + slot;
    const Partial merged = exchange.merge_incoming(slot, is_valid, of_block);
    if (split.clusters > 1) {
      const uint64_t group = ((uint64_t(tile.number) << split.cluster_log2) + rank) * split.clusters;  // of packets
      Packet* slot_gmem = split.packets + group * cluster_stride + slot * PACKETS;
      fa::merge_clusters<T, HEAD_DIM>(params, split, tile, merged, cluster, slot_gmem, cluster_stride, vector, is_valid, thread.lane);
    } else if (is_valid) {
      fa::store_vector<T, HEAD_DIM>(params, split.tiles, tile, vector, merged);
    }
  }
}

template <typename T, int WARPS, int HEAD_DIM, int ROW_TILES>
using Launcher =
    fa::ClusterLauncher<&decode_e4m3_kernel<T, WARPS, HEAD_DIM, ROW_TILES>, WARPS, sizeof(Smem<WARPS, HEAD_DIM, ROW_TILES>)>;

constexpr double SM_KB_PER_US = 30;  // the keys that an SM converts and multiplies, measured on an H200

size_t workspace_bytes(const Plan& plan) {
  if (plan.clusters == 1) return 0;
  return (plan.tiles << plan.cluster_log2) * plan.clusters * plan.vectors_per_block * PACKETS * sizeof(Packet);
}

template <typename T, int HEAD_DIM, int ROW_TILES>
int launch_tiles(const FaForwardArgs* args, cudaStream_t stream) {
  using Wide = Launcher<T, WIDE, HEAD_DIM, ROW_TILES>;
  using Narrow = Launcher<T, NARROW, HEAD_DIM, ROW_TILES>;
  fa::Params params;
  Cache cache;
  if (int status = fa::make_decode_params(args, &params)) return status;
  fa::Numbers k, v;
  const FaForwardArgs all = fa_copy_args(args);
  if (!(all.features & FA_CACHE_DTYPE) || all.cache_dtype != FA_DTYPE_e4m3) return fa_refuse(args, "k and v must be e4m3 beside scales");
  if (int status = fa::make_cache(args, &cache)) return status;
  if (int status = fa::make_numbers(args, args->k, args->k_stride, all.k_scale, all.k_scale_stride, &k)) return status;
  if (int status = fa::make_numbers(args, args->v, args->v_stride, all.v_scale, all.v_scale_stride, &v)) return status;
  if (int status = Wide::set_up(args)) return status;
  if (int status = Narrow::set_up(args)) return status;
  const Plan plan = fa::make_plan<Wide>(args, fa::MAX_CLUSTERS, 1, SM_KB_PER_US);
  if (args->workspace_bytes < workspace_bytes(plan) || reinterpret_cast<uintptr_t>(args->workspace) % alignof(Packet) != 0) {
    return fa_refuse(args, "the workspace has %llu bytes at %p; it needs %zu bytes, aligned to %zu",
                     static_cast<unsigned long long>(args->workspace_bytes), args->workspace, workspace_bytes(plan), alignof(Packet));
  }
  const Split split = {static_cast<Packet*>(args->workspace), fa::packed_tiles(args, plan), plan.cluster_log2, plan.clusters,
                       plan.clusters};
  return plan.is_wide ? Wide::launch(plan, stream, params, cache, k, v, split) : Narrow::launch(plan, stream, params, cache, k, v, split);
}

template <typename T, int HEAD_DIM>
int launch(const FaForwardArgs* args, cudaStream_t stream) {
  return fa::make_tiles(args).row_tiles == 1 ? launch_tiles<T, HEAD_DIM, 1>(args, stream) : launch_tiles<T, HEAD_DIM, 2>(args, stream);
}

template <typename T, int HEAD_DIM, int ROW_TILES>
size_t workspace_of(const FaForwardArgs* args) {
  using Wide = Launcher<T, WIDE, HEAD_DIM, ROW_TILES>;
  return Wide::set_up(args) == 0 ? workspace_bytes(fa::make_plan<Wide>(args, fa::MAX_CLUSTERS, 1, SM_KB_PER_US)) : 0;
}

FA_EXPORT size_t fa_workspace_bytes(const FaForwardArgs* args) {
  const bool is_one_tile = fa::make_tiles(args).row_tiles == 1;
#define WORKSPACE_IF(DTYPE, HEAD_DIM_)                                                                   \
  if (args->dtype == FA_DTYPE_##DTYPE && args->head_dim == HEAD_DIM_) {                                  \
    return is_one_tile ? workspace_of<DTYPE, HEAD_DIM_, 1>(args) : workspace_of<DTYPE, HEAD_DIM_, 2>(args); \
  }
  FA_FOR_EACH_INSTANTIATION(WORKSPACE_IF)
#undef WORKSPACE_IF
  return 0;  // fa_forward refuses the call
}

FA_FORWARD_WITH(FA_SEQLENS_K | FA_BLOCK_TABLE | FA_CACHE_DTYPE, launch)

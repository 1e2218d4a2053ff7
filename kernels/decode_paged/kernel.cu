// decode_paged: K and V in pages, with block tables, and sequences of any lengths, which only the device knows; one source for
// decode_paged, decode_window and decode_invariant.
// step:    each warp looks up the page of its next step of 16 keys one step ahead, and each block reads the length of its sequence
// because: servers keep K and V in pages, and lengths grow on the device; decode_cluster needs rows at one distance and one length
// expect:  with pages of 16 keys, 0.5 us more than decode_cluster: the first lookup and the length are two loads, one after another,
//          before the first copy; at 32768 keys and for 16 batches of 4096 keys, 3 % more
// diff:    where the copies find their rows, and the keys of a tile, which the block divides and not the host
// tile:    as in decode_cluster
// takes:   fp16 and bf16, D = 64 and 128, any S_q >= 1, the bottom-right causal mask, grouped heads, lengths of keys, pages of 16, 64,
//          128 or 256 keys in either order (decode_window: windows, sinks); rows contiguous and 16-byte aligned
#include "fa/decode_exchange.cuh"
#include "fa/decode_packets.cuh"
#include "fa/decode_pages.cuh"
#include "fa/decode_plan.h"
#include "fa/decode_ring.cuh"
#include "fa/decode_window.cuh"
#include "fa/entry.h"

// How the work is divided: as in decode_cluster, but each block computes which keys of its sequence are its own.  The host only knows
// for how many keys there is room, and chooses the clusters for them.

using fa::Cache, fa::NARROW, fa::PackedTile, fa::Packet, fa::PACKETS, fa::Pages, fa::Partial, fa::Plan, fa::Split, fa::STEP_KEYS, fa::WARP,
    fa::WIDE;

// Copies K or V of every WARPS-th step to the ring of a warp, one step per call, as StepCopier does.  A step lies in one page.
template <int WARPS, int HEAD_DIM, bool IS_V>
struct PageCopier {
  static constexpr int CHUNKS = HEAD_DIM / 8, COPY_ROWS = WARP / CHUNKS;  // rows per copy of the whole warp
  const uint4* head_gmem;  // this lane's chunk of the first row of the head in page 0
  fa::VectorStrides strides;
  Pages pages;
  int key;   // of this lane's first row of the next step
  int page;  // of the next step; looked up one step ahead

  __device__ __forceinline__ PageCopier(const uint4* gmem, const fa::VectorStrides& strides, const Cache& cache, const PackedTile& tile,
                                        const fa::Thread& thread)
      : head_gmem(gmem + uint64_t(tile.kv_head) * strides.head + thread.lane % CHUNKS),
        strides(strides),
        pages(cache, tile.batch),
        key((tile.first_step + thread.warp) * STEP_KEYS + thread.lane / CHUNKS),
        page(pages.of(key, tile.visible)) {}

  // Starts the copy of the next step.  Rows from `visible` on become zero.
  __device__ __forceinline__ void operator()(uint4* tile_smem, int visible, int lane) {
    const uint64_t row_in_page = key & ((1u << pages.log2) - 1);
    const uint4* from_gmem = head_gmem + uint64_t(page) * strides.batch + row_in_page * strides.row;
#pragma unroll
    for (int i = 0; i < STEP_KEYS / COPY_ROWS; ++i) {
      const int row = i * COPY_ROWS + lane / CHUNKS;
      const int swizzled_chunk = lane % CHUNKS ^ (IS_V ? row % 8 : row % 2 * 4);
      const bool is_visible = key + i * COPY_ROWS < visible || fa::HAS_MISTAKE<fa::TAIL_ZEROS>;
      fa::cp_async_16_or_zero(&tile_smem[row * CHUNKS + swizzled_chunk], from_gmem + uint64_t(i * COPY_ROWS) * strides.row, is_visible);
    }
    key += WARPS * STEP_KEYS;
    if (!fa::HAS_MISTAKE<fa::NEXT_PAGE>) page = pages.of(key, visible);
  }
};

// The keys that this lane's rows see.
template <int ROW_TILES>
__device__ __forceinline__ auto make_limits(const fa::Params& params, const fa::Window& window, const PackedTile& tile,
                                            const fa::Thread& thread) {
  if constexpr (TAKES_WINDOW) {
    return fa::WindowLimits<ROW_TILES>(params, window, tile, thread);
  } else {
    return fa::KeyLimits<ROW_TILES>(params, tile, thread);
  }
}

// Merges the warps of a block, and in the first block of a tile the sink.
template <typename Partials, typename WarpSums>
__device__ __forceinline__ Partial merge_warps(const Partials& partials, const WarpSums& warp_m_and_l, int vector, const fa::Params& params,
                                               const fa::Window& window, const fa::PackedTiles& tiles, const PackedTile& tile) {
  const Partial merged = partials.merge_vector(warp_m_and_l, vector);
  if (!TAKES_WINDOW || window.sink == nullptr || blockIdx.x > 0) return merged;
  const uint32_t row = tile.first_row + vector / Partials::ROW_VECTORS;
  const uint32_t head = tile.kv_head * tiles.group + row - fa::query_of(params, row) * tiles.group;
  return fa::with_sink(merged, __ldg(window.sink + head) * CUDART_L2E_F);
}

template <int WARPS, int HEAD_DIM, int ROW_TILES>
struct Smem {
  static constexpr int ROWS = ROW_TILES * fa::MMA_M, VECTORS = ROWS * HEAD_DIM / 4;  // float4 of the tile's O
  using Ring = fa::KeyRing<WARPS, HEAD_DIM, fa::ring_depth(STAGES, HEAD_DIM, ROW_TILES), PageCopier>;
  alignas(256) typename Ring::Smem rings[WARPS];
  typename fa::Queries<HEAD_DIM, ROW_TILES>::Smem q;
  float4 incoming_o[VECTORS];        // [source block, vectors that this block finishes], without those of this block
  float2 incoming_m_and_l[VECTORS];  // the same
  float2 warp_m_and_l[WARPS][ROWS];
  uint64_t incoming_full;  // the mbarrier that counts the bytes of the two incoming arrays
  static_assert(sizeof(rings[0]) >= VECTORS * sizeof(float4), "the ring of a warp must hold its partial O");
};

template <typename T, int WARPS, int HEAD_DIM, int ROW_TILES>
__global__ void __launch_bounds__(WARPS * WARP, WIDE / WARPS)
decode_paged_kernel(const fa::Params call, const Cache cache, const Split split, const fa::Window window_of_call) {
  using BlockSmem = Smem<WARPS, HEAD_DIM, ROW_TILES>;
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<BlockSmem*>(smem_bytes);
  constexpr int THREADS = WARPS * WARP, ROW_VECTORS = HEAD_DIM / 4;
  const fa::Thread thread;
  PackedTile tile = fa::make_packed_tile(call, split.tiles, BlockSmem::ROWS);
  const int rank = blockIdx.x & ((1u << split.cluster_log2) - 1), cluster = blockIdx.x >> split.cluster_log2;
  if (tile.number >= split.tiles.count) return;  // the last blocks of a grid with more than 2^15 tiles
  const fa::Params params = fa::params_of_sequence(call, cache, tile.batch);
  fa::Window window = window_of_call;
  if constexpr (TAKES_WINDOW) {
    window.first_begin += params.seq_k - call.seq_k;
    fa::divide_keys(tile, params, window.first_begin + static_cast<int>(fa::query_of(params, tile.first_row)));
  } else if constexpr (INVARIANT) {
    fa::take_fixed_keys(tile, params, split.tiles.even_steps);
  } else {
    fa::divide_keys(tile, params);
  }

  // Start the copies of K and V, and load Q.
  typename BlockSmem::Ring ring(smem.rings[thread.warp], tile, thread, {params.k, params.k_strides, cache, tile, thread},
                                {params.v, params.v_strides, cache, tile, thread});
  ring.copy_k(0, 0);
  ring.copy_v(0, 0);
  fa::Queries<HEAD_DIM, ROW_TILES> queries;
  queries.load(params, split.tiles, tile, smem.q, WARPS, thread);
  ring.fill();

  // The rest of the setup overlaps with the copies.
  const int cluster_size = 1 << split.cluster_log2;
  const int vectors = tile.rows * ROW_VECTORS;
  if (cluster_size > 1) fa::expect_incoming(&smem.incoming_full, vectors, split.cluster_log2, cluster_size);
  if (queries.IN_SMEM) __syncthreads();
  const float scale_log2 = fa::scale_log2_of(params);
  const bool is_negated = fa::negate_q(params);
  const auto limits = make_limits<ROW_TILES>(params, window, tile, thread);

  // All keys of the warp.
  float o[ROW_TILES][HEAD_DIM / fa::MMA_N][4] = {};
  float m[ROW_TILES][fa::LANE_ROWS];       // unscaled row max at the last rescale
  float l[ROW_TILES][fa::LANE_ROWS] = {};  // this lane's part of the running row sum
#pragma unroll
  for (int t = 0; t < ROW_TILES; ++t) m[t][0] = m[t][1] = -CUDART_INF_F;
  const fa::RowState<ROW_TILES, HEAD_DIM / fa::MMA_N> state{o, m, l};
  fa::attend<T>(state, ring, queries, smem.q, limits, tile.first_step + thread.warp, scale_log2, is_negated);

  // Store the partial result of the warp.  Its ring is free: every copy has been waited for.
  const fa::WarpPartials<WARPS, HEAD_DIM, typename BlockSmem::Ring::Smem> partials{smem.rings};
  if (ring.steps > 0 || !fa::HAS_MISTAKE<fa::EMPTY_SPLIT>) partials.store(smem.warp_m_and_l, state, tile.rows, scale_log2, thread);
  __syncwarp();
  if (cluster_size > 1) fa::barrier_cluster_wait();  // all blocks run and have initialised their mbarriers
  fa::sync_block<fa::WARP_PARTIAL_STORED>();
  const auto merge_block = [&](int vector) {
    return merge_warps(partials, smem.warp_m_and_l, vector, params, window, split.tiles, tile);
  };
  if (cluster_size == 1) {
    for (int vector = threadIdx.x; vector < vectors; vector += THREADS) {
      fa::store_vector<T, HEAD_DIM>(params, split.tiles, tile, vector, merge_block(vector));
    }
    return;
  }

  // Merge the warps, and send each vector to the block of the cluster that finishes it.
  const fa::Exchange<BlockSmem> exchange(smem, vectors, split.cluster_log2, rank);
  const uint64_t cluster_stride =
      (min(BlockSmem::ROWS, params.seq_q * split.tiles.group) * ROW_VECTORS >> split.cluster_log2) * PACKETS;
  for (int i = threadIdx.x; i < exchange.sent_vectors; i += THREADS) {
    const int vector = i + (i >= rank * exchange.own_vectors ? exchange.own_vectors : 0);  // skips the vectors of this block
    exchange.send(vector, merge_block(vector));
  }

  // Merge the blocks of the cluster, and then the clusters.
  for (int first = 0; first < exchange.own_vectors; first += THREADS) {
    const int slot = first + threadIdx.x;
    const bool is_valid = slot < exchange.own_vectors;
    const Partial of_block = is_valid ? merge_block(rank * exchange.own_vectors + slot) : fa::no_partial();
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
    fa::ClusterLauncher<&decode_paged_kernel<T, WARPS, HEAD_DIM, ROW_TILES>, WARPS, sizeof(Smem<WARPS, HEAD_DIM, ROW_TILES>)>;

// The clusters of a tile, and the steps of a block if they do not depend on the sequence.
template <typename Wide>
Plan plan_of(const FaForwardArgs* args, uint32_t* steps_per_block) {
  *steps_per_block = 0;
  if (INVARIANT) return fa::make_invariant_plan(args, steps_per_block);
  const FaForwardArgs visible = fa::with_visible_keys(args);
  return fa::make_plan<Wide>(&visible, fa::MAX_CLUSTERS);
}

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
  if (int status = fa::make_cache(args, &cache)) return status;
  if (int status = Wide::set_up(args)) return status;
  if (int status = Narrow::set_up(args)) return status;
  const fa::Window window = fa::make_window(args, &params);
  uint32_t steps_per_block;
  const Plan plan = plan_of<Wide>(args, &steps_per_block);
  if (args->workspace_bytes < workspace_bytes(plan) || reinterpret_cast<uintptr_t>(args->workspace) % alignof(Packet) != 0) {
    return fa_refuse(args, "the workspace has %llu bytes at %p; it needs %zu bytes, aligned to %zu",
                     static_cast<unsigned long long>(args->workspace_bytes), args->workspace, workspace_bytes(plan), alignof(Packet));
  }
  Split split = {static_cast<Packet*>(args->workspace), fa::packed_tiles(args, plan), plan.cluster_log2, plan.clusters, plan.clusters};
  split.tiles.even_steps = steps_per_block;
  return plan.is_wide ? Wide::launch(plan, stream, params, cache, split, window) : Narrow::launch(plan, stream, params, cache, split, window);
}

template <typename T, int HEAD_DIM>
int launch(const FaForwardArgs* args, cudaStream_t stream) {
  return fa::make_tiles(args).row_tiles == 1 ? launch_tiles<T, HEAD_DIM, 1>(args, stream) : launch_tiles<T, HEAD_DIM, 2>(args, stream);
}

template <typename T, int HEAD_DIM, int ROW_TILES>
size_t workspace_of(const FaForwardArgs* args) {
  using Wide = Launcher<T, WIDE, HEAD_DIM, ROW_TILES>;
  uint32_t steps_per_block;
  return Wide::set_up(args) == 0 ? workspace_bytes(plan_of<Wide>(args, &steps_per_block)) : 0;
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

FA_FORWARD_WITH(FA_SEQLENS_K | FA_BLOCK_TABLE | (TAKES_WINDOW ? FA_WINDOW_LEFT | FA_WINDOW_RIGHT | FA_SINK : 0), launch)

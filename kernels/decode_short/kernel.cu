// decode_short: for calls with few keys, fewer merges.
// step:    blocks of four warps where each of eight would have one step of keys; Q is requested before V; one pass merges the
//          warps, so that the vectors that a block finishes are merged while other threads send theirs
// because: at 1024 keys, nearly half of the time of decode_cluster is for its merges: each block first merges eight partial results
//          of each vector that it sends, and then of each vector that it keeps
// expect:  4.0 us at 1024 keys and 6.2 us at 4096 keys, for 1 batch, 32 heads, 8 key/value heads and D = 128
// diff:    the order of the first copies, the loop of the merges, and one line of the plan
// tile:    as decode_cluster
// takes:   fp16 and bf16, D = 64 and 128, any S_q >= 1 and S_kv >= 0, the bottom-right causal mask, grouped heads; rows
//          contiguous and 16-byte aligned
#include "fa/decode_exchange.cuh"
#include "fa/decode_packets.cuh"
#include "fa/decode_plan.h"
#include "fa/decode_ring.cuh"
#include "fa/entry.h"

#include <utility>

// How the work is divided:
// - The queries of all heads that share a key/value head are packed into one tile of rows: row = query * group + head.
// - The keys of the tile are split over the blocks of a cluster, and over several clusters if one cannot keep the GPU busy.
// - The warps of a block take its keys in turn, 16 at a time.  Each warp has a ring of its own for K and V and waits for nothing
//   but its own copies, so the main loop has no barrier of the block.
// - Three merges follow, each of (O, m, l): of the warps, in shared memory; of the blocks of the cluster, each of which finishes
//   an equal part of O and receives that part of all others through distributed shared memory; and of the clusters, if there
//   are several, through the workspace.

using fa::NARROW, fa::PackedTile, fa::Packet, fa::PACKETS, fa::Partial, fa::Plan, fa::Split, fa::WARP, fa::WIDE;

template <int WARPS, int HEAD_DIM, int ROW_TILES>
struct Smem {
  static constexpr int ROWS = ROW_TILES * fa::MMA_M, VECTORS = ROWS * HEAD_DIM / 4;  // float4 of the tile's O
  using Ring = fa::KeyRing<WARPS, HEAD_DIM, fa::ring_depth(STAGES, HEAD_DIM, ROW_TILES)>;
  alignas(256) typename Ring::Smem rings[WARPS];
  typename fa::Queries<HEAD_DIM, ROW_TILES>::Smem q;
  float4 incoming_o[VECTORS];        // [source block, vectors that this block finishes], without those of this block
  float2 incoming_m_and_l[VECTORS];  // the same
  float2 warp_m_and_l[WARPS][ROWS];
  uint64_t incoming_full;  // the mbarrier that counts the bytes of the two incoming arrays
  static_assert(sizeof(rings[0]) >= VECTORS * sizeof(float4), "the ring of a warp must hold its partial O");
};

template <typename T, int WARPS, int HEAD_DIM, int ROW_TILES>
__global__ void __launch_bounds__(WARPS * WARP, WIDE / WARPS) decode_short_kernel(const fa::Params params, const Split split) {
  using BlockSmem = Smem<WARPS, HEAD_DIM, ROW_TILES>;
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<BlockSmem*>(smem_bytes);
  constexpr int THREADS = WARPS * WARP, ROW_VECTORS = HEAD_DIM / 4;
  const fa::Thread thread;
  PackedTile tile = fa::make_packed_tile(params, split.tiles, BlockSmem::ROWS);
  const int rank = blockIdx.x & ((1u << split.cluster_log2) - 1), cluster = blockIdx.x >> split.cluster_log2;
  fa::divide_keys(tile, params, split.tiles);
  if (tile.number >= split.tiles.count) return;  // the last blocks of a grid with more than 2^15 tiles

  // Start the copies of K and V, and load Q.
  typename BlockSmem::Ring ring(smem.rings[thread.warp], params, tile, thread);
  ring.copy_k(0, 0);
  fa::Queries<HEAD_DIM, ROW_TILES> queries;
  if (queries.IN_SMEM) ring.copy_v(0, 0);
  queries.load(params, split.tiles, tile, smem.q, WARPS, thread);
  if (!queries.IN_SMEM) ring.copy_v(0, 0);  // S needs Q, and not V
  ring.fill();

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
  fa::attend<T>(state, ring, queries, smem.q, limits, tile.first_step + thread.warp, scale_log2, is_negated);

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

  // One pass: merge the warps, and send each vector to the block of the cluster that finishes it.  The vectors of this block come
  // last, and other threads merge them while the first ones send.
  const fa::Exchange<BlockSmem> exchange(smem, vectors, split.cluster_log2, rank);
  const uint64_t cluster_stride =
      (min(BlockSmem::ROWS, params.seq_q * split.tiles.group) * ROW_VECTORS >> split.cluster_log2) * PACKETS;
  for (int first = 0; first < vectors; first += THREADS) {
    const int i = first + threadIdx.x, slot = i - exchange.sent_vectors;
    const bool is_own = slot >= 0 && i < vectors;
    Partial of_block = fa::no_partial();
    if (i < vectors) {
      const int vector = is_own ? rank * exchange.own_vectors + slot : i + (i >= rank * exchange.own_vectors ? exchange.own_vectors : 0);
      of_block = partials.merge_vector(smem.warp_m_and_l, vector);
      if (!is_own) exchange.send(vector, of_block);
    }
    __syncwarp();  // no lane waits for other blocks before all lanes have sent
    if (first + THREADS <= exchange.sent_vectors) continue;

    // Merge the blocks of the cluster, and then the clusters.
    const int vector = rank * exchange.own_vectors + slot;
    const Partial merged = exchange.merge_incoming(slot, is_own, of_block);
    if (split.clusters > 1) {
      const uint64_t group = ((uint64_t(tile.number) << split.cluster_log2) + rank) * split.clusters;  // of packets
      Packet* slot_gmem = split.packets + group * cluster_stride + slot * PACKETS;
      fa::merge_clusters<T, HEAD_DIM>(params, split, tile, merged, cluster, slot_gmem, cluster_stride, vector, is_own, thread.lane);
    } else if (is_own) {
      fa::store_vector<T, HEAD_DIM>(params, split.tiles, tile, vector, merged);
    }
  }
}

template <typename T, int WARPS, int HEAD_DIM, int ROW_TILES>
using Launcher =
    fa::ClusterLauncher<&decode_short_kernel<T, WARPS, HEAD_DIM, ROW_TILES>, WARPS, sizeof(Smem<WARPS, HEAD_DIM, ROW_TILES>)>;

template <typename WIDE_LAUNCHER>
Plan make_plan(const FaForwardArgs* args) {
  Plan plan = fa::make_plan<WIDE_LAUNCHER>(args, fa::MAX_CLUSTERS);
  // With at most one step per warp of a wide block, the merge of eight warps takes longer than a second step of four.
  const int64_t steps = (args->seq_k + fa::STEP_KEYS - 1) / fa::STEP_KEYS;
  if (steps <= (int64_t(plan.clusters) << plan.cluster_log2) * WIDE) plan.is_wide = false;
  return plan;
}

size_t workspace_bytes(const Plan& plan) {
  if (plan.clusters == 1) return 0;
  return (plan.tiles << plan.cluster_log2) * plan.clusters * plan.vectors_per_block * PACKETS * sizeof(Packet);
}

// The number of clusters that are merged.  The deliberately wrong kernel takes that of the call before.
int clusters_to_merge(const Plan& plan) {
  static int previous = 1;
  return fa::HAS_MISTAKE<fa::OWN_COUNT> ? std::exchange(previous, plan.clusters) : plan.clusters;
}

template <typename T, int HEAD_DIM, int ROW_TILES>
int launch_tiles(const FaForwardArgs* args, cudaStream_t stream) {
  using Wide = Launcher<T, WIDE, HEAD_DIM, ROW_TILES>;
  using Narrow = Launcher<T, NARROW, HEAD_DIM, ROW_TILES>;
  fa::Params params;
  if (int status = fa::make_decode_params(args, &params)) return status;
  if (int status = Wide::set_up(args)) return status;
  if (int status = Narrow::set_up(args)) return status;
  const Plan plan = make_plan<Wide>(args);
  if (args->workspace_bytes < workspace_bytes(plan) || reinterpret_cast<uintptr_t>(args->workspace) % alignof(Packet) != 0) {
    return fa_refuse(args, "the workspace has %llu bytes at %p; it needs %zu bytes, aligned to %zu",
                     static_cast<unsigned long long>(args->workspace_bytes), args->workspace, workspace_bytes(plan), alignof(Packet));
  }
  const Split split = {static_cast<Packet*>(args->workspace), fa::packed_tiles(args, plan), plan.cluster_log2, plan.clusters,
                       clusters_to_merge(plan)};
  return plan.is_wide ? Wide::launch(plan, stream, params, split) : Narrow::launch(plan, stream, params, split);
}

template <typename T, int HEAD_DIM>
int launch(const FaForwardArgs* args, cudaStream_t stream) {
  return fa::make_tiles(args).row_tiles == 1 ? launch_tiles<T, HEAD_DIM, 1>(args, stream) : launch_tiles<T, HEAD_DIM, 2>(args, stream);
}

template <typename T, int HEAD_DIM, int ROW_TILES>
size_t workspace_of(const FaForwardArgs* args) {
  using Wide = Launcher<T, WIDE, HEAD_DIM, ROW_TILES>;
  return Wide::set_up(args) == 0 ? workspace_bytes(make_plan<Wide>(args)) : 0;
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

FA_FORWARD(launch)

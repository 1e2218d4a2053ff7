// decode_one_cluster: the keys of a tile are split over the blocks of a cluster, which merge in distributed shared memory.
// step:    up to 16 blocks share the keys of a tile; each of them finishes an equal part of O, and receives that part of all others
//          in its shared memory
// because: a block of decode_warps reads all keys of a head alone, and 8 key/value heads keep 8 of 132 SMs busy; SDPA splits the
//          keys over blocks too, but merges them in a second kernel
// expect:  3.6 us at 1024 keys, 6.5 us at 4096 keys and 40 us at 32768 keys, for 1 batch, 32 heads, 8 key/value heads and D = 128
// diff:    the merge of the blocks, and the host's choice of the cluster size
// tile:    16 or 32 rows (queries x heads of a group) x 16 keys per warp and step; 8 warps per block and one block per SM, or 4
//          warps and two blocks if there are more tiles than SMs; up to 16 blocks per cluster
// takes:   fp16 and bf16, D = 64 and 128, any S_q >= 1 and S_kv >= 0, the bottom-right causal mask, grouped heads; rows
//          contiguous and 16-byte aligned
#include "fa/decode_exchange.cuh"
#include "fa/decode_plan.h"
#include "fa/decode_ring.cuh"
#include "fa/entry.h"

// How the work is divided:
// - The queries of all heads that share a key/value head are packed into one tile of rows: row = query * group + head.
// - The keys of the tile are split over the blocks of a cluster.
// - The warps of a block take its keys in turn, 16 at a time.  Each warp has a ring of its own for K and V and waits for nothing
//   but its own copies, so the main loop has no barrier of the block.
// - Two merges follow, each of (O, m, l): of the warps, in shared memory, and of the blocks of the cluster, each of which finishes
//   an equal part of O and receives that part of all others through distributed shared memory.

using fa::NARROW, fa::PackedTile, fa::Partial, fa::Plan, fa::Split, fa::WARP, fa::WIDE;

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
__global__ void __launch_bounds__(WARPS * WARP, WIDE / WARPS) decode_one_cluster_kernel(const fa::Params params, const Split split) {
  using BlockSmem = Smem<WARPS, HEAD_DIM, ROW_TILES>;
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<BlockSmem*>(smem_bytes);
  constexpr int THREADS = WARPS * WARP, ROW_VECTORS = HEAD_DIM / 4;
  const fa::Thread thread;
  PackedTile tile = fa::make_packed_tile(params, split.tiles, BlockSmem::ROWS);
  const int rank = blockIdx.x & ((1u << split.cluster_log2) - 1);
  fa::divide_keys(tile, params, split.tiles);
  if (tile.number >= split.tiles.count) return;  // the last blocks of a grid with more than 2^15 tiles

  // Start the copies of K and V, and load Q.
  typename BlockSmem::Ring ring(smem.rings[thread.warp], params, tile, thread);
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

  // Merge the warps, and send each vector to the block of the cluster that finishes it.
  const fa::Exchange<BlockSmem> exchange(smem, vectors, split.cluster_log2, rank);
  for (int i = threadIdx.x; i < exchange.sent_vectors; i += THREADS) {
    const int vector = i + (i >= rank * exchange.own_vectors ? exchange.own_vectors : 0);  // skips the vectors of this block
    exchange.send(vector, partials.merge_vector(smem.warp_m_and_l, vector));
  }

  // Merge the blocks of the cluster.
  for (int first = 0; first < exchange.own_vectors; first += THREADS) {
    const int slot = first + threadIdx.x;
    const bool is_valid = slot < exchange.own_vectors;
    const Partial of_block = is_valid ? partials.merge_vector(smem.warp_m_and_l, rank * exchange.own_vectors + slot) : fa::no_partial();
    const int vector = rank * exchange.own_vectors + slot;
    const Partial merged = exchange.merge_incoming(slot, is_valid, of_block);
    if (is_valid) fa::store_vector<T, HEAD_DIM>(params, split.tiles, tile, vector, merged);
  }
}

template <typename T, int WARPS, int HEAD_DIM, int ROW_TILES>
using Launcher =
    fa::ClusterLauncher<&decode_one_cluster_kernel<T, WARPS, HEAD_DIM, ROW_TILES>, WARPS, sizeof(Smem<WARPS, HEAD_DIM, ROW_TILES>)>;

template <typename T, int HEAD_DIM, int ROW_TILES>
int launch_tiles(const FaForwardArgs* args, cudaStream_t stream) {
  using Wide = Launcher<T, WIDE, HEAD_DIM, ROW_TILES>;
  using Narrow = Launcher<T, NARROW, HEAD_DIM, ROW_TILES>;
  fa::Params params;
  if (int status = fa::make_decode_params(args, &params)) return status;
  if (int status = Wide::set_up(args)) return status;
  if (int status = Narrow::set_up(args)) return status;
  const Plan plan = fa::make_plan<Wide>(args, 1);
  const Split split = {nullptr, fa::packed_tiles(args, plan), plan.cluster_log2, plan.clusters, plan.clusters};
  return plan.is_wide ? Wide::launch(plan, stream, params, split) : Narrow::launch(plan, stream, params, split);
}

template <typename T, int HEAD_DIM>
int launch(const FaForwardArgs* args, cudaStream_t stream) {
  return fa::make_tiles(args).row_tiles == 1 ? launch_tiles<T, HEAD_DIM, 1>(args, stream) : launch_tiles<T, HEAD_DIM, 2>(args, stream);
}

FA_FORWARD(launch)

// decode_warps: each warp of a block has keys of its own, and waits for no other warp before the merge.
// step:    the warps of a block take the keys in turn, 16 at a time, each with a ring of its own for K and V; they merge their partial
//          results (O, m, l) in shared memory
// because: all warps of decode_tile compute S and P of all keys, and wait at a barrier for each tile, with one tile of copies on
//          the way
// expect:  10 us at 1024 keys, 36 us at 4096 keys and 270 us at 32768 keys, for 1 batch, 32 heads, 8 key/value heads and D = 128:
//          an SM reads 50 to 65 KB per us; 500 us for 64 batches and 8192 keys
// diff:    the copies, the main loop without a barrier, and the merge
// tile:    16 or 32 rows (queries x heads of a group) x 16 keys per warp and step; 8 warps; at most 130 KB of shared memory per block
// takes:   fp16 and bf16, D = 64 and 128, any S_q >= 1 and S_kv >= 0, the bottom-right causal mask, grouped heads; rows
//          contiguous and 16-byte aligned
#include "fa/decode_partial.cuh"
#include "fa/decode_ring.cuh"
#include "fa/decode_tiles.h"
#include "fa/entry.h"
#include "fa/launch.h"

using fa::PackedTile, fa::PackedTiles, fa::Plan, fa::WARP;

constexpr int WARPS = 8, THREADS = WARPS * WARP;

template <int HEAD_DIM, int ROW_TILES>
struct Smem {
  static constexpr int ROWS = ROW_TILES * fa::MMA_M, VECTORS = ROWS * HEAD_DIM / 4;  // float4 of the tile's O
  using Ring = fa::KeyRing<WARPS, HEAD_DIM, fa::ring_depth(STAGES, HEAD_DIM, ROW_TILES)>;
  alignas(256) typename Ring::Smem rings[WARPS];
  typename fa::Queries<HEAD_DIM, ROW_TILES>::Smem q;
  float2 warp_m_and_l[WARPS][ROWS];
  static_assert(sizeof(rings[0]) >= VECTORS * sizeof(float4), "the ring of a warp must hold its partial O");
};

template <typename T, int HEAD_DIM, int ROW_TILES>
__global__ void __launch_bounds__(THREADS) decode_warps_kernel(const fa::Params params, const PackedTiles tiles) {
  using BlockSmem = Smem<HEAD_DIM, ROW_TILES>;
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<BlockSmem*>(smem_bytes);
  constexpr int ROW_VECTORS = HEAD_DIM / 4;
  const fa::Thread thread;
  PackedTile tile = fa::make_packed_tile(params, tiles, BlockSmem::ROWS);
  fa::divide_keys(tile, params, tiles);
  if (tile.number >= tiles.count) return;  // the last blocks of a grid with more than 2^15 tiles

  // Start the copies of K and V, and load Q.
  typename BlockSmem::Ring ring(smem.rings[thread.warp], params, tile, thread);
  ring.copy_k(0, 0);
  ring.copy_v(0, 0);
  fa::Queries<HEAD_DIM, ROW_TILES> queries;
  queries.load(params, tiles, tile, smem.q, WARPS, thread);
  ring.fill();
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
  fa::sync_block<fa::WARP_PARTIAL_STORED>();

  // Merge the warps.
  for (int vector = threadIdx.x; vector < tile.rows * ROW_VECTORS; vector += THREADS) {
    fa::store_vector<T, HEAD_DIM>(params, tiles, tile, vector, partials.merge_vector(smem.warp_m_and_l, vector));
  }
}

template <typename T, int HEAD_DIM, int ROW_TILES>
int launch_tiles(const FaForwardArgs* args, cudaStream_t stream) {
  fa::Params params;
  if (int status = fa::make_decode_params(args, &params)) return status;
  const Plan plan = fa::make_tiles(args);
  auto* kernel = &decode_warps_kernel<T, HEAD_DIM, ROW_TILES>;
  constexpr int smem_bytes = sizeof(Smem<HEAD_DIM, ROW_TILES>);
  static fa::OncePerDevice allow_smem;
  if (int status = allow_smem([&] { return fa_allow_dynamic_smem(args, reinterpret_cast<const void*>(kernel), smem_bytes); })) {
    return status;
  }
  kernel<<<fa::grid_of(plan), THREADS, smem_bytes, stream>>>(params, fa::packed_tiles(args, plan));
  return static_cast<int>(cudaPeekAtLastError());
}

template <typename T, int HEAD_DIM>
int launch(const FaForwardArgs* args, cudaStream_t stream) {
  return fa::make_tiles(args).row_tiles == 1 ? launch_tiles<T, HEAD_DIM, 1>(args, stream) : launch_tiles<T, HEAD_DIM, 2>(args, stream);
}

FA_FORWARD(launch)

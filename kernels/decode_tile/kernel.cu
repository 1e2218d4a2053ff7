// decode_tile: few queries and many keys.  One block computes the queries of several heads.
// step:    the queries of all heads that share a key/value head are one tile of 16 or 32 rows; all warps compute S of all keys, and
//          each a quarter of the columns of O, so that nothing is merged
// because: swizzle_async computes 64 rows per block, of which a call with one query uses one, and reads K and V of a key/value head
//          once for each head that shares it
// expect:  20 us at 1024 keys, 80 us at 4096 keys and 620 us at 32768 keys, for 1 batch, 32 heads, 8 key/value heads and D = 128:
//          1.2 us per tile of 64 keys on 8 of 132 SMs
// diff:    nearly the whole file: the rows of a tile, and the fragments of S and P of a step of 16 keys, are new
// tile:    16 or 32 rows (queries x heads of a group) x 64 keys, in two stages; 4 warps; 72 KB of shared memory per block at D = 128
// takes:   fp16 and bf16, D = 64 and 128, any S_q >= 1 and S_kv >= 0, the bottom-right causal mask, grouped heads; rows
//          contiguous and 16-byte aligned
#include "fa/decode_omit.cuh"
#include "fa/decode_partial.cuh"
#include "fa/decode_step.cuh"
#include "fa/decode_tiles.h"
#include "fa/entry.h"
#include "fa/launch.h"

using fa::PackedTile, fa::PackedTiles, fa::Plan, fa::STEP_KEYS, fa::WARP;

constexpr int WARPS = 4, THREADS = WARPS * WARP, TILE_KEYS = 64;

template <int HEAD_DIM, int ROW_TILES>
struct Smem {
  static constexpr int ROWS = ROW_TILES * fa::MMA_M, CHUNKS = HEAD_DIM / 8;  // 16-byte chunks per row of K or V
  alignas(256) uint4 k[STAGES][TILE_KEYS * CHUNKS];
  uint4 v[STAGES][TILE_KEYS * CHUNKS];
  typename fa::Queries<HEAD_DIM, ROW_TILES>::Smem q;
};

// Copies a tile of K or V.  Rows from `visible` on become zero.  The swizzle of K serves 16-byte loads, that of V serves ldmatrix.
template <int HEAD_DIM, bool IS_V>
__device__ __forceinline__ void copy_tile(uint4* tile_smem, const uint4* head_gmem, uint32_t row_stride, int first_key, int visible) {
  constexpr int CHUNKS = HEAD_DIM / 8;
#pragma unroll
  for (int i = 0; i < TILE_KEYS * CHUNKS; i += THREADS) {
    const int row = (i + threadIdx.x) / CHUNKS, chunk = threadIdx.x % CHUNKS, key = first_key + row;
    const int swizzled_chunk = chunk ^ (IS_V ? row % 8 : row % 2 * 4);
    fa::cp_async_16_or_zero(&tile_smem[row * CHUNKS + swizzled_chunk], head_gmem + uint64_t(key) * row_stride + chunk, key < visible);
  }
}

// Stores the columns of this warp.  Two lanes exchange registers, so that each has four columns of one row.
template <typename T, int HEAD_DIM, int ROW_TILES, int D_TILES>
__device__ __forceinline__ void store_columns(const fa::Params& params, const PackedTiles& tiles, const PackedTile& tile,
                                              const fa::RowState<ROW_TILES, D_TILES>& state, float scale_log2,
                                              const fa::Thread& thread) {
  const bool is_odd = thread.lane % 2;
#pragma unroll
  for (int t = 0; t < ROW_TILES; ++t) {
    const float l0 = fa::sum_of_quad(state.l[t][0]), l1 = fa::sum_of_quad(state.l[t][1]);
    const float l = is_odd ? l1 : l0, m_log2 = (is_odd ? state.m[t][1] : state.m[t][0]) * scale_log2;
    const int row = t * fa::MMA_M + thread.row + is_odd * 8;
#pragma unroll
    for (int d = 0; d < D_TILES; ++d) {
      const float(&o)[4] = state.o[t][d];
      const float x = __shfl_xor_sync(0xffffffffu, is_odd ? o[0] : o[2], 1);  // two columns of this lane's row
      const float y = __shfl_xor_sync(0xffffffffu, is_odd ? o[1] : o[3], 1);
      if (row >= tile.rows) continue;
      const int vector = row * (HEAD_DIM / 4) + (thread.warp * D_TILES + d) * 2 + thread.lane % fa::QUAD / 2;
      const float4 columns = is_odd ? make_float4(x, y, o[2], o[3]) : make_float4(o[0], o[1], x, y);
      fa::store_vector<T, HEAD_DIM>(params, tiles, tile, vector, {columns, m_log2, l});
    }
  }
}

template <typename T, int HEAD_DIM, int ROW_TILES>
__global__ void __launch_bounds__(THREADS) decode_tile_kernel(const fa::Params params, const PackedTiles tiles) {
  using BlockSmem = Smem<HEAD_DIM, ROW_TILES>;
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<BlockSmem*>(smem_bytes);
  constexpr int STEP_CHUNKS = STEP_KEYS * BlockSmem::CHUNKS, D_TILES = HEAD_DIM / fa::MMA_N / WARPS;  // 8-column tiles of O per warp
  const fa::Thread thread;
  PackedTile tile = fa::make_packed_tile(params, tiles, BlockSmem::ROWS);
  fa::divide_keys(tile, params, tiles);
  if (tile.number >= tiles.count) return;  // the last blocks of a grid with more than 2^15 tiles

  // Start the copies of K and V, as one group per tile, and load Q.
  const int key_tiles = (tile.visible + TILE_KEYS - 1) / TILE_KEYS;
  const uint4* k_gmem = params.k + uint64_t(tile.batch) * params.k_strides.batch + uint64_t(tile.kv_head) * params.k_strides.head;
  const uint4* v_gmem = params.v + uint64_t(tile.batch) * params.v_strides.batch + uint64_t(tile.kv_head) * params.v_strides.head;
  const auto copy = [&](int i) {
    if (i < key_tiles) {
      copy_tile<HEAD_DIM, false>(smem.k[i % STAGES], k_gmem, params.k_strides.row, i * TILE_KEYS, tile.visible);
      copy_tile<HEAD_DIM, true>(smem.v[i % STAGES], v_gmem, params.v_strides.row, i * TILE_KEYS, tile.visible);
    }
    fa::cp_async_commit_group();
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) copy(i);
  fa::Queries<HEAD_DIM, ROW_TILES> queries;
  queries.load(params, tiles, tile, smem.q, WARPS, thread);
  const float scale_log2 = fa::scale_log2_of(params);
  const bool is_negated = fa::negate_q(params);
  const fa::KeyLimits<ROW_TILES> limits(params, tile, thread);

  float o[ROW_TILES][D_TILES][4] = {};
  float m[ROW_TILES][fa::LANE_ROWS];       // unscaled row max at the last rescale
  float l[ROW_TILES][fa::LANE_ROWS] = {};  // this lane's part of the running row sum
#pragma unroll
  for (int t = 0; t < ROW_TILES; ++t) m[t][0] = m[t][1] = -CUDART_INF_F;
  const fa::RowState<ROW_TILES, D_TILES> state{o, m, l};
  const uint32_t k_lane = fa::k_lane_index<HEAD_DIM>(thread);
  const uint32_t v_columns = thread.warp * D_TILES * sizeof(uint4);  // the columns of this warp

#pragma unroll 1
  for (int i = 0; i < key_tiles; ++i) {
    fa::cp_async_wait_group<STAGES - 2>();
    fa::sync_block<fa::TILE_COPIED>();  // the tile is visible to all threads, and the stage of the previous tile is free
    copy(i + STAGES - 1);
    const uint4 *k_smem = smem.k[i % STAGES], *v_smem = smem.v[i % STAGES];
#pragma unroll 1
    for (int first_key = i * TILE_KEYS; first_key < min(tile.visible, (i + 1) * TILE_KEYS); first_key += STEP_KEYS) {
      fa::Scores<ROW_TILES> scores;
      scores.template multiply<T>(queries, smem.q, k_smem, k_lane, thread);
      const int last_key = first_key + STEP_KEYS - 1;
      uint32_t p[ROW_TILES][4];
      fa::softmax<T>(p, state, scores, limits, last_key >= limits.least, last_key, scale_log2, is_negated, first_key == 0, thread.lane);
      fa::add_pv<T>(state, p, fa::v_lane_address<HEAD_DIM>(v_smem, thread.lane) ^ v_columns);
      k_smem += STEP_CHUNKS, v_smem += STEP_CHUNKS;
    }
  }
  store_columns<T, HEAD_DIM>(params, tiles, tile, state, scale_log2, thread);
}

template <typename T, int HEAD_DIM, int ROW_TILES>
int launch_tiles(const FaForwardArgs* args, cudaStream_t stream) {
  fa::Params params;
  if (int status = fa::make_decode_params(args, &params)) return status;
  const Plan plan = fa::make_tiles(args);
  auto* kernel = &decode_tile_kernel<T, HEAD_DIM, ROW_TILES>;
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

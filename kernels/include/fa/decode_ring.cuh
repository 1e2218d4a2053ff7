// The keys of a warp: it has a ring of its own for K and V, and waits for nothing but its own copies.
#pragma once

#include "fa/decode_omit.cuh"
#include "fa/decode_step.cuh"

namespace fa {

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
      cp_async_16_or_zero(&tile_smem[row * CHUNKS + swizzled_chunk], from_gmem + offset, IS_SIMPLE || key + i * COPY_ROWS < visible);
    }
  }
};

// The stages of a ring: `stages` at D = 128, and twice as many at D = 64.  Two row tiles need registers, and have one less.
constexpr int ring_depth(int stages, int head_dim, int row_tiles) {
  const int depth = (stages - row_tiles + 1) * 128 / head_dim;
  return depth > row_tiles ? depth : row_tiles;
}

// The ring of a warp, which takes every WARPS-th step of its block.  Each of DEPTH stages holds K and V of one step.
template <int WARPS, int HEAD_DIM, int DEPTH, template <int, int, bool> class COPIER = StepCopier>
struct KeyRing {
  static constexpr int CHUNKS = HEAD_DIM / 8;
  using Smem = uint4[DEPTH][2][STEP_KEYS * CHUNKS];  // K and V of one step, with swizzled chunks
  Smem& stages;
  int steps;  // of this warp; at most 0 if it has no keys
  int visible;
  const Thread& thread;
  COPIER<WARPS, HEAD_DIM, false> k_copier;
  COPIER<WARPS, HEAD_DIM, true> v_copier;

  __device__ __forceinline__ KeyRing(Smem& stages, const Params& params, const PackedTile& tile, const Thread& thread)
      : stages(stages),
        steps((tile.steps - thread.warp + WARPS - 1) / WARPS),
        visible(tile.visible),
        thread(thread),
        k_copier(params.k + uint64_t(tile.batch) * params.k_strides.batch + uint64_t(tile.kv_head) * params.k_strides.head,
                 params.k_strides.row, tile.first_step + thread.warp, thread.lane),
        v_copier(params.v + uint64_t(tile.batch) * params.v_strides.batch + uint64_t(tile.kv_head) * params.v_strides.head,
                 params.v_strides.row, tile.first_step + thread.warp, thread.lane) {}

  __device__ __forceinline__ KeyRing(Smem& stages, const PackedTile& tile, const Thread& thread,
                                     const COPIER<WARPS, HEAD_DIM, false>& k_copier, const COPIER<WARPS, HEAD_DIM, true>& v_copier)
      : stages(stages),
        steps((tile.steps - thread.warp + WARPS - 1) / WARPS),
        visible(tile.visible),
        thread(thread),
        k_copier(k_copier),
        v_copier(v_copier) {}

  // Start the copy of step i, as one group of copies for K and one for V.  Past the last step, the group is empty.
  __device__ __forceinline__ void copy_k(int i, int stage) {
    if (i < steps) k_copier(stages[stage][0], visible, thread.lane);
    cp_async_commit_group();
  }
  __device__ __forceinline__ void copy_v(int i, int stage) {
    if (i < steps) v_copier(stages[stage][1], visible, thread.lane);
    cp_async_commit_group();
  }

  // Starts the copies of all stages but the first one.
  __device__ __forceinline__ void fill() {
#pragma unroll 1
    for (int stage = 1; stage < DEPTH; ++stage) {
      copy_k(stage, stage);
      copy_v(stage, stage);
    }
  }
};

// The main loop: all steps of a warp.  It has no barrier of the block.
template <typename T, int WARPS, int HEAD_DIM, int ROW_TILES, int DEPTH, template <int, int, bool> class COPIER, typename Limits>
__device__ __forceinline__ void attend(const RowState<ROW_TILES, HEAD_DIM / MMA_N>& state, KeyRing<WARPS, HEAD_DIM, DEPTH, COPIER>& ring,
                                       const Queries<HEAD_DIM, ROW_TILES>& queries,
                                       const typename Queries<HEAD_DIM, ROW_TILES>::Smem& q_smem,
                                       const Limits& limits, int first_step, float scale_log2, bool is_negated) {
  const uint32_t k_lane = k_lane_index<HEAD_DIM>(ring.thread);
  const uint32_t v_first_address = v_lane_address<HEAD_DIM>(ring.stages[0][1], ring.thread.lane);
  int last_key = first_step * STEP_KEYS + STEP_KEYS - 1;  // of the step
  for (int i = 0, stage = 0; i < ring.steps; ++i, stage = stage + 1 < DEPTH ? stage + 1 : 0, last_key += WARPS * STEP_KEYS) {
    Scores<ROW_TILES> scores;
    wait_copies<K_COPIED, 2 * DEPTH - 1>();
    __syncwarp();  // the copies of all lanes are visible to all lanes
    scores.template multiply<T>(queries, q_smem, ring.stages[stage][0], k_lane, ring.thread);
    __syncwarp();  // all lanes have read K, so it may be overwritten
    ring.copy_k(i + DEPTH, stage);

    uint32_t p[ROW_TILES][4];
    bool needs_mask = last_key >= limits.least;
    if constexpr (Limits::HAVE_BEGIN) needs_mask |= limits.hide_first_of(last_key);
    softmax<T>(p, state, scores, limits, needs_mask, last_key, scale_log2, is_negated, i == 0, ring.thread.lane);

    wait_copies<V_COPIED, 2 * DEPTH - 1>();
    __syncwarp();  // the copies of all lanes are visible to all lanes
    add_pv<T>(state, p, v_first_address + stage * static_cast<uint32_t>(sizeof(ring.stages[0])));
    __syncwarp();  // all lanes have read V, so it may be overwritten
    ring.copy_v(i + DEPTH, stage);
  }
}

}  // namespace fa

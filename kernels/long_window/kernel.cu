// long_window: windows and attention sinks.  Also the source of long_next_s, long_heads, long_mla, long_cap,
// long_ragged and long_sorted.
// step:    windows and attention sinks: a work tile has a first key tile, too, and a warpgroup masks the tiles at both ends of its
//          keys; the sink is one more score, added after the last tile
// because: many models let a query see only the latest keys, and give each head a sink; long_causal refuses both
// expect:  without a window, the time of long_causal; at D = 64 with 64 heads and 8 key/value heads, 0.75 of its rate of visible
//          work with the window win1023_0, and 0.35 with win127_0, where three tiles of 64 keys hold 128 visible ones
// diff:    the range of key tiles, the second masked end, the sink, and a shape with three blocks per SM, which hide their ends
// tile:    as in long_shapes; with short windows also 64 queries x 64 keys with three blocks per SM
// takes:   fp16 and bf16, D = 64 and 128 (long_heads: 80 to 256; long_mla: 192 with 128 of V), any S_q >= 1 and S_kv >= 0, both
//          causal masks, windows, sinks, grouped heads (long_cap: soft caps; long_ragged: lengths of each sequence, padded, behind
//          one another or with pages of 16 keys or more); rows contiguous and 16-byte aligned, with strides that TMA accepts
#include "fa/entry.h"
#include "fa/hopper.cuh"
#include "fa/integer_softmax.cuh"
#include "fa/launch_persistent.cuh"
#include "fa/o_over_q.cuh"
#include "fa/omit.cuh"
#include "fa/passed_tiles.cuh"
#include "fa/products.cuh"
#include "fa/ragged.cuh"
#include "fa/ring.cuh"
#include "fa/schedule.cuh"
#include "fa/shape.cuh"
#include "fa/shape_choice.h"
#include "fa/sink.cuh"
#include "fa/soft_cap.cuh"
#include "fa/sorted_tiles.cuh"
#include "fa/tile_store.cuh"
#include "fa/warpgroup.cuh"

using fa::BOX_COLUMNS, fa::GROUP_M, fa::GROUP_THREADS, fa::MMA_M, fa::QUAD, fa::WARP;

// The barriers of this kernel and what each guarantees.
enum Barrier {
  NONE,
  Q_FULL,    // TMA has written Q
  K_FULL,    // TMA has written a tile of K
  V_FULL,    // TMA has written a tile of V
  Q_EMPTY,   // all warpgroups have read Q
  K_EMPTY,   // all warpgroups have read the tile of K
  V_EMPTY,   // all warpgroups have read the tile of V
  O_WRITTEN  // all threads of the warpgroup have written O to shared memory
};

// What a deliberately wrong kernel does with MISTAKE, to check that the error is detected.
enum Mistake {
  NO_MISTAKE,
  BEGIN_NOT_MASKED,  // no key before a window is hidden, only whole tiles are skipped
  END_NOT_MASKED,    // no key behind a window is hidden, only whole tiles are skipped
  BEGIN_TOO_LATE,    // the tile in which the window of a warpgroup begins is skipped
  SINK_NOT_IN_MAX,   // the sink is added to the row sum, but is not in the row max
  TAIL_NOT_CLEARED,  // rows of V behind the last key of a sequence are not cleared
  STORES_WHOLE,      // rows behind the last query of a sequence are stored, too
};

constexpr int FIRST_TURN_BARRIER = 1, FIRST_GROUP_BARRIER = 8;  // named barriers, one per computing warpgroup

struct Params : fa::TileParams,
                std::conditional_t<TAKES_RAGGED, fa::RaggedParams, fa::NotRagged>,
                std::conditional_t<IS_SORTED, fa::SortedParams, fa::NotSorted> {
  int first_begin;    // query i sees no key before first_begin + i
  const float* sink;  // [heads], or nullptr
  float cap_factor;   // scale / soft cap; 0 without a soft cap
};

// A shape of work tiles, with STAGES key tiles in flight.
template <int HEAD_DIM, int GROUPS, int BLOCK_N, int STAGES_, int BLOCKS = GROUPS == 1 ? 2 : 1>
struct Shape : fa::Shape<HEAD_DIM, GROUPS, BLOCK_N, BLOCKS, V_COLUMNS == 0 ? HEAD_DIM : V_COLUMNS> {
  static constexpr int STAGES = STAGES_;
};

// In long_next_s, blocks with one computing warpgroup start S of the next work tile before they store O.
template <typename SHAPE>
constexpr bool STARTS_NEXT = STARTS_NEXT_S && SHAPE::GROUPS == 1;
static_assert(!STARTS_NEXT_S || !TAKES_CAP && !TAKES_RAGGED && !IS_SORTED && V_COLUMNS == 0 && MISTAKE != BEGIN_TOO_LATE,
              "compute_ahead supports none of these");

template <typename T, typename SHAPE>
using Smem = std::conditional_t<STARTS_NEXT<SHAPE>, fa::PassedSmem<T, SHAPE, SHAPE::STAGES>,
                                fa::WithOrder<IS_SORTED, fa::TileSmem<T, SHAPE, SHAPE::STAGES>>>;

// Releases a tile of K and of V that this warpgroup does not read.
template <typename SMEM, int STAGES>
__device__ __forceinline__ void release_unread(SMEM& smem, const fa::Ring<STAGES>& ring, int lane) {
  if (lane == 0) {  // without its waits, one phase could get the arrivals of two
    fa::wait<K_FULL>(&smem.k_full[ring.stage], ring.phase);
    fa::release<K_EMPTY>(&smem.k_empty[ring.stage]);
    fa::wait<V_FULL>(&smem.v_full[ring.stage], ring.phase);
    fa::release<V_EMPTY>(&smem.v_empty[ring.stage]);
  }
  __syncwarp();  // no lane may wait for a phase before the one before it is complete
}

// The first key tile with a key that a query from `first_query` on sees.
template <typename SHAPE>
__host__ __device__ __forceinline__ int first_key_tile(const Params& params, int first_query) {
  const int begin = params.first_begin + first_query;
  return begin > 0 ? begin / SHAPE::BLOCK_N : 0;
}

// The work tiles of this block, with the key tiles that any of its queries sees, and at least one.
template <typename SHAPE, typename SMEM>
struct WindowTiles : fa::Deal<IS_SORTED, SMEM> {
  const Params& params;
  __device__ __forceinline__ WindowTiles(const Params& params, const SMEM& smem) : fa::Deal<IS_SORTED, SMEM>{smem}, params(params) {}
  template <typename TILE>
  __device__ __forceinline__ fa::KeyTiles key_tiles(const TILE& work, int) const {
    return {min(work.key_tiles - 1, first_key_tile<SHAPE>(fa::own_params(params, work), work.first_query)), work.key_tiles};
  }
};

// The key tiles of a warpgroup: it computes [first, end), at least one, and does not mask those of [first_whole, end_whole).
struct GroupTiles {
  int first, first_whole, end_whole, end;
};

template <typename SHAPE>
__device__ __forceinline__ GroupTiles make_group_tiles(const Params& params, const fa::KeyTiles& keys, int first_query) {
  constexpr int BLOCK_N = SHAPE::BLOCK_N;
  const int end_query = first_query + GROUP_M, late = MISTAKE == BEGIN_TOO_LATE ? BLOCK_N - 1 : 0;
  const int end = min(keys.end, max(keys.first + 1, fa::visible_key_tiles<SHAPE>(params, end_query)));
  const int first = min(end - 1, first_key_tile<SHAPE>(params, first_query + late));
  const int begin_of_last = MISTAKE == BEGIN_NOT_MASKED ? 0 : max(0, params.first_begin + end_query - 1);
  const int whole_keys = params.is_negated ? 0 : max(0, min(params.seq_k, params.first_diagonal + first_query));
  return {first, max(first, (begin_of_last + BLOCK_N - 1) / BLOCK_N), max(first, whole_keys / BLOCK_N), end};
}

// Hides the keys before and behind the windows of this lane's rows, and negates all scores if the scale is negative.  For each
// fragment, one bit says whether the row sees the key, so that a score takes one test for both ends.
template <int S_TILES>
__device__ __forceinline__ void mask_both_ends(float (&s)[S_TILES][4], const Params& params, int query, int first_key, int lane) {
  if (params.is_negated) {
#pragma unroll
    for (int n = 0; n < S_TILES; ++n) {
#pragma unroll
      for (float& score : s[n]) score = -score;
    }
  }
  const auto bits_from = [](int key) { return ~0u << max(0, min(31, (key + fa::MMA_N - 1) >> 3)); };  // a shift rounds down
  static_assert(fa::MMA_N == 8);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = query + i / 2 * 8, lane_key = first_key + lane % QUAD * 2 + i % 2;
    const int begin = MISTAKE == BEGIN_NOT_MASKED ? 0 : params.first_begin + row - lane_key;
    const int end = min(params.seq_k, params.first_diagonal + row) - lane_key;
    const uint32_t visible = bits_from(begin) & ~bits_from(MISTAKE == END_NOT_MASKED ? params.seq_k - lane_key : end);
#pragma unroll
    for (int n = 0; n < S_TILES; ++n) {
      if (!(visible >> n & 1)) s[n][i] = -CUDART_INF_F;
    }
  }
}

// A computing warpgroup: 64 queries of each work tile of this block.
template <typename T, typename SHAPE>
__device__ __forceinline__ void compute(const Params& call, const CUtensorMap& o_map, Smem<T, SHAPE>& smem, int group) {
  constexpr int HEAD_DIM = SHAPE::HEAD_DIM, BLOCK_N = SHAPE::BLOCK_N, STAGES = SHAPE::STAGES;
  const WindowTiles<SHAPE, Smem<T, SHAPE>> deal(call, smem);
  const int thread_in_group = threadIdx.x % GROUP_THREADS, lane = threadIdx.x % WARP;
  const int lane_row = thread_in_group / WARP * MMA_M + lane / QUAD;  // this lane holds rows lane_row and lane_row + 8
  const uint64_t q = fa::wgmma_descriptor(smem.q[group]);
  const uint64_t first_k = fa::wgmma_descriptor(smem.k[0]);
  const uint64_t first_v = fa::wgmma_descriptor(smem.v[0], BLOCK_N * BOX_COLUMNS * 2);
  constexpr int STAGE_STEP = SHAPE::TILE_BYTES >> 4;  // in descriptors, addresses are in units of 16 bytes
  constexpr int V_STEP = SHAPE::V_BYTES >> 4;
  fa::Ring<STAGES> ring;
  uint32_t q_phase = 0;
  // The named barrier of a turn has the threads of the warpgroup that takes it, and those of the one that passes it on.
  const int own_turn = FIRST_TURN_BARRIER + group, next_turn = FIRST_TURN_BARRIER + (group + 1) % SHAPE::GROUPS;
  constexpr bool HAS_TURNS = SHAPE::GROUPS > 1;
  auto take_turn = [&] {
    if (HAS_TURNS) fa::barrier_sync<2 * GROUP_THREADS>(own_turn);
  };
  auto pass_turn = [&] {
    if (HAS_TURNS) fa::barrier_arrive<2 * GROUP_THREADS>(next_turn);
  };
  if (HAS_TURNS && group == 0) fa::barrier_arrive<2 * GROUP_THREADS>(own_turn);  // the first turn

#pragma unroll 1
  for (int round = 0, number; (number = deal.number(round)) < call.work_tiles; ++round) {
    const auto work = fa::find_work_tile<SHAPE>(call, number);
    const auto& params = fa::own_params(call, work);
    const fa::KeyTiles keys = deal.key_tiles(work, round);
    const int group_query = work.first_query + group * GROUP_M, query = group_query + lane_row;
    float o[SHAPE::O_TILES][4] = {};
    fa::IntegerSoftmax softmax;
    if (work.key_tiles > 0 || SHAPE::O_OVER_Q) {
      fa::wait<Q_FULL>(&smem.q_full, q_phase);
      q_phase ^= 1;
    }
    if (work.key_tiles > 0) {
      const GroupTiles tiles = make_group_tiles<SHAPE>(params, keys, group_query);
      int j = keys.end - 1;
      uint32_t p[SHAPE::P_TILES][4];

      // The queries of this warpgroup see none of these tiles.  It releases them, and passes its turns on.
      auto skip = [&] {
        take_turn();
        pass_turn();
        release_unread(smem, ring, lane);
        ring.advance();
      };
#pragma unroll 1
      for (; j >= tiles.end; --j) skip();

      // The softmax of the last key tile, while nothing else runs.
      {
        float s[SHAPE::S_TILES][4];
        fa::wait<K_FULL>(&smem.k_full[ring.stage], ring.phase);
        fa::start_qk<T, HEAD_DIM>(s, q, first_k + ring.stage * STAGE_STEP);
        fa::wgmma_wait_group<0>(s);
        fa::release<K_EMPTY>(&smem.k_empty[ring.stage]);
        if constexpr (TAKES_CAP) fa::cap_scores(s, params);
        mask_both_ends(s, params, query, j * BLOCK_N, lane);
        softmax.raise_m(s, params.scale_log2, params.inverse_scale_log2);
        softmax.exponentials(s, params.scale_log2);
        fa::round_p<T>(p, s);
        if constexpr (TAKES_RAGGED && MISTAKE != TAIL_NOT_CLEARED) {
          if (const int tail = params.seq_k - j * BLOCK_N; tail < BLOCK_N) {
            fa::wait<V_FULL>(&smem.v_full[ring.stage], ring.phase);
            fa::clear_tail<SHAPE>(smem.v[ring.stage], tail, FIRST_GROUP_BARRIER + group, thread_in_group);
          }
        }
        const fa::Ring<STAGES> next = ring.next();
        if (j > tiles.first) fa::wait<K_FULL>(&smem.k_full[next.stage], next.phase);
        --j;
      }

      // S of this key tile, with P V of the previous one, and then the softmax of this one during P V.
      auto step = [&](auto is_masked) {
        const fa::Ring<STAGES> previous = ring;
        ring.advance();
        float s[SHAPE::S_TILES][4];
        take_turn();
        fa::start_qk<T, HEAD_DIM>(s, q, first_k + ring.stage * STAGE_STEP);
        fa::wait<V_FULL>(&smem.v_full[previous.stage], previous.phase);
        fa::start_pv<T, BLOCK_N>(o, p, first_v + previous.stage * V_STEP);
        pass_turn();
        fa::wgmma_wait_group<1>(s);
        fa::release<K_EMPTY>(&smem.k_empty[ring.stage]);
        if constexpr (TAKES_CAP) fa::cap_scores(s, params);
        if (decltype(is_masked)::value) mask_both_ends(s, params, query, j * BLOCK_N, lane);
        const bool is_raised = softmax.raise_m_if_needed(s, params.scale_log2, params.inverse_scale_log2);
        softmax.exponentials(s, params.scale_log2);
        // ptxas would move the exponentials below the wait for P V, but not across the loop of this wait.
        const fa::Ring<STAGES> next = ring.next();
        if (j > tiles.first) fa::wait<K_FULL>(&smem.k_full[next.stage], next.phase);
        fa::wgmma_wait_group<0>(o);
        fa::release<V_EMPTY>(&smem.v_empty[previous.stage]);
        fa::round_p<T>(p, s);
        if (is_raised) softmax.rescale_rows(o);
      };
      // The masked tiles at the diagonal, those without a mask, and the masked ones at the beginning of the windows.
      int end_whole = tiles.end_whole;
#pragma unroll 1
      while (j >= tiles.first) {
#pragma unroll 1
        for (; j >= end_whole; --j) step(std::true_type());
#pragma unroll 1
        for (; j >= tiles.first_whole; --j) step(std::false_type());
        end_whole = tiles.first;
      }
      if (!SHAPE::O_OVER_Q) fa::release<Q_EMPTY>(&smem.q_empty);

      // P V of the first key tile.
      fa::wait<V_FULL>(&smem.v_full[ring.stage], ring.phase);
      fa::start_pv<T, BLOCK_N>(o, p, first_v + ring.stage * V_STEP);
      fa::wgmma_wait_group<0>(o);
      fa::release<V_EMPTY>(&smem.v_empty[ring.stage]);
      ring.advance();
#pragma unroll 1
      for (; j >= keys.first; --j) skip();
    }

    const fa::Head head = fa::make_head(params, work.batch_head);
    if (params.sink != nullptr) {
      const float sink_log2 = __ldg(params.sink + head.query_head) * CUDART_L2E_F;
      fa::add_sink<MISTAKE != SINK_NOT_IN_MAX>(o, softmax, sink_log2, lane);
    }
    if constexpr (TAKES_RAGGED) {
      const fa::RaggedTile again = fa::find_work_tile_again<SHAPE>(call, IS_SORTED ? deal.number(round) : number);
      fa::store_ragged<O_WRITTEN, MISTAKE == STORES_WHOLE>(fa::o_smem<SHAPE>(smem, group), o, softmax, o_map, call, again, head, group,
                                                           lane_row, FIRST_GROUP_BARRIER + group, thread_in_group, lane);
    } else {
      fa::normalise(o, softmax, params, head, query, lane);
      fa::store_o<O_WRITTEN, SHAPE::O_TILES>(fa::o_smem<SHAPE>(smem, group), o, o_map, params, head, work.first_query, group,
                                             FIRST_GROUP_BARRIER + group, thread_in_group, lane);
    }
    if (SHAPE::O_OVER_Q) {
      if (thread_in_group == 0) fa::cp_async_bulk_wait_group_read();  // TMA has read O
      fa::release<Q_EMPTY>(&smem.q_empty);
    }
  }
  if (thread_in_group == 0) fa::cp_async_bulk_wait_group_read();  // before the block's shared memory is given to another one
}

// The same for the only computing warpgroup of a block, which gets its work tiles from the producer.  S of the last key tile of a
// work tile, which is its first one in time, runs while O of the work tile before it is stored.
template <typename T, typename SHAPE>
__device__ __forceinline__ void compute_ahead(const Params& params, const CUtensorMap& o_map, Smem<T, SHAPE>& smem) {
  constexpr int HEAD_DIM = SHAPE::HEAD_DIM, BLOCK_N = SHAPE::BLOCK_N, STAGES = SHAPE::STAGES;
  const int thread_in_group = threadIdx.x % GROUP_THREADS, lane = threadIdx.x % WARP;
  const int lane_row = thread_in_group / WARP * MMA_M + lane / QUAD;  // this lane holds rows lane_row and lane_row + 8
  const uint64_t first_q = fa::wgmma_descriptor(smem.q[0]), first_k = fa::wgmma_descriptor(smem.k[0]);
  const uint64_t first_v = fa::wgmma_descriptor(smem.v[0], BLOCK_N * BOX_COLUMNS * 2);
  constexpr int Q_STEP = SHAPE::Q_BYTES >> 4, K_STEP = SHAPE::TILE_BYTES >> 4, V_STEP = SHAPE::V_BYTES >> 4;
  fa::Ring<STAGES> ring;
  fa::Ring<fa::PASSED> passed;
  float s[SHAPE::S_TILES][4];

  // After the last work tile, this wgmma reads whatever is in shared memory, and its result is not used.  Under a condition, ptxas
  // might serialise all wgmma.
  auto start_first_s = [&] {
    fa::wait<Q_FULL>(&smem.q_full[passed.stage], passed.phase);
    const bool is_none = smem.tiles[passed.stage].first_query == fa::PassedTile::NONE;
    if (!is_none) fa::wait<K_FULL>(&smem.k_full[ring.stage], ring.phase);
    fa::start_qk<T, HEAD_DIM>(s, first_q + passed.stage * Q_STEP, first_k + ring.stage * K_STEP);
    return !is_none;
  };
  bool goes_on = start_first_s();
#pragma unroll 1
  while (goes_on) {
    const fa::PassedTile work = smem.tiles[passed.stage];
    fa::release_early_if_omitted<Q_EMPTY>(&smem.q_empty[passed.stage]);
    const int query = work.first_query + lane_row;
    const GroupTiles tiles = make_group_tiles<SHAPE>(params, work.keys, work.first_query);
    int j = work.keys.end - 1;
    float o[SHAPE::O_TILES][4];  // without zeros: the first P V is not added
    bool adds = false;
    fa::IntegerSoftmax softmax;
    uint32_t p[SHAPE::P_TILES][4];
    auto start_pv = [&](int stage) {
      fa::wgmma_fence();
#pragma unroll
      for (int n = 0; n < SHAPE::P_TILES; ++n) {
        const uint64_t v = first_v + stage * V_STEP + n * (fa::MMA_K * BOX_COLUMNS * sizeof(T) >> 4);
        fa::wgmma_any_n<T, 1>(o, p[n], v, adds || n > 0);
      }
      fa::wgmma_commit_group();
      adds = true;
    };

    // The softmax of the last key tile.
    fa::wgmma_wait_group<0>(s);
    fa::release<K_EMPTY>(&smem.k_empty[ring.stage]);
    mask_both_ends(s, params, query, j * BLOCK_N, lane);
    softmax.raise_m(s, params.scale_log2, params.inverse_scale_log2);
    softmax.exponentials(s, params.scale_log2);
    fa::round_p<T>(p, s);
    const auto wait_for_next_k = [&] {
      const fa::Ring<STAGES> next = ring.next();
      if (j > tiles.first) fa::wait<K_FULL>(&smem.k_full[next.stage], next.phase);
    };
    wait_for_next_k();

    // S of the next key tile, with P V of this one, and then the softmax of the next one during P V.
#pragma unroll 1
    for (--j; j >= tiles.first; --j) {
      const fa::Ring<STAGES> previous = ring;
      ring.advance();
      if (j == tiles.first) fa::delay_if_omitted<Q_EMPTY>();
      fa::start_qk<T, HEAD_DIM>(s, first_q + passed.stage * Q_STEP, first_k + ring.stage * K_STEP);
      fa::wait<V_FULL>(&smem.v_full[previous.stage], previous.phase);
      start_pv(previous.stage);
      fa::wgmma_wait_group<1>(s);
      fa::release<K_EMPTY>(&smem.k_empty[ring.stage]);
      if (j >= tiles.end_whole || j < tiles.first_whole) mask_both_ends(s, params, query, j * BLOCK_N, lane);
      const bool is_raised = softmax.raise_m_if_needed(s, params.scale_log2, params.inverse_scale_log2);
      softmax.exponentials(s, params.scale_log2);
      wait_for_next_k();  // ptxas would move the exponentials below the wait for P V, but not across this loop
      fa::wgmma_wait_group<0>(o);
      fa::release<V_EMPTY>(&smem.v_empty[previous.stage]);
      fa::round_p<T>(p, s);
      if (is_raised) softmax.rescale_rows(o);
    }

    // P V of the first key tile, and S of the next work tile.
    const fa::Ring<STAGES> last = ring;
    const fa::Ring<fa::PASSED> own = passed;
    fa::wait<V_FULL>(&smem.v_full[last.stage], last.phase);
    start_pv(last.stage);
    ring.advance();
    passed.advance();
    goes_on = start_first_s();
    fa::wgmma_wait_group<1>(o);
    fa::release<V_EMPTY>(&smem.v_empty[last.stage]);

    if (!work.has_key_tiles) {  // V may hold NaN
#pragma unroll
      for (int d = 0; d < SHAPE::O_TILES; ++d) o[d][0] = o[d][1] = o[d][2] = o[d][3] = 0.0f;
    }
    if (params.sink != nullptr) fa::add_sink<MISTAKE != SINK_NOT_IN_MAX>(o, softmax, work.sink_log2, lane);
    fa::normalise(o, softmax, params, work.head, query, lane);
    fa::store_o<O_WRITTEN, SHAPE::O_TILES>(smem.o, o, o_map, params, work.head, work.first_query, 0, FIRST_GROUP_BARRIER,
                                           thread_in_group, lane);
    fa::release<Q_EMPTY>(&smem.q_empty[own.stage]);
  }
  fa::wgmma_wait_group<0>(s);
  if (thread_in_group == 0) fa::cp_async_bulk_wait_group_read();  // before the block's shared memory is given to another one
}

template <typename T, typename SHAPE>
__global__ void __launch_bounds__(SHAPE::THREADS, SHAPE::BLOCKS_PER_SM)
long_window_kernel(const __grid_constant__ Params params, const __grid_constant__ CUtensorMap q_map,
                   const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                   const __grid_constant__ CUtensorMap o_map) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<Smem<T, SHAPE>*>(smem_bytes);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / GROUP_THREADS, 0);
  if (threadIdx.x == 0) fa::init_mbarriers<SHAPE>(smem);
  if constexpr (IS_SORTED) fa::order_tiles<SHAPE>(params, smem, &first_key_tile<SHAPE>);
  __syncthreads();
  if (warpgroup == 0) {
    fa::setmaxnreg_dec<SHAPE::PRODUCER_REGISTERS>();
    if (threadIdx.x < WARP && fa::elect_sync()) {
      const WindowTiles<SHAPE, Smem<T, SHAPE>> deal(params, smem);
      if constexpr (STARTS_NEXT<SHAPE>) {
        fa::produce_passed<SHAPE>(deal, params, q_map, k_map, v_map, smem);
      } else {
        fa::produce<Q_FULL, V_FULL, SHAPE>(deal, params, q_map, k_map, v_map, smem);
      }
    }
  } else {
    fa::setmaxnreg_inc<SHAPE::REGISTERS>();
    if constexpr (STARTS_NEXT<SHAPE>) {
      compute_ahead<T, SHAPE>(params, o_map, smem);
    } else {
      compute<T, SHAPE>(params, o_map, smem, warpgroup - 1);
    }
  }
}

constexpr int64_t LIMIT = INT32_MAX / 2;  // in keys; beyond it, a side of a window hides all keys, or none

// Fills `params` and returns FA_OK, or refuses the call.
template <typename SHAPE>
int make_window_params(const FaForwardArgs* args, Params* params) {
  if (int status = fa::make_tile_params<SHAPE>(args, params)) return status;
  const FaForwardArgs all = fa_copy_args(args);
  const auto limited = [](int64_t keys) { return std::clamp(keys, -LIMIT, LIMIT); };
  const int64_t shift = args->seq_k - args->seq_q;  // the position of the first query
  params->first_begin = -LIMIT;
  if (all.features & FA_WINDOW_LEFT) params->first_begin = limited(shift - limited(all.window_left));
  if (all.features & FA_WINDOW_RIGHT) params->first_diagonal = limited(shift + limited(all.window_right) + 1);
  params->sink = all.features & FA_SINK ? all.sink : nullptr;
  fa::set_cap(all, params);
  if constexpr (TAKES_RAGGED) return fa::make_ragged_params(args, params);
  return FA_OK;
}

template <typename T, typename SHAPE>
int launch_shape(const FaForwardArgs* args, cudaStream_t stream) {
  Params params;
  if (int status = make_window_params<SHAPE>(args, &params)) return status;
  if constexpr (IS_SORTED) fa::make_sorted_params<SHAPE>(&params);
  const FaForwardArgs tensors = fa::tensors_of(args);
  return fa::launch_persistent<&long_window_kernel<T, SHAPE>, SHAPE, sizeof(Smem<T, SHAPE>)>(&tensors, params, stream);
}

// Estimates the time of a call.  Returns infinity if the shape refuses the call.
template <typename SHAPE>
double estimated_us(const FaForwardArgs* args) {
  using Costs = fa::Costs<SHAPE>;
  Params params;
  if (make_window_params<SHAPE>(args, &params) != FA_OK) return INFINITY;
  const bool has_window = params.first_begin + params.seq_q > 1;  // it hides a key from the last query
  return fa::busiest_sm_us<SHAPE>(params, params.work_tiles, [&](int number) {
    const fa::WorkTile work = fa::make_work_tile<SHAPE>(params, number);
    int tiles = 0;  // of each warpgroup, added up
    for (int first_query = work.first_query, group = 0; group < SHAPE::GROUPS; ++group, first_query += GROUP_M) {
      const int end = std::min(work.key_tiles, fa::visible_key_tiles<SHAPE>(params, first_query + GROUP_M));
      tiles += std::max(0, end - first_key_tile<SHAPE>(params, first_query));
    }
    return tiles * Costs::key_tile_us(has_window) / SHAPE::GROUPS + Costs::work_tile_us(has_window);
  });
}

// The shapes among which a call chooses.
template <typename... SHAPES>
struct Shapes {
  static int choose(const FaForwardArgs* args) {
    if (STARTS_NEXT_S && args->seq_k == 0) return 0;  // with one warpgroup, the others load a key tile for each work tile
    if (ONLY_SHAPE >= 0) return std::min<int>(ONLY_SHAPE, sizeof...(SHAPES) - 1);
    return fa::fastest_shape(args, {&estimated_us<SHAPES>...});
  }
  template <typename T>
  static int launch(const FaForwardArgs* args, cudaStream_t stream) {
    static constexpr int (*LAUNCHES[])(const FaForwardArgs*, cudaStream_t) = {&launch_shape<T, SHAPES>...};
    return LAUNCHES[choose(args)](args, stream);
  }
};

template <int HEAD_DIM>
struct ShapesOf {  // with fewer columns, three warpgroups have registers for more keys
  static constexpr int KEYS = HEAD_DIM == 80 ? 112 : HEAD_DIM == 96 ? 96 : 80;
  using type = Shapes<Shape<HEAD_DIM, 2, 128, 2>, Shape<HEAD_DIM, 3, KEYS, 2>, Shape<HEAD_DIM, 1, 64, 2>>;
};
template <>
struct ShapesOf<192> {
  using type = Shapes<Shape<192, 2, V_COLUMNS == 128 ? 128 : 112, 2>>;
};
template <>
struct ShapesOf<256> {
  using type = Shapes<Shape<256, 2, 80, 2>>;
};
template <>
struct ShapesOf<64> {
  using type = Shapes<Shape<64, 2, 128, 2>, Shape<64, 3, 128, 2>, Shape<64, 4, 64, 2>, Shape<64, 1, 128, 2>, Shape<64, 1, 64, 3, 3>>;
};

template <typename T, int HEAD_DIM>
int launch(const FaForwardArgs* args, cudaStream_t stream) {
  return ShapesOf<HEAD_DIM>::type::template launch<T>(args, stream);
}

constexpr uint32_t LENGTHS = FA_SEQLENS_Q | FA_SEQLENS_K | FA_CU_SEQLENS_Q | FA_CU_SEQLENS_K | FA_BLOCK_TABLE;
FA_FORWARD_WITH(FA_WINDOW_LEFT | FA_WINDOW_RIGHT | FA_SINK | (TAKES_CAP ? FA_SOFTCAP : 0) | (TAKES_RAGGED ? LENGTHS : 0) |
                    (V_COLUMNS > 0 ? FA_HEAD_DIM_V : 0), launch)

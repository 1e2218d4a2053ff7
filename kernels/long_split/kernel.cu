// long_split: the keys of the last work tiles are divided between blocks.
// step:    at D = 128 without a mask, the work tiles of an incomplete last round are divided by their keys, so that all SMs have
//          work until the end
// because: at D = 128, 2048 to 8192 keys and 16 heads, there are 5.2 or 5.3 rounds of work tiles, and in the sixth, at least two
//          thirds of the SMs are idle
// expect:  at D = 128 without a mask, 205 us at b4h16s2048, 380 us at b2h16s4096 and 740 us at b1h16s8192; with a causal mask the
//          same time as long_causal
// diff:    SplitTiles and merge_parts, the host code that divides the last round, and its time in the estimate of a shape
// tile:    as in long_shapes
// takes:   fp16 and bf16, D = 64 and 128, any S_q >= 1 and S_kv >= 0, top-left and bottom-right causal masks, grouped heads; rows
//          contiguous and 16-byte aligned, with strides that TMA accepts
#include "fa/entry.h"
#include "fa/hopper.cuh"
#include "fa/integer_softmax.cuh"
#include "fa/omit.cuh"
#include "fa/producer.cuh"
#include "fa/products.cuh"
#include "fa/ring.cuh"
#include "fa/schedule.cuh"
#include "fa/shape.cuh"
#include "fa/shape_choice.h"
#include "fa/tile_params.cuh"
#include "fa/tile_store.cuh"
#include "fa/warpgroup.cuh"

using fa::BOX_COLUMNS, fa::GROUP_M, fa::GROUP_THREADS, fa::LANE_ROWS, fa::MMA_M, fa::QUAD, fa::WARP;

// The barriers of this kernel and what each guarantees.
enum Barrier {
  NONE,
  Q_FULL,      // TMA has written Q
  K_FULL,      // TMA has written a tile of K
  V_FULL,      // TMA has written a tile of V
  Q_EMPTY,     // all warpgroups have read Q
  K_EMPTY,     // all warpgroups have read the tile of K
  V_EMPTY,     // all warpgroups have read the tile of V
  O_WRITTEN,   // all threads of the warpgroup have written O to shared memory
  PART_STORED  // all threads of the warpgroup have stored their partial result in the workspace
};

constexpr int STAGES = 2;  // key tiles in flight
constexpr int FIRST_TURN_BARRIER = 1, FIRST_GROUP_BARRIER = 8;  // named barriers, one per computing warpgroup

// Marks a part in the workspace as stored.  The workspace may contain anything before a call.  Any other value, such as NaN or
// the data of another call, means 'not stored'.
constexpr uint64_t STORED = 0x9e6c63d0876a9a47ull;
constexpr int MAX_PARTS = 8;  // of a work tile

// The work tiles of a block.  Those of an incomplete last round are divided between blocks by their keys.
struct SplitTiles {
  float4* results;   // [tiles, GROUPS, parts, O_TILES + 1, GROUP_THREADS]: O of a thread, then m (in log2) and l of its rows
  uint64_t* stored;  // [tiles, GROUPS, parts]
  int first;         // number of the first of these work tiles; those before it are not divided
  int parts;         // of each tile

  __device__ __forceinline__ bool is_split(int round) const { return round * static_cast<int>(gridDim.x) >= first; }
  __device__ __forceinline__ int number(int round) const {
    const int number = fa::Dealt().number(round);
    const bool is_last_round = round * static_cast<int>(gridDim.x) == first;
    if (is_split(round)) return is_last_round ? first + static_cast<int>(blockIdx.x) / parts : INT32_MAX;
    return number;
  }
  __device__ __forceinline__ fa::KeyTiles key_tiles(const fa::WorkTile& work, int round) const {
    const int part = blockIdx.x % parts;
    if (is_split(round)) return {work.key_tiles * part / parts, work.key_tiles * (part + 1) / parts};
    return {0, work.key_tiles};
  }
};

template <typename SHAPE>
struct Whole : SHAPE {  // for calls without such work tiles
  static constexpr bool HAS_SPLIT = false;
  using Deal = fa::Dealt;
};
template <typename SHAPE>
struct Divided : SHAPE {  // for calls with them
  static constexpr bool HAS_SPLIT = true;
  using Deal = SplitTiles;
};

template <typename T, typename SHAPE>
struct Smem {
  // [HEAD_DIM / BOX_COLUMNS, rows, BOX_COLUMNS], swizzled by TMA
  alignas(1024) T q[SHAPE::GROUPS][GROUP_M * SHAPE::HEAD_DIM];
  alignas(1024) T o[SHAPE::GROUPS][GROUP_M * SHAPE::HEAD_DIM];
  alignas(1024) T k[STAGES][SHAPE::BLOCK_N * SHAPE::HEAD_DIM];
  alignas(1024) T v[STAGES][SHAPE::BLOCK_N * SHAPE::HEAD_DIM];
  uint64_t unused;  // keeps the places of the mbarriers, and with them the machine code whose times are recorded
  uint64_t q_full, q_empty, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
  int all_are_stored[SHAPE::GROUPS];
};

// Stores a warpgroup's part of a work tile, and merges all parts if they are stored.  Returns whether they are.  At least the
// last warpgroup finds all parts stored, because the fences have one order.  If several do, they merge the same bits in the same
// order.  They also clear the marks, so that the next call, which may be a replay with the same workspace, finds none.
template <typename SHAPE>
__device__ __forceinline__ bool merge_parts(const SplitTiles& split, int group, float (&o)[SHAPE::O_TILES][4],
                                            fa::IntegerSoftmax& softmax, int* all_are_stored_smem) {
  constexpr int PART_VECTORS = (SHAPE::O_TILES + 1) * GROUP_THREADS;
  const int thread = threadIdx.x % GROUP_THREADS, tile = blockIdx.x / split.parts;
  const int first_part = (tile * SHAPE::GROUPS + group) * split.parts;
  const int own_part = first_part + blockIdx.x % split.parts;
  float4* own = split.results + int64_t(own_part) * PART_VECTORS + thread;
  if (thread >= WARP && own_part == first_part) fa::delay_if_omitted<PART_STORED>();
#pragma unroll
  for (int d = 0; d < SHAPE::O_TILES; ++d) __stcg(own + d * GROUP_THREADS, make_float4(o[d][0], o[d][1], o[d][2], o[d][3]));
  __stcg(own + SHAPE::O_TILES * GROUP_THREADS, make_float4(softmax.m_log2[0], softmax.m_log2[1], softmax.l[0], softmax.l[1]));
  __threadfence();
  fa::sync_threads<PART_STORED, GROUP_THREADS>(FIRST_GROUP_BARRIER + group);
  if (thread == 0) {
    volatile uint64_t* stored = split.stored;
    stored[own_part] = STORED;
    __threadfence();
    int count = 0;
    for (int part = 0; part < split.parts; ++part) count += stored[first_part + part] == STORED;
    if (count == split.parts) {
      for (int part = 0; part < split.parts; ++part) stored[first_part + part] = 0;
    }
    __threadfence();
    all_are_stored_smem[group] = count == split.parts;
  }
  fa::barrier_sync<GROUP_THREADS>(FIRST_GROUP_BARRIER + group);
  if (!all_are_stored_smem[group]) return false;
#pragma unroll
  for (int d = 0; d < SHAPE::O_TILES; ++d) o[d][0] = o[d][1] = o[d][2] = o[d][3] = 0.0f;
  softmax = fa::IntegerSoftmax();
  const float4* part_gmem = split.results + int64_t(first_part) * PART_VECTORS + thread;
#pragma unroll 1
  for (int part = 0; part < split.parts; ++part, part_gmem += PART_VECTORS) {
    const float4 m_and_l = __ldcg(part_gmem + SHAPE::O_TILES * GROUP_THREADS);
    float rescale_part[LANE_ROWS];
#pragma unroll
    for (int r = 0; r < LANE_ROWS; ++r) {
      const float m_part_log2 = r == 0 ? m_and_l.x : m_and_l.y, l_part = r == 0 ? m_and_l.z : m_and_l.w;
      const float m_new_log2 = fmaxf(softmax.m_log2[r], m_part_log2);
      softmax.rescale[r] = fa::ex2_approx_ftz(softmax.m_log2[r] - m_new_log2);
      rescale_part[r] = fa::ex2_approx_ftz(m_part_log2 - m_new_log2);
      softmax.m_log2[r] = m_new_log2;
      softmax.l[r] = softmax.l[r] * softmax.rescale[r] + l_part * rescale_part[r];
    }
#pragma unroll
    for (int d = 0; d < SHAPE::O_TILES; ++d) {
      const float4 o_part = __ldcg(part_gmem + d * GROUP_THREADS);
      o[d][0] = o[d][0] * softmax.rescale[0] + o_part.x * rescale_part[0];
      o[d][1] = o[d][1] * softmax.rescale[0] + o_part.y * rescale_part[0];
      o[d][2] = o[d][2] * softmax.rescale[1] + o_part.z * rescale_part[1];
      o[d][3] = o[d][3] * softmax.rescale[1] + o_part.w * rescale_part[1];
    }
  }
  return true;
}

// Releases a tile of K and of V that this warpgroup does not read.
template <typename T, typename SHAPE>
__device__ __forceinline__ void release_unread(Smem<T, SHAPE>& smem, const fa::Ring<STAGES>& ring, int lane) {
  if (lane == 0) {  // without its waits, one phase could get the arrivals of two
    fa::wait<K_FULL>(&smem.k_full[ring.stage], ring.phase);
    fa::release<K_EMPTY>(&smem.k_empty[ring.stage]);
    fa::wait<V_FULL>(&smem.v_full[ring.stage], ring.phase);
    fa::release<V_EMPTY>(&smem.v_empty[ring.stage]);
  }
  __syncwarp();  // no lane may wait for a phase before the one before it is complete
}

// A computing warpgroup: 64 queries of each work tile of this block.
template <typename T, typename SHAPE>
__device__ __forceinline__ void compute(
    const fa::TileParams& params, const CUtensorMap& o_map, const typename SHAPE::Deal& deal, Smem<T, SHAPE>& smem,
    int group) {
  constexpr int HEAD_DIM = SHAPE::HEAD_DIM, BLOCK_N = SHAPE::BLOCK_N;
  const int thread_in_group = threadIdx.x % GROUP_THREADS, lane = threadIdx.x % WARP;
  const int lane_row = thread_in_group / WARP * MMA_M + lane / QUAD;  // this lane holds rows lane_row and lane_row + 8
  const uint64_t q = fa::wgmma_descriptor(smem.q[group]);
  const uint64_t first_k = fa::wgmma_descriptor(smem.k[0]);
  const uint64_t first_v = fa::wgmma_descriptor(smem.v[0], BLOCK_N * BOX_COLUMNS * 2);
  constexpr int STAGE_STEP = SHAPE::TILE_BYTES >> 4;  // in descriptors, addresses are in units of 16 bytes
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
  for (int round = 0, number; (number = deal.number(round)) < params.work_tiles; ++round) {
    const fa::WorkTile work = fa::make_work_tile<SHAPE>(params, number);
    const fa::KeyTiles keys = deal.key_tiles(work, round);
    const int query = work.first_query + group * GROUP_M + lane_row;
    float o[SHAPE::O_TILES][4] = {};
    fa::IntegerSoftmax softmax;
    if (work.key_tiles > 0) {
      // The tiles from first_masked on contain keys that some query of the warpgroup does not see.  The last tile is the first to
      // be computed, so that masked tiles come first and the main loop has no mask.
      const int first_key = keys.first * BLOCK_N;
      const int first_diagonal = params.first_diagonal + work.first_query + group * GROUP_M;
      const int first_masked = params.is_negated ? 0 : max(0, min(params.seq_k, first_diagonal) - first_key) / BLOCK_N;
      int j = keys.end - keys.first - 1;
      uint32_t p[SHAPE::P_TILES][4];
      fa::wait<Q_FULL>(&smem.q_full, q_phase);
      q_phase ^= 1;

      // The queries of this warpgroup see none of these tiles.  It releases them, and passes its turns on.
      const int group_tiles = max(1, fa::visible_key_tiles<SHAPE>(params, work.first_query + group * GROUP_M + GROUP_M));
#pragma unroll 1
      for (; j >= group_tiles; --j) {
        take_turn();
        pass_turn();
        release_unread(smem, ring, lane);
        ring.advance();
      }

      // The softmax of the last key tile, while nothing else runs.
      {
        float s[SHAPE::S_TILES][4];
        fa::wait<K_FULL>(&smem.k_full[ring.stage], ring.phase);
        fa::start_qk<T, HEAD_DIM>(s, q, first_k + ring.stage * STAGE_STEP);
        fa::wgmma_wait_group<0>(s);
        fa::release<K_EMPTY>(&smem.k_empty[ring.stage]);
        fa::mask(s, params, query, first_key + j * BLOCK_N, lane);
        softmax.raise_m(s, params.scale_log2, params.inverse_scale_log2);
        softmax.exponentials(s, params.scale_log2);
        fa::round_p<T>(p, s);
        const fa::Ring<STAGES> next = ring.next();
        if (j > 0) fa::wait<K_FULL>(&smem.k_full[next.stage], next.phase);
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
        fa::start_pv<T, BLOCK_N>(o, p, first_v + previous.stage * STAGE_STEP);
        pass_turn();
        fa::wgmma_wait_group<1>(s);
        fa::release<K_EMPTY>(&smem.k_empty[ring.stage]);
        if (decltype(is_masked)::value) fa::mask(s, params, query, first_key + j * BLOCK_N, lane);
        const bool is_raised = softmax.raise_m_if_needed(s, params.scale_log2, params.inverse_scale_log2);
        softmax.exponentials(s, params.scale_log2);
        // ptxas would move the exponentials below the wait for P V, but not across the loop of this wait.
        const fa::Ring<STAGES> next = ring.next();
        if (j > 0) fa::wait<K_FULL>(&smem.k_full[next.stage], next.phase);
        fa::wgmma_wait_group<0>(o);
        fa::release<V_EMPTY>(&smem.v_empty[previous.stage]);
        fa::round_p<T>(p, s);
        if (is_raised) softmax.rescale_rows(o);
      };
#pragma unroll 1
      for (; j >= first_masked; --j) step(std::true_type());
#pragma unroll 1
      for (; j >= 0; --j) step(std::false_type());
      fa::release<Q_EMPTY>(&smem.q_empty);

      // P V of the first key tile.
      fa::wait<V_FULL>(&smem.v_full[ring.stage], ring.phase);
      fa::start_pv<T, BLOCK_N>(o, p, first_v + ring.stage * STAGE_STEP);
      fa::wgmma_wait_group<0>(o);
      fa::release<V_EMPTY>(&smem.v_empty[ring.stage]);
      ring.advance();
    }

    if constexpr (SHAPE::HAS_SPLIT) {
      if (deal.is_split(round) && !merge_parts<SHAPE>(deal, group, o, softmax, smem.all_are_stored)) continue;
    }

    const fa::Head head = fa::make_head(params, work.batch_head);
    fa::normalise(o, softmax, params, head, query, lane);
    fa::store_o<O_WRITTEN, SHAPE::O_TILES>(smem.o[group], o, o_map, params, head, work.first_query, group,
                                           FIRST_GROUP_BARRIER + group, thread_in_group, lane);
  }
  if (thread_in_group == 0) fa::cp_async_bulk_wait_group_read();  // before the block's shared memory is given to another one
}

template <typename T, typename SHAPE>
__global__ void __launch_bounds__(SHAPE::THREADS, SHAPE::BLOCKS_PER_SM)
long_split_kernel(const __grid_constant__ fa::TileParams params, const __grid_constant__ CUtensorMap q_map,
                  const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                  const __grid_constant__ CUtensorMap o_map, const __grid_constant__ typename SHAPE::Deal deal) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<Smem<T, SHAPE>*>(smem_bytes);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / GROUP_THREADS, 0);
  if (threadIdx.x == 0) fa::init_mbarriers<SHAPE>(smem);
  __syncthreads();
  if (warpgroup == 0) {
    fa::setmaxnreg_dec<SHAPE::PRODUCER_REGISTERS>();
    if (threadIdx.x < WARP && fa::elect_sync()) {
      fa::produce<Q_FULL, V_FULL, SHAPE>(deal, params, q_map, k_map, v_map, smem);
    }
  } else {
    fa::setmaxnreg_inc<SHAPE::REGISTERS>();
    compute(params, o_map, deal, smem, warpgroup - 1);
  }
}

// The work tiles from `first` on, those of an incomplete last round, are divided into as many parts by their keys.
struct Division {
  int first, parts, tiles;
};

constexpr double MERGE_US = 6.0;  // to merge the parts of a work tile; calculated
template <typename SHAPE>
constexpr bool MAY_SPLIT = SHAPE::HEAD_DIM == 128;  // at D = 64, ptxas would move the exponentials

// Divides the last round if that saves more time than merging takes.  Under a causal mask the lengths of work tiles differ, and
// they are dealt so that all SMs are busy until the end.
template <typename SHAPE>
Division divide_last_round(const FaForwardArgs* args, const fa::TileParams& params) {
  using Costs = fa::Costs<SHAPE>;
  const int blocks = fa::max_blocks<SHAPE>(), tiles = params.work_tiles % blocks;
  const int key_tiles = (params.seq_k + SHAPE::BLOCK_N - 1) / SHAPE::BLOCK_N;
  const int parts = tiles > 0 ? std::min({MAX_PARTS, blocks / tiles, key_tiles}) : 1;
  const bool saves_time = (key_tiles - key_tiles / std::max(parts, 1)) * Costs::KEY_TILE_US > Costs::WORK_TILE_US + MERGE_US;
  if (!MAY_SPLIT<SHAPE> || args->causal != FA_CAUSAL_NONE || parts < 2 || !saves_time) return {params.work_tiles, 1, 0};
  return {params.work_tiles - tiles, parts, tiles};
}

// The bytes of the workspace: the results of all parts, then their marks.
template <typename SHAPE>
size_t result_bytes(const Division& division) {
  const size_t part_bytes = (SHAPE::O_TILES + 1) * GROUP_THREADS * sizeof(float4);
  return size_t(division.tiles) * SHAPE::GROUPS * division.parts * part_bytes;
}

template <typename SHAPE>
size_t workspace_bytes(const FaForwardArgs* args) {
  fa::TileParams params;
  if (fa::make_tile_params<SHAPE>(args, &params) != FA_OK) return 0;
  const Division division = divide_last_round<SHAPE>(args, params);
  return result_bytes<SHAPE>(division) + size_t(division.tiles) * SHAPE::GROUPS * division.parts * sizeof(uint64_t);
}

// Fills `split` and returns FA_OK, or refuses the call.
template <typename SHAPE>
int make_split(const FaForwardArgs* args, const fa::TileParams& params, SplitTiles* split) {
  const Division division = divide_last_round<SHAPE>(args, params);
  const size_t bytes = workspace_bytes<SHAPE>(args);
  if (args->workspace_bytes < bytes || reinterpret_cast<uintptr_t>(args->workspace) % alignof(float4) != 0) {
    return fa_refuse(args, "the workspace has %llu bytes at %p; it needs %zu bytes, aligned to %zu",
                     static_cast<unsigned long long>(args->workspace_bytes), args->workspace, bytes, alignof(float4));
  }
  char* marks = static_cast<char*>(args->workspace) + result_bytes<SHAPE>(division);
  *split = {static_cast<float4*>(args->workspace), reinterpret_cast<uint64_t*>(marks), division.first, division.parts};
  return FA_OK;
}

template <typename T, typename SHAPE>
int launch_kernel(const FaForwardArgs* args, const fa::TileParams& params, const typename SHAPE::Deal& deal,
                  cudaStream_t stream) {
  fa::TensorMaps maps;
  if (int status = fa::make_tensor_maps<SHAPE>(args, &maps)) return status;
  const auto kernel = &long_split_kernel<T, SHAPE>;
  constexpr int smem_bytes = sizeof(Smem<T, SHAPE>);
  static fa::OncePerDevice prepare;
  const auto prepare_once = [&] { return fa::prepare_kernel<SHAPE, smem_bytes>(args, reinterpret_cast<const void*>(kernel)); };
  if (int status = prepare(prepare_once)) return status;
  const int blocks = SHAPE::HAS_SPLIT ? fa::max_blocks<SHAPE>() : std::min(params.work_tiles, fa::max_blocks<SHAPE>());
  kernel<<<blocks, SHAPE::THREADS, smem_bytes, stream>>>(params, maps.q, maps.k, maps.v, maps.o, deal);
  return static_cast<int>(cudaPeekAtLastError());
}

template <typename T, typename SHAPE>
int launch_shape(const FaForwardArgs* args, cudaStream_t stream) {
  fa::TileParams params;
  if (int status = fa::make_tile_params<SHAPE>(args, &params)) return status;
  if constexpr (MAY_SPLIT<SHAPE>) {
    SplitTiles split;
    if (int status = make_split<SHAPE>(args, params, &split)) return status;
    if (split.parts > 1) return launch_kernel<T, Divided<SHAPE>>(args, params, split, stream);
  }
  return launch_kernel<T, Whole<SHAPE>>(args, params, {}, stream);
}

// Returns the key tiles of a work tile that each of its warpgroups sees, added up.
template <typename SHAPE>
int group_tiles(const fa::TileParams& params, int number) {
  const fa::WorkTile work = fa::make_work_tile<SHAPE>(params, number);
  int tiles = 0;
  for (int group = 1; group <= SHAPE::GROUPS; ++group) {
    tiles += std::min(work.key_tiles, fa::visible_key_tiles<SHAPE>(params, work.first_query + group * GROUP_M));
  }
  return tiles;
}

// Estimates the time of a call.  Returns infinity if the shape refuses the call.
template <typename SHAPE>
double estimated_us(const FaForwardArgs* args) {
  using Costs = fa::Costs<SHAPE>;
  fa::TileParams params;
  if (fa::make_tile_params<SHAPE>(args, &params) != FA_OK) return INFINITY;
  const auto us_of = [&](int number) {
    return group_tiles<SHAPE>(params, number) * Costs::KEY_TILE_US / SHAPE::GROUPS + Costs::WORK_TILE_US;
  };
  const Division division = divide_last_round<SHAPE>(args, params);
  const double whole_us = fa::busiest_sm_us<SHAPE>(params, division.first, us_of);
  if (division.tiles == 0 || fa::has_many_rounds<SHAPE>(params)) return whole_us;
  const double part_us = (us_of(division.first) - Costs::WORK_TILE_US) / division.parts + Costs::WORK_TILE_US + MERGE_US;
  return whole_us + part_us * SHAPE::BLOCKS_PER_SM;
}

// The shapes among which a call chooses.
template <typename... SHAPES>
struct Shapes {
  static int choose(const FaForwardArgs* args) {
    if (ONLY_SHAPE >= 0) return ONLY_SHAPE;
    return fa::fastest_shape(args, {&estimated_us<SHAPES>...});
  }
  template <typename T>
  static int launch(const FaForwardArgs* args, cudaStream_t stream) {
    static constexpr int (*LAUNCHES[])(const FaForwardArgs*, cudaStream_t) = {&launch_shape<T, SHAPES>...};
    return LAUNCHES[choose(args)](args, stream);
  }
  static size_t workspace_bytes_of_call(const FaForwardArgs* args) {
    static constexpr size_t (*WORKSPACES[])(const FaForwardArgs*) = {&workspace_bytes<SHAPES>...};
    return WORKSPACES[choose(args)](args);
  }
};

using ShapesOf64 = Shapes<fa::Shape<64, 2, 128>, fa::Shape<64, 3, 128>, fa::Shape<64, 4, 64>, fa::Shape<64, 1, 128>>;
using ShapesOf128 = Shapes<fa::Shape<128, 2, 128>, fa::Shape<128, 3, 80>, fa::Shape<128, 1, 64>>;

template <typename T, int HEAD_DIM>
int launch(const FaForwardArgs* args, cudaStream_t stream) {
  return std::conditional_t<HEAD_DIM == 64, ShapesOf64, ShapesOf128>::template launch<T>(args, stream);
}

FA_FORWARD(launch)

FA_EXPORT size_t fa_workspace_bytes(const FaForwardArgs* args) {
  return args->head_dim == 128 ? ShapesOf128::workspace_bytes_of_call(args) : 0;
}

// long_wgmma: one source for the rungs for long sequences, from long_ring to long_next_q.
// step:    a persistent block with a producer: one thread keeps two tiles of K and V in flight by TMA, two warpgroups compute 64
//          queries each, with all keys; O is stored by TMA
// because: cluster_latency is made for few keys: at 4096 keys it takes 1.16 times as long as cuDNN at D = 64 and 1.5 times at
//          D = 128, because all warps of a block wait for the next keys at the same time
// expect:  at b2h16s4096d64, 370 us without a mask; at D = 128, 486 us: no warp waits for copies, but the tensor cores
//          wait for the softmax
// diff:    the whole file: the loop over the keys, the roles of the warpgroups and the store of O are new
// tile:    128 queries x 128 keys with two computing warpgroups; long_shapes also has one, three and four, with 64 to 128 keys;
//          97 KB of shared memory per block at D = 64, 193 KB at D = 128
// takes:   fp16 and bf16, D = 64 and 128, any S_q >= 1 and S_kv >= 0, top-left and bottom-right causal masks, grouped heads;
//          rows contiguous and 16-byte aligned, with strides that TMA accepts
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <float.h>
#include <math_constants.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <type_traits>

#include "fa/hopper.cuh"
#include "fa/launch.h"
#include "fa/params.cuh"
#include "fa/ptx.cuh"
#include "fa/remembered.h"
#include "fa/warp.cuh"
#include "fa/warpgroup.cuh"
#include "fa_forward.h"
#include "fa_instantiations.h"  // FA_FOR_EACH_INSTANTIATION: the manifest's dtypes and head_dims

using fp16 = __half;
using bf16 = __nv_bfloat16;

// How the work is divided:
// - A block computes 64 queries per computing warpgroup, and all keys that they see, from the last key tile to the first.  Masked
//   tiles therefore come first, and the main loop has no mask.
// - One thread of the first warpgroup, the producer, loads Q, K and V by TMA.  K and V go through a ring of STAGES key tiles.
// - A block is persistent: the work tiles are dealt to the blocks, the longest first.
// - With SPLIT_LAST_ROUND, the work tiles of an incomplete last round are divided by their keys, so that all SMs have work until
//   the end.  The parts of a work tile are merged through the workspace, by the warpgroup that finds all of them stored.
// - With FLOW == OVERLAP, S of the next key tile is computed by the tensor cores during the softmax of the current one.

// The order of the phases within a warpgroup.
enum Flow {
  SERIAL,   // S, softmax and P V one after another; warpgroups do not wait for each other
  TURNS,    // as SERIAL, but the warpgroups take turns at the exponentials
  OVERLAP,  // S of the next tile and P V of the previous one run during the softmax; warpgroups take turns at issuing them
};

// How the row max is computed: with floats, or with integers, three at a time.
enum RowMax { FLOATS, INTEGERS };

// How the row sum is computed: by additions, or by P V with eight more columns of V that are one.
enum RowSum { ADDITIONS, ONES };

// The barriers of this kernel and what each guarantees.  A test omits one with OMIT_BARRIER, to check that the error is detected.
// Omitting an _EMPTY barrier means to release the memory before it is read, because without any release the phases of the
// mbarriers would no longer match.
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

// The phases of this kernel.  An ablation omits one with OMIT_PHASE, to measure what it costs.
enum Phase { NO_PHASE, LOAD, QK, SOFTMAX, PV, PRODUCTS };

constexpr int WARP = 32;
constexpr int QUAD = 4;  // lanes that share a row of an mma fragment
constexpr int MMA_M = 16, MMA_N = 8, MMA_K = 16;
constexpr int GROUP_M = 64;        // queries of a warpgroup: the rows of a wgmma
constexpr int GROUP_THREADS = 128;
constexpr int BOX_COLUMNS = 64;    // columns per TMA box: 128 bytes, the span of the swizzle
constexpr int LANE_ROWS = 2;       // rows that a lane holds: r and r + 8
constexpr int FIRST_TURN_BARRIER = 1, FIRST_GROUP_BARRIER = 8;  // named barriers, one per computing warpgroup

// O is rescaled only where P would exceed 2^8.  fp16 holds values up to 2^15 with the same relative error.
constexpr float RESCALE_THRESHOLD_LOG2 = 8.0f;

// K and V of the heads that are computed at the same time should fit in L2 (50 MB) besides Q and O.
constexpr int64_t SECTION_BYTES = 32 << 20;

struct Empty {};  // in place of what is not needed

// Marks a part in the workspace as stored.  The workspace may contain anything before a call.  Any other value, such as NaN or
// the data of another call, means 'not stored'.
constexpr uint64_t STORED = 0x9e6c63d0876a9a47ull;
constexpr int MAX_PARTS = 8;  // of a work tile

// The work tiles whose keys are divided between blocks.
struct SplitTiles {
  float4* results;   // [tiles, GROUPS, parts, PV_TILES + 1, GROUP_THREADS]: O of a thread, then m (in log2) and l of its rows
  uint64_t* stored;  // [tiles, GROUPS, parts]
  int first;         // number of the first of these work tiles; those before it are not divided
  int parts;         // of each tile
};

// The sizes of one work tile.
template <int HEAD_DIM_, int GROUPS_, int BLOCK_N_>
struct Shape {
  static constexpr int HEAD_DIM = HEAD_DIM_, GROUPS = GROUPS_, BLOCK_N = BLOCK_N_, STAGES = 2;
  static constexpr int BLOCK_M = GROUPS * GROUP_M, THREADS = (GROUPS + 1) * GROUP_THREADS;
  static constexpr int BLOCKS_PER_SM = GROUPS == 1 ? 2 : 1;
  // All threads of a block start with the same number of registers, a multiple of 8.  The producer then gives most of its own to
  // the others.  setmaxnreg.inc would wait for ever if there were not enough.
  static constexpr int START_REGISTERS = 65536 / BLOCKS_PER_SM / THREADS / 8 * 8;
  static constexpr int PRODUCER_REGISTERS = GROUPS == 3 ? 32 : 24;
  static constexpr int REGISTERS = GROUPS == 1 ? 232 : GROUPS == 2 ? 240 : GROUPS == 3 ? 160 : 112;
  static constexpr int ALL_REGISTERS = PRODUCER_REGISTERS + GROUPS * REGISTERS;  // of one thread of each warpgroup
  static_assert(ALL_REGISTERS <= (GROUPS + 1) * START_REGISTERS, "no registers are created");
  static constexpr bool HAS_ONES = ROW_SUM == ONES && HEAD_DIM == 64;  // at D = 128 the tensor cores are the bottleneck
  static constexpr int S_TILES = BLOCK_N / MMA_N, P_TILES = BLOCK_N / MMA_K, O_TILES = HEAD_DIM / MMA_N;
  static constexpr int PV_TILES = O_TILES + HAS_ONES;
  static constexpr int TILE_BYTES = BLOCK_N * HEAD_DIM * 2, Q_BYTES = BLOCK_M * HEAD_DIM * 2;
  static_assert(TILE_BYTES % 1024 == 0, "the swizzle pattern repeats every 1024 bytes");
  static constexpr bool HAS_SPLIT = false;
  using Split = Empty;
};

// The same for calls whose last work tiles are divided by their keys.
template <typename SHAPE>
struct Divided : SHAPE {
  static constexpr bool HAS_SPLIT = true;
  using Split = SplitTiles;
};

template <typename T, typename SHAPE>
struct Smem {
  // [HEAD_DIM / BOX_COLUMNS, rows, BOX_COLUMNS], swizzled by TMA
  alignas(1024) T q[SHAPE::GROUPS][GROUP_M * SHAPE::HEAD_DIM];
  alignas(1024) T o[SHAPE::GROUPS][GROUP_M * SHAPE::HEAD_DIM];
  alignas(1024) T k[SHAPE::STAGES][SHAPE::BLOCK_N * SHAPE::HEAD_DIM];
  alignas(1024) T v[SHAPE::STAGES][SHAPE::BLOCK_N * SHAPE::HEAD_DIM];
  alignas(1024) std::conditional_t<SHAPE::HAS_ONES, T[MMA_K * BOX_COLUMNS], Empty> ones;
  uint64_t q_full, q_empty, k_full[SHAPE::STAGES], k_empty[SHAPE::STAGES], v_full[SHAPE::STAGES], v_empty[SHAPE::STAGES];
  std::conditional_t<SHAPE::HAS_SPLIT, int[SHAPE::GROUPS], Empty> all_are_stored;
};

struct KernelParams {
  float* lse;               // [batch, heads, seq_q], or nullptr
  float scale_log2;         // |scale| * log2(e)
  float inverse_scale_log2;
  int is_negated;           // the scale is negative: S is negated
  int seq_q, seq_k;
  int first_diagonal;       // query i sees keys [0, min(seq_k, first_diagonal + i))
  int heads, batch_heads;
  int m_blocks;             // work tiles of a head
  int section_heads;        // heads whose work tiles are computed at the same time, the longest first
  int work_tiles;
  uint32_t kv_head_factor;  // about 2^31 / (heads / kv_heads), see fa::kv_head_of
};

// BLOCK_M queries of one head, and the key tiles that they see.
struct WorkTile {
  int first_query, batch_head;
  int key_tiles;  // tiles with a key that any query of the block sees
};

// The number of key tiles with a key that any query before `end_query` sees.
template <typename SHAPE>
__host__ __device__ __forceinline__ int visible_key_tiles(const KernelParams& params, int end_query) {
  const int last_diagonal = params.first_diagonal + end_query - 1;  // the last query sees this many keys, if there are as many
  const int visible_keys = last_diagonal < params.seq_k ? last_diagonal : params.seq_k;
  return visible_keys > 0 ? (visible_keys + SHAPE::BLOCK_N - 1) / SHAPE::BLOCK_N : 0;
}

// Work tiles are numbered by section, then by their queries, then by head.  Under a causal mask, the last queries see the most
// keys.  The last section begins with them, so that the shortest work tiles come at the end.  The sections before it alternate,
// so that the lengths change gradually from one section to the next, as dealt_number needs.
template <typename SHAPE>
__host__ __device__ __forceinline__ WorkTile make_work_tile(const KernelParams& params, uint32_t number) {
  const uint32_t section_tiles = params.section_heads * params.m_blocks, section = number / section_tiles;
  const uint32_t in_section = number - section * section_tiles, first_head = section * params.section_heads;
  const uint32_t left_heads = params.batch_heads - first_head, full_heads = params.section_heads;
  const uint32_t section_heads = left_heads < full_heads ? left_heads : full_heads;
  const uint32_t row = in_section / section_heads, sections_left = (left_heads - 1) / full_heads;
  const int first_query = (sections_left % 2 ? row : params.m_blocks - 1 - row) * SHAPE::BLOCK_M;
  const int end_query = params.seq_q < first_query + SHAPE::BLOCK_M ? params.seq_q : first_query + SHAPE::BLOCK_M;
  const int key_tiles = visible_key_tiles<SHAPE>(params, end_query);
  return {first_query, static_cast<int>(first_head + in_section % section_heads), key_tiles};
}

struct Head {
  int query_head, kv_head, batch;
};

__device__ __forceinline__ Head make_head(const KernelParams& params, uint32_t batch_head) {
  const uint32_t batch = batch_head / params.heads, head = batch_head % params.heads;
  return {static_cast<int>(head), static_cast<int>(__umulhi(2 * head + 1, params.kv_head_factor)), static_cast<int>(batch)};
}

// The work tiles are dealt like cards, in alternating directions, so that all blocks get nearly the same amount of work.  Returns
// the number of the work tile that a block gets in a round.
__host__ __device__ __forceinline__ int dealt_number(int round, int block, int blocks) {
  return round * blocks + (round % 2 ? blocks - 1 - block : block);
}

// Whether the work tiles of a round are divided by their keys.
__device__ __forceinline__ bool is_split(const SplitTiles& split, int round) {
  return round * static_cast<int>(gridDim.x) >= split.first;
}

// Returns the number of the work tile of this block in a round, or a larger one than any if there is none.
template <typename SHAPE>
__device__ __forceinline__ int work_number(const typename SHAPE::Split& split, int round) {
  const int number = dealt_number(round, blockIdx.x, gridDim.x);
  if constexpr (SHAPE::HAS_SPLIT) {
    const bool is_last_round = round * static_cast<int>(gridDim.x) == split.first;
    if (is_split(split, round)) return is_last_round ? split.first + static_cast<int>(blockIdx.x) / split.parts : INT32_MAX;
  }
  return number;
}

// The key tiles [first, end) of a work tile that this block computes.
struct KeyTiles {
  int first, end;
};

template <typename SHAPE>
__device__ __forceinline__ KeyTiles key_tiles_of(const WorkTile& work, const typename SHAPE::Split& split, int round) {
  if constexpr (SHAPE::HAS_SPLIT) {
    const int part = blockIdx.x % split.parts;
    if (is_split(split, round)) return {work.key_tiles * part / split.parts, work.key_tiles * (part + 1) / split.parts};
  }
  return {0, work.key_tiles};
}

__device__ __forceinline__ void wait_empty(uint64_t* barrier_smem, uint32_t parity) {
  while (!fa::mbarrier_try_wait(barrier_smem, parity)) {
  }
}

// In a kernel that omits this barrier, delays the thread for which the barrier waits.  Otherwise the error would show rarely.
template <Barrier BARRIER>
__device__ __forceinline__ void delay_if_omitted() {
  if (BARRIER == OMIT_BARRIER) __nanosleep(5000);
}

template <Barrier BARRIER>
__device__ __forceinline__ void wait_full(uint64_t* barrier_smem, uint32_t parity) {
  if (BARRIER == OMIT_BARRIER) return;
  while (!fa::mbarrier_try_wait(barrier_smem, parity)) {
  }
}

// In a kernel that omits this barrier, waits for it when the data has been used.  Without any wait, a warpgroup would release
// the next buffer before the producer has written this one, and the producer would wait for ever.
template <Barrier BARRIER>
__device__ __forceinline__ void wait_late_if_omitted(uint64_t* barrier_smem, uint32_t parity) {
  if constexpr (BARRIER == OMIT_BARRIER) {
    while (!fa::mbarrier_try_wait(barrier_smem, parity)) {
    }
  }
}

// The position in a ring of STAGES key tiles.  It goes on from one work tile to the next.
template <int STAGES>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
};

// Loads rows of Q, K or V of one head.  Called by one thread.
template <int HEAD_DIM, int ROWS, typename T>
__device__ __forceinline__ void load_rows(
    T* to_smem, const CUtensorMap& map, int first_row, int head, int batch, uint64_t* barrier_smem) {
#pragma unroll
  for (int d = 0; d < HEAD_DIM && OMIT_PHASE != LOAD; d += BOX_COLUMNS) {
    fa::cp_async_bulk_tensor_4d(to_smem + d * ROWS, map, d, first_row, head, batch, barrier_smem);
  }
}

// The producer: loads Q, K and V of all work tiles of this block.  K is loaded one tile ahead of V.
template <typename T, typename SHAPE>
__device__ __forceinline__ void produce(const KernelParams& params, const CUtensorMap& q_map, const CUtensorMap& k_map,
                                        const CUtensorMap& v_map, const typename SHAPE::Split& split, Smem<T, SHAPE>& smem) {
  constexpr int HEAD_DIM = SHAPE::HEAD_DIM, BLOCK_N = SHAPE::BLOCK_N, LOADED = OMIT_PHASE != LOAD;
  Ring<SHAPE::STAGES> k_ring, v_ring;
  uint32_t q_phase = 0;
#pragma unroll 1
  for (int round = 0, number; (number = work_number<SHAPE>(split, round)) < params.work_tiles; ++round) {
    const WorkTile work = make_work_tile<SHAPE>(params, number);
    if (work.key_tiles == 0) continue;
    const KeyTiles keys = key_tiles_of<SHAPE>(work, split, round);
    const Head head = make_head(params, work.batch_head);
    auto load_k = [&](int j) {
      wait_empty(&smem.k_empty[k_ring.stage], k_ring.phase ^ 1);
      fa::mbarrier_arrive_expect_tx(&smem.k_full[k_ring.stage], SHAPE::TILE_BYTES * LOADED);
      load_rows<HEAD_DIM, BLOCK_N>(smem.k[k_ring.stage], k_map, j * BLOCK_N, head.kv_head, head.batch, &smem.k_full[k_ring.stage]);
      k_ring.advance();
    };
    wait_empty(&smem.q_empty, q_phase ^ 1);
    q_phase ^= 1;
    auto load_q = [&] {
      fa::mbarrier_arrive_expect_tx(&smem.q_full, SHAPE::Q_BYTES * LOADED);
#pragma unroll
      for (int g = 0; g < SHAPE::GROUPS; ++g) {
        load_rows<HEAD_DIM, GROUP_M>(smem.q[g], q_map, work.first_query + g * GROUP_M, head.query_head, head.batch, &smem.q_full);
      }
    };
    if (OMIT_BARRIER != Q_FULL) load_q();
    load_k(keys.end - 1);
    if (OMIT_BARRIER == Q_FULL) delay_if_omitted<Q_FULL>(), load_q();  // K arrives before Q, so that the error shows
#pragma unroll 1
    for (int j = keys.end - 1; j >= keys.first; --j) {
      if (j > keys.first) load_k(j - 1);
      wait_empty(&smem.v_empty[v_ring.stage], v_ring.phase ^ 1);
      delay_if_omitted<V_FULL>();
      fa::mbarrier_arrive_expect_tx(&smem.v_full[v_ring.stage], SHAPE::TILE_BYTES * LOADED);
      load_rows<HEAD_DIM, BLOCK_N>(smem.v[v_ring.stage], v_map, j * BLOCK_N, head.kv_head, head.batch, &smem.v_full[v_ring.stage]);
      v_ring.advance();
    }
  }
}

// The running softmax of a lane's rows.
struct Softmax {
  float m_log2[LANE_ROWS];  // m * scale_log2; -FLT_MAX before the first key
  float limit[LANE_ROWS];   // scores above this need a new m; as an integer if ROW_MAX == INTEGERS
  float l[LANE_ROWS];
  float rescale[LANE_ROWS];

  __device__ __forceinline__ Softmax() {
#pragma unroll
    for (int r = 0; r < LANE_ROWS; ++r) m_log2[r] = -FLT_MAX, l[r] = 0.0f;
  }

  // Returns this lane's maximum of a row, as a tree reduction, which has a shorter dependency chain than a loop.
  template <int S_TILES>
  static __device__ __forceinline__ float max_of_lane(const float (&s)[S_TILES][4], int r) {
    float partial[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) partial[n] = fmaxf(s[n][2 * r], s[n][2 * r + 1]);
#pragma unroll
    for (int n = 4; n < S_TILES; ++n) partial[n % 4] = fmaxf(partial[n % 4], fmaxf(s[n][2 * r], s[n][2 * r + 1]));
    return fmaxf(fmaxf(partial[0], partial[1]), fmaxf(partial[2], partial[3]));
  }

  // The same for integers, three at a time.  Integers order positive floats like floats.
  template <int S_TILES>
  static __device__ __forceinline__ int max_of_lane_bits(const float (&s)[S_TILES][4], int r) {
    int partial[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) partial[n] = max(__float_as_int(s[n][2 * r]), __float_as_int(s[n][2 * r + 1]));
#pragma unroll
    for (int n = 4; n < S_TILES; ++n) {
      partial[n % 4] = __vimax3_s32(partial[n % 4], __float_as_int(s[n][2 * r]), __float_as_int(s[n][2 * r + 1]));
    }
    return max(__vimax3_s32(partial[0], partial[1], partial[2]), partial[3]);
  }

  // Sets m to the maximum of m and the scores of the whole row, and l and `rescale` accordingly.
  template <int S_TILES>
  __device__ __forceinline__ void raise_m(const float (&s)[S_TILES][4], float scale_log2, float inverse_scale_log2) {
#pragma unroll
    for (int r = 0; r < LANE_ROWS; ++r) {
      const float m_new_log2 = fmaxf(m_log2[r], fa::max_of_quad(max_of_lane(s, r)) * scale_log2);
      rescale[r] = fa::ex2_approx_ftz(m_log2[r] - m_new_log2);
      l[r] *= rescale[r];
      m_log2[r] = m_new_log2;
      limit[r] = (m_new_log2 + RESCALE_THRESHOLD_LOG2) * inverse_scale_log2;
      // Integers order negative floats in reverse.  Below zero, every tile therefore takes the exact path.
      if (ROW_MAX == INTEGERS && !(limit[r] >= 0.0f)) limit[r] = __int_as_float(INT32_MIN);
    }
  }

  // Raises m if any score of the warp is above its limit.  No lane needs the maximum of another one for that.
  template <int S_TILES>
  __device__ __forceinline__ bool raise_m_if_needed(const float (&s)[S_TILES][4], float scale_log2, float inverse_scale_log2) {
    bool is_above = false;
#pragma unroll
    for (int r = 0; r < LANE_ROWS; ++r) {
      if constexpr (ROW_MAX == INTEGERS) {
        is_above |= max_of_lane_bits(s, r) > __float_as_int(limit[r]);
      } else {
        is_above |= max_of_lane(s, r) > limit[r];
      }
    }
    const bool is_raised = __any_sync(0xffffffffu, is_above);
    if (is_raised) raise_m(s, scale_log2, inverse_scale_log2);
    return is_raised;
  }
};

// Hides the scores of keys from `limit` on, and negates all scores if the scale is negative.
template <int S_TILES>
__device__ __forceinline__ void mask(float (&s)[S_TILES][4], const KernelParams& params, int query, int first_key, int lane) {
  if (params.is_negated) {
#pragma unroll
    for (int n = 0; n < S_TILES; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] = -s[n][i];
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int limit = min(params.seq_k, params.first_diagonal + query + i / 2 * 8) - first_key - lane % QUAD * 2 - i % 2;
#pragma unroll
    for (int n = 0; n < S_TILES; ++n) {
      if (n * MMA_N >= limit) s[n][i] = -CUDART_INF_F;
    }
  }
}

// Stores a warpgroup's part of a work tile, and merges all parts if they are stored.  Returns whether they are.  At least the
// last warpgroup finds all parts stored, because the fences have one order.  If several do, they merge the same bits in the same
// order.  They also clear the marks, so that the next call, which may be a replay with the same workspace, finds none.
template <typename SHAPE>
__device__ __forceinline__ bool merge_parts(const SplitTiles& split, int group, float (&o)[SHAPE::PV_TILES][4], Softmax& softmax,
                                            int* all_are_stored_smem) {
  constexpr int PART_VECTORS = (SHAPE::PV_TILES + 1) * GROUP_THREADS;
  const int thread = threadIdx.x % GROUP_THREADS, tile = blockIdx.x / split.parts;
  const int first_part = (tile * SHAPE::GROUPS + group) * split.parts;
  const int own_part = first_part + blockIdx.x % split.parts;
  float4* own_gmem = split.results + int64_t(own_part) * PART_VECTORS + thread;
  if (thread >= WARP && own_part == first_part) delay_if_omitted<PART_STORED>();
#pragma unroll
  for (int d = 0; d < SHAPE::PV_TILES; ++d) __stcg(own_gmem + d * GROUP_THREADS, make_float4(o[d][0], o[d][1], o[d][2], o[d][3]));
  __stcg(own_gmem + SHAPE::PV_TILES * GROUP_THREADS, make_float4(softmax.m_log2[0], softmax.m_log2[1], softmax.l[0], softmax.l[1]));
  __threadfence();
  if (OMIT_BARRIER != PART_STORED) fa::barrier_sync<GROUP_THREADS>(FIRST_GROUP_BARRIER + group);
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
  for (int d = 0; d < SHAPE::PV_TILES; ++d) o[d][0] = o[d][1] = o[d][2] = o[d][3] = 0.0f;
  softmax = Softmax();
  const float4* part_gmem = split.results + int64_t(first_part) * PART_VECTORS + thread;
#pragma unroll 1
  for (int part = 0; part < split.parts; ++part, part_gmem += PART_VECTORS) {
    const float4 m_and_l = __ldcg(part_gmem + SHAPE::PV_TILES * GROUP_THREADS);
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
    for (int d = 0; d < SHAPE::PV_TILES; ++d) {
      const float4 o_part = __ldcg(part_gmem + d * GROUP_THREADS);
      o[d][0] = o[d][0] * softmax.rescale[0] + o_part.x * rescale_part[0];
      o[d][1] = o[d][1] * softmax.rescale[0] + o_part.y * rescale_part[0];
      o[d][2] = o[d][2] * softmax.rescale[1] + o_part.z * rescale_part[1];
      o[d][3] = o[d][3] * softmax.rescale[1] + o_part.w * rescale_part[1];
    }
  }
  return true;
}

// A computing warpgroup: 64 queries of each work tile of this block.
template <typename T, typename SHAPE>
__device__ __forceinline__ void compute(const KernelParams& params, const CUtensorMap& o_map, const typename SHAPE::Split& split,
                                        Smem<T, SHAPE>& smem, int group) {
  constexpr int HEAD_DIM = SHAPE::HEAD_DIM, BLOCK_N = SHAPE::BLOCK_N, S_TILES = SHAPE::S_TILES;
  const int thread_in_group = threadIdx.x % GROUP_THREADS, lane = threadIdx.x % WARP;
  const int group_row = thread_in_group / WARP * MMA_M + lane / QUAD;  // the first of the lane's two rows
  const bool is_first_lane = lane == 0;
  const int own_turn = FIRST_TURN_BARRIER + group, next_turn = FIRST_TURN_BARRIER + (group + 1) % SHAPE::GROUPS;
  constexpr bool HAS_TURNS = FLOW != SERIAL && TAKE_TURNS && SHAPE::GROUPS > 1;
  const uint64_t q = fa::wgmma_descriptor(smem.q[group]);
  const uint64_t first_k = fa::wgmma_descriptor(smem.k[0]), first_v = fa::wgmma_descriptor(smem.v[0], BLOCK_N * BOX_COLUMNS * 2);
  constexpr int STAGE_STEP = SHAPE::TILE_BYTES >> 4;  // in descriptors, addresses are in units of 16 bytes
  Ring<SHAPE::STAGES> ring;
  uint32_t q_phase = 0;
  if (HAS_TURNS && group == 0) fa::barrier_arrive<2 * GROUP_THREADS>(own_turn);

#pragma unroll 1
  for (int round = 0, number; (number = work_number<SHAPE>(split, round)) < params.work_tiles; ++round) {
    const WorkTile work = make_work_tile<SHAPE>(params, number);
    const KeyTiles keys = key_tiles_of<SHAPE>(work, split, round);
    const int query = work.first_query + group * GROUP_M + group_row;
    float o[SHAPE::PV_TILES][4];
#pragma unroll
    for (int d = 0; d < SHAPE::PV_TILES; ++d) o[d][0] = o[d][1] = o[d][2] = o[d][3] = 0.0f;
    Softmax softmax;
    if (work.key_tiles > 0) {
      uint32_t p[SHAPE::P_TILES][4];
      bool is_raised = false;

      auto arrive_empty = [&](auto barrier, uint64_t* barrier_smem, bool is_early) {
        if (is_early == (OMIT_BARRIER == decltype(barrier)::value) && is_first_lane) fa::mbarrier_arrive(barrier_smem);
      };
      constexpr std::integral_constant<Barrier, K_EMPTY> K_READ{};
      constexpr std::integral_constant<Barrier, V_EMPTY> V_READ{};
      constexpr std::integral_constant<Barrier, Q_EMPTY> Q_READ{};
      // Releases Q when S of the last key tile is complete, so that TMA loads the next Q during the softmax and the last P V.
      // Where the last key tile is masked, ptxas would move the exponentials, and Q is released after the softmax.
      auto release_q_early = [&](bool is_read) {
        if (RELEASE_Q_EARLY && is_read && is_first_lane) fa::mbarrier_arrive(&smem.q_empty);
      };
      auto take_turn = [&] {
        if (HAS_TURNS) fa::barrier_sync<2 * GROUP_THREADS>(own_turn);
      };
      auto pass_turn = [&] {
        if (HAS_TURNS) fa::barrier_arrive<2 * GROUP_THREADS>(next_turn);
      };
      // S = Q K^T
      auto start_s = [&](float (&s)[S_TILES][4], int stage) {
        const uint64_t k = first_k + stage * STAGE_STEP;
        fa::wgmma_fence();
#pragma unroll
        for (int d = 0; d < (OMIT_PHASE == QK || OMIT_PHASE == PRODUCTS ? MMA_K : HEAD_DIM); d += MMA_K) {
          const int q_offset = (d / BOX_COLUMNS * GROUP_M * BOX_COLUMNS + d % BOX_COLUMNS) * sizeof(T) >> 4;
          const int k_offset = (d / BOX_COLUMNS * BLOCK_N * BOX_COLUMNS + d % BOX_COLUMNS) * sizeof(T) >> 4;
          fa::wgmma_any_n<T, 0>(s, q + q_offset, k + k_offset, d > 0);
        }
        fa::wgmma_commit_group();
      };
      // O += P V
      auto start_pv = [&](int stage) {
        uint64_t v = first_v + stage * STAGE_STEP;
        // The next columns of each row are those of `ones`.
        if constexpr (SHAPE::HAS_ONES) v = fa::wgmma_descriptor(smem.v[stage], fa::smem_address(smem.ones) - fa::smem_address(smem.v[stage]));
        constexpr uint64_t ROWS_STEP = MMA_K * BOX_COLUMNS * sizeof(T) >> 4, ONES_STEP = SHAPE::HAS_ONES ? ROWS_STEP << 16 : 0;
        fa::wgmma_fence();
#pragma unroll
        for (int n = 0; n < (OMIT_PHASE == PV || OMIT_PHASE == PRODUCTS ? 1 : SHAPE::P_TILES); ++n) {
          fa::wgmma_any_n<T, 1>(o, p[n], v + n * (ROWS_STEP - ONES_STEP), true);
        }
        fa::wgmma_commit_group();
      };
      // P = exp2(S - m), row sum
      auto exponentials = [&](float (&s)[S_TILES][4]) {
#pragma unroll
        for (int n = 0; n < S_TILES && OMIT_PHASE != SOFTMAX; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            s[n][i] = fa::ex2_approx_ftz(s[n][i] * params.scale_log2 - softmax.m_log2[i / 2]);
            if (!SHAPE::HAS_ONES) softmax.l[i / 2] += s[n][i];
          }
        }
      };
      // Two adjacent accumulator fragments of S form one A fragment of P.
      auto round_p = [&](const float (&s)[S_TILES][4]) {
#pragma unroll
        for (int n = 0; n < S_TILES; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) p[n / 2][n % 2 * 2 + i] = fa::cvt_rn_x2<T>(s[n][2 * i], s[n][2 * i + 1]);
        }
      };
      auto row_max = [&](const float (&s)[S_TILES][4]) {
        if (OMIT_PHASE != SOFTMAX) is_raised = softmax.raise_m_if_needed(s, params.scale_log2, params.inverse_scale_log2);
      };
      auto rescale_o = [&] {
        if (!is_raised) return;
#pragma unroll
        for (int d = 0; d < SHAPE::PV_TILES; ++d) {
#pragma unroll
          for (int i = 0; i < 4; ++i) o[d][i] *= softmax.rescale[i / 2];
        }
      };

      // The tiles from first_masked on contain keys that some query of the warpgroup does not see.
      const int first_diagonal = params.first_diagonal + work.first_query + group * GROUP_M;
      const int first_key = keys.first * BLOCK_N;
      const int first_masked = params.is_negated ? 0 : max(0, min(params.seq_k, first_diagonal) - first_key) / BLOCK_N;
      int j = keys.end - keys.first - 1;

      wait_full<Q_FULL>(&smem.q_full, q_phase);
      q_phase ^= 1;
      arrive_empty(Q_READ, &smem.q_empty, true);
      if constexpr (SKIP_HIDDEN) {
        // The queries of this warpgroup see none of the last tiles.  It releases them, and passes its turns on.
        const int group_tiles = max(1, visible_key_tiles<SHAPE>(params, work.first_query + group * GROUP_M + GROUP_M));
#pragma unroll 1
        for (; j >= group_tiles; --j) {
          take_turn();
          pass_turn();
          if (is_first_lane) {  // without its waits, one phase could get the arrivals of two
            wait_full<K_FULL>(&smem.k_full[ring.stage], ring.phase);
            fa::mbarrier_arrive(&smem.k_empty[ring.stage]);
            wait_full<V_FULL>(&smem.v_full[ring.stage], ring.phase);
            fa::mbarrier_arrive(&smem.v_empty[ring.stage]);
          }
          __syncwarp();  // no lane may wait for a phase before the one before it is complete
          ring.advance();
        }
      }
      if constexpr (FLOW == OVERLAP) {
        {
          float s[S_TILES][4];
          wait_full<K_FULL>(&smem.k_full[ring.stage], ring.phase);
          arrive_empty(K_READ, &smem.k_empty[ring.stage], true);
          start_s(s, ring.stage);
          fa::wgmma_wait_group<0>(s);
          arrive_empty(K_READ, &smem.k_empty[ring.stage], false);
          mask(s, params, query, first_key + j * BLOCK_N, lane);
          softmax.raise_m(s, params.scale_log2, params.inverse_scale_log2);
          exponentials(s);
          round_p(s);
          Ring<SHAPE::STAGES> next = ring;
          next.advance();
          if (j > 0) wait_full<K_FULL>(&smem.k_full[next.stage], next.phase);
          --j;
        }
        auto step = [&](auto is_masked) {
          const Ring<SHAPE::STAGES> previous = ring;
          ring.advance();
          float s[S_TILES][4];
          arrive_empty(K_READ, &smem.k_empty[ring.stage], true);
          take_turn();
          if (j == 0) delay_if_omitted<Q_EMPTY>();
          start_s(s, ring.stage);
          wait_full<V_FULL>(&smem.v_full[previous.stage], previous.phase);
          arrive_empty(V_READ, &smem.v_empty[previous.stage], true);
          start_pv(previous.stage);
          pass_turn();
          fa::wgmma_wait_group<1>(s);
          arrive_empty(K_READ, &smem.k_empty[ring.stage], false);
          if (!decltype(is_masked)::value) release_q_early(j == 0);
          if (decltype(is_masked)::value) mask(s, params, query, first_key + j * BLOCK_N, lane);
          row_max(s);
          exponentials(s);
          // ptxas would move the exponentials below the wait for P V, but not across the loop of this wait.
          Ring<SHAPE::STAGES> next = ring;
          next.advance();
          if (j > 0) wait_full<K_FULL>(&smem.k_full[next.stage], next.phase);
          fa::wgmma_wait_group<0>(o);
          wait_late_if_omitted<V_FULL>(&smem.v_full[previous.stage], previous.phase);
          arrive_empty(V_READ, &smem.v_empty[previous.stage], false);
          round_p(s);
          rescale_o();
        };
#pragma unroll 1
        for (; j >= first_masked; --j) step(std::true_type());
        release_q_early(j < 0);
#pragma unroll 1
        for (; j >= 0; --j) step(std::false_type());
        if (!RELEASE_Q_EARLY) arrive_empty(Q_READ, &smem.q_empty, false);
        wait_full<V_FULL>(&smem.v_full[ring.stage], ring.phase);
        arrive_empty(V_READ, &smem.v_empty[ring.stage], true);
        start_pv(ring.stage);
        fa::wgmma_wait_group<0>(o);
        wait_late_if_omitted<V_FULL>(&smem.v_full[ring.stage], ring.phase);
        arrive_empty(V_READ, &smem.v_empty[ring.stage], false);
        ring.advance();
      } else {
        auto step = [&](auto is_masked, auto is_first) {
          float s[S_TILES][4];
          wait_full<K_FULL>(&smem.k_full[ring.stage], ring.phase);
          arrive_empty(K_READ, &smem.k_empty[ring.stage], true);
          start_s(s, ring.stage);
          fa::wgmma_wait_group<0>(s);
          arrive_empty(K_READ, &smem.k_empty[ring.stage], false);
          if (!decltype(is_masked)::value) release_q_early(j == 0);
          if (decltype(is_masked)::value) mask(s, params, query, first_key + j * BLOCK_N, lane);
          if (decltype(is_first)::value) {
            softmax.raise_m(s, params.scale_log2, params.inverse_scale_log2);
          } else {
            row_max(s);
            rescale_o();
          }
          take_turn();
          exponentials(s);
          wait_full<V_FULL>(&smem.v_full[ring.stage], ring.phase);  // ptxas moves no exponential across this loop
          pass_turn();
          arrive_empty(V_READ, &smem.v_empty[ring.stage], true);
          round_p(s);
          start_pv(ring.stage);
          fa::wgmma_wait_group<0>(o);
          arrive_empty(V_READ, &smem.v_empty[ring.stage], false);
          ring.advance();
          --j;
        };
        step(std::true_type(), std::true_type());
#pragma unroll 1
        while (j >= first_masked) step(std::true_type(), std::false_type());
        release_q_early(j < 0);
#pragma unroll 1
        while (j >= 0) step(std::false_type(), std::false_type());
        if (!RELEASE_Q_EARLY) arrive_empty(Q_READ, &smem.q_empty, false);
      }
    }

    if constexpr (SHAPE::HAS_SPLIT) {
      if (is_split(split, round) && !merge_parts<SHAPE>(split, group, o, softmax, smem.all_are_stored)) continue;
    }

    const Head head = make_head(params, work.batch_head);
    // Normalise.  A row that sees no key is zero, and its log-sum-exp is -inf.
#pragma unroll
    for (int r = 0; r < LANE_ROWS; ++r) {
      const float l = SHAPE::HAS_ONES ? o[SHAPE::PV_TILES - 1][2 * r] : fa::sum_of_quad(softmax.l[r]);
      const float inverse_l = l == 0.0f ? 0.0f : 1.0f / l;
#pragma unroll
      for (int d = 0; d < SHAPE::O_TILES; ++d) o[d][2 * r] *= inverse_l, o[d][2 * r + 1] *= inverse_l;
      if (params.lse != nullptr && lane % QUAD == 0 && query + r * 8 < params.seq_q) {
        float* lse_gmem = params.lse + (uint64_t(head.batch) * params.heads + head.query_head) * params.seq_q;
        lse_gmem[query + r * 8] = l == 0.0f ? -CUDART_INF_F : (softmax.m_log2[r] + log2f(l)) * CUDART_LN2_F;
      }
    }

    // Store O through shared memory, when the previous store has read it.
    T* const o_smem = smem.o[group];
    const int group_barrier = FIRST_GROUP_BARRIER + group;
    if (thread_in_group == 0) fa::cp_async_bulk_wait_group_read();
    fa::barrier_sync<GROUP_THREADS>(group_barrier);
    if (thread_in_group >= WARP) delay_if_omitted<O_WRITTEN>();
#pragma unroll
    for (int d = 0; d < SHAPE::O_TILES; d += 2) {
      const int row = thread_in_group / WARP * MMA_M + lane % 16, column = d * MMA_N + lane / 16 * MMA_N;
      const T* to_smem = o_smem + column / BOX_COLUMNS * GROUP_M * BOX_COLUMNS + row * BOX_COLUMNS + (column % BOX_COLUMNS ^ row % 8 * 8);
      fa::stmatrix_x4(fa::smem_address(to_smem), fa::cvt_rn_x2<T>(o[d][0], o[d][1]), fa::cvt_rn_x2<T>(o[d][2], o[d][3]),
                      fa::cvt_rn_x2<T>(o[d + 1][0], o[d + 1][1]), fa::cvt_rn_x2<T>(o[d + 1][2], o[d + 1][3]));
    }
    fa::fence_proxy_async();
    if (OMIT_BARRIER != O_WRITTEN) fa::barrier_sync<GROUP_THREADS>(group_barrier);
    const int group_query = work.first_query + group * GROUP_M;
    if (thread_in_group == 0 && group_query < params.seq_q) {
#pragma unroll
      for (int d = 0; d < HEAD_DIM; d += BOX_COLUMNS) {
        fa::cp_async_bulk_tensor_4d_store(o_map, d, group_query, head.query_head, head.batch, o_smem + d * GROUP_M);
      }
      fa::cp_async_bulk_commit_group();
    }
  }
  if (thread_in_group == 0) fa::cp_async_bulk_wait_group_read();  // before the block's shared memory is given to another one
}

template <typename T, typename SHAPE>
__global__ void __launch_bounds__(SHAPE::THREADS, SHAPE::BLOCKS_PER_SM)
long_wgmma_kernel(const __grid_constant__ KernelParams params, const __grid_constant__ CUtensorMap q_map,
                  const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                  const __grid_constant__ CUtensorMap o_map, const __grid_constant__ typename SHAPE::Split split) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<Smem<T, SHAPE>*>(smem_bytes);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / GROUP_THREADS, 0);
  constexpr int COMPUTING_WARPS = SHAPE::GROUPS * GROUP_THREADS / WARP;  // one lane of each releases a buffer
  if (threadIdx.x == 0) {
    fa::mbarrier_init(&smem.q_full, 1);
    fa::mbarrier_init(&smem.q_empty, COMPUTING_WARPS);
#pragma unroll
    for (int stage = 0; stage < SHAPE::STAGES; ++stage) {
      fa::mbarrier_init(&smem.k_full[stage], 1);
      fa::mbarrier_init(&smem.v_full[stage], 1);
      fa::mbarrier_init(&smem.k_empty[stage], COMPUTING_WARPS);
      fa::mbarrier_init(&smem.v_empty[stage], COMPUTING_WARPS);
    }
    fa::fence_mbarrier_init();
  }
  if constexpr (SHAPE::HAS_ONES) {
    for (int i = threadIdx.x; i < MMA_K * BOX_COLUMNS; i += SHAPE::THREADS) smem.ones[i] = T(1.0f);
    fa::fence_proxy_async();
  }
  __syncthreads();
  if (warpgroup == 0) {
    fa::setmaxnreg_dec<SHAPE::PRODUCER_REGISTERS>();
    if (threadIdx.x < WARP && fa::elect_sync()) produce(params, q_map, k_map, v_map, split, smem);
  } else {
    fa::setmaxnreg_inc<SHAPE::REGISTERS>();
    compute(params, o_map, split, smem, warpgroup - 1);
  }
}

// Describes a tensor [batch, heads, seq, head_dim] to TMA, in boxes of `rows` x 64 columns.  Returns FA_OK, or refuses the call.
int make_tensor_map(CUtensorMap* map, const FaForwardArgs* args, const void* data, int64_t heads, int64_t seq,
                    const FaStrides& stride, int rows) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult query_result;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &query_result);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  if (encode == nullptr) return fa_refuse(args, "the driver has no cuTensorMapEncodeTiled");
  const auto dtype = args->dtype == FA_DTYPE_fp16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(args->head_dim), static_cast<cuuint64_t>(seq),
                               static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(args->batch)};
  const cuuint64_t stride_bytes[3] = {static_cast<cuuint64_t>(stride.seq) * 2, static_cast<cuuint64_t>(stride.head) * 2,
                                      static_cast<cuuint64_t>(stride.batch) * 2};
  const cuuint32_t box[4] = {BOX_COLUMNS, static_cast<cuuint32_t>(rows), 1, 1}, element_strides[4] = {1, 1, 1, 1};
  const CUresult status =
      encode(map, dtype, 4, const_cast<void*>(data), sizes, stride_bytes, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status == CUDA_SUCCESS) return FA_OK;
  return fa_refuse(args, "TMA does not accept strides of %lld, %lld and %lld elements (batch, head, row): CUresult %d",
                   static_cast<long long>(stride.batch), static_cast<long long>(stride.head),
                   static_cast<long long>(stride.seq), status);
}

// Returns the number of heads of a section.  Without a mask, all work tiles are equally long, and heads are computed one after
// another, so that few heads are in L2 at a time.
inline int section_heads_of(const FaForwardArgs* args) {
  if (args->causal == FA_CAUSAL_NONE) return 1;
  const int64_t head_bytes = std::max<int64_t>(1, args->seq_k * args->head_dim * 4 / (args->heads / args->kv_heads));
  int64_t heads = 1;
  while (heads * 2 * head_bytes <= SECTION_BYTES && heads < args->batch * args->heads) heads *= 2;
  return static_cast<int>(heads);
}

// Fills `params` and returns FA_OK, or refuses the call.
template <typename SHAPE>
int make_kernel_params(const FaForwardArgs* args, KernelParams* params) {
  fa::Params all_params;
  if (int status = fa::make_params(args, SHAPE::BLOCK_M, 1, &all_params)) return status;
  const int64_t m_blocks = (args->seq_q + SHAPE::BLOCK_M - 1) / SHAPE::BLOCK_M, batch_heads = args->batch * args->heads;
  if (batch_heads > INT32_MAX / 4 / m_blocks) {
    return fa_refuse(args, "the shape is too large: batch %lld, heads %lld, seq_q %lld; the product of batch, heads and "
                           "seq_q / %d must be below 2^29",
                     static_cast<long long>(args->batch), static_cast<long long>(args->heads),
                     static_cast<long long>(args->seq_q), SHAPE::BLOCK_M);
  }
  const float scale_log2 = fabsf(all_params.signed_scale_log2);
  *params = {all_params.lse,
             scale_log2,
             1.0f / scale_log2,
             all_params.signed_scale_log2 < 0.0f,
             all_params.seq_q,
             all_params.seq_k,
             all_params.first_diagonal,
             static_cast<int>(args->heads),
             static_cast<int>(batch_heads),
             static_cast<int>(m_blocks),
             section_heads_of(args),
             static_cast<int>(m_blocks * batch_heads),
             all_params.kv_head_factor};
  return FA_OK;
}

// The number of blocks that the GPU runs at the same time.
template <typename SHAPE>
int most_blocks() {
  return std::max(1, fa::sm_count() * SHAPE::BLOCKS_PER_SM);
}

// The times of a shape on an H200 while all SMs work, in microseconds.  They are used to compare shapes.
template <typename SHAPE>
struct Costs {
  // The TFLOP/s, measured at 4096 to 16384 keys.  Taller tiles read K and V from shared memory less often.
  static constexpr double STEADY_TFLOPS =
      SHAPE::HEAD_DIM == 64 ? (SHAPE::GROUPS == 1 ? 450 : SHAPE::GROUPS == 2 ? 508 : SHAPE::GROUPS == 3 ? 575 : 540)
                            : (SHAPE::GROUPS == 1 ? 560 : SHAPE::GROUPS == 2 ? 661 : 765);
  static constexpr int H200_SMS = 132;
  static constexpr double KEY_TILE_US = 4.0 * SHAPE::BLOCK_M * SHAPE::BLOCK_N * SHAPE::HEAD_DIM * H200_SMS / STEADY_TFLOPS * 1e-6;
  static constexpr double WORK_TILE_US = 1.5;  // to start and to finish a work tile
  static constexpr double MERGE_US = 6.0;      // to merge the parts of a work tile; calculated
};

// The work tiles from `first` on, those of an incomplete last round, are divided into as many parts by their keys.
struct Division {
  int first, parts, tiles;
};

// Divides the last round if that saves more time than merging takes.  Under a causal mask the lengths of work tiles differ, and
// they are dealt so that all SMs are busy until the end.
template <typename SHAPE>
Division divide_last_round(const FaForwardArgs* args, const KernelParams& params) {
  using C = Costs<SHAPE>;
  constexpr bool MAY_SPLIT = SPLIT_LAST_ROUND && SHAPE::HEAD_DIM == 128;  // at D = 64, ptxas would move the exponentials
  const int blocks = most_blocks<SHAPE>(), tiles = params.work_tiles % blocks;
  const int key_tiles = (params.seq_k + SHAPE::BLOCK_N - 1) / SHAPE::BLOCK_N;
  const int parts = tiles > 0 ? std::min({MAX_PARTS, blocks / tiles, key_tiles}) : 1;
  const bool saves_time = (key_tiles - key_tiles / std::max(parts, 1)) * C::KEY_TILE_US > C::WORK_TILE_US + C::MERGE_US;
  if (!MAY_SPLIT || args->causal != FA_CAUSAL_NONE || parts < 2 || !saves_time) return {params.work_tiles, 1, 0};
  return {params.work_tiles - tiles, parts, tiles};
}

// The bytes of the workspace: the results of all parts, then their marks.
template <typename SHAPE>
size_t result_bytes(const Division& division) {
  const size_t part_bytes = (SHAPE::PV_TILES + 1) * GROUP_THREADS * sizeof(float4);
  return size_t(division.tiles) * SHAPE::GROUPS * division.parts * part_bytes;
}

template <typename SHAPE>
size_t workspace_bytes(const FaForwardArgs* args) {
  KernelParams params;
  if (make_kernel_params<SHAPE>(args, &params) != FA_OK) return 0;
  const Division division = divide_last_round<SHAPE>(args, params);
  return result_bytes<SHAPE>(division) + size_t(division.tiles) * SHAPE::GROUPS * division.parts * sizeof(uint64_t);
}

// Fills `split` and returns FA_OK, or refuses the call.
template <typename SHAPE>
int make_split(const FaForwardArgs* args, const KernelParams& params, SplitTiles* split) {
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
int launch_kernel(const FaForwardArgs* args, const KernelParams& params, const typename SHAPE::Split& split, cudaStream_t stream) {
  CUtensorMap q_map = {}, k_map = {}, v_map = {}, o_map = {};
  if (int status = make_tensor_map(&o_map, args, args->out, args->heads, args->seq_q, args->out_stride, GROUP_M)) return status;
  if (args->seq_k > 0) {
    if (int status = make_tensor_map(&q_map, args, args->q, args->heads, args->seq_q, args->q_stride, GROUP_M)) return status;
    if (int status = make_tensor_map(&k_map, args, args->k, args->kv_heads, args->seq_k, args->k_stride, SHAPE::BLOCK_N)) return status;
    if (int status = make_tensor_map(&v_map, args, args->v, args->kv_heads, args->seq_k, args->v_stride, SHAPE::BLOCK_N)) return status;
  }
  const auto kernel = &long_wgmma_kernel<T, SHAPE>;
  constexpr int smem_bytes = sizeof(Smem<T, SHAPE>);
  static_assert(smem_bytes * SHAPE::BLOCKS_PER_SM <= 227 * 1024, "an SM has 227 KB of shared memory for its blocks");
  static fa::OncePerDevice prepare;
  if (int status = prepare([&] {
        const auto address = reinterpret_cast<const void*>(kernel);
        if (int refusal = fa::require_registers(args, address, SHAPE::GROUPS + 1, SHAPE::ALL_REGISTERS)) return refusal;
        return fa_allow_dynamic_smem(args, address, smem_bytes);
      })) {
    return status;
  }
  const int blocks = SHAPE::HAS_SPLIT ? most_blocks<SHAPE>() : std::min(params.work_tiles, most_blocks<SHAPE>());
  kernel<<<blocks, SHAPE::THREADS, smem_bytes, stream>>>(params, q_map, k_map, v_map, o_map, split);
  return static_cast<int>(cudaPeekAtLastError());
}

template <typename T, typename SHAPE>
int launch(const FaForwardArgs* args, cudaStream_t stream) {
  KernelParams params;
  if (int status = make_kernel_params<SHAPE>(args, &params)) return status;
  if constexpr (SPLIT_LAST_ROUND && SHAPE::HEAD_DIM == 128) {
    SplitTiles split;
    if (int status = make_split<SHAPE>(args, params, &split)) return status;
    if (split.parts > 1) return launch_kernel<T, Divided<SHAPE>>(args, params, split, stream);
  }
  return launch_kernel<T, SHAPE>(args, params, {}, stream);
}

// Estimates the time of a call on a GPU with the SMs of an H200, up to a factor that is the same for all shapes: the work of the
// SM with the most work.  Returns infinity if the shape refuses the call.
template <typename SHAPE>
double estimated_us(const FaForwardArgs* args) {
  using C = Costs<SHAPE>;
  constexpr int EXACT_ROUNDS = 16;
  KernelParams params;
  if (make_kernel_params<SHAPE>(args, &params) != FA_OK) return INFINITY;
  const int blocks = std::min(params.work_tiles, most_blocks<SHAPE>()), sms = std::max(1, fa::sm_count());
  auto us_of = [&](int number) {
    const WorkTile work = make_work_tile<SHAPE>(params, number);
    int group_tiles = 0;  // of all warpgroups
    for (int group = 1; group <= SHAPE::GROUPS; ++group) {
      const int seen = visible_key_tiles<SHAPE>(params, work.first_query + group * GROUP_M);
      group_tiles += SKIP_HIDDEN && seen < work.key_tiles ? seen : work.key_tiles;
    }
    return group_tiles * C::KEY_TILE_US / SHAPE::GROUPS + C::WORK_TILE_US;
  };
  if (params.work_tiles > EXACT_ROUNDS * blocks) {  // all SMs have nearly the same amount of work
    double us = 0.0;
    for (int m_block = 0; m_block < params.m_blocks; ++m_block) us += us_of(m_block * std::min(params.section_heads, params.batch_heads));
    return us * params.batch_heads / sms;
  }
  const Division division = divide_last_round<SHAPE>(args, params);
  double most_us = 0.0;
  for (int sm = 0; sm < sms; ++sm) {
    double us = 0.0;
    for (int block = sm; block < blocks; block += sms) {
      for (int round = 0, number; (number = dealt_number(round, block, blocks)) < division.first; ++round) us += us_of(number);
    }
    most_us = std::max(most_us, us);
  }
  if (division.tiles == 0) return most_us;
  const double part_us = (us_of(division.first) - C::WORK_TILE_US) / division.parts + C::WORK_TILE_US + C::MERGE_US;
  return most_us + part_us * SHAPE::BLOCKS_PER_SM;
}

// Returns the index of the shape that is expected to be the fastest.  Choices are remembered, because one takes up to 100 us.  A
// call that every shape refuses, for example for its pointers, has none.
template <typename... SHAPES>
int fastest_shape(const FaForwardArgs* args) {
  if constexpr (sizeof...(SHAPES) == 1) return 0;
  static constexpr double (*ESTIMATES[])(const FaForwardArgs*) = {&estimated_us<SHAPES>...};
  using Problem = std::array<int64_t, 7>;
  thread_local fa::Remembered<Problem, int> remembered;
  const Problem problem = {args->batch, args->heads, args->kv_heads, args->seq_q, args->seq_k, args->causal, fa::sm_count()};
  if (const int* known = remembered.find(problem)) return *known;
  double least_us = INFINITY;
  int fastest = 0;
  for (int i = 0; i < static_cast<int>(sizeof...(SHAPES)); ++i) {
    const double us = ESTIMATES[i](args);
    if (us < least_us) least_us = us, fastest = i;
  }
  if (least_us < INFINITY) remembered.keep(problem, fastest);
  return fastest;
}

// The shapes among which a call chooses.
template <typename... SHAPES>
struct Shapes {
  template <typename T>
  static int launch_fastest(const FaForwardArgs* args, cudaStream_t stream) {
    static constexpr int (*LAUNCHES[])(const FaForwardArgs*, cudaStream_t) = {&launch<T, SHAPES>...};
    return LAUNCHES[fastest_shape<SHAPES...>(args)](args, stream);
  }
  static size_t workspace_bytes_of_fastest(const FaForwardArgs* args) {
    static constexpr size_t (*WORKSPACES[])(const FaForwardArgs*) = {&workspace_bytes<SHAPES>...};
    return WORKSPACES[fastest_shape<SHAPES...>(args)](args);
  }
};

using ShapesOf64 = std::conditional_t<CHOOSE_SHAPE, Shapes<Shape<64, 2, 128>, Shape<64, 3, 128>, Shape<64, 4, 64>, Shape<64, 1, 128>>,
                                      Shapes<Shape<64, GROUPS_64, KEYS_64>>>;
using ShapesOf128 = std::conditional_t<CHOOSE_SHAPE, Shapes<Shape<128, 2, 128>, Shape<128, 3, 80>, Shape<128, 1, 64>>,
                                       Shapes<Shape<128, GROUPS_128, KEYS_128>>>;
template <int HEAD_DIM>
using ShapesOf = std::conditional_t<HEAD_DIM == 64, ShapesOf64, ShapesOf128>;

FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t stream) {
  if (int status = fa_check_abi(args)) return status;
#define LAUNCH_IF(DTYPE, HEAD_DIM_)                                         \
  if (args->dtype == FA_DTYPE_##DTYPE && args->head_dim == HEAD_DIM_) {     \
    return ShapesOf<HEAD_DIM_>::template launch_fastest<DTYPE>(args, stream); \
  }
  FA_FOR_EACH_INSTANTIATION(LAUNCH_IF)
#undef LAUNCH_IF
  return fa_refuse(args, "no instantiation for dtype %d with head_dim %lld", args->dtype, static_cast<long long>(args->head_dim));
}

#if SPLIT_LAST_ROUND
FA_EXPORT size_t fa_workspace_bytes(const FaForwardArgs* args) {
  return args->head_dim == 128 ? ShapesOf128::workspace_bytes_of_fastest(args) : 0;
}
#endif

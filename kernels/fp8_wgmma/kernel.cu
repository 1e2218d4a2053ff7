// fp8_wgmma: one source for the rungs in e4m3 on Hopper's tensor cores, from fp8_wgmma to fp8_max.
// step:    both matrix products in e4m3; P is rounded to e4m3, V is transposed by a kernel before, and P V of each key tile
//          is added to O in float32 registers
// because: the tensor cores do twice as many products in e4m3 as in fp16, and a tile of K and V has half the bytes
// expect:  at b2h16s4096d128, 360 us without a mask, 10 us of them for V^T: per key tile, the products then take as long as those
//          in fp16 at D = 64, where long_ring takes 347 us; at D = 64, 255 us
// diff:    one operand type in place of two; descales, P's scale, the second accumulator and V^T are new
// tile:    128 queries x 128 keys with two computing warpgroups; from fp8_tiles on, 192 x 96 with three at D = 64;
//          57 KB of shared memory per block at D = 64, 115 KB at D = 128; fp8_tiles 63 and 117 KB
// takes:   e4m3 with an output in fp16 or bf16, D = 64 and 128, any S_q >= 1 and S_kv >= 0, top-left and bottom-right causal
//          masks, grouped heads; rows contiguous and 16-byte aligned, with strides that TMA accepts
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <float.h>
#include <math_constants.h>

#include <algorithm>
#include <type_traits>

#include "fa/e4m3.cuh"
#include "fa/hopper.cuh"
#include "fa/launch.h"
#include "fa/ptx.cuh"
#include "fa/warp.cuh"
#include "fa/warpgroup.cuh"
#include "fa/wgmma_e4m3.cuh"
#include "fa_forward.h"
#include "fa_instantiations.h"  // FA_FOR_EACH_INSTANTIATION: the manifest's dtypes and head_dims

using fp16 = __half;
using bf16 = __nv_bfloat16;
using e4m3 = uint8_t;  // one byte; no instruction of this kernel computes with a single number

// How the work is divided:
// - A block computes 64 queries per computing warpgroup, and all keys that they see, from the last key tile to the first.  Masked
//   tiles therefore come first, and the main loop has no mask.
// - One thread of the first warpgroup, the producer, loads Q, K and V by TMA.  K and V go through a ring of STAGES key tiles.
// - A block is persistent: the work tiles are dealt to the blocks, the longest first.
// - With FLOW == OVERLAP, S of the next key tile is computed by the tensor cores during the softmax of the current one.
// - wgmma in e4m3 reads both operands along K only, which for P V are the keys.  transpose_v therefore writes V^T to the
//   workspace first.

// The order of the phases within a warpgroup.
enum Flow {
  SERIAL,   // S, softmax and P V one after another; warpgroups do not wait for each other
  OVERLAP,  // S of the next tile and P V of the previous one run during the softmax; warpgroups take turns at issuing them
};

// How the row max is computed: with floats, or with integers, three at a time.
enum RowMax { FLOATS, INTEGERS };

// The accumulator of wgmma in e4m3 keeps 13 bits after the leading one.  What is cut off a product depends on the accumulator, so
// that a long sum of numbers of one sign becomes too small: by up to 1.4 % over 600 keys, and by 9 % over 4096.
enum Accumulators {
  TWO_LEVELS,  // it is added to float32 registers after every key tile
  ONE,         // nothing is done about it
};

// How the row sum is computed.
enum RowSum {
  LANES,  // by the lanes, from P before it is rounded
  ONES,   // by P V, with eight more columns of V that are one
};

// What a deliberately wrong kernel does.
enum Mistake {
  NO_MISTAKE,
  KEYS_IN_ORDER,    // V^T has the keys in their order, and not in that of P
  P_NOT_SCALED,     // P is 1 at the row max, as in fp16
  P_PAST_448,       // P is 512 at the row max
  NEXT_V_DESCALE,   // the descale of V is that of the next head
};

// The barriers of this kernel and what each guarantees.  A test omits one with OMIT_BARRIER, to check that the error is detected.
// Omitting an _EMPTY barrier means to release the memory before it is read, because without any release the phases of the
// mbarriers would no longer match.
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

// The phases of this kernel.  An ablation omits one with OMIT_PHASE, to measure what it costs.
enum Phase { NO_PHASE, QK, SOFTMAX, PV, PRODUCTS };

constexpr int WARP = 32;
constexpr int QUAD = 4;  // lanes that share a row of an mma fragment
constexpr int MMA_M = 16, MMA_N = 8, MMA_K = 32;
constexpr int GROUP_M = 64;        // queries of a warpgroup: the rows of a wgmma
constexpr int GROUP_THREADS = 128;
constexpr int BOX_COLUMNS = 64;    // columns of O per TMA box: 128 bytes, the span of the swizzle
constexpr int LANE_ROWS = 2;       // rows that a lane holds: r and r + 8
constexpr int FIRST_TURN_BARRIER = 1, FIRST_GROUP_BARRIER = 8;  // named barriers, one per computing warpgroup

// P is 2^P_SCALE_LOG2 at the row max, and O is rescaled only where P would exceed 2^8: e4m3 holds numbers from 2^-9 to 448.
constexpr float RESCALE_THRESHOLD_LOG2 = 4.0f;
constexpr float P_SCALE_LOG2 = MISTAKE == P_NOT_SCALED ? 0.0f : MISTAKE == P_PAST_448 ? 9.0f : 4.0f;

// K and V of the heads that are computed at the same time should fit in L2 (50 MB) besides Q and O.
constexpr int64_t SECTION_BYTES = 32 << 20;

// The sizes of one work tile.
template <int HEAD_DIM_, int GROUPS_, int BLOCK_N_>
struct Shape {
  static constexpr int HEAD_DIM = HEAD_DIM_, GROUPS = GROUPS_, BLOCK_N = BLOCK_N_, STAGES = 2;
  static constexpr int BLOCK_M = GROUPS * GROUP_M, THREADS = (GROUPS + 1) * GROUP_THREADS;
  // All threads of a block start with the same number of registers, a multiple of 8.  The producer then gives most of its own to
  // the others.  setmaxnreg.inc would wait for ever if there were not enough.
  static constexpr int START_REGISTERS = 65536 / THREADS / 8 * 8;
  static constexpr int PRODUCER_REGISTERS = GROUPS == 3 ? 32 : 24;
  static constexpr int REGISTERS = GROUPS == 2 ? 240 : 160;
  static_assert(GROUPS == 2 || GROUPS == 3, "the registers are given for two and three computing warpgroups");
  static constexpr int ALL_REGISTERS = PRODUCER_REGISTERS + GROUPS * REGISTERS;  // of one thread of each warpgroup
  static_assert(ALL_REGISTERS <= (GROUPS + 1) * START_REGISTERS, "no registers are created");
  static constexpr bool HAS_ONES = ROW_SUM == ONES;
  static constexpr int S_TILES = BLOCK_N / MMA_N, P_TILES = BLOCK_N / MMA_K, O_TILES = HEAD_DIM / MMA_N;
  static constexpr int PV_TILES = O_TILES + HAS_ONES;
  // Rows of Q and K have HEAD_DIM bytes, which is also the span of their swizzle.  V^T has a panel [V_ROWS, PANEL_KEYS] for each
  // PANEL_KEYS keys of a tile, with a swizzle of that span.
  static constexpr int PANEL_KEYS = BLOCK_N % 128 == 0 ? 128 : BLOCK_N % 64 == 0 ? 64 : 32, V_ROWS = PV_TILES * MMA_N;
  static_assert(BLOCK_N % PANEL_KEYS == 0 && PANEL_KEYS % MMA_K == 0, "a tile has whole panels, and a panel whole steps of P V");
  static constexpr int Q_BYTES = BLOCK_M * HEAD_DIM, K_BYTES = BLOCK_N * HEAD_DIM;
  static constexpr int V_LOADED_BYTES = BLOCK_N * HEAD_DIM, PANEL_BYTES = V_ROWS * PANEL_KEYS, V_BYTES = BLOCK_N * V_ROWS;
  static_assert(GROUP_M * HEAD_DIM % 1024 == 0 && K_BYTES % 1024 == 0, "the pattern of a swizzle repeats every 1024 bytes or less");
  static_assert(PANEL_BYTES % (8 * PANEL_KEYS) == 0 && V_BYTES % (8 * PANEL_KEYS) == 0, "a panel begins where the pattern does");
  // The distances of the operands of successive wgmma from the first one, in bytes.
  static __host__ __device__ constexpr int qk_step_bytes(int d) { return d; }
  static __host__ __device__ constexpr int pv_step_bytes(int key) { return key / PANEL_KEYS * PANEL_BYTES + key % PANEL_KEYS; }
};

template <typename Out, typename SHAPE>
struct Smem {
  alignas(1024) e4m3 q[SHAPE::GROUPS][GROUP_M * SHAPE::HEAD_DIM];   // [rows, HEAD_DIM], swizzled by TMA
  alignas(1024) Out o[SHAPE::GROUPS][GROUP_M * SHAPE::HEAD_DIM];    // [HEAD_DIM / BOX_COLUMNS, rows, BOX_COLUMNS], swizzled
  alignas(1024) e4m3 k[SHAPE::STAGES][SHAPE::K_BYTES];              // [keys, HEAD_DIM], swizzled by TMA
  alignas(1024) e4m3 v[SHAPE::STAGES][SHAPE::V_BYTES];              // [panels, V_ROWS, PANEL_KEYS], swizzled by TMA
  uint64_t q_full, q_empty, k_full[SHAPE::STAGES], k_empty[SHAPE::STAGES], v_full[SHAPE::STAGES], v_empty[SHAPE::STAGES];
};

struct KernelParams {
  float* lse;               // [batch, heads, seq_q], or nullptr
  const float *q_descale, *k_descale, *v_descale;  // [batch, heads], [batch, kv_heads], [batch, kv_heads]
  float signed_scale_log2;  // scale * log2(e), without descales
  int seq_q, seq_k;
  int first_diagonal;       // query i sees keys [0, min(seq_k, first_diagonal + i))
  int heads, kv_heads, batch_heads;
  int m_blocks;             // work tiles of a head
  int section_heads;        // heads whose work tiles are computed at the same time, the longest first
  int work_tiles;
  uint32_t kv_head_factor;  // about 2^31 / (heads / kv_heads), so that a head of K is a multiplication and no division
};

// BLOCK_M queries of one head, and the key tiles that they see.
struct WorkTile {
  int first_query, batch_head;
  int key_tiles;  // tiles with a key that any query of the block sees
};

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
  const int last_diagonal = params.first_diagonal + end_query - 1;  // the last query sees this many keys, if there are as many
  const int visible_keys = last_diagonal < params.seq_k ? last_diagonal : params.seq_k;
  const int key_tiles = visible_keys > 0 ? (visible_keys + SHAPE::BLOCK_N - 1) / SHAPE::BLOCK_N : 0;
  return {first_query, static_cast<int>(first_head + in_section % section_heads), key_tiles};
}

struct Head {
  int query_head, kv_head, batch;
};

// The factors of a head's scores and of its output.
struct Scale {
  float log2, inverse_log2;  // |scale * descale of Q * descale of K| * log2(e), and its inverse
  bool is_negated;           // the factor is negative: S is negated
  float v_descale;
};

__device__ __forceinline__ Head make_head(const KernelParams& params, uint32_t batch_head) {
  const uint32_t batch = batch_head / params.heads, head = batch_head % params.heads;
  return {static_cast<int>(head), static_cast<int>(__umulhi(2 * head + 1, params.kv_head_factor)), static_cast<int>(batch)};
}

// Reads the descales of a head.  A factor of zero, as for a head of zeros, becomes FLT_MIN: all keys still get equal weights, and
// -inf times the factor stays -inf.
__device__ __forceinline__ Scale make_scale(const KernelParams& params, const Head& head) {
  const int kv_index = head.batch * params.kv_heads + head.kv_head;
  const int v_index = MISTAKE != NEXT_V_DESCALE ? kv_index : head.batch * params.kv_heads + (head.kv_head + 1) % params.kv_heads;
  const float q_descale = __ldg(params.q_descale + head.batch * params.heads + head.query_head);
  const float factor = params.signed_scale_log2 * (q_descale * __ldg(params.k_descale + kv_index));
  const float log2 = fabsf(factor) < FLT_MIN ? FLT_MIN : fabsf(factor);
  return {log2, 1.0f / log2, factor < 0.0f, __ldg(params.v_descale + v_index)};
}

// The work tiles are dealt like cards, in alternating directions, so that all blocks get nearly the same amount of work.  Returns
// the number of the work tile that a block gets in a round.
__host__ __device__ __forceinline__ int dealt_number(int round, int block, int blocks) {
  return round * blocks + (round % 2 ? blocks - 1 - block : block);
}

__device__ __forceinline__ void wait_empty(uint64_t* barrier_smem, uint32_t parity) {
  while (!fa::mbarrier_try_wait(barrier_smem, parity)) {
  }
}

// In a kernel that omits this barrier, delays the threads for which the barrier waits.  Otherwise the error would show rarely.
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

// The producer: loads Q, K and V of all work tiles of this block.  K is loaded one tile ahead of V.
template <typename Out, typename SHAPE>
__device__ __forceinline__ void produce(const KernelParams& params, const CUtensorMap& q_map, const CUtensorMap& k_map,
                                        const CUtensorMap& v_map, Smem<Out, SHAPE>& smem) {
  constexpr int BLOCK_N = SHAPE::BLOCK_N;
  Ring<SHAPE::STAGES> k_ring, v_ring;
  uint32_t q_phase = 0;
#pragma unroll 1
  for (int round = 0, number; (number = dealt_number(round, blockIdx.x, gridDim.x)) < params.work_tiles; ++round) {
    const WorkTile work = make_work_tile<SHAPE>(params, number);
    if (work.key_tiles == 0) continue;
    const Head head = make_head(params, work.batch_head);
    auto load_k = [&](int j) {
      wait_empty(&smem.k_empty[k_ring.stage], k_ring.phase ^ 1);
      fa::mbarrier_arrive_expect_tx(&smem.k_full[k_ring.stage], SHAPE::K_BYTES);
      fa::cp_async_bulk_tensor_4d(smem.k[k_ring.stage], k_map, 0, j * BLOCK_N, head.kv_head, head.batch, &smem.k_full[k_ring.stage]);
      k_ring.advance();
    };
    wait_empty(&smem.q_empty, q_phase ^ 1);
    q_phase ^= 1;
    auto load_q = [&] {
      fa::mbarrier_arrive_expect_tx(&smem.q_full, SHAPE::Q_BYTES);
#pragma unroll
      for (int g = 0; g < SHAPE::GROUPS; ++g) {
        fa::cp_async_bulk_tensor_4d(smem.q[g], q_map, 0, work.first_query + g * GROUP_M, head.query_head, head.batch, &smem.q_full);
      }
    };
    if (OMIT_BARRIER != Q_FULL) load_q();
    load_k(work.key_tiles - 1);
    if (OMIT_BARRIER == Q_FULL) delay_if_omitted<Q_FULL>(), load_q();  // K arrives before Q, so that the error shows
#pragma unroll 1
    for (int j = work.key_tiles - 1; j >= 0; --j) {
      if (j > 0) load_k(j - 1);
      wait_empty(&smem.v_empty[v_ring.stage], v_ring.phase ^ 1);
      delay_if_omitted<V_FULL>();
      fa::mbarrier_arrive_expect_tx(&smem.v_full[v_ring.stage], SHAPE::V_LOADED_BYTES);
#pragma unroll
      for (int key = 0; key < BLOCK_N; key += SHAPE::PANEL_KEYS) {
        fa::cp_async_bulk_tensor_4d(smem.v[v_ring.stage] + SHAPE::pv_step_bytes(key), v_map, j * BLOCK_N + key, 0, head.kv_head,
                                    head.batch, &smem.v_full[v_ring.stage]);
      }
      v_ring.advance();
    }
  }
}

// The running softmax of a lane's rows.
struct Softmax {
  float m_log2[LANE_ROWS];  // m * scale_log2 - P_SCALE_LOG2, so that P and l are scaled; -FLT_MAX before the first key
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
  __device__ __forceinline__ void raise_m(const float (&s)[S_TILES][4], const Scale& scale) {
#pragma unroll
    for (int r = 0; r < LANE_ROWS; ++r) {
      const float m_new_log2 = fmaxf(m_log2[r], fa::max_of_quad(max_of_lane(s, r)) * scale.log2 - P_SCALE_LOG2);
      rescale[r] = fa::ex2_approx_ftz(m_log2[r] - m_new_log2);
      l[r] *= rescale[r];
      m_log2[r] = m_new_log2;
      limit[r] = (m_new_log2 + (P_SCALE_LOG2 + RESCALE_THRESHOLD_LOG2)) * scale.inverse_log2;
      // Integers order negative floats in reverse.  Below zero, every tile therefore takes the exact path.
      if (ROW_MAX == INTEGERS && !(limit[r] >= 0.0f)) limit[r] = __int_as_float(INT32_MIN);
    }
  }

  // Raises m if any score of the warp is above its limit.  No lane needs the maximum of another one for that.
  template <int S_TILES>
  __device__ __forceinline__ bool raise_m_if_needed(const float (&s)[S_TILES][4], const Scale& scale) {
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
    if (is_raised) raise_m(s, scale);
    return is_raised;
  }
};

// Hides the scores of keys that a query does not see, and negates all scores if the factor is negative.
template <int S_TILES>
__device__ __forceinline__ void mask(
    float (&s)[S_TILES][4], const KernelParams& params, bool is_negated, int query, int first_key, int lane) {
  if (is_negated) {
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

// A computing warpgroup: 64 queries of each work tile of this block.
template <typename Out, typename SHAPE>
__device__ __forceinline__ void compute(const KernelParams& params, const CUtensorMap& o_map, Smem<Out, SHAPE>& smem, int group) {
  constexpr int HEAD_DIM = SHAPE::HEAD_DIM, BLOCK_N = SHAPE::BLOCK_N, S_TILES = SHAPE::S_TILES;
  const int thread_in_group = threadIdx.x % GROUP_THREADS, lane = threadIdx.x % WARP;
  const int group_row = thread_in_group / WARP * MMA_M + lane / QUAD;  // the first of the lane's two rows
  const bool is_first_lane = lane == 0;
  const int own_turn = FIRST_TURN_BARRIER + group, next_turn = FIRST_TURN_BARRIER + (group + 1) % SHAPE::GROUPS;
  constexpr bool HAS_TURNS = FLOW == OVERLAP && TAKE_TURNS;
  const uint64_t q = fa::k_major_descriptor<HEAD_DIM>(smem.q[group]);
  const uint64_t first_k = fa::k_major_descriptor<HEAD_DIM>(smem.k[0]);
  const uint64_t first_v = fa::k_major_descriptor<SHAPE::PANEL_KEYS>(smem.v[0]);
  constexpr int K_STAGE = SHAPE::K_BYTES >> 4, V_STAGE = SHAPE::V_BYTES >> 4;  // in descriptors, in units of 16 bytes
  Ring<SHAPE::STAGES> ring;
  uint32_t q_phase = 0;
  if (HAS_TURNS && group == 0) fa::barrier_arrive<2 * GROUP_THREADS>(own_turn);

#pragma unroll 1
  for (int round = 0, number; (number = dealt_number(round, blockIdx.x, gridDim.x)) < params.work_tiles; ++round) {
    const WorkTile work = make_work_tile<SHAPE>(params, number);
    const Head head = make_head(params, work.batch_head);
    const Scale scale = make_scale(params, head);
    const int query = work.first_query + group * GROUP_M + group_row;
    float o[SHAPE::PV_TILES][4], o_of_tile[SHAPE::PV_TILES][4];  // the second is the accumulator of wgmma with TWO_LEVELS
    constexpr bool HAS_LEVELS = ACCUMULATORS == TWO_LEVELS;
    auto& accumulator = HAS_LEVELS ? o_of_tile : o;
#pragma unroll
    for (int d = 0; d < SHAPE::PV_TILES; ++d) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o[d][i] = 0.0f;
    }
    Softmax softmax;
    if (work.key_tiles > 0) {
      uint32_t p[SHAPE::P_TILES][4];
      bool is_raised = false;

      auto arrive_empty = [&](auto barrier, uint64_t* barrier_smem, bool is_early) {
        if (is_early == (OMIT_BARRIER == decltype(barrier)::value) && is_first_lane) fa::mbarrier_arrive(barrier_smem);
        if (is_early) delay_if_omitted<decltype(barrier)::value>();  // the producer overwrites the buffer meanwhile
      };
      constexpr std::integral_constant<Barrier, K_EMPTY> K_READ{};
      constexpr std::integral_constant<Barrier, V_EMPTY> V_READ{};
      constexpr std::integral_constant<Barrier, Q_EMPTY> Q_READ{};
      auto take_turn = [&] {
        if (HAS_TURNS) fa::barrier_sync<2 * GROUP_THREADS>(own_turn);
      };
      auto pass_turn = [&] {
        if (HAS_TURNS) fa::barrier_arrive<2 * GROUP_THREADS>(next_turn);
      };
      // S = Q K^T
      auto start_s = [&](float (&s)[S_TILES][4], int stage) {
        const uint64_t k = first_k + stage * K_STAGE;
        fa::wgmma_fence();
#pragma unroll
        for (int d = 0; d < (OMIT_PHASE == QK || OMIT_PHASE == PRODUCTS ? MMA_K : HEAD_DIM); d += MMA_K) {
          fa::wgmma_m64k32_e4m3(s, q + SHAPE::qk_step_bytes(d) / 16, k + SHAPE::qk_step_bytes(d) / 16, d > 0);
        }
        fa::wgmma_commit_group();
      };
      // O += P V, or P V alone with TWO_LEVELS
      auto start_pv = [&](int stage) {
        const uint64_t v = first_v + stage * V_STAGE;
        fa::wgmma_fence();
#pragma unroll
        for (int n = 0; n < (OMIT_PHASE == PV || OMIT_PHASE == PRODUCTS ? 1 : SHAPE::P_TILES); ++n) {
          fa::wgmma_m64k32_e4m3(accumulator, p[n], v + SHAPE::pv_step_bytes(n * MMA_K) / 16, !HAS_LEVELS || n > 0);
        }
        fa::wgmma_commit_group();
      };
      // P = exp2(S - m), row sum
      auto exponentials = [&](float (&s)[S_TILES][4]) {
#pragma unroll
        for (int n = 0; n < S_TILES && OMIT_PHASE != SOFTMAX; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            s[n][i] = fa::ex2_approx_ftz(s[n][i] * scale.log2 - softmax.m_log2[i / 2]);
            if (!SHAPE::HAS_ONES) softmax.l[i / 2] += s[n][i];
          }
        }
      };
      // Four adjacent accumulator fragments of S form one A fragment of P.
      auto round_p = [&](const float (&s)[S_TILES][4]) {
#pragma unroll
        for (int n = 0; n < SHAPE::P_TILES; ++n) fa::make_p_fragment(p[n], s, n * MMA_K / MMA_N);
      };
      auto row_max = [&](const float (&s)[S_TILES][4]) {
        if (OMIT_PHASE != SOFTMAX) is_raised = softmax.raise_m_if_needed(s, scale);
      };
      // Adds P V of the last tile to O.  P V is complete.
      auto add_tile = [&] {
        if (!HAS_LEVELS) return;
#pragma unroll
        for (int d = 0; d < SHAPE::PV_TILES; ++d) {
#pragma unroll
          for (int i = 0; i < 4; ++i) o[d][i] += o_of_tile[d][i];
        }
      };
      auto rescale_o = [&] {
        if (is_raised) {
#pragma unroll
          for (int d = 0; d < SHAPE::PV_TILES; ++d) {
#pragma unroll
            for (int i = 0; i < 4; ++i) o[d][i] *= softmax.rescale[i / 2];
          }
        }
      };

      // The tiles from first_masked on contain keys that some query of the warpgroup does not see.
      const int first_diagonal = params.first_diagonal + work.first_query + group * GROUP_M;
      const int first_masked = scale.is_negated ? 0 : max(0, min(params.seq_k, first_diagonal)) / BLOCK_N;
      int j = work.key_tiles - 1;

      wait_full<Q_FULL>(&smem.q_full, q_phase);
      q_phase ^= 1;
      arrive_empty(Q_READ, &smem.q_empty, true);
      if constexpr (FLOW == OVERLAP) {
        {
          float s[S_TILES][4];
          wait_full<K_FULL>(&smem.k_full[ring.stage], ring.phase);
          arrive_empty(K_READ, &smem.k_empty[ring.stage], true);
          start_s(s, ring.stage);
          fa::wgmma_wait_group<0>(s);
          arrive_empty(K_READ, &smem.k_empty[ring.stage], false);
          mask(s, params, scale.is_negated, query, j * BLOCK_N, lane);
          softmax.raise_m(s, scale);
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
          if (decltype(is_masked)::value) mask(s, params, scale.is_negated, query, j * BLOCK_N, lane);
          row_max(s);
          exponentials(s);
          // ptxas would move the exponentials below the wait for P V, but not across the loop of this wait.
          Ring<SHAPE::STAGES> next = ring;
          next.advance();
          if (j > 0) wait_full<K_FULL>(&smem.k_full[next.stage], next.phase);
          fa::wgmma_wait_group<0>(accumulator);
          wait_late_if_omitted<V_FULL>(&smem.v_full[previous.stage], previous.phase);
          arrive_empty(V_READ, &smem.v_empty[previous.stage], false);
          round_p(s);
          add_tile();
          rescale_o();
        };
#pragma unroll 1
        for (; j >= first_masked; --j) step(std::true_type());
#pragma unroll 1
        for (; j >= 0; --j) step(std::false_type());
        arrive_empty(Q_READ, &smem.q_empty, false);
        wait_full<V_FULL>(&smem.v_full[ring.stage], ring.phase);
        arrive_empty(V_READ, &smem.v_empty[ring.stage], true);
        start_pv(ring.stage);
        fa::wgmma_wait_group<0>(accumulator);
        wait_late_if_omitted<V_FULL>(&smem.v_full[ring.stage], ring.phase);
        arrive_empty(V_READ, &smem.v_empty[ring.stage], false);
        add_tile();
        ring.advance();
      } else {
        auto step = [&](auto is_masked, auto is_first) {
          float s[S_TILES][4];
          wait_full<K_FULL>(&smem.k_full[ring.stage], ring.phase);
          arrive_empty(K_READ, &smem.k_empty[ring.stage], true);
          start_s(s, ring.stage);
          fa::wgmma_wait_group<0>(s);
          arrive_empty(K_READ, &smem.k_empty[ring.stage], false);
          if (decltype(is_masked)::value) mask(s, params, scale.is_negated, query, j * BLOCK_N, lane);
          if (decltype(is_first)::value) {
            softmax.raise_m(s, scale);
          } else {
            row_max(s);
            rescale_o();
          }
          exponentials(s);
          wait_full<V_FULL>(&smem.v_full[ring.stage], ring.phase);
          arrive_empty(V_READ, &smem.v_empty[ring.stage], true);
          round_p(s);
          start_pv(ring.stage);
          fa::wgmma_wait_group<0>(accumulator);
          arrive_empty(V_READ, &smem.v_empty[ring.stage], false);
          add_tile();
          ring.advance();
          --j;
        };
        step(std::true_type(), std::true_type());
#pragma unroll 1
        while (j >= first_masked) step(std::true_type(), std::false_type());
#pragma unroll 1
        while (j >= 0) step(std::false_type(), std::false_type());
        arrive_empty(Q_READ, &smem.q_empty, false);
      }
    }

    // Normalise.  A row that sees no key is zero, and its log-sum-exp is -inf.
#pragma unroll
    for (int r = 0; r < LANE_ROWS; ++r) {
      const float l = SHAPE::HAS_ONES ? o[SHAPE::PV_TILES - 1][2 * r] : fa::sum_of_quad(softmax.l[r]);
      const float inverse_l = l == 0.0f ? 0.0f : scale.v_descale / l;
#pragma unroll
      for (int d = 0; d < SHAPE::O_TILES; ++d) o[d][2 * r] *= inverse_l, o[d][2 * r + 1] *= inverse_l;
      if (params.lse != nullptr && lane % QUAD == 0 && query + r * 8 < params.seq_q) {
        float* lse_gmem = params.lse + (uint64_t(head.batch) * params.heads + head.query_head) * params.seq_q;
        lse_gmem[query + r * 8] = l == 0.0f ? -CUDART_INF_F : (softmax.m_log2[r] + log2f(l)) * CUDART_LN2_F;
      }
    }

    // Store O through shared memory, when the previous store has read it.
    Out* const o_smem = smem.o[group];
    const int group_barrier = FIRST_GROUP_BARRIER + group;
    if (thread_in_group == 0) fa::cp_async_bulk_wait_group_read();
    fa::barrier_sync<GROUP_THREADS>(group_barrier);
    if (thread_in_group >= WARP) delay_if_omitted<O_WRITTEN>();
#pragma unroll
    for (int d = 0; d < SHAPE::O_TILES; d += 2) {
      const int row = thread_in_group / WARP * MMA_M + lane % 16, column = d * MMA_N + lane / 16 * MMA_N;
      const Out* to_smem = o_smem + column / BOX_COLUMNS * GROUP_M * BOX_COLUMNS + row * BOX_COLUMNS + (column % BOX_COLUMNS ^ row % 8 * 8);
      fa::stmatrix_x4(fa::smem_address(to_smem), fa::cvt_rn_x2<Out>(o[d][0], o[d][1]), fa::cvt_rn_x2<Out>(o[d][2], o[d][3]),
                      fa::cvt_rn_x2<Out>(o[d + 1][0], o[d + 1][1]), fa::cvt_rn_x2<Out>(o[d + 1][2], o[d + 1][3]));
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

template <typename Out, typename SHAPE>
__global__ void __launch_bounds__(SHAPE::THREADS, 1)
fp8_wgmma_kernel(const __grid_constant__ KernelParams params, const __grid_constant__ CUtensorMap q_map,
                 const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                 const __grid_constant__ CUtensorMap o_map) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<Smem<Out, SHAPE>*>(smem_bytes);
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
  if constexpr (SHAPE::HAS_ONES) {  // the rows of each panel after those that TMA writes
    constexpr int ONES_BYTES = MMA_N * SHAPE::PANEL_KEYS, PANELS = SHAPE::STAGES * SHAPE::BLOCK_N / SHAPE::PANEL_KEYS;
    constexpr e4m3 E4M3_ONE = 0x38;
    e4m3* const first_ones = smem.v[0] + SHAPE::HEAD_DIM * SHAPE::PANEL_KEYS;  // the panels of all stages are contiguous
    for (int i = threadIdx.x; i < PANELS * ONES_BYTES; i += SHAPE::THREADS) {
      first_ones[i / ONES_BYTES * SHAPE::PANEL_BYTES + i % ONES_BYTES] = E4M3_ONE;
    }
    fa::fence_proxy_async();
  }
  __syncthreads();
  if (warpgroup == 0) {
    fa::setmaxnreg_dec<SHAPE::PRODUCER_REGISTERS>();
    if (threadIdx.x < WARP && fa::elect_sync()) produce(params, q_map, k_map, v_map, smem);
  } else {
    fa::setmaxnreg_inc<SHAPE::REGISTERS>();
    compute(params, o_map, smem, warpgroup - 1);
  }
}

// Describes a tensor to TMA: `sizes` from the contiguous dimension on, the strides of the others in bytes, and boxes of
// `columns` x `rows`.  Returns FA_OK, or refuses the call.
int make_tensor_map(CUtensorMap* map, const FaForwardArgs* args, CUtensorMapDataType type, const void* data,
                    const int64_t (&sizes)[4], const int64_t (&stride_bytes)[3], int columns, int rows, CUtensorMapSwizzle swizzle) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult query_result;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &query_result);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  if (encode == nullptr) return fa_refuse(args, "the driver has no cuTensorMapEncodeTiled");
  cuuint64_t unsigned_sizes[4], unsigned_strides[3];
  std::copy(sizes, sizes + 4, unsigned_sizes);
  std::copy(stride_bytes, stride_bytes + 3, unsigned_strides);
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(columns), static_cast<cuuint32_t>(rows), 1, 1};
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  const CUresult status =
      encode(map, type, 4, const_cast<void*>(data), unsigned_sizes, unsigned_strides, box, element_strides,
             CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status == CUDA_SUCCESS) return FA_OK;
  return fa_refuse(args, "TMA does not accept strides of %lld, %lld and %lld bytes (row, head, batch): CUresult %d",
                   static_cast<long long>(stride_bytes[0]), static_cast<long long>(stride_bytes[1]),
                   static_cast<long long>(stride_bytes[2]), status);
}

constexpr CUtensorMapSwizzle swizzle_of(int bytes) {
  return bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_32B;
}

// Q or K: [batch, heads, seq, HEAD_DIM], e4m3, in boxes of whole rows.
template <int HEAD_DIM>
int make_rows_map(CUtensorMap* map, const FaForwardArgs* args, const void* data, int64_t heads, int64_t seq, const FaStrides& stride,
                  int rows) {
  return make_tensor_map(map, args, CU_TENSOR_MAP_DATA_TYPE_UINT8, data, {HEAD_DIM, seq, heads, args->batch},
                         {stride.seq, stride.head, stride.batch}, HEAD_DIM, rows, swizzle_of(HEAD_DIM));
}

// V^T in the workspace: [batch, kv_heads, HEAD_DIM, keys], e4m3, in boxes of one panel.
template <typename SHAPE>
int make_v_map(CUtensorMap* map, const FaForwardArgs* args) {
  const int64_t keys = fa::v_t_keys(args);
  return make_tensor_map(map, args, CU_TENSOR_MAP_DATA_TYPE_UINT8, args->workspace,
                         {keys, SHAPE::HEAD_DIM, args->kv_heads, args->batch},
                         {keys, keys * SHAPE::HEAD_DIM, keys * SHAPE::HEAD_DIM * args->kv_heads}, SHAPE::PANEL_KEYS,
                         SHAPE::HEAD_DIM, swizzle_of(SHAPE::PANEL_KEYS));
}

// O: [batch, heads, seq_q, HEAD_DIM], 16 bits, in boxes of 64 columns.
template <typename Out>
int make_o_map(CUtensorMap* map, const FaForwardArgs* args) {
  const auto type = std::is_same_v<Out, fp16> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const FaStrides& stride = args->out_stride;
  return make_tensor_map(map, args, type, args->out, {args->head_dim, args->seq_q, args->heads, args->batch},
                         {stride.seq * 2, stride.head * 2, stride.batch * 2}, BOX_COLUMNS, GROUP_M, CU_TENSOR_MAP_SWIZZLE_128B);
}

// Returns the number of heads of a section.  Without a mask, all work tiles are equally long, and heads are computed one after
// another, so that few heads are in L2 at a time.
inline int section_heads_of(const FaForwardArgs* args) {
  if (args->causal == FA_CAUSAL_NONE) return 1;
  const int64_t head_bytes = std::max<int64_t>(1, args->seq_k * args->head_dim * 2 / (args->heads / args->kv_heads));
  int64_t heads = 1;
  while (heads * 2 * head_bytes <= SECTION_BYTES && heads < args->batch * args->heads) heads *= 2;
  return static_cast<int>(heads);
}

// Fills `params` and returns FA_OK, or refuses the call.
template <typename SHAPE>
int make_kernel_params(const FaForwardArgs* args, KernelParams* params) {
  if (int status = fa::check_e4m3_alignment(args)) return status;
  const int64_t heads_per_kv_head = args->heads / args->kv_heads, batch_heads = args->batch * args->heads;
  const int64_t m_blocks = (args->seq_q + SHAPE::BLOCK_M - 1) / SHAPE::BLOCK_M;
  const bool fits = args->heads * heads_per_kv_head < INT32_MAX / 2 && args->kv_heads <= UINT16_MAX && args->batch <= UINT16_MAX &&
                    args->seq_q < INT32_MAX / 2 && args->seq_k < INT32_MAX / 2 && batch_heads <= INT32_MAX / 4 / m_blocks;
  if (!fits) {
    return fa_refuse(args, "the shape is too large: batch %lld and kv_heads %lld (at most %d), heads * heads / kv_heads %lld, seq_q "
                           "%lld and seq_k %lld (below 2^30); the product of batch, heads and seq_q / %d must be below 2^29",
                     static_cast<long long>(args->batch), static_cast<long long>(args->kv_heads), UINT16_MAX,
                     static_cast<long long>(args->heads * heads_per_kv_head), static_cast<long long>(args->seq_q),
                     static_cast<long long>(args->seq_k), SHAPE::BLOCK_M);
  }
  const int64_t shift = args->causal == FA_CAUSAL_BOTTOM_RIGHT ? args->seq_k - args->seq_q : 0;
  *params = {args->lse,
             args->q_descale,
             args->k_descale,
             args->v_descale,
             args->scale * CUDART_L2E_F,
             static_cast<int>(args->seq_q),
             static_cast<int>(args->seq_k),
             args->causal == FA_CAUSAL_NONE ? INT32_MAX / 2 : static_cast<int>(shift + 1),
             static_cast<int>(args->heads),
             static_cast<int>(args->kv_heads),
             static_cast<int>(batch_heads),
             static_cast<int>(m_blocks),
             section_heads_of(args),
             static_cast<int>(m_blocks * batch_heads),
             static_cast<uint32_t>(((int64_t(1) << 31) + heads_per_kv_head - 1) / heads_per_kv_head)};
  return FA_OK;
}

template <typename Out, typename SHAPE>
int launch(const FaForwardArgs* args, cudaStream_t stream) {
  constexpr int HEAD_DIM = SHAPE::HEAD_DIM;
  KernelParams params;
  if (int status = make_kernel_params<SHAPE>(args, &params)) return status;
  CUtensorMap q_map = {}, k_map = {}, v_map = {}, o_map = {};
  if (int status = make_o_map<Out>(&o_map, args)) return status;
  if (args->seq_k > 0) {
    if (int status = make_rows_map<HEAD_DIM>(&q_map, args, args->q, args->heads, args->seq_q, args->q_stride, GROUP_M)) return status;
    if (int status = make_rows_map<HEAD_DIM>(&k_map, args, args->k, args->kv_heads, args->seq_k, args->k_stride, SHAPE::BLOCK_N)) {
      return status;
    }
    if (int status = make_v_map<SHAPE>(&v_map, args)) return status;
  }
  const auto kernel = &fp8_wgmma_kernel<Out, SHAPE>;
  constexpr int smem_bytes = sizeof(Smem<Out, SHAPE>);
  static_assert(smem_bytes <= 227 * 1024, "a block has up to 227 KB of shared memory");
  static fa::OncePerDevice prepare;
  if (int status = prepare([&] {
        const auto address = reinterpret_cast<const void*>(kernel);
        if (int refusal = fa::require_registers(args, address, SHAPE::GROUPS + 1, SHAPE::ALL_REGISTERS)) return refusal;
        return fa_allow_dynamic_smem(args, address, smem_bytes);
      })) {
    return status;
  }
  if (args->seq_k > 0) {
    if (int status = fa::launch_transpose_v<HEAD_DIM, MISTAKE == KEYS_IN_ORDER>(args, stream)) return status;
  }
  const int blocks = std::min(params.work_tiles, std::max(1, fa::sm_count()));
  kernel<<<blocks, SHAPE::THREADS, smem_bytes, stream>>>(params, q_map, k_map, v_map, o_map);
  return static_cast<int>(cudaPeekAtLastError());
}

template <int HEAD_DIM>
using ShapeOf = Shape<HEAD_DIM, (HEAD_DIM == 64 ? GROUPS_64 : GROUPS_128), (HEAD_DIM == 64 ? KEYS_64 : KEYS_128)>;

template <int HEAD_DIM>
int launch_e4m3(const FaForwardArgs* args, cudaStream_t stream) {
  if (args->out_dtype == FA_DTYPE_fp16) return launch<fp16, ShapeOf<HEAD_DIM>>(args, stream);
  if (args->out_dtype == FA_DTYPE_bf16) return launch<bf16, ShapeOf<HEAD_DIM>>(args, stream);
  return fa_refuse(args, "no instantiation for an output of dtype %d", args->out_dtype);
}

FA_EXPORT size_t fa_workspace_bytes(const FaForwardArgs* args) { return static_cast<size_t>(fa::v_t_bytes(args)); }

FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t stream) {
  if (int status = fa_check_abi(args)) return status;
#define LAUNCH_IF(DTYPE, HEAD_DIM_) \
  if (args->dtype == FA_DTYPE_##DTYPE && args->head_dim == HEAD_DIM_) return launch_##DTYPE<HEAD_DIM_>(args, stream);
  FA_FOR_EACH_INSTANTIATION(LAUNCH_IF)
#undef LAUNCH_IF
  return fa_refuse(args, "no instantiation for dtype %d with head_dim %lld", args->dtype, static_cast<long long>(args->head_dim));
}

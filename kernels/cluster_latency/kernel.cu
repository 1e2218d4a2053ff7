// cluster_latency: everything between the products is made short.
// step:    one thread asks for Q and K before anything else is done; a group's keys come in parts, one group's after the
//          other's; what is merged flows one way, from group to group and from block to block; few keys are one group's and one
//          block's, which merge nothing
// because: in cluster_tma at the mission shape, by its own clock, 1,440 of 5,900 cycles pass before K is there, for 940 of which
//          it has not been asked for; the two merges take 2,200; a call with 64 keys takes as long as one with 512
// expect:  3.6 to 4.0 us at the mission shape, S = 64 and 128 below 3.0
// diff:    large: prologue, merge, the order of keys and the kernels for one pass are new
// tile:    64 queries x 128 keys per group, 2 groups, 2 blocks; up to 256 keys: 64 per group; up to 128: one group, one block;
//          98 KB of shared memory, 192 KB at D = 128
// takes:   fp16 and bf16, D = 64 and 128, any S_q >= 1 and S_kv >= 0, both causal corners, grouped heads; rows contiguous and
//          16-byte aligned, with strides that TMA takes
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#include <type_traits>

#include "fa/params.cuh"
#include "fa/hopper.cuh"
#include "fa/launch.h"
#include "fa/ptx.cuh"
#include "fa/warp.cuh"
#include "fa_forward.h"
#include "fa_instantiations.h"  // FA_FOR_EACH_INSTANTIATION: the manifest's dtypes and head_dims

using fp16 = __half;
using bf16 = __nv_bfloat16;

// Barriers have names, so that a test can leave one out and see that it is missed.
enum Barrier { NONE, Q_THERE, K_THERE, V_THERE, O_GIVEN, M_AND_L_SENT, O_SENT };

// Stages have names, so that an ablation can leave one out and its time be seen.
enum Stage { NOTHING, LOAD, QK, SOFTMAX, PV, MERGE };

// What a kernel knows of the keys when it is compiled: no jump then leads over what does not happen.
enum Keys {
  ANY,
  ONE_PASS,  // at most PASS_KEYS, and the scale is not negative: nothing is loaded later, nothing is turned around
  ALL,       // PASS_KEYS, and every query sees all of them: nothing is masked either
};

constexpr int WARP = 32;
constexpr int QUAD = 4;  // lanes that share a row of a fragment
constexpr int MMA_M = 16, MMA_N = 8, MMA_K = 16;
constexpr int BLOCK_M = 64;  // what wgmma takes
constexpr int PART = 64;     // keys that come at once
constexpr int COLUMNS = 64;  // of Q, K and V that lie together: 128 bytes, what TMA swizzles
constexpr int P_TILES = PART / MMA_N;
constexpr int ROWS = 2;  // of a lane: every eighth of its warp's
constexpr int GROUP_THREADS = 128;
template <int HEAD_DIM>
constexpr int PART_BYTES = LEAVE_OUT == LOAD ? 0 : PART * HEAD_DIM * 2;  // of Q, K or V
constexpr float RESCALE_THRESHOLD_LOG2 = 8.0f;  // P may grow to 2^8 before O is rescaled: fp16 holds 2^15, and its precision is relative

// The parameters: with what the driver puts before them, one line of the constant cache, since the first read of each line
// takes as long as 150 to 200 cycles.
struct Params {
  uint4* out;  // [batch, heads, seq_q, head_dim] in 16 bytes
  float* lse;
  fa::VectorStrides out_strides;
  uint32_t kv_head_factor;
  int seq_q, seq_k;
  int first_diagonal;  // query i sees keys [0, min(seq_k, first_diagonal + i))
  float signed_scale_log2;
};
static_assert(sizeof(Params) == 48, "16 bytes into a line of 64");

// How many keys a cluster holds at once, and who holds them.
template <int CLUSTER_, int KEY_GROUPS_, int PARTS_>
struct Split {
  static constexpr int CLUSTER = CLUSTER_, KEY_GROUPS = KEY_GROUPS_, PARTS = PARTS_;
  static constexpr int GROUP_KEYS = PARTS * PART, BLOCK_KEYS = KEY_GROUPS * GROUP_KEYS, PASS_KEYS = CLUSTER * BLOCK_KEYS;
  static constexpr int THREADS = KEY_GROUPS * GROUP_THREADS;
  static_assert(CLUSTER <= ROWS, "each block of a cluster keeps one row of every lane");
  static_assert(KEY_GROUPS <= 2, "one group gives what it found, the other takes it");
  static_assert(CLUSTER == 1 || KEY_GROUPS == 2, "what a block sends is what its two groups found");
};

// One row of O of every lane, as pieces of 16 bytes, and what it is relative to: max in log2, and the lane's part of the sum.
template <int D_TILES>
struct Row {
  float4 o[D_TILES / 2][GROUP_THREADS];
  float2 m_and_l[GROUP_THREADS];
};

// The same for another block, to which it takes the longer the more bytes it is: O in 24 bits.
template <int D_TILES>
struct SentRow {
  static constexpr int PIECES = D_TILES * 2 * 3 / 16;
  uint4 o[PIECES][GROUP_THREADS];
  float2 m_and_l[GROUP_THREADS];
};

struct Nothing {};

template <typename T, typename SPLIT, int HEAD_DIM>
struct Smem {
  static constexpr int D_TILES = HEAD_DIM / MMA_N;
  // Q, K and V [HEAD_DIM / COLUMNS, 64 rows, COLUMNS]
  alignas(1024) T q[BLOCK_M * HEAD_DIM];
  alignas(1024) T k[SPLIT::KEY_GROUPS][SPLIT::PARTS][PART * HEAD_DIM];
  alignas(1024) T v[SPLIT::KEY_GROUPS][SPLIT::PARTS][PART * HEAD_DIM];
  std::conditional_t<(SPLIT::KEY_GROUPS > 1), Row<D_TILES>[ROWS], Nothing> given;  // by the first group to the last
  std::conditional_t<(SPLIT::CLUSTER > 1), SentRow<D_TILES>, Nothing> sent;        // by the other block: nobody but it writes here
  uint64_t k_full[SPLIT::KEY_GROUPS][SPLIT::PARTS];  // barriers: K, and with the first Q, has come
  uint64_t v_full[SPLIT::KEY_GROUPS];                // barriers: V has come
  uint64_t m_and_l_there, o_there;                   // barriers: all of the exchange has come
};

// What one block works on: BLOCK_M queries of one head.
struct Block {
  int head, kv_head, batch;
  int first_query;
  int diagonal;  // query i of the block sees keys [0, min(seq_k, diagonal + i))
  int passes;    // over the keys that any query of the block sees
};

template <typename SPLIT, Keys KEYS>
__device__ __forceinline__ Block find_block(const Params& params) {
  const uint32_t head = blockIdx.x / SPLIT::CLUSTER;
  const int first_query = blockIdx.y * BLOCK_M;
  const int keys = max(0, min(params.seq_k, params.first_diagonal + first_query + BLOCK_M - 1));
  return {
      static_cast<int>(head),
      static_cast<int>(__umulhi(2 * head + 1, params.kv_head_factor)),
      static_cast<int>(blockIdx.z),
      first_query,
      params.first_diagonal + first_query,
      KEYS != ANY ? 1 : (keys + SPLIT::PASS_KEYS - 1) / SPLIT::PASS_KEYS,
  };
}

template <Barrier WHICH>
__device__ __forceinline__ void wait(uint64_t* barrier_smem, uint32_t parity) {
  if (WHICH == OMIT_BARRIER) return;
  while (!fa::mbarrier_try_wait(barrier_smem, parity)) {
  }
}

// Load a part of Q, K or V, 64 rows of a head.
template <int HEAD_DIM, typename T>
__device__ __forceinline__ void load_part(
    T* to_smem, const CUtensorMap& map, int first_row, int head, int batch, uint64_t* barrier_smem) {
#pragma unroll
  for (int d = 0; d < HEAD_DIM && LEAVE_OUT != LOAD; d += COLUMNS) {
    fa::cp_async_bulk_tensor_4d(to_smem + d * PART, map, d, first_row, head, batch, barrier_smem);
  }
}

// Load K of one pass, all of one group before the next: so groups take turns at exponentials.  One thread.
template <typename T, typename SPLIT, int HEAD_DIM>
__device__ __forceinline__ void load_k(
    Smem<T, SPLIT, HEAD_DIM>& smem, const CUtensorMap& map, const Block& block, int first_key, int bytes_before) {
#pragma unroll
  for (int g = 0; g < SPLIT::KEY_GROUPS; ++g) {
#pragma unroll
    for (int part = 0; part < SPLIT::PARTS; ++part) {
      fa::mbarrier_arrive_expect_tx(&smem.k_full[g][part], PART_BYTES<HEAD_DIM> + (g + part > 0 ? 0 : bytes_before));
      const int first_of_part = first_key + (g * SPLIT::PARTS + part) * PART;
      load_part<HEAD_DIM>(smem.k[g][part], map, first_of_part, block.kv_head, block.batch, &smem.k_full[g][part]);
    }
  }
}

template <typename T, typename SPLIT, int HEAD_DIM>
__device__ __forceinline__ void load_v(Smem<T, SPLIT, HEAD_DIM>& smem, const CUtensorMap& map, const Block& block, int first_key) {
#pragma unroll
  for (int g = 0; g < SPLIT::KEY_GROUPS; ++g) {
    fa::mbarrier_arrive_expect_tx(&smem.v_full[g], SPLIT::PARTS * PART_BYTES<HEAD_DIM>);
#pragma unroll
    for (int part = 0; part < SPLIT::PARTS; ++part) {
      const int first_of_part = first_key + (g * SPLIT::PARTS + part) * PART;
      load_part<HEAD_DIM>(smem.v[g][part], map, first_of_part, block.kv_head, block.batch, &smem.v_full[g]);
    }
  }
}

// A row of a lane's O, two fragments in 16 bytes.
template <int D_TILES>
__device__ __forceinline__ float4 piece(const float (&o)[D_TILES][4], int row, int d) {
  return make_float4(o[d][2 * row], o[d][2 * row + 1], o[d + 1][2 * row], o[d + 1][2 * row + 1]);
}

// row of o = row of o * weight + other * weight_of_other, two fragments of it
template <int D_TILES>
__device__ __forceinline__ void add_piece(float (&o)[D_TILES][4], int row, int d, float weight, float4 other, float weight_of_other) {
  o[d][2 * row] = o[d][2 * row] * weight + other.x * weight_of_other;
  o[d][2 * row + 1] = o[d][2 * row + 1] * weight + other.y * weight_of_other;
  o[d + 1][2 * row] = o[d + 1][2 * row] * weight + other.z * weight_of_other;
  o[d + 1][2 * row + 1] = o[d + 1][2 * row + 1] * weight + other.w * weight_of_other;
}

template <int D_TILES>
__device__ __forceinline__ void add_row(
    float (&o)[D_TILES][4], int row, float weight, const Row<D_TILES>& other, float weight_of_other) {
#pragma unroll
  for (int d = 0; d < D_TILES; d += 2) add_piece(o, row, d, weight, other.o[d / 2][threadIdx.x % GROUP_THREADS], weight_of_other);
}

// The 24 upper bits of four floats in three words: the fourth lies where the lowest bytes of the others did.
__device__ __forceinline__ void pack_24(uint32_t* words, float4 values) {
  const uint32_t fourth = __float_as_uint(values.w);
  words[0] = __byte_perm(__float_as_uint(values.x), fourth, 0x3215);
  words[1] = __byte_perm(__float_as_uint(values.y), fourth, 0x3216);
  words[2] = __byte_perm(__float_as_uint(values.z), fourth, 0x3217);
}

__device__ __forceinline__ float4 unpack_24(const uint32_t* words) {
  constexpr uint32_t UPPER = ~0xffu;
  const uint32_t fourth = __byte_perm(__byte_perm(words[0], words[1], 0x0040), words[2], 0x4100);
  return make_float4(__uint_as_float(words[0] & UPPER), __uint_as_float(words[1] & UPPER), __uint_as_float(words[2] & UPPER),
                     __uint_as_float(fourth & UPPER));
}

// Send a row of a lane's O to where another block, or its barrier, awaits it.
template <int D_TILES, typename THERE>
__device__ __forceinline__ void send_row(
    const float (&o)[D_TILES][4], int row, SentRow<D_TILES>& sent_smem, uint64_t* barrier_smem, THERE there) {
  constexpr int PIECES = SentRow<D_TILES>::PIECES;
  uint32_t words[PIECES * 4];
#pragma unroll
  for (int d = 0; d < D_TILES; d += 2) pack_24(words + d / 2 * 3, piece(o, row, d));
#pragma unroll
  for (int i = 0; i < PIECES; ++i) {
    const uint4 part = make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
    fa::st_async(there(&sent_smem.o[i][threadIdx.x % GROUP_THREADS]), part, there(barrier_smem));
  }
}

template <int D_TILES>
__device__ __forceinline__ void add_row(
    float (&o)[D_TILES][4], int row, float weight, const SentRow<D_TILES>& other, float weight_of_other) {
  constexpr int PIECES = SentRow<D_TILES>::PIECES;
  uint32_t words[PIECES * 4];
#pragma unroll
  for (int i = 0; i < PIECES; ++i) {
    const uint4 part = other.o[i][threadIdx.x % GROUP_THREADS];
    words[4 * i] = part.x, words[4 * i + 1] = part.y, words[4 * i + 2] = part.z, words[4 * i + 3] = part.w;
  }
#pragma unroll
  for (int d = 0; d < D_TILES; d += 2) add_piece(o, row, d, weight, unpack_24(words + d / 2 * 3), weight_of_other);
}

// Weights of two partial softmaxes; m and l become those of both.
struct Weights {
  float mine, other;
};

__device__ __forceinline__ Weights weigh(float& m, float& l, float2 m_and_l) {
  const float m_all = fmaxf(m, m_and_l.x), m_finite = m_all == -CUDART_INF_F ? 0.0f : m_all;
  const Weights weights = {fa::ex2_approx_ftz(m - m_finite), fa::ex2_approx_ftz(m_and_l.x - m_finite)};
  m = m_all;
  l = l * weights.mine + m_and_l.y * weights.other;
  return weights;
}

// Store a lane's row, whose quad has all of it; a row that sees no key is zero and its log-sum-exp is -inf.
template <typename T, int CLUSTER, int D_TILES>
__device__ __forceinline__ void store_row(
    const float (&o)[D_TILES][4], int row, float m, float l, const Params& params, const Block& block, int query, int lane) {
  uint4* to_gmem = params.out + (uint64_t(block.batch) * params.out_strides.batch + uint64_t(block.head) * params.out_strides.head) +
                   (uint64_t(query) * params.out_strides.row + lane % QUAD);
#pragma unroll
  for (int d = 0; d < D_TILES; d += QUAD) {
    uint32_t rounded[QUAD];
#pragma unroll
    for (int i = 0; i < QUAD; ++i) rounded[i] = fa::cvt_rn_x2<T>(o[d + i][2 * row], o[d + i][2 * row + 1]);
    fa::transpose_quad(rounded, lane);  // lanes trade fragments, so that each has 16 bytes
    if (query < params.seq_q) to_gmem[d] = make_uint4(rounded[0], rounded[1], rounded[2], rounded[3]);
  }
  if (params.lse != nullptr && lane % QUAD == 0 && query < params.seq_q) {
    const uint32_t heads = gridDim.x / CLUSTER;
    float* lse_gmem = params.lse + (uint64_t(block.batch) * heads + block.head) * params.seq_q;
    lse_gmem[query] = l == 0.0f ? -CUDART_INF_F : (m + log2f(l)) * CUDART_LN2_F;
  }
}

__device__ __forceinline__ float inverse_of(float l) { return l == 0.0f ? 0.0f : __fdividef(1.0f, l); }

// What an ablation leaves out and what it still computes, for nobody: a word that the compiler must take for one that is stored.
__device__ __forceinline__ void keep(uint32_t& unused, const uint32_t (&p)[4]) { unused ^= p[0] ^ p[1] ^ p[2] ^ p[3]; }

// Blocks that an SM must have registers for: with many to do, four groups hide what each of them waits for.  A kernel for one
// pass gains more by what it spares than by a neighbour (`launch` says where not), and two of the largest tile of D = 128 do not
// fit an SM's shared memory.
template <typename SPLIT, int HEAD_DIM, Keys KEYS>
constexpr int blocks_per_sm() {
  return KEYS != ANY || HEAD_DIM > 64 ? 1 : 4 * GROUP_THREADS / SPLIT::THREADS;
}

template <typename T, typename SPLIT, int HEAD_DIM, Keys KEYS>
__global__ void __cluster_dims__(SPLIT::CLUSTER) __launch_bounds__(SPLIT::THREADS, blocks_per_sm<SPLIT, HEAD_DIM, KEYS>())
    cluster_latency_kernel(const Params params, const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                           const __grid_constant__ CUtensorMap v_map) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<Smem<T, SPLIT, HEAD_DIM>*>(smem_bytes);
  constexpr int D_TILES = HEAD_DIM / MMA_N;
  constexpr int KEY_GROUPS = SPLIT::KEY_GROUPS, PARTS = SPLIT::PARTS, LAST_GROUP = KEY_GROUPS - 1;
  const int group = threadIdx.x / GROUP_THREADS, loader = threadIdx.x % GROUP_THREADS, lane = threadIdx.x % WARP;
  const int rank = blockIdx.x % SPLIT::CLUSTER;
  const Block block = find_block<SPLIT, KEYS>(params);

  // Load Q, K and V; what is made after the first request is made while it is on its way.
  if (threadIdx.x < WARP && fa::elect_sync()) {
#pragma unroll
    for (int i = 0; i < KEY_GROUPS * PARTS; ++i) fa::mbarrier_init(&smem.k_full[i / PARTS][i % PARTS], 1);
    fa::fence_mbarrier_init();
    if (block.passes > 0) {
      load_part<HEAD_DIM>(smem.q, q_map, block.first_query, block.head, block.batch, &smem.k_full[0][0]);
      load_k(smem, k_map, block, rank * SPLIT::BLOCK_KEYS, PART_BYTES<HEAD_DIM>);
    }
#pragma unroll
    for (int g = 0; g < KEY_GROUPS; ++g) fa::mbarrier_init(&smem.v_full[g], 1);
    if (SPLIT::CLUSTER > 1) {
      fa::mbarrier_init(&smem.m_and_l_there, 1);
      fa::mbarrier_init(&smem.o_there, 1);
    }
    fa::fence_mbarrier_init();
    if (block.passes > 0) load_v(smem, v_map, block, rank * SPLIT::BLOCK_KEYS);
    if (SPLIT::CLUSTER > 1) {
      fa::mbarrier_arrive_expect_tx(&smem.m_and_l_there, sizeof(SentRow<D_TILES>::m_and_l));
      fa::mbarrier_arrive_expect_tx(&smem.o_there, sizeof(SentRow<D_TILES>::o));
    }
  }
  __syncwarp();
  if (SPLIT::CLUSTER > 1) fa::barrier_cluster_arrive_relaxed();
  __syncthreads();  // the barriers are there for everyone,
  if (SPLIT::CLUSTER > 1) fa::barrier_cluster_wait();  // also in the other block

  const int first_row = loader / WARP * MMA_M + lane / QUAD;  // this lane's rows of S, P and O: this one and the eighth after it
  const float scale_log2 = fabsf(params.signed_scale_log2);
  float o[D_TILES][4] = {};
  float m[ROWS] = {-CUDART_INF_F, -CUDART_INF_F};  // row max that P is relative to, before the scale
  float l[ROWS] = {};                              // this lane's part of the running row sum
  uint32_t unused = 0;                             // what an ablation computes for nobody

  for (int pass = 0; pass < block.passes; ++pass) {
    const int first_of_block = pass * SPLIT::PASS_KEYS + rank * SPLIT::BLOCK_KEYS;
    const int first_key = first_of_block + group * SPLIT::GROUP_KEYS;

    // Load K and V.
    if (pass > 0) {
      __syncthreads();  // everyone has left the last keys, and has seen the last phase of their barriers end
      if (threadIdx.x < WARP && fa::elect_sync()) {
        load_k(smem, k_map, block, first_of_block, 0);
        load_v(smem, v_map, block, first_of_block);
      }
      __syncwarp();
    }

    // S = Q K^T
    float s[PARTS][P_TILES][4];
    if (group > 0) wait<Q_THERE>(&smem.k_full[0][0], pass % 2);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      wait<K_THERE>(&smem.k_full[group][part], pass % 2);
      const uint64_t q = fa::wgmma_descriptor(smem.q), k = fa::wgmma_descriptor(smem.k[group][part]);
      fa::wgmma_fence();
#pragma unroll
      for (int d = 0; d < (LEAVE_OUT == QK ? MMA_K : HEAD_DIM); d += MMA_K) {
        const int at = (d / COLUMNS * PART * COLUMNS + d % COLUMNS) * sizeof(T) >> 4;  // a descriptor counts in 16 bytes
        fa::wgmma_m64k16<T, 0>(s[part], q + at, k + at, d > 0);
      }
      fa::wgmma_commit_group();
    }

    float m_new[ROWS] = {m[0], m[1]};
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      if (part < PARTS - 1) {
        fa::wgmma_wait_group<1>(s[part]);
      } else {
        fa::wgmma_wait_group<0>(s[part]);
      }
      // mask, and a negative scale turns the scores around; every query sees the keys below min(seq_k, diagonal)
      const int first_of_part = first_key + part * PART;
      const bool turned = KEYS == ANY && params.signed_scale_log2 < 0.0f;
      const bool masked = KEYS != ALL && first_of_part + PART > min(params.seq_k, block.diagonal);
      if (turned || masked) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int limit = min(params.seq_k, block.diagonal + first_row + i / 2 * 8) - first_of_part;
#pragma unroll
          for (int n = 0; n < P_TILES; ++n) {
            if (turned) s[part][n][i] = -s[part][n][i];
            if (n * MMA_N + lane % QUAD * 2 + i % 2 >= limit) s[part][n][i] = -CUDART_INF_F;
          }
        }
      }

      // row max, as a tree: each of a chain would wait for the one before
#pragma unroll
      for (int r = 0; r < ROWS && LEAVE_OUT != SOFTMAX; ++r) {
        float m_of_tile[P_TILES];
#pragma unroll
        for (int n = 0; n < P_TILES; ++n) m_of_tile[n] = fmaxf(s[part][n][2 * r], s[part][n][2 * r + 1]);
#pragma unroll
        for (int step = P_TILES / 2; step > 0; step /= 2) {
#pragma unroll
          for (int n = 0; n < step; ++n) m_of_tile[n] = fmaxf(m_of_tile[n], m_of_tile[n + step]);
        }
        m_new[r] = fmaxf(m_new[r], m_of_tile[0]);
      }
    }
    bool rises = false;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      m_new[r] = fa::max_of_quad(m_new[r]);
      rises |= (m_new[r] - m[r]) * scale_log2 > RESCALE_THRESHOLD_LOG2;  // from -inf it does, -inf itself gives NaN: it does not
    }

    // rescale, where a row of the warp needs it; at first there is nothing to rescale
    if (pass == 0) {
      m[0] = m_new[0], m[1] = m_new[1];
    } else if (__any_sync(0xffffffffu, rises)) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const float m_log2 = m_new[r] == -CUDART_INF_F ? 0.0f : m_new[r] * scale_log2;
        const float rescale = fa::ex2_approx_ftz(m[r] * scale_log2 - m_log2);
        m[r] = m_new[r];
        l[r] *= rescale;
#pragma unroll
        for (int d = 0; d < D_TILES; ++d) {
          o[d][2 * r] *= rescale;
          o[d][2 * r + 1] *= rescale;
        }
      }
    }

    float m_log2[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) m_log2[r] = m[r] == -CUDART_INF_F ? 0.0f : m[r] * scale_log2;  // no key seen yet: 2^(-inf - 0) = 0
    uint32_t p[PARTS][P_TILES / 2][4];
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
#pragma unroll
      for (int n = 0; n < P_TILES; n += 2) {
        // P = exp2(S - m), row sum; two neighbouring fragments of S are one of P
        uint32_t(&fragment)[4] = p[part][n / 2];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float(&pair)[4] = s[part][n + i / 2];
          const int r = i % 2;
          if constexpr (LEAVE_OUT == SOFTMAX) {
            fragment[i] = fa::cvt_rn_x2<T>(pair[2 * r], pair[2 * r + 1]);
            continue;
          }
          pair[2 * r] = fa::ex2_approx_ftz(pair[2 * r] * scale_log2 - m_log2[r]);
          pair[2 * r + 1] = fa::ex2_approx_ftz(pair[2 * r + 1] * scale_log2 - m_log2[r]);
          l[r] += pair[2 * r] + pair[2 * r + 1];
          fragment[i] = fa::cvt_rn_x2<T>(pair[2 * r], pair[2 * r + 1]);
        }

        // O += P V, while the next P is being computed.  V is waited for more than once, because ptxas moves no exponential over a
        // wait: without, it puts all of them before the first P V.
        if (n % (P_TILES / 2) == 0) wait<V_THERE>(&smem.v_full[group], pass % 2);
        if constexpr (LEAVE_OUT == PV) {
          keep(unused, fragment);
          continue;
        }
        fa::wgmma_fence();
        const uint64_t v = fa::wgmma_descriptor(smem.v[group][part] + n * MMA_N * COLUMNS, PART * COLUMNS * sizeof(T));
        fa::wgmma_m64k16<T, 1>(o, fragment, v, true);
        fa::wgmma_commit_group();
      }
    }
    fa::wgmma_wait_group<0>(o);
  }

  if (LEAVE_OUT == PV && unused == 0x7fff7fff) o[0][0] = 1.0f;  // two NaN: never, but who compiles does not know

  // Merge: the first group gives all that it has to the last, whose keys came later.
#pragma unroll
  for (int r = 0; r < ROWS; ++r) m[r] = m[r] == -CUDART_INF_F ? m[r] : m[r] * scale_log2;  // from here on in log2
  Weights weights[ROWS] = {{1.0f, 0.0f}, {1.0f, 0.0f}};
  if (KEY_GROUPS > 1 && LEAVE_OUT == MERGE && group < LAST_GROUP) return;
  if constexpr (KEY_GROUPS > 1 && LEAVE_OUT != MERGE) {
    if (group < LAST_GROUP) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        smem.given[r].m_and_l[loader] = make_float2(m[r], l[r]);
#pragma unroll
        for (int d = 0; d < D_TILES; d += 2) smem.given[r].o[d / 2][loader] = piece(o, r, d);
      }
      fa::barrier_arrive<SPLIT::THREADS>(1);
      return;
    }
    if (OMIT_BARRIER != O_GIVEN) fa::barrier_sync<1, SPLIT::THREADS>();
#pragma unroll
    for (int r = 0; r < ROWS; ++r) weights[r] = weigh(m[r], l[r], smem.given[r].m_and_l[loader]);
  }

  if constexpr (SPLIT::CLUSTER == 1) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      l[r] = fa::sum_of_quad(l[r]);
      const float inverse_l = inverse_of(l[r]);
      if constexpr (KEY_GROUPS > 1) {
        add_row(o, r, weights[r].mine * inverse_l, smem.given[r], weights[r].other * inverse_l);
      } else {
#pragma unroll
        for (int d = 0; d < D_TILES; ++d) o[d][2 * r] *= inverse_l, o[d][2 * r + 1] *= inverse_l;
      }
      store_row<T, SPLIT::CLUSTER>(o, r, m[r], l[r], params, block, block.first_query + first_row + r * 8, lane);
    }
  } else {
    // Merge over the cluster: the block of each rank keeps that row of every lane and sends the other.
    auto exchange = [&](auto kept_row) {
      constexpr int KEPT = decltype(kept_row)::value, SENT = 1 - KEPT;
      const int query = block.first_query + first_row + KEPT * 8;
      if constexpr (LEAVE_OUT == MERGE) {
        store_row<T, SPLIT::CLUSTER>(o, KEPT, m[KEPT], l[KEPT], params, block, query, lane);
        return;
      }
      const auto there = [](const void* address_smem) { return fa::mapa(fa::smem_address(address_smem), SENT); };
      fa::st_async(there(&smem.sent.m_and_l[loader]), make_float2(m[SENT], l[SENT]), there(&smem.m_and_l_there));
      add_row(o, SENT, weights[SENT].mine, smem.given[SENT], weights[SENT].other);
      send_row(o, SENT, smem.sent, &smem.o_there, there);
      add_row(o, KEPT, weights[KEPT].mine, smem.given[KEPT], weights[KEPT].other);
      wait<M_AND_L_SENT>(&smem.m_and_l_there, 0);
      const Weights weight = weigh(m[KEPT], l[KEPT], smem.sent.m_and_l[loader]);
      l[KEPT] = fa::sum_of_quad(l[KEPT]);
      const float inverse_l = inverse_of(l[KEPT]);
      wait<O_SENT>(&smem.o_there, 0);
      add_row(o, KEPT, weight.mine * inverse_l, smem.sent, weight.other * inverse_l);
      store_row<T, SPLIT::CLUSTER>(o, KEPT, m[KEPT], l[KEPT], params, block, query, lane);
    };
    if (rank == 0) {
      exchange(std::integral_constant<int, 0>());
    } else {
      exchange(std::integral_constant<int, 1>());
    }
  }
}

// A tensor [batch, heads, seq, head_dim] for TMA, 64 rows of 64 columns at a time; 0, or why not.
int describe(CUtensorMap* map, const FaForwardArgs* args, const void* data, int64_t heads, int64_t seq, const FaStrides& stride) {
  static_assert(PART == BLOCK_M, "keys and queries come by as many");
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  if (encode == nullptr) return fa_refuse(args, "the driver has no cuTensorMapEncodeTiled");
  const auto dtype = args->dtype == FA_DTYPE_fp16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(args->head_dim), static_cast<cuuint64_t>(seq),
                               static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(args->batch)};
  const cuuint64_t bytes[3] = {static_cast<cuuint64_t>(stride.seq) * 2, static_cast<cuuint64_t>(stride.head) * 2,
                               static_cast<cuuint64_t>(stride.batch) * 2};
  const cuuint32_t box[4] = {COLUMNS, PART, 1, 1}, steps[4] = {1, 1, 1, 1};
  const CUresult status = encode(map, dtype, 4, const_cast<void*>(data), sizes, bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                 CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status == CUDA_SUCCESS) return FA_OK;
  return fa_refuse(args, "TMA does not take strides of %lld, %lld and %lld elements (batch, head, row): CUresult %d",
                   static_cast<long long>(stride.batch), static_cast<long long>(stride.head),
                   static_cast<long long>(stride.seq), status);
}

template <typename T, typename SPLIT, int HEAD_DIM>
int launch(const FaForwardArgs* args, cudaStream_t stream) {
  fa::Params checked;
  if (int status = fa::make_params(args, BLOCK_M, SPLIT::CLUSTER, &checked)) return status;
  const Params params = {checked.out,   checked.lse,   checked.out_strides,      checked.kv_head_factor,
                     checked.seq_q, checked.seq_k, checked.first_diagonal, checked.signed_scale_log2};
  CUtensorMap q_map = {}, k_map = {}, v_map = {};
  if (args->seq_k > 0) {
    if (int status = describe(&q_map, args, args->q, args->heads, args->seq_q, args->q_stride)) return status;
    if (int status = describe(&k_map, args, args->k, args->kv_heads, args->seq_k, args->k_stride)) return status;
    if (int status = describe(&v_map, args, args->v, args->kv_heads, args->seq_k, args->v_stride)) return status;
  }
  const dim3 grid(checked.heads * SPLIT::CLUSTER, (params.seq_q + BLOCK_M - 1) / BLOCK_M, static_cast<unsigned>(args->batch));
  // At the largest tile of D = 64 an SM holds one block of a kernel for one pass, and two of the one for any keys.
  constexpr bool FILLS_SM = HEAD_DIM == 64 && SPLIT::BLOCK_KEYS == 256;
  const bool is_crowded = FILLS_SM && uint64_t(grid.x) * grid.y * grid.z > uint64_t(fa::sm_count());
  const bool sees_keys = min(params.seq_k, params.first_diagonal + BLOCK_M - 1) > 0;  // the first block, and so each
  const bool one_pass = sees_keys && params.seq_k <= SPLIT::PASS_KEYS && params.signed_scale_log2 >= 0.0f && !is_crowded;
  const bool all = one_pass && params.seq_k == SPLIT::PASS_KEYS && params.first_diagonal >= params.seq_k;
  const Keys keys = all ? ALL : one_pass ? ONE_PASS : ANY;
  static constexpr decltype(&cluster_latency_kernel<T, SPLIT, HEAD_DIM, ANY>) KERNELS[] = {
      &cluster_latency_kernel<T, SPLIT, HEAD_DIM, ANY>, &cluster_latency_kernel<T, SPLIT, HEAD_DIM, ONE_PASS>,
      &cluster_latency_kernel<T, SPLIT, HEAD_DIM, ALL>};
  const auto kernel = KERNELS[keys];
  constexpr int smem_bytes = sizeof(Smem<T, SPLIT, HEAD_DIM>);
  static fa::OncePerDevice allow_smem[3];
  if (int status = allow_smem[keys]([&] { return fa_allow_dynamic_smem(args, reinterpret_cast<const void*>(kernel), smem_bytes); })) {
    return status;
  }
  kernel<<<grid, SPLIT::THREADS, smem_bytes, stream>>>(params, q_map, k_map, v_map);
  return static_cast<int>(cudaPeekAtLastError());
}

template <typename T, int HEAD_DIM>
int launch_for(const FaForwardArgs* args, cudaStream_t stream) {
  if (args->seq_k <= 64) return launch<T, Split<1, 1, 1>, HEAD_DIM>(args, stream);
  if (args->seq_k <= 128) return launch<T, Split<1, 1, 2>, HEAD_DIM>(args, stream);
  if (args->seq_k <= 256) return launch<T, Split<2, 2, 1>, HEAD_DIM>(args, stream);
  return launch<T, Split<2, 2, 2>, HEAD_DIM>(args, stream);
}

FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t stream) {
  if (int status = fa_check_abi(args)) return status;
#define LAUNCH_IF(DTYPE, HEAD_DIM_) \
  if (args->dtype == FA_DTYPE_##DTYPE && args->head_dim == HEAD_DIM_) return launch_for<DTYPE, HEAD_DIM_>(args, stream);
  FA_FOR_EACH_INSTANTIATION(LAUNCH_IF)
#undef LAUNCH_IF
  return fa_refuse(args, "no instantiation for dtype %d with head_dim %lld", args->dtype, static_cast<long long>(args->head_dim));
}

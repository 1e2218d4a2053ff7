// cluster_latency: shortens everything on the critical path outside the two matrix products.
// step:    one thread issues the TMA loads of Q and K before any other setup; keys are loaded in tiles of 64, all tiles of the
//          first warpgroup before those of the second; every partial result is sent once: the first warpgroup hands its own to
//          the second, and the two blocks exchange half of their rows; with few keys, one warpgroup of one block does all the
//          work, without a merge
// because: in cluster_tma at the target shape (1x8x512x64), measured with the SM's clock, K arrives after 1,440 of 5,900 cycles,
//          and its load is issued only after 940 of them; the two merges take 2,200 cycles; a call with 64 keys takes as long as
//          one with 512 keys
// expect:  3.6 to 4.0 us at the target shape, below 3.0 us at S = 64 and at S = 128
// diff:    most of the file: the prologue, the merges, the order of the loads and the kernels for one pass are new
// tile:    64 queries x 128 keys per warpgroup, 2 warpgroups per block, 2 blocks per cluster; up to 256 keys: 64 keys per
//          warpgroup; up to 128 keys: 1 warpgroup, 1 block; 98 KB of shared memory per block, 192 KB at D = 128
// takes:   fp16 and bf16, D = 64 and 128, any S_q >= 1 and S_kv >= 0, top-left and bottom-right causal masks, grouped heads;
//          rows contiguous and 16-byte aligned, with strides that TMA accepts
#include <math_constants.h>

#include <type_traits>

#include "fa/entry.h"
#include "fa/hopper.cuh"
#include "fa/launch.h"
#include "fa/omit.cuh"
#include "fa/params.cuh"
#include "fa/partial_row.cuh"
#include "fa/ptx.cuh"
#include "fa/softmax.cuh"
#include "fa/tensor_map.h"
#include "fa/tile.cuh"
#include "fa/tma_tile.cuh"
#include "fa/warp.cuh"

using fa::BOX_COLUMNS, fa::MMA_K, fa::MMA_M, fa::MMA_N, fa::QUAD, fa::WARP;

// How the work is divided:
// - A block computes 64 queries of one head, because a wgmma always computes 64 rows.
// - The warpgroups of a block share these queries and take different keys, so that one warpgroup computes while the other is
//   stalled.
// - The blocks of a cluster also share the queries and take different keys, because an SM loads only 64 bytes per cycle.  At
//   the target shape, 8 heads x 8 query tiles x 2 blocks occupy 128 of 132 SMs.
// - A pass is one iteration of the main loop: the cluster loads PASS_KEYS keys at once, and each warpgroup computes S, P and O
//   for its GROUP_KEYS of them.
// - After the last pass, the partial results (O, m and l) are merged: first those of the warpgroups, then those of the blocks.

// The barriers of this kernel and what each guarantees.
enum Barrier {
  NONE,
  Q_FULL,                // TMA has written Q
  K_FULL,                // TMA has written one key tile of K
  V_FULL,                // TMA has written V of the warpgroup
  GROUP_PARTIAL_STORED,  // the first warpgroup has stored its partial O, m and l
  PEER_M_AND_L_FULL,     // the partial m and l of the other block have arrived
  PEER_O_FULL,           // the partial O of the other block has arrived
};

// The phases of this kernel.
enum Phase { NO_PHASE, LOAD, QK, SOFTMAX, PV, MERGE };

// What a kernel may assume about the keys.  The compiler then removes the code for cases that cannot occur.
enum KeyAssumption {
  ANY_KEYS,       // no assumption
  ONE_PASS,       // every block needs exactly one pass, and scale >= 0: no loop, and no score is negated
  ONE_FULL_PASS,  // as ONE_PASS, with exactly PASS_KEYS keys, which every query sees: no score is masked either
};

constexpr int BLOCK_M = 64;                // the rows of a wgmma
constexpr int KEY_TILE = 64;               // keys per TMA box
constexpr int N_TILES = KEY_TILE / MMA_N;  // 8-key tiles of S in a key tile
constexpr int LANE_ROWS = 2;               // rows that a lane holds: r and r + 8
constexpr int GROUP_THREADS = 128;         // threads of a warpgroup
template <int HEAD_DIM>
constexpr int TILE_BYTES = fa::IS_OMITTED_PHASE<LOAD> ? 0 : KEY_TILE * HEAD_DIM * 2;  // 64 rows of Q, K or V

// How the keys of a pass are divided: CLUSTER blocks share them, GROUPS warpgroups share the keys of a block, and the keys of a
// warpgroup are GROUP_TILES tiles of KEY_TILE keys.
template <int CLUSTER_, int GROUPS_, int GROUP_TILES_>
struct Split {
  static constexpr int CLUSTER = CLUSTER_, GROUPS = GROUPS_, GROUP_TILES = GROUP_TILES_;
  static constexpr int GROUP_KEYS = GROUP_TILES * KEY_TILE, BLOCK_KEYS = GROUPS * GROUP_KEYS, PASS_KEYS = CLUSTER * BLOCK_KEYS;
  static constexpr int THREADS = GROUPS * GROUP_THREADS;
  static_assert(CLUSTER <= LANE_ROWS, "after the exchange, each block stores one of the LANE_ROWS rows of every lane");
  static_assert(GROUPS <= 2, "the first warpgroup hands its partial result to the second");
  static_assert(CLUSTER == 1 || GROUPS == 2, "the exchange between blocks includes the merge of two warpgroups");
};

struct Empty {};  // in place of a buffer that is not needed

template <typename T, typename SPLIT, int HEAD_DIM>
struct Smem {
  static constexpr int D_TILES = HEAD_DIM / MMA_N;
  // Q, K and V: [HEAD_DIM / BOX_COLUMNS, 64 rows, BOX_COLUMNS]
  alignas(1024) T q[BLOCK_M * HEAD_DIM];
  alignas(1024) T k[SPLIT::GROUPS][SPLIT::GROUP_TILES][KEY_TILE * HEAD_DIM];
  alignas(1024) T v[SPLIT::GROUPS][SPLIT::GROUP_TILES][KEY_TILE * HEAD_DIM];
  std::conditional_t<(SPLIT::GROUPS > 1), fa::PartialRow<D_TILES>[LANE_ROWS], Empty> group_partial;  // of the first warpgroup
  std::conditional_t<(SPLIT::CLUSTER > 1), fa::PackedPartialRow<D_TILES>, Empty> peer_partial;            // of the other block
  uint64_t k_full[SPLIT::GROUPS][SPLIT::GROUP_TILES];  // mbarriers of K_FULL; the first one also counts the bytes of Q
  uint64_t v_full[SPLIT::GROUPS];                    // mbarriers of V_FULL
  uint64_t peer_m_and_l_full, peer_o_full;               // mbarriers of PEER_M_AND_L_FULL and PEER_O_FULL
};

template <int HEAD_DIM, typename T>
__device__ __forceinline__ void load_tile(
    T* to_smem, const CUtensorMap& map, int first_row, int head, int batch, uint64_t* barrier_smem) {
  if (!fa::IS_OMITTED_PHASE<LOAD>) fa::load_tile<HEAD_DIM, KEY_TILE>(to_smem, map, first_row, head, batch, barrier_smem);
}

// Loads K of one pass.  Called by one thread.  All tiles of the first warpgroup come before those of the second, so that the two
// take turns at the exponential unit: the first one uses it while K of the second one is still being loaded.
template <typename T, typename SPLIT, int HEAD_DIM>
__device__ __forceinline__ void load_k(
    Smem<T, SPLIT, HEAD_DIM>& smem, const CUtensorMap& map, const fa::TmaWorkTile& work, int block_first_key, int q_bytes) {
#pragma unroll
  for (int g = 0; g < SPLIT::GROUPS; ++g) {
#pragma unroll
    for (int t = 0; t < SPLIT::GROUP_TILES; ++t) {
      fa::mbarrier_arrive_expect_tx(&smem.k_full[g][t], TILE_BYTES<HEAD_DIM> + (g + t > 0 ? 0 : q_bytes));
      const int tile_first_key = block_first_key + (g * SPLIT::GROUP_TILES + t) * KEY_TILE;
      load_tile<HEAD_DIM>(smem.k[g][t], map, tile_first_key, work.kv_head, work.batch, &smem.k_full[g][t]);
    }
  }
}

// Loads V of one pass in the same order.  Called by one thread.
template <typename T, typename SPLIT, int HEAD_DIM>
__device__ __forceinline__ void load_v(
    Smem<T, SPLIT, HEAD_DIM>& smem, const CUtensorMap& map, const fa::TmaWorkTile& work, int block_first_key) {
#pragma unroll
  for (int g = 0; g < SPLIT::GROUPS; ++g) {
    fa::mbarrier_arrive_expect_tx(&smem.v_full[g], SPLIT::GROUP_TILES * TILE_BYTES<HEAD_DIM>);
#pragma unroll
    for (int t = 0; t < SPLIT::GROUP_TILES; ++t) {
      const int tile_first_key = block_first_key + (g * SPLIT::GROUP_TILES + t) * KEY_TILE;
      load_tile<HEAD_DIM>(smem.v[g][t], map, tile_first_key, work.kv_head, work.batch, &smem.v_full[g]);
    }
  }
}

// Uses P in the ablation without P V, so that the compiler does not remove the computation of P.
__device__ __forceinline__ void keep_p(uint32_t& sink, const uint32_t (&p)[4]) { sink ^= p[0] ^ p[1] ^ p[2] ^ p[3]; }

// Initialises the mbarriers and loads Q, and K and V of the first pass.  Called by one thread.  It issues the loads of Q and K first;
// the rest of the setup overlaps with them.
template <typename T, typename SPLIT, int HEAD_DIM>
__device__ __forceinline__ void load_first_pass(Smem<T, SPLIT, HEAD_DIM>& smem, const CUtensorMap& q_map, const CUtensorMap& k_map,
                                                const CUtensorMap& v_map, const fa::TmaWorkTile& work, int rank) {
#pragma unroll
  for (int i = 0; i < SPLIT::GROUPS * SPLIT::GROUP_TILES; ++i) {
    fa::mbarrier_init(&smem.k_full[i / SPLIT::GROUP_TILES][i % SPLIT::GROUP_TILES], 1);
  }
  fa::fence_mbarrier_init();
  if (work.passes > 0) {
    load_tile<HEAD_DIM>(smem.q, q_map, work.first_query, work.head, work.batch, &smem.k_full[0][0]);
    load_k(smem, k_map, work, rank * SPLIT::BLOCK_KEYS, TILE_BYTES<HEAD_DIM>);
  }
#pragma unroll
  for (int g = 0; g < SPLIT::GROUPS; ++g) fa::mbarrier_init(&smem.v_full[g], 1);
  if constexpr (SPLIT::CLUSTER > 1) {
    fa::mbarrier_init(&smem.peer_m_and_l_full, 1);
    fa::mbarrier_init(&smem.peer_o_full, 1);
  }
  fa::fence_mbarrier_init();
  if (work.passes > 0) load_v(smem, v_map, work, rank * SPLIT::BLOCK_KEYS);
  if constexpr (SPLIT::CLUSTER > 1) {
    fa::mbarrier_arrive_expect_tx(&smem.peer_m_and_l_full, sizeof(smem.peer_partial.m_and_l));
    fa::mbarrier_arrive_expect_tx(&smem.peer_o_full, sizeof(smem.peer_partial.o));
  }
}

// S = Q K^T for the key tiles of a warpgroup, one after another, as their K arrives.  The wgmmas of a tile are one group.
template <typename T, typename SPLIT, int HEAD_DIM>
__device__ __forceinline__ void multiply_qk(
    float (&s)[SPLIT::GROUP_TILES][N_TILES][4], Smem<T, SPLIT, HEAD_DIM>& smem, int group, uint32_t parity) {
  if (group > 0) fa::wait<Q_FULL>(&smem.k_full[0][0], parity);  // this mbarrier also counts the bytes of Q
#pragma unroll
  for (int t = 0; t < SPLIT::GROUP_TILES; ++t) {
    fa::wait<K_FULL>(&smem.k_full[group][t], parity);
    const uint64_t q = fa::wgmma_descriptor(smem.q), k = fa::wgmma_descriptor(smem.k[group][t]);
    fa::wgmma_fence();
#pragma unroll
    for (int d = 0; d < (fa::IS_OMITTED_PHASE<QK> ? MMA_K : HEAD_DIM); d += MMA_K) {
      const int offset = (d / BOX_COLUMNS * KEY_TILE * BOX_COLUMNS + d % BOX_COLUMNS) * sizeof(T) >> 4;  // in units of 16 bytes
      fa::wgmma_m64k16<T, 0>(s[t], q + offset, k + offset, d > 0);
    }
    fa::wgmma_commit_group();
  }
}

__device__ __forceinline__ void negate_and_mask(
    float (&s)[N_TILES][4], bool is_negated, int seq_k, int row_diagonal, int tile_first_key, int lane) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int limit = min(seq_k, row_diagonal + i / 2 * 8) - tile_first_key;
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) {
      if (is_negated) s[n][i] = -s[n][i];
      if (n * MMA_N + lane % QUAD * 2 + i % 2 >= limit) s[n][i] = -CUDART_INF_F;
    }
  }
}

// The maximum of this lane's scores of a row.  A tree reduction has a shorter dependency chain than a loop.
__device__ __forceinline__ float tree_max(const float (&s)[N_TILES][4], int r) {
  float partial_max[N_TILES];
#pragma unroll
  for (int n = 0; n < N_TILES; ++n) partial_max[n] = fmaxf(s[n][2 * r], s[n][2 * r + 1]);
#pragma unroll
  for (int stride = N_TILES / 2; stride > 0; stride /= 2) {
#pragma unroll
    for (int n = 0; n < stride; ++n) partial_max[n] = fmaxf(partial_max[n], partial_max[n + stride]);
  }
  return partial_max[0];
}

// Waits for S of the key tiles, one after another, masks it, and finds the row max of this lane.
template <KeyAssumption ASSUMPTION, int GROUP_TILES>
__device__ __forceinline__ void mask_and_max(float (&m_new)[LANE_ROWS], float (&s)[GROUP_TILES][N_TILES][4], const fa::TmaParams& params,
                                             const fa::TmaWorkTile& work, int group_first_key, int lane_row, int lane) {
#pragma unroll
  for (int t = 0; t < GROUP_TILES; ++t) {
    if (t < GROUP_TILES - 1) {
      fa::wgmma_wait_group<1>(s[t]);
    } else {
      fa::wgmma_wait_group<0>(s[t]);
    }
    // Tiles that every query of the block sees completely are not masked.  S is negated if the scale is negative, because P is
    // computed with the absolute value of the scale.
    const int tile_first_key = group_first_key + t * KEY_TILE;
    const bool is_negated = ASSUMPTION == ANY_KEYS && params.signed_scale_log2 < 0.0f;
    const bool is_masked = ASSUMPTION != ONE_FULL_PASS && tile_first_key + KEY_TILE > min(params.seq_k, work.diagonal);
    if (is_negated || is_masked) negate_and_mask(s[t], is_negated, params.seq_k, work.diagonal + lane_row, tile_first_key, lane);
#pragma unroll
    for (int r = 0; r < LANE_ROWS && !fa::IS_OMITTED_PHASE<SOFTMAX>; ++r) m_new[r] = fmaxf(m_new[r], tree_max(s[t], r));
  }
}

// In the ablation without softmax, P is S.
template <typename T>
__device__ __forceinline__ void round_fragment(uint32_t (&p)[4], const float (&s)[N_TILES][4], int n) {
#pragma unroll
  for (int i = 0; i < 4; ++i) p[i] = fa::cvt_rn_x2<T>(s[n + i / 2][2 * (i % 2)], s[n + i / 2][2 * (i % 2) + 1]);
}

// Merges the rows of two blocks: sends row 1 - KEPT to the other block, and merges and stores row KEPT.
template <int KEPT, typename T, typename SPLIT, int HEAD_DIM>
__device__ __forceinline__ void exchange_rows(
    float (&o)[HEAD_DIM / MMA_N][4], float (&m)[LANE_ROWS], float (&l)[LANE_ROWS], const fa::MergeWeights (&weights)[LANE_ROWS],
    Smem<T, SPLIT, HEAD_DIM>& smem, const fa::TmaParams& params, const fa::TmaWorkTile& work, int lane_row,
    int thread_in_group, int lane) {
  constexpr int SENT = 1 - KEPT, PEER_RANK = SENT;  // the other block finishes row SENT
  const int query = work.first_query + lane_row + KEPT * 8;
  if constexpr (fa::IS_OMITTED_PHASE<MERGE>) {
    fa::store_row<T, SPLIT::CLUSTER>(o, KEPT, m[KEPT], l[KEPT], params, work, query, lane);
    return;
  }
  const auto peer_address = [](const void* address_smem) { return fa::mapa(fa::smem_address(address_smem), PEER_RANK); };
  fa::st_async(peer_address(&smem.peer_partial.m_and_l[thread_in_group]), make_float2(m[SENT], l[SENT]),
               peer_address(&smem.peer_m_and_l_full));
  fa::merge_row(o, SENT, weights[SENT].own, smem.group_partial[SENT], weights[SENT].incoming);
  fa::send_row(o, SENT, smem.peer_partial, &smem.peer_o_full, peer_address);
  fa::merge_row(o, KEPT, weights[KEPT].own, smem.group_partial[KEPT], weights[KEPT].incoming);
  fa::wait<PEER_M_AND_L_FULL>(&smem.peer_m_and_l_full, 0);
  const fa::MergeWeights peer_weights = fa::merge_m_and_l(m[KEPT], l[KEPT], smem.peer_partial.m_and_l[thread_in_group]);
  l[KEPT] = fa::sum_of_quad(l[KEPT]);
  const float inverse_l = fa::fast_inverse_of(l[KEPT]);
  fa::wait<PEER_O_FULL>(&smem.peer_o_full, 0);  // this block must not exit earlier, because the other one sends to it
  fa::merge_row(o, KEPT, peer_weights.own * inverse_l, smem.peer_partial, peer_weights.incoming * inverse_l);
  fa::store_row<T, SPLIT::CLUSTER>(o, KEPT, m[KEPT], l[KEPT], params, work, query, lane);
}

// Without a second block: merges what the first warpgroup has handed on, normalises and stores both rows.
template <typename T, typename SPLIT, int HEAD_DIM>
__device__ __forceinline__ void store_rows(
    float (&o)[HEAD_DIM / MMA_N][4], const float (&m)[LANE_ROWS], float (&l)[LANE_ROWS], const fa::MergeWeights (&weights)[LANE_ROWS],
    Smem<T, SPLIT, HEAD_DIM>& smem, const fa::TmaParams& params, const fa::TmaWorkTile& work, int lane_row,
    int lane) {
#pragma unroll
  for (int r = 0; r < LANE_ROWS; ++r) {
    l[r] = fa::sum_of_quad(l[r]);
    const float inverse_l = fa::fast_inverse_of(l[r]);
    if constexpr (SPLIT::GROUPS > 1) {
      fa::merge_row(o, r, weights[r].own * inverse_l, smem.group_partial[r], weights[r].incoming * inverse_l);
    } else {
      fa::scale_row(o, r, inverse_l);
    }
    fa::store_row<T, SPLIT::CLUSTER>(o, r, m[r], l[r], params, work, work.first_query + lane_row + r * 8, lane);
  }
}

// The number of blocks that an SM must be able to hold at once.  It limits the registers per thread.  The ANY_KEYS kernel needs
// four warpgroups per SM, which hide each other's latency when there are more blocks than SMs.  The kernels for one pass gain more
// from additional registers.  At D = 128, the shared memory of an SM does not hold two blocks with the largest tile.
template <typename SPLIT, int HEAD_DIM, KeyAssumption ASSUMPTION>
constexpr int blocks_per_sm() {
  return ASSUMPTION != ANY_KEYS || HEAD_DIM > 64 ? 1 : 4 * GROUP_THREADS / SPLIT::THREADS;
}

template <typename T, typename SPLIT, int HEAD_DIM, KeyAssumption ASSUMPTION>
__global__ void __cluster_dims__(SPLIT::CLUSTER) __launch_bounds__(SPLIT::THREADS, blocks_per_sm<SPLIT, HEAD_DIM, ASSUMPTION>())
    cluster_latency_kernel(const fa::TmaParams params, const __grid_constant__ CUtensorMap q_map,
                           const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<Smem<T, SPLIT, HEAD_DIM>*>(smem_bytes);
  constexpr int D_TILES = HEAD_DIM / MMA_N;  // 8-column tiles of O
  constexpr int GROUPS = SPLIT::GROUPS, GROUP_TILES = SPLIT::GROUP_TILES, LAST_GROUP = GROUPS - 1;
  const int group = threadIdx.x / GROUP_THREADS, thread_in_group = threadIdx.x % GROUP_THREADS, lane = threadIdx.x % WARP;
  const int rank = blockIdx.x % SPLIT::CLUSTER;
  fa::TmaWorkTile work = fa::make_tma_work_tile<BLOCK_M, SPLIT::CLUSTER, SPLIT::PASS_KEYS>(params);
  if (ASSUMPTION != ANY_KEYS) work.passes = 1;

  // Load Q, K and V.
  if (threadIdx.x < WARP && fa::elect_sync()) load_first_pass(smem, q_map, k_map, v_map, work, rank);
  __syncwarp();
  if (SPLIT::CLUSTER > 1) fa::barrier_cluster_arrive_relaxed();
  __syncthreads();  // the mbarriers of this block are initialised
  if (SPLIT::CLUSTER > 1) fa::barrier_cluster_wait();  // all blocks run and have initialised their mbarriers

  const int lane_row = thread_in_group / WARP * MMA_M + lane / QUAD;  // this lane holds rows lane_row and lane_row + 8
  const float scale_log2 = fabsf(params.signed_scale_log2);
  float o[D_TILES][4] = {};
  float m[LANE_ROWS] = {-CUDART_INF_F, -CUDART_INF_F};  // unscaled row max at the last rescale
  float l[LANE_ROWS] = {};                              // this lane's part of the running row sum
  uint32_t ablation_sink = 0;

  for (int pass = 0; pass < work.passes; ++pass) {
    const int block_first_key = pass * SPLIT::PASS_KEYS + rank * SPLIT::BLOCK_KEYS;
    const int group_first_key = block_first_key + group * SPLIT::GROUP_KEYS;

    // Load K and V; the loads of the first pass are in flight.
    if (pass > 0) {
      __syncthreads();  // no thread still reads the previous K and V or waits for their mbarriers
      if (threadIdx.x < WARP && fa::elect_sync()) {
        load_k(smem, k_map, work, block_first_key, 0);
        load_v(smem, v_map, work, block_first_key);
      }
      __syncwarp();
    }

    // S = Q K^T
    float s[GROUP_TILES][N_TILES][4];
    multiply_qk(s, smem, group, pass % 2);

    // mask, row max
    float m_new[LANE_ROWS] = {m[0], m[1]};
    mask_and_max<ASSUMPTION>(m_new, s, params, work, group_first_key, lane_row, lane);
    bool needs_rescale = false;
#pragma unroll
    for (int r = 0; r < LANE_ROWS; ++r) {
      m_new[r] = fa::max_of_quad(m_new[r]);
      // If only m is -inf, the difference is inf and the comparison true.  If both are, it is NaN and the comparison false.
      needs_rescale |= (m_new[r] - m[r]) * scale_log2 > fa::RESCALE_THRESHOLD_LOG2;
    }

    // rescale, if any row of the warp needs it; the first pass has nothing to rescale
    if (pass == 0) {
      m[0] = m_new[0], m[1] = m_new[1];
    } else if (__any_sync(0xffffffffu, needs_rescale)) {
      fa::rescale(o, m, l, m_new, scale_log2);
    }

    const float m_log2[LANE_ROWS] = {fa::finite_log2(m[0], scale_log2), fa::finite_log2(m[1], scale_log2)};
    uint32_t p[GROUP_TILES][N_TILES / 2][4];
#pragma unroll
    for (int t = 0; t < GROUP_TILES; ++t) {
#pragma unroll
      for (int n = 0; n < N_TILES; n += 2) {
        // P = exp2(S - m), row sum; two adjacent accumulator fragments of S form one A fragment of P
        if constexpr (fa::IS_OMITTED_PHASE<SOFTMAX>) {
          round_fragment<T>(p[t][n / 2], s[t], n);
        } else {
          fa::exp2_fragment<T>(p[t][n / 2], s[t], n, scale_log2, m_log2, l);
        }

        // O += P V, overlapping with the computation of the next P.  The wait for V is repeated, because ptxas moves no
        // exponential across a wait.  With a single wait, it would compute all exponentials before the first P V.
        if (n % (N_TILES / 2) == 0) fa::wait<V_FULL>(&smem.v_full[group], pass % 2);
        if constexpr (fa::IS_OMITTED_PHASE<PV>) {
          keep_p(ablation_sink, p[t][n / 2]);
          continue;
        }
        fa::wgmma_fence();
        const uint64_t v = fa::wgmma_descriptor(smem.v[group][t] + n * MMA_N * BOX_COLUMNS, KEY_TILE * BOX_COLUMNS * sizeof(T));
        fa::wgmma_m64k16<T, 1>(o, p[t][n / 2], v, true);
        fa::wgmma_commit_group();
      }
    }
    fa::wgmma_wait_group<0>(o);
  }

  if (fa::IS_OMITTED_PHASE<PV> && ablation_sink == 0x7fff7fff) o[0][0] = 1.0f;  // practically never, which the compiler cannot know

  // Merge the warpgroups.  The first one hands its partial O, m and l to the second one and returns.  The second one finishes,
  // because its keys came later.
#pragma unroll
  for (int r = 0; r < LANE_ROWS; ++r) m[r] = m[r] == -CUDART_INF_F ? m[r] : m[r] * scale_log2;  // m is in log2 from here on
  fa::MergeWeights weights[LANE_ROWS] = {{1.0f, 0.0f}, {1.0f, 0.0f}};
  if (GROUPS > 1 && fa::IS_OMITTED_PHASE<MERGE> && group < LAST_GROUP) return;
  if constexpr (GROUPS > 1 && !fa::IS_OMITTED_PHASE<MERGE>) {
    if (group < LAST_GROUP) {
      fa::store_partial_rows(smem.group_partial, o, m, l, thread_in_group);
      fa::barrier_arrive<SPLIT::THREADS>(1);  // named barrier 1 is GROUP_PARTIAL_STORED
      return;
    }
    fa::sync_threads<GROUP_PARTIAL_STORED, SPLIT::THREADS>(1);
#pragma unroll
    for (int r = 0; r < LANE_ROWS; ++r) weights[r] = fa::merge_m_and_l(m[r], l[r], smem.group_partial[r].m_and_l[thread_in_group]);
  }

  if constexpr (SPLIT::CLUSTER == 1) {
    store_rows(o, m, l, weights, smem, params, work, lane_row, lane);
  } else {
    // Merge the blocks.  Each block finishes one of the two rows of every lane, the one whose number is its rank, and sends the
    // other row to the other block.  So both blocks send at the same time, and each writes half of the output.
    if (rank == 0) {
      exchange_rows<0>(o, m, l, weights, smem, params, work, lane_row, thread_in_group, lane);
    } else {
      exchange_rows<1>(o, m, l, weights, smem, params, work, lane_row, thread_in_group, lane);
    }
  }
}

template <typename T, typename SPLIT, int HEAD_DIM>
int launch(const FaForwardArgs* args, cudaStream_t stream) {
  fa::Params all_params;
  if (int status = fa::make_params(args, BLOCK_M, SPLIT::CLUSTER, &all_params)) return status;
  const fa::TmaParams params = fa::tma_params_of(all_params);
  CUtensorMap q_map = {}, k_map = {}, v_map = {};
  if (args->seq_k > 0) {
    constexpr fa::Box BOX = {KEY_TILE, BOX_COLUMNS};
    static_assert(KEY_TILE == BLOCK_M, "the boxes of Q, K and V have the same number of rows");
    if (int status = fa::make_tensor_map(&q_map, args, args->q, args->heads, args->seq_q, args->q_stride, BOX)) return status;
    if (int status = fa::make_tensor_map(&k_map, args, args->k, args->kv_heads, args->seq_k, args->k_stride, BOX)) return status;
    if (int status = fa::make_tensor_map(&v_map, args, args->v, args->kv_heads, args->seq_k, args->v_stride, BOX)) return status;
  }
  const int query_tiles = (params.seq_q + BLOCK_M - 1) / BLOCK_M;
  const dim3 grid(all_params.heads * SPLIT::CLUSTER, query_tiles, static_cast<unsigned>(args->batch));
  // With the largest tile of D = 64, an SM holds two blocks of the ANY_KEYS kernel, but only one of the kernels for one pass.  If
  // there are more blocks than SMs, the ANY_KEYS kernel is therefore faster.
  constexpr bool ONLY_ANY_KEYS_FITS_TWICE = HEAD_DIM == 64 && SPLIT::BLOCK_KEYS == 256;
  const bool prefers_any_keys = ONLY_ANY_KEYS_FITS_TWICE && uint64_t(grid.x) * grid.y * grid.z > uint64_t(fa::sm_count());
  const bool sees_keys = min(params.seq_k, params.first_diagonal + BLOCK_M - 1) > 0;  // if the first block sees one, all do
  const bool is_one_pass = sees_keys && params.seq_k <= SPLIT::PASS_KEYS && params.signed_scale_log2 >= 0.0f && !prefers_any_keys;
  const bool is_full_pass = is_one_pass && params.seq_k == SPLIT::PASS_KEYS && params.first_diagonal >= params.seq_k;
  const KeyAssumption assumption = is_full_pass ? ONE_FULL_PASS : is_one_pass ? ONE_PASS : ANY_KEYS;
  static constexpr decltype(&cluster_latency_kernel<T, SPLIT, HEAD_DIM, ANY_KEYS>) KERNELS[] = {
      &cluster_latency_kernel<T, SPLIT, HEAD_DIM, ANY_KEYS>, &cluster_latency_kernel<T, SPLIT, HEAD_DIM, ONE_PASS>,
      &cluster_latency_kernel<T, SPLIT, HEAD_DIM, ONE_FULL_PASS>};
  const auto kernel = KERNELS[assumption];
  constexpr int smem_bytes = sizeof(Smem<T, SPLIT, HEAD_DIM>);
  static fa::OncePerDevice allow_smem[3];
  if (int status = allow_smem[assumption]([&] { return fa_allow_dynamic_smem(args, reinterpret_cast<const void*>(kernel), smem_bytes); })) {
    return status;
  }
  kernel<<<grid, SPLIT::THREADS, smem_bytes, stream>>>(params, q_map, k_map, v_map);
  return static_cast<int>(cudaPeekAtLastError());
}

// With few keys, fewer warpgroups and blocks share them, because a merge costs more than it gains.
template <typename T, int HEAD_DIM>
int launch_split_for_seq_k(const FaForwardArgs* args, cudaStream_t stream) {
  if (args->seq_k <= 64) return launch<T, Split<1, 1, 1>, HEAD_DIM>(args, stream);
  if (args->seq_k <= 128) return launch<T, Split<1, 1, 2>, HEAD_DIM>(args, stream);
  if (args->seq_k <= 256) return launch<T, Split<2, 2, 1>, HEAD_DIM>(args, stream);
  return launch<T, Split<2, 2, 2>, HEAD_DIM>(args, stream);
}

FA_FORWARD(launch_split_for_seq_k)

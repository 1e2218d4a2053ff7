// cluster_latency: kernels for few keys, and for keys that fit into one pass.
// step:    with few keys, fewer warpgroups and blocks share them, down to one warpgroup of one block, without a merge; kernels for
//          problems of one pass, without a loop, and without a mask if all queries see all keys; D = 128
// because: in cluster_tma, a call with 64 keys takes as long as one with 512 keys; branches around the loop and the mask jump to
//          instructions that are not cached
// expect:  3.6 to 4.0 us at the target shape (1x8x512x64), below 3.0 us at S = 64 and at S = 128
// tile:    64 queries x 128 keys per warpgroup, 2 warpgroups per block, 2 blocks per cluster; up to 256 keys: 64 keys per
//          warpgroup; up to 128 keys: 1 warpgroup, 1 block; 98 KB of shared memory per block, 192 KB at D = 128
// takes:   fp16 and bf16, D = 64 and 128, any S_q >= 1 and S_kv >= 0, top-left and bottom-right causal masks, grouped heads;
//          rows contiguous and 16-byte aligned, with strides that TMA accepts
#include <math_constants.h>

#include <type_traits>

#include "fa/ablation.cuh"
#include "fa/entry.h"
#include "fa/hopper.cuh"
#include "fa/key_tiles.cuh"
#include "fa/launch.h"
#include "fa/omit.cuh"
#include "fa/packed_row.cuh"
#include "fa/params.cuh"
#include "fa/partial_row.cuh"
#include "fa/ptx.cuh"
#include "fa/softmax.cuh"
#include "fa/tensor_map.h"
#include "fa/tile.cuh"
#include "fa/tma_tile.cuh"
#include "fa/warp.cuh"

using fa::BOX_COLUMNS, fa::KEY_TILE, fa::MMA_M, fa::MMA_N, fa::QUAD, fa::WARP;

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

constexpr int BLOCK_M = 64;                   // the rows of a wgmma
constexpr int N_TILES = fa::KEY_TILE_SCORES;  // 8-key tiles of S in a key tile
constexpr int LANE_ROWS = 2;                  // rows that a lane holds: r and r + 8
constexpr int GROUP_THREADS = 128;            // threads of a warpgroup
constexpr bool LOADS = !fa::IS_OMITTED_PHASE<LOAD>;

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
  std::conditional_t<(SPLIT::CLUSTER > 1), fa::PackedPartialRow<D_TILES>, Empty> peer_partial;       // of the other block
  uint64_t k_full[SPLIT::GROUPS][SPLIT::GROUP_TILES];  // mbarriers of K_FULL; the first one also counts the bytes of Q
  uint64_t v_full[SPLIT::GROUPS];                      // mbarriers of V_FULL
  uint64_t peer_m_and_l_full, peer_o_full;             // mbarriers of PEER_M_AND_L_FULL and PEER_O_FULL
};

// Initialises the mbarriers and loads Q, and K and V of the first pass.  Called by one thread.  It issues the loads of Q and K first;
// the rest of the setup overlaps with them.
template <typename T, typename SPLIT, int HEAD_DIM>
__device__ __forceinline__ void load_first_pass(Smem<T, SPLIT, HEAD_DIM>& smem, const CUtensorMap& q_map, const CUtensorMap& k_map,
                                                const CUtensorMap& v_map, const fa::TmaWorkTile& work, int rank) {
  constexpr int GROUPS = SPLIT::GROUPS, GROUP_TILES = SPLIT::GROUP_TILES, BLOCK_KEYS = SPLIT::BLOCK_KEYS;
#pragma unroll
  for (int i = 0; i < GROUPS * GROUP_TILES; ++i) fa::mbarrier_init(&smem.k_full[i / GROUP_TILES][i % GROUP_TILES], 1);
  fa::fence_mbarrier_init();
  if (work.passes > 0) {
    if (LOADS) fa::load_tile<HEAD_DIM, BLOCK_M>(smem.q, q_map, work.first_query, work.head, work.batch, &smem.k_full[0][0]);
    fa::load_k<HEAD_DIM, LOADS>(smem, k_map, work, rank * BLOCK_KEYS, LOADS ? BLOCK_M * HEAD_DIM * 2 : 0);
  }
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) fa::mbarrier_init(&smem.v_full[g], 1);
  if constexpr (SPLIT::CLUSTER > 1) {
    fa::mbarrier_init(&smem.peer_m_and_l_full, 1);
    fa::mbarrier_init(&smem.peer_o_full, 1);
  }
  fa::fence_mbarrier_init();
  if (work.passes > 0) fa::load_v<HEAD_DIM, LOADS>(smem, v_map, work, rank * BLOCK_KEYS);
  if constexpr (SPLIT::CLUSTER > 1) {
    fa::mbarrier_arrive_expect_tx(&smem.peer_m_and_l_full, sizeof(smem.peer_partial.m_and_l));
    fa::mbarrier_arrive_expect_tx(&smem.peer_o_full, sizeof(smem.peer_partial.o));
  }
}

// Waits for S of the key tiles, one after another, masks it, and finds the row max of this lane.
template <KeyAssumption ASSUMPTION, int GROUP_TILES>
__device__ __forceinline__ void mask_and_max(float (&m_new)[LANE_ROWS], float (&s)[GROUP_TILES][N_TILES][4], const fa::TmaParams& params,
                                             const fa::TmaWorkTile& work, int group_first_key, int lane_row, int lane) {
#pragma unroll
  for (int t = 0; t < GROUP_TILES; ++t) {
    fa::wait_for_s(s, t);
    // Tiles that every query of the block sees completely are not masked.  S is negated if the scale is negative, because P is
    // computed with the absolute value of the scale.
    const int tile_first_key = group_first_key + t * KEY_TILE;
    const bool is_negated = ASSUMPTION == ANY_KEYS && params.signed_scale_log2 < 0.0f;
    const bool is_masked = ASSUMPTION != ONE_FULL_PASS && tile_first_key + KEY_TILE > min(params.seq_k, work.diagonal);
    if (is_negated || is_masked) fa::negate_and_mask(s[t], is_negated, params.seq_k, work.diagonal + lane_row, tile_first_key, lane);
#pragma unroll
    for (int r = 0; r < LANE_ROWS && !fa::IS_OMITTED_PHASE<SOFTMAX>; ++r) m_new[r] = fmaxf(m_new[r], fa::tree_max(s[t], r));
  }
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
  constexpr int CLUSTER = SPLIT::CLUSTER, GROUPS = SPLIT::GROUPS, GROUP_TILES = SPLIT::GROUP_TILES, THREADS = SPLIT::THREADS;
  constexpr int GROUP_KEYS = SPLIT::GROUP_KEYS, BLOCK_KEYS = SPLIT::BLOCK_KEYS, PASS_KEYS = SPLIT::PASS_KEYS;
  const int group = threadIdx.x / GROUP_THREADS, thread_in_group = threadIdx.x % GROUP_THREADS, lane = threadIdx.x % WARP;
  const int rank = blockIdx.x % CLUSTER;
  fa::TmaWorkTile work = fa::make_tma_work_tile<BLOCK_M, CLUSTER, PASS_KEYS>(params);
  if (ASSUMPTION != ANY_KEYS) work.passes = 1;

  // Load Q, K and V.
  if (threadIdx.x < WARP && fa::elect_sync()) load_first_pass(smem, q_map, k_map, v_map, work, rank);
  __syncwarp();
  if (CLUSTER > 1) fa::barrier_cluster_arrive_relaxed();
  __syncthreads();  // the mbarriers of this block are initialised
  if (CLUSTER > 1) fa::barrier_cluster_wait();  // all blocks run and have initialised their mbarriers

  const int lane_row = thread_in_group / WARP * MMA_M + lane / QUAD;  // this lane holds rows lane_row and lane_row + 8
  const float scale_log2 = fabsf(params.signed_scale_log2);
  float o[D_TILES][4] = {};
  float m[LANE_ROWS] = {-CUDART_INF_F, -CUDART_INF_F};  // unscaled row max at the last rescale
  float l[LANE_ROWS] = {};                              // this lane's part of the running row sum
  uint32_t ablation_sink = 0;

  for (int pass = 0; pass < work.passes; ++pass) {
    const int block_first_key = pass * PASS_KEYS + rank * BLOCK_KEYS;
    const int group_first_key = block_first_key + group * GROUP_KEYS;

    // Load K and V; the loads of the first pass are in flight.
    if (pass > 0) {
      __syncthreads();  // no thread still reads the previous K and V or waits for their mbarriers
      if (threadIdx.x < WARP && fa::elect_sync()) {
        fa::load_k<HEAD_DIM, LOADS>(smem, k_map, work, block_first_key, 0);
        fa::load_v<HEAD_DIM, LOADS>(smem, v_map, work, block_first_key);
      }
      __syncwarp();
    }

    // S = Q K^T
    float s[GROUP_TILES][N_TILES][4];
    fa::multiply_qk<Q_FULL, K_FULL, fa::IS_OMITTED_PHASE<QK> ? fa::MMA_K : HEAD_DIM, T>(s, smem, group, pass);

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
          fa::round_fragment<T>(p[t][n / 2], s[t], n);
        } else {
          fa::exp2_fragment<T>(p[t][n / 2], s[t], n, scale_log2, m_log2, l);
        }

        // O += P V, overlapping with the computation of the next P.  The wait for V is repeated, because ptxas moves no
        // exponential across a wait.  With a single wait, it would compute all exponentials before the first P V.
        if (n % (N_TILES / 2) == 0) fa::wait<V_FULL>(&smem.v_full[group], pass % 2);
        if constexpr (fa::IS_OMITTED_PHASE<PV>) {
          fa::keep_p(ablation_sink, p[t][n / 2]);
          continue;
        }
        fa::wgmma_fence();
        fa::wgmma_m64k16<T, 1>(o, p[t][n / 2], fa::v_descriptor(smem.v[group][t], n), true);
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
  if (GROUPS > 1 && fa::IS_OMITTED_PHASE<MERGE> && group < GROUPS - 1) return;
  if constexpr (GROUPS > 1 && !fa::IS_OMITTED_PHASE<MERGE>) {
    if (group < GROUPS - 1) {
      fa::store_partial_rows(smem.group_partial, o, m, l, thread_in_group);
      fa::barrier_arrive<THREADS>(1);  // named barrier 1 is GROUP_PARTIAL_STORED
      return;
    }
    fa::sync_threads<GROUP_PARTIAL_STORED, THREADS>(1);
#pragma unroll
    for (int r = 0; r < LANE_ROWS; ++r) weights[r] = fa::merge_m_and_l(m[r], l[r], smem.group_partial[r].m_and_l[thread_in_group]);
  }

  if constexpr (CLUSTER == 1) {
    store_rows(o, m, l, weights, smem, params, work, lane_row, lane);
  } else {
    // Merge the blocks.  Each block finishes one of the two rows of every lane, the one whose number is its rank, and sends the
    // other row to the other block.  So both blocks send at the same time, and each writes half of the output.
    constexpr bool MERGES = !fa::IS_OMITTED_PHASE<MERGE>;
    if (rank == 0) {
      fa::exchange_partial_rows<0, PEER_M_AND_L_FULL, PEER_O_FULL, T, MERGES>(o, m, l, weights, smem, params, work, lane_row, lane);
    } else {
      fa::exchange_partial_rows<1, PEER_M_AND_L_FULL, PEER_O_FULL, T, MERGES>(o, m, l, weights, smem, params, work, lane_row, lane);
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

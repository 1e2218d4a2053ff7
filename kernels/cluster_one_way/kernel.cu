// cluster_one_way: every partial result is sent once.
// step:    the first warpgroup hands its partial result to the second one, which finishes; the two blocks exchange one row of
//          every lane each
// because: in cluster_tma, the two merges take 2,200 of 5,900 cycles; in the first one, each warpgroup waits for the other, and
//          both reduce the row sums
// expect:  0.1 to 0.3 us less than cluster_tiles at the target shape (1x8x512x64)
// tile:    64 queries x 128 keys per warpgroup and block; 100 KB of shared memory per block
// takes:   fp16 and bf16, D = 64, any S_q >= 1 and S_kv >= 0, top-left and bottom-right causal masks, grouped heads; rows
//          contiguous and 16-byte aligned, with strides that TMA accepts
#include <math_constants.h>

#include "fa/entry.h"
#include "fa/hopper.cuh"
#include "fa/key_tiles.cuh"
#include "fa/launch.h"
#include "fa/omit.cuh"
#include "fa/params.cuh"
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

constexpr int HEAD_DIM = 64;
constexpr int CLUSTER = 2, GROUPS = 2;  // blocks, and warpgroups of a block
constexpr int BLOCK_M = 64;             // the rows of a wgmma
constexpr int GROUP_TILES = 2;          // key tiles of a warpgroup
constexpr int GROUP_KEYS = GROUP_TILES * KEY_TILE, BLOCK_KEYS = GROUPS * GROUP_KEYS;
constexpr int N_TILES = fa::KEY_TILE_SCORES;  // 8-key tiles of S in a key tile
constexpr int D_TILES = HEAD_DIM / MMA_N;
constexpr int PASS_KEYS = CLUSTER * BLOCK_KEYS;  // keys that a cluster loads in one pass
constexpr int LANE_ROWS = 2;                     // rows that a lane holds: r and r + 8
constexpr int GROUP_THREADS = 128;               // threads of a warpgroup
constexpr int THREADS = GROUPS * GROUP_THREADS;
constexpr int TILE_BYTES = KEY_TILE * HEAD_DIM * 2;  // 64 rows of Q, K or V

// One row of every lane of a warpgroup: the lane's elements of O as 16-byte vectors, m times scale * log2(e), and the lane's part
// of l.
struct PartialRow {
  float4 o[D_TILES / 2][GROUP_THREADS];
  float2 m_and_l[GROUP_THREADS];
};

template <typename T>
struct Smem {
  alignas(1024) T q[BLOCK_M * HEAD_DIM];
  alignas(1024) T k[GROUPS][GROUP_TILES][KEY_TILE * HEAD_DIM];
  alignas(1024) T v[GROUPS][GROUP_TILES][KEY_TILE * HEAD_DIM];
  PartialRow group_partial[LANE_ROWS];      // of the first warpgroup
  PartialRow peer_partial;                  // of the other block
  uint64_t k_full[GROUPS][GROUP_TILES];     // mbarriers of K_FULL; the first one also counts the bytes of Q
  uint64_t v_full[GROUPS];                  // mbarriers of V_FULL
  uint64_t peer_m_and_l_full, peer_o_full;  // mbarriers of PEER_M_AND_L_FULL and PEER_O_FULL
};

// Initialises the mbarriers and loads Q, and K and V of the first pass.  Called by one thread.  It issues the loads of Q and K first;
// the rest of the setup overlaps with them.
template <typename T>
__device__ __forceinline__ void load_first_pass(Smem<T>& smem, const CUtensorMap& q_map, const CUtensorMap& k_map,
                                                const CUtensorMap& v_map, const fa::TmaWorkTile& work, int rank) {
#pragma unroll
  for (int i = 0; i < GROUPS * GROUP_TILES; ++i) fa::mbarrier_init(&smem.k_full[i / GROUP_TILES][i % GROUP_TILES], 1);
  fa::fence_mbarrier_init();
  if (work.passes > 0) {
    fa::load_tile<HEAD_DIM, BLOCK_M>(smem.q, q_map, work.first_query, work.head, work.batch, &smem.k_full[0][0]);
    fa::load_k<HEAD_DIM>(smem, k_map, work, rank * BLOCK_KEYS, TILE_BYTES);
  }
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) fa::mbarrier_init(&smem.v_full[g], 1);
  fa::mbarrier_init(&smem.peer_m_and_l_full, 1);
  fa::mbarrier_init(&smem.peer_o_full, 1);
  fa::fence_mbarrier_init();
  if (work.passes > 0) fa::load_v<HEAD_DIM>(smem, v_map, work, rank * BLOCK_KEYS);
  fa::mbarrier_arrive_expect_tx(&smem.peer_m_and_l_full, sizeof(smem.peer_partial.m_and_l));
  fa::mbarrier_arrive_expect_tx(&smem.peer_o_full, sizeof(smem.peer_partial.o));
}

// Waits for S of the key tiles, one after another, masks it, and finds the row max of this lane.
__device__ __forceinline__ void mask_and_max(float (&m_new)[LANE_ROWS], float (&s)[GROUP_TILES][N_TILES][4], const fa::TmaParams& params,
                                             const fa::TmaWorkTile& work, int group_first_key, int lane_row, int lane) {
#pragma unroll
  for (int t = 0; t < GROUP_TILES; ++t) {
    fa::wait_for_s(s, t);
    // Tiles that every query of the block sees completely are not masked.  S is negated if the scale is negative, because P is
    // computed with the absolute value of the scale.
    const int tile_first_key = group_first_key + t * KEY_TILE;
    const bool is_negated = params.signed_scale_log2 < 0.0f;
    const bool is_masked = tile_first_key + KEY_TILE > min(params.seq_k, work.diagonal);
    if (is_negated || is_masked) fa::negate_and_mask(s[t], is_negated, params.seq_k, work.diagonal + lane_row, tile_first_key, lane);
#pragma unroll
    for (int r = 0; r < LANE_ROWS; ++r) m_new[r] = fmaxf(m_new[r], fa::tree_max(s[t], r));
  }
}

// Returns the four values of a lane's row in the fragments d and d + 1 of O.
__device__ __forceinline__ float4 o_vector(const float (&o)[D_TILES][4], int row, int d) {
  return make_float4(o[d][2 * row], o[d][2 * row + 1], o[d + 1][2 * row], o[d + 1][2 * row + 1]);
}

// Stores both rows of a lane, with m in log2 and the lane's part of l, for another warpgroup.
__device__ __forceinline__ void store_partial_rows(
    PartialRow (&partial_smem)[2], const float (&o)[D_TILES][4], const float (&m)[2], const float (&l)[2], int thread_in_group) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    partial_smem[r].m_and_l[thread_in_group] = make_float2(m[r], l[r]);
#pragma unroll
    for (int d = 0; d < D_TILES; d += 2) partial_smem[r].o[d / 2][thread_in_group] = o_vector(o, r, d);
  }
}

// Merges four incoming values into the same four values of O: o = o * weight + incoming * incoming_weight.
__device__ __forceinline__ void merge_vector(
    float (&o)[D_TILES][4], int row, int d, float weight, float4 incoming, float incoming_weight) {
  o[d][2 * row] = o[d][2 * row] * weight + incoming.x * incoming_weight;
  o[d][2 * row + 1] = o[d][2 * row + 1] * weight + incoming.y * incoming_weight;
  o[d + 1][2 * row] = o[d + 1][2 * row] * weight + incoming.z * incoming_weight;
  o[d + 1][2 * row + 1] = o[d + 1][2 * row + 1] * weight + incoming.w * incoming_weight;
}

// Merges an incoming row into a lane's row of O: o = o * weight + incoming * incoming_weight.
__device__ __forceinline__ void merge_row(
    float (&o)[D_TILES][4], int row, float weight, const PartialRow& incoming, float incoming_weight) {
#pragma unroll
  for (int d = 0; d < D_TILES; d += 2) {
    merge_vector(o, row, d, weight, incoming.o[d / 2][threadIdx.x % GROUP_THREADS], incoming_weight);
  }
}

// Sends a row of a lane's O to the other block, whose mbarrier counts the bytes.  `peer_address` is a function from an address in the
// shared memory of this block to the corresponding address in the other block.
template <typename PEER_ADDRESS>
__device__ __forceinline__ void send_row(
    const float (&o)[D_TILES][4], int row, PartialRow& partial_smem, uint64_t* barrier_smem, PEER_ADDRESS peer_address) {
#pragma unroll
  for (int d = 0; d < D_TILES; d += 2) {
    fa::st_async(peer_address(&partial_smem.o[d / 2][threadIdx.x % GROUP_THREADS]), o_vector(o, row, d), peer_address(barrier_smem));
  }
}

struct MergeWeights {
  float own, incoming;
};

// Merges m (in log2) and l of an incoming partial result into `m` and `l`.  Returns the weights for the sum of the two O.
__device__ __forceinline__ MergeWeights merge_m_and_l(float& m, float& l, float2 incoming_m_and_l) {
  const float m_merged = fmaxf(m, incoming_m_and_l.x), m_finite = m_merged == -CUDART_INF_F ? 0.0f : m_merged;
  const MergeWeights weights = {fa::ex2_approx_ftz(m - m_finite), fa::ex2_approx_ftz(incoming_m_and_l.x - m_finite)};
  m = m_merged;
  l = l * weights.own + incoming_m_and_l.y * weights.incoming;
  return weights;
}

// 1 / l, with a relative error of 2^-22; 0 for a row that sees no key.
__device__ __forceinline__ float fast_inverse_of(float l) { return l == 0.0f ? 0.0f : __fdividef(1.0f, l); }

// Merges the rows of the two blocks: sends row 1 - KEPT to the other block, and merges and stores row KEPT.
template <int KEPT, typename T>
__device__ __forceinline__ void exchange_partial_rows(
    float (&o)[D_TILES][4], float (&m)[LANE_ROWS], float (&l)[LANE_ROWS], const MergeWeights (&weights)[LANE_ROWS], Smem<T>& smem,
    const fa::TmaParams& params, const fa::TmaWorkTile& work, int lane_row, int lane) {
  constexpr int SENT = 1 - KEPT, PEER_RANK = SENT;  // the other block finishes row SENT
  const int thread_in_group = threadIdx.x % GROUP_THREADS, query = work.first_query + lane_row + KEPT * 8;
  const auto peer_address = [](const void* address_smem) { return fa::mapa(fa::smem_address(address_smem), PEER_RANK); };
  fa::st_async(peer_address(&smem.peer_partial.m_and_l[thread_in_group]), make_float2(m[SENT], l[SENT]),
               peer_address(&smem.peer_m_and_l_full));
  merge_row(o, SENT, weights[SENT].own, smem.group_partial[SENT], weights[SENT].incoming);
  send_row(o, SENT, smem.peer_partial, &smem.peer_o_full, peer_address);
  merge_row(o, KEPT, weights[KEPT].own, smem.group_partial[KEPT], weights[KEPT].incoming);
  fa::wait<PEER_M_AND_L_FULL>(&smem.peer_m_and_l_full, 0);
  const MergeWeights peer_weights = merge_m_and_l(m[KEPT], l[KEPT], smem.peer_partial.m_and_l[thread_in_group]);
  l[KEPT] = fa::sum_of_quad(l[KEPT]);
  const float inverse_l = fast_inverse_of(l[KEPT]);
  fa::wait<PEER_O_FULL>(&smem.peer_o_full, 0);  // this block must not exit earlier, because the other one sends to it
  merge_row(o, KEPT, peer_weights.own * inverse_l, smem.peer_partial, peer_weights.incoming * inverse_l);
  fa::store_row<T, CLUSTER>(o, KEPT, m[KEPT], l[KEPT], params, work, query, lane);
}

template <typename T>
__global__ void __cluster_dims__(CLUSTER) __launch_bounds__(THREADS) cluster_one_way_kernel(
    const fa::TmaParams params, const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
    const __grid_constant__ CUtensorMap v_map) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<Smem<T>*>(smem_bytes);
  const int group = threadIdx.x / GROUP_THREADS, thread_in_group = threadIdx.x % GROUP_THREADS, lane = threadIdx.x % WARP;
  const int rank = blockIdx.x % CLUSTER;
  const fa::TmaWorkTile work = fa::make_tma_work_tile<BLOCK_M, CLUSTER, PASS_KEYS>(params);

  // Load Q, K and V.
  if (threadIdx.x < WARP && fa::elect_sync()) load_first_pass(smem, q_map, k_map, v_map, work, rank);
  __syncwarp();
  fa::barrier_cluster_arrive_relaxed();
  __syncthreads();             // the mbarriers of this block are initialised
  fa::barrier_cluster_wait();  // both blocks run and have initialised their mbarriers

  const int lane_row = thread_in_group / WARP * MMA_M + lane / QUAD;  // this lane holds rows lane_row and lane_row + 8
  const float scale_log2 = fabsf(params.signed_scale_log2);
  float o[D_TILES][4] = {};
  float m[LANE_ROWS] = {-CUDART_INF_F, -CUDART_INF_F};  // unscaled row max at the last rescale
  float l[LANE_ROWS] = {};                              // this lane's part of the running row sum

  for (int pass = 0; pass < work.passes; ++pass) {
    const int block_first_key = pass * PASS_KEYS + rank * BLOCK_KEYS;
    const int group_first_key = block_first_key + group * GROUP_KEYS;

    // Load K and V; the loads of the first pass are in flight.
    if (pass > 0) {
      __syncthreads();  // no thread still reads the previous K and V or waits for their mbarriers
      if (threadIdx.x < WARP && fa::elect_sync()) {
        fa::load_k<HEAD_DIM>(smem, k_map, work, block_first_key, 0);
        fa::load_v<HEAD_DIM>(smem, v_map, work, block_first_key);
      }
      __syncwarp();
    }

    // S = Q K^T
    float s[GROUP_TILES][N_TILES][4];
    fa::multiply_qk<Q_FULL, K_FULL, HEAD_DIM, T>(s, smem, group, pass);

    // mask, row max
    float m_new[LANE_ROWS] = {m[0], m[1]};
    mask_and_max(m_new, s, params, work, group_first_key, lane_row, lane);
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
        fa::exp2_fragment<T>(p[t][n / 2], s[t], n, scale_log2, m_log2, l);

        // O += P V, overlapping with the computation of the next P.  The wait for V is repeated, because ptxas moves no
        // exponential across a wait.  With a single wait, it would compute all exponentials before the first P V.
        if (n % (N_TILES / 2) == 0) fa::wait<V_FULL>(&smem.v_full[group], pass % 2);
        fa::wgmma_fence();
        fa::wgmma_m64k16<T, 1>(o, p[t][n / 2], fa::v_descriptor(smem.v[group][t], n), true);
        fa::wgmma_commit_group();
      }
    }
    fa::wgmma_wait_group<0>(o);
  }

  // Merge the warpgroups.  The first one hands its partial O, m and l to the second one and returns.  The second one finishes,
  // because its keys came later.
#pragma unroll
  for (int r = 0; r < LANE_ROWS; ++r) m[r] = m[r] == -CUDART_INF_F ? m[r] : m[r] * scale_log2;  // m is in log2 from here on
  if (group < GROUPS - 1) {
    store_partial_rows(smem.group_partial, o, m, l, thread_in_group);
    fa::barrier_arrive<THREADS>(1);  // named barrier 1 is GROUP_PARTIAL_STORED
    return;
  }
  fa::sync_threads<GROUP_PARTIAL_STORED, THREADS>(1);
  MergeWeights weights[LANE_ROWS];
#pragma unroll
  for (int r = 0; r < LANE_ROWS; ++r) weights[r] = merge_m_and_l(m[r], l[r], smem.group_partial[r].m_and_l[thread_in_group]);

  // Merge the blocks.  Each block finishes one of the two rows of every lane, the one whose number is its rank, and sends the
  // other row to the other block.  So both blocks send at the same time, and each writes half of the output.
  if (rank == 0) {
    exchange_partial_rows<0>(o, m, l, weights, smem, params, work, lane_row, lane);
  } else {
    exchange_partial_rows<1>(o, m, l, weights, smem, params, work, lane_row, lane);
  }
}

template <typename T, int>
int launch(const FaForwardArgs* args, cudaStream_t stream) {
  fa::Params all_params;
  if (int status = fa::make_params(args, BLOCK_M, CLUSTER, &all_params)) return status;
  const fa::TmaParams params = fa::tma_params_of(all_params);
  CUtensorMap q_map = {}, k_map = {}, v_map = {};
  if (args->seq_k > 0) {
    constexpr fa::Box BOX = {KEY_TILE, BOX_COLUMNS};
    static_assert(KEY_TILE == BLOCK_M, "the boxes of Q, K and V have the same number of rows");
    if (int status = fa::make_tensor_map(&q_map, args, args->q, args->heads, args->seq_q, args->q_stride, BOX)) return status;
    if (int status = fa::make_tensor_map(&k_map, args, args->k, args->kv_heads, args->seq_k, args->k_stride, BOX)) return status;
    if (int status = fa::make_tensor_map(&v_map, args, args->v, args->kv_heads, args->seq_k, args->v_stride, BOX)) return status;
  }
  constexpr auto kernel = &cluster_one_way_kernel<T>;
  constexpr int smem_bytes = sizeof(Smem<T>);
  if (int status = fa::allow_smem<kernel>(args, smem_bytes)) return status;
  const int query_tiles = (params.seq_q + BLOCK_M - 1) / BLOCK_M;
  const dim3 grid(all_params.heads * CLUSTER, query_tiles, static_cast<unsigned>(args->batch));
  kernel<<<grid, THREADS, smem_bytes, stream>>>(params, q_map, k_map, v_map);
  return static_cast<int>(cudaPeekAtLastError());
}

FA_FORWARD(launch)

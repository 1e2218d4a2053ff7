// backward_wgmma: five products instead of seven, by wgmma.  A block computes dK and dV of 128 keys, and adds to dQ in memory.
// step:    a block computes dK and dV of 128 keys by wgmma, from tiles that TMA loads, and adds its part of dQ to sums in memory, by
//          atomic additions; a kernel before it prepares them, and one after it rounds them
// because: backward_mma computes S and dP twice, and mma.sync reaches about 60 % of the rate of wgmma
// expect:  at b1h16s4096d128, 340 TFLOP/s without a mask and 280 with a causal one: the products of one warpgroup run during the
//          exponentials of the other, except where they meet at the barrier of dS
// diff:    dq_kernel is gone, round_kernel is new, dk_dv_kernel is gradients_kernel, delta_kernel is prepare_kernel
// tile:    128 keys per block, 64 per computing warpgroup, x 64 queries at D = 128 or 128 at D = 64, in two stages; 161 KB of shared
//          memory; a workspace of 4 D + 8 bytes for each row of Q
// takes:   as backward_mma, with strides that TMA accepts; two calls may differ in the last bits of dQ
//
// With S the scores and L the log-sum-exp of the forward pass:
//
//   P = exp(S - L)    delta = sum(dO * O) - dL    dS = P * (dO V^T - delta)
//   dQ = scale * dS K    dK = scale * dS^T Q    dV = P^T dO
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#include "fa/backward_ptx.cuh"
#include "fa/copy.cuh"
#include "fa/epilogue.cuh"
#include "fa/grid.h"
#include "fa/launch.h"
#include "fa/omit.cuh"
#include "fa/products.cuh"
#include "fa/ring.cuh"
#include "fa/tensor_map.h"
#include "fa/to_float.cuh"
#include "fa_backward.h"
#include "fa_instantiations.h"  // FA_FOR_EACH_INSTANTIATION: the manifest's dtypes and head_dims

using fa::BOX_COLUMNS, fa::GROUP_M, fa::GROUP_THREADS, fa::MMA_K, fa::MMA_M, fa::MMA_N, fa::QUAD, fa::VECTOR, fa::WARP;
using fp16 = __half;
using bf16 = __nv_bfloat16;

constexpr int GROUPS = 2, COMPUTING_THREADS = GROUPS * GROUP_THREADS, THREADS = COMPUTING_THREADS + GROUP_THREADS;
constexpr int PRODUCER_REGISTERS = 24, REGISTERS = 240, STAGES = 2;
constexpr int KEYS = GROUPS * GROUP_M;  // of a block
constexpr int PADDING = 128;            // in the workspace, the rows of a head are padded to a multiple
constexpr int S_TILES = GROUP_M / MMA_N, P_TILES = GROUP_M / MMA_K;  // of 64 queries
constexpr int DS_BARRIER = 1;                                        // named barrier of the computing warpgroups
constexpr int ROW_WARPS = 4;                                         // of a block that prepares or rounds rows

// The barriers of gradients_kernel and what each guarantees.
enum Barrier {
  NONE,
  KV_FULL,    // TMA has written K and V
  Q_FULL,     // TMA has written a tile of Q and dO
  Q_EMPTY,    // all warpgroups have read the tile of Q and dO
  DS_WRITTEN  // both warpgroups have written dS, and have read the dS before it
};

// The arguments of both passes, and the workspace.
struct Call {
  FaForwardArgs forward;
  FaBackwardArgs backward;
  float* dq_sums;   // [batch, heads, padded_q / 64, D / 64] panels, each the accumulators of a warpgroup for 64 x 64 elements
  float* row_data;  // [batch, heads, padded_q / QUERIES, 2, QUERIES]: the log-sum-exp, +inf for a row that sees nothing, and delta
  int seq_q, seq_k, padded_q;
  int first_diagonal;  // query i sees keys [0, min(seq_k, first_diagonal + i))
};

// The sizes of a step: HALVES of 64 queries.  Its part of dQ has two panels of 64 x 64 elements, one for each warpgroup.
template <int HEAD_DIM>
struct Step {
  static constexpr int HALVES = KEYS / HEAD_DIM, QUERIES = HALVES * GROUP_M;
  static constexpr int TILE = QUERIES * HEAD_DIM, PANEL = GROUP_M * BOX_COLUMNS;  // in elements
};

// K, V, Q, dO and dS are [columns / BOX_COLUMNS, rows, BOX_COLUMNS], swizzled as TMA writes them.
template <typename T, int HEAD_DIM>
struct Smem {
  using Sizes = Step<HEAD_DIM>;
  alignas(1024) T k[KEYS * HEAD_DIM];
  alignas(1024) T v[KEYS * HEAD_DIM];
  alignas(1024) T q[STAGES][Sizes::TILE];
  alignas(1024) T dout[STAGES][Sizes::TILE];
  alignas(1024) T ds[2][Sizes::QUERIES * KEYS];  // of this step and of the one before it
  alignas(16) float lse[STAGES][2 * Sizes::QUERIES];  // and delta
  uint64_t kv_full, q_full[STAGES], q_empty[STAGES];
};

// The query tiles that a block visits: those of each head of a group, from the first one with a query that sees the first key.
struct Walk {
  int first_key, kv_head, batch, group_heads, first_tile, tiles;
};

template <int HEAD_DIM>
__device__ __forceinline__ Walk make_walk(const Call& call) {
  constexpr int QUERIES = Step<HEAD_DIM>::QUERIES;
  const int first_key = blockIdx.y * KEYS, group_heads = static_cast<int>(call.forward.heads / call.forward.kv_heads);
  return {first_key, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.z), group_heads,
          max(0, first_key - call.first_diagonal + 1) / QUERIES, (call.seq_q + QUERIES - 1) / QUERIES};
}

// The rows of one head of a tensor.
template <typename T>
struct Rows {
  T* first;
  int64_t stride;

  __device__ __forceinline__ Rows(T* tensor, const FaStrides& stride, int64_t batch, int64_t head)
      : first(tensor + batch * stride.batch + head * stride.head), stride(stride.seq) {}
};

template <typename T>
__device__ __forceinline__ Rows<const T> rows_of(const void* tensor, const FaStrides& stride, int64_t batch, int64_t head) {
  return {static_cast<const T*>(tensor), stride, batch, head};
}

// delta and the log-sum-exp, and zeros for the sums of dQ, by a warp for each row, including padding.
template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(ROW_WARPS * WARP) prepare_kernel(const Call call) {
  constexpr int QUERIES = Step<HEAD_DIM>::QUERIES, LANE_ELEMENTS = HEAD_DIM / WARP;
  using Elements = fa::Vector<T, LANE_ELEMENTS>;
  const FaForwardArgs& args = call.forward;
  const int lane = threadIdx.x % WARP;
  const int64_t row_of_all_heads = int64_t(blockIdx.x) * ROW_WARPS + threadIdx.x / WARP;
  if (row_of_all_heads >= args.batch * args.heads * call.padded_q) return;
  const int row = static_cast<int>(row_of_all_heads % call.padded_q);
  const int64_t head_of_all = row_of_all_heads / call.padded_q, head = head_of_all % args.heads, batch = head_of_all / args.heads;
  *reinterpret_cast<fa::Vector<float, LANE_ELEMENTS>*>(call.dq_sums + row_of_all_heads * HEAD_DIM + lane * LANE_ELEMENTS) = {};
  float lse = CUDART_INF_F, delta = 0.0f;
  if (row < call.seq_q) {
    const Rows<const T> out = rows_of<T>(args.out, args.out_stride, batch, head);
    const Rows<const T> dout = rows_of<T>(call.backward.dout, call.backward.dout_stride, batch, head);
    const Elements x = reinterpret_cast<const Elements*>(out.first + row * out.stride)[lane];
    const Elements dx = reinterpret_cast<const Elements*>(dout.first + row * dout.stride)[lane];
#pragma unroll
    for (int i = 0; i < LANE_ELEMENTS; ++i) delta += fa::to_float(x.data[i]) * fa::to_float(dx.data[i]);
#pragma unroll
    for (int lanes = WARP / 2; lanes > 0; lanes /= 2) delta += __shfl_xor_sync(0xffffffffu, delta, lanes);
    const int64_t index = head_of_all * call.seq_q + row;
    if (call.backward.dlse != nullptr) delta -= call.backward.dlse[index];
    if (args.lse[index] == -CUDART_INF_F) delta = 0.0f; else lse = args.lse[index];
  }
  float* const data = call.row_data + (head_of_all * call.padded_q + row / QUERIES * QUERIES) * 2 + row % QUERIES;
  if (lane == 0) data[0] = lse, data[QUERIES] = delta;
}

// Stores the lane's rows of a gradient, times a factor.
template <typename T, int D_TILES>
__device__ __forceinline__ void store_gradient(const Rows<T>& rows, float (&gradient)[D_TILES][4], float factor, int lane_row, int seq,
                                               int lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = lane_row + r * 8;
#pragma unroll
    for (int d = 0; d < D_TILES; ++d) gradient[d][2 * r] *= factor, gradient[d][2 * r + 1] *= factor;
    fa::store_row<T>(reinterpret_cast<uint4*>(rows.first + row * rows.stride), gradient, r, lane, row < seq);
  }
}

// dQ of 64 queries of a head, rounded, from its sums.
template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(ROW_WARPS * WARP) round_kernel(const Call call) {
  const FaForwardArgs& args = call.forward;
  const int64_t head = blockIdx.y, batch = blockIdx.z;
  const int first_query = blockIdx.x * GROUP_M, lane = threadIdx.x % WARP;
  const int64_t first_row = (batch * args.heads + head) * call.padded_q + first_query;
  const float4* const sums = reinterpret_cast<const float4*>(call.dq_sums + first_row * HEAD_DIM) + threadIdx.x;
  float dq[HEAD_DIM / MMA_N][4];
#pragma unroll
  for (int d = 0; d < HEAD_DIM / MMA_N; ++d) {
    const float4 sum = sums[d * GROUP_THREADS];
    dq[d][0] = sum.x, dq[d][1] = sum.y, dq[d][2] = sum.z, dq[d][3] = sum.w;
  }
  store_gradient(Rows<T>(static_cast<T*>(call.backward.dq), call.backward.dq_stride, batch, head), dq, args.scale,
                 first_query + static_cast<int>(threadIdx.x) / WARP * MMA_M + lane / QUAD, call.seq_q, lane);
}

// Loads K and V of the block.  Called by one thread.
template <typename T, int HEAD_DIM>
__device__ __forceinline__ void load_keys(const Walk& walk, const CUtensorMap& k_map, const CUtensorMap& v_map, Smem<T, HEAD_DIM>& smem) {
  fa::delay_if_omitted<KV_FULL>();
  fa::mbarrier_arrive_expect_tx(&smem.kv_full, sizeof(smem.k) + sizeof(smem.v));
  fa::load_rows<HEAD_DIM, KEYS>(smem.k, k_map, walk.first_key, walk.kv_head, walk.batch, &smem.kv_full);
  fa::load_rows<HEAD_DIM, KEYS>(smem.v, v_map, walk.first_key, walk.kv_head, walk.batch, &smem.kv_full);
}

// Loads the tiles of Q and dO, and their row data.  Called by one thread.
template <typename T, int HEAD_DIM>
__device__ __forceinline__ void load_queries(const Call& call, const Walk& walk, const CUtensorMap& q_map, const CUtensorMap& dout_map,
                                             Smem<T, HEAD_DIM>& smem) {
  constexpr int QUERIES = Step<HEAD_DIM>::QUERIES;
  fa::Ring<STAGES> ring;
#pragma unroll 1
  for (int head = walk.kv_head * walk.group_heads; head < (walk.kv_head + 1) * walk.group_heads; ++head) {
    const float* const row_data = call.row_data + (walk.batch * call.forward.heads + head) * call.padded_q * 2;
#pragma unroll 1
    for (int tile = walk.first_tile; tile < walk.tiles; ++tile, ring.advance()) {
      uint64_t* const full = &smem.q_full[ring.stage];
      fa::wait(&smem.q_empty[ring.stage], ring.phase ^ 1);
      fa::delay_if_omitted<Q_FULL>();
      fa::mbarrier_arrive_expect_tx(full, sizeof(smem.q[0]) + sizeof(smem.dout[0]) + sizeof(smem.lse[0]));
      fa::load_rows<HEAD_DIM, QUERIES>(smem.q[ring.stage], q_map, tile * QUERIES, head, walk.batch, full);
      fa::load_rows<HEAD_DIM, QUERIES>(smem.dout[ring.stage], dout_map, tile * QUERIES, head, walk.batch, full);
      fa::cp_async_bulk(smem.lse[ring.stage], row_data + int64_t(tile) * QUERIES * 2, sizeof(smem.lse[0]), full);
    }
  }
}

// Starts S^T = K Q^T or dP^T = V dO^T, of the warpgroup's 64 keys and 64 queries.
template <typename T, int HEAD_DIM>
__device__ __forceinline__ void start_scores(float (&s)[S_TILES][4], uint64_t keys, uint64_t queries) {
  fa::wgmma_fence();
#pragma unroll
  for (int d = 0; d < HEAD_DIM; d += MMA_K) {
    const int keys_offset = (d / BOX_COLUMNS * KEYS * BOX_COLUMNS + d % BOX_COLUMNS) * sizeof(T) >> 4;
    const int queries_offset = (d / BOX_COLUMNS * Step<HEAD_DIM>::QUERIES * BOX_COLUMNS + d % BOX_COLUMNS) * sizeof(T) >> 4;
    fa::wgmma_any_n<T, 0>(s, keys + keys_offset, queries + queries_offset, d > 0);
  }
  fa::wgmma_commit_group();
}

// Starts a panel of dQ = dS K: 64 queries, the keys of the block, 64 columns.
template <typename T, int HEAD_DIM>
__device__ __forceinline__ void start_dq(float (&dq)[S_TILES][4], uint64_t ds, uint64_t k) {
  fa::wgmma_fence();
#pragma unroll
  for (int key = 0; key < KEYS; key += MMA_K) {
    const int ds_offset = (key / BOX_COLUMNS * Step<HEAD_DIM>::QUERIES * BOX_COLUMNS + key % BOX_COLUMNS) * sizeof(T) >> 4;
    fa::wgmma_any_n<T, 1>(dq, ds + ds_offset, k + (key * BOX_COLUMNS * sizeof(T) >> 4), key > 0);
  }
  fa::wgmma_commit_group();
}

// P^T in place of S^T.  The difference is taken before it is multiplied, because both may be large.
__device__ __forceinline__ void exponentials(float (&s)[S_TILES][4], const float* lse_smem, float scale, int lane) {
#pragma unroll
  for (int n = 0; n < S_TILES; ++n) {
    const float2 lse = *reinterpret_cast<const float2*>(lse_smem + n * MMA_N + lane % QUAD * 2);
#pragma unroll
    for (int i = 0; i < 4; ++i) s[n][i] = fa::ex2_approx_ftz((s[n][i] * scale - (i % 2 == 0 ? lse.x : lse.y)) * CUDART_L2E_F);
  }
}

// Zeros in the place of P^T where a key is hidden from a query, or does not exist.  From the lane's first key on, the mask shows
// `visible_keys` to the first query, and there are `keys`.
__device__ __forceinline__ void hide(float (&p)[S_TILES][4], int visible_keys, int keys, int lane) {
#pragma unroll
  for (int n = 0; n < S_TILES; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int query = n * MMA_N + lane % QUAD * 2 + i % 2;
      if (i / 2 * 8 >= min(keys, visible_keys + query)) p[n][i] = 0.0f;
    }
  }
}

// dS^T in place of dP^T.
__device__ __forceinline__ void differentiate(float (&dp)[S_TILES][4], const float (&p)[S_TILES][4], const float* delta_smem, int lane) {
#pragma unroll
  for (int n = 0; n < S_TILES; ++n) {
    const float2 delta = *reinterpret_cast<const float2*>(delta_smem + n * MMA_N + lane % QUAD * 2);
#pragma unroll
    for (int i = 0; i < 4; ++i) dp[n][i] = p[n][i] * (dp[n][i] - (i % 2 == 0 ? delta.x : delta.y));
  }
}

// The A fragments of P^T or dS^T.
template <typename T>
__device__ __forceinline__ void make_fragments(uint32_t (&fragments)[P_TILES][4], const float (&p)[S_TILES][4]) {
#pragma unroll
  for (int n = 0; n < S_TILES; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) fragments[n / 2][n % 2 * 2 + i] = fa::cvt_rn_x2<T>(p[n][2 * i], p[n][2 * i + 1]);
  }
}

// Writes dS of 64 queries and the warpgroup's keys to shared memory, where each row is a query.
template <typename T>
__device__ __forceinline__ void write_ds(T* ds_smem, const uint32_t (&ds)[P_TILES][4], int thread_in_group, int lane) {
  const int key = thread_in_group / WARP * MMA_M + lane / 8 % 2 * 8, row = lane / 16 * 8 + lane % 8;
#pragma unroll
  for (int n = 0; n < P_TILES; ++n) {
    fa::stmatrix_x4_trans(fa::smem_address(ds_smem + (n * MMA_K + row) * BOX_COLUMNS + (key ^ row % 8 * 8)), ds[n]);
  }
  fa::fence_proxy_async();
}

// A computing warpgroup: dK and dV of 64 keys, and a panel of dQ in each step.
template <typename T, int HEAD_DIM>
__device__ __forceinline__ void compute(const Call& call, const Walk& walk, Smem<T, HEAD_DIM>& smem, int group) {
  using Sizes = Step<HEAD_DIM>;
  constexpr int QUERIES = Sizes::QUERIES, HALVES = Sizes::HALVES, HALF = Sizes::PANEL * sizeof(T) >> 4;  // in a descriptor
  const int thread_in_group = threadIdx.x % GROUP_THREADS, lane = threadIdx.x % WARP;
  const int group_key = walk.first_key + group * GROUP_M, lane_key = group_key + thread_in_group / WARP * MMA_M + lane / QUAD;
  const uint64_t k = fa::wgmma_descriptor(smem.k + group * Sizes::PANEL), v = fa::wgmma_descriptor(smem.v + group * Sizes::PANEL);
  // A warpgroup computes half of the columns of dQ, or half of its rows.
  const uint64_t dq_k = fa::wgmma_descriptor(smem.k + (HALVES == 1 ? group * KEYS * BOX_COLUMNS : 0));
  fa::Ring<STAGES> ring;
  float dk[HEAD_DIM / MMA_N][4] = {}, dv[HEAD_DIM / MMA_N][4] = {};
  fa::wait<KV_FULL>(&smem.kv_full, 0);

#pragma unroll 1
  for (int head = walk.kv_head * walk.group_heads; head < (walk.kv_head + 1) * walk.group_heads; ++head) {
    float* const dq_sums = call.dq_sums + (walk.batch * call.forward.heads + head) * call.padded_q * HEAD_DIM + thread_in_group * 4;
#pragma unroll 1
    for (int tile = walk.first_tile; tile < walk.tiles; ++tile, ring.advance()) {
      const float* const lse = smem.lse[ring.stage];
      const uint64_t q = fa::wgmma_descriptor(smem.q[ring.stage], QUERIES * BOX_COLUMNS * sizeof(T));
      const uint64_t dout = fa::wgmma_descriptor(smem.dout[ring.stage], QUERIES * BOX_COLUMNS * sizeof(T));
      T* const ds_smem = smem.ds[ring.stage];
      fa::wait<Q_FULL>(&smem.q_full[ring.stage], ring.phase);
      uint32_t p[HALVES][P_TILES][4], ds[HALVES][P_TILES][4];
#pragma unroll
      for (int half = 0; half < HALVES; ++half) {
        float s[S_TILES][4], dp[S_TILES][4];
        start_scores<T, HEAD_DIM>(s, k, q + half * HALF);
        start_scores<T, HEAD_DIM>(dp, v, dout + half * HALF);
        fa::wgmma_wait_group<1>(s);
        if (half == 0) fa::release_early_if_omitted<Q_EMPTY>(&smem.q_empty[ring.stage]);
        exponentials(s, lse + half * GROUP_M, call.forward.scale, lane);
        const int first_diagonal = call.first_diagonal + tile * QUERIES + half * GROUP_M;  // of the first query
        if (group_key + GROUP_M > min(call.seq_k, first_diagonal)) hide(s, first_diagonal - lane_key, call.seq_k - lane_key, lane);
        make_fragments<T>(p[half], s);
        fa::wgmma_wait_group<0>(dp);
        fa::start_pv<T, GROUP_M>(dv, p[half], dout + half * HALF);
        differentiate(dp, s, lse + QUERIES + half * GROUP_M, lane);
        make_fragments<T>(ds[half], dp);
        fa::start_pv<T, GROUP_M>(dk, ds[half], q + half * HALF);
        if (group > 0) fa::delay_if_omitted<DS_WRITTEN>();
        write_ds(ds_smem + group * QUERIES * BOX_COLUMNS + half * Sizes::PANEL, ds[half], thread_in_group, lane);
      }
      fa::sync_threads<DS_WRITTEN, COMPUTING_THREADS>(DS_BARRIER);
      float dq[S_TILES][4];
      start_dq<T, HEAD_DIM>(dq, fa::wgmma_descriptor(ds_smem + (HALVES == 1 ? 0 : group * Sizes::PANEL)), dq_k);
      fa::wgmma_wait_group<0>(dq);
      fa::wait_late_if_omitted<Q_FULL>(&smem.q_full[ring.stage], ring.phase);
      fa::release<Q_EMPTY>(&smem.q_empty[ring.stage]);
#pragma unroll
      for (int n = 0; n < S_TILES; ++n) {
        fa::red_add_x4(dq_sums + int64_t(tile) * Sizes::TILE + group * Sizes::PANEL + n * MMA_N * GROUP_M, dq[n]);
      }
    }
  }
  fa::wait_late_if_omitted<KV_FULL>(&smem.kv_full, 0);
  fa::wgmma_wait_group<0>(dk);
  fa::wgmma_wait_group<0>(dv);
  const FaBackwardArgs& backward = call.backward;
  store_gradient(Rows<T>(static_cast<T*>(backward.dk), backward.dk_stride, walk.batch, walk.kv_head), dk, call.forward.scale, lane_key,
                 call.seq_k, lane);
  store_gradient(Rows<T>(static_cast<T*>(backward.dv), backward.dv_stride, walk.batch, walk.kv_head), dv, 1.0f, lane_key, call.seq_k,
                 lane);
}

// dK and dV of 128 keys of a head, from all queries that see them, of all heads that share it, and the keys' part of dQ.
template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(THREADS, 1)
gradients_kernel(const __grid_constant__ Call call, const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                 const __grid_constant__ CUtensorMap v_map, const __grid_constant__ CUtensorMap dout_map) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<Smem<T, HEAD_DIM>*>(smem_bytes);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / GROUP_THREADS, 0);
  if (threadIdx.x == 0) {
    fa::mbarrier_init(&smem.kv_full, 1);
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) {
      fa::mbarrier_init(&smem.q_full[stage], 1);
      fa::mbarrier_init(&smem.q_empty[stage], COMPUTING_THREADS / WARP);
    }
    fa::fence_mbarrier_init();
  }
  __syncthreads();
  const Walk walk = make_walk<HEAD_DIM>(call);
  if (warpgroup == 0) {
    fa::setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (threadIdx.x < WARP && fa::elect_sync()) {
      load_queries<T, HEAD_DIM>(call, walk, q_map, dout_map, smem);
    } else if (threadIdx.x / WARP == 1 && fa::elect_sync()) {
      load_keys<T, HEAD_DIM>(walk, k_map, v_map, smem);
    }
  } else {
    fa::setmaxnreg_inc<REGISTERS>();
    compute<T, HEAD_DIM>(call, walk, smem, warpgroup - 1);
  }
}

int64_t tiles_of(int64_t rows, int64_t tile) { return (rows + tile - 1) / tile; }
int64_t padded_rows(const FaForwardArgs& args) { return tiles_of(args.seq_q, PADDING) * PADDING; }

// Refuses a call that the kernels do not take, or returns FA_OK.
int check(const Call& call) {
  const FaForwardArgs& args = call.forward;
  const FaBackwardArgs& backward = call.backward;
  const bool is_aligned = fa::is_aligned(args.q, args.q_stride, VECTOR) && fa::is_aligned(args.k, args.k_stride, VECTOR) &&
                          fa::is_aligned(args.v, args.v_stride, VECTOR) && fa::is_aligned(args.out, args.out_stride, VECTOR) &&
                          fa::is_aligned(backward.dout, backward.dout_stride, VECTOR) &&
                          fa::is_aligned(backward.dq, backward.dq_stride, VECTOR) &&
                          fa::is_aligned(backward.dk, backward.dk_stride, VECTOR) &&
                          fa::is_aligned(backward.dv, backward.dv_stride, VECTOR);
  if (!is_aligned) return fa_refuse(&args, "rows of all tensors must be contiguous and start at multiples of %d bytes", 2 * VECTOR);
  const int64_t row_blocks = tiles_of(args.batch * args.heads * padded_rows(args), ROW_WARPS);
  if (args.heads > UINT16_MAX || args.batch > UINT16_MAX || args.seq_k > int64_t(UINT16_MAX) * KEYS || args.seq_q > INT32_MAX / 2 ||
      row_blocks > INT32_MAX) {
    return fa_refuse(&args, "the shape is too large: batch %lld and heads %lld (at most %d), seq_q %lld (below 2^30), seq_k %lld (at "
                            "most %d)",
                     static_cast<long long>(args.batch), static_cast<long long>(args.heads), UINT16_MAX,
                     static_cast<long long>(args.seq_q), static_cast<long long>(args.seq_k), UINT16_MAX * KEYS);
  }
  return FA_OK;
}

// Launches gradients_kernel, with the tensor maps of Q, K, V and dO.
template <typename T, int HEAD_DIM>
int launch_gradients(const Call& call, dim3 grid, cudaStream_t stream) {
  constexpr auto KERNEL = &gradients_kernel<T, HEAD_DIM>;
  constexpr int SMEM_BYTES = sizeof(Smem<T, HEAD_DIM>);
  constexpr fa::Box QUERY_BOX = {Step<HEAD_DIM>::QUERIES, BOX_COLUMNS}, KEY_BOX = {KEYS, BOX_COLUMNS};
  const FaForwardArgs& args = call.forward;
  const FaStrides& dout_stride = call.backward.dout_stride;
  CUtensorMap q, k, v, dout;
  if (int status = fa::make_tensor_map(&q, &args, args.q, args.heads, args.seq_q, args.q_stride, QUERY_BOX)) return status;
  if (int status = fa::make_tensor_map(&k, &args, args.k, args.kv_heads, args.seq_k, args.k_stride, KEY_BOX)) return status;
  if (int status = fa::make_tensor_map(&v, &args, args.v, args.kv_heads, args.seq_k, args.v_stride, KEY_BOX)) return status;
  if (int status = fa::make_tensor_map(&dout, &args, call.backward.dout, args.heads, args.seq_q, dout_stride, QUERY_BOX)) return status;
  constexpr int NEEDED_REGISTERS = PRODUCER_REGISTERS + GROUPS * REGISTERS;
  if (int status = fa::require_registers(&args, reinterpret_cast<const void*>(KERNEL), GROUPS + 1, NEEDED_REGISTERS)) return status;
  if (int status = fa::allow_smem<KERNEL>(&args, SMEM_BYTES)) return status;
  gradients_kernel<T, HEAD_DIM><<<grid, THREADS, SMEM_BYTES, stream>>>(call, q, k, v, dout);
  return static_cast<int>(cudaPeekAtLastError());
}

template <typename T, int HEAD_DIM>
int launch(const Call& call, cudaStream_t stream) {
  const FaForwardArgs& args = call.forward;
  const auto blocks_of = [](int64_t rows, int64_t tile) { return static_cast<unsigned>(tiles_of(rows, tile)); };
  const unsigned heads = static_cast<unsigned>(args.heads), kv_heads = static_cast<unsigned>(args.kv_heads);
  const unsigned batch = static_cast<unsigned>(args.batch);
  const dim3 query_grid(blocks_of(args.seq_q, GROUP_M), heads, batch), key_grid(kv_heads, blocks_of(args.seq_k, KEYS), batch);
  prepare_kernel<T, HEAD_DIM><<<blocks_of(args.batch * args.heads * call.padded_q, ROW_WARPS), ROW_WARPS * WARP, 0, stream>>>(call);
  if (args.seq_k > 0) {
    if (int status = launch_gradients<T, HEAD_DIM>(call, key_grid, stream)) return status;
  }
  round_kernel<T, HEAD_DIM><<<query_grid, ROW_WARPS * WARP, 0, stream>>>(call);
  return static_cast<int>(cudaPeekAtLastError());
}

FA_EXPORT size_t fa_backward_workspace_bytes(const FaBackwardArgs* args) {
  const FaForwardArgs& forward = *args->forward;
  return forward.batch * forward.heads * padded_rows(forward) * (forward.head_dim + 2) * sizeof(float);
}

FA_EXPORT int fa_backward(const FaBackwardArgs* args, cudaStream_t stream) {
  if (int status = fa_check_backward(args, 0)) return status;
  const FaForwardArgs forward = fa_copy_args(args->forward);
  const int64_t padded_q = padded_rows(forward);
  const int shift = forward.causal == FA_CAUSAL_BOTTOM_RIGHT ? static_cast<int>(forward.seq_k - forward.seq_q) : 0;
  const int first_diagonal = forward.causal == FA_CAUSAL_NONE ? INT32_MAX / 2 : shift + 1;
  float* const dq_sums = static_cast<float*>(forward.workspace);
  const Call call = {forward, *args, dq_sums, dq_sums + forward.batch * forward.heads * padded_q * forward.head_dim,
                     static_cast<int>(forward.seq_q), static_cast<int>(forward.seq_k), static_cast<int>(padded_q), first_diagonal};
  if (int status = check(call)) return status;
#define LAUNCH_IF(DTYPE, HEAD_DIM) \
  if (forward.dtype == FA_DTYPE_##DTYPE && forward.head_dim == HEAD_DIM) return launch<DTYPE, HEAD_DIM>(call, stream);
  FA_FOR_EACH_INSTANTIATION(LAUNCH_IF)
#undef LAUNCH_IF
  return fa_refuse(args->forward, "no instantiation for dtype %d with head_dim %lld", forward.dtype, static_cast<long long>(forward.head_dim));
}

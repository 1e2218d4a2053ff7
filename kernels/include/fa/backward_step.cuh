// The steps of backward_wgmma: the loads of its producer, its products, and the arithmetic between them.  A block has two computing
// warpgroups of 64 keys each.
#pragma once

#include "fa/backward.cuh"
#include "fa/backward_ptx.cuh"
#include "fa/launch.h"
#include "fa/mma.cuh"
#include "fa/omit.cuh"
#include "fa/products.cuh"
#include "fa/ring.cuh"
#include "fa/tensor_map.h"

namespace fa {

// The threads and registers of a block: a producer and the computing warpgroups.
struct BackwardShape {
  static constexpr int GROUPS = BLOCK_KEYS / GROUP_M;
  static constexpr int THREADS = (GROUPS + 1) * GROUP_THREADS, COMPUTING_THREADS = GROUPS * GROUP_THREADS;
  static constexpr int PRODUCER_REGISTERS = 24, REGISTERS = 240, ALL_REGISTERS = PRODUCER_REGISTERS + GROUPS * REGISTERS;
};

constexpr int STAGES = 2;                                            // tiles of Q and dO in flight
constexpr int S_TILES = GROUP_M / MMA_N, P_TILES = GROUP_M / MMA_K;  // of 64 queries

// K, V, Q, dO and dS are [columns / BOX_COLUMNS, rows, BOX_COLUMNS], swizzled as TMA writes them.
template <typename T, int HEAD_DIM>
struct BackwardSmem {
  using Sizes = BackwardStep<HEAD_DIM>;
  alignas(1024) T k[BLOCK_KEYS * HEAD_DIM];
  alignas(1024) T v[BLOCK_KEYS * HEAD_DIM];
  alignas(1024) T q[STAGES][Sizes::TILE];
  alignas(1024) T dout[STAGES][Sizes::TILE];
  alignas(1024) T ds[STAGES][Sizes::QUERIES * BLOCK_KEYS];  // of the tiles in the same stages: of this step and the one before it
  alignas(16) float lse[STAGES][2 * Sizes::QUERIES];  // and delta
  uint64_t kv_full, q_full[STAGES], q_empty[STAGES];
  int block;  // with IN_TURNS, how many blocks started before this one
};

// Initialises the mbarriers.  Called by one thread.
template <typename SMEM>
__device__ __forceinline__ void init_backward_mbarriers(SMEM& smem) {
  mbarrier_init(&smem.kv_full, 1);
#pragma unroll
  for (int stage = 0; stage < STAGES; ++stage) {
    mbarrier_init(&smem.q_full[stage], 1);
    mbarrier_init(&smem.q_empty[stage], BackwardShape::COMPUTING_THREADS / WARP);
  }
  fence_mbarrier_init();
}

// The query tiles that a block visits, from the first one with a query that sees the first key.  It visits a tile of all heads of a
// group, and then the next one, in one loop: with a loop over heads inside, a step takes longer also where no heads share keys.
struct BackwardWalk {
  struct Visit {
    int step, head;
  };
  int first_key, kv_head, batch, group_heads, first_tile, tiles;

  __device__ __forceinline__ Visit first() const { return {first_tile, kv_head * group_heads}; }
  __device__ __forceinline__ bool has(const Visit& visit) const { return visit.step < tiles; }
  __device__ __forceinline__ Visit after(const Visit& visit) const {
    const bool is_last_head = visit.head + 1 == (kv_head + 1) * group_heads;
    return {visit.step + is_last_head, is_last_head ? kv_head * group_heads : visit.head + 1};
  }
  // In turns, the last tile is the first: all blocks visit it, also under a causal mask.
  __device__ __forceinline__ int tile_of(const Visit& visit) const {
    return IN_TURNS ? tiles - 1 - (visit.step - first_tile) : visit.step;
  }
};

// In turns, blocks are numbered as they start, so that none waits for one that has not started.
template <typename T, int HEAD_DIM>
__device__ __forceinline__ BackwardWalk make_walk(const BackwardCall& call, const BackwardSmem<T, HEAD_DIM>& smem) {
  constexpr int QUERIES = BackwardStep<HEAD_DIM>::QUERIES;
  int x = blockIdx.x, y = blockIdx.y, z = blockIdx.z;
  if constexpr (IN_TURNS) x = smem.block % gridDim.x, y = smem.block / gridDim.x % gridDim.y, z = smem.block / gridDim.x / gridDim.y;
  const int first_key = y * BLOCK_KEYS;
  return {first_key, x, z, static_cast<int>(call.forward.heads / call.forward.kv_heads),
          max(0, first_key - call.first_diagonal + 1) / QUERIES, (call.seq_q + QUERIES - 1) / QUERIES};
}

// Loads K and V of the block.  Called by one thread.  KV_FULL is the barrier that a planted fault may omit.
template <auto KV_FULL, typename T, int HEAD_DIM>
__device__ __forceinline__ void load_keys(
    const BackwardWalk& walk, const CUtensorMap& k_map, const CUtensorMap& v_map, BackwardSmem<T, HEAD_DIM>& smem) {
  delay_if_omitted<KV_FULL>();
  mbarrier_arrive_expect_tx(&smem.kv_full, sizeof(smem.k) + sizeof(smem.v));
  load_rows<HEAD_DIM, BLOCK_KEYS>(smem.k, k_map, walk.first_key, walk.kv_head, walk.batch, &smem.kv_full);
  load_rows<HEAD_DIM, BLOCK_KEYS>(smem.v, v_map, walk.first_key, walk.kv_head, walk.batch, &smem.kv_full);
}

// Loads the tiles of Q and dO, and their row data.  Called by one thread.  Q_FULL is the barrier that a planted fault may omit.
template <auto Q_FULL, typename T, int HEAD_DIM>
__device__ __forceinline__ void load_queries(const BackwardCall& call, const BackwardWalk& walk, const CUtensorMap& q_map,
                                             const CUtensorMap& dout_map, BackwardSmem<T, HEAD_DIM>& smem) {
  constexpr int QUERIES = BackwardStep<HEAD_DIM>::QUERIES;
  Ring<STAGES> ring;
#pragma unroll 1
  for (BackwardWalk::Visit visit = walk.first(); walk.has(visit); visit = walk.after(visit), ring.advance()) {
    const int query = walk.tile_of(visit) * QUERIES;
    const int64_t first_row = (walk.batch * call.forward.heads + visit.head) * call.padded_q + query;
    uint64_t* const full = &smem.q_full[ring.stage];
    wait(&smem.q_empty[ring.stage], ring.phase ^ 1);
    delay_if_omitted<Q_FULL>();
    mbarrier_arrive_expect_tx(full, sizeof(smem.q[0]) + sizeof(smem.dout[0]) + sizeof(smem.lse[0]));
    load_rows<HEAD_DIM, QUERIES>(smem.q[ring.stage], q_map, query, visit.head, walk.batch, full);
    load_rows<HEAD_DIM, QUERIES>(smem.dout[ring.stage], dout_map, query, visit.head, walk.batch, full);
    cp_async_bulk(smem.lse[ring.stage], call.row_data + first_row * 2, sizeof(smem.lse[0]), full);
  }
}

// Rows of K or V as the A operand of wgmma.
template <int HEAD_DIM>
struct Fragments {
  uint32_t of[HEAD_DIM / MMA_K][4];
};

// Starts S^T = K Q^T or dP^T = V dO^T, of the warpgroup's 64 keys and 64 queries.
template <typename T, int HEAD_DIM>
__device__ __forceinline__ void start_scores(float (&s)[S_TILES][4], uint64_t keys, uint64_t queries) {
  wgmma_fence();
#pragma unroll
  for (int d = 0; d < HEAD_DIM; d += MMA_K) {
    const int keys_offset = (d / BOX_COLUMNS * BLOCK_KEYS * BOX_COLUMNS + d % BOX_COLUMNS) * sizeof(T) >> 4;
    const int queries_offset = (d / BOX_COLUMNS * BackwardStep<HEAD_DIM>::QUERIES * BOX_COLUMNS + d % BOX_COLUMNS) * sizeof(T) >> 4;
    wgmma_any_n<T, 0>(s, keys + keys_offset, queries + queries_offset, d > 0);
  }
  wgmma_commit_group();
}

// The warpgroup's 64 rows of K or V as the left operand of S^T or dP^T: a descriptor, or with IN_REGISTERS, the fragments.
template <typename T, int HEAD_DIM, bool IN_REGISTERS>
__device__ __forceinline__ auto left_operand(const T* rows_smem, int thread_in_group, int lane) {
  if constexpr (IN_REGISTERS) {
    Fragments<HEAD_DIM> fragments;
    load_q(fragments.of, rows_smem, thread_in_group / WARP * MMA_M, lane, 0);
    return fragments;
  } else {
    return wgmma_descriptor(rows_smem);
  }
}

template <typename T, int HEAD_DIM>
__device__ __forceinline__ void start_scores(float (&s)[S_TILES][4], const Fragments<HEAD_DIM>& keys, uint64_t queries) {
  wgmma_fence();
#pragma unroll
  for (int d = 0; d < HEAD_DIM; d += MMA_K) wgmma_any_n<T, 0>(s, keys.of[d / MMA_K], queries + (d * sizeof(T) >> 4), d > 0);
  wgmma_commit_group();
}

// Starts a panel of dQ = dS K: 64 queries, the keys of the block, 64 columns.
template <typename T, int HEAD_DIM>
__device__ __forceinline__ void start_dq(float (&dq)[S_TILES][4], uint64_t ds, uint64_t k) {
  wgmma_fence();
#pragma unroll
  for (int key = 0; key < BLOCK_KEYS; key += MMA_K) {
    const int ds_offset = (key / BOX_COLUMNS * BackwardStep<HEAD_DIM>::QUERIES * BOX_COLUMNS + key % BOX_COLUMNS) * sizeof(T) >> 4;
    wgmma_any_n<T, 1>(dq, ds + ds_offset, k + (key * BOX_COLUMNS * sizeof(T) >> 4), key > 0);
  }
  wgmma_commit_group();
}

// P^T in place of S^T.  The difference is taken before it is multiplied, because both may be large.
__device__ __forceinline__ void exponentials(float (&s)[S_TILES][4], const float* lse_smem, float scale, int lane) {
#pragma unroll
  for (int n = 0; n < S_TILES; ++n) {
    const float2 lse = *reinterpret_cast<const float2*>(lse_smem + n * MMA_N + lane % QUAD * 2);
#pragma unroll
    for (int i = 0; i < 4; ++i) s[n][i] = ex2_approx_ftz((s[n][i] * scale - (i % 2 == 0 ? lse.x : lse.y)) * CUDART_L2E_F);
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
__device__ __forceinline__ void differentiate(
    float (&dp)[S_TILES][4], const float (&p)[S_TILES][4], const float* delta_smem, int lane) {
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
    for (int i = 0; i < 2; ++i) fragments[n / 2][n % 2 * 2 + i] = cvt_rn_x2<T>(p[n][2 * i], p[n][2 * i + 1]);
  }
}

// Writes dS of 64 queries and the warpgroup's keys to shared memory, where each row is a query.
template <typename T>
__device__ __forceinline__ void write_ds(T* ds_smem, const uint32_t (&ds)[P_TILES][4], int thread_in_group, int lane) {
  const int key = thread_in_group / WARP * MMA_M + lane / 8 % 2 * 8, row = lane / 16 * 8 + lane % 8;
#pragma unroll
  for (int n = 0; n < P_TILES; ++n) {
    stmatrix_x4_trans(smem_address(ds_smem + (n * MMA_K + row) * BOX_COLUMNS + (key ^ row % 8 * 8)), ds[n]);
  }
  fence_proxy_async();
}

// Launches KERNEL for a grid of key/value heads x blocks of keys x batch, with the tensor maps of Q, K, V and dO.
template <auto KERNEL, int SMEM_BYTES, int HEAD_DIM>
int launch_gradients(const BackwardCall& call, dim3 grid, cudaStream_t stream) {
  using Shape = BackwardShape;
  static_assert(SMEM_BYTES <= 227 * 1024, "a block has at most 227 KB of shared memory");
  constexpr Box QUERIES = {BackwardStep<HEAD_DIM>::QUERIES, BOX_COLUMNS}, KEYS = {BLOCK_KEYS, BOX_COLUMNS};
  const FaForwardArgs& args = call.forward;
  const FaStrides& dout_stride = call.backward.dout_stride;
  CUtensorMap q, k, v, dout;
  if (int status = make_tensor_map(&q, &args, args.q, args.heads, args.seq_q, args.q_stride, QUERIES)) return status;
  if (int status = make_tensor_map(&k, &args, args.k, args.kv_heads, args.seq_k, args.k_stride, KEYS)) return status;
  if (int status = make_tensor_map(&v, &args, args.v, args.kv_heads, args.seq_k, args.v_stride, KEYS)) return status;
  if (int status = make_tensor_map(&dout, &args, call.backward.dout, args.heads, args.seq_q, dout_stride, QUERIES)) return status;
  static OncePerDevice prepare;
  const int refusal = prepare([&] {
    const void* const kernel = reinterpret_cast<const void*>(KERNEL);
    if (int status = require_registers(&args, kernel, Shape::GROUPS + 1, Shape::ALL_REGISTERS)) return status;
    return fa_allow_dynamic_smem(&args, kernel, SMEM_BYTES);
  });
  if (refusal) return refusal;
  KERNEL<<<grid, Shape::THREADS, SMEM_BYTES, stream>>>(call, q, k, v, dout);
  return static_cast<int>(cudaPeekAtLastError());
}

}  // namespace fa

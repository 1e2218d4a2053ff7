// warp_specialized_fp8: stage2_fp8, ws_p1_fp8 and ws_p2_fp8: the kernel of warp_specialized on e4m3 inputs.
// step:    Q, K and V are e4m3 in global memory and when they arrive in shared memory, and become fp16 there, in place, ahead of
//          the tensor cores; producer warps convert, or without them each warp while it computes the softmax; a warp computes
//          its two tiles of S at the same time, and the mask compares 32-bit numbers
// because: half the bytes of K and V are copied, and no phase waits for a conversion; when all consumers converted each tile in
//          a phase of its own, they took 27 to 38 % longer than the fp16 twins
// expect:  no slower than the fp16 twin; at 512 keys 12.9 us without producers, 12.5 us with one and 11.7 us with two
// tile:    BLOCK_M queries x BLOCK_N keys; CONSUMER_WARPS warps share S and P; 55 KB of shared memory per block, as the fp16 twin
// takes:   e4m3 with an output in fp16 or bf16, D = 64, any S_q and S_kv >= 1, top-left causal mask; rows contiguous and
//          16-byte aligned
#include <cuda_fp8.h>
#include <math_constants.h>
#include <mma.h>

#include "fa/entry.h"
#include "fa/ptx.cuh"

namespace wmma = nvcuda::wmma;

// The barriers of this kernel.  A test omits one with OMIT_BARRIER, to check that the error is detected.
enum Barrier { NONE, Q_CONVERTED, K_FULL, V_FULL, KV_EMPTY, S_STORED, P_STORED, L_STORED, O_STORED };

constexpr int HEAD_DIM = 64;
constexpr int STAGES = 2;
constexpr int WARP = 32;
constexpr int WMMA_TILE = 16;  // wmma's M, N and K
constexpr int VECTOR = 8;      // 16-bit elements in 16 bytes
constexpr int PAD = 8;         // 16 bytes after each row shift the next row by four banks
constexpr int E4M3_VECTOR = 16;  // e4m3 elements in 16 bytes
constexpr int E4M3_VECTORS_PER_ROW = HEAD_DIM / E4M3_VECTOR;

constexpr int CONSUMER_THREADS = CONSUMER_WARPS * WARP;
constexpr int THREADS = CONSUMER_THREADS + PRODUCER_WARPS * WARP;
constexpr int MIN_BLOCKS = PRODUCER_WARPS == 0 ? 4 : 3;  // per SM: as many as fit; without it ptxas aims for more and spills
constexpr int KV_THREADS = PRODUCER_WARPS > 0 ? PRODUCER_WARPS * WARP : CONSUMER_THREADS;  // they copy and convert K and V

constexpr int ROW_TILES = BLOCK_M / WMMA_TILE;  // tiles of 16 query rows
constexpr int S_ROW_WARPS = S_WARPS % ROW_TILES == 0 ? ROW_TILES : 1;  // warps with different queries in S
constexpr int S_KEY_WARPS = S_WARPS / S_ROW_WARPS;                      // warps with the same queries and different keys
constexpr int S_TILES_PER_WARP = (BLOCK_N / WMMA_TILE + S_KEY_WARPS - 1) / S_KEY_WARPS;  // of the same 16 queries
constexpr int O_TILES_PER_WARP = ROW_TILES * HEAD_DIM / WMMA_TILE / CONSUMER_WARPS;
constexpr int LANES_PER_ROW = 8;  // lanes per row of S: they access 128 contiguous bytes, without bank conflicts
constexpr int ROWS_PER_PASS = WARP / LANES_PER_ROW;
constexpr int ROWS_PER_LANE = BLOCK_M / CONSUMER_WARPS / ROWS_PER_PASS;
constexpr int VECTORS_PER_LANE = BLOCK_N / (LANES_PER_ROW * 4);

static_assert(BLOCK_M % WMMA_TILE == 0 && BLOCK_N % (LANES_PER_ROW * 4) == 0, "tiles must be whole WMMA tiles and row passes");
static_assert(BLOCK_N >= HEAD_DIM, "a row of O must fit into a row of S, through which it is stored");
static_assert(CONSUMER_WARPS % ROW_TILES == 0, "the warps of a row tile must share its head dimensions evenly");
static_assert(O_TILES_PER_WARP * CONSUMER_WARPS * WMMA_TILE == ROW_TILES * HEAD_DIM, "every warp must own the same number of tiles of O");
static_assert(ROWS_PER_LANE * ROWS_PER_PASS * CONSUMER_WARPS == BLOCK_M, "every warp must own the same number of rows of S");
static_assert(S_WARPS >= 1 && S_WARPS <= CONSUMER_WARPS, "S is computed by 1 to CONSUMER_WARPS warps");

struct Smem {  // q, k and v are in e4m3 until they are converted in place
  fp16 q[BLOCK_M][HEAD_DIM + PAD];
  fp16 k[STAGES][BLOCK_N][HEAD_DIM + PAD];
  fp16 v[STAGES][BLOCK_N][HEAD_DIM + PAD];
  float s[BLOCK_M][BLOCK_N + PAD];
  fp16 p[BLOCK_M][BLOCK_N + PAD];
  float v_descale;
  float rescale[BLOCK_M];    // 2^(old max - new max)
  float inverse_l[BLOCK_M];  // v_descale / row sum
  uint64_t k_full[STAGES], v_full[STAGES], kv_empty[STAGES];  // mbarriers, if there are producers
};

// The work of one thread block: BLOCK_M queries of one head, and all keys that they see.
template <typename Out>
struct WorkTile {
  const e4m3* q_gmem;  // [BLOCK_M, HEAD_DIM], row stride q_stride.seq
  const e4m3* k_gmem;  // [seq_k, HEAD_DIM]
  const e4m3* v_gmem;  // [seq_k, HEAD_DIM]
  Out* out_gmem;       // [BLOCK_M, HEAD_DIM]
  float* lse_gmem;  // [BLOCK_M], or null
  int first_query;
  int queries;    // BLOCK_M, or less in the last block
  int key_tiles;  // number of key tiles that any query of the block sees
};

template <typename Out>
__device__ WorkTile<Out> make_work_tile(const FaForwardArgs& args) {
  const unsigned blocks_per_head = (args.seq_q + BLOCK_M - 1) / BLOCK_M;
  const int first_query = blockIdx.x % blocks_per_head * BLOCK_M;
  const int64_t batch_head = blockIdx.x / blocks_per_head;
  const int64_t head = batch_head % args.heads, batch = batch_head / args.heads;
  const int64_t kv_head = head / (args.heads / args.kv_heads);
  const int queries = min(int64_t(BLOCK_M), args.seq_q - first_query);
  const int64_t visible_keys = args.causal == FA_CAUSAL_TOP_LEFT ? min(args.seq_k, int64_t(first_query) + queries) : args.seq_k;
  return {
      static_cast<const e4m3*>(args.q) + batch * args.q_stride.batch + head * args.q_stride.head + first_query * args.q_stride.seq,
      static_cast<const e4m3*>(args.k) + batch * args.k_stride.batch + kv_head * args.k_stride.head,
      static_cast<const e4m3*>(args.v) + batch * args.v_stride.batch + kv_head * args.v_stride.head,
      static_cast<Out*>(args.out) + batch * args.out_stride.batch + head * args.out_stride.head + first_query * args.out_stride.seq,
      args.lse == nullptr ? nullptr : args.lse + batch_head * args.seq_q + first_query,
      first_query,
      queries,
      static_cast<int>((visible_keys + BLOCK_N - 1) / BLOCK_N),
  };
}

// The descales of the block's head: `scale_log2` is scale * log2(e), for exp2, times the descales of Q and K.
struct Descales {
  float scale_log2, v;
};

__device__ Descales load_descales(const FaForwardArgs& args) {
  const int64_t batch_head = blockIdx.x / ((args.seq_q + BLOCK_M - 1) / BLOCK_M);
  const int64_t head = batch_head % args.heads, batch = batch_head / args.heads;
  const int64_t kv_batch_head = batch * args.kv_heads + head / (args.heads / args.kv_heads);
  return {args.scale * CUDART_L2E_F * args.q_descale[batch_head] * args.k_descale[kv_batch_head], args.v_descale[kv_batch_head]};
}

// One thread's part of ROWS rows that THREADS threads copy and convert.  16 numbers take 16 bytes in e4m3 and 32 bytes in fp16: they
// are copied to the first half of these 32 bytes, and converted in place by the thread that copied them.  It therefore waits for
// its own copies only, without a barrier.
template <int ROWS, int THREADS>
struct RowsInE4m3 {
  static constexpr int ROWS_PER_COPY = THREADS / E4M3_VECTORS_PER_ROW, COPIES = (ROWS + ROWS_PER_COPY - 1) / ROWS_PER_COPY;
  fp16 (*tile_smem)[HEAD_DIM + PAD];
  int first_row, column;
  uint4 e4m3_rmem[COPIES];

  __device__ __forceinline__ RowsInE4m3(fp16 (*tile_smem)[HEAD_DIM + PAD], int thread)
      : tile_smem(tile_smem), first_row(thread / E4M3_VECTORS_PER_ROW), column(thread % E4M3_VECTORS_PER_ROW * E4M3_VECTOR) {}

  __device__ __forceinline__ bool has_row(int i) const { return ROWS % ROWS_PER_COPY == 0 || first_row + i * ROWS_PER_COPY < ROWS; }
  __device__ __forceinline__ uint4* vector(int i) const { return reinterpret_cast<uint4*>(&tile_smem[first_row + i * ROWS_PER_COPY][column]); }

  // Rows from valid_rows on are filled with zeros.
  __device__ __forceinline__ void copy(const e4m3* from_gmem, int64_t row_stride, int64_t valid_rows) const {
#pragma unroll
    for (int i = 0; i < COPIES; ++i) {
      const int row = first_row + i * ROWS_PER_COPY;
      const bool valid = row < valid_rows;
      if (has_row(i)) fa::cp_async_16_or_zero(vector(i), from_gmem + (valid ? row : 0) * row_stride + column, valid);
    }
  }

  // Loads and stores are two steps: other work may stand between them, and no load waits for the store before it.
  __device__ __forceinline__ void load() {
#pragma unroll
    for (int i = 0; i < COPIES; ++i) {
      if (has_row(i)) e4m3_rmem[i] = *vector(i);
    }
  }

  // Every e4m3 number is an fp16 number.
  __device__ __forceinline__ void store_as_fp16() const {
#pragma unroll
    for (int i = 0; i < COPIES; ++i) {
      const auto* pairs = reinterpret_cast<const __nv_fp8x2_storage_t*>(&e4m3_rmem[i]);
      alignas(16) __half2_raw converted[E4M3_VECTOR / 2];
#pragma unroll
      for (int j = 0; j < E4M3_VECTOR / 2; ++j) converted[j] = __nv_cvt_fp8x2_to_halfraw2(pairs[j], __NV_E4M3);
      if (!has_row(i)) continue;
      vector(i)[0] = reinterpret_cast<const uint4*>(converted)[0];
      vector(i)[1] = reinterpret_cast<const uint4*>(converted)[1];
    }
  }

  __device__ __forceinline__ void convert() {
    load();
    store_as_fp16();
  }
};

using QRows = RowsInE4m3<BLOCK_M, CONSUMER_THREADS>;
using KvRows = RowsInE4m3<BLOCK_N, KV_THREADS>;

// Waits until the mbarrier phase of this parity has completed.
__device__ __forceinline__ void wait(Barrier barrier, uint64_t* barrier_smem, uint32_t parity) {
  if (barrier == OMIT_BARRIER) return;
  while (!fa::mbarrier_test_wait(barrier_smem, parity)) {
  }
}

__device__ __forceinline__ void sync_consumers(Barrier barrier) {
  if (barrier != OMIT_BARRIER) fa::barrier_sync<1, CONSUMER_THREADS>();
}

// Load K or V of one tile, if there is one, as one group of copies.
template <typename Out>
__device__ __forceinline__ void load_k(Smem& smem, const WorkTile<Out>& work, const FaForwardArgs& args, int key_tile, int thread) {
  const int64_t first_key = int64_t(key_tile) * BLOCK_N;
  const KvRows k(smem.k[key_tile % STAGES], thread);
  if (key_tile < work.key_tiles) k.copy(work.k_gmem + first_key * args.k_stride.seq, args.k_stride.seq, args.seq_k - first_key);
  fa::cp_async_commit_group();
}

template <typename Out>
__device__ __forceinline__ void load_v(Smem& smem, const WorkTile<Out>& work, const FaForwardArgs& args, int key_tile, int thread) {
  const int64_t first_key = int64_t(key_tile) * BLOCK_N;
  const KvRows v(smem.v[key_tile % STAGES], thread);
  if (key_tile < work.key_tiles) v.copy(work.v_gmem + first_key * args.v_stride.seq, args.v_stride.seq, args.seq_k - first_key);
  fa::cp_async_commit_group();
}

// Load and convert all tiles.  The first one of each stage is already being loaded.  A stage is free when all consumers are done with
// the previous tile in it.
template <typename Out>
__device__ void produce(Smem& smem, const WorkTile<Out>& work, const FaForwardArgs& args, int thread) {
  for (int key_tile = 0; key_tile < work.key_tiles; ++key_tile) {
    const int stage = key_tile % STAGES;
    if (key_tile >= STAGES) {
      wait(KV_EMPTY, &smem.kv_empty[stage], (key_tile / STAGES - 1) % 2);
      load_k(smem, work, args, key_tile, thread);
      load_v(smem, work, args, key_tile, thread);
    }
    key_tile == 0 ? fa::cp_async_wait_group<2 * STAGES - 1>() : fa::cp_async_wait_group<1>();  // K has arrived
    KvRows(smem.k[stage], thread).convert();
    fa::mbarrier_arrive(&smem.k_full[stage]);
    key_tile == 0 ? fa::cp_async_wait_group<2 * STAGES - 2>() : fa::cp_async_wait_group<0>();  // V has arrived
    KvRows(smem.v[stage], thread).convert();
    fa::mbarrier_arrive(&smem.v_full[stage]);
  }
}

using Accumulator = wmma::fragment<wmma::accumulator, WMMA_TILE, WMMA_TILE, WMMA_TILE, float>;
using A = wmma::fragment<wmma::matrix_a, WMMA_TILE, WMMA_TILE, WMMA_TILE, fp16, wmma::row_major>;
template <typename Layout>
using B = wmma::fragment<wmma::matrix_b, WMMA_TILE, WMMA_TILE, WMMA_TILE, fp16, Layout>;

// Finds the row (0 to 15) of each accumulator element that this lane holds.  WMMA does not specify it, so the warp
// loads a tile whose elements are their row numbers.
__device__ void find_rows(Smem& smem, int warp, int lane, int (&row_of)[Accumulator::num_elements]) {
  float* tile_smem = &smem.s[warp % ROW_TILES * WMMA_TILE][warp / ROW_TILES * WMMA_TILE];  // used by this warp only
  for (int i = lane; i < WMMA_TILE * WMMA_TILE; i += WARP) tile_smem[i / WMMA_TILE * (BLOCK_N + PAD) + i % WMMA_TILE] = i / WMMA_TILE;
  __syncwarp();
  Accumulator rows;
  wmma::load_matrix_sync(rows, tile_smem, BLOCK_N + PAD, wmma::mem_row_major);
#pragma unroll
  for (int i = 0; i < Accumulator::num_elements; ++i) row_of[i] = static_cast<int>(rows.x[i]);
}

// S = Q K^T, unscaled, into shared memory.  A warp computes all its tiles of 16 queries at the same time: they share Q, and no product
// of one tile waits for those of another.
__device__ void compute_s(Smem& smem, int stage, int warp) {
  if (S_WARPS < CONSUMER_WARPS && warp >= S_WARPS) return;
#pragma unroll
  for (int row_tile = 0; row_tile < ROW_TILES; row_tile += S_ROW_WARPS) {
    const int query = (row_tile + warp % S_ROW_WARPS) * WMMA_TILE;
    Accumulator s[S_TILES_PER_WARP];
    for (auto& tile : s) wmma::fill_fragment(tile, 0.0f);
#pragma unroll
    for (int d = 0; d < HEAD_DIM; d += WMMA_TILE) {
      A q;
      wmma::load_matrix_sync(q, &smem.q[query][d], HEAD_DIM + PAD);
#pragma unroll
      for (int i = 0; i < S_TILES_PER_WARP; ++i) {
        const int key = (warp / S_ROW_WARPS + i * S_KEY_WARPS) * WMMA_TILE;
        if (BLOCK_N / WMMA_TILE % S_KEY_WARPS != 0 && key >= BLOCK_N) break;
        B<wmma::col_major> k;  // column-major K^T [HEAD_DIM, BLOCK_N] is row-major K
        wmma::load_matrix_sync(k, &smem.k[stage][key][d], HEAD_DIM + PAD);
        wmma::mma_sync(s[i], q, k, s[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < S_TILES_PER_WARP; ++i) {
      const int key = (warp / S_ROW_WARPS + i * S_KEY_WARPS) * WMMA_TILE;
      if (BLOCK_N / WMMA_TILE % S_KEY_WARPS != 0 && key >= BLOCK_N) break;
      wmma::store_matrix_sync(&smem.s[query][key], s[i], BLOCK_N + PAD, wmma::mem_row_major);
    }
  }
}

__device__ __forceinline__ float max_of_row(float x) {
  for (int step = LANES_PER_ROW / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

__device__ __forceinline__ float sum_of_row(float x) {
  for (int step = LANES_PER_ROW / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

// O = O * rescale + P V.
__device__ __forceinline__ void add_pv(Smem& smem, int stage, Accumulator (&o)[O_TILES_PER_WARP],
                                       const int (&row_of)[Accumulator::num_elements], int warp) {
  const int warp_row = warp % ROW_TILES * WMMA_TILE;
#pragma unroll
  for (int i = 0; i < Accumulator::num_elements; ++i) {
    const float rescale = smem.rescale[warp_row + row_of[i]];
    for (auto& tile : o) tile.x[i] *= rescale;
  }
#pragma unroll
  for (int key = 0; key < BLOCK_N; key += WMMA_TILE) {
    A p;
    wmma::load_matrix_sync(p, &smem.p[warp_row][key], BLOCK_N + PAD);
#pragma unroll
    for (int j = 0; j < O_TILES_PER_WARP; ++j) {
      B<wmma::row_major> v;
      wmma::load_matrix_sync(v, &smem.v[stage][key][(warp / ROW_TILES * O_TILES_PER_WARP + j) * WMMA_TILE], HEAD_DIM + PAD);
      wmma::mma_sync(o[j], p, v, o[j]);
    }
  }
}

// Normalises O, with v_descale / l from shared memory, because a lane owns other rows of S than of O.
template <typename Out>
__device__ __forceinline__ void store(Smem& smem, const WorkTile<Out>& work, const FaForwardArgs& args, Accumulator (&o)[O_TILES_PER_WARP],
                                      const int (&row_of)[Accumulator::num_elements], const float (&m)[ROWS_PER_LANE],
                                      const float (&l)[ROWS_PER_LANE], int warp, int lane) {
  const int warp_row = warp % ROW_TILES * WMMA_TILE, lane_row = warp * ROWS_PER_LANE * ROWS_PER_PASS + lane / LANES_PER_ROW;
#pragma unroll
  for (int r = 0; r < ROWS_PER_LANE; ++r) {
    const int row = lane_row + r * ROWS_PER_PASS;
    const float sum = sum_of_row(l[r]);
    if (lane % LANES_PER_ROW != 0) continue;
    smem.inverse_l[row] = smem.v_descale / sum;
    if (work.lse_gmem != nullptr && row < work.queries) work.lse_gmem[row] = (m[r] + log2f(sum)) * CUDART_LN2_F;
  }
  sync_consumers(L_STORED);
#pragma unroll
  for (int i = 0; i < Accumulator::num_elements; ++i) {
    const float inverse_l = smem.inverse_l[warp_row + row_of[i]];
    for (auto& tile : o) tile.x[i] *= inverse_l;
  }

  // Store, through the shared memory of S, 16 bytes at a time.
#pragma unroll
  for (int j = 0; j < O_TILES_PER_WARP; ++j) {
    const int dim = (warp / ROW_TILES * O_TILES_PER_WARP + j) * WMMA_TILE;
    wmma::store_matrix_sync(&smem.s[warp_row][dim], o[j], BLOCK_N + PAD, wmma::mem_row_major);
  }
  sync_consumers(O_STORED);
  for (int i = threadIdx.x; i < work.queries * HEAD_DIM / VECTOR; i += CONSUMER_THREADS) {
    const int row = i / (HEAD_DIM / VECTOR), dim = i % (HEAD_DIM / VECTOR) * VECTOR;
    alignas(16) Out rounded[VECTOR];
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) rounded[j] = Out(smem.s[row][dim + j]);
    *reinterpret_cast<uint4*>(&work.out_gmem[row * args.out_stride.seq + dim]) = *reinterpret_cast<const uint4*>(rounded);
  }
}

template <typename Out>
__global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attention_kernel(const FaForwardArgs args) {
  extern __shared__ __align__(128) unsigned char smem_bytes[];
  Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const WorkTile<Out> work = make_work_tile<Out>(args);

  // Load Q and the first tiles.  Without producers, the consumers load and convert K and V too, between their own barriers.
  const bool is_producer = PRODUCER_WARPS > 0 && warp >= CONSUMER_WARPS;
  const int kv_thread = PRODUCER_WARPS > 0 ? threadIdx.x - CONSUMER_THREADS : threadIdx.x;
  QRows q(smem.q, threadIdx.x);
  if (!is_producer) q.copy(work.q_gmem, args.q_stride.seq, work.queries);
  if (is_producer || PRODUCER_WARPS == 0) {
#pragma unroll 1
    for (int key_tile = 0; key_tile < (PRODUCER_WARPS > 0 ? STAGES : 1); ++key_tile) {
      load_k(smem, work, args, key_tile, kv_thread);
      load_v(smem, work, args, key_tile, kv_thread);
    }
  }

  if (PRODUCER_WARPS > 0) {
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < STAGES; ++stage) {
        fa::mbarrier_init(&smem.k_full[stage], KV_THREADS);
        fa::mbarrier_init(&smem.v_full[stage], KV_THREADS);
        fa::mbarrier_init(&smem.kv_empty[stage], CONSUMER_THREADS);
      }
    }
    __syncthreads();  // all threads see the initialised mbarriers
    if (is_producer) {
      produce(smem, work, args, kv_thread);
      return;  // only the consumers take part in the following barriers
    }
  }
  const Descales descale = load_descales(args);
  int row_of[Accumulator::num_elements];
  find_rows(smem, warp, lane, row_of);
  if (PRODUCER_WARPS > 0) fa::cp_async_wait_all();
  if (PRODUCER_WARPS == 0) fa::cp_async_wait_group<1>();  // V of the first tile may still be in flight
  q.convert();
  if (PRODUCER_WARPS == 0) KvRows(smem.k[0], kv_thread).convert();
  if (threadIdx.x == 0) smem.v_descale = descale.v;  // used at the end only
  sync_consumers(Q_CONVERTED);  // all warps have converted a part of Q, and have read their row numbers, which S overwrites
  const int lane_row = warp * ROWS_PER_LANE * ROWS_PER_PASS + lane / LANES_PER_ROW;  // first of this lane's rows of S
  Accumulator o[O_TILES_PER_WARP];
  for (auto& tile : o) wmma::fill_fragment(tile, 0.0f);
  float m[ROWS_PER_LANE];       // running row max, in log2
  float l[ROWS_PER_LANE] = {};  // this lane's part of the running row sum
  for (float& row_max : m) row_max = -CUDART_INF_F;

  for (int key_tile = 0; key_tile < work.key_tiles; ++key_tile) {
    const int stage = key_tile % STAGES;
    const uint32_t parity = key_tile / STAGES % 2;
    KvRows next_k(smem.k[(key_tile + 1) % STAGES], kv_thread), v(smem.v[stage], kv_thread);
    if (PRODUCER_WARPS == 0) load_k(smem, work, args, key_tile + 1, kv_thread);  // its stage is free since the last S_STORED

    // S = Q K^T
    if (PRODUCER_WARPS > 0) wait(K_FULL, &smem.k_full[stage], parity);
    compute_s(smem, stage, warp);
    sync_consumers(S_STORED);  // several warps wrote each row of S; all warps are done with K and with V of the last tile

    // Without producers: load V of the next tile; convert V of this tile and K of the next one, which P_STORED publishes.
    if (PRODUCER_WARPS == 0) {
      load_v(smem, work, args, key_tile + 1, kv_thread);
      fa::cp_async_wait_group<1>();
      v.load();
      next_k.load();
    }

#pragma unroll
    for (int r = 0; r < ROWS_PER_LANE; ++r) {
      const int row = lane_row + r * ROWS_PER_PASS;
      const int64_t query = work.first_query + row;
      const int64_t visible = args.causal == FA_CAUSAL_TOP_LEFT ? min(args.seq_k, query + 1) : args.seq_k;
      const int limit = static_cast<int>(min(visible - int64_t(key_tile) * BLOCK_N, int64_t(BLOCK_N)));

      // mask, row max
      float4 s[VECTORS_PER_LANE];
      float m_new = m[r];
#pragma unroll
      for (int i = 0; i < VECTORS_PER_LANE; ++i) {
        const int column = (i * LANES_PER_ROW + lane % LANES_PER_ROW) * 4;
        s[i] = *reinterpret_cast<const float4*>(&smem.s[row][column]);
        s[i].x = column + 0 < limit ? s[i].x * descale.scale_log2 : -CUDART_INF_F;
        s[i].y = column + 1 < limit ? s[i].y * descale.scale_log2 : -CUDART_INF_F;
        s[i].z = column + 2 < limit ? s[i].z * descale.scale_log2 : -CUDART_INF_F;
        s[i].w = column + 3 < limit ? s[i].w * descale.scale_log2 : -CUDART_INF_F;
        m_new = fmaxf(m_new, fmaxf(fmaxf(s[i].x, s[i].y), fmaxf(s[i].z, s[i].w)));
      }
      m_new = max_of_row(m_new);  // finite from the first tile on: every query sees key 0

      // rescale; at the first tile m is -inf, and exp2(-inf) = 0
      const float rescale = exp2f(m[r] - m_new);
      if (lane % LANES_PER_ROW == 0) smem.rescale[row] = rescale;
      m[r] = m_new;
      l[r] *= rescale;

      // P = exp2(S - m), row sum
#pragma unroll
      for (int i = 0; i < VECTORS_PER_LANE; ++i) {
        const int column = (i * LANES_PER_ROW + lane % LANES_PER_ROW) * 4;
        const float p[4] = {exp2f(s[i].x - m_new), exp2f(s[i].y - m_new), exp2f(s[i].z - m_new), exp2f(s[i].w - m_new)};
        l[r] += (p[0] + p[1]) + (p[2] + p[3]);
        alignas(8) fp16 rounded[4] = {fp16(p[0]), fp16(p[1]), fp16(p[2]), fp16(p[3])};
        *reinterpret_cast<uint2*>(&smem.p[row][column]) = *reinterpret_cast<const uint2*>(rounded);
      }
    }
    if (PRODUCER_WARPS == 0) {
      v.store_as_fp16();
      next_k.store_as_fp16();  // after the last tile, of what no warp reads
    }
    sync_consumers(P_STORED);  // several warps wrote the rows of P; S may be overwritten

    // O += P V
    if (PRODUCER_WARPS > 0) wait(V_FULL, &smem.v_full[stage], parity);
    add_pv(smem, stage, o, row_of, warp);
    if (PRODUCER_WARPS > 0) fa::mbarrier_arrive(&smem.kv_empty[stage]);
  }

  store(smem, work, args, o, row_of, m, l, warp, lane);
}

// Whether every row of a tensor can be accessed with aligned 16-byte copies, of `elements` elements each.
bool is_vector_aligned(const void* data, const FaStrides& stride, int elements) {
  // The bitwise OR of the strides is divisible by a power of two if and only if every stride is.
  const int64_t strides_or = stride.batch | stride.head | stride.seq;
  return stride.dim == 1 && strides_or % elements == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0;
}

template <typename Out>
int launch_to(const FaForwardArgs* args, cudaStream_t stream) {
  const bool aligned = is_vector_aligned(args->q, args->q_stride, E4M3_VECTOR) && is_vector_aligned(args->k, args->k_stride, E4M3_VECTOR) &&
                       is_vector_aligned(args->v, args->v_stride, E4M3_VECTOR) && is_vector_aligned(args->out, args->out_stride, VECTOR);
  if (!aligned) return fa_refuse(args, "rows of q, k, v and out must be contiguous and start at multiples of 16 bytes");
  if (args->causal == FA_CAUSAL_BOTTOM_RIGHT) return fa_refuse(args, "causal is bottom_right, supported are none and top_left");
  if (args->seq_k < 1) return fa_refuse(args, "seq_k is 0, it must be at least 1");
  const int64_t blocks = args->batch * args->heads * ((args->seq_q + BLOCK_M - 1) / BLOCK_M);
  if (blocks > INT32_MAX || args->seq_k > INT32_MAX - BLOCK_N || args->seq_q > INT32_MAX - BLOCK_M) {
    return fa_refuse(args, "the shape is too large: %lld blocks (at most %d), seq_q %lld (at most %d), seq_k %lld (at most %d)",
                     static_cast<long long>(blocks), INT32_MAX, static_cast<long long>(args->seq_q), INT32_MAX - BLOCK_M,
                     static_cast<long long>(args->seq_k), INT32_MAX - BLOCK_N);
  }
  auto* kernel = &attention_kernel<Out>;
  if (int status = fa_allow_dynamic_smem(args, reinterpret_cast<const void*>(kernel), sizeof(Smem))) return status;
  kernel<<<static_cast<unsigned>(blocks), THREADS, sizeof(Smem), stream>>>(fa_copy_args(args));
  return static_cast<int>(cudaPeekAtLastError());
}

template <typename DTYPE, int>
int launch(const FaForwardArgs* args, cudaStream_t stream) {
  if (args->out_dtype == FA_DTYPE_fp16) return launch_to<fp16>(args, stream);
  if (args->out_dtype == FA_DTYPE_bf16) return launch_to<bf16>(args, stream);
  return fa_refuse(args, "no instantiation for an output of dtype %d", args->out_dtype);
}

FA_FORWARD(launch)

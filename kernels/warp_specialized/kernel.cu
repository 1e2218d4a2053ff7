// warp_specialized: stage2, ws_p1 and ws_p2: WMMA tiles, cp.async into two stages of K and V, 0, 1 or 2 producer warps.
// step:    tensor cores through nvcuda::wmma, and copies of the next tile that overlap with the computation
// because: minimal spends its time on scalar multiplies and on waiting for global memory
// expect:  tens of times faster than minimal; no gain from producer warps, since no thread waits for a cp.async anyway
// tile:    BLOCK_M queries x BLOCK_N keys; CONSUMER_WARPS warps share S and P; 55 KB of shared memory per block
// takes:   fp16 and bf16, D = 64, any S_q and S_kv >= 1, top-left causal mask; rows contiguous and 16-byte aligned
#include <math_constants.h>
#include <mma.h>

#include "fa/entry.h"
#include "fa/ptx.cuh"

namespace wmma = nvcuda::wmma;

// The barriers of this kernel.  A test omits one with OMIT_BARRIER, to check that the error is detected.
enum Barrier { NONE, ROWS_FOUND, K_FULL, V_FULL, KV_EMPTY, S_STORED, P_STORED, L_STORED, O_STORED };

constexpr int HEAD_DIM = 64;
constexpr int STAGES = 2;
constexpr int WARP = 32;
constexpr int WMMA_TILE = 16;  // wmma's M, N and K
constexpr int VECTOR = 8;      // 16-bit elements in a 16-byte copy
constexpr int PAD = 8;         // 16 bytes after each row shift the next row by four banks

constexpr int CONSUMER_THREADS = CONSUMER_WARPS * WARP;
constexpr int THREADS = CONSUMER_THREADS + PRODUCER_WARPS * WARP;
constexpr int MIN_BLOCKS = 3;  // per SM; without it ptxas aims for higher occupancy and spills
constexpr int COPY_THREADS = PRODUCER_WARPS > 0 ? PRODUCER_WARPS * WARP : CONSUMER_THREADS;

constexpr int ROW_TILES = BLOCK_M / WMMA_TILE;  // tiles of 16 query rows
constexpr int S_TILES = ROW_TILES * BLOCK_N / WMMA_TILE;
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

template <typename T>
struct Smem {
  T q[BLOCK_M][HEAD_DIM + PAD];
  T k[STAGES][BLOCK_N][HEAD_DIM + PAD];
  T v[STAGES][BLOCK_N][HEAD_DIM + PAD];
  float s[BLOCK_M][BLOCK_N + PAD];
  T p[BLOCK_M][BLOCK_N + PAD];
  float rescale[BLOCK_M];    // 2^(old max - new max)
  float inverse_l[BLOCK_M];  // 1 / row sum
  uint64_t k_full[STAGES], v_full[STAGES], kv_empty[STAGES];  // mbarriers
};

// The work of one thread block: BLOCK_M queries of one head, and all keys that they see.
template <typename T>
struct WorkTile {
  const T* q_gmem;  // [BLOCK_M, HEAD_DIM], row stride q_stride.seq
  const T* k_gmem;  // [seq_k, HEAD_DIM]
  const T* v_gmem;  // [seq_k, HEAD_DIM]
  T* out_gmem;      // [BLOCK_M, HEAD_DIM]
  float* lse_gmem;  // [BLOCK_M], or null
  int first_query;
  int queries;    // BLOCK_M, or less in the last block
  int key_tiles;  // number of key tiles that any query of the block sees
};

template <typename T>
__device__ WorkTile<T> make_work_tile(const FaForwardArgs& args) {
  const unsigned blocks_per_head = (args.seq_q + BLOCK_M - 1) / BLOCK_M;
  const int first_query = blockIdx.x % blocks_per_head * BLOCK_M;
  const int64_t batch_head = blockIdx.x / blocks_per_head;
  const int64_t head = batch_head % args.heads, batch = batch_head / args.heads;
  const int64_t kv_head = head / (args.heads / args.kv_heads);
  const int queries = min(int64_t(BLOCK_M), args.seq_q - first_query);
  const int64_t visible_keys = args.causal == FA_CAUSAL_TOP_LEFT ? min(args.seq_k, int64_t(first_query) + queries) : args.seq_k;
  return {
      static_cast<const T*>(args.q) + batch * args.q_stride.batch + head * args.q_stride.head + first_query * args.q_stride.seq,
      static_cast<const T*>(args.k) + batch * args.k_stride.batch + kv_head * args.k_stride.head,
      static_cast<const T*>(args.v) + batch * args.v_stride.batch + kv_head * args.v_stride.head,
      static_cast<T*>(args.out) + batch * args.out_stride.batch + head * args.out_stride.head + first_query * args.out_stride.seq,
      args.lse == nullptr ? nullptr : args.lse + batch_head * args.seq_q + first_query,
      first_query,
      queries,
      static_cast<int>((visible_keys + BLOCK_N - 1) / BLOCK_N),
  };
}

// Copies ROWS rows with COPY_THREADS threads, of which this is `copy_thread`; rows from valid_rows on are filled with zeros.
template <int ROWS, typename T>
__device__ void copy_rows(T (*to_smem)[HEAD_DIM + PAD], const T* from_gmem, int64_t row_stride, int64_t valid_rows, int copy_thread) {
  for (int i = copy_thread; i < ROWS * HEAD_DIM / VECTOR; i += COPY_THREADS) {
    const int row = i / (HEAD_DIM / VECTOR), column = i % (HEAD_DIM / VECTOR) * VECTOR;
    const bool valid = row < valid_rows;
    fa::cp_async_16_or_zero(&to_smem[row][column], from_gmem + (valid ? row : 0) * row_stride + column, valid);
  }
}

// Waits until the mbarrier phase of this parity has completed.
__device__ __forceinline__ void wait(Barrier barrier, uint64_t* barrier_smem, uint32_t parity) {
  if (barrier == OMIT_BARRIER) return;
  while (!fa::mbarrier_test_wait(barrier_smem, parity)) {
  }
}

__device__ __forceinline__ void sync_consumers(Barrier barrier) {
  if (barrier != OMIT_BARRIER) fa::barrier_sync<1, CONSUMER_THREADS>();
}

// Load K and V of one tile.  The stage is free when all consumers are done with the previous tile in it.
template <typename T>
__device__ void load_kv(Smem<T>& smem, const WorkTile<T>& work, const FaForwardArgs& args, int key_tile, int copy_thread) {
  const int stage = key_tile % STAGES;
  const int64_t first_key = int64_t(key_tile) * BLOCK_N;
  if (key_tile >= STAGES) wait(KV_EMPTY, &smem.kv_empty[stage], (key_tile / STAGES - 1) % 2);
  copy_rows<BLOCK_N>(smem.k[stage], work.k_gmem + first_key * args.k_stride.seq, args.k_stride.seq, args.seq_k - first_key, copy_thread);
  fa::cp_async_mbarrier_arrive(&smem.k_full[stage]);
  copy_rows<BLOCK_N>(smem.v[stage], work.v_gmem + first_key * args.v_stride.seq, args.v_stride.seq, args.seq_k - first_key, copy_thread);
  fa::cp_async_mbarrier_arrive(&smem.v_full[stage]);
}

template <typename T>
__device__ void produce(Smem<T>& smem, const WorkTile<T>& work, const FaForwardArgs& args, int copy_thread) {
  for (int key_tile = 0; key_tile < work.key_tiles; ++key_tile) load_kv(smem, work, args, key_tile, copy_thread);
  fa::cp_async_wait_all();  // all copies complete before the thread exits
}

using Accumulator = wmma::fragment<wmma::accumulator, WMMA_TILE, WMMA_TILE, WMMA_TILE, float>;
template <typename T>
using A = wmma::fragment<wmma::matrix_a, WMMA_TILE, WMMA_TILE, WMMA_TILE, T, wmma::row_major>;
template <typename T, typename Layout>
using B = wmma::fragment<wmma::matrix_b, WMMA_TILE, WMMA_TILE, WMMA_TILE, T, Layout>;

// Finds the row (0 to 15) of each accumulator element that this lane holds.  WMMA does not specify it, so the warp
// loads a tile whose elements are their row numbers.
template <typename T>
__device__ void find_rows(Smem<T>& smem, int warp, int lane, int (&row_of)[Accumulator::num_elements]) {
  float* tile_smem = &smem.s[warp % ROW_TILES * WMMA_TILE][warp / ROW_TILES * WMMA_TILE];  // used by this warp only
  for (int i = lane; i < WMMA_TILE * WMMA_TILE; i += WARP) tile_smem[i / WMMA_TILE * (BLOCK_N + PAD) + i % WMMA_TILE] = i / WMMA_TILE;
  __syncwarp();
  Accumulator rows;
  wmma::load_matrix_sync(rows, tile_smem, BLOCK_N + PAD, wmma::mem_row_major);
#pragma unroll
  for (int i = 0; i < Accumulator::num_elements; ++i) row_of[i] = static_cast<int>(rows.x[i]);
}

// S = Q K^T, unscaled, into shared memory.  Warp w computes tiles w, w + S_WARPS, ...
template <typename T>
__device__ void compute_s(Smem<T>& smem, int stage, int warp) {
  if (warp >= S_WARPS) return;
  for (int tile = warp; tile < S_TILES; tile += S_WARPS) {
    const int query = tile % ROW_TILES * WMMA_TILE, key = tile / ROW_TILES * WMMA_TILE;
    Accumulator s;
    wmma::fill_fragment(s, 0.0f);
#pragma unroll
    for (int d = 0; d < HEAD_DIM; d += WMMA_TILE) {
      A<T> q;
      B<T, wmma::col_major> k;  // column-major K^T [HEAD_DIM, BLOCK_N] is row-major K
      wmma::load_matrix_sync(q, &smem.q[query][d], HEAD_DIM + PAD);
      wmma::load_matrix_sync(k, &smem.k[stage][key][d], HEAD_DIM + PAD);
      wmma::mma_sync(s, q, k, s);
    }
    wmma::store_matrix_sync(&smem.s[query][key], s, BLOCK_N + PAD, wmma::mem_row_major);
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

// Normalises O, with 1 / l from shared memory, because a lane owns other rows of S than of O.
template <typename T>
__device__ __forceinline__ void store(Smem<T>& smem, const WorkTile<T>& work, const FaForwardArgs& args, Accumulator (&o)[O_TILES_PER_WARP],
                                      const int (&row_of)[Accumulator::num_elements], const float (&m)[ROWS_PER_LANE],
                                      const float (&l)[ROWS_PER_LANE], int warp, int lane) {
  const int warp_row = warp % ROW_TILES * WMMA_TILE, lane_row = warp * ROWS_PER_LANE * ROWS_PER_PASS + lane / LANES_PER_ROW;
#pragma unroll
  for (int r = 0; r < ROWS_PER_LANE; ++r) {
    const int row = lane_row + r * ROWS_PER_PASS;
    const float sum = sum_of_row(l[r]);
    if (lane % LANES_PER_ROW != 0) continue;
    smem.inverse_l[row] = 1.0f / sum;
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
    alignas(16) T rounded[VECTOR];
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) rounded[j] = T(smem.s[row][dim + j]);
    *reinterpret_cast<uint4*>(&work.out_gmem[row * args.out_stride.seq + dim]) = *reinterpret_cast<const uint4*>(rounded);
  }
}

template <typename T>
__global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attention_kernel(const FaForwardArgs args) {
  extern __shared__ __align__(128) unsigned char smem_bytes[];
  Smem<T>& smem = *reinterpret_cast<Smem<T>*>(smem_bytes);
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const WorkTile<T> work = make_work_tile<T>(args);

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      fa::mbarrier_init(&smem.k_full[stage], COPY_THREADS);
      fa::mbarrier_init(&smem.v_full[stage], COPY_THREADS);
      fa::mbarrier_init(&smem.kv_empty[stage], CONSUMER_THREADS);
    }
  }
  __syncthreads();  // all threads see the initialised mbarriers

  // Load Q.  The wait for the first tile of K covers these copies too.
  const bool is_producer = warp >= CONSUMER_WARPS;
  const int copy_thread = PRODUCER_WARPS > 0 ? threadIdx.x - CONSUMER_THREADS : threadIdx.x;
  if (is_producer || PRODUCER_WARPS == 0) copy_rows<BLOCK_M>(smem.q, work.q_gmem, args.q_stride.seq, work.queries, copy_thread);
  if (is_producer) {
    produce(smem, work, args, copy_thread);
    return;  // only the consumers take part in the following barriers
  }
  if (PRODUCER_WARPS == 0) load_kv(smem, work, args, 0, copy_thread);

  int row_of[Accumulator::num_elements];
  find_rows(smem, warp, lane, row_of);
  sync_consumers(ROWS_FOUND);  // all warps have read their row numbers, which S overwrites
  const int warp_row = warp % ROW_TILES * WMMA_TILE;  // first of this warp's 16 rows of O
  const int lane_row = warp * ROWS_PER_LANE * ROWS_PER_PASS + lane / LANES_PER_ROW;  // first of this lane's rows of S
  const float scale_log2 = args.scale * CUDART_L2E_F;  // exp(x) = 2^(x log2 e)
  Accumulator o[O_TILES_PER_WARP];
  for (auto& tile : o) wmma::fill_fragment(tile, 0.0f);
  float m[ROWS_PER_LANE];       // running row max, in log2
  float l[ROWS_PER_LANE] = {};  // this lane's part of the running row sum
  for (float& row_max : m) row_max = -CUDART_INF_F;

  for (int key_tile = 0; key_tile < work.key_tiles; ++key_tile) {
    const int stage = key_tile % STAGES;
    const uint32_t parity = key_tile / STAGES % 2;
    if (PRODUCER_WARPS == 0 && key_tile + 1 < work.key_tiles) load_kv(smem, work, args, key_tile + 1, copy_thread);

    // S = Q K^T
    wait(K_FULL, &smem.k_full[stage], parity);
    compute_s(smem, stage, warp);
    sync_consumers(S_STORED);  // several warps wrote each row of S

#pragma unroll
    for (int r = 0; r < ROWS_PER_LANE; ++r) {
      const int row = lane_row + r * ROWS_PER_PASS;
      const int64_t query = work.first_query + row;
      const int64_t visible = args.causal == FA_CAUSAL_TOP_LEFT ? min(args.seq_k, query + 1) : args.seq_k;
      const int64_t limit = visible - int64_t(key_tile) * BLOCK_N;

      // mask, row max
      float4 s[VECTORS_PER_LANE];
      float m_new = m[r];
#pragma unroll
      for (int i = 0; i < VECTORS_PER_LANE; ++i) {
        const int column = (i * LANES_PER_ROW + lane % LANES_PER_ROW) * 4;
        s[i] = *reinterpret_cast<const float4*>(&smem.s[row][column]);
        s[i].x = column + 0 < limit ? s[i].x * scale_log2 : -CUDART_INF_F;
        s[i].y = column + 1 < limit ? s[i].y * scale_log2 : -CUDART_INF_F;
        s[i].z = column + 2 < limit ? s[i].z * scale_log2 : -CUDART_INF_F;
        s[i].w = column + 3 < limit ? s[i].w * scale_log2 : -CUDART_INF_F;
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
        alignas(8) T rounded[4] = {T(p[0]), T(p[1]), T(p[2]), T(p[3])};
        *reinterpret_cast<uint2*>(&smem.p[row][column]) = *reinterpret_cast<const uint2*>(rounded);
      }
    }
    sync_consumers(P_STORED);  // several warps wrote the rows of P; S may be overwritten

    // O += P V
#pragma unroll
    for (int i = 0; i < Accumulator::num_elements; ++i) {
      const float rescale = smem.rescale[warp_row + row_of[i]];
      for (auto& tile : o) tile.x[i] *= rescale;
    }
    wait(V_FULL, &smem.v_full[stage], parity);
#pragma unroll
    for (int key = 0; key < BLOCK_N; key += WMMA_TILE) {
      A<T> p;
      wmma::load_matrix_sync(p, &smem.p[warp_row][key], BLOCK_N + PAD);
#pragma unroll
      for (int j = 0; j < O_TILES_PER_WARP; ++j) {
        B<T, wmma::row_major> v;
        wmma::load_matrix_sync(v, &smem.v[stage][key][(warp / ROW_TILES * O_TILES_PER_WARP + j) * WMMA_TILE], HEAD_DIM + PAD);
        wmma::mma_sync(o[j], p, v, o[j]);
      }
    }
    fa::mbarrier_arrive(&smem.kv_empty[stage]);
  }

  store(smem, work, args, o, row_of, m, l, warp, lane);
}

// Whether every row of a tensor can be accessed with aligned 16-byte copies.
bool is_vector_aligned(const void* data, const FaStrides& stride) {
  // The bitwise OR of the strides is divisible by a power of two if and only if every stride is.
  const int64_t strides_or = stride.batch | stride.head | stride.seq;
  return stride.dim == 1 && strides_or % VECTOR == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0;
}

template <typename T, int>
int launch(const FaForwardArgs* args, cudaStream_t stream) {
  const bool aligned = is_vector_aligned(args->q, args->q_stride) && is_vector_aligned(args->k, args->k_stride) &&
                       is_vector_aligned(args->v, args->v_stride) && is_vector_aligned(args->out, args->out_stride);
  if (!aligned) return fa_refuse(args, "rows of q, k, v and out must be contiguous and start at multiples of 16 bytes");
  if (args->causal == FA_CAUSAL_BOTTOM_RIGHT) return fa_refuse(args, "causal is bottom_right, supported are none and top_left");
  if (args->seq_k < 1) return fa_refuse(args, "seq_k is 0, it must be at least 1");
  const int64_t blocks = args->batch * args->heads * ((args->seq_q + BLOCK_M - 1) / BLOCK_M);
  if (blocks > INT32_MAX || args->seq_k > INT32_MAX - BLOCK_N || args->seq_q > INT32_MAX - BLOCK_M) {
    return fa_refuse(args, "the shape is too large: %lld blocks (at most %d), seq_q %lld (at most %d), seq_k %lld (at most %d)",
                     static_cast<long long>(blocks), INT32_MAX, static_cast<long long>(args->seq_q), INT32_MAX - BLOCK_M,
                     static_cast<long long>(args->seq_k), INT32_MAX - BLOCK_N);
  }
  auto* kernel = &attention_kernel<T>;
  if (int status = fa_allow_dynamic_smem(args, reinterpret_cast<const void*>(kernel), sizeof(Smem<T>))) return status;
  kernel<<<static_cast<unsigned>(blocks), THREADS, sizeof(Smem<T>), stream>>>(fa_copy_args(args));
  return static_cast<int>(cudaPeekAtLastError());
}

FA_FORWARD(launch)

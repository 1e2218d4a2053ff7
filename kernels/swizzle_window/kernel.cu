// swizzle_window: windows and attention sinks; key tiles that no query of a block sees are skipped on both sides.
// step:    windows and attention sinks: key tiles before and after all windows of a block are skipped, and those in which a
//          window begins or ends are masked; the sink is added to each row after the last tile
// because: many models let a query see only the last keys, and give each head a sink; swizzle_async refuses both
// expect:  without a window and a sink, the time of swizzle_async; with the window win127_0 at 1x8x4096x64, 5 to 8 us, for 3
//          of 64 key tiles, two of them masked; a sink costs less than 0.1 us
// tile:    BLOCK_M queries x BLOCK_N keys, 16 queries per warp; 40 KB of shared memory per block (D = 64), 80 KB (D = 128)
// takes:   fp16 and bf16, D = 64 and 128, any S_q >= 1 and S_kv >= 0, top-left and bottom-right causal masks, grouped
//          heads; rows contiguous and 16-byte aligned; windows and sinks
#include <float.h>
#include <math_constants.h>

#include "fa/copy.cuh"
#include "fa/entry.h"
#include "fa/epilogue.cuh"
#include "fa/grid.h"
#include "fa/launch.h"
#include "fa/mma.cuh"
#include "fa/ptx.cuh"
#include "fa/softmax.cuh"
#include "fa/tile.cuh"
#include "fa/warp.cuh"

using fa::MMA_K, fa::MMA_M, fa::MMA_N, fa::QUAD, fa::WARP;

constexpr int WARPS = BLOCK_M / MMA_M;
constexpr int THREADS = WARPS * WARP;
constexpr int N_TILES = BLOCK_N / MMA_N;

static_assert(BLOCK_M % MMA_M == 0, "BLOCK_M must be a multiple of 16, because every warp owns 16 queries");
static_assert(BLOCK_N % MMA_K == 0, "BLOCK_N must be a multiple of 16, because ldmatrix reads 16 keys at a time");
static_assert(STAGES >= 2, "STAGES must be at least 2, because one stage is read while another one is filled");

// What a deliberately wrong kernel does with MISTAKE, to check that the error is detected.
enum Mistake {
  NO_MISTAKE,
  BEGIN_NOT_MASKED,  // no key before a window is hidden, only whole tiles are skipped
  BEGIN_TOO_LATE,    // the tile in which the window of the first query begins is skipped
  SINK_NOT_IN_MAX,   // the sink is added to the row sum, but is not in the row max
};

template <typename T, int HEAD_DIM>
struct Smem {
  alignas(128) T q[BLOCK_M * HEAD_DIM];
  T k[STAGES][BLOCK_N * HEAD_DIM];
  T v[STAGES][BLOCK_N * HEAD_DIM];
};

// The work of one thread block: BLOCK_M queries of one head, and all keys that they see.
template <typename T>
struct WorkTile {
  const T* q_gmem;  // [seq_q, HEAD_DIM], row stride q_stride.seq
  const T* k_gmem;  // [seq_k, HEAD_DIM]
  const T* v_gmem;  // [seq_k, HEAD_DIM]
  int first_query;
  int seq_q, seq_k;
  int begin, diagonal;       // query i of the block sees keys [max(0, begin + i), min(seq_k, diagonal + i))
  int first_tile, end_tile;  // the key tiles that any query of the block sees are [first_tile, end_tile)
};

// Returns a bound of the first query's window as an int.  To the queries of a block, all bounds up to -BLOCK_M are the same, and
// so are all from seq_k on.
__device__ int clamp_key(int64_t key, int seq_k) { return max(int64_t(-BLOCK_M), min(int64_t(seq_k), key)); }

template <typename T>
__device__ WorkTile<T> make_work_tile(const FaForwardArgs& args, unsigned heads_per_kv_head) {
  const unsigned head = blockIdx.x, batch = blockIdx.z;
  const unsigned kv_head = head / heads_per_kv_head;
  const int first_query = blockIdx.y * BLOCK_M, seq_q = args.seq_q, seq_k = args.seq_k;
  const int shift = args.causal == FA_CAUSAL_BOTTOM_RIGHT ? seq_k - seq_q : 0;
  const int position = first_query + seq_k - seq_q;  // the first query's key on the bottom-right diagonal
  int begin = -BLOCK_M, diagonal = args.causal == FA_CAUSAL_NONE ? seq_k : first_query + shift + 1;
  if (args.features & FA_WINDOW_LEFT) begin = clamp_key(position - args.window_left, seq_k);
  if (args.features & FA_WINDOW_RIGHT) diagonal = min(diagonal, clamp_key(position + args.window_right + 1, seq_k));
  const int visible_keys = max(0, min(seq_k, diagonal + BLOCK_M - 1));
  return {
      static_cast<const T*>(args.q) + batch * args.q_stride.batch + head * args.q_stride.head,
      static_cast<const T*>(args.k) + batch * args.k_stride.batch + kv_head * args.k_stride.head,
      static_cast<const T*>(args.v) + batch * args.v_stride.batch + kv_head * args.v_stride.head,
      first_query,
      seq_q,
      seq_k,
      begin,
      diagonal,
      (max(0, begin) + (MISTAKE == BEGIN_TOO_LATE ? BLOCK_N - 1 : 0)) / BLOCK_N,
      (visible_keys + BLOCK_N - 1) / BLOCK_N,
  };
}

// Load K and V of one tile into its stage, as one cp.async group.  Past the last tile the group is empty.
template <typename T, int HEAD_DIM>
__device__ void load_kv(Smem<T, HEAD_DIM>& smem, const WorkTile<T>& work, const FaForwardArgs& args, int key_tile) {
  const int stage = key_tile % STAGES, first_key = key_tile * BLOCK_N;
  if (key_tile < work.end_tile) {
    fa::copy_rows_async<BLOCK_N, HEAD_DIM, THREADS>(smem.k[stage], work.k_gmem, args.k_stride.seq, first_key, work.seq_k);
    fa::copy_rows_async<BLOCK_N, HEAD_DIM, THREADS>(smem.v[stage], work.v_gmem, args.v_stride.seq, first_key, work.seq_k);
  }
  fa::cp_async_commit_group();
}

template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(THREADS) swizzle_window_kernel(const FaForwardArgs args, unsigned heads_per_kv_head) {
  extern __shared__ __align__(128) unsigned char smem_bytes[];
  Smem<T, HEAD_DIM>& smem = *reinterpret_cast<Smem<T, HEAD_DIM>*>(smem_bytes);
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const WorkTile<T> work = make_work_tile<T>(args, heads_per_kv_head);
  const int lane_row = warp * MMA_M + lane / QUAD;  // this lane holds rows lane_row and lane_row + 8 of S, P and O
  // exp(scale s) = 2^(scale_log2 s).  The sign of the scale is applied to Q, so the largest score can be found before scaling.
  // A scale of zero becomes FLT_MIN: all keys still get equal weights, and -inf * scale stays -inf.
  const float scale_log2 = args.scale == 0.0f ? FLT_MIN : fabsf(args.scale) * CUDART_L2E_F;
  const uint32_t q_sign_bits = args.scale < 0.0f ? 0x80008000u : 0u;

  // Load Q, then the first STAGES - 1 tiles of K and V.
  fa::copy_rows_async<BLOCK_M, HEAD_DIM, THREADS>(smem.q, work.q_gmem, args.q_stride.seq, work.first_query, work.seq_q);
  fa::cp_async_commit_group();
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) load_kv<T, HEAD_DIM>(smem, work, args, work.first_tile + i);
  fa::cp_async_wait_group<STAGES - 1>();
  __syncthreads();  // Q is visible to all threads
  uint32_t q[HEAD_DIM / MMA_K][4];
  fa::load_q(q, smem.q, warp * MMA_M, lane, q_sign_bits);

  float o[HEAD_DIM / MMA_N][4] = {};
  float m[2] = {-CUDART_INF_F, -CUDART_INF_F};  // running row max of the unscaled scores
  float l[2] = {};                              // this lane's part of the running row sum

  for (int key_tile = work.first_tile; key_tile < work.end_tile; ++key_tile) {
    const int first_key = key_tile * BLOCK_N;

    // Load K and V: wait for those of this tile, and issue the loads of a later one.
    fa::cp_async_wait_group<STAGES - 2>();
    __syncthreads();  // K and V are visible to all threads, and the stage of the previous tile is free
    load_kv<T, HEAD_DIM>(smem, work, args, key_tile + STAGES - 1);
    const T* k_smem = smem.k[key_tile % STAGES];
    const T* v_smem = smem.v[key_tile % STAGES];

    // S = Q K^T
    float s[N_TILES][4] = {};
    fa::multiply_qk(s, q, k_smem, lane);

    // mask; only tiles that cross the diagonal or the last key need it
    if (first_key + BLOCK_N > min(work.seq_k, work.diagonal)) {
      fa::mask(s, work.seq_k, work.diagonal + lane_row, first_key, lane);
    }
    // and only tiles in which the window of a query begins
    if (MISTAKE != BEGIN_NOT_MASKED && first_key < work.begin + BLOCK_M - 1) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int begin = work.begin + lane_row + i / 2 * 8 - first_key;
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) {
          if (n * MMA_N + lane % QUAD * 2 + i % 2 < begin) s[n][i] = -CUDART_INF_F;
        }
      }
    }

#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // row max
      const float m_new = fa::max_of_row(s, r, m[r]);
      const float m_log2 = m_new == -CUDART_INF_F ? 0.0f : m_new * scale_log2;  // no key seen yet: exp2(-inf - 0) = 0

      // rescale
      const float rescale = fa::ex2_approx_ftz(m[r] * scale_log2 - m_log2);
      m[r] = m_new;
      l[r] *= rescale;
      fa::scale_row(o, r, rescale);

      // P = exp2(S - m), row sum
#pragma unroll
      for (int n = 0; n < N_TILES; ++n) {
        s[n][2 * r] = fa::ex2_approx_ftz(s[n][2 * r] * scale_log2 - m_log2);
        s[n][2 * r + 1] = fa::ex2_approx_ftz(s[n][2 * r + 1] * scale_log2 - m_log2);
        l[r] += s[n][2 * r] + s[n][2 * r + 1];
      }
    }

    // O += P V; two adjacent accumulator fragments of S form one A fragment of P
#pragma unroll
    for (int n = 0; n < N_TILES; n += 2) {
      const uint32_t p[4] = {fa::cvt_rn_x2<T>(s[n][0], s[n][1]), fa::cvt_rn_x2<T>(s[n][2], s[n][3]),
                             fa::cvt_rn_x2<T>(s[n + 1][0], s[n + 1][1]), fa::cvt_rn_x2<T>(s[n + 1][2], s[n + 1][3])};
      fa::multiply_pv(o, p, v_smem, n * MMA_N, lane);
    }
  }

  // Normalise.  A row that sees neither a key nor a sink is zero, and its log-sum-exp is -inf.
  T* out_gmem = static_cast<T*>(args.out) + blockIdx.z * args.out_stride.batch + blockIdx.x * args.out_stride.head;
  float* lse_gmem = args.lse + (blockIdx.z * args.heads + blockIdx.x) * args.seq_q;
  const float sink = args.features & FA_SINK ? args.sink[blockIdx.x] * CUDART_L2E_F : -CUDART_INF_F;  // in log2
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = work.first_query + lane_row + r * 8;
    // The sink is one more score, without a value.  The row max is never -inf, so that a difference to it is not NaN.
    const float m_keys = m[r] * scale_log2, m_row = MISTAKE == SINK_NOT_IN_MAX ? m_keys : fmaxf(m_keys, sink);
    const float m_log2 = fmaxf(m_row, -FLT_MAX);
    const float weight = exp2f(m_keys - m_log2);  // of the keys; may be subnormal, as an output in bf16 may be
    const float sum = fa::sum_of_quad(l[r]) * weight + exp2f(sink - m_log2);
    fa::scale_row(o, r, sum == 0.0f ? 0.0f : weight / sum);
    if (args.lse != nullptr && lane % QUAD == 0 && query < work.seq_q) lse_gmem[query] = fa::lse_of(m_log2, sum);

    // Store.  The lanes of a quad exchange registers, so that each lane stores 16 contiguous bytes.
#pragma unroll
    for (int d = 0; d < HEAD_DIM / MMA_N; d += QUAD) {
      uint32_t packed[4];
#pragma unroll
      for (int i = 0; i < QUAD; ++i) packed[i] = fa::cvt_rn_x2<T>(o[d + i][2 * r], o[d + i][2 * r + 1]);
      fa::transpose_quad(packed, lane);
      if (query >= work.seq_q) continue;
      T* to_gmem = out_gmem + query * args.out_stride.seq + (d + lane % QUAD) * MMA_N;
      *reinterpret_cast<uint4*>(to_gmem) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
    }
  }
}

template <typename T, int HEAD_DIM>
int launch(const FaForwardArgs* args, cudaStream_t stream) {
  dim3 grid;
  if (int status = fa::make_grid(args, BLOCK_M, fa::VECTOR, &grid)) return status;
  constexpr auto kernel = &swizzle_window_kernel<T, HEAD_DIM>;
  constexpr int smem_bytes = sizeof(Smem<T, HEAD_DIM>);
  if (int status = fa::allow_smem<kernel>(args, smem_bytes)) return status;
  kernel<<<grid, THREADS, smem_bytes, stream>>>(fa_copy_args(args), static_cast<unsigned>(args->heads / args->kv_heads));
  return static_cast<int>(cudaPeekAtLastError());
}

FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t stream) {
  if (int status = fa_check_features(args, FA_WINDOW_LEFT | FA_WINDOW_RIGHT | FA_SINK)) return status;
#define LAUNCH_IF(DTYPE, HEAD_DIM) \
  if (args->dtype == FA_DTYPE_##DTYPE && args->head_dim == HEAD_DIM) return launch<DTYPE, HEAD_DIM>(args, stream);
  FA_FOR_EACH_INSTANTIATION(LAUNCH_IF)
#undef LAUNCH_IF
  return fa_refuse(args, "no instantiation for dtype %d with head_dim %lld", args->dtype, static_cast<long long>(args->head_dim));
}

// backward_mma: all products on tensor cores by mma.sync.  A block computes 64 rows of dQ, or of dK and dV.
// step:    tiles in shared memory and products on tensor cores: four for dK and dV, where S and dP are transposed, and three for dQ,
//          which computes S and dP again
// because: backward_minimal reads each row from memory once per row of the other sequence, and multiplies without tensor cores;
//          with two kernels, no sum is shared by blocks, so that the bits are the same in each call
// expect:  at b1h16s4096d128, 120 TFLOP/s of the five products that are counted: seven are computed, and the tensor cores wait for
//          the exponentials and for shared memory
// diff:    nearly the whole file
// tile:    64 rows per block, 16 per warp, x 32 rows of the other sequence, in two stages; 64 KB of shared memory at D = 128; a
//          workspace of 4 bytes for each row of Q
// takes:   fp16 and bf16, D = 64 and 128, any S_q >= 1 and S_kv >= 0, top-left and bottom-right causal masks, grouped heads, gradients
//          of the log-sum-exp; rows contiguous and 16-byte aligned
//
// With S the scores and L the log-sum-exp of the forward pass:
//
//   P = exp(S - L)    delta = sum(dO * O) - dL    dS = P * (dO V^T - delta)
//   dQ = scale * dS K    dK = scale * dS^T Q    dV = P^T dO
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#include "fa/backward_rows.cuh"
#include "fa/copy.cuh"
#include "fa/epilogue.cuh"
#include "fa/grid.h"
#include "fa/mma.cuh"
#include "fa/to_float.cuh"
#include "fa/warp.cuh"
#include "fa_backward.h"
#include "fa_instantiations.h"  // FA_FOR_EACH_INSTANTIATION: the manifest's dtypes and head_dims

using fa::HeadRows, fa::MMA_K, fa::MMA_M, fa::MMA_N, fa::QUAD, fa::rows_of, fa::store_gradient, fa::VECTOR, fa::WARP;
using fp16 = __half;
using bf16 = __nv_bfloat16;

constexpr int WARPS = 4, THREADS = WARPS * WARP, STAGES = 2;
constexpr int OWN_ROWS = WARPS * MMA_M;  // of a block: rows of the gradients that it computes
constexpr int STEP_ROWS = 32;            // of the other sequence, per step
constexpr int STEP_TILES = STEP_ROWS / MMA_N;

// What a deliberately wrong kernel does with MISTAKE, to check that the error is detected.
enum Mistake {
  NO_MISTAKE,
  DELTA_OF_NEXT_ROW,  // dK is computed with the delta of the next query
  TILES_NOT_VISIBLE,  // tiles are read before all threads have copied their parts
  STAGE_NOT_FREE,     // a stage is filled while warps may still read it
};

// The arguments of both passes, and delta, [batch, heads, seq_q].
struct Call {
  FaForwardArgs forward;
  FaBackwardArgs backward;
  float* delta;
  int seq_q, seq_k;
  int first_diagonal;  // query i sees keys [0, min(seq_k, first_diagonal + i))
};

// Two tensors of the block's own rows, and tiles of two tensors of the other sequence: Q, dO, K and V, or K, V, Q and dO.
template <typename T, int HEAD_DIM>
struct Smem {
  alignas(128) T own[2][OWN_ROWS * HEAD_DIM];
  T step[STAGES][2][STEP_ROWS * HEAD_DIM];
  float lse[STAGES][STEP_ROWS], delta[STAGES][STEP_ROWS];  // of queries, if they are the other sequence
};

// delta, by a warp for each query.
template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(THREADS) delta_kernel(const Call call) {
  const FaForwardArgs& args = call.forward;
  const int64_t row_of_all_heads = int64_t(blockIdx.x) * WARPS + threadIdx.x / WARP;
  if (row_of_all_heads >= args.batch * args.heads * args.seq_q) return;
  const int64_t row = row_of_all_heads % args.seq_q, head_of_all = row_of_all_heads / args.seq_q;
  const int64_t head = head_of_all % args.heads, batch = head_of_all / args.heads;
  const HeadRows<const T> out = rows_of<T>(args.out, args.out_stride, batch, head);
  const HeadRows<const T> dout = rows_of<T>(call.backward.dout, call.backward.dout_stride, batch, head);
  float sum = 0.0f;
#pragma unroll
  for (int d = threadIdx.x % WARP; d < HEAD_DIM; d += WARP) {
    sum += fa::to_float(dout.first[row * dout.stride + d]) * fa::to_float(out.first[row * out.stride + d]);
  }
#pragma unroll
  for (int lanes = WARP / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
  const float dlse = call.backward.dlse == nullptr ? 0.0f : call.backward.dlse[row_of_all_heads];
  if (threadIdx.x % WARP == 0) call.delta[row_of_all_heads] = sum - dlse;
}

// P of a score, whose query has this log-sum-exp.  The difference is taken before it is multiplied, because both may be large.
__device__ __forceinline__ float weight_of(float s, float scale, float lse) {
  return fa::ex2_approx_ftz((s * scale - lse) * CUDART_L2E_F);
}

// The A fragment of 16 columns of P or dS, from tile n on.
template <typename T, int N>
__device__ __forceinline__ void make_fragment(uint32_t (&fragment)[4], const float (&p)[N][4], int n) {
#pragma unroll
  for (int i = 0; i < 4; ++i) fragment[i] = fa::cvt_rn_x2<T>(p[n + i / 2][i % 2 * 2], p[n + i / 2][i % 2 * 2 + 1]);
}

// dQ of 64 queries of a head, from all keys that they see.
template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(THREADS) dq_kernel(const Call call) {
  extern __shared__ __align__(128) unsigned char smem_bytes[];
  Smem<T, HEAD_DIM>& smem = *reinterpret_cast<Smem<T, HEAD_DIM>*>(smem_bytes);
  const FaForwardArgs& args = call.forward;
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const int64_t head = blockIdx.y, batch = blockIdx.z, kv_head = head / (args.heads / args.kv_heads);
  const int first_query = blockIdx.x * OWN_ROWS, lane_query = first_query + warp * MMA_M + lane / QUAD;
  const HeadRows<const T> k = rows_of<T>(args.k, args.k_stride, batch, kv_head), v = rows_of<T>(args.v, args.v_stride, batch, kv_head);
  const int visible_keys = max(0, min(call.seq_k, call.first_diagonal + first_query + OWN_ROWS - 1));
  const int steps = (visible_keys + STEP_ROWS - 1) / STEP_ROWS;
  const auto load = [&](int step) {
    if (step < steps) {
      fa::copy_rows_async<STEP_ROWS, HEAD_DIM, THREADS>(smem.step[step % STAGES][0], k.first, k.stride, step * STEP_ROWS, call.seq_k);
      fa::copy_rows_async<STEP_ROWS, HEAD_DIM, THREADS>(smem.step[step % STAGES][1], v.first, v.stride, step * STEP_ROWS, call.seq_k);
    }
    fa::cp_async_commit_group();
  };
  const HeadRows<const T> q = rows_of<T>(args.q, args.q_stride, batch, head);
  const HeadRows<const T> dout = rows_of<T>(call.backward.dout, call.backward.dout_stride, batch, head);
  fa::copy_rows_async<OWN_ROWS, HEAD_DIM, THREADS>(smem.own[0], q.first, q.stride, first_query, call.seq_q);
  fa::copy_rows_async<OWN_ROWS, HEAD_DIM, THREADS>(smem.own[1], dout.first, dout.stride, first_query, call.seq_q);
  load(0);
  float lse[2], delta[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = min(lane_query + r * 8, call.seq_q - 1);
    const int64_t row_of_all_heads = (batch * args.heads + head) * args.seq_q + query;
    lse[r] = args.lse[row_of_all_heads], delta[r] = call.delta[row_of_all_heads];
  }
  float dq[HEAD_DIM / MMA_N][4] = {};

#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const int first_key = step * STEP_ROWS;
    load(step + 1);
    fa::cp_async_wait_group<1>();
    if (MISTAKE != TILES_NOT_VISIBLE) __syncthreads();  // the tiles are visible to all threads
    const T *k_smem = smem.step[step % STAGES][0], *v_smem = smem.step[step % STAGES][1];

    // S = Q K^T and dP = dO V^T
    float s[STEP_TILES][4] = {}, dp[STEP_TILES][4] = {};
    uint32_t rows[HEAD_DIM / MMA_K][4];
    fa::load_q(rows, smem.own[0], warp * MMA_M, lane, 0);
    fa::multiply_qk<T>(s, rows, k_smem, lane);
    fa::load_q(rows, smem.own[1], warp * MMA_M, lane, 0);
    fa::multiply_qk<T>(dp, rows, v_smem, lane);

    // dS; only tiles that cross the diagonal or the last key are masked
    const bool is_whole = first_key + STEP_ROWS <= min(call.seq_k, call.first_diagonal + first_query);
#pragma unroll
    for (int n = 0; n < STEP_TILES; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = first_key + n * MMA_N + lane % QUAD * 2 + i % 2;
        const bool is_visible = is_whole || key < min(call.seq_k, call.first_diagonal + lane_query + i / 2 * 8);
        dp[n][i] = is_visible ? weight_of(s[n][i], args.scale, lse[i / 2]) * (dp[n][i] - delta[i / 2]) : 0.0f;
      }
    }

    // dQ += dS K
#pragma unroll
    for (int n = 0; n < STEP_TILES; n += 2) {
      uint32_t ds[4];
      make_fragment<T>(ds, dp, n);
      fa::multiply_pv<T>(dq, ds, k_smem, n * MMA_N, lane);
    }
    if (MISTAKE != STAGE_NOT_FREE) __syncthreads();  // all threads have read the tiles, so they may be overwritten
  }
  store_gradient(HeadRows<T>(static_cast<T*>(call.backward.dq), call.backward.dq_stride, batch, head), dq, args.scale, lane_query,
                 call.seq_q, lane);
}

// dK and dV of 64 keys of a head, from all queries that see them, of all heads that share it.  S and dP are transposed.
template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(THREADS) dk_dv_kernel(const Call call) {
  extern __shared__ __align__(128) unsigned char smem_bytes[];
  Smem<T, HEAD_DIM>& smem = *reinterpret_cast<Smem<T, HEAD_DIM>*>(smem_bytes);
  const FaForwardArgs& args = call.forward;
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const int64_t kv_head = blockIdx.y, batch = blockIdx.z;
  const int first_key = blockIdx.x * OWN_ROWS, lane_key = first_key + warp * MMA_M + lane / QUAD;
  const int group = args.heads / args.kv_heads;
  // The steps are those of one head after another, from the first tile with a query that sees the first key.
  const int first_tile = max(0, first_key - call.first_diagonal + 1) / STEP_ROWS;
  const int head_steps = max(0, (call.seq_q + STEP_ROWS - 1) / STEP_ROWS - first_tile), steps = head_steps * group;
  const auto first_query_of = [&](int step) { return (first_tile + step % head_steps) * STEP_ROWS; };
  const auto load = [&](int step) {
    if (step < steps) {
      const int first_query = first_query_of(step), stage = step % STAGES;
      const int64_t head = kv_head * group + step / head_steps;
      const HeadRows<const T> q = rows_of<T>(args.q, args.q_stride, batch, head);
      const HeadRows<const T> dout = rows_of<T>(call.backward.dout, call.backward.dout_stride, batch, head);
      fa::copy_rows_async<STEP_ROWS, HEAD_DIM, THREADS>(smem.step[stage][0], q.first, q.stride, first_query, call.seq_q);
      fa::copy_rows_async<STEP_ROWS, HEAD_DIM, THREADS>(smem.step[stage][1], dout.first, dout.stride, first_query, call.seq_q);
      if (threadIdx.x < STEP_ROWS) {
        const int64_t first_of_head = (batch * args.heads + head) * args.seq_q;
        const int query = min(first_query + static_cast<int>(threadIdx.x), call.seq_q - 1);
        const int next = min(query + 1, call.seq_q - 1);
        smem.lse[stage][threadIdx.x] = args.lse[first_of_head + query];
        smem.delta[stage][threadIdx.x] = call.delta[first_of_head + (MISTAKE == DELTA_OF_NEXT_ROW ? next : query)];
      }
    }
    fa::cp_async_commit_group();
  };
  const HeadRows<const T> k = rows_of<T>(args.k, args.k_stride, batch, kv_head), v = rows_of<T>(args.v, args.v_stride, batch, kv_head);
  fa::copy_rows_async<OWN_ROWS, HEAD_DIM, THREADS>(smem.own[0], k.first, k.stride, first_key, call.seq_k);
  fa::copy_rows_async<OWN_ROWS, HEAD_DIM, THREADS>(smem.own[1], v.first, v.stride, first_key, call.seq_k);
  load(0);
  float dk[HEAD_DIM / MMA_N][4] = {}, dv[HEAD_DIM / MMA_N][4] = {};

#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const int first_query = first_query_of(step), stage = step % STAGES;
    load(step + 1);
    fa::cp_async_wait_group<1>();
    if (MISTAKE != TILES_NOT_VISIBLE) __syncthreads();  // the tiles are visible to all threads
    const T *q_smem = smem.step[stage][0], *dout_smem = smem.step[stage][1];

    // S^T = K Q^T and dP^T = V dO^T
    float s[STEP_TILES][4] = {}, dp[STEP_TILES][4] = {};
    uint32_t rows[HEAD_DIM / MMA_K][4];
    fa::load_q(rows, smem.own[0], warp * MMA_M, lane, 0);
    fa::multiply_qk<T>(s, rows, q_smem, lane);
    fa::load_q(rows, smem.own[1], warp * MMA_M, lane, 0);
    fa::multiply_qk<T>(dp, rows, dout_smem, lane);

    // P^T in place of S^T, and dS^T in place of dP^T
    const bool is_whole = first_query + STEP_ROWS <= call.seq_q &&
                          first_key + OWN_ROWS <= min(call.seq_k, call.first_diagonal + first_query);
#pragma unroll
    for (int n = 0; n < STEP_TILES; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = n * MMA_N + lane % QUAD * 2 + i % 2, query = first_query + column, key = lane_key + i / 2 * 8;
        const bool is_visible = is_whole || (query < call.seq_q && key < min(call.seq_k, call.first_diagonal + query));
        s[n][i] = is_visible ? weight_of(s[n][i], args.scale, smem.lse[stage][column]) : 0.0f;
        dp[n][i] = is_visible ? s[n][i] * (dp[n][i] - smem.delta[stage][column]) : 0.0f;
      }
    }

    // dV += P^T dO and dK += dS^T Q
#pragma unroll
    for (int n = 0; n < STEP_TILES; n += 2) {
      uint32_t p[4], ds[4];
      make_fragment<T>(p, s, n);
      fa::multiply_pv<T>(dv, p, dout_smem, n * MMA_N, lane);
      make_fragment<T>(ds, dp, n);
      fa::multiply_pv<T>(dk, ds, q_smem, n * MMA_N, lane);
    }
    if (MISTAKE != STAGE_NOT_FREE) __syncthreads();  // all threads have read the tiles, so they may be overwritten
  }
  const FaBackwardArgs& backward = call.backward;
  store_gradient(HeadRows<T>(static_cast<T*>(backward.dk), backward.dk_stride, batch, kv_head), dk, args.scale, lane_key, call.seq_k, lane);
  store_gradient(HeadRows<T>(static_cast<T*>(backward.dv), backward.dv_stride, batch, kv_head), dv, 1.0f, lane_key, call.seq_k, lane);
}

int64_t tiles_of(int64_t rows, int64_t tile) { return (rows + tile - 1) / tile; }

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
  const int64_t delta_blocks = tiles_of(args.batch * args.heads * args.seq_q, WARPS);
  const int64_t max_steps = args.heads / args.kv_heads * tiles_of(args.seq_q, STEP_ROWS);
  if (args.heads > UINT16_MAX || args.batch > UINT16_MAX || args.seq_k > INT32_MAX / 2 || args.seq_q > INT32_MAX / 2 ||
      delta_blocks > INT32_MAX || max_steps > INT32_MAX) {
    return fa_refuse(&args, "the shape is too large: batch %lld and heads %lld (at most %d), seq_q %lld and seq_k %lld (below 2^30)",
                     static_cast<long long>(args.batch), static_cast<long long>(args.heads), UINT16_MAX,
                     static_cast<long long>(args.seq_q), static_cast<long long>(args.seq_k));
  }
  return FA_OK;
}

template <typename T, int HEAD_DIM>
int launch(const Call& call, cudaStream_t stream) {
  const FaForwardArgs& args = call.forward;
  constexpr int smem_bytes = sizeof(Smem<T, HEAD_DIM>);
  const auto allow_smem = [&](auto* kernel) { return fa_allow_dynamic_smem(&args, reinterpret_cast<const void*>(kernel), smem_bytes); };
  if (int status = allow_smem(&dq_kernel<T, HEAD_DIM>)) return status;
  if (int status = allow_smem(&dk_dv_kernel<T, HEAD_DIM>)) return status;
  const auto blocks_of = [](int64_t rows, int64_t tile) { return static_cast<unsigned>(tiles_of(rows, tile)); };
  const unsigned heads = static_cast<unsigned>(args.heads), kv_heads = static_cast<unsigned>(args.kv_heads);
  const unsigned batch = static_cast<unsigned>(args.batch);
  const dim3 query_grid(blocks_of(args.seq_q, OWN_ROWS), heads, batch), key_grid(blocks_of(args.seq_k, OWN_ROWS), kv_heads, batch);
  delta_kernel<T, HEAD_DIM><<<blocks_of(args.batch * args.heads * args.seq_q, WARPS), THREADS, 0, stream>>>(call);
  dq_kernel<T, HEAD_DIM><<<query_grid, THREADS, smem_bytes, stream>>>(call);
  if (args.seq_k > 0) dk_dv_kernel<T, HEAD_DIM><<<key_grid, THREADS, smem_bytes, stream>>>(call);
  return static_cast<int>(cudaPeekAtLastError());
}

FA_EXPORT size_t fa_backward_workspace_bytes(const FaBackwardArgs* args) {
  return args->forward->batch * args->forward->heads * args->forward->seq_q * sizeof(float);
}

FA_EXPORT int fa_backward(const FaBackwardArgs* args, cudaStream_t stream) {
  if (int status = fa_check_backward(args, 0)) return status;
  const FaForwardArgs forward = fa_copy_args(args->forward);
  const int shift = forward.causal == FA_CAUSAL_BOTTOM_RIGHT ? static_cast<int>(forward.seq_k - forward.seq_q) : 0;
  const int first_diagonal = forward.causal == FA_CAUSAL_NONE ? INT32_MAX / 2 : shift + 1;
  const Call call = {forward, *args, static_cast<float*>(forward.workspace), static_cast<int>(forward.seq_q),
                     static_cast<int>(forward.seq_k), first_diagonal};
  if (int status = check(call)) return status;
#define LAUNCH_IF(DTYPE, HEAD_DIM) \
  if (forward.dtype == FA_DTYPE_##DTYPE && forward.head_dim == HEAD_DIM) return launch<DTYPE, HEAD_DIM>(call, stream);
  FA_FOR_EACH_INSTANTIATION(LAUNCH_IF)
#undef LAUNCH_IF
  return fa_refuse(args->forward, "no instantiation for dtype %d with head_dim %lld", forward.dtype, static_cast<long long>(forward.head_dim));
}

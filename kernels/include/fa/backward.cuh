// What backward kernels with sums of dQ in memory share: the workspace, the kernels before and after theirs, and fa_backward.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#include "fa/backward_rows.cuh"
#include "fa/copy.cuh"
#include "fa/epilogue.cuh"
#include "fa/grid.h"
#include "fa/to_float.cuh"
#include "fa_backward.h"
#include "fa_instantiations.h"  // FA_FOR_EACH_INSTANTIATION: the manifest's dtypes and head_dims

using fp16 = __half;
using bf16 = __nv_bfloat16;

#ifndef IN_TURNS
#define IN_TURNS 0  // 1: blocks add to dQ in the order of their keys
#endif

namespace fa {

constexpr int BLOCK_KEYS = 128;  // of a block that computes dK and dV
constexpr int ROW_WARPS = 4;     // of a block that prepares or rounds rows
constexpr int WARP_ROWS = 4;     // that a warp prepares
constexpr int PANEL = GROUP_M * BOX_COLUMNS;  // elements of dQ that a warpgroup computes in a step
constexpr int PADDING = 128;     // in the workspace, the rows of a head are padded to a multiple

// The arguments of both passes, and the workspace.
struct BackwardCall {
  FaForwardArgs forward;
  FaBackwardArgs backward;
  float* dq_sums;   // [batch, heads, padded_q / 64, D / 64] panels, each the accumulators of a warpgroup for 64 x 64 elements
  float* row_data;  // [batch, heads, padded_q / QUERIES, 2, QUERIES]: the log-sum-exp, +inf for a row that sees nothing, and delta
  int* started;     // with IN_TURNS, the number of blocks that have started
  int* turns;       // with IN_TURNS, the number of blocks that have added to each panel of dq_sums
  int seq_q, seq_k, padded_q;
  int first_diagonal;  // query i sees keys [0, min(seq_k, first_diagonal + i))
};

// The sizes of a step: HALVES of 64 queries.  Its part of dQ has two panels of 64 x 64 elements, one for each warpgroup.
template <int HEAD_DIM>
struct BackwardStep {
  static constexpr int HALVES = BLOCK_KEYS / HEAD_DIM, QUERIES = HALVES * GROUP_M;
  static constexpr int TILE = QUERIES * HEAD_DIM;  // of Q, in elements
};

// delta and the log-sum-exp, and zeros for the sums of dQ, by a warp for each WARP_ROWS rows, including padding.
template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(ROW_WARPS * WARP) prepare_kernel(const __grid_constant__ BackwardCall call) {
  constexpr int QUERIES = BackwardStep<HEAD_DIM>::QUERIES, LANE_ELEMENTS = HEAD_DIM / WARP;
  using Elements = Vector<T, LANE_ELEMENTS>;
  const FaForwardArgs& args = call.forward;
  const int lane = threadIdx.x % WARP, first_row = (blockIdx.x * ROW_WARPS + threadIdx.x / WARP) * WARP_ROWS;
  const int64_t head = blockIdx.y, batch = blockIdx.z, head_of_all = batch * args.heads + head;
  const HeadRows<const T> out = rows_of<T>(args.out, args.out_stride, batch, head);
  const HeadRows<const T> dout = rows_of<T>(call.backward.dout, call.backward.dout_stride, batch, head);
  float delta[WARP_ROWS] = {};
#pragma unroll
  for (int r = 0; r < WARP_ROWS; ++r) {
    const int row = first_row + r;
    const int64_t row_of_all = head_of_all * call.padded_q + row;
    *reinterpret_cast<Vector<float, LANE_ELEMENTS>*>(call.dq_sums + row_of_all * HEAD_DIM + lane * LANE_ELEMENTS) = {};
    if (row >= call.seq_q) continue;
    const Elements x = reinterpret_cast<const Elements*>(out.first + row * out.stride)[lane];
    const Elements dx = reinterpret_cast<const Elements*>(dout.first + row * dout.stride)[lane];
#pragma unroll
    for (int i = 0; i < LANE_ELEMENTS; ++i) delta[r] += to_float(x.data[i]) * to_float(dx.data[i]);
  }
#pragma unroll
  for (int r = 0; r < WARP_ROWS; ++r) {
#pragma unroll
    for (int lanes = WARP / 2; lanes > 0; lanes /= 2) delta[r] += __shfl_xor_sync(0xffffffffu, delta[r], lanes);
    const int row = first_row + r;
    float lse = CUDART_INF_F;
    if (row < call.seq_q) {
      const int64_t index = head_of_all * call.seq_q + row;
      if (call.backward.dlse != nullptr) delta[r] -= call.backward.dlse[index];
      if (args.lse[index] == -CUDART_INF_F) delta[r] = 0.0f; else lse = args.lse[index];
    }
    float* const data = call.row_data + (head_of_all * call.padded_q + row / QUERIES * QUERIES) * 2 + row % QUERIES;
    if (lane == 0) data[0] = lse, data[QUERIES] = delta[r];
    constexpr int PANEL_ROWS = PANEL / HEAD_DIM;  // rows of dQ with the elements of a panel
    if (IN_TURNS && lane == 0 && row % PANEL_ROWS == 0) {
      const int64_t panel = (head_of_all * call.padded_q + row) / PANEL_ROWS;
      call.turns[panel] = 0;
      if (panel == 0) *call.started = 0;
    }
  }
}

// dQ of 64 queries of a head, rounded, from its sums.
template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(ROW_WARPS * WARP) round_kernel(const __grid_constant__ BackwardCall call) {
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
  store_gradient(HeadRows<T>(static_cast<T*>(call.backward.dq), call.backward.dq_stride, batch, head), dq, args.scale,
                 first_query + static_cast<int>(threadIdx.x) / WARP * MMA_M + lane / QUAD, call.seq_q, lane);
}

inline int64_t tiles_of(int64_t rows, int64_t tile) { return (rows + tile - 1) / tile; }
inline int64_t padded_rows(const FaForwardArgs& args) { return tiles_of(args.seq_q, PADDING) * PADDING; }

inline int64_t workspace_bytes(const FaForwardArgs& args) {
  const int64_t rows = args.batch * args.heads * padded_rows(args), panels = rows * args.head_dim / PANEL;
  return (rows * (args.head_dim + 2) + (IN_TURNS ? 1 + panels : 0)) * static_cast<int64_t>(sizeof(float));
}

// Refuses a call that the kernels do not take, or returns FA_OK.
inline int check_backward(const BackwardCall& call) {
  const FaForwardArgs& args = call.forward;
  const FaBackwardArgs& backward = call.backward;
  const bool are_aligned = is_aligned(args.q, args.q_stride, VECTOR) && is_aligned(args.k, args.k_stride, VECTOR) &&
                          is_aligned(args.v, args.v_stride, VECTOR) && is_aligned(args.out, args.out_stride, VECTOR) &&
                          is_aligned(backward.dout, backward.dout_stride, VECTOR) &&
                          is_aligned(backward.dq, backward.dq_stride, VECTOR) &&
                          is_aligned(backward.dk, backward.dk_stride, VECTOR) &&
                          is_aligned(backward.dv, backward.dv_stride, VECTOR);
  if (!are_aligned) {
    return fa_refuse(&args, "rows of all tensors must be contiguous and start at multiples of %d bytes", 2 * VECTOR);
  }
  if (args.heads > UINT16_MAX || args.batch > UINT16_MAX || args.seq_q > INT32_MAX / 2 - PADDING ||
      args.seq_k > int64_t(UINT16_MAX) * BLOCK_KEYS) {
    return fa_refuse(&args, "the shape is too large: batch %lld and heads %lld (at most %d), seq_q %lld (at most %d), seq_k %lld "
                            "(at most %d)",
                     static_cast<long long>(args.batch), static_cast<long long>(args.heads), UINT16_MAX,
                     static_cast<long long>(args.seq_q), INT32_MAX / 2 - PADDING, static_cast<long long>(args.seq_k),
                     UINT16_MAX * BLOCK_KEYS);
  }
  return FA_OK;
}

// Launches a kernel for the rows of the workspace, the gradients of the keys, and a kernel for the rows of dQ.  `launch_gradients`
// gets a grid of key/value heads x blocks of keys x batch: under a causal mask, the blocks with most steps start first.
template <typename T, int HEAD_DIM, typename LAUNCH>
int launch_backward(const BackwardCall& call, cudaStream_t stream, LAUNCH launch_gradients) {
  const FaForwardArgs& args = call.forward;
  const auto grid_of = [&](int64_t rows, int64_t tile, int64_t heads) {
    return dim3(static_cast<unsigned>(tiles_of(rows, tile)), static_cast<unsigned>(heads), static_cast<unsigned>(args.batch));
  };
  const dim3 keys = grid_of(args.seq_k, BLOCK_KEYS, args.kv_heads), key_grid(keys.y, keys.x, keys.z);
  const dim3 row_grid = grid_of(call.padded_q, ROW_WARPS * WARP_ROWS, args.heads);
  const dim3 query_grid = grid_of(args.seq_q, GROUP_M, args.heads);
  prepare_kernel<T, HEAD_DIM><<<row_grid, ROW_WARPS * WARP, 0, stream>>>(call);
  if (args.seq_k > 0) {
    if (int status = launch_gradients(key_grid)) return status;
  }
  round_kernel<T, HEAD_DIM><<<query_grid, ROW_WARPS * WARP, 0, stream>>>(call);
  return static_cast<int>(cudaPeekAtLastError());
}

inline BackwardCall make_backward_call(const FaBackwardArgs* args) {
  const FaForwardArgs forward = fa_copy_args(args->forward);
  const int64_t padded_q = padded_rows(forward);
  const int shift = forward.causal == FA_CAUSAL_BOTTOM_RIGHT ? static_cast<int>(forward.seq_k - forward.seq_q) : 0;
  const int first_diagonal = forward.causal == FA_CAUSAL_NONE ? INT32_MAX / 2 : shift + 1;
  const int64_t rows = forward.batch * forward.heads * padded_q;
  float* const dq_sums = static_cast<float*>(forward.workspace);
  float* const row_data = dq_sums + rows * forward.head_dim;
  int* const started = reinterpret_cast<int*>(row_data + rows * 2);
  return {forward, *args, dq_sums, row_data, started, started + 1,
          static_cast<int>(forward.seq_q), static_cast<int>(forward.seq_k), static_cast<int>(padded_q), first_diagonal};
}

}  // namespace fa

// Defines fa_backward by a function template `int LAUNCH<T, HEAD_DIM>(const fa::BackwardCall&, dim3 grid, cudaStream_t)`.
#define FA_BACKWARD(LAUNCH)                                                                                                     \
  FA_EXPORT size_t fa_backward_workspace_bytes(const FaBackwardArgs* args) {                                                    \
    return fa::workspace_bytes(*args->forward);                                                                                 \
  }                                                                                                                             \
  template <typename T, int HEAD_DIM>                                                                                           \
  int fa_launch(const fa::BackwardCall& call, cudaStream_t stream) {                                                            \
    return fa::launch_backward<T, HEAD_DIM>(call, stream, [&](dim3 grid) { return LAUNCH<T, HEAD_DIM>(call, grid, stream); });   \
  }                                                                                                                             \
  FA_EXPORT int fa_backward(const FaBackwardArgs* args, cudaStream_t stream) {                                                  \
    if (int status = fa_check_backward(args, 0)) return status;                                                                 \
    const fa::BackwardCall call = fa::make_backward_call(args);                                                                 \
    if (int status = fa::check_backward(call)) return status;                                                                   \
    FA_FOR_EACH_INSTANTIATION(FA_LAUNCH_BACKWARD_IF)                                                                            \
    return fa_refuse(args->forward, "no instantiation for dtype %d with head_dim %lld", call.forward.dtype,                     \
                     static_cast<long long>(call.forward.head_dim));                                                            \
  }
#define FA_LAUNCH_BACKWARD_IF(DTYPE, HEAD_DIM) \
  if (call.forward.dtype == FA_DTYPE_##DTYPE && call.forward.head_dim == HEAD_DIM) return fa_launch<DTYPE, HEAD_DIM>(call, stream);

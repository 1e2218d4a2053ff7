// The host's part of the persistent e4m3 kernels: tensor maps and parameters.
#pragma once

#include <cuda.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "fa/e4m3.cuh"
#include "fa/e4m3_tile.cuh"
#include "fa/launch.h"
#include "fa/sections.h"
#include "fa/tensor_map.h"
#include "fa_forward.h"

namespace fa {

// Describes a tensor to TMA: `sizes` from the contiguous dimension on, the strides of the others in bytes, and boxes of
// `columns` x `rows`.  Returns FA_OK, or refuses the call.
inline int make_byte_map(CUtensorMap* map, const FaForwardArgs* args, CUtensorMapDataType type, const void* data,
                    const int64_t (&sizes)[4], const int64_t (&stride_bytes)[3], int columns, int rows, CUtensorMapSwizzle swizzle) {
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) return fa_refuse(args, "the driver has no cuTensorMapEncodeTiled");
  cuuint64_t unsigned_sizes[4], unsigned_strides[3];
  std::copy(sizes, sizes + 4, unsigned_sizes);
  std::copy(stride_bytes, stride_bytes + 3, unsigned_strides);
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(columns), static_cast<cuuint32_t>(rows), 1, 1};
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  const CUresult status =
      encode(map, type, 4, const_cast<void*>(data), unsigned_sizes, unsigned_strides, box, element_strides,
             CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status == CUDA_SUCCESS) return FA_OK;
  return fa_refuse(args, "TMA does not accept strides of %lld, %lld and %lld bytes (row, head, batch): CUresult %d",
                   static_cast<long long>(stride_bytes[0]), static_cast<long long>(stride_bytes[1]),
                   static_cast<long long>(stride_bytes[2]), status);
}

constexpr CUtensorMapSwizzle swizzle_of(int bytes) {
  return bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_32B;
}

// Q or K: [batch, heads, seq, HEAD_DIM], e4m3, in boxes of whole rows.
template <int HEAD_DIM>
int make_rows_map(CUtensorMap* map, const FaForwardArgs* args, const void* data, int64_t heads, int64_t seq, const FaStrides& stride,
                  int rows) {
  return make_byte_map(map, args, CU_TENSOR_MAP_DATA_TYPE_UINT8, data, {HEAD_DIM, seq, heads, args->batch},
                         {stride.seq, stride.head, stride.batch}, HEAD_DIM, rows, swizzle_of(HEAD_DIM));
}

// V^T in the workspace: [batch, kv_heads, HEAD_DIM, keys], e4m3, in boxes of one panel.
template <typename SHAPE>
int make_v_map(CUtensorMap* map, const FaForwardArgs* args) {
  const int64_t keys = v_t_keys(args);
  return make_byte_map(map, args, CU_TENSOR_MAP_DATA_TYPE_UINT8, args->workspace,
                         {keys, SHAPE::HEAD_DIM, args->kv_heads, args->batch},
                         {keys, keys * SHAPE::HEAD_DIM, keys * SHAPE::HEAD_DIM * args->kv_heads}, SHAPE::PANEL_KEYS,
                         SHAPE::HEAD_DIM, swizzle_of(SHAPE::PANEL_KEYS));
}

// O: [batch, heads, seq_q, HEAD_DIM], 16 bits, in boxes of 64 columns.
template <typename Out>
int make_o_map(CUtensorMap* map, const FaForwardArgs* args) {
  const auto type = std::is_same_v<Out, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const FaStrides& stride = args->out_stride;
  return make_byte_map(map, args, type, args->out, {args->head_dim, args->seq_q, args->heads, args->batch},
                         {stride.seq * 2, stride.head * 2, stride.batch * 2}, BOX_COLUMNS, GROUP_M, CU_TENSOR_MAP_SWIZZLE_128B);
}

// Fills `params` and returns FA_OK, or refuses the call.
template <typename SHAPE>
int make_e4m3_params(const FaForwardArgs* args, E4m3Params* params) {
  if (int status = check_e4m3_alignment(args)) return status;
  const int64_t heads_per_kv_head = args->heads / args->kv_heads, batch_heads = args->batch * args->heads;
  const int64_t m_blocks = (args->seq_q + SHAPE::BLOCK_M - 1) / SHAPE::BLOCK_M;
  const bool fits = args->heads * heads_per_kv_head < INT32_MAX / 2 && args->kv_heads <= UINT16_MAX && args->batch <= UINT16_MAX &&
                    args->seq_q < INT32_MAX / 2 && args->seq_k < INT32_MAX / 2 && batch_heads <= INT32_MAX / 4 / m_blocks;
  if (!fits) {
    return fa_refuse(args, "the shape is too large: batch %lld and kv_heads %lld (at most %d), heads * heads / kv_heads %lld, seq_q "
                           "%lld and seq_k %lld (below 2^30); the product of batch, heads and seq_q / %d must be below 2^29",
                     static_cast<long long>(args->batch), static_cast<long long>(args->kv_heads), UINT16_MAX,
                     static_cast<long long>(args->heads * heads_per_kv_head), static_cast<long long>(args->seq_q),
                     static_cast<long long>(args->seq_k), SHAPE::BLOCK_M);
  }
  const int64_t shift = args->causal == FA_CAUSAL_BOTTOM_RIGHT ? args->seq_k - args->seq_q : 0;
  *params = {args->lse,
             args->q_descale,
             args->k_descale,
             args->v_descale,
             args->scale * CUDART_L2E_F,
             static_cast<int>(args->seq_q),
             static_cast<int>(args->seq_k),
             args->causal == FA_CAUSAL_NONE ? INT32_MAX / 2 : static_cast<int>(shift + 1),
             static_cast<int>(args->heads),
             static_cast<int>(args->kv_heads),
             static_cast<int>(batch_heads),
             static_cast<int>(m_blocks),
             section_heads_of(args, 1),
             static_cast<int>(m_blocks * batch_heads),
             static_cast<uint32_t>(((int64_t(1) << 31) + heads_per_kv_head - 1) / heads_per_kv_head)};
  return FA_OK;
}

// Sets up and launches `kernel`, after `LAUNCH_TRANSPOSE`, which launches the transposition of V.  There is a block for each work
// tile, and at least `min_blocks`, but not more than the GPU runs at the same time.  `more` are parameters of the kernel after the
// tensor maps.  Returns FA_OK, or refuses the call.
template <typename Out, typename SHAPE, auto LAUNCH_TRANSPOSE, int SMEM_BYTES = sizeof(Smem<Out, SHAPE>), typename KERNEL,
          typename... More>
int launch_e4m3(const FaForwardArgs* args, cudaStream_t stream, KERNEL* kernel, int min_blocks = 0, const More&... more) {
  constexpr int HEAD_DIM = SHAPE::HEAD_DIM;
  E4m3Params params;
  if (int status = make_e4m3_params<SHAPE>(args, &params)) return status;
  CUtensorMap q_map = {}, k_map = {}, v_map = {}, o_map = {};
  if (int status = make_o_map<Out>(&o_map, args)) return status;
  if (args->seq_k > 0) {
    if (int status = make_rows_map<HEAD_DIM>(&q_map, args, args->q, args->heads, args->seq_q, args->q_stride, GROUP_M)) return status;
    if (int status = make_rows_map<HEAD_DIM>(&k_map, args, args->k, args->kv_heads, args->seq_k, args->k_stride, SHAPE::BLOCK_N)) {
      return status;
    }
    if (int status = make_v_map<SHAPE>(&v_map, args)) return status;
  }
  static_assert(SMEM_BYTES * SHAPE::BLOCKS_PER_SM <= 227 * 1024, "an SM has 227 KB of shared memory for its blocks");
  static OncePerDevice prepare;
  if (int status = prepare([&] {
        const auto address = reinterpret_cast<const void*>(kernel);
        if (int refusal = require_registers(args, address, SHAPE::GROUPS + 1, SHAPE::ALL_REGISTERS)) return refusal;
        return fa_allow_dynamic_smem(args, address, SMEM_BYTES);
      })) {
    return status;
  }
  if (args->seq_k > 0) {
    if (int status = LAUNCH_TRANSPOSE(args, stream)) return status;
  }
  const int blocks = std::min(std::max(params.work_tiles, min_blocks), max_blocks<SHAPE>());
  kernel<<<blocks, SHAPE::THREADS, SMEM_BYTES, stream>>>(params, q_map, k_map, v_map, o_map, more...);
  return static_cast<int>(cudaPeekAtLastError());
}

}  // namespace fa

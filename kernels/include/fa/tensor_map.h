// Tensor maps: how TMA is told the sizes and strides of a tensor, and the box that one copy takes.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdint.h>

#include "fa_forward.h"

namespace fa {

// A box of rows x columns elements of one head.
struct Box {
  int rows, columns;
};

// The driver's function that encodes tensor maps; nullptr if it has none.
inline auto tensor_map_encoder() {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult query_result;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &query_result);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  return encode;
}

// Describes a tensor [batch, heads, seq, head_dim] with elements of two bytes to TMA.  Elements outside of it are zeros.  Returns
// FA_OK, or refuses the call.
inline int make_tensor_map(CUtensorMap* map, const FaForwardArgs* args, const void* data, int64_t heads, int64_t seq,
                           const FaStrides& stride, Box box) {
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) return fa_refuse(args, "the driver has no cuTensorMapEncodeTiled");
  const auto dtype = args->dtype == FA_DTYPE_fp16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(args->head_dim), static_cast<cuuint64_t>(seq),
                               static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(args->batch)};
  const cuuint64_t stride_bytes[3] = {static_cast<cuuint64_t>(stride.seq) * 2, static_cast<cuuint64_t>(stride.head) * 2,
                                      static_cast<cuuint64_t>(stride.batch) * 2};
  const cuuint32_t box_sizes[4] = {static_cast<cuuint32_t>(box.columns), static_cast<cuuint32_t>(box.rows), 1, 1};
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  const CUresult status =
      encode(map, dtype, 4, const_cast<void*>(data), sizes, stride_bytes, box_sizes, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status == CUDA_SUCCESS) return FA_OK;
  return fa_refuse(args, "TMA does not accept strides of %lld, %lld and %lld elements (batch, head, row): CUresult %d",
                   static_cast<long long>(stride.batch), static_cast<long long>(stride.head),
                   static_cast<long long>(stride.seq), status);
}

}  // namespace fa

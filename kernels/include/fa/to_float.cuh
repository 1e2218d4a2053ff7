// Conversions between 16-bit numbers and floats, under one name for both types.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace fa {

__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ void from_float(__half* x, float value) { *x = __float2half_rn(value); }
__device__ __forceinline__ void from_float(__nv_bfloat16* x, float value) { *x = __float2bfloat16_rn(value); }

}  // namespace fa

// Conversions between numbers and floats, under one name for all types.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <stdint.h>

namespace fa {

__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_fp8_e4m3 x) { return static_cast<float>(x); }
__device__ __forceinline__ float to_float(int8_t x) { return static_cast<float>(x); }
__device__ __forceinline__ void from_float(float* x, float value) { *x = value; }
__device__ __forceinline__ void from_float(__half* x, float value) { *x = __float2half_rn(value); }
__device__ __forceinline__ void from_float(__nv_bfloat16* x, float value) { *x = __float2bfloat16_rn(value); }

}  // namespace fa

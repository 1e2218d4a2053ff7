// The functions of the CUDA runtime and driver that a launcher calls, and what a test sets and reads.
#include "emulator.h"

namespace {

CUresult encode(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* data, const cuuint64_t* sizes,
                const cuuint64_t* stride_bytes, const cuuint32_t* box, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  if (rank != 4 || swizzle != CU_TENSOR_MAP_SWIZZLE_128B || reinterpret_cast<uintptr_t>(data) % 16) return CUDA_ERROR_INVALID_VALUE;
  emulator::TensorMap result = {static_cast<unsigned char*>(data), {}, {2}, {}, 2};
  for (int d = 0; d < 4; ++d) {
    if (d > 0) result.stride_bytes[d] = stride_bytes[d - 1];
    if (sizes[d] == 0 || box[d] == 0 || box[d] > 256 || (d > 0 && stride_bytes[d - 1] % 16)) return CUDA_ERROR_INVALID_VALUE;
    result.sizes[d] = sizes[d];
    result.box[d] = box[d];
  }
  std::memcpy(map, &result, sizeof result);
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

void emulator_set(uint64_t seed, int sms, int resident_blocks, double early) {
  emulator::settings() = {seed, sms, resident_blocks, early, ""};
  emulator::random_bits().seed(seed);
}
const char* emulator_error() { return emulator::settings().error.c_str(); }

// The number of the device is its number of SMs, because launchers keep what they know of a device.
cudaError_t cudaGetDevice(int* device) { return *device = emulator::settings().sms, cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? device : 227 << 10;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void*) { return cudaSuccess; }
cudaError_t cudaPeekAtLastError() { return emulator::settings().error.empty() ? cudaSuccess : cudaErrorLaunchFailure; }
cudaError_t cudaGetLastError() { return cudaPeekAtLastError(); }
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult*) {
  *function = reinterpret_cast<void*>(&encode);
  return cudaSuccess;
}

}  // extern "C"

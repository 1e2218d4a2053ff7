// The shared bindings with kernels that keep their arguments, for tensors on the CPU: nothing else stands in for a GPU.
#include <cuda_runtime_api.h>
#include <tvm/ffi/c_api.h>

#define kDLCUDA kDLCPU
#include "backward_binding.cpp"
#include "binding.cpp"

namespace {
FaForwardArgs last;  // of fa_backward, too
FaBackwardArgs last_backward;
}

extern "C" {
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorOfTheTest"; }
const char* cudaGetErrorString(cudaError_t) { return "the test asked for it"; }
}

FA_EXPORT const FaForwardArgs* last_args() { return &last; }
FA_EXPORT const FaBackwardArgs* last_backward_args() { return &last_backward; }

// Refuses a negative scale, and fails to launch with a scale above 100.
FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t) {
  last = *args;
  if (args->scale == -1.0f) return FA_REFUSED;
  if (args->scale < 0) return fa_refuse(args, "scale is %g", args->scale);
  return args->scale > 100 ? 700 : FA_OK;
}

FA_EXPORT size_t fa_workspace_bytes(const FaForwardArgs* args) { return args->seq_q + args->features; }

FA_EXPORT int fa_backward(const FaBackwardArgs* args, cudaStream_t stream) {
  last_backward = *args;
  return fa_forward(args->forward, stream);
}

FA_EXPORT size_t fa_backward_workspace_bytes(const FaBackwardArgs* args) { return 2 * args->forward->seq_q; }

// The shared BINDING for tensors on the CPU, beside an emulated kernel.
#include <cuda_runtime_api.h>
#include <tvm/ffi/c_api.h>

#define kDLCUDA kDLCPU
#include BINDING

extern "C" {
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorLaunchFailure"; }
const char* cudaGetErrorString(cudaError_t) { return "the emulated kernel does not end"; }
}

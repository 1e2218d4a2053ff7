/* fa_forward.h: the one C entry point of an attention kernel.
 *
 * A variant is a CUDA C++ source that includes this header, no framework's, and exports
 *
 *     int    fa_forward(const FaForwardArgs* args, cudaStream_t stream);
 *     size_t fa_workspace_bytes(const FaForwardArgs* args);          (only if it needs a workspace)
 *
 * fa_forward starts its kernels on `stream` and returns FA_OK, an FaStatus, or a cudaError_t.  It never allocates,
 * synchronises or exits, and it refuses (fa_refuse) what it does not support.
 */
#ifndef PYTEST_FA_FA_FORWARD_H_
#define PYTEST_FA_FA_FORWARD_H_

#include <cuda_runtime_api.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define FA_ABI_VERSION 1
#define FA_EXPORT extern "C" __attribute__((visibility("default")))

enum FaStatus { FA_OK = 0, FA_REFUSED = -1 };
enum FaDtype { FA_DTYPE_fp16 = 0, FA_DTYPE_bf16 = 1 };
enum FaCausal { FA_CAUSAL_NONE = 0, FA_CAUSAL_TOP_LEFT = 1, FA_CAUSAL_BOTTOM_RIGHT = 2 };

/* Where a tensor [batch, heads, seq, head_dim] lies; strides in elements. */
struct FaStrides {
  int64_t batch, head, seq, dim;
};

struct FaForwardArgs {
  uint32_t abi_version; /* FA_ABI_VERSION of the caller */
  uint32_t struct_size; /* sizeof(FaForwardArgs) of the caller */

  const void* q; /* [batch, heads,    seq_q, head_dim] */
  const void* k; /* [batch, kv_heads, seq_k, head_dim] */
  const void* v; /* [batch, kv_heads, seq_k, head_dim] */
  void* out;     /* [batch, heads,    seq_q, head_dim]; of a probe that computes scores [batch, heads, seq_q, seq_k] */
  float* lse;    /* [batch, heads, seq_q] natural log of the row's sum, contiguous; NULL if not wanted */
  void* workspace;
  uint64_t workspace_bytes;

  int64_t batch, heads, kv_heads, seq_q, seq_k, head_dim;
  struct FaStrides q_stride, k_stride, v_stride, out_stride;
  int32_t dtype;  /* FaDtype of q, k, v and out */
  int32_t causal; /* FaCausal */
  float scale;    /* of the scores, before softmax */

  const float* q_descale; /* fp8 only: [batch, heads]; NULL otherwise */
  const float* k_descale; /* fp8 only: [batch, kv_heads] */
  const float* v_descale; /* fp8 only: [batch, kv_heads] */

  char* message; /* the callee's words on a failure; may be NULL */
  uint64_t message_bytes;
};

/* Say why a call is refused; use as `return fa_refuse(args, "head_dim %d", ...)`. */
__attribute__((format(printf, 2, 3))) static inline int fa_refuse(const struct FaForwardArgs* args, const char* format, ...) {
  if (args->message != NULL && args->message_bytes > 0) {
    va_list words;
    va_start(words, format);
    vsnprintf(args->message, args->message_bytes, format, words);
    va_end(words);
  }
  return FA_REFUSED;
}

/* Check what every callee must check first: the caller's struct is the one this header describes. */
static inline int fa_check_abi(const struct FaForwardArgs* args) {
  if (args->abi_version != FA_ABI_VERSION || args->struct_size != sizeof(struct FaForwardArgs)) {
    return fa_refuse(args, "the caller's ABI is version %u with %u bytes, this kernel's is %u with %zu", args->abi_version,
                     args->struct_size, FA_ABI_VERSION, sizeof(struct FaForwardArgs));
  }
  return FA_OK;
}

/* Allow `kernel` more than 48 KB of dynamic shared memory; names both figures where the GPU has less. */
static inline int fa_allow_dynamic_smem(const struct FaForwardArgs* args, const void* kernel, int bytes) {
  int device = 0, allowed = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&allowed, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (status != cudaSuccess) return (int)status;
  if (bytes > allowed) {
    return fa_refuse(args, "the kernel needs %d bytes of shared memory per block, this GPU allows %d", bytes, allowed);
  }
  return (int)cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

#endif /* PYTEST_FA_FA_FORWARD_H_ */

/* fa_forward.h: the C interface of an attention kernel.
 *
 * A CUDA variant is a CUDA C++ source that includes this header and no header of a framework.  It exports
 *
 *     int    fa_forward(const FaForwardArgs* args, cudaStream_t stream);
 *     size_t fa_workspace_bytes(const FaForwardArgs* args);          (only if it needs a workspace)
 *
 * fa_forward launches its kernels on `stream` and returns an FaStatus or a cudaError_t.  It must not allocate memory,
 * synchronise or exit.  It refuses every call that it does not support: it returns the result of fa_refuse.
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
enum FaDtype { FA_DTYPE_fp16 = 0, FA_DTYPE_bf16 = 1, FA_DTYPE_fp32 = 2, FA_DTYPE_e4m3 = 3 };
enum FaCausal { FA_CAUSAL_NONE = 0, FA_CAUSAL_TOP_LEFT = 1, FA_CAUSAL_BOTTOM_RIGHT = 2 };

/* The strides of a tensor [batch, heads, seq, head_dim], in elements. */
struct FaStrides {
  int64_t batch, head, seq, dim;
};

struct FaForwardArgs {
  uint32_t abi_version; /* FA_ABI_VERSION of the caller */
  uint32_t struct_size; /* sizeof(FaForwardArgs) of the caller */

  const void* q; /* [batch, heads,    seq_q, head_dim] */
  const void* k; /* [batch, kv_heads, seq_k, head_dim] */
  const void* v; /* [batch, kv_heads, seq_k, head_dim] */
  void* out;     /* [batch, heads,    seq_q, head_dim]; [batch, heads, seq_q, seq_k] if the variant computes scores */
  float* lse;    /* [batch, heads, seq_q], contiguous: log(sum(exp(score))) of each row; NULL if not requested */

  void* workspace; /* device memory of workspace_bytes bytes; NULL if fa_workspace_bytes is not exported */
  uint64_t workspace_bytes;

  int64_t batch, heads, kv_heads, seq_q, seq_k, head_dim;
  struct FaStrides q_stride, k_stride, v_stride, out_stride;
  int32_t dtype;     /* FaDtype of q, k and v */
  int32_t causal;    /* FaCausal */
  float scale;       /* factor of the scores q k^T, before the softmax */
  int32_t out_dtype; /* FaDtype of out: that of q, but fp16 or bf16 if q is e4m3 */

  /* e4m3 only, NULL otherwise: the value of an element is its e4m3 number times the descale of its head. */
  const float* q_descale; /* [batch, heads], contiguous */
  const float* k_descale; /* [batch, kv_heads], contiguous */
  const float* v_descale; /* [batch, kv_heads], contiguous */

  char* message; /* receives the reason for a refusal; may be NULL */
  uint64_t message_bytes;
};

/* What a source exports.  A definition with these arguments is a C function, even without FA_EXPORT; one with other
 * arguments does not compile. */
#ifdef __cplusplus
FA_EXPORT int fa_forward(const struct FaForwardArgs* args, cudaStream_t stream);
FA_EXPORT size_t fa_workspace_bytes(const struct FaForwardArgs* args);
#endif

/* Refuses a call, with a printf-style reason: `return fa_refuse(args, "head_dim is %d, it must be 64", head_dim)`. */
__attribute__((format(printf, 2, 3))) static inline int fa_refuse(const struct FaForwardArgs* args, const char* format, ...) {
  if (args->message != NULL && args->message_bytes > 0) {
    va_list values;
    va_start(values, format);
    vsnprintf(args->message, args->message_bytes, format, values);
    va_end(values);
  }
  return FA_REFUSED;
}

/* Checks that the caller uses the struct of this header. fa_forward must call it before it reads anything else. */
static inline int fa_check_abi(const struct FaForwardArgs* args) {
  if (args->abi_version != FA_ABI_VERSION || args->struct_size != sizeof(struct FaForwardArgs)) {
    return fa_refuse(args, "the caller's ABI is version %u with %u bytes, this kernel's is %u with %zu", args->abi_version,
                     args->struct_size, FA_ABI_VERSION, sizeof(struct FaForwardArgs));
  }
  return FA_OK;
}

/* Lets `kernel` use more than 48 KB of dynamic shared memory.  Refuses if the GPU has too little for that and the
 * kernel's static shared memory, with all sizes. */
static inline int fa_allow_dynamic_smem(const struct FaForwardArgs* args, const void* kernel, int bytes) {
  int device = 0, allowed = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&allowed, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (status != cudaSuccess) return (int)status;
  if (bytes > allowed) {
    return fa_refuse(args, "the kernel needs %d bytes of shared memory per block, this GPU allows %d", bytes, allowed);
  }
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status == cudaErrorInvalidValue) {
    (void)cudaGetLastError(); /* the refusal reports it */
    struct cudaFuncAttributes attributes;
    const cudaError_t known = cudaFuncGetAttributes(&attributes, kernel);
    if (known == cudaSuccess && (size_t)bytes + attributes.sharedSizeBytes > (size_t)allowed) {
      return fa_refuse(args, "the kernel needs %d bytes of dynamic and %zu bytes of static shared memory per block, this GPU allows %d",
                       bytes, attributes.sharedSizeBytes, allowed);
    }
  }
  return (int)status;
}

#endif /* PYTEST_FA_FA_FORWARD_H_ */

/* fa_backward.h: the C interface of a backward kernel, which computes the gradients of attention.
 *
 * A CUDA variant with `computes: gradients` is a CUDA C++ source that includes this header.  It exports
 *
 *     int    fa_backward(const FaBackwardArgs* args, cudaStream_t stream);
 *     size_t fa_backward_workspace_bytes(const FaBackwardArgs* args);          (only if it needs a workspace)
 *
 * All that fa_forward.h says of fa_forward holds for fa_backward, too: it launches its kernels on `stream`, returns an
 * FaStatus or a cudaError_t, and must not allocate memory, synchronise or exit.  It refuses every call that it does not
 * support: it returns the result of `fa_refuse(args->forward, ...)`.
 */
#ifndef PYTEST_FA_FA_BACKWARD_H_
#define PYTEST_FA_FA_BACKWARD_H_

#include "fa_forward.h"

struct FaBackwardArgs {
  uint64_t struct_size; /* sizeof(FaBackwardArgs) of the caller */

  /* The forward pass: its sizes, scale, causal mask and features, and its tensors, which are only read.  `out` and `lse` are
   * what that pass has written; lse is never NULL, and in the conventions that the manifest declares: without one, that of a
   * row that sees nothing is -inf.  The workspace and the message are those of this call.  dtype is that of all tensors, fp16,
   * bf16 or fp32; no call has pages, a quantised cache or new keys.
   *
   * It is a pointer, so that either struct can grow.  fa_copy_args(args->forward) has all fields. */
  const struct FaForwardArgs* forward;

  const void* dout;  /* [batch, heads, seq_q, head_dim_v]: the gradient of out */
  const float* dlse; /* [batch, heads, seq_q], contiguous: the gradient of lse, in its conventions; NULL: zeros */

  /* The gradients, of q's dtype.  Those of a query or key that sees nothing are 0.  Rows of padding, which are at or behind the
   * lengths of a sequence, are not written; those of dout and dlse may hold NaN, as those of q, k, v, out and lse may.  With
   * cu_seqlens, dout and dq have the rows of q, dlse is [heads, rows], and dk and dv have the rows of k. */
  void* dq; /* [batch, heads,    seq_q, head_dim] */
  void* dk; /* [batch, kv_heads, seq_k, head_dim]: the sum over the query heads that share a head of k and v */
  void* dv; /* [batch, kv_heads, seq_k, head_dim_v]: the same */
  struct FaStrides dout_stride, dq_stride, dk_stride, dv_stride; /* with cu_seqlens, 0 for a batch */

  /* The gradients of the bias and the sink.  NULL: not asked for.  Every element is written.  It is 0 for a query that does not
   * see the key, for padding, and for a sink of -inf, also where lse is -inf. */
  void* dbias;  /* as forward->bias, of q's dtype; summed over each axis with a stride of 0 */
  float* dsink; /* [heads]: summed over batches and queries; by the sink as the call has it */
  struct FaStrides dbias_stride; /* 0 where forward->bias_stride is 0, and along an axis with one element */
};

/* What a source exports; see fa_forward.h. */
#ifdef __cplusplus
FA_EXPORT int fa_backward(const struct FaBackwardArgs* args, cudaStream_t stream);
FA_EXPORT size_t fa_backward_workspace_bytes(const struct FaBackwardArgs* args);
#endif

/* Checks that the caller uses this interface, and refuses each feature that is not in `taken`, bits of FaFeature.  fa_backward
 * must call it before it reads anything else.  A longer struct is accepted if all bytes that this header does not know are zero. */
static inline int fa_check_backward(const struct FaBackwardArgs* args, uint32_t taken) {
  const size_t own_size = sizeof(struct FaBackwardArgs);
  const int status = fa_check_features(args->forward, taken);
  if (status != FA_OK) return status;
  if (args->struct_size < own_size) {
    return fa_refuse(args->forward, "the caller's FaBackwardArgs has %zu bytes, this kernel's has %zu", (size_t)args->struct_size,
                     own_size);
  }
  for (size_t byte = own_size; byte < args->struct_size; ++byte) {
    if (((const unsigned char*)args)[byte] != 0) {
      return fa_refuse(args->forward, "byte %zu of the caller's FaBackwardArgs is not 0; this kernel's has %zu bytes", byte,
                       own_size);
    }
  }
  return FA_OK;
}

#endif /* PYTEST_FA_FA_BACKWARD_H_ */

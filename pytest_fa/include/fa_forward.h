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
#include <string.h>

#define FA_ABI_VERSION 1
#define FA_EXPORT extern "C" __attribute__((visibility("default")))

enum FaStatus { FA_OK = 0, FA_REFUSED = -1 };
enum FaDtype { FA_DTYPE_fp16 = 0, FA_DTYPE_bf16 = 1, FA_DTYPE_fp32 = 2, FA_DTYPE_e4m3 = 3, FA_DTYPE_int8 = 4 };
enum FaCausal { FA_CAUSAL_NONE = 0, FA_CAUSAL_TOP_LEFT = 1, FA_CAUSAL_BOTTOM_RIGHT = 2 };
enum FaFeature {
  FA_SOFTCAP = 1,
  FA_WINDOW_LEFT = 2,
  FA_WINDOW_RIGHT = 4,
  FA_SINK = 8,
  FA_ALIBI = 16,
  FA_BIAS = 32,
  FA_MASK = 64,
  FA_HEAD_DIM_V = 128,
  FA_SEQLENS_Q = 256,
  FA_SEQLENS_K = 512,
  FA_BLOCK_TABLE = 1024,
  FA_CACHE_DTYPE = 2048,
  FA_CU_SEQLENS_Q = 4096,
  FA_CU_SEQLENS_K = 8192,
  FA_APPEND = 16384
};

/* The strides of a tensor [batch, heads, seq, head_dim], in elements.  For a bias or a mask, `seq` is that of queries and
 * `dim` that of keys. */
struct FaStrides {
  int64_t batch, head, seq, dim;
};

struct FaForwardArgs {
  uint32_t abi_version; /* FA_ABI_VERSION of the caller */
  uint32_t struct_size; /* sizeof(FaForwardArgs) of the caller; FA_PLAIN_SIZE if `features` is 0 */

  const void* q; /* [batch, heads,    seq_q, head_dim] */
  const void* k; /* [batch, kv_heads, seq_k, head_dim] */
  const void* v; /* [batch, kv_heads, seq_k, head_dim] */
  void* out;     /* [batch, heads,    seq_q, head_dim]; [batch, heads, seq_q, seq_k] if the variant computes scores */
  float* lse;    /* [batch, heads, seq_q], contiguous: log(sum(exp(score))) of each row; NULL if not requested */

  void* workspace; /* device memory of workspace_bytes bytes; NULL if fa_workspace_bytes is not exported */
  uint64_t workspace_bytes;

  int64_t batch, heads, kv_heads, seq_q, seq_k, head_dim;
  struct FaStrides q_stride, k_stride, v_stride, out_stride;
  int32_t dtype;     /* FaDtype of q, and of k and v without FA_CACHE_DTYPE; never int8 */
  int32_t causal;    /* FaCausal; FA_CAUSAL_NONE if the call has a window */
  float scale;       /* factor of the scores q k^T, before the softmax */
  int32_t out_dtype; /* FaDtype of out: that of q, but fp16 or bf16 if q is e4m3 */

  /* e4m3 only, NULL otherwise: the value of an element is its e4m3 number times the descale of its head. */
  const float* q_descale; /* [batch, heads], contiguous */
  const float* k_descale; /* [batch, kv_heads], contiguous */
  const float* v_descale; /* [batch, kv_heads], contiguous */

  char* message; /* receives the reason for a refusal; may be NULL */
  uint64_t message_bytes;

  /* A bit for each feature that the call has; 0 for plain attention.  A field below is read only if its bit is set: 0 is a
   * side of a window like any other.  Query i has the position p = i + seq_k - seq_q, with the lengths of its own sequence if
   * the call has some.
   *
   * The order is: scale, soft cap, bias, ALiBi, then everything that hides a key, then the softmax over the visible keys and
   * the sink. */
  uint32_t features;    /* FaFeature */
  float softcap;        /* FA_SOFTCAP: scores become softcap * tanh(score / softcap) */
  int64_t window_left;  /* FA_WINDOW_LEFT: keys below p - window_left are hidden; may be negative */
  int64_t window_right; /* FA_WINDOW_RIGHT: keys above p + window_right are hidden; may be negative */

  const float* sink;         /* FA_SINK: [heads], contiguous: a score without a value, neither scaled nor capped; may be -inf */
  const float* alibi_slopes; /* FA_ALIBI: [heads], contiguous: slope * |key - p| is subtracted from the scores */
  const void* bias;    /* FA_BIAS: [batch, heads, seq_q, seq_k] of q's dtype, float if q is e4m3; -inf hides a key */
  const uint8_t* mask; /* FA_MASK: [batch, heads, seq_q, seq_k]: 1 for a visible key, 0 for a hidden one */
  struct FaStrides bias_stride, mask_stride; /* 0 along an axis on which the tensor does not depend */
  int64_t head_dim_v; /* FA_HEAD_DIM_V: head_dim of v and out if it is not that of q and k; see fa_copy_args */

  /* [batch], contiguous, on the device: the numbers of queries and keys of each sequence, at most seq_q and seq_k.  What is at
   * or behind them is padding: rows of out are not written, those of lse need not be, and rows of q, k and v may hold NaN. */
  const int32_t* seqlens_q; /* FA_SEQLENS_Q */
  const int32_t* seqlens_k; /* FA_SEQLENS_K */

  /* FA_BLOCK_TABLE: k and v are caches [pages, kv_heads, page_size, head_dim], whose strides have that of a page as `batch`.  Key
   * j of a sequence is key j % page_size of page block_table[sequence * block_table_stride + j / page_size].  seq_k is what the
   * table has room for, a multiple of page_size.  Entries behind the last page of a sequence may be any number, and slots of the
   * caches that no sequence has may hold NaN. */
  const int32_t* block_table; /* [batch, seq_k / page_size], on the device */
  int64_t block_table_stride, page_size;

  /* FA_CACHE_DTYPE: k and v are numbers of 8 bits beside a q in fp16 or bf16.  The value of an element of k is its number
   * times a float on the device, at k_scale + b * k_scale_stride.batch + h * k_scale_stride.head + j * k_scale_stride.seq for key j of
   * key/value head h of batch b; with FA_BLOCK_TABLE, for slot j of page b.  A stride is 0 along an axis on which the scales do
   * not depend, and `dim` is always 0.  Scales of keys that no sequence has may be NaN.  The same holds for v and v_scale. */
  int32_t cache_dtype; /* FaDtype of k and v: FA_DTYPE_e4m3 or FA_DTYPE_int8 */
  const float *k_scale, *v_scale;
  struct FaStrides k_scale_stride, v_scale_stride;

  /* The sequences lie behind one another: sequence b has the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1 of q and out, and
   * those that cu_seqlens_k says of k and v.  These tensors have 0 as the stride of a batch.  The first number is 0, and none is
   * smaller than the one before it.  seq_q and seq_k are at least the longest sequence.  Rows behind the last sequence may hold
   * NaN, and are not written.  lse is [heads, rows_q].  With FA_BLOCK_TABLE, a call has seqlens_k, and no cu_seqlens_k. */
  const int32_t* cu_seqlens_q; /* FA_CU_SEQLENS_Q: [batch + 1], contiguous, on the device, instead of seqlens_q */
  const int32_t* cu_seqlens_k; /* FA_CU_SEQLENS_K: the same instead of seqlens_k */
  int64_t rows_q;              /* FA_CU_SEQLENS_Q: the number of rows of q and out */

  /* FA_APPEND, which comes with FA_SEQLENS_K and without FA_SEQLENS_Q: the last seq_q keys of each sequence are new.  seqlens_k
   * counts them, unless the manifest declares otherwise.  The kernel writes them into k and v, bit by bit, and nothing else
   * there.  Until then, their slots may hold NaN. */
  const void* k_new; /* [batch, kv_heads, seq_q, head_dim] */
  const void* v_new; /* [batch, kv_heads, seq_q, head_dim_v] */
  struct FaStrides k_new_stride, v_new_stride;

  int64_t rows_k; /* FA_CU_SEQLENS_K: the number of rows of k and v */
};

/* The struct_size of a call without features: that of the first fa_forward.h, whose struct ends before `features`. */
#define FA_PLAIN_SIZE offsetof(struct FaForwardArgs, features)

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

/* The caller's arguments, with zeros for the fields that the caller's struct does not have.  A kernel reads features from
 * this copy, because a call without features may come with a struct of FA_PLAIN_SIZE bytes.  The copy always has head_dim_v. */
static inline struct FaForwardArgs fa_copy_args(const struct FaForwardArgs* args) {
  struct FaForwardArgs copy;
  memset(&copy, 0, sizeof(copy));
  memcpy(&copy, args, args->struct_size < sizeof(copy) ? args->struct_size : sizeof(copy));
  if (!(copy.features & FA_HEAD_DIM_V)) copy.head_dim_v = copy.head_dim;
  return copy;
}

/* Checks that the caller uses this ABI, and refuses each feature that is not in `taken`, bits of FaFeature.  fa_forward must
 * call it, or fa_check_abi, before it reads anything else.
 *
 * A longer struct is accepted if all bytes that this header does not know are zero. */
static inline int fa_check_features(const struct FaForwardArgs* args, uint32_t taken) {
  static const struct {
    uint32_t bit;
    const char *feature, *name;
  } known[] = {
      {FA_SOFTCAP, "a soft cap", "FA_SOFTCAP"},
      {FA_WINDOW_LEFT, "a window (window_left)", "FA_WINDOW_LEFT"},
      {FA_WINDOW_RIGHT, "a window (window_right)", "FA_WINDOW_RIGHT"},
      {FA_SINK, "a sink", "FA_SINK"},
      {FA_ALIBI, "ALiBi slopes", "FA_ALIBI"},
      {FA_BIAS, "a bias", "FA_BIAS"},
      {FA_MASK, "a mask", "FA_MASK"},
      {FA_HEAD_DIM_V, "another head_dim of V", "FA_HEAD_DIM_V"},
      {FA_SEQLENS_Q, "lengths of queries", "FA_SEQLENS_Q"},
      {FA_SEQLENS_K, "lengths of keys", "FA_SEQLENS_K"},
      {FA_BLOCK_TABLE, "pages", "FA_BLOCK_TABLE"},
      {FA_CACHE_DTYPE, "a quantised cache", "FA_CACHE_DTYPE"},
      {FA_CU_SEQLENS_Q, "queries of sequences behind one another", "FA_CU_SEQLENS_Q"},
      {FA_CU_SEQLENS_K, "keys of sequences behind one another", "FA_CU_SEQLENS_K"},
      {FA_APPEND, "new keys", "FA_APPEND"},
  };
  const size_t own_size = sizeof(struct FaForwardArgs);
  if (args->abi_version != FA_ABI_VERSION || args->struct_size < FA_PLAIN_SIZE) {
    return fa_refuse(args, "the caller's ABI is version %u with %u bytes, this kernel's is %u with %zu or more",
                     args->abi_version, args->struct_size, FA_ABI_VERSION, FA_PLAIN_SIZE);
  }
  const uint32_t features = args->struct_size > FA_PLAIN_SIZE ? args->features : 0;
  uint32_t newer = features;
  for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); ++i) {
    if (features & known[i].bit & ~taken) {
      return fa_refuse(args, "the call has %s, but this kernel does not pass %s to fa_check_features", known[i].feature,
                       known[i].name);
    }
    newer &= ~known[i].bit;
  }
  if (newer != 0) return fa_refuse(args, "the call has features 0x%x, which are newer than this kernel's fa_forward.h", newer);
  if (features != 0 && args->struct_size < own_size) {
    return fa_refuse(args, "the call has features and a struct of %u bytes, this kernel's has %zu", args->struct_size, own_size);
  }
  for (size_t byte = own_size; byte < args->struct_size; ++byte) {
    if (((const unsigned char*)args)[byte] != 0) {
      return fa_refuse(args, "byte %zu of the caller's struct is not 0; this kernel's struct has %zu bytes", byte, own_size);
    }
  }
  return FA_OK;
}

/* The same for a kernel of plain attention, which takes no feature. */
static inline int fa_check_abi(const struct FaForwardArgs* args) { return fa_check_features(args, 0); }

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

// binding.h: what the bindings share.  They convert tensors to the arguments of a C interface.
//
// They check dtypes, devices and shapes, use the caller's current stream, and turn a status into an exception with the message
// of the kernel.  They are the same for every kernel, and kernels do not depend on Python.
//
// They include only C headers of tvm-ffi: with those for C++, and with <string>, they take ten times as long to compile.
#ifndef PYTEST_FA_BINDING_H_
#define PYTEST_FA_BINDING_H_

#include <cuda_runtime_api.h>
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <float.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "fa_forward.h"

namespace {

// Python's exception of type `kind`.
struct Error {
  const char* kind;
  char text[512];
};

__attribute__((format(printf, 2, 3))) [[noreturn]] void Throw(const char* kind, const char* format, ...) {
  Error error = {kind, ""};
  va_list values;
  va_start(values, format);
  vsnprintf(error.text, sizeof(error.text), format, values);
  va_end(values);
  throw error;
}

// Hands an exception to tvm-ffi, which raises it in Python; returns the status of a failed call.  It has no C++
// backtrace: for the first one of a process, tvm-ffi would read the symbols of all libraries, which takes more than half
// a second beside torch.
int Raise(const Error& error) {
  const TVMFFIByteArray kind = {error.kind, strlen(error.kind)}, text = {error.text, strlen(error.text)}, backtrace = {"", 0};
  TVMFFIObjectHandle object = nullptr;
  if (TVMFFIErrorCreate(&kind, &text, &backtrace, &object) == 0) {
    TVMFFIErrorSetRaised(object);
    TVMFFIObjectDecRef(object);
  }
  return -1;
}

#define FA_THROW(Kind, ...) Throw(#Kind, __VA_ARGS__)

// Throws an exception of type Kind unless the condition holds.  The message names the argument, its value and what is
// allowed.
#define FA_REQUIRE(condition, Kind, ...) \
  if (!(condition)) FA_THROW(Kind, __VA_ARGS__)

// What tvm-ffi calls the type of a value.
const char* Kind(const TVMFFIAny& value) {
  const TVMFFITypeInfo* info = TVMFFIGetTypeInfo(value.type_index);
  return info == nullptr ? "another type" : info->type_key.data;
}

// The arguments of one call from Python, which are taken in their order.  The `further` ones at the end come only with calls
// that need one of them, so that other calls take no longer.
class Arguments {
 public:
  Arguments(const TVMFFIAny* values, int count, int wanted, int further) : next_(values), end_(values + count) {
    FA_REQUIRE(count == wanted || count == wanted + further, TypeError, "%d or %d arguments are needed, got %d", wanted,
               wanted + further, count);
  }

  bool IsAtEnd() const { return next_ == end_; }

  // A tensor, or null for None.  An error names the kind of value that came in its place.
  const DLTensor* TensorOrNone(const char* name) {
    const TVMFFIAny& value = *next_++;
    if (value.type_index == kTVMFFINone) return nullptr;
    if (value.type_index == kTVMFFIDLTensorPtr) return static_cast<const DLTensor*>(value.v_ptr);
    FA_REQUIRE(value.type_index == kTVMFFITensor, TypeError, "%s must be a tensor, got %s", name, Kind(value));
    return TVMFFITensorGetDLTensorPtr(value.v_obj);
  }

  const DLTensor& Tensor(const char* name) {
    const DLTensor* tensor = TensorOrNone(name);
    FA_REQUIRE(tensor != nullptr, TypeError, "%s must be a tensor, got None", name);
    return *tensor;
  }

  // Whether the last argument is a tensor.
  bool EndsWithTensor() const { return end_[-1].type_index != kTVMFFINone; }

  void Skip(int count) { next_ += count; }

  // Skips the next argument if it is None.  Returns whether it was.
  bool SkipNone() {
    const bool is_none = next_->type_index == kTVMFFINone;
    if (is_none) ++next_;
    return is_none;
  }

  int64_t Integer(const char* name) {
    const TVMFFIAny& value = *next_++;
    FA_REQUIRE(value.type_index == kTVMFFIInt, TypeError, "%s must be an integer, got %s", name, Kind(value));
    return value.v_int64;
  }

  double Number(const char* name) {
    if (next_->type_index == kTVMFFIInt) return static_cast<double>(Integer(name));
    const TVMFFIAny& value = *next_++;
    FA_REQUIRE(value.type_index == kTVMFFIFloat, TypeError, "%s must be a number, got %s", name, Kind(value));
    return value.v_float64;
  }

 private:
  const TVMFFIAny *next_, *end_;
};

constexpr int DESCALES = 3, FURTHER = 15;  // the arguments for descales, and those that ReadFurther reads

void* Data(const DLTensor& tensor) { return static_cast<char*>(tensor.data) + tensor.byte_offset; }

// Whether the elements follow one another without gaps, in the order of the axes.
bool IsContiguous(const DLTensor& tensor) {
  int64_t expected = 1;
  for (int axis = tensor.ndim - 1; axis >= 0 && tensor.strides != nullptr; --axis) {
    if (tensor.shape[axis] != 1 && tensor.strides[axis] != expected) return false;
    expected *= tensor.shape[axis];
  }
  return true;
}

struct Text {
  char chars[256];
};

// A shape in words, such as `[1, 8, 512, 64]`.
Text Shape(const DLTensor& tensor) {
  Text text = {"["};
  for (int axis = 0; axis < tensor.ndim; ++axis) {
    const size_t length = strlen(text.chars);
    const auto size = static_cast<long long>(tensor.shape[axis]);
    snprintf(text.chars + length, sizeof(text.chars) - length, "%s%lld", axis ? ", " : "", size);
  }
  const size_t length = strlen(text.chars);
  snprintf(text.chars + length, sizeof(text.chars) - length, "]");
  return text;
}

void CheckTensor(const DLTensor& tensor, const char* name, int ndim, const DLTensor& q) {
  FA_REQUIRE(tensor.device.device_type == kDLCUDA, ValueError, "%s must be a CUDA tensor", name);
  FA_REQUIRE(tensor.device.device_id == q.device.device_id, ValueError, "%s is on cuda:%d, q on cuda:%d", name,
             tensor.device.device_id, q.device.device_id);
  FA_REQUIRE(tensor.ndim == ndim, ValueError, "%s must have %d dimensions, got %s", name, ndim, Shape(tensor).chars);
}

template <int AXES>
void CheckShape(const DLTensor& tensor, const char* name, const int64_t (&expected)[AXES]) {
  for (int axis = 0; axis < AXES; ++axis) {
    FA_REQUIRE(tensor.shape[axis] == expected[axis], ValueError, "%s is %s: axis %d must be %lld", name,
               Shape(tensor).chars, axis, static_cast<long long>(expected[axis]));
  }
}

const char* const DTYPE_NAMES[] = {"fp16", "bf16", "fp32", "e4m3", "int8"};  // by FaDtype

int32_t Dtype(const DLTensor& tensor, const char* name) {
  const DLDataType dtype = tensor.dtype;
  if (dtype.bits == 16 && dtype.code == kDLFloat) return FA_DTYPE_fp16;
  if (dtype.bits == 16 && dtype.code == kDLBfloat) return FA_DTYPE_bf16;
  if (dtype.bits == 32 && dtype.code == kDLFloat) return FA_DTYPE_fp32;
  if (dtype.bits == 8 && dtype.code == kDLFloat8_e4m3fn) return FA_DTYPE_e4m3;
  FA_THROW(TypeError, "%s must be fp16, bf16, fp32 or e4m3, got DLPack type code %d with %d bits", name, dtype.code, dtype.bits);
}

void CheckDtype(const DLTensor& tensor, const char* name, int32_t dtype_of_q) {
  const int32_t dtype = Dtype(tensor, name);
  FA_REQUIRE(dtype == dtype_of_q, TypeError, "q is %s and %s is %s; q, k, v and out must have the same dtype",
             DTYPE_NAMES[dtype_of_q], name, DTYPE_NAMES[dtype]);
}

// Returns the FaDtype of out: that of q, or fp16 or bf16 if q is e4m3.
int32_t OutDtype(const DLTensor& out, int32_t dtype_of_q) {
  if (dtype_of_q != FA_DTYPE_e4m3) {
    CheckDtype(out, "out", dtype_of_q);
    return dtype_of_q;
  }
  const int32_t dtype = Dtype(out, "out");
  FA_REQUIRE(dtype == FA_DTYPE_fp16 || dtype == FA_DTYPE_bf16, TypeError,
             "q is e4m3 and out is %s; it must be fp16 or bf16", DTYPE_NAMES[dtype]);
  return dtype;
}

// The address of a contiguous float32 tensor of this shape.
template <int AXES>
float* Floats(const DLTensor& tensor, const char* name, const int64_t (&shape)[AXES], const DLTensor& q) {
  CheckTensor(tensor, name, AXES, q);
  CheckShape(tensor, name, shape);
  const DLDataType dtype = tensor.dtype;
  FA_REQUIRE(dtype.code == kDLFloat && dtype.bits == 32, TypeError, "%s must be float32, got %d bits", name, dtype.bits);
  FA_REQUIRE(IsContiguous(tensor), ValueError, "%s must be contiguous", name);
  return static_cast<float*>(Data(tensor));
}

// The address of the lengths of the sequences, [batch], or of their starts.
const int32_t* Lengths(const DLTensor& tensor, const char* name, int64_t count, const DLTensor& q) {
  CheckTensor(tensor, name, 1, q);
  CheckShape(tensor, name, {count});
  FA_REQUIRE(tensor.dtype.code == kDLInt && tensor.dtype.bits == 32, TypeError,
             "%s must be int32, got DLPack type code %d with %d bits", name, tensor.dtype.code, tensor.dtype.bits);
  FA_REQUIRE(IsContiguous(tensor), ValueError, "%s must be contiguous", name);
  return static_cast<const int32_t*>(Data(tensor));
}

// The starts of sequences behind one another, [batch + 1].  Returns the number of sequences.
int64_t TakeStarts(const DLTensor& tensor, const char* name, const int32_t*& starts, const DLTensor& q) {
  CheckTensor(tensor, name, 1, q);
  FA_REQUIRE(tensor.shape[0] >= 2, ValueError, "%s is %s: it must be [batch + 1]", name, Shape(tensor).chars);
  starts = Lengths(tensor, name, tensor.shape[0], q);
  return tensor.shape[0] - 1;
}

// The address of a descale, [batch, heads].
const float* Descale(const DLTensor* descale, const char* name, int64_t batch, int64_t heads, const DLTensor& q) {
  FA_REQUIRE(descale != nullptr, ValueError, "q is e4m3, so %s is needed", name);
  return Floats(*descale, name, {batch, heads}, q);
}

// The strides in elements.  That of an axis with one element has no meaning; a kernel sees it as if the axis were dense.
FaStrides Strides(const DLTensor& tensor) {
  int64_t strides[4] = {}, dense = 1;
  for (int axis = 3; axis >= 0; --axis) {
    const int64_t size = tensor.shape[axis];
    strides[axis] = tensor.strides == nullptr || size == 1 ? dense : tensor.strides[axis];
    if (strides[axis] * size > dense) dense = strides[axis] * size;
  }
  return {strides[0], strides[1], strides[2], strides[3]};
}

// The strides of a bias or a mask, [batch, heads, seq_q, seq_k]; 0 along an axis with one element, too.
FaStrides PairStrides(const DLTensor& tensor) {
  const FaStrides of = Strides(tensor);
  const int64_t* size = tensor.shape;
  return {size[0] == 1 ? 0 : of.batch, size[1] == 1 ? 0 : of.head, size[2] == 1 ? 0 : of.seq, size[3] == 1 ? 0 : of.dim};
}

// What the kernel computes into `out`: attention [batch, heads, seq_q, head_dim_v], or only scores [batch, heads, seq_q,
// seq_k].
enum class Computes { kAttention, kScores };

// Checks the tensors of a call and returns their sizes, strides and pointers.
FaForwardArgs MakeArgs(Computes computes, const DLTensor& q, const DLTensor& k, const DLTensor& v, const DLTensor& out,
                       double scale, int64_t causal) {
  CheckTensor(q, "q", 4, q);
  CheckTensor(k, "k", 4, q);
  CheckTensor(v, "v", 4, q);
  CheckTensor(out, "out", 4, q);
  const int64_t batch = q.shape[0], heads = q.shape[1], seq_q = q.shape[2], head_dim = q.shape[3];
  const int64_t kv_heads = k.shape[1], seq_k = k.shape[2];
  const int64_t head_dim_v = computes == Computes::kScores ? head_dim : v.shape[3];
  const int64_t pages = k.shape[0];  // or batches: ReadFeatures finds out which
  CheckShape(k, "k", {pages, kv_heads, seq_k, head_dim});
  CheckShape(v, "v", {pages, kv_heads, seq_k, head_dim_v});
  CheckShape(out, "out", {batch, heads, seq_q, computes == Computes::kScores ? seq_k : head_dim_v});
  FA_REQUIRE(batch > 0 && heads > 0 && seq_q > 0 && head_dim > 0, ValueError, "q is %s: every axis must be at least 1",
             Shape(q).chars);
  FA_REQUIRE(head_dim_v > 0, ValueError, "v is %s: axis 3 must be at least 1", Shape(v).chars);
  FA_REQUIRE(kv_heads > 0 && heads % kv_heads == 0, ValueError, "%lld heads cannot share %lld key/value heads evenly",
             static_cast<long long>(heads), static_cast<long long>(kv_heads));
  FA_REQUIRE(causal >= FA_CAUSAL_NONE && causal <= FA_CAUSAL_BOTTOM_RIGHT, ValueError,
             "causal is %lld, allowed are 0 (none), 1 (top left), 2 (bottom right)", static_cast<long long>(causal));
  const int32_t dtype = Dtype(q, "q");
  const int32_t out_dtype = OutDtype(out, dtype);

  FaForwardArgs args = {};
  args.abi_version = FA_ABI_VERSION;
  args.q = Data(q);
  args.k = Data(k);
  args.v = Data(v);
  args.out = Data(out);
  args.batch = batch;
  args.heads = heads;
  args.kv_heads = kv_heads;
  args.seq_q = seq_q;
  args.seq_k = seq_k;
  args.head_dim = head_dim;
  args.q_stride = Strides(q);
  args.k_stride = Strides(k);
  args.v_stride = Strides(v);
  args.out_stride = Strides(out);
  args.dtype = dtype;
  args.causal = static_cast<int32_t>(causal);
  args.scale = static_cast<float>(scale);
  args.out_dtype = out_dtype;
  if (head_dim_v != head_dim) {
    args.features |= FA_HEAD_DIM_V;
    args.head_dim_v = head_dim_v;
  }
  return args;
}

// The table of a call with pages, whose k is a cache [pages, kv_heads, page_size, head_dim].
void TakeTable(const DLTensor& table, FaForwardArgs& args, const DLTensor& q) {
  CheckTensor(table, "block_table", 2, q);
  CheckShape(table, "block_table", {args.batch, table.shape[1]});
  FA_REQUIRE(table.dtype.code == kDLInt && table.dtype.bits == 32, TypeError,
             "block_table must be int32, got DLPack type code %d with %d bits", table.dtype.code, table.dtype.bits);
  FA_REQUIRE(args.features & FA_SEQLENS_K, ValueError, "block_table needs seqlens_k, the numbers of keys");
  FA_REQUIRE(table.shape[1] <= 1 || table.strides == nullptr || table.strides[1] == 1, ValueError,
             "the rows of block_table must be contiguous");
  args.features |= FA_BLOCK_TABLE;
  args.block_table = static_cast<const int32_t*>(Data(table));
  args.block_table_stride = table.strides == nullptr ? table.shape[1] : table.strides[0];
  args.page_size = args.seq_k;
  args.seq_k = table.shape[1] * args.page_size;
}

// Takes the scales of k or v, [1], [kv_heads] or [batch or pages, kv_heads, seq_k or page_size]; returns their strides.
FaStrides TakeScales(const DLTensor& scales, const char* name, const float** address, const DLTensor& q, const DLTensor& k) {
  const int64_t batch = k.shape[0], heads = k.shape[1], keys = k.shape[2];
  if (scales.ndim == 1) {
    const int64_t count = scales.shape[0] == 1 ? 1 : heads;
    *address = Floats(scales, name, {count}, q);
    return {0, count == 1 ? 0 : 1, 0, 0};
  }
  *address = Floats(scales, name, {batch, heads, keys}, q);
  return {heads * keys, keys, 1, 0};
}

// The FaDtype of a k or v that has scales.
int32_t CacheDtype(const DLTensor& tensor, const char* name) {
  const DLDataType dtype = tensor.dtype;
  if (dtype.bits == 8 && dtype.code == kDLInt) return FA_DTYPE_int8;
  if (dtype.bits == 8 && dtype.code == kDLFloat8_e4m3fn) return FA_DTYPE_e4m3;
  FA_THROW(TypeError, "%s has scales and must be e4m3 or int8, got DLPack type code %d with %d bits", name, dtype.code,
           dtype.bits);
}

// Takes a quantised cache, whose k and v have scales; without scales, they have q's dtype.
void TakeCache(const DLTensor* k_scale, const DLTensor* v_scale, FaForwardArgs& args, const DLTensor& q, const DLTensor& k,
               const DLTensor& v) {
  FA_REQUIRE(k_scale != nullptr && v_scale != nullptr, ValueError, "%s is given without %s", k_scale ? "k_scale" : "v_scale",
             k_scale ? "v_scale" : "k_scale");
  FA_REQUIRE(args.dtype == FA_DTYPE_fp16 || args.dtype == FA_DTYPE_bf16, TypeError,
             "k_scale is given and q is %s; it must be fp16 or bf16", DTYPE_NAMES[args.dtype]);
  args.features |= FA_CACHE_DTYPE;
  args.cache_dtype = CacheDtype(k, "k");
  FA_REQUIRE(CacheDtype(v, "v") == args.cache_dtype, TypeError, "k is %s and v is %s; they must have the same dtype",
             DTYPE_NAMES[args.cache_dtype], DTYPE_NAMES[CacheDtype(v, "v")]);
  args.k_scale_stride = TakeScales(*k_scale, "k_scale", &args.k_scale, q, k);
  args.v_scale_stride = TakeScales(*v_scale, "v_scale", &args.v_scale, q, k);
}

// The new keys or values of a call, [batch, kv_heads, seq_q, dim]; returns their address.
const void* NewRows(const DLTensor& tensor, const char* name, int64_t dim, const FaForwardArgs& args, const DLTensor& q) {
  CheckTensor(tensor, name, 4, q);
  CheckShape(tensor, name, {args.batch, args.kv_heads, args.seq_q, dim});
  CheckDtype(tensor, name, args.dtype);
  return Data(tensor);
}

// The new keys and values of a call, which the kernel appends to k and v.
void TakeNew(const DLTensor& k_new, const DLTensor& v_new, FaForwardArgs& args, const DLTensor& q) {
  const uint32_t lengths = args.features & (FA_SEQLENS_Q | FA_SEQLENS_K);
  FA_REQUIRE(lengths == FA_SEQLENS_K, ValueError, "k_new needs seqlens_k, the numbers of keys, and no seqlens_q");
  args.features |= FA_APPEND;
  args.k_new = NewRows(k_new, "k_new", args.head_dim, args, q);
  args.v_new = NewRows(v_new, "v_new", args.features & FA_HEAD_DIM_V ? args.head_dim_v : args.head_dim, args, q);
  args.k_new_stride = Strides(k_new);
  args.v_new_stride = Strides(v_new);
}

// A bias or a mask has seq_k keys; with pages, as many as the longest sequence.
void CheckPairs(const DLTensor& tensor, const char* name, const FaForwardArgs& args, bool has_pages) {
  CheckShape(tensor, name, {args.batch, args.heads, args.seq_q, has_pages ? tensor.shape[3] : args.seq_k});
}

// Reads the starts of sequences behind one another, and the longest numbers of rows.  A q or k without a cache has one batch then.
void TakeSequences(const DLTensor* of_queries, const DLTensor* of_keys, Arguments& arguments, FaForwardArgs& args, const DLTensor& q,
                   const DLTensor& k) {
  if (of_queries == nullptr) {
    FA_REQUIRE(of_keys == nullptr, ValueError, "cu_seqlens_k needs cu_seqlens_q");
    FA_REQUIRE(arguments.SkipNone() && arguments.SkipNone(), ValueError, "max_seqlen_q and max_seqlen_k need cu_seqlens_q");
    return;
  }
  FA_REQUIRE(args.batch == 1, ValueError, "q is %s: with cu_seqlens_q, axis 0 must be 1", Shape(q).chars);
  args.features |= FA_CU_SEQLENS_Q;
  args.batch = TakeStarts(*of_queries, "cu_seqlens_q", args.cu_seqlens_q, q);
  args.rows_q = args.seq_q;
  args.seq_q = arguments.Integer("max_seqlen_q");
  FA_REQUIRE(args.seq_q > 0, ValueError, "max_seqlen_q is %lld, it must be at least 1", static_cast<long long>(args.seq_q));
  args.q_stride.batch = args.out_stride.batch = 0;
  if (of_keys == nullptr) {  // the table says how many keys there may be
    if (!arguments.SkipNone()) arguments.Integer("max_seqlen_k");
    return;
  }
  FA_REQUIRE(k.shape[0] == 1, ValueError, "k is %s: with cu_seqlens_k, axis 0 must be 1", Shape(k).chars);
  args.features |= FA_CU_SEQLENS_K;
  const int64_t sequences = TakeStarts(*of_keys, "cu_seqlens_k", args.cu_seqlens_k, q);
  FA_REQUIRE(sequences == args.batch, ValueError, "cu_seqlens_k has %lld sequences, cu_seqlens_q has %lld",
             static_cast<long long>(sequences), static_cast<long long>(args.batch));
  args.rows_k = args.seq_k;
  args.seq_k = arguments.Integer("max_seqlen_k");
  FA_REQUIRE(args.seq_k >= 0, ValueError, "max_seqlen_k is %lld, it must be at least 0", static_cast<long long>(args.seq_k));
  args.k_stride.batch = args.v_stride.batch = 0;
}

// Reads what only some calls have besides numbers that change scores, each of which is None if the call lacks it.
void ReadFurther(Arguments& arguments, FaForwardArgs& args, const DLTensor& q, const DLTensor& k, const DLTensor& v) {
  const bool has_pages = arguments.EndsWithTensor();
  if (const DLTensor* sink = arguments.TensorOrNone("sink")) {
    args.features |= FA_SINK;
    args.sink = Floats(*sink, "sink", {args.heads}, q);
  }
  if (const DLTensor* slopes = arguments.TensorOrNone("alibi_slopes")) {
    args.features |= FA_ALIBI;
    args.alibi_slopes = Floats(*slopes, "alibi_slopes", {args.heads}, q);
  }
  if (const DLTensor* bias = arguments.TensorOrNone("attn_bias")) {
    CheckTensor(*bias, "attn_bias", 4, q);
    CheckPairs(*bias, "attn_bias", args, has_pages);
    const int32_t dtype = Dtype(*bias, "attn_bias"), wanted = args.dtype == FA_DTYPE_e4m3 ? FA_DTYPE_fp32 : args.dtype;
    FA_REQUIRE(dtype == wanted, TypeError, "q is %s and attn_bias is %s; it must be %s", DTYPE_NAMES[args.dtype],
               DTYPE_NAMES[dtype], DTYPE_NAMES[wanted]);
    args.features |= FA_BIAS;
    args.bias = Data(*bias);
    args.bias_stride = PairStrides(*bias);
  }
  if (const DLTensor* mask = arguments.TensorOrNone("attn_mask")) {
    CheckTensor(*mask, "attn_mask", 4, q);
    CheckPairs(*mask, "attn_mask", args, has_pages);
    FA_REQUIRE(mask->dtype.code == kDLBool && mask->dtype.bits == 8, TypeError,
               "attn_mask must be bool, got DLPack type code %d with %d bits", mask->dtype.code, mask->dtype.bits);
    args.features |= FA_MASK;
    args.mask = static_cast<const uint8_t*>(Data(*mask));
    args.mask_stride = PairStrides(*mask);
  }
  const DLTensor *of_queries = arguments.TensorOrNone("seqlens_q"), *of_keys = arguments.TensorOrNone("seqlens_k");
  const DLTensor *k_scale = arguments.TensorOrNone("k_scale"), *v_scale = arguments.TensorOrNone("v_scale");
  const DLTensor *starts_q = arguments.TensorOrNone("cu_seqlens_q"), *starts_k = arguments.TensorOrNone("cu_seqlens_k");
  const DLTensor *k_new = arguments.TensorOrNone("k_new"), *v_new = arguments.TensorOrNone("v_new");
  TakeSequences(starts_q, starts_k, arguments, args, q, k);
  FA_REQUIRE(starts_q == nullptr || !(args.features & (FA_BIAS | FA_MASK)), ValueError,
             "a bias or a mask has batches, but the sequences lie behind one another (cu_seqlens_q)");
  FA_REQUIRE(starts_q == nullptr || of_queries == nullptr, ValueError, "both seqlens_q and cu_seqlens_q are passed; pass one");
  FA_REQUIRE(starts_k == nullptr || of_keys == nullptr, ValueError, "both seqlens_k and cu_seqlens_k are passed; pass one");
  if (of_queries != nullptr) {
    args.features |= FA_SEQLENS_Q;
    args.seqlens_q = Lengths(*of_queries, "seqlens_q", args.batch, q);
  }
  if (of_keys != nullptr) {
    args.features |= FA_SEQLENS_K;
    args.seqlens_k = Lengths(*of_keys, "seqlens_k", args.batch, q);
  }
  if (k_scale != nullptr || v_scale != nullptr) TakeCache(k_scale, v_scale, args, q, k, v);
  FA_REQUIRE((k_new == nullptr) == (v_new == nullptr), ValueError, "k_new and v_new come together or not at all");
  if (k_new != nullptr) TakeNew(*k_new, *v_new, args, q);
  if (const DLTensor* table = arguments.TensorOrNone("block_table")) TakeTable(*table, args, q);
}

// Reads the features of a call, each of which is None if the call lacks it.
void ReadFeatures(Arguments& arguments, FaForwardArgs& args, const DLTensor& q, const DLTensor& k, const DLTensor& v) {
  if (!arguments.SkipNone()) {
    args.features |= FA_SOFTCAP;
    args.softcap = static_cast<float>(arguments.Number("softcap"));
    FA_REQUIRE(args.softcap > 0.0f && args.softcap <= FLT_MAX, ValueError,
               "softcap is %g; it must be above 0 and finite, or None for no soft cap", args.softcap);
  }
  if (!arguments.SkipNone()) {
    args.features |= FA_WINDOW_LEFT;
    args.window_left = arguments.Integer("window_left");
  }
  if (!arguments.SkipNone()) {
    args.features |= FA_WINDOW_RIGHT;
    args.window_right = arguments.Integer("window_right");
  }
  FA_REQUIRE(!(args.features & (FA_WINDOW_LEFT | FA_WINDOW_RIGHT)) || args.causal == FA_CAUSAL_NONE, ValueError,
             "causal is %s beside a window; leave it out: window_right=0 hides the keys after a query",
             args.causal == FA_CAUSAL_TOP_LEFT ? "top_left" : "bottom_right");
  if (!arguments.IsAtEnd()) ReadFurther(arguments, args, q, k, v);
  if (!(args.features & FA_CACHE_DTYPE)) {
    CheckDtype(k, "k", args.dtype);
    CheckDtype(v, "v", args.dtype);
  }
  FA_REQUIRE(k.shape[0] == args.batch || args.features & (FA_BLOCK_TABLE | FA_CU_SEQLENS_K), ValueError, "k has %lld batches, q has %lld",
             static_cast<long long>(k.shape[0]), static_cast<long long>(args.batch));
  args.struct_size = args.features == 0 ? FA_PLAIN_SIZE : sizeof(FaForwardArgs);
}

// Makes `device` the current device until the end of a scope, like the device guard of torch.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    cudaError_t status = cudaGetDevice(&previous_);
    if (status == cudaSuccess && previous_ != device) {
      status = cudaSetDevice(device);
      changed_ = status == cudaSuccess;
    }
    FA_REQUIRE(status == cudaSuccess, RuntimeError, "cuda:%d cannot be made current: %s", device, cudaGetErrorString(status));
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }

 private:
  int previous_ = 0;
  bool changed_ = false;
};

void TakeWorkspace(const DLTensor& workspace, FaForwardArgs& args) {
  args.workspace = Data(workspace);
  args.workspace_bytes = workspace.dtype.bits / 8;
  for (int axis = 0; axis < workspace.ndim; ++axis) args.workspace_bytes *= workspace.shape[axis];
}

// Why a kernel refuses a call.
struct Message {
  char chars[512];
};

// Calls fa_forward or fa_backward on the current stream of q's device.  Throws if it refuses the call, or does not launch.
template <typename Args>
void Launch(int (*entry)(const Args*, cudaStream_t), const Args& args, const DLTensor& q, const Message& message) {
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(q.device.device_type, q.device.device_id));

  (void)cudaGetLastError();  // drop the error of an earlier launch
  const int status = entry(&args, stream);

  if (status == FA_OK) return;
  FA_REQUIRE(status > 0, ValueError, "refused: %s", message.chars[0] ? message.chars : "(the kernel gave no reason)");
  const auto error = static_cast<cudaError_t>(status);
  FA_THROW(RuntimeError, "launch failed: %s: %s", cudaGetErrorName(error), cudaGetErrorString(error));
}

}  // namespace

// Exports a function under the name by which tvm-ffi finds it.  COUNT is the number of its arguments without those of
// ReadFurther.  The statement sets `result`.
#define FA_EXPORT_FFI(NAME, COUNT, STATEMENT)                                                                     \
  FA_EXPORT int __tvm_ffi_##NAME(void*, const TVMFFIAny* values, int32_t count, TVMFFIAny* result) {              \
    try {                                                                                                         \
      Arguments arguments(values, count, COUNT, FURTHER);                                                         \
      STATEMENT;                                                                                                  \
    } catch (const Error& error) {                                                                                \
      return Raise(error);                                                                                        \
    }                                                                                                             \
    return 0;                                                                                                     \
  }

#define FA_RETURN(TYPE, VALUE) result->type_index = TYPE, result->v_int64 = VALUE

#endif  // PYTEST_FA_BINDING_H_

// binding.cpp: converts tensors to FaForwardArgs and calls fa_forward.  It is compiled once per compiler and linked
// into every CUDA variant.
//
// It checks dtypes, devices and shapes, uses the caller's current stream, and turns a status into an exception with the
// message of the kernel.  It is the same for every kernel, and kernels do not depend on Python.
#include <cuda_runtime_api.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <string>

#include "fa_forward.h"

extern "C" __attribute__((weak)) size_t fa_workspace_bytes(const FaForwardArgs* args);

namespace {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;

// Formats with printf, not with a C++ stream: a stream needs a locale, and a process with two C++ runtimes may have
// two.
__attribute__((format(printf, 1, 2))) std::string Format(const char* format, ...) {
  char text[512];
  va_list values;
  va_start(values, format);
  vsnprintf(text, sizeof(text), format, values);
  va_end(values);
  return text;
}

// Throws Python's exception of type Kind.  It has no C++ backtrace: for the first one of a process, TVM_FFI_THROW reads the
// symbols of all libraries, which takes more than half a second beside torch.
#define FA_THROW(Kind, ...) throw tvm::ffi::Error(#Kind, Format(__VA_ARGS__), "")

// Throws an exception of type Kind unless the condition holds.  The message names the argument, its value and what is
// allowed.
#define FA_REQUIRE(condition, Kind, ...) \
  if (!(condition)) FA_THROW(Kind, __VA_ARGS__)

std::string Shape(const TensorView& tensor) {
  std::string text = "[";
  for (int i = 0; i < tensor.ndim(); ++i) text += (i ? ", " : "") + std::to_string(tensor.size(i));
  return text + "]";
}

void CheckTensor(const TensorView& tensor, const char* name, int ndim, const TensorView& q) {
  FA_REQUIRE(tensor.device().device_type == kDLCUDA, ValueError, "%s must be a CUDA tensor", name);
  FA_REQUIRE(tensor.device().device_id == q.device().device_id, ValueError, "%s is on cuda:%d, q on cuda:%d", name,
             tensor.device().device_id, q.device().device_id);
  FA_REQUIRE(tensor.ndim() == ndim, ValueError, "%s must have %d dimensions, got %s", name, ndim, Shape(tensor).c_str());
}

void CheckShape(const TensorView& tensor, const char* name, std::initializer_list<int64_t> expected) {
  int axis = 0;
  for (int64_t size : expected) {
    FA_REQUIRE(tensor.size(axis) == size, ValueError, "%s is %s: axis %d must be %lld", name, Shape(tensor).c_str(), axis,
               static_cast<long long>(size));
    ++axis;
  }
}

const char* const DTYPE_NAMES[] = {"fp16", "bf16", "fp32", "e4m3"};  // by FaDtype

int32_t Dtype(const TensorView& tensor, const char* name) {
  const DLDataType dtype = tensor.dtype();
  if (dtype.bits == 16 && dtype.code == kDLFloat) return FA_DTYPE_fp16;
  if (dtype.bits == 16 && dtype.code == kDLBfloat) return FA_DTYPE_bf16;
  if (dtype.bits == 32 && dtype.code == kDLFloat) return FA_DTYPE_fp32;
  if (dtype.bits == 8 && dtype.code == kDLFloat8_e4m3fn) return FA_DTYPE_e4m3;
  FA_THROW(TypeError, "%s must be fp16, bf16, fp32 or e4m3, got DLPack type code %d with %d bits", name, dtype.code, dtype.bits);
}

void CheckDtype(const TensorView& tensor, const char* name, int32_t dtype_of_q) {
  const int32_t dtype = Dtype(tensor, name);
  FA_REQUIRE(dtype == dtype_of_q, TypeError, "q is %s and %s is %s; q, k, v and out must have the same dtype",
             DTYPE_NAMES[dtype_of_q], name, DTYPE_NAMES[dtype]);
}

// Returns the FaDtype of out: that of q, or fp16 or bf16 if q is e4m3.
int32_t OutDtype(const TensorView& out, int32_t dtype_of_q) {
  if (dtype_of_q != FA_DTYPE_e4m3) {
    CheckDtype(out, "out", dtype_of_q);
    return dtype_of_q;
  }
  const int32_t dtype = Dtype(out, "out");
  FA_REQUIRE(dtype == FA_DTYPE_fp16 || dtype == FA_DTYPE_bf16, TypeError,
             "q is e4m3 and out is %s; it must be fp16 or bf16", DTYPE_NAMES[dtype]);
  return dtype;
}

// Returns the address of a descale, [batch, heads] float32.
const float* Descale(const Optional<TensorView>& descale, const char* name, int64_t batch, int64_t heads,
                     const TensorView& q) {
  FA_REQUIRE(descale.has_value(), ValueError, "q is e4m3, so %s is needed", name);
  CheckTensor(*descale, name, 2, q);
  CheckShape(*descale, name, {batch, heads});
  const DLDataType dtype = (*descale).dtype();
  FA_REQUIRE(dtype.code == kDLFloat && dtype.bits == 32, TypeError, "%s must be float32, got %d bits", name, dtype.bits);
  FA_REQUIRE((*descale).IsContiguous(), ValueError, "%s must be contiguous", name);
  return static_cast<const float*>((*descale).data_ptr());
}

FaStrides Strides(const TensorView& tensor) {
  return {tensor.stride(0), tensor.stride(1), tensor.stride(2), tensor.stride(3)};
}

// What the kernel computes into `out`: attention [batch, heads, seq_q, head_dim], or only scores [batch, heads, seq_q,
// seq_k].
enum class Computes { kAttention, kScores };

// Checks the tensors of a call and returns their sizes, strides and pointers.
FaForwardArgs MakeArgs(Computes computes, const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& out,
                       double scale, int64_t causal) {
  CheckTensor(q, "q", 4, q);
  CheckTensor(k, "k", 4, q);
  CheckTensor(v, "v", 4, q);
  CheckTensor(out, "out", 4, q);
  const int64_t batch = q.size(0), heads = q.size(1), seq_q = q.size(2), head_dim = q.size(3);
  const int64_t kv_heads = k.size(1), seq_k = k.size(2);
  CheckShape(k, "k", {batch, kv_heads, seq_k, head_dim});
  CheckShape(v, "v", {batch, kv_heads, seq_k, head_dim});
  CheckShape(out, "out", {batch, heads, seq_q, computes == Computes::kScores ? seq_k : head_dim});
  FA_REQUIRE(batch > 0 && heads > 0 && seq_q > 0 && head_dim > 0, ValueError, "q is %s: every axis must be at least 1",
             Shape(q).c_str());
  FA_REQUIRE(kv_heads > 0 && heads % kv_heads == 0, ValueError, "%lld heads cannot share %lld key/value heads evenly",
             static_cast<long long>(heads), static_cast<long long>(kv_heads));
  FA_REQUIRE(causal >= FA_CAUSAL_NONE && causal <= FA_CAUSAL_BOTTOM_RIGHT, ValueError,
             "causal is %lld, allowed are 0 (none), 1 (top left), 2 (bottom right)", static_cast<long long>(causal));
  const int32_t dtype = Dtype(q, "q");
  CheckDtype(k, "k", dtype);
  CheckDtype(v, "v", dtype);
  const int32_t out_dtype = OutDtype(out, dtype);

  FaForwardArgs args = {};
  args.abi_version = FA_ABI_VERSION;
  args.struct_size = sizeof(FaForwardArgs);
  args.q = q.data_ptr();
  args.k = k.data_ptr();
  args.v = v.data_ptr();
  args.out = out.data_ptr();
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
  return args;
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

template <Computes COMPUTES>
void Forward(TensorView q, TensorView k, TensorView v, TensorView out, Optional<TensorView> lse,
             Optional<TensorView> workspace, double scale, int64_t causal, Optional<TensorView> q_descale,
             Optional<TensorView> k_descale, Optional<TensorView> v_descale) {
  FaForwardArgs args = MakeArgs(COMPUTES, q, k, v, out, scale, causal);
  char message[512] = "";
  args.message = message;
  args.message_bytes = sizeof(message);
  if (lse.has_value()) {
    CheckTensor(*lse, "lse", 3, q);
    CheckShape(*lse, "lse", {args.batch, args.heads, args.seq_q});
    const DLDataType dtype = (*lse).dtype();
    FA_REQUIRE(dtype.code == kDLFloat && dtype.bits == 32, TypeError, "lse must be float32, got %d bits", dtype.bits);
    FA_REQUIRE((*lse).IsContiguous(), ValueError, "lse must be contiguous");
    args.lse = static_cast<float*>((*lse).data_ptr());
  }
  if (args.dtype == FA_DTYPE_e4m3) {
    args.q_descale = Descale(q_descale, "q_descale", args.batch, args.heads, q);
    args.k_descale = Descale(k_descale, "k_descale", args.batch, args.kv_heads, q);
    args.v_descale = Descale(v_descale, "v_descale", args.batch, args.kv_heads, q);
  }
  if (workspace.has_value()) {
    args.workspace = (*workspace).data_ptr();
    args.workspace_bytes = static_cast<uint64_t>((*workspace).numel()) * (*workspace).dtype().bits / 8;
  }
  const DLDevice device = q.device();
  DeviceGuard guard(device.device_id);
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));

  (void)cudaGetLastError();  // drop the error of an earlier launch
  const int status = fa_forward(&args, stream);

  if (status == FA_OK) return;
  FA_REQUIRE(status > 0, ValueError, "refused: %s", message[0] ? message : "(the kernel gave no reason)");
  const auto error = static_cast<cudaError_t>(status);
  FA_THROW(RuntimeError, "launch failed: %s: %s", cudaGetErrorName(error), cudaGetErrorString(error));
}

template <Computes COMPUTES>
int64_t WorkspaceBytes(TensorView q, TensorView k, TensorView v, TensorView out, double scale, int64_t causal) {
  const FaForwardArgs args = MakeArgs(COMPUTES, q, k, v, out, scale, causal);
  DeviceGuard guard(q.device().device_id);
  return fa_workspace_bytes == nullptr ? 0 : static_cast<int64_t>(fa_workspace_bytes(&args));
}

bool NeedsWorkspace() { return fa_workspace_bytes != nullptr; }

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(forward, Forward<Computes::kAttention>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(workspace_bytes, WorkspaceBytes<Computes::kAttention>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(scores, Forward<Computes::kScores>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(scores_workspace_bytes, WorkspaceBytes<Computes::kScores>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(needs_workspace, NeedsWorkspace);

// backward_binding.cpp: converts tensors to FaBackwardArgs and calls fa_backward.  It is compiled once per compiler and linked
// into every CUDA variant that computes gradients.
#include "binding.h"
#include "fa_backward.h"

extern "C" __attribute__((weak)) size_t fa_backward_workspace_bytes(const FaBackwardArgs* args);

namespace {

// The address of a gradient, which has the shape of another tensor and the dtype of q.
void* Gradient(const DLTensor& tensor, const char* name, const DLTensor& like, const DLTensor& q) {
  CheckTensor(tensor, name, 4, q);
  CheckShape(tensor, name, {like.shape[0], like.shape[1], like.shape[2], like.shape[3]});
  const int32_t dtype = Dtype(tensor, name), wanted = Dtype(q, "q");
  FA_REQUIRE(dtype == wanted, TypeError, "q is %s and %s is %s; gradients have the dtype of q", DTYPE_NAMES[wanted], name,
             DTYPE_NAMES[dtype]);
  return Data(tensor);
}

// Takes the gradient of the bias: a tensor that has one element along each axis along which the bias is the same.
void TakeBiasGradient(const DLTensor& tensor, const FaForwardArgs& forward, FaBackwardArgs& args, const DLTensor& q) {
  FA_REQUIRE(forward.features & FA_BIAS, ValueError, "dbias is passed, but no attn_bias; pass both, or leave out dbias");
  const FaStrides of = forward.bias_stride;
  const int64_t strides[] = {of.batch, of.head, of.seq, of.dim};
  const int64_t sizes[] = {forward.batch, forward.heads, forward.seq_q, forward.seq_k};
  CheckTensor(tensor, "dbias", 4, q);
  for (int axis = 0; axis < 4; ++axis) {
    const int64_t wanted = strides[axis] == 0 ? 1 : sizes[axis];
    FA_REQUIRE(tensor.shape[axis] == wanted, ValueError, "dbias is %s: axis %d must be %lld, as attn_bias has %s there",
               Shape(tensor).chars, axis, static_cast<long long>(wanted), strides[axis] == 0 ? "one element" : "all");
  }
  const int32_t dtype = Dtype(tensor, "dbias");
  FA_REQUIRE(dtype == forward.dtype, TypeError, "q is %s and dbias is %s; gradients have the dtype of q",
             DTYPE_NAMES[forward.dtype], DTYPE_NAMES[dtype]);
  args.dbias = Data(tensor);
  args.dbias_stride = PairStrides(tensor);
}

// The arguments of a call, whose structs have pointers to one another.
struct BackwardCall {
  Message message = {""};
  FaForwardArgs forward = {};
  FaBackwardArgs args = {};
  const DLTensor& q;
  bool has_workspace = false;

  explicit BackwardCall(Arguments& arguments);
  BackwardCall(const BackwardCall&) = delete;
};

BackwardCall::BackwardCall(Arguments& arguments) : q(arguments.Tensor("q")) {
  const DLTensor &k = arguments.Tensor("k"), &v = arguments.Tensor("v"), &out = arguments.Tensor("out");
  const DLTensor &lse = arguments.Tensor("lse"), &dout = arguments.Tensor("dout");
  const DLTensor* dlse = arguments.TensorOrNone("dlse");
  const DLTensor &dq = arguments.Tensor("dq"), &dk = arguments.Tensor("dk"), &dv = arguments.Tensor("dv");
  const DLTensor *dbias = arguments.TensorOrNone("dbias"), *dsink = arguments.TensorOrNone("dsink");
  const DLTensor* workspace = arguments.TensorOrNone("workspace");
  const double scale = arguments.Number("scale");
  forward = MakeArgs(Computes::kAttention, q, k, v, out, scale, arguments.Integer("causal"));
  FA_REQUIRE(forward.dtype != FA_DTYPE_e4m3, TypeError, "q is e4m3; gradients are of tensors in fp16, bf16 or fp32");
  forward.message = message.chars;
  forward.message_bytes = sizeof(message.chars);
  forward.lse = Floats(lse, "lse", {forward.batch, forward.heads, forward.seq_q}, q);
  has_workspace = workspace != nullptr;
  if (has_workspace) TakeWorkspace(*workspace, forward);
  args.struct_size = sizeof(args);
  args.forward = &forward;
  args.dout = Gradient(dout, "dout", out, q);
  if (dlse != nullptr) args.dlse = Floats(*dlse, "dlse", {forward.batch, forward.heads, forward.seq_q}, q);
  args.dq = Gradient(dq, "dq", q, q);
  args.dk = Gradient(dk, "dk", k, q);
  args.dv = Gradient(dv, "dv", v, q);
  args.dout_stride = Strides(dout);
  args.dq_stride = Strides(dq);
  args.dk_stride = Strides(dk);
  args.dv_stride = Strides(dv);
  ReadFeatures(arguments, forward, q, k, v);
  FA_REQUIRE(!(forward.features & (FA_BLOCK_TABLE | FA_CACHE_DTYPE | FA_APPEND)), ValueError,
             "a backward call has no cache: leave out block_table, k_scale, v_scale, k_new and v_new");
  if (dbias != nullptr) TakeBiasGradient(*dbias, forward, args, q);
  FA_REQUIRE(dsink == nullptr || forward.features & FA_SINK, ValueError,
             "dsink is passed, but no sink; pass both, or leave out dsink");
  if (dsink != nullptr) args.dsink = Floats(*dsink, "dsink", {forward.heads}, q);
  if (forward.features & FA_CU_SEQLENS_Q) args.dout_stride.batch = args.dq_stride.batch = 0;
  if (forward.features & FA_CU_SEQLENS_K) args.dk_stride.batch = args.dv_stride.batch = 0;
}

int64_t BytesNeeded(const BackwardCall& call) {
  return fa_backward_workspace_bytes == nullptr ? 0 : static_cast<int64_t>(fa_backward_workspace_bytes(&call.args));
}

// Launches the kernels and returns 0, or returns the bytes of the workspace that the call lacks, as `Forward` does.
int64_t Backward(Arguments arguments) {
  BackwardCall call(arguments);
  DeviceGuard guard(call.q.device.device_id);
  if (!call.has_workspace) {
    if (const int64_t bytes = BytesNeeded(call)) return bytes;
  }
  Launch(fa_backward, call.args, call.q, call.message);
  return 0;
}

int64_t BackwardWorkspaceBytes(Arguments arguments) {
  BackwardCall call(arguments);
  DeviceGuard guard(call.q.device.device_id);
  return BytesNeeded(call);
}

}  // namespace

FA_EXPORT_FFI(backward, 18, FA_RETURN(kTVMFFIInt, Backward(arguments)))
FA_EXPORT_FFI(backward_workspace_bytes, 18, FA_RETURN(kTVMFFIInt, BackwardWorkspaceBytes(arguments)))

// binding.cpp: converts tensors to FaForwardArgs and calls fa_forward.  It is compiled once per compiler and linked
// into every CUDA variant of a forward pass.
#include "binding.h"

extern "C" __attribute__((weak)) size_t fa_workspace_bytes(const FaForwardArgs* args);

namespace {

// Launches the kernel and returns 0.  A call without the workspace that the kernel needs launches nothing and returns its
// bytes: so a call that needs none is not asked twice.
template <Computes COMPUTES>
int64_t Forward(Arguments arguments) {
  const DLTensor &q = arguments.Tensor("q"), &k = arguments.Tensor("k"), &v = arguments.Tensor("v");
  const DLTensor& out = arguments.Tensor("out");
  const DLTensor *lse = arguments.TensorOrNone("lse"), *workspace = arguments.TensorOrNone("workspace");
  const double scale = arguments.Number("scale");
  FaForwardArgs args = MakeArgs(COMPUTES, q, k, v, out, scale, arguments.Integer("causal"));
  Message message = {""};
  args.message = message.chars;
  args.message_bytes = sizeof(message.chars);
  if (lse != nullptr) args.lse = Floats(*lse, "lse", {args.batch, args.heads, args.seq_q}, q);
  if (args.dtype == FA_DTYPE_e4m3) {
    args.q_descale = Descale(arguments.TensorOrNone("q_descale"), "q_descale", args.batch, args.heads, q);
    args.k_descale = Descale(arguments.TensorOrNone("k_descale"), "k_descale", args.batch, args.kv_heads, q);
    args.v_descale = Descale(arguments.TensorOrNone("v_descale"), "v_descale", args.batch, args.kv_heads, q);
  } else {
    arguments.Skip(DESCALES);
  }
  ReadFeatures(arguments, args, q, k, v);
  if (workspace != nullptr) TakeWorkspace(*workspace, args);
  DeviceGuard guard(q.device.device_id);
  if (workspace == nullptr && fa_workspace_bytes != nullptr) {
    if (const size_t bytes = fa_workspace_bytes(&args)) return static_cast<int64_t>(bytes);
  }
  Launch(fa_forward, args, q, message);
  return 0;
}

template <Computes COMPUTES>
int64_t WorkspaceBytes(Arguments arguments) {
  const DLTensor &q = arguments.Tensor("q"), &k = arguments.Tensor("k"), &v = arguments.Tensor("v");
  const DLTensor& out = arguments.Tensor("out");
  const double scale = arguments.Number("scale");
  FaForwardArgs args = MakeArgs(COMPUTES, q, k, v, out, scale, arguments.Integer("causal"));
  ReadFeatures(arguments, args, q, k, v);
  DeviceGuard guard(q.device.device_id);
  return fa_workspace_bytes == nullptr ? 0 : static_cast<int64_t>(fa_workspace_bytes(&args));
}

}  // namespace

FA_EXPORT_FFI(forward, 14, FA_RETURN(kTVMFFIInt, Forward<Computes::kAttention>(arguments)))
FA_EXPORT_FFI(workspace_bytes, 9, FA_RETURN(kTVMFFIInt, WorkspaceBytes<Computes::kAttention>(arguments)))
FA_EXPORT_FFI(scores, 14, FA_RETURN(kTVMFFIInt, Forward<Computes::kScores>(arguments)))
FA_EXPORT_FFI(scores_workspace_bytes, 9, FA_RETURN(kTVMFFIInt, WorkspaceBytes<Computes::kScores>(arguments)))

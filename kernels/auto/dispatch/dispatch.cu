// dispatch: hands each call to the rung that was chosen for its problem.  It has no kernel of its own.
//
// `auto` chooses in Python, once per problem, and tells the choice to fa_dispatch_choose.  Later calls of the same problem go
// to the rung's fa_forward without Python, so that they take as long as a call of the rung itself.
#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>

#include "fa/remembered.h"
#include "fa_forward.h"

namespace {

struct Rung {
  decltype(&fa_forward) forward;
  decltype(&fa_workspace_bytes) workspace_bytes;  // null if the rung needs no workspace
};

// What a choice depends on: sizes, mask, dtypes, strides, the alignment of the addresses, the GPU, and whether LSE is wanted.
using Problem = std::array<int64_t, 28>;

thread_local fa::Remembered<Problem, Rung> remembered;
thread_local Problem missed;
thread_local bool is_missed = false;  // whether the latest call had no choice: that of the problem `missed`

Problem problem_of(const FaForwardArgs* args) {
  int device = 0;
  (void)cudaGetDevice(&device);
  const auto address_bits = [](const void* address) { return reinterpret_cast<uintptr_t>(address) % 128; };
  const uintptr_t alignment = address_bits(args->q) | address_bits(args->k) | address_bits(args->v) | address_bits(args->out);
  const FaStrides &q = args->q_stride, &k = args->k_stride, &v = args->v_stride, &out = args->out_stride;
  return {args->batch, args->heads, args->kv_heads, args->seq_q, args->seq_k, args->head_dim, args->dtype, args->causal,
          q.batch,     q.head,      q.seq,          q.dim,       k.batch,     k.head,         k.seq,       k.dim,
          v.batch,     v.head,      v.seq,          v.dim,       out.batch,   out.head,       out.seq,     out.dim,
          device,      args->out_dtype, static_cast<int64_t>(alignment), args->lse != nullptr};
}

}  // namespace

// Remembers the rung for the problem of this thread's latest call, if that had none.
FA_EXPORT void fa_dispatch_choose(decltype(&fa_forward) forward, decltype(&fa_workspace_bytes) workspace_bytes) {
  if (is_missed) remembered.keep(missed, {forward, workspace_bytes});
  is_missed = false;
}

FA_EXPORT size_t fa_workspace_bytes(const FaForwardArgs* args) {
  const Rung* rung = remembered.find(problem_of(args));
  return rung == nullptr || rung->workspace_bytes == nullptr ? 0 : rung->workspace_bytes(args);
}

FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t stream) {
  is_missed = false;
  if (int status = fa_check_abi(args)) return status;
  const Problem problem = problem_of(args);
  const Rung* rung = remembered.find(problem);
  is_missed = rung == nullptr;
  if (!is_missed) return rung->forward(args, stream);
  missed = problem;
  return fa_refuse(args, "no rung is chosen for this problem yet");
}

// noop: the same launch, no work.
// step:    an empty kernel on the grid of a 64-row tile per block
// because: no kernel can be faster than its own launch: the floor row of every table
// expect:  0.5 to 0.7 us on the device; call_us is the cost of the binding and the launch alone
#include "fa_forward.h"

constexpr int BLOCK_M = 64;
constexpr int THREADS = 128;

__global__ void __launch_bounds__(THREADS) noop_kernel() {}

FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t stream) {
  if (int status = fa_check_abi(args)) return status;
  const int64_t tiles = args->batch * args->heads * ((args->seq_q + BLOCK_M - 1) / BLOCK_M);
  if (tiles > INT32_MAX) return fa_refuse(args, "%lld tiles are over the largest grid", static_cast<long long>(tiles));
  noop_kernel<<<static_cast<unsigned>(tiles), THREADS, 0, stream>>>();
  return static_cast<int>(cudaPeekAtLastError());
}

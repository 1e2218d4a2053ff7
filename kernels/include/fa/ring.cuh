// Buffers in shared memory that a producer fills by TMA, and that computing warpgroups read and release.  The mbarrier of a full
// buffer counts the bytes of TMA; that of an empty one counts the warps that have read it.
#pragma once

#include "fa/fragment.cuh"
#include "fa/hopper.cuh"
#include "fa/omit.cuh"

namespace fa {

// The position in a ring of STAGES buffers, and the parity of their mbarriers.  It goes on from one work tile to the next.
template <int STAGES>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
  __device__ __forceinline__ Ring next() const {
    Ring next = *this;
    next.advance();
    return next;
  }
};

// Loads rows of Q, K or V of one head, in boxes of BOX_COLUMNS columns.  Called by one thread.
template <int HEAD_DIM, int ROWS, typename T>
__device__ __forceinline__ void load_rows(
    T* to_smem, const CUtensorMap& map, int first_row, int head, int batch, uint64_t* full_smem) {
#pragma unroll
  for (int d = 0; d < HEAD_DIM; d += BOX_COLUMNS) {
    cp_async_bulk_tensor_4d(to_smem + d * ROWS, map, d, first_row, head, batch, full_smem);
  }
}

// Releases a buffer for this warp.  All its lanes have read it, because a wgmma of the whole warp has.
template <auto EMPTY>
__device__ __forceinline__ void release(uint64_t* empty_smem) {
  if (!IS_OMITTED_BARRIER<EMPTY> && threadIdx.x % WARP == 0) mbarrier_arrive(empty_smem);
}

// Where EMPTY is omitted, releases a buffer before it is read.  Without any release, the phases would no longer match.
template <auto EMPTY>
__device__ __forceinline__ void release_early_if_omitted(uint64_t* empty_smem) {
  if (IS_OMITTED_BARRIER<EMPTY> && threadIdx.x % WARP == 0) mbarrier_arrive(empty_smem);
}

}  // namespace fa

// The rows of a head in the tensors of a backward call, and how a gradient is stored there.
#pragma once

#include <stdint.h>

#include "fa/epilogue.cuh"
#include "fa_forward.h"

namespace fa {

// The rows of one head of a tensor.
template <typename T>
struct HeadRows {
  T* first;
  int64_t stride;

  __device__ __forceinline__ HeadRows(T* tensor, const FaStrides& stride, int64_t batch, int64_t head)
      : first(tensor + batch * stride.batch + head * stride.head), stride(stride.seq) {}
};

template <typename T>
__device__ __forceinline__ HeadRows<const T> rows_of(const void* tensor, const FaStrides& stride, int64_t batch, int64_t head) {
  return {static_cast<const T*>(tensor), stride, batch, head};
}

// Stores the lane's rows of a gradient, times a factor.
template <typename T, int D_TILES>
__device__ __forceinline__ void store_gradient(
    const HeadRows<T>& rows, float (&gradient)[D_TILES][4], float factor, int lane_row, int seq, int lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = lane_row + r * 8;
#pragma unroll
    for (int d = 0; d < D_TILES; ++d) gradient[d][2 * r] *= factor, gradient[d][2 * r + 1] *= factor;
    store_row<T>(reinterpret_cast<uint4*>(rows.first + row * rows.stride), gradient, r, lane, row < seq);
  }
}

}  // namespace fa

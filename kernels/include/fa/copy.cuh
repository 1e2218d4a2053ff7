// Copies of rows from global to shared memory by all threads of a block, or of a group.  Rows from seq on are filled with zeros.
#pragma once

#include <stdint.h>

#include "fa/ptx.cuh"
#include "fa/swizzle.cuh"
#include "fa/tile.cuh"

namespace fa {

// ELEMENTS adjacent elements of a row, loaded and stored with one instruction.
template <typename T, int ELEMENTS>
struct alignas(sizeof(T) * ELEMENTS) Vector {
  T data[ELEMENTS];
};

// Copies rows [first_row, first_row + ROWS) of a [seq, HEAD_DIM] tensor, ELEMENTS at a time.  A row in shared memory is followed
// by the elements up to PADDED_ROW.
template <int ROWS, int HEAD_DIM, int ELEMENTS, int THREADS, typename T, int PADDED_ROW>
__device__ void copy_rows(T (*to_smem)[PADDED_ROW], const T* from_gmem, int64_t row_stride, int first_row, int seq) {
  using Elements = Vector<T, ELEMENTS>;
  for (int i = threadIdx.x; i < ROWS * HEAD_DIM / ELEMENTS; i += THREADS) {
    const int row = i / (HEAD_DIM / ELEMENTS), column = i % (HEAD_DIM / ELEMENTS) * ELEMENTS;
    Elements elements = {};
    if (first_row + row < seq) elements = *reinterpret_cast<const Elements*>(from_gmem + (first_row + row) * row_stride + column);
    *reinterpret_cast<Elements*>(&to_smem[row][column]) = elements;
  }
}

// The same, 16 bytes at a time, with all loads in flight at once.
template <int ROWS, int HEAD_DIM, int THREADS, typename T, int PADDED_ROW>
__device__ void copy_rows(T (*to_smem)[PADDED_ROW], const T* from_gmem, int64_t row_stride, int first_row, int seq) {
#pragma unroll
  for (int i = 0; i < ROWS * HEAD_DIM / VECTOR; i += THREADS) {
    const int row = (i + threadIdx.x) / (HEAD_DIM / VECTOR), column = (i + threadIdx.x) % (HEAD_DIM / VECTOR) * VECTOR;
    if (ROWS * HEAD_DIM / VECTOR % THREADS != 0 && row >= ROWS) break;
    uint4 elements = {};
    if (first_row + row < seq) elements = *reinterpret_cast<const uint4*>(from_gmem + (first_row + row) * row_stride + column);
    *reinterpret_cast<uint4*>(&to_smem[row][column]) = elements;
  }
}

// The same with cp.async, into a swizzled tile.
template <int ROWS, int HEAD_DIM, int THREADS, typename T>
__device__ void copy_rows_async(T* to_smem, const T* from_gmem, int64_t row_stride, int first_row, int seq) {
#pragma unroll
  for (int i = 0; i < ROWS * HEAD_DIM / VECTOR; i += THREADS) {
    const int row = (i + threadIdx.x) / (HEAD_DIM / VECTOR), column = (i + threadIdx.x) % (HEAD_DIM / VECTOR) * VECTOR;
    if (ROWS * HEAD_DIM / VECTOR % THREADS != 0 && row >= ROWS) break;
    const T* elements_gmem = from_gmem + (first_row + row) * row_stride + column;
    cp_async_16_or_zero(to_smem + swizzle<HEAD_DIM>(row, column), elements_gmem, first_row + row < seq);
  }
}

// The same from rows of 16-byte vectors with a 32-bit stride.  THREADS threads copy together; `thread` is the index of this one.
template <int ROWS, int HEAD_DIM, int THREADS, typename T>
__device__ __forceinline__ void copy_rows_async(
    T* to_smem, const uint4* from_gmem, uint32_t row_stride, uint32_t first_row, uint32_t seq, uint32_t thread) {
  const uint32_t thread_row = thread / (HEAD_DIM / VECTOR), column = thread % (HEAD_DIM / VECTOR);
  from_gmem += uint64_t(first_row + thread_row) * row_stride + column;
#pragma unroll
  for (int i = 0; i < ROWS * HEAD_DIM / VECTOR; i += THREADS) {
    const uint32_t row = thread_row + i / (HEAD_DIM / VECTOR);
    if (ROWS * HEAD_DIM / VECTOR % THREADS != 0 && row >= ROWS) break;
    cp_async_16_or_zero(to_smem + swizzle<HEAD_DIM>(row, column * VECTOR), from_gmem, first_row + row < seq);
    from_gmem += uint64_t(THREADS / (HEAD_DIM / VECTOR)) * row_stride;
  }
}

}  // namespace fa

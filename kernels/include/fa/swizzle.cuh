// Where an element of a tile lies in shared memory, so that a column's neighbours share no banks.
#pragma once

namespace fa {

// Rows of 16-bit elements, 128 bytes or a multiple; the 16-byte pieces of each 128 trade places by the row's number, so
// that the pieces of eight rows that stand in one column, which ldmatrix reads at once, lie in all 32 banks.
template <int ROW_ELEMENTS>
__device__ __forceinline__ int swizzle(int row, int column) {
  static_assert(ROW_ELEMENTS % 64 == 0, "a row is whole times 128 bytes");
  return row * ROW_ELEMENTS + (column ^ row % 8 * 8);
}

}  // namespace fa

// The swizzled layout of tiles in shared memory, which avoids bank conflicts of ldmatrix.
#pragma once

namespace fa {

// Returns the index of element (row, column) in a swizzled tile of 16-bit elements.  Within each 128 bytes of a row, the index
// of a 16-byte chunk is XORed with row % 8.  The eight chunks of a column that ldmatrix reads at once then cover all 32 banks.
template <int ROW_ELEMENTS>
__device__ __forceinline__ int swizzle(int row, int column) {
  static_assert(ROW_ELEMENTS % 64 == 0, "a row must be a multiple of 128 bytes");
  return row * ROW_ELEMENTS + (column ^ row % 8 * 8);
}

}  // namespace fa

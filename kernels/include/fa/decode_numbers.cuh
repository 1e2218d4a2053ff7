// K and V of a decode kernel in e4m3: where they are, how they lie in shared memory, and the products with them.
#pragma once

#include "fa/decode_step.cuh"
#include "fa_forward.h"

namespace fa {

// K or V of a call: numbers in e4m3, and their scales.  `batch` is the stride of a page.
struct Numbers {
  const uint4* gmem;
  VectorStrides strides;  // of 16 numbers
  const float* scales;
  FaStrides scale_strides;
};

// The place of a chunk in the row of a key.  The swizzle of K serves 8-byte loads from four rows, that of V serves ldmatrix.
template <int CHUNKS, bool IS_V>
__device__ __forceinline__ int swizzled(int key, int chunk) {
  const int row_of_banks = key * CHUNKS / 8;  // 128 bytes each
  return IS_V ? chunk ^ row_of_banks % CHUNKS : chunk ^ row_of_banks % (CHUNKS / 2) * 2;
}

// Converts four numbers in e4m3 to two pairs of T.
template <typename T>
__device__ __forceinline__ uint2 convert(uint32_t four) {
  const uint2 pairs = e4m3_to_halves(four);
  if constexpr (std::is_same_v<T, __half>) return pairs;
  const float2 low = __half22float2(reinterpret_cast<const __half2&>(pairs.x));
  const float2 high = __half22float2(reinterpret_cast<const __half2&>(pairs.y));
  return {cvt_rn_x2<T>(low.x, low.y), cvt_rn_x2<T>(high.x, high.y)};
}

// S = Q K^T of one step: 8 bytes of a lane are its elements of two mma, as 16 bytes of Q are.  `scales` are those of K.
template <typename T, int HEAD_DIM, int ROW_TILES>
__device__ __forceinline__ void multiply_qk(Scores<ROW_TILES>& scores, const Queries<HEAD_DIM, ROW_TILES>& queries,
                                            const typename Queries<HEAD_DIM, ROW_TILES>::Smem& q_smem, const uint4* k_smem,
                                            const float2 (&scales)[KEY_TILES], const Thread& thread) {
  constexpr int CHUNKS = HEAD_DIM / 16, CHAINS = Scores<ROW_TILES>::CHAINS;
#pragma unroll
  for (int j = 0; j < HEAD_DIM / 8 / QUAD; ++j) {
#pragma unroll
    for (int n = 0; n < KEY_TILES; ++n) {
      const int key = n * MMA_N + thread.row, half = j * QUAD + thread.lane % QUAD;  // of a chunk
      const uint2 k = reinterpret_cast<const uint2*>(&k_smem[key * CHUNKS + swizzled<CHUNKS, false>(key, half / 2)])[half % 2];
      const uint2 k_even = convert<T>(k.x), k_odd = convert<T>(k.y);
#pragma unroll
      for (int t = 0; t < ROW_TILES; ++t) {
        uint4 q[LANE_ROWS];
#pragma unroll
        for (int r = 0; r < LANE_ROWS; ++r) q[r] = queries.chunk(q_smem, t, r, j, thread.lane);
        const uint32_t even[4] = {q[0].x, q[1].x, q[0].y, q[1].y}, odd[4] = {q[0].z, q[1].z, q[0].w, q[1].w};
        mma_m16n8k16<T>(scores.chain[0][t][n], even, k_even.x, k_even.y);
        mma_m16n8k16<T>(scores.chain[CHAINS - 1][t][n], odd, k_odd.x, k_odd.y);
      }
    }
  }
  scores.scale(scales);
}

// O += P V.  ldmatrix takes two adjacent columns for one element.  The even columns of a chunk of 16 form one tile of O, and the odd
// ones the next.
template <typename T, int ROW_TILES, int D_TILES>
__device__ __forceinline__ void add_pv(const RowState<ROW_TILES, D_TILES>& state, const uint32_t (&p)[ROW_TILES][4],
                                       const uint4* v_smem, int lane) {
  constexpr int CHUNKS = D_TILES / 2;
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; chunk += 2) {
    uint32_t v[4];
    ldmatrix_x4_trans(v, smem_address(&v_smem[lane % 16 * CHUNKS + swizzled<CHUNKS, true>(lane % 16, chunk + lane / 16)]));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // The bytes of the lower 8 keys and of the upper 8: two keys of the even column, then two of the odd one.
      const uint2 lower = convert<T>(__byte_perm(v[2 * i], 0, 0x3120)), upper = convert<T>(__byte_perm(v[2 * i + 1], 0, 0x3120));
#pragma unroll
      for (int t = 0; t < ROW_TILES; ++t) {
        mma_m16n8k16<T>(state.o[t][2 * (chunk + i)], p[t], lower.x, upper.x);
        mma_m16n8k16<T>(state.o[t][2 * (chunk + i) + 1], p[t], lower.y, upper.y);
      }
    }
  }
}

// Fills `numbers` with K or V of a call and returns FA_OK, or refuses the call.
inline int make_numbers(const FaForwardArgs* args, const void* data, const FaStrides& stride, const float* scales, const FaStrides& scale_stride,
                 Numbers* numbers) {
  if (stride.dim != 1 || (stride.batch | stride.head | stride.seq) % 16 != 0 || reinterpret_cast<uintptr_t>(data) % 16 != 0) {
    return fa_refuse(args, "rows of k and v must be contiguous and start at multiples of 16 bytes");
  }
  const auto vectors = [](int64_t elements) { return static_cast<uint32_t>(elements / 16); };
  *numbers = {static_cast<const uint4*>(data), {vectors(stride.seq), vectors(stride.head), vectors(stride.batch)}, scales, scale_stride};
  return FA_OK;
}

}  // namespace fa

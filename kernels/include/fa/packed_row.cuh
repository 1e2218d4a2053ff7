// Partial rows that are sent to the other block of a cluster, packed to 24 bits per element.
#pragma once

#include <stdint.h>

#include "fa/partial_row.cuh"
#include "fa/ptx.cuh"

namespace fa {

// A PartialRow in the format in which it is sent to the other block.  The transfer is bound by its bytes, so O is cut to 24 bits.
// The relative error is then below 2^-15, which is small next to the 2^-11 of the output in fp16.
template <int D_TILES>
struct PackedPartialRow {
  static constexpr int VECTORS = D_TILES * 2 * 3 / 16;  // two values per fragment, 3 bytes each
  uint4 o[VECTORS][WARPGROUP_THREADS];
  float2 m_and_l[WARPGROUP_THREADS];
};

// Packs the upper 24 bits of four floats into three words.  Word i holds the upper three bytes of float i, and below them one of
// the upper three bytes of the fourth float.
__device__ __forceinline__ void pack_24(uint32_t* words, float4 values) {
  const uint32_t fourth = __float_as_uint(values.w);
  words[0] = __byte_perm(__float_as_uint(values.x), fourth, 0x3215);
  words[1] = __byte_perm(__float_as_uint(values.y), fourth, 0x3216);
  words[2] = __byte_perm(__float_as_uint(values.z), fourth, 0x3217);
}

__device__ __forceinline__ float4 unpack_24(const uint32_t* words) {
  constexpr uint32_t UPPER = ~0xffu;
  const uint32_t fourth = __byte_perm(__byte_perm(words[0], words[1], 0x0040), words[2], 0x4100);
  return make_float4(__uint_as_float(words[0] & UPPER), __uint_as_float(words[1] & UPPER), __uint_as_float(words[2] & UPPER),
                     __uint_as_float(fourth & UPPER));
}

// Sends a row of a lane's O, packed, to the other block, whose mbarrier counts the bytes.  `peer_address` is a function from an
// address in the shared memory of this block to the corresponding address in the other block.
template <int D_TILES, typename PEER_ADDRESS>
__device__ __forceinline__ void send_row(const float (&o)[D_TILES][4], int row, PackedPartialRow<D_TILES>& partial_smem,
                                         uint64_t* barrier_smem, PEER_ADDRESS peer_address) {
  constexpr int VECTORS = PackedPartialRow<D_TILES>::VECTORS;
  uint32_t words[VECTORS * 4];
#pragma unroll
  for (int d = 0; d < D_TILES; d += 2) pack_24(words + d / 2 * 3, o_vector(o, row, d));
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const uint4 vector = make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
    st_async(peer_address(&partial_smem.o[i][threadIdx.x % WARPGROUP_THREADS]), vector, peer_address(barrier_smem));
  }
}

// Merges an incoming packed row into a lane's row of O.
template <int D_TILES>
__device__ __forceinline__ void merge_row(
    float (&o)[D_TILES][4], int row, float weight, const PackedPartialRow<D_TILES>& incoming, float incoming_weight) {
  constexpr int VECTORS = PackedPartialRow<D_TILES>::VECTORS;
  uint32_t words[VECTORS * 4];
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const uint4 vector = incoming.o[i][threadIdx.x % WARPGROUP_THREADS];
    words[4 * i] = vector.x, words[4 * i + 1] = vector.y, words[4 * i + 2] = vector.z, words[4 * i + 3] = vector.w;
  }
#pragma unroll
  for (int d = 0; d < D_TILES; d += 2) merge_vector(o, row, d, weight, unpack_24(words + d / 2 * 3), incoming_weight);
}

}  // namespace fa

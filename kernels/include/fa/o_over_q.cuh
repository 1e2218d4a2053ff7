// The shared memory of a block of long kernels whose O may be written over Q, because there is no room for both.
#pragma once

#include <type_traits>

#include "fa/producer.cuh"

namespace fa {

template <typename T, typename SHAPE, int STAGES>
struct SmemWithoutO {
  alignas(1024) T q[SHAPE::GROUPS][GROUP_M * SHAPE::BOXED_DIM];
  alignas(1024) T k[STAGES][SHAPE::BLOCK_N * SHAPE::BOXED_DIM];
  alignas(1024) T v[STAGES][SHAPE::BLOCK_N * SHAPE::BOXED_DIM_V];
  uint64_t q_full, q_empty, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};

template <typename T, typename SHAPE, int STAGES>
using TileSmem = std::conditional_t<SHAPE::O_OVER_Q, SmemWithoutO<T, SHAPE, STAGES>, RingSmem<T, SHAPE, STAGES>>;

// Where a warpgroup writes O.
template <typename SHAPE, typename SMEM>
__device__ __forceinline__ auto* o_smem(SMEM& smem, int group) {
  if constexpr (SHAPE::O_OVER_Q) {
    return smem.q[group];
  } else {
    return smem.o[group];
  }
}

}  // namespace fa

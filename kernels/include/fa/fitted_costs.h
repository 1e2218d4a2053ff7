// The times by which long_fitted and later rungs choose a shape, and list work tiles.
#pragma once

#include "fa/shape.cuh"
#include "fa/shape_choice.h"

namespace fa {

// As Costs.  Except at D = 64, the rates are those of key tiles alone, and starting and finishing a work tile is counted by shape.
// - At D = 128, they are fitted to 19 problems of 512 to 16384 keys, with and without a causal mask, on three cards.
// - At D = 96, the rates are fitted to four problems of 1024 to 8192 keys without a mask, on one card.  Those at D = 80 and 112
//   follow from them by times of long_heads at 4096 keys.
template <typename SHAPE>
struct FittedCosts {
  static constexpr int HEAD_DIM = SHAPE::HEAD_DIM, GROUPS = SHAPE::GROUPS;
  static_assert(HEAD_DIM == 80 || HEAD_DIM == 96 || HEAD_DIM == 112 || HEAD_DIM == 128, "no other rates are known");
  static constexpr double OF_96 = GROUPS == 1 ? 440 : GROUPS == 2 ? 635 : 690;
  static constexpr double STEADY_TFLOPS = HEAD_DIM == 128   ? (GROUPS == 1 ? 640 : GROUPS == 2 ? 720 : 795)
                                          : HEAD_DIM == 112 ? 1.09 * OF_96
                                          : HEAD_DIM == 96  ? OF_96
                                                            : 0.91 * OF_96;
  static constexpr double KEY_TILE_US = Costs<SHAPE>::KEY_TILE_US * Costs<SHAPE>::STEADY_TFLOPS / STEADY_TFLOPS;
  static constexpr double WORK_TILE_US = GROUPS == 1 ? 1.75 : GROUPS == 2 ? 3.0 : 3.5;
};

template <int GROUPS, int BLOCK_N, int BLOCKS>
struct FittedCosts<Shape<64, GROUPS, BLOCK_N, BLOCKS>> : Costs<Shape<64, GROUPS, BLOCK_N, BLOCKS>> {};

// Costs under a causal mask.  A work tile counts with the key tiles of the warpgroup that sees most, because the others wait for
// it.  Fitted to problems of 512 to 8192 keys on one card; at D = 128, only WORK_TILE_US, which D = 80 to 112 have, too.
template <typename SHAPE>
struct CausalCosts {
  static constexpr int GROUPS = SHAPE::GROUPS;
  static constexpr double STEADY_TFLOPS = SHAPE::HEAD_DIM == 64 ? (GROUPS == 1   ? 584
                                                                   : GROUPS == 2 ? 531
                                                                   : GROUPS == 3 ? 638
                                                                                 : 649)
                                                                : FittedCosts<SHAPE>::STEADY_TFLOPS;
  static constexpr double KEY_TILE_US = Costs<SHAPE>::KEY_TILE_US * Costs<SHAPE>::STEADY_TFLOPS / STEADY_TFLOPS;
  static constexpr double WORK_TILE_US = SHAPE::HEAD_DIM == 64 ? (GROUPS == 1 ? 1.5 : 1.7) : GROUPS == 1 ? 1.75 : 2.0;
};

}  // namespace fa

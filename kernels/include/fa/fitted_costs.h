// The times by which long_fitted and later rungs choose a shape, and list work tiles.
#pragma once

#include "fa/shape.cuh"
#include "fa/shape_choice.h"

namespace fa {

// As Costs.  At D = 128, the rates are those of key tiles alone, and starting and finishing a work tile is counted by shape.  Fitted
// to 19 problems of 512 to 16384 keys, with and without a causal mask, on three cards.
template <typename SHAPE>
struct FittedCosts : Costs<SHAPE> {};

template <int GROUPS, int BLOCK_N, int BLOCKS>
struct FittedCosts<Shape<128, GROUPS, BLOCK_N, BLOCKS>> {
  using SHAPE = Shape<128, GROUPS, BLOCK_N, BLOCKS>;
  static constexpr double STEADY_TFLOPS = GROUPS == 1 ? 640 : GROUPS == 2 ? 720 : 795;
  static constexpr double KEY_TILE_US = Costs<SHAPE>::KEY_TILE_US * Costs<SHAPE>::STEADY_TFLOPS / STEADY_TFLOPS;
  static constexpr double WORK_TILE_US = GROUPS == 1 ? 1.75 : GROUPS == 2 ? 3.0 : 3.5;
};

// Costs under a causal mask.  A work tile counts with the key tiles of the warpgroup that sees most, because the others wait for
// it.  Fitted to problems of 512 to 8192 keys on one card; at D = 128, only WORK_TILE_US.
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

// The choice between shapes of work tiles: the one for which the SM with the most work finishes first.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>

#include "fa/launch.h"
#include "fa/remembered.h"
#include "fa/schedule.cuh"

namespace fa {

// The times of a shape on an H200 while all SMs work, in microseconds.  They are used to compare shapes.
template <typename SHAPE>
struct Costs {
  // The TFLOP/s, measured at 4096 to 16384 keys.  Taller tiles read K and V from shared memory less often.
  static constexpr double STEADY_TFLOPS =
      SHAPE::HEAD_DIM == 64 ? (SHAPE::GROUPS == 1 ? 450 : SHAPE::GROUPS == 2 ? 508 : SHAPE::GROUPS == 3 ? 575 : 540)
                            : (SHAPE::GROUPS == 1 ? 560 : SHAPE::GROUPS == 2 ? 661 : 765);
  static constexpr int H200_SMS = 132;
  static constexpr double KEY_TILE_US = 4.0 * SHAPE::BLOCK_M * SHAPE::BLOCK_N * SHAPE::HEAD_DIM * H200_SMS / STEADY_TFLOPS * 1e-6;
  static constexpr double WORK_TILE_US = 1.5;  // to start and to finish a work tile

  // With a window to the left, a work tile has few key tiles, of which the warpgroups of a block skip different ones.  Fitted to the
  // windows of 128 and 1024 keys at b1h64s4096-bf16-kv8.
  static constexpr double WINDOW_TFLOPS =
      SHAPE::HEAD_DIM == 64 ? (SHAPE::BLOCKS_PER_SM == 3 ? 475
                               : SHAPE::GROUPS == 1      ? 521
                               : SHAPE::GROUPS == 2      ? 509
                               : SHAPE::GROUPS == 3      ? 471
                                                         : 561)
                            : (SHAPE::GROUPS == 1 ? 590 : SHAPE::GROUPS == 2 ? 730 : 660);
  static double key_tile_us(bool has_window) { return has_window ? KEY_TILE_US * STEADY_TFLOPS / WINDOW_TFLOPS : KEY_TILE_US; }
  static double work_tile_us(bool has_window) {
    return has_window ? (1.3 + 0.6 * SHAPE::GROUPS) / SHAPE::BLOCKS_PER_SM : WORK_TILE_US;
  }
};

// Whether a call has so many work tiles that all SMs have nearly the same amount of work.
template <typename SHAPE, typename PARAMS>
bool has_many_rounds(const PARAMS& params) {
  constexpr int EXACT_ROUNDS = 16;
  return params.work_tiles > EXACT_ROUNDS * std::min(params.work_tiles, max_blocks<SHAPE>());
}

// Returns the time of the SM with the most work, up to a factor that is the same for all shapes.  The first `tiles` work tiles are
// dealt to the blocks; us_of(number) is the time of one.
template <typename SHAPE, typename PARAMS, typename UsOf>
double busiest_sm_us(const PARAMS& params, int tiles, UsOf us_of) {
  const int blocks = std::min(params.work_tiles, max_blocks<SHAPE>()), sms = std::max(1, sm_count());
  if (has_many_rounds<SHAPE>(params)) {
    double us = 0.0;
    const int heads = std::min(params.section_heads, params.batch_heads);
    for (int m_block = 0; m_block < params.m_blocks; ++m_block) us += us_of(m_block * heads);
    return us * params.batch_heads / sms;
  }
  double max_us = 0.0;
  for (int sm = 0; sm < sms; ++sm) {
    double us = 0.0;
    for (int block = sm; block < blocks; block += sms) {
      for (int round = 0, number; (number = dealt_number(round, block, blocks)) < tiles; ++round) us += us_of(number);
    }
    max_us = std::max(max_us, us);
  }
  return max_us;
}

// Returns the index of the least of the estimated times.  Choices are remembered: one takes longer than a launch.  A call that
// every shape refuses, for example for its pointers, has none.
inline int fastest_shape(const FaForwardArgs* args, std::initializer_list<double (*)(const FaForwardArgs*)> estimates) {
  using Problem = std::array<int64_t, 11>;
  thread_local Remembered<Problem, int> remembered;
  const FaForwardArgs all = fa_copy_args(args);
  const Problem problem = {all.head_dim, all.batch,  all.heads,    all.kv_heads,    all.seq_q,       all.seq_k,
                           all.causal,   sm_count(), all.features, all.window_left, all.window_right};
  if (const int* known = remembered.find(problem)) return *known;
  double least_us = INFINITY;
  int fastest = 0, index = 0;
  for (auto estimated_us : estimates) {
    const double us = estimated_us(args);
    if (us < least_us) least_us = us, fastest = index;
    ++index;
  }
  if (least_us < INFINITY) remembered.keep(problem, fastest);
  return fastest;
}

}  // namespace fa

// List scheduling: the host assigns each work tile to the block that has the least work so far.
#pragma once

#include <stdint.h>

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <queue>
#include <utility>
#include <vector>

#include "fa/launch.h"
#include "fa/remembered.h"
#include "fa/schedule.cuh"
#include "fa/shape_choice.h"
#include "fa/tile_params.cuh"

namespace fa {

// The numbers of the work tiles of each block.  It is a kernel parameter.
struct ListedTiles {
  // With more work tiles, each of 132 blocks has over twelve, and differences in length even out.
  static constexpr int MAX_BLOCKS = 132, MAX_TILES = 1600;
  uint16_t first[MAX_BLOCKS + 1];  // where in `numbers` those of a block begin; they end where those of the next one begin
  uint16_t numbers[MAX_TILES];

  // Returns the number of the work tile of a round, or a larger one than any if there is none.
  __device__ __forceinline__ int number(int round) const {
    const int place = first[blockIdx.x] + round;
    return place < first[blockIdx.x + 1] ? numbers[place] : INT32_MAX;
  }
  // Returns the key tiles of a work tile that this block computes.
  __device__ __forceinline__ KeyTiles key_tiles(const WorkTile& work, int) const { return {0, work.key_tiles}; }
};

// Lists the work tiles [0, tiles) for blocks, in the order of their numbers.  us_of(number) is the time of one.  Returns the time of
// the block with the most work.
template <typename UsOf>
double list_tiles(int tiles, int blocks, UsOf us_of, ListedTiles* listed) {
  using Load = std::pair<double, int>;  // the time of a block's work so far, and the block
  std::priority_queue<Load, std::vector<Load>, std::greater<Load>> loads;
  for (int block = 0; block < blocks; ++block) loads.push({0.0, block});
  std::vector<std::vector<uint16_t>> numbers(blocks);
  double max_us = 0.0;
  for (int number = 0; number < tiles; ++number) {
    const auto [us, block] = loads.top();
    const double end_us = us + us_of(number);
    loads.pop();
    loads.push({end_us, block});
    numbers[block].push_back(static_cast<uint16_t>(number));
    max_us = std::max(max_us, end_us);
  }
  *listed = {};
  int place = 0;
  for (int block = 0; block < blocks; ++block) {
    for (uint16_t number : numbers[block]) listed->numbers[place++] = number;
    listed->first[block + 1] = static_cast<uint16_t>(place);
  }
  return max_us;
}

// How the blocks get the work tiles of a call: by a list, or dealt if there is none.
struct TilePlan {
  double us;  // of the SM with the most work
  std::shared_ptr<const ListedTiles> listed;
};

// Plans the work tiles of a call.  A list is made where a causal mask makes them differ in length, and kept where it takes less time
// than dealing.  With has_many_rounds, the time of dealing is a mean, and no list is kept.
template <typename SHAPE, typename UsOf>
TilePlan make_plan(const TileParams& params, UsOf us_of) {
  const int blocks = max_blocks<SHAPE>();
  const TilePlan dealt = {busiest_sm_us<SHAPE>(params, params.work_tiles, us_of), nullptr};
  const bool lengths_differ = params.m_blocks > 1 && params.first_diagonal < params.seq_k;
  const bool fits_list = blocks <= ListedTiles::MAX_BLOCKS && params.work_tiles <= ListedTiles::MAX_TILES;
  if (SHAPE::BLOCKS_PER_SM > 1 || !lengths_differ || !fits_list || params.work_tiles <= blocks) return dealt;
  auto listed = std::make_shared<ListedTiles>();
  const double us = list_tiles(params.work_tiles, blocks, us_of, listed.get());
  return us < dealt.us ? TilePlan{us, listed} : dealt;
}

// The plan of a call.  It is remembered, because making one takes longer than a launch.
template <typename SHAPE, typename UsOf>
TilePlan remembered_plan(const TileParams& params, UsOf us_of) {
  using Problem = std::array<int, 7>;
  thread_local Remembered<Problem, TilePlan> remembered;
  const Problem problem = {params.m_blocks, params.batch_heads,    params.section_heads, params.seq_q,
                           params.seq_k,    params.first_diagonal, max_blocks<SHAPE>()};
  if (const TilePlan* known = remembered.find(problem)) return *known;
  const TilePlan plan = make_plan<SHAPE>(params, us_of);
  remembered.keep(problem, plan);
  return plan;
}

}  // namespace fa

// List scheduling: the host assigns each work tile to the block that has the least work so far.
#pragma once

#include <stdint.h>

#include <algorithm>
#include <array>
#include <memory>
#include <queue>
#include <utility>
#include <vector>

#include "fa/remembered.h"
#include "fa/schedule.cuh"
#include "fa/tile_params.cuh"

namespace fa {

// The numbers of the work tiles of each block.  It is a kernel parameter, of which there may be 4 KB.
struct ListedTiles {
  static constexpr int MOST_BLOCKS = 132, MOST_TILES = 1600;
  uint16_t first[MOST_BLOCKS + 1];  // where in `numbers` those of a block begin; they end where those of the next one begin
  uint16_t numbers[MOST_TILES];

  // Returns the number of the work tile of a round, or a larger one than any if there is none.
  __device__ __forceinline__ int number(int round) const {
    const int place = first[blockIdx.x] + round;
    return place < first[blockIdx.x + 1] ? numbers[place] : INT32_MAX;
  }
  // Returns the key tiles of a work tile that this block computes.
  __device__ __forceinline__ KeyTiles key_tiles(const WorkTile& work, int) const { return {0, work.key_tiles}; }
};

// Whether the work tiles of a call differ in length, so that a list gains time, and fit in one.
template <typename SHAPE>
bool has_list(const FaForwardArgs* args, const TileParams& params) {
  const int blocks = max_blocks<SHAPE>();
  return SHAPE::BLOCKS_PER_SM == 1 && args->causal != FA_CAUSAL_NONE && blocks <= ListedTiles::MOST_BLOCKS &&
         params.work_tiles > blocks && params.work_tiles <= ListedTiles::MOST_TILES;
}

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
    loads.pop();
    numbers[block].push_back(static_cast<uint16_t>(number));
    max_us = std::max(max_us, us + us_of(number));
    loads.push({us + us_of(number), block});
  }
  *listed = {};
  int place = 0;
  for (int block = 0; block < blocks; ++block) {
    for (uint16_t number : numbers[block]) listed->numbers[place++] = number;
    listed->first[block + 1] = static_cast<uint16_t>(place);
  }
  return max_us;
}

// The list of a call.  It is remembered, because making one takes up to 100 us.
template <typename SHAPE, typename UsOf>
const ListedTiles& remembered_list(const TileParams& params, UsOf us_of) {
  using Problem = std::array<int, 7>;
  thread_local Remembered<Problem, std::shared_ptr<const ListedTiles>> remembered;
  const Problem problem = {params.m_blocks, params.batch_heads,   params.section_heads, params.seq_q,
                           params.seq_k,    params.first_diagonal, max_blocks<SHAPE>()};
  if (const auto* known = remembered.find(problem)) return **known;
  auto listed = std::make_shared<ListedTiles>();
  list_tiles(params.work_tiles, max_blocks<SHAPE>(), us_of, listed.get());
  remembered.keep(problem, listed);
  return *listed;
}

}  // namespace fa

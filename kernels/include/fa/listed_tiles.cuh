// List scheduling: the host assigns each work tile to the block that has the least work so far, and then evens the lists out.
#pragma once

#include <stdint.h>

#include <algorithm>
#include <array>
#include <memory>
#include <queue>
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

struct TimedTile {
  uint16_t number;
  double us;  // the time that it is expected to take
};

// The work tiles in the order in which they start: by section, so that K and V of few heads are in L2 at a time, and the longest
// first, so that short ones are left for the end.  us_of(number) is the time of one.
template <typename UsOf>
std::vector<TimedTile> in_starting_order(const TileParams& params, UsOf us_of) {
  std::vector<TimedTile> tiles;
  for (int number = 0; number < params.work_tiles; ++number) tiles.push_back({static_cast<uint16_t>(number), us_of(number)});
  const int section_tiles = params.section_heads * params.m_blocks;
  std::stable_sort(tiles.begin(), tiles.end(), [&](const TimedTile& one, const TimedTile& other) {
    const int section = one.number / section_tiles, other_section = other.number / section_tiles;
    return section != other_section ? section < other_section : one.us > other.us;
  });
  return tiles;
}

// The work tiles of a block, by their places in the order in which all start.
struct BlockList {
  std::vector<int> starts;
  double us = 0.0;  // of all of them
};

// None, one or two work tiles of a block.
struct MovedTiles {
  double us;      // of both
  int starts[2];  // -1: no work tile
};

// What a block may give to another one, of its work tiles from first_moved on.
inline std::vector<MovedTiles> what_moves(const std::vector<TimedTile>& tiles, const BlockList& list, int first_moved) {
  std::vector<MovedTiles> choices = {{0.0, {-1, -1}}};
  for (int one : list.starts) {
    if (one < first_moved) continue;
    choices.push_back({tiles[one].us, {one, -1}});
    for (int other : list.starts) {
      if (other > one) choices.push_back({tiles[one].us + tiles[other].us, {one, other}});
    }
  }
  return choices;
}

inline void give(const MovedTiles& given, BlockList& from, BlockList& to) {
  for (int start : given.starts) {
    if (start < 0) continue;
    from.starts.erase(std::find(from.starts.begin(), from.starts.end(), start));
    to.starts.push_back(start);
  }
  from.us -= given.us, to.us += given.us;
}

// Evens out the lists: while that shortens the longest one, its block exchanges up to two work tiles for up to two of another
// block.  Only work tiles that start last move, three times as many as blocks.  Any other one would start at another time than those
// of the same head, and would find less of its K and V in L2.
inline void even_out(const std::vector<TimedTile>& tiles, std::vector<BlockList>& lists) {
  constexpr int MAX_EXCHANGES = 256, MOVED_PER_BLOCK = 3;
  constexpr double MIN_GAIN_US = 1e-3;
  const int first_moved = static_cast<int>(tiles.size()) - MOVED_PER_BLOCK * static_cast<int>(lists.size());
  std::vector<BlockList*> shortest_first;
  for (BlockList& list : lists) shortest_first.push_back(&list);
  for (int exchange = 0; exchange < MAX_EXCHANGES; ++exchange) {
    std::sort(shortest_first.begin(), shortest_first.end(), [](auto* one, auto* other) { return one->us < other->us; });
    BlockList *longest = shortest_first.back(), *partner = nullptr;
    const std::vector<MovedTiles> own = what_moves(tiles, *longest, first_moved);
    double min_us = longest->us - MIN_GAIN_US;
    MovedTiles given = {}, taken = {};
    for (BlockList* list : shortest_first) {
      if (partner != nullptr || list == longest) break;
      for (const MovedTiles& theirs : what_moves(tiles, *list, first_moved)) {
        for (const MovedTiles& ours : own) {
          const double longer_us = std::max(longest->us - ours.us + theirs.us, list->us + ours.us - theirs.us);
          if (longer_us < min_us) min_us = longer_us, partner = list, given = ours, taken = theirs;
        }
      }
    }
    if (partner == nullptr) break;
    give(given, *longest, *partner);
    give(taken, *partner, *longest);
  }
  for (BlockList& list : lists) std::sort(list.starts.begin(), list.starts.end());
}

// Lists the work tiles of a call for blocks.  Returns the time of the block with the most work.
template <typename UsOf>
double list_tiles(const TileParams& params, int blocks, UsOf us_of, ListedTiles* listed) {
  const std::vector<TimedTile> tiles = in_starting_order(params, us_of);
  std::vector<BlockList> lists(blocks);
  const auto has_more = [&](int one, int other) {
    return lists[one].us != lists[other].us ? lists[one].us > lists[other].us : one > other;
  };
  std::priority_queue<int, std::vector<int>, decltype(has_more)> by_load(has_more);
  for (int block = 0; block < blocks; ++block) by_load.push(block);
  for (int start = 0; start < params.work_tiles; ++start) {
    const int block = by_load.top();
    by_load.pop();
    lists[block].starts.push_back(start), lists[block].us += tiles[start].us;
    by_load.push(block);
  }
  even_out(tiles, lists);
  *listed = {};
  int place = 0;
  double max_us = 0.0;
  for (int block = 0; block < blocks; ++block) {
    for (int start : lists[block].starts) listed->numbers[place++] = tiles[start].number;
    listed->first[block + 1] = static_cast<uint16_t>(place);
    max_us = std::max(max_us, lists[block].us);
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
  const double us = list_tiles(params, blocks, us_of, listed.get());
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

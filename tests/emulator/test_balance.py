"""The work tiles of a masked call, as they are dealt to the blocks or listed for them, compiled for the CPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pytest_fa.build.command import INCLUDE
from pytest_fa.build.toolchain import find_toolchain

KERNELS = Path(__file__).parents[2] / "kernels"
# Prints how many key tiles the block with the most work has, in percent of the mean of 132 blocks.
PROGRAM = r"""
#include <cstdio>

#include "fa/sections.h"

const uint3 blockIdx = {};  // not used
const dim3 gridDim = {};
#include "fa/schedule.cuh"

struct Shape {
  static constexpr int BLOCK_M = 192, BLOCK_N = 80;
};
struct Params {
  int section_heads, m_blocks, batch_heads, seq_q, seq_k, first_diagonal;
};

int main(int, char** words) {
  const bool is_causal = words[1][0] == 'c';
  FaForwardArgs args = {};
  args.struct_size = sizeof(args);
  args.batch = 4, args.heads = 32, args.kv_heads = 8, args.seq_q = args.seq_k = 4096, args.head_dim = 128;
  args.causal = is_causal ? FA_CAUSAL_BOTTOM_RIGHT : FA_CAUSAL_NONE;
  args.features = is_causal ? 0 : FA_WINDOW_RIGHT;
  const Params params = {fa::section_heads_of(&args, 2), (4096 + 191) / 192, 4 * 32, 4096, 4096, 1};
  const int blocks = 132, work_tiles = params.m_blocks * params.batch_heads;
  int most = 0, all = 0;
  for (int block = 0; block < blocks; ++block) {
    int own = 0;
    for (int round = 0, number; (number = fa::dealt_number(round, block, blocks)) < work_tiles; ++round) {
      own += fa::make_work_tile<Shape>(params, number).key_tiles;
    }
    most = own > most ? own : most, all += own;
  }
  std::printf("%d\n", most * 100 / (all / blocks));
}
"""
# What the next programs begin with.
BEGINNING = r"""
#include <cstdio>

#include <cuda_runtime.h>

const uint3 blockIdx = {};  // not used, as the next two
const dim3 gridDim = {};
unsigned int __umulhi(unsigned int, unsigned int) { return 0; }
#include "fa/fitted_costs.h"
#include "fa/listed_tiles.cuh"
#include "fa/tiles_from_end.cuh"

// The parameters of a causal call, as the launchers make them.
template <typename SHAPE, typename PARAMS>
PARAMS causal_params(int batch, int heads, int seq) {
  FaForwardArgs args = {};
  args.abi_version = FA_ABI_VERSION, args.struct_size = sizeof(args), args.scale = 1.0f;
  args.q = args.k = args.v = args.out = reinterpret_cast<void*>(16);
  args.q_stride = args.k_stride = args.v_stride = args.out_stride = {1 << 24, 1 << 20, 128, 1};
  args.batch = batch, args.heads = args.kv_heads = heads, args.seq_q = args.seq_k = seq;
  args.head_dim = SHAPE::HEAD_DIM, args.causal = FA_CAUSAL_TOP_LEFT;
  PARAMS params = {};
  if (fa::make_tile_params<SHAPE>(&args, &params) != FA_OK) std::puts("refused");
  return params;
}
"""
# Prints how many key tiles the block with the most work has, in percent of the mean, in the lists of b4h16s2048 with a
# causal mask; how many work tiles are in no list or in several; whether the expected time is right; and how many work
# tiles start after a shorter one of their section, or after one of a later section.
LISTS = (
    BEGINNING
    + r"""
using Shape = fa::Shape<128, 3, 80>;

int main() {
  const auto params = causal_params<Shape, fa::TileParams>(4, 16, 2048);
  const int blocks = 132;
  const auto tiles_of = [&](int number) { return fa::make_work_tile<Shape>(params, number).key_tiles; };
  static fa::ListedTiles listed;
  const double estimated = fa::list_tiles(params, blocks, tiles_of, &listed);
  std::vector<int> counts(params.work_tiles);
  const auto comes_before = [&](int one, int other) {
    const int section_tiles = params.section_heads * params.m_blocks;
    const int section = one / section_tiles, other_section = other / section_tiles;
    return section != other_section ? section < other_section : tiles_of(one) > tiles_of(other);
  };
  int most = 0, all = 0, early = 0;
  for (int block = 0; block < blocks; ++block) {
    int own = 0;
    for (int place = listed.first[block]; place < listed.first[block + 1]; ++place) {
      const int number = listed.numbers[place];
      ++counts.at(number), own += tiles_of(number);
      early += place > listed.first[block] && comes_before(number, listed.numbers[place - 1]);
    }
    most = own > most ? own : most, all += own;
  }
  const int wrong = std::count_if(counts.begin(), counts.end(), [](int count) { return count != 1; });
  std::printf("%d %d %d %d\n", most * 100 / (all / blocks), wrong, most == estimated, early);
}
"""
)
# Prints how many key tiles the work tiles of a head have, counted from the first query and from the last one.
FROM_END = (
    BEGINNING
    + r"""
template <typename PARAMS>
int key_tiles(int seq) {
  using Shape = fa::Shape<128, 3, 80>;
  const auto params = causal_params<Shape, PARAMS>(1, 1, seq);
  int tiles = 0;
  for (int number = 0; number < params.work_tiles; ++number) {
    tiles += fa::make_work_tile<Shape>(params, number).key_tiles;
  }
  return tiles;
}

int main(int, char** words) {
  const int seq = std::atoi(words[1]);
  std::printf("%d %d\n", key_tiles<fa::TileParams>(seq), key_tiles<fa::TilesFromEnd>(seq));
}
"""
)
# Prints the expected times of a causal call of 16 heads in ns, with two and more warpgroups.
COSTS = (
    BEGINNING
    + r"""
template <typename SHAPE>
int expected_ns(char** words) {
  const auto params = causal_params<SHAPE, fa::TileParams>(std::atoi(words[2]), 16, std::atoi(words[3]));
  using Costs = fa::CausalCosts<SHAPE>;
  const auto us_of = [&](int number) {
    return fa::make_work_tile<SHAPE>(params, number).key_tiles * Costs::KEY_TILE_US + Costs::WORK_TILE_US;
  };
  fa::ListedTiles listed;
  return static_cast<int>(fa::list_tiles(params, 132, us_of, &listed) * 1000);
}

int main(int, char** words) {
  if (std::atoi(words[1]) == 64) {
    std::printf("%d %d ", expected_ns<fa::Shape<64, 2, 128>>(words), expected_ns<fa::Shape<64, 3, 128>>(words));
    std::printf("%d\n", expected_ns<fa::Shape<64, 4, 64>>(words));
  } else {
    std::printf("%d %d\n", expected_ns<fa::Shape<128, 2, 128>>(words), expected_ns<fa::Shape<128, 3, 80>>(words));
  }
}
"""
)


def run_program(text: str, folder: Path, cache: Path, *words: str) -> list[int]:
    """Compile a program with the headers of the kernels, and return the numbers that it prints."""
    cuda, source, program = Path(find_toolchain(cache).home), folder / "balance.cpp", folder / "balance"
    source.write_text(text, encoding="utf-8")
    folders = (KERNELS / "include", INCLUDE, cuda / "include", *cuda.glob("targets/*/include"))
    command = ["g++", "-std=c++17", "-w", *(f"-I{folder}" for folder in folders), str(source), "-o", str(program)]
    subprocess.run(command, check=True, timeout=120)
    run = subprocess.run([str(program), *words], capture_output=True, text=True, check=True, timeout=60)
    return [int(word) for word in run.stdout.split()]


@pytest.mark.needs_nvcc  # for the headers of CUDA
@pytest.mark.parametrize("hidden", ["causal mask", "window"])
def test_all_blocks_get_nearly_the_same_work(tmp_path: Path, shared_cache: Path, hidden: str) -> None:
    """So they do where the period of the lengths, 44 work tiles of two heads, divides the number of blocks."""
    (percent,) = run_program(PROGRAM, tmp_path, shared_cache, hidden)
    assert percent <= 105


@pytest.mark.needs_nvcc  # for the headers of CUDA
def test_lists_have_each_work_tile_once_and_nearly_the_same_work(tmp_path: Path, shared_cache: Path) -> None:
    """The time that the choice of a shape counts with is that of the block with the most work.

    A block begins with its longest work tiles, section by section.
    """
    percent, wrong, is_estimated, early = run_program(LISTS, tmp_path, shared_cache)
    assert (percent <= 101, wrong, is_estimated, early) == (True, 0, 1, 0), percent


@pytest.mark.needs_nvcc  # for the headers of CUDA
def test_from_the_end_work_tiles_have_fewer_key_tiles(tmp_path: Path, shared_cache: Path) -> None:
    """Of 2048 queries, one warpgroup of three has none; of 1920, none is without."""
    assert run_program(FROM_END, tmp_path, shared_cache, "2048") == [162, 154]
    assert run_program(FROM_END, tmp_path, shared_cache, "1920") == [136, 136]


@pytest.mark.needs_nvcc  # for the headers of CUDA
@pytest.mark.parametrize(("problem", "warpgroups"), [("128 8 1024", 2), ("128 4 2048", 3), ("64 2 4096", 4)])
def test_causal_costs_expect_the_fastest_shape(
    tmp_path: Path, shared_cache: Path, problem: str, warpgroups: int
) -> None:
    """Timed on an H200, these numbers of warpgroups were the fastest."""
    expected_ns = run_program(COSTS, tmp_path, shared_cache, *problem.split())
    assert expected_ns.index(min(expected_ns)) + 2 == warpgroups, expected_ns

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
# Prints the same of the lists of b4h16s2048 with a causal mask, and how many work tiles are in no list or in several.
LISTS = r"""
#include <cstdio>

#include <cuda_runtime.h>

const uint3 blockIdx = {};  // not used, as the next two
const dim3 gridDim = {};
unsigned int __umulhi(unsigned int, unsigned int) { return 0; }
#include "fa/listed_tiles.cuh"

using Shape = fa::Shape<128, 3, 80>;

int main() {
  FaForwardArgs args = {};
  args.struct_size = sizeof(args);
  args.batch = 4, args.heads = args.kv_heads = 16, args.seq_q = args.seq_k = 2048, args.head_dim = 128;
  args.causal = FA_CAUSAL_TOP_LEFT;
  fa::TileParams params = {};
  params.section_heads = fa::section_heads_of(&args, 2), params.m_blocks = (2048 + 191) / 192, params.batch_heads = 64;
  params.seq_q = params.seq_k = 2048, params.first_diagonal = 1, params.work_tiles = params.m_blocks * 64;
  const int blocks = 132;
  const auto tiles_of = [&](int number) { return fa::make_work_tile<Shape>(params, number).key_tiles; };
  static fa::ListedTiles listed;
  const double estimated = fa::list_tiles(params, blocks, tiles_of, &listed);
  std::vector<int> counts(params.work_tiles);
  int most = 0, all = 0;
  for (int block = 0; block < blocks; ++block) {
    int own = 0;
    for (int place = listed.first[block]; place < listed.first[block + 1]; ++place) {
      ++counts.at(listed.numbers[place]), own += tiles_of(listed.numbers[place]);
    }
    most = own > most ? own : most, all += own;
  }
  const int wrong = std::count_if(counts.begin(), counts.end(), [](int count) { return count != 1; });
  std::printf("%d %d %d\n", most * 100 / (all / blocks), wrong, most == estimated);
}
"""


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
    """The time that the choice of a shape counts with is that of the block with the most work."""
    percent, wrong, is_estimated = run_program(LISTS, tmp_path, shared_cache)
    assert (percent <= 101, wrong, is_estimated) == (True, 0, 1), percent

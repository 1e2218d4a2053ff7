"""Samples by stage of attention: the words of the ladder's kernels, what is inlined, what waits at a barrier."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_fa.profile.phases import busiest_lines, phase_samples, phases_of_source
from pytest_fa.records.tool_results import SourceLine

KERNELS = Path(__file__).parents[3] / "kernels"

SOURCE = """\
// thing: a thing
#include <mma.h>
// Load K and V of one tile.
__device__ void load_kv() {
  copy();
}

__device__ int helper() {
  return 1;
}

__global__ void kernel() {
  // S = Q K^T
  mma();
  sync_consumers();
  // mask, row max
  m = f();
  // P = exp2(S - m), row sum
  p = f();
  // O += P V
  mma();
  // Normalise
  o *= f();
  // Store
  st();
}
"""


def test_paragraphs_have_their_stage() -> None:
    """The words of the ladder, until the next paragraph or function."""
    phases = phases_of_source(SOURCE)
    numbers = (5, 9, 14, 15, 17, 19, 21, 23, 25)
    expected = ["I/O", "other", "Q.K^T", "barriers", "softmax", "softmax", "P.V", "softmax", "I/O"]
    assert expected == [phases[number] for number in numbers]


def test_samples_follow_their_lines() -> None:
    """A sample in a header belongs to the paragraph before it; one at a barrier to the barriers."""
    lines = (
        SourceLine("/stage/0/src/kernel.cu", 14, 5, ""),
        SourceLine("/usr/include/mma.hpp", 91, 7, ""),
        SourceLine("/usr/include/mma.hpp", 91, 3, "barriers"),
        SourceLine("/stage/0/src/kernel.cu", 19, 4, ""),
    )
    assert {"Q.K^T": 12, "softmax": 4, "barriers": 3} == phase_samples(lines, "kernel.cu", SOURCE)
    assert [("mma.hpp", 10), ("kernel.cu", 5), ("kernel.cu", 4)] == [
        (each.file, each.samples) for each in busiest_lines(lines)
    ]


@pytest.mark.parametrize("name", ["minimal", "warp_specialized"])
def test_the_ladder_is_written_in_these_words(name: str) -> None:
    """Each stage is found in the repository's kernels."""
    phases = set(phases_of_source((KERNELS / name / "kernel.cu").read_text(encoding="utf-8")).values())
    assert {"Q.K^T", "softmax", "P.V", "I/O"} <= phases


def test_barriers_are_found_where_they_stand() -> None:
    """In the warp-specialised kernel each named barrier is one."""
    text = (KERNELS / "warp_specialized" / "kernel.cu").read_text(encoding="utf-8")
    phases = phases_of_source(text)
    calls = [number for number, line in enumerate(text.splitlines(), 1) if "sync_consumers(S_STORED)" in line]
    assert ["barriers"] * len(calls) == [phases[number] for number in calls]
    assert calls

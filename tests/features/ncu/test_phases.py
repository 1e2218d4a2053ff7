"""Stall samples by phase of attention: paragraphs of the ladder's kernels, inlined code, and barriers."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_fa.features.ncu.nsight_report import SourceLine
from pytest_fa.features.ncu.phases import busiest_lines, phase_samples, phases_of_source

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


def test_paragraphs_have_their_phase() -> None:
    """A comment names the phase of all lines up to the next such comment or function."""
    phases = phases_of_source(SOURCE)
    numbers = (5, 9, 14, 15, 17, 19, 21, 23, 25)
    expected = ["I/O", "other", "Q.K^T", "barriers", "softmax", "softmax", "P.V", "softmax", "I/O"]
    assert expected == [phases[number] for number in numbers]


def test_samples_follow_their_lines() -> None:
    """A sample in a header belongs to the paragraph of the sample before it; a sample at a barrier to the barriers."""
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
def test_the_ladder_has_all_phases(name: str) -> None:
    """Each phase is found in the comments of the repository's kernels."""
    phases = set(phases_of_source((KERNELS / name / "kernel.cu").read_text(encoding="utf-8")).values())
    assert {"Q.K^T", "softmax", "P.V", "I/O"} <= phases


def test_named_barriers_are_barriers() -> None:
    """In the warp-specialised kernel, every call that waits at a named barrier belongs to the barriers."""
    text = (KERNELS / "warp_specialized" / "kernel.cu").read_text(encoding="utf-8")
    phases = phases_of_source(text)
    calls = [number for number, line in enumerate(text.splitlines(), 1) if "sync_consumers(S_STORED)" in line]
    assert ["barriers"] * len(calls) == [phases[number] for number in calls]
    assert calls

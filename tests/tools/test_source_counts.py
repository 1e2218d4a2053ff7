"""Counts of the source of kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.docs.source_counts import changed_lines, counts, longest_kernel, main, shared_percent

SOURCE = """
__global__ void declared(int n);
template <int N>
__global__ void __launch_bounds__(N) first(const float* in) {
  if (in) {
    work(in[0]);
  }
}
__global__ void second(int n = int{2}) {
  one_line_of_it('{');  // }
}
"""


def test_a_step_counts_lines_of_both_sides() -> None:
    """A replaced line counts twice, and equal sources have no step."""
    assert changed_lines("a\nb\nc", "a\nx\nc\nd") == 3
    assert changed_lines(SOURCE, SOURCE) == 0


def test_the_longest_kernel_counts() -> None:
    """Without its braces, and without declarations."""
    assert longest_kernel(SOURCE) == 3
    assert longest_kernel("void host() {}") == 0


def test_lines_that_stand_elsewhere() -> None:
    """Comments and short lines do not count."""
    sources = {"a": "int shared_line = 1;  // x\nint own_line = 22;\n}\n#include <x>", "b": "  int shared_line = 1;"}
    assert shared_percent("a", sources) == 50.0
    assert shared_percent("b", sources) == 100.0
    assert shared_percent("empty", {**sources, "empty": "// nothing"}) == 0.0


def test_the_counts_of_the_ladders(capsys: pytest.CaptureFixture[str]) -> None:
    """No kernel has more than 520 lines; a rung beside its parent in one folder changes none."""
    kernels = Path(__file__).parents[2] / "kernels"
    rows = {row[0]: row for row in counts(kernels)}
    assert [name for name, row in rows.items() if int(row[3]) > 520] == []
    assert rows["decode_two_steps"][2] == "-"
    assert int(rows["light_barriers"][2]) > 0
    assert main([str(kernels)]) == 0
    assert "cluster_latency" in capsys.readouterr().out
    assert main([]) == 2

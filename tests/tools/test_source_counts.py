"""Counts of the source of kernels."""

from __future__ import annotations

from tools.docs.source_counts import changed_lines, longest_kernel, shared_percent

SOURCE = """
__global__ void declared(int n);
template <int N>
__global__ void __launch_bounds__(N) first(const float* in) {
  if (in) {
    work(in[0]);
  }
}
__global__ void second() {
  one_line_of_it();
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

"""The shape at which variants are compared where only one shape fits."""

from __future__ import annotations

from collections.abc import Iterable

from pytest_fa.catalog.suites import TARGET_SHAPE
from pytest_fa.records.record import Record


def main_shape(timed: Iterable[Record]) -> str | None:
    """The target shape if a candidate was timed there, else the shape with the most candidates, the largest of them.

    None without a candidate.
    """
    counts: dict[str, int] = {}
    work: dict[str, int] = {}
    for record in timed:
        if record.case and record.role == "candidate":
            shape = record.case.shape_id
            counts[shape] = counts.get(shape, 0) + 1
            work[shape] = record.case.flops_per_call
    return TARGET_SHAPE if TARGET_SHAPE in counts else max(counts, key=lambda at: (counts[at], work[at]), default=None)

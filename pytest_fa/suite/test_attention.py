"""Tests that every selected variant builds within its limits and is correct, and how fast it is.

Kernels run in worker processes; pytest's own process imports no torch.  The features that a run uses add
tests to this file.
"""

from __future__ import annotations

from pytest_fa.catalog.case import Case
from pytest_fa.catalog.variant import Variant
from pytest_fa.plugin.fa_benchmark import FaBenchmark
from pytest_fa.plugin.fa_run import FaRun


def test_build(fa_variant: Variant, fa_run: FaRun) -> None:
    """The variant compiles for every selected architecture and stays within the limits of its manifest."""
    fa_run.build(fa_variant)


def test_correct(fa_variant: Variant, fa_case: Case, fa_run: FaRun) -> None:
    """The variant's output on this case is correct."""
    fa_run.correct(fa_variant, fa_case)


def test_property(fa_variant: Variant, fa_property: str, fa_run: FaRun) -> None:
    """The variant has this property, or refuses with a reason if it is allowed to."""
    fa_run.property(fa_variant, fa_property)


def test_speed(fa_variant: Variant, fa_case: Case, fa_run: FaRun, fa_benchmark: FaBenchmark) -> None:
    """The variant is timed on this shape, and the outputs of the timed calls are correct."""
    record = fa_run.speed(fa_variant, fa_case)
    if record.speed is not None:
        fa_benchmark.record(record.speed, fa_case, variant=fa_variant.name)

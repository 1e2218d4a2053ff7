"""Every selected variant: does it build within its limits, is it right, how fast is it.

The work is done in worker processes; this process holds no torch.
"""

from __future__ import annotations

from pytest_fa.catalog.case import Case
from pytest_fa.catalog.variant import Variant
from pytest_fa.plugin.fa_run import FaRun
from pytest_fa.plugin.in_process import FaBenchmark


def test_build(fa_variant: Variant, fa_run: FaRun) -> None:
    """Compiles for every wanted architecture and stays within the manifest's limits."""
    fa_run.build(fa_variant)


def test_correct(fa_variant: Variant, fa_case: Case, fa_run: FaRun) -> None:
    """Gives the right output on this case."""
    fa_run.correct(fa_variant, fa_case)


def test_property(fa_variant: Variant, fa_property: str, fa_run: FaRun) -> None:
    """Holds to this property, or refuses with a reason where it may."""
    fa_run.property(fa_variant, fa_property)


def test_gate(fa_variant: Variant, fa_run: FaRun) -> None:
    """Is faster than its baselines by the ratio of `--fa-gate`, on every shape of the run."""
    fa_run.gate(fa_variant)


def test_speed(fa_variant: Variant, fa_case: Case, fa_run: FaRun, fa_benchmark: FaBenchmark) -> None:
    """Is timed on this shape, and the outputs of the timed calls are right."""
    record = fa_run.speed(fa_variant, fa_case)
    if record.speed is not None:
        fa_benchmark.record(record.speed, fa_case, variant=fa_variant.name)


def test_profile(fa_variant: Variant, fa_case: Case, fa_run: FaRun) -> None:
    """Is counted under Nsight Compute on this shape, in a process that times nothing."""
    fa_run.profile(fa_variant, fa_case)


def test_sanitize(fa_variant: Variant, fa_case: Case, fa_sanitizer: str, fa_run: FaRun) -> None:
    """Builds this tool of compute-sanitizer nothing to report."""
    fa_run.sanitize(fa_variant, fa_sanitizer, fa_case)

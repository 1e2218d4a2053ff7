"""The test that `--ncu` adds to the shipped suite."""

from __future__ import annotations

from pytest_fa.catalog.case import Case
from pytest_fa.catalog.variant import Variant
from pytest_fa.plugin.fa_run import FaRun


def test_profile(fa_variant: Variant, fa_case: Case, fa_run: FaRun) -> None:
    """The variant is profiled with Nsight Compute on this shape, in a process in which nothing is timed."""
    fa_run.profile(fa_variant, fa_case)

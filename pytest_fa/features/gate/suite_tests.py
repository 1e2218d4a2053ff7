"""The test that `--fa-gate` adds to the shipped suite."""

from __future__ import annotations

from pytest_fa.catalog.variant import Variant
from pytest_fa.plugin.fa_run import FaRun


def test_gate(fa_variant: Variant, fa_run: FaRun) -> None:
    """The variant takes less than the ratio of `--fa-gate` times its baselines' time, on every shape of the run."""
    fa_run.gate(fa_variant)

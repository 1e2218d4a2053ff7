"""`pytest --fa-selftest`: each wrong kernel is found by its check, and nothing is found in a right one."""

from __future__ import annotations

from pytest_fa.catalog.variant import Variant
from pytest_fa.plugin.fa_run import FaRun


def test_judge(fa_variant: Variant, fa_run: FaRun) -> None:
    """The checks find in this kernel what they must, and nothing else."""
    fa_run.selftest(fa_variant)

"""The test that `--fa-hunt` runs in place of the shipped suite's others."""

from __future__ import annotations

from pytest_fa.catalog.variant import Variant
from pytest_fa.features.hunt.run_hunt import run_hunt
from pytest_fa.plugin.fa_run import FaRun


def test_hunt(fa_variant: Variant, hunter: int, fa_run: FaRun) -> None:
    """No random case of what the variant claims shows a fault."""
    fa_run.finish(lambda: run_hunt(fa_run, fa_variant, hunter))

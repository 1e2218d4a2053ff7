"""The test of `--fa-selftest`: each wrong kernel is caught by its check, and no check rejects a correct kernel."""

from __future__ import annotations

from pytest_fa.catalog.variant import Variant
from pytest_fa.features.selftest.selftest import run_selftest_kernel
from pytest_fa.plugin.fa_run import FaRun


def test_judge(fa_variant: Variant, fa_run: FaRun) -> None:
    """This kernel is caught by the checks that must catch it, and by no others."""
    session = fa_run.session
    fa_run.finish(lambda: run_selftest_kernel(session.run_plan, session.runner, fa_variant))

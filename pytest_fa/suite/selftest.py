"""`pytest --fa-selftest`: each wrong kernel must be caught by its check, and no check may reject a correct kernel."""

from __future__ import annotations

from pytest_fa.catalog.variant import Variant
from pytest_fa.plugin.fa_run import FaRun


def test_judge(fa_variant: Variant, fa_run: FaRun) -> None:
    """This kernel is caught by the checks that must catch it, and by no others."""
    fa_run.selftest(fa_variant)

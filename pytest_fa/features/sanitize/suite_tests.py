"""The test that `--fa-sanitize` adds to the shipped suite."""

from __future__ import annotations

from pytest_fa.catalog.case import Case
from pytest_fa.catalog.variant import Variant
from pytest_fa.plugin.fa_run import FaRun


def test_sanitize(fa_variant: Variant, fa_case: Case, fa_sanitizer: str, fa_run: FaRun) -> None:
    """This tool of compute-sanitizer finds nothing in one call of the variant."""
    fa_run.sanitize(fa_variant, fa_sanitizer, fa_case)

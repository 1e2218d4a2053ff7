"""The hooks of compute-sanitizer: its test, and its lines below the table."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_fa.catalog.case import Case
from pytest_fa.catalog.variant import Variant
from pytest_fa.features.sanitize.sanitize import sanitize_variant
from pytest_fa.features.sanitize.sanitize_lines import sanitizer_lines, sanitizer_properties
from pytest_fa.features.sanitize.sanitized_cases import sanitizer_case
from pytest_fa.plugin.fa_run import FaRun
from pytest_fa.plugin.terminal import Results
from pytest_fa.records.record import Record
from pytest_fa.table.layout import TextLine


class Hooks:
    """compute-sanitizer in one run."""

    def __init__(self, config: pytest.Config) -> None:
        del config

    def pytest_fa_run_methods(self) -> dict[str, Callable[..., Record]]:
        """Add `fa_run.sanitize`."""
        return {"sanitize": run_sanitizer}

    def pytest_fa_lines(self, results: Results) -> list[TextLine]:
        """A line for each run of a sanitizer, with its findings below."""
        return [TextLine(line) for line in sanitizer_lines(results.records)]

    def pytest_fa_properties(self, record: Record) -> list[tuple[str, str]]:
        """The JUnit properties of a sanitizer run."""
        return sanitizer_properties(record)


def run_sanitizer(fa_run: FaRun, variant: Variant, tool: str, case: Case | None = None) -> Record:
    """Run one tool of compute-sanitizer, on a small case if none is given.  Fails with the tool's findings."""
    sanitized_case = case or sanitizer_case(variant)
    return fa_run.finish(lambda: sanitize_variant(fa_run.session.runner, variant, sanitized_case, tool))

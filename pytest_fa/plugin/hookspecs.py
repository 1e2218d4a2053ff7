"""The hooks of features: what a run asks each feature that it uses.

They are hooks of pytest's plugin manager.  A feature's class `Hooks` implements some of them, and some of pytest's own.
"""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_fa.catalog.plan import Plan
    from pytest_fa.plugin.terminal import Results
    from pytest_fa.records.record import Record
    from pytest_fa.table.layout import TextLine


def pytest_fa_check(config: pytest.Config) -> None:
    """Before collection: raise `UsageProblem` for a name or a value that the run cannot use."""


@pytest.hookspec(firstresult=True)
def pytest_fa_parametrize(metafunc: pytest.Metafunc, plan: Plan) -> bool | None:
    """Parametrize a test that the feature adds, and return True; None for other tests."""


def pytest_fa_run_methods() -> dict[str, Callable[..., Record]]:
    """The methods that the feature adds to the fixture `fa_run`; their first argument is the `FaRun`."""


def pytest_fa_finish(results: Results, config: pytest.Config) -> str | None:
    """After the last test: write a file.  Return what was asked for and not done, which fails the run, and why."""


@pytest.hookspec(firstresult=True)
def pytest_fa_table(results: Results, width: int) -> tuple[str, list[str]] | None:
    """The title and the lines of a table that replaces the rows of variants and shapes."""


def pytest_fa_lines(results: Results, config: pytest.Config) -> list[TextLine]:
    """Lines directly below the table."""


def pytest_fa_details(record: Record) -> list[str]:
    """What the feature adds to the text of a failed test."""


def pytest_fa_file_lines(results: Results, config: pytest.Config) -> list[TextLine]:
    """Lines about files that were written or could not be read."""


def pytest_fa_properties(record: Record) -> list[tuple[str, str]]:
    """The JUnit properties of a record: names and texts."""


def pytest_fa_extras(record: Record, config: pytest.Config) -> list[Any]:
    """What pytest-html shows below one test."""

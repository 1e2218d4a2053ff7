"""Turns a problem into pytest's usage error, at once or at the end of collection."""

from __future__ import annotations

import pytest

from pytest_fa.errors import FaError, UnusableRun
from pytest_fa.plugin.keys import PROBLEM_KEY
from pytest_fa.records.text import printable


def end_run(config: pytest.Config, problem: UnusableRun) -> None:
    """End the run with a usage error after collection.  A worker of pytest-xdist reports a collection error instead."""
    if hasattr(config, "workerinput"):
        raise usage_error(problem) from None
    config.stash[PROBLEM_KEY] = usage_error(problem)


def usage_error(problem: FaError, hint: str = "") -> pytest.UsageError:
    """The usage error with the words of `problem`, which may be those of a manifest, and a hint."""
    return pytest.UsageError(printable(f"{problem}{hint}"))

"""Hypothesis, which is an optional dependency: importing this module raises `UsageProblem` if it is missing."""

from __future__ import annotations

from pytest_fa.errors import UsageProblem

try:
    from hypothesis import HealthCheck, Phase, find, settings
    from hypothesis import strategies as st
    from hypothesis.database import DirectoryBasedExampleDatabase
    from hypothesis.errors import NoSuchExample
except ImportError:
    text = "--fa-hunt needs Hypothesis, which is not installed; type: pip install 'pytest-fa[hunt]'"
    raise UsageProblem(text) from None

__all__ = ["DirectoryBasedExampleDatabase", "HealthCheck", "NoSuchExample", "Phase", "find", "settings", "st"]

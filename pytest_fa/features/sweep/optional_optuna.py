"""Optuna, which is an optional dependency: importing this module raises `UsageProblem` if it is missing."""

from __future__ import annotations

from pytest_fa.errors import UsageProblem

try:
    import optuna
    from optuna.storages.journal import JournalFileBackend
except ImportError:
    text = "--fa-sweep needs Optuna, which is not installed; type: pip install 'pytest-fa[sweep]'"
    raise UsageProblem(text) from None

__all__ = ["JournalFileBackend", "optuna"]

optuna.logging.set_verbosity(optuna.logging.ERROR)  # its log stays off the terminal

"""The keys of pytest's stash that every run has, or that the first use of a kernel needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_fa.host.client import Workers
    from pytest_fa.options.options import Options
    from pytest_fa.plugin.kernel_run import KernelRun

OPTIONS_KEY: pytest.StashKey[Options] = pytest.StashKey()
IMPLIED_KEY: pytest.StashKey[bool] = pytest.StashKey()  # whether the shipped suite runs because no path was typed
KERNEL_RUN_KEY: pytest.StashKey[KernelRun] = pytest.StashKey()  # only in a run that uses kernels
WORKERS_KEY: pytest.StashKey[Workers] = pytest.StashKey()  # those of the session, started before it
PROBLEM_KEY: pytest.StashKey[pytest.UsageError] = pytest.StashKey()  # a reason found at collection to end the run

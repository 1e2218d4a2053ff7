"""Imports and registers the part of the plugin that uses kernels: at configure, or for the first test that needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_fa.plugin.keys import KERNEL_RUN_KEY

if TYPE_CHECKING:
    from pytest_fa.plugin.kernel_run import KernelRun

WAITING = "fa-waiting"  # the name of this plugin, until the first use


def kernel_run_of(config: pytest.Config) -> KernelRun:
    """The part of this run that uses kernels.  The first call imports it and registers its hooks."""
    if KERNEL_RUN_KEY not in config.stash:
        from pytest_fa.plugin import servers  # noqa: PLC0415  # runs without kernels import none of this

        servers.start_main(config)  # it imports torch while this process imports the rest

        from pytest_fa.plugin.kernel_run import KernelRun  # noqa: PLC0415  # as above

        config.stash[KERNEL_RUN_KEY] = run = KernelRun(config)
        waiting = config.pluginmanager.unregister(name=WAITING) if config.pluginmanager.hasplugin(WAITING) else None
        run.register(waiting.failures if isinstance(waiting, Waiting) else ())
    return config.stash[KERNEL_RUN_KEY]


class Waiting:
    """The hooks of a run that has used no kernel yet: they keep its failures, which count for the answer of the run.

    With `-n`, the first report of a test that a worker has run with a kernel is the first use in this process.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.failures: list[pytest.CollectReport | pytest.TestReport] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep a failure."""
        if report.failed:
            self.failures.append(report)

    @pytest.hookimpl(tryfirst=True)  # before the terminal shows an outcome that only kernels have
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep a failure, or begin with the first report of a kernel."""
        if report.failed or hasattr(report, "fa_companion"):
            self.failures.append(report)
        if hasattr(report, "fa_companion"):
            kernel_run_of(self._config)

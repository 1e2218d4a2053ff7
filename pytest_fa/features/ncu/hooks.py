"""The hooks of the profiler: its test, and its lines below the table."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_fa.catalog.case import Case
from pytest_fa.catalog.plan import Plan
from pytest_fa.catalog.variant import Variant
from pytest_fa.features.ncu.ncu_lines import profile_lines, profile_properties
from pytest_fa.features.ncu.nsight_report import NsightReport
from pytest_fa.features.ncu.plugin import NcuOptions
from pytest_fa.features.ncu.profile import CaseProfiler
from pytest_fa.plugin.fa_run import FaRun
from pytest_fa.plugin.items import parametrize_pairs
from pytest_fa.plugin.state import progress_line
from pytest_fa.plugin.terminal import Results
from pytest_fa.records.record import Record
from pytest_fa.table.layout import TextLine


class Hooks:
    """The profiler in one run."""

    def __init__(self, config: pytest.Config) -> None:
        del config
        self._profiler: CaseProfiler | None = None  # created for the first test that is profiled
        self._missing: list[str] = []  # why tests have no profile

    def pytest_fa_parametrize(self, metafunc: pytest.Metafunc, plan: Plan) -> bool | None:
        """Run `test_profile` over the first seed of each variant and shape."""
        if metafunc.function.__name__ != "test_profile" or "fa_run" not in metafunc.fixturenames:
            return None
        parametrize_pairs(metafunc, plan.first_seeds, by_shape=True)
        return True

    def pytest_fa_run_methods(self) -> dict[str, Callable[..., Record]]:
        """Add `fa_run.profile`."""
        return {"profile": self._profile}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note why a test has no profile."""
        if report.when == "call" and report.skipped and "::test_profile[" in report.nodeid:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self._missing.append(reason.removeprefix("Skipped: "))

    def pytest_fa_finish(self, results: Results) -> str:
        """Return why nothing was profiled although that was asked for; empty if there is a profile."""
        has_profile = any(report.status == "ok" for each in results.records if (report := NsightReport.of(each)))
        return f"--ncu: nothing was profiled: {self._missing[0]}" if self._missing and not has_profile else ""

    def pytest_fa_lines(self, results: Results) -> list[TextLine]:
        """A headline for each profile, with its details below."""
        return [TextLine(line) for line in profile_lines(results.records)]

    def pytest_fa_properties(self, record: Record) -> list[tuple[str, str]]:
        """The JUnit properties of a profile."""
        return profile_properties(record)

    def _profile(self, fa_run: FaRun, variant: Variant, case: Case) -> Record:
        """Profile the variant with Nsight Compute.  If that is not possible, skips, or fails with --ncu-strict."""
        asked = fa_run.session.options.part(NcuOptions) or NcuOptions()
        self._profiler = profiler = self._profiler or CaseProfiler(fa_run.session.runner)
        say = progress_line(fa_run.node.config)
        return fa_run.finish(lambda: profiler.profile(variant, case, say), skips_unmeasured=not asked.strict)

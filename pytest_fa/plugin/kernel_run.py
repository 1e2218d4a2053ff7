"""The part of the plugin that uses kernels.  Only a run that does imports this module, before its first kernel runs.

What a kernel run needs is therefore imported at the top of its modules: afterwards pytest's process, which decides,
imports nothing more of this package.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pytest_fa.errors import FaError, LockProblem, ToolchainError, UnusableRun, UsageProblem
from pytest_fa.feature import Feature, features
from pytest_fa.options import command_line, options
from pytest_fa.options.options import Options
from pytest_fa.plugin import markers, servers
from pytest_fa.plugin.asked import Selected, require_asked_tests
from pytest_fa.plugin.fa_benchmark import FaBenchmark
from pytest_fa.plugin.fa_run import FaRun
from pytest_fa.plugin.items import (
    attach,
    attach_output,
    deselect,
    has_timings,
    is_shipped,
    needed_variants,
    parametrize,
    variants_with_build_test,
)
from pytest_fa.plugin.keys import IMPLIED_KEY, OPTIONS_KEY, PROBLEM_KEY, WORKERS_KEY
from pytest_fa.plugin.own_process import protect_process, release_imports
from pytest_fa.plugin.replay_clock import ReplayClock
from pytest_fa.plugin.reports import Reports
from pytest_fa.plugin.state import (
    ALREADY_REPORTED_KEY,
    IN_TABLE_KEY,
    OUTPUT_KEY,
    RECORD_KEY,
    SESSION_KEY,
    first_reports_of,
    progress_line,
    session_of,
)
from pytest_fa.plugin.suite_module import SuiteModule
from pytest_fa.plugin.usage_errors import end_run, usage_error
from pytest_fa.plugin.xdist_hooks import WORKER_SELECTED, register_for_xdist
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import to_builtins
from pytest_fa.records.text import printable
from pytest_fa.session.builds import runs_here
from pytest_fa.session.machine_problem import without_torch

NO_PATH = "fa: no path is given, so the shipped suite runs; add a path, such as '.', to run the tests there instead"


class KernelRun:
    """The hooks of a run that uses kernels, and what its fixtures return."""

    def __init__(self, config: pytest.Config) -> None:
        self._config, self.options = config, config.stash[OPTIONS_KEY]

    def register(self, failures: Iterable[pytest.CollectReport | pytest.TestReport]) -> None:
        """Register these hooks and those of the features that are used.  `failures` are those of the run so far."""
        self._config.pluginmanager.register(self, "fa-kernel-run")
        if not hasattr(self._config, "workerinput"):
            reports = Reports(self._config)
            self._config.pluginmanager.register(reports, "fa-reports")
            reports.take(failures)
        for feature in features():
            if feature.name in self.options.used:
                self._register_feature(feature)

    def _register_feature(self, feature: Feature) -> None:
        name = f"fa-{feature.name}"
        if feature.has_hooks and not self._config.pluginmanager.hasplugin(name):
            self._config.pluginmanager.register(feature.module("hooks").Hooks(self._config), name)

    # -- before collection --------------------------------------------------------------------------------------------

    def configure(self) -> None:
        """Check the names in the options, and start the other servers.  Raises `UsageProblem` for a wrong name.

        A name with two variants ends a run only if an option of this plugin was typed.
        """
        config, session = self._config, session_of(self._config)
        command_line.name_every_seed(config, session.run_plan.plan.ids_with_seeds)
        session.builds.require_known_arches()
        if self.options.listed is None:
            if command_line.is_typed(config):
                session.run_plan.catalog.require_unique_names()
            config.hook.pytest_fa_check(config=config)
        if self.options.clean and not hasattr(config, "workerinput"):
            session.builds.say = progress_line(config)
            session.builds.clean()
        self._start_servers()
        if not hasattr(config, "workerinput"):
            register_for_xdist(config)

    def _start_servers(self) -> None:
        """Start the servers that do not run yet if this machine can run a selected variant, else end the first one.

        Collection then decides whether a test needs them.
        """
        if servers.runs_kernels(self._config):
            session = session_of(self._config)
            if any(runs_here(variant) for variant in session.run_plan.plan.runnable):
                _require_torch(self.options)
                session.start_servers()
            else:
                session.close()

    @property
    def header(self) -> list[str]:
        """GPU, variants and cases."""
        lines = [printable(line) for line in session_of(self._config).run_plan.header]
        return [*lines, NO_PATH] if self._config.stash[IMPLIED_KEY] else lines

    def list_variants(self) -> None:
        """Print the list of variants, or those that are named.  Raises `UsageProblem` for a wrong name."""
        from pytest_fa.plugin.variant_list import list_variants, show_variants  # noqa: PLC0415  # rich, only for this

        run_plan = session_of(self._config).run_plan
        if self.options.listed:
            show_variants(run_plan.catalog, self.options.listed)
        else:
            list_variants(run_plan.catalog, run_plan.absence(""))

    # -- collection ---------------------------------------------------------------------------------------------------

    def suite_module(self, path: Path, parent: pytest.Collector) -> pytest.Module:
        """A file of the shipped suite with the tests of the used features."""
        return SuiteModule.of(path, parent)

    def pytest_pycollect_makeitem(self, collector: pytest.Module | pytest.Class, name: str) -> list[pytest.Item] | None:
        """Leave out a test of the shipped suite that does not belong to this run, as with `--fa-static`."""
        in_suite = name.startswith("test_") and collector.path.parent == command_line.SUITE_FOLDER
        return [] if in_suite and not self.options.offers(name) else None

    def parametrize(self, metafunc: pytest.Metafunc) -> None:
        """Parametrize a test that uses `fa_variant`, `fa_case`, `fa_property` or a fixture of a feature."""
        run_plan = session_of(self._config).run_plan
        try:
            suites = markers.suites_of(metafunc.definition)
            plan = run_plan.plan_of(suites)
            run_plan.require_usable(needs_variant="fa_variant" in metafunc.fixturenames)
            parametrize(metafunc, plan)
        except UnusableRun as problem:
            end_run(self._config, problem)
        except FaError as problem:
            raise usage_error(problem) from None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Deselect companions at shapes without a test of a selected variant, and placeholders without a variant.

        Without an error of collection, each typed option must have a test.
        """
        if PROBLEM_KEY in config.stash:
            raise config.stash[PROBLEM_KEY]
        if SESSION_KEY in config.stash:
            deselect(config, items, session_of(config).run_plan.plan)
        if not session.testsfailed and not hasattr(config, "workerinput"):
            require_asked_tests(config, items)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Store which variants the selected tests need; they are built together."""
        if SESSION_KEY not in session.config.stash:
            return
        protect_process(session.config)
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[WORKER_SELECTED] = list(Selected.of(session.items))
        run = session_of(session.config)
        run.builds.needed = needed_variants(session.items)
        run.runner.has_timings = run.options.timing and has_timings(session.items)
        first_reports_of(session.config).build_tests = variants_with_build_test(session.items)
        run.require_servers()

    def offer_run_methods(self, test: pytest.Item) -> None:
        """Import what `fa_run` offers to a user's own test by features, if possible before any kernel runs."""
        for feature in features():
            if feature.run_methods and not is_shipped(test):
                self._register_feature(feature)

    # -- fixtures -----------------------------------------------------------------------------------------------------

    def build(self) -> None:
        """Build everything that the selected tests need, in one parallel batch."""
        try:
            session_of(self._config).start(progress_line(self._config))
        except ToolchainError:
            return  # each test that needs a compiler reports this itself
        except (OSError, LockProblem) as problem:
            reason = f"--fa-cache: the build cache cannot be used: {problem}"
            pytest.exit(reason, returncode=pytest.ExitCode.USAGE_ERROR)

    def fa_run(self, test: pytest.Item) -> FaRun:
        """What runs and records a test in a worker process."""
        self.offer_run_methods(test)  # it may have got the fixture by its name only now
        return FaRun(test)

    def fa_benchmark(self, request: pytest.FixtureRequest, clock: ReplayClock, benchmark: Any) -> FaBenchmark:  # noqa: ANN401
        """What times kernels for a test."""
        return FaBenchmark(request, clock, benchmark)

    # -- reports ------------------------------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # outside of pytest's own wrapper, which lets xfail tests pass
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        """Attach record and output of a test to its report, which pytest-xdist sends to the controller."""
        report = yield
        if call.when == "call" and "fa_run" in getattr(item, "fixturenames", ()):
            attach_output(report, item.stash.get(OUTPUT_KEY, ""))
            attach(report, item, item.stash.get(RECORD_KEY, None), session_of(item.config).run_plan.plan)
            report.fa_already_reported = item.stash.get(ALREADY_REPORTED_KEY, False)
            if report.failed:
                first_reports_of(item.config).note_failure(item.nodeid)
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_report_to_serializable(self) -> Generator[None, Any, Any]:
        """Encode the record of a report that goes to another process, as from a worker of pytest-xdist."""
        data = yield
        if data and "fa_record" in data:
            data["fa_record"] = to_builtins(data["fa_record"])
        return data

    def pytest_report_teststatus(
        self, report: pytest.TestReport
    ) -> tuple[str, str, tuple[str, dict[str, bool]]] | None:
        """Show a test without a verdict as INCONCLUSIVE in the terminal, neither passed nor failed."""
        record = getattr(report, "fa_record", None)
        if report.when == "call" and record is not None and record.outcome == Outcome.INCONCLUSIVE:
            return Outcome.INCONCLUSIVE, "I", ("INCONCLUSIVE", {"yellow": True})
        return None

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_update_machine_info(self, config: pytest.Config, machine_info: dict[str, Any]) -> None:
        """Add GPU, driver, CUDA and torch to the machine info of pytest-benchmark."""
        if SESSION_KEY in config.stash:
            machine_info["fa"] = session_of(config).machine_info

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_update_json(self, output_json: dict[str, Any]) -> None:
        """Save variants and cases by name, not as objects that contain paths of this machine."""
        for benchmark in output_json["benchmarks"]:
            if benchmark["params"]:
                benchmark["params"] = {name: str(value) for name, value in benchmark["params"].items()}

    @pytest.hookimpl(optionalhook=True, wrapper=True)
    def pytest_benchmark_group_stats(self, config: pytest.Config) -> Generator[None, Any, Any]:
        """Leave the benchmarks of this plugin's table out of pytest-benchmark's, unless one of its options is given."""
        groups = yield
        if options.wants_benchmark_table(config):
            return groups
        own = config.stash.get(IN_TABLE_KEY, set())
        kept = [(name, [each for each in benchmarks if each["fullname"] not in own]) for name, benchmarks in groups]
        return [(name, benchmarks) for name, benchmarks in kept if benchmarks]

    # -- the end ------------------------------------------------------------------------------------------------------

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Let the workers end while the last lines are written, unless a feature goes on with them."""
        stays = any(part.keeps_servers for part in self.options.parts)
        if SESSION_KEY in session.config.stash and not stays:
            session_of(session.config).let_go()

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        """Wait until the workers have ended.  If the options were wrong, there may be a server without a session."""
        if SESSION_KEY in config.stash:
            session_of(config).close()
        elif WORKERS_KEY in config.stash:
            config.stash[WORKERS_KEY].close()
        release_imports(config)


def _require_torch(options: Options) -> None:
    """Raise `UsageProblem` if this environment has no torch, without which no kernel runs; nothing imports it here."""
    if find_spec("torch") is None and not options.static:
        raise UsageProblem(without_torch("No module named 'torch'"))

"""All pytest hooks of this package.  Importing this module imports neither torch nor the catalog."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_fa.errors import FaError, UnusableRun
from pytest_fa.feature import Feature, features
from pytest_fa.options import command_line, flags, options
from pytest_fa.plugin import hookspecs, markers, servers
from pytest_fa.plugin.own_process import protect_process, release_imports
from pytest_fa.plugin.state import (
    ALREADY_REPORTED_KEY,
    IMPLIED_KEY,
    IN_TABLE_KEY,
    OPTIONS_KEY,
    OUTPUT_KEY,
    PROBLEM_KEY,
    RECORD_KEY,
    RESULTS_KEY,
    SESSION_KEY,
    STATUS_LINE_KEY,
    first_reports_of,
    session_of,
)
from pytest_fa.plugin.status_line import StatusLine, may_show
from pytest_fa.plugin.terminal import Results
from pytest_fa.plugin.usage_errors import end_run, usage_error
from pytest_fa.plugin.without_benchmark import WithoutBenchmark
from pytest_fa.plugin.xdist_hooks import register_for_xdist
from pytest_fa.records.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

NO_PATH = "fa: no path is given, so the shipped suite runs; add a path, such as '.', to run the tests there instead"
ANSWERED = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)  # a run that was interrupted has no answer


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the hooks of features, and the fixtures that some of them offer."""
    pluginmanager.add_hookspecs(hookspecs)
    for feature in features():
        if feature.fixtures:
            pluginmanager.register(feature.module("fixtures"), f"fa-fixtures-{feature.name}")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this plugin, each with an ini key."""
    flags.register(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Read the options.  If any was given, start a worker server, and check the names in them before collection."""
    markers.register(config)
    repeats_failures = command_line.name_last_failed(config)
    try:
        config.stash[OPTIONS_KEY] = options.read(config)
        config.stash[IMPLIED_KEY] = command_line.implies_suite(config)
        servers.start_main(config)
        _register_features(config)
        command_line.choose_tests(config, config.stash[OPTIONS_KEY].suite_file)
        if config.stash[OPTIONS_KEY].is_given and not config.getoption("help"):
            _check_names(config)
        if config.stash[OPTIONS_KEY].clean and not hasattr(config, "workerinput"):
            session_of(config).builds.clean()
        servers.start_others(config)
    except FaError as problem:
        raise usage_error(problem, command_line.LAST_FAILED_HINT if repeats_failures else "") from None
    if not config.pluginmanager.hasplugin("benchmark"):
        config.addinivalue_line("markers", "benchmark(...): an argument of pytest-benchmark, which is switched off")
        config.pluginmanager.register(WithoutBenchmark(), "fa-without-benchmark")
    if not hasattr(config, "workerinput"):
        register_for_xdist(config)


def _check_names(config: pytest.Config) -> None:
    """Raise `UsageProblem` for a wrong name.  A name with two variants ends a run only if the run uses kernels."""
    run_plan = session_of(config).run_plan
    command_line.name_every_seed(config, run_plan.plan.ids_with_seeds)
    session_of(config).builds.require_known_arches()
    if command_line.is_typed(config) and not config.stash[OPTIONS_KEY].list_only:
        run_plan.catalog.require_unique_names()
    if not config.stash[OPTIONS_KEY].list_only:
        config.hook.pytest_fa_check(config=config)


def _register_features(config: pytest.Config) -> None:
    """Import the code of the features that are used.  After the first kernel has run, none is imported."""
    if not hasattr(config, "workerinput"):
        config.stash[RESULTS_KEY] = Results(config.stash[OPTIONS_KEY])
        config.pluginmanager.register(_Reports(config), "fa-reports")
    for feature in features():
        if feature.name in config.stash[OPTIONS_KEY].used:
            _register(config, feature)


def _register(config: pytest.Config, feature: Feature) -> None:
    name = f"fa-{feature.name}"
    if feature.has_hooks and not config.pluginmanager.hasplugin(name):
        config.pluginmanager.register(feature.module("hooks").Hooks(config), name)


def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """With `--fa-list`, print the list of variants and end the run."""
    if not options.wants_list(config):
        return None
    from pytest_fa.plugin.variant_list import list_variants  # noqa: PLC0415  # only --fa-list needs it

    config._do_configure()  # noqa: SLF001  # pytest's own --markers and --fixtures do the same
    run_plan = session_of(config).run_plan
    list_variants(run_plan.catalog, run_plan.absence(""))
    config._ensure_unconfigure()  # noqa: SLF001
    return 0


def pytest_report_header(config: pytest.Config) -> list[str] | None:
    """GPU, variants and cases, and one line for each deprecated name, if an option of this plugin is in use."""
    if not config.stash[OPTIONS_KEY].is_given:
        return None
    from pytest_fa.records.text import printable  # noqa: PLC0415  # only runs with kernels need it

    lines = [printable(line) for line in session_of(config).run_plan.header]
    return [*lines, NO_PATH] if config.stash[IMPLIED_KEY] else lines


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Collect a file of the shipped suite with the tests of the used features."""
    if module_path.parent != command_line.SUITE_FOLDER:
        return None
    from pytest_fa.plugin.suite_module import SuiteModule  # noqa: PLC0415  # only for the shipped suite

    return SuiteModule.of(module_path, parent)


def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class, name: str) -> list[pytest.Item] | None:
    """Leave out a test of the shipped suite that does not belong to this run, as with `--fa-static`."""
    in_suite = name.startswith("test_") and collector.path.parent == command_line.SUITE_FOLDER
    return [] if in_suite and not collector.config.stash[OPTIONS_KEY].offers(name) else None


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, tuple[str, dict[str, bool]]] | None:
    """Show a test without a verdict as INCONCLUSIVE in the terminal, neither passed nor failed."""
    record = getattr(report, "fa_record", None)
    if report.when == "call" and record is not None and record.outcome == Outcome.INCONCLUSIVE:
        return Outcome.INCONCLUSIVE, "I", ("INCONCLUSIVE", {"yellow": True})
    return None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize every test that uses `fa_variant`, `fa_case`, `fa_property` or a fixture of a feature."""
    of_features = {name for feature in features() for name in feature.fixtures}
    if {"fa_variant", "fa_case", "fa_property", *of_features} & set(metafunc.fixturenames):
        from pytest_fa.plugin.items import parametrize  # noqa: PLC0415  # only runs with kernels import the catalog

        run_plan = session_of(metafunc.config).run_plan
        try:
            suites = markers.suites_of(metafunc.definition)
            plan = run_plan.plan_of(suites)
            run_plan.require_usable(needs_variant="fa_variant" in metafunc.fixturenames)
            parametrize(metafunc, plan)
        except UnusableRun as problem:
            end_run(metafunc.config, problem)
        except FaError as problem:
            raise usage_error(problem) from None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect companions at shapes without a test of a selected variant, and placeholders without a variant."""
    if PROBLEM_KEY in config.stash:
        raise config.stash[PROBLEM_KEY]
    if SESSION_KEY in config.stash:
        from pytest_fa.plugin.items import deselect  # noqa: PLC0415

        deselect(config, items, session_of(config).run_plan.plan)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Store which variants the selected tests need; they are built together."""
    if SESSION_KEY in session.config.stash:
        from pytest_fa.plugin.items import has_timings, needed_variants, variants_with_build_test  # noqa: PLC0415

        _offer_run_methods(session)
        protect_process(session.config)
        run = session_of(session.config)
        run.builds.needed = needed_variants(session.items)
        run.runner.has_timings = run.options.timing and has_timings(session.items)
        first_reports_of(session.config).build_tests = variants_with_build_test(session.items)
        run.require_servers()


def _offer_run_methods(session: pytest.Session) -> None:
    """Import what `fa_run` offers to a user's own test by features, before any kernel runs."""
    from pytest_fa.plugin.items import is_shipped  # noqa: PLC0415

    own = [item for item in session.items if "fa_run" in getattr(item, "fixturenames", ()) and not is_shipped(item)]
    for feature in features() if own else ():
        if feature.run_methods:
            _register(session.config, feature)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside of pytest's own wrapper, which lets xfail tests pass
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Attach record and output of a test to its report, which pytest-xdist sends to the controller."""
    report = yield
    if call.when == "call" and "fa_run" in getattr(item, "fixturenames", ()):
        from pytest_fa.plugin.items import attach, attach_output  # noqa: PLC0415

        attach_output(report, item.stash.get(OUTPUT_KEY, ""))
        attach(report, item, item.stash.get(RECORD_KEY, None), session_of(item.config).run_plan.plan)
        report.fa_already_reported = item.stash.get(ALREADY_REPORTED_KEY, False)
        if report.failed:
            first_reports_of(item.config).note_failure(item.nodeid)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """Encode the record of a report that goes to another process, as from a worker of pytest-xdist."""
    data = yield
    if data and "fa_record" in data:
        from pytest_fa.records.record import to_builtins  # noqa: PLC0415  # only runs with kernels need it

        data["fa_record"] = to_builtins(data["fa_record"])
    return data


@pytest.hookimpl(wrapper=True)
def pytest_report_from_serializable() -> Generator[None, Any, Any]:
    """Decode the record of a report of another process."""
    report = yield
    if hasattr(report, "fa_record"):
        from pytest_fa.records.read import read_record  # noqa: PLC0415  # only runs with kernels need it

        report.fa_record = read_record(report.fa_record)
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Add GPU, driver, CUDA and torch to the machine info of pytest-benchmark."""
    if SESSION_KEY in config.stash:
        machine_info["fa"] = session_of(config).machine_info


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_json(output_json: dict[str, Any]) -> None:
    """Save variants and cases by name, not as objects that contain paths of this machine."""
    for benchmark in output_json["benchmarks"]:
        if benchmark["params"]:
            benchmark["params"] = {name: str(value) for name, value in benchmark["params"].items()}


@pytest.hookimpl(optionalhook=True, wrapper=True)
def pytest_benchmark_group_stats(config: pytest.Config) -> Generator[None, Any, Any]:
    """Leave the benchmarks of this plugin's table out of pytest-benchmark's, unless one of its options is given."""
    groups = yield
    if options.wants_benchmark_table(config):
        return groups
    own = config.stash.get(IN_TABLE_KEY, set())
    kept = [(name, [each for each in benchmarks if each["fullname"] not in own]) for name, benchmarks in groups]
    return [(name, benchmarks) for name, benchmarks in kept if benchmarks]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Let the workers end while the last lines are written."""
    servers.let_go(session.config)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Wait until the workers have ended."""
    servers.end(config)
    release_imports(config)


class _Reports:
    """The hooks of the process that writes to the terminal; with pytest-xdist, the controller, which runs no tests."""

    def __init__(self, config: pytest.Config) -> None:
        self.results = config.stash[RESULTS_KEY]

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Add the status line.  The terminal reporter may be registered after this plugin, but not after this hook."""
        if may_show(config := session.config):
            config.stash[STATUS_LINE_KEY] = StatusLine(config.pluginmanager.getplugin("terminalreporter"))
            config.pluginmanager.register(_Progress(config.stash[STATUS_LINE_KEY]), "fa-progress")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the record of a report."""
        self.results.take(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Count a collection error as a failure."""
        self.results.note_collect(report)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> Generator[None, object, object]:
        """Save the records and set the exit status; write the answer below the last line of the terminal reporter."""
        self.results.finish(session.config)
        session.exitstatus = self.results.exit_status(exitstatus)
        result = yield
        terminal = session.config.pluginmanager.getplugin("terminalreporter")
        if terminal and not terminal.no_summary:
            self._write_last_lines(session, exitstatus, terminal)
        return result

    def _write_last_lines(self, session: pytest.Session, exitstatus: int, terminal: pytest.TerminalReporter) -> None:
        """Write the answer, also if --stepwise ended the run; if a path has no test, the command that was meant."""
        is_stepwise = exitstatus == pytest.ExitCode.INTERRUPTED and bool(session.shouldstop)
        if exitstatus in ANSWERED or is_stepwise:
            self.results.write_answer(terminal)
        is_empty = exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and not terminal.stats.get("deselected")
        if is_empty and command_line.is_typed(session.config):
            paths = " ".join(session.config.args)
            command = command_line.command_with_suite(session.config)
            terminal.write_line(f"fa: no test in {paths}; the shipped suite tests kernels: {command}")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Write the table, the notes and the paths of the records."""
        self.results.write(terminalreporter)

    @pytest.hookimpl(trylast=True)  # after the workers have ended
    def pytest_unconfigure(self, config: pytest.Config) -> None:
        """Write beside the records what the run has written."""
        self.results.end(config)


class _Progress:
    """The hooks that show the status line between what pytest's terminal reporter writes."""

    def __init__(self, line: StatusLine) -> None:
        self._line = line

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Start the clock if a test of this run uses `fa_run`."""
        if any("fa_run" in getattr(item, "fixturenames", ()) for item in session.items):
            self._line.begin({item.nodeid: getattr(item, "originalname", item.name) for item in session.items})

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logstart(self) -> Generator[None, object, object]:
        """Erase the line while pytest writes the name of a test."""
        self._line.clear()
        result = yield
        self._line.draw()
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> Generator[None, object, object]:
        """Erase the line while pytest writes an outcome, then show it with the new numbers."""
        self._line.clear()
        result = yield
        self._line.count(report.nodeid, report.duration)
        if report.when == "teardown":
            self._line.end_test(report.nodeid)
        self._line.draw()
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self) -> Generator[None, object, object]:
        """Erase the line before the summary."""
        self._line.clear()
        return (yield)

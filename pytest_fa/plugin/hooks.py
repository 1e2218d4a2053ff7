"""All pytest hooks of this package.  Importing this module imports neither torch nor the catalog."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_fa.errors import FaError
from pytest_fa.options import flags, options
from pytest_fa.plugin import markers
from pytest_fa.plugin.state import OPTIONS_KEY, OUTPUT_KEY, RECORD_KEY, SESSION_KEY, first_reports_of, session_of
from pytest_fa.plugin.terminal import Results

if TYPE_CHECKING:
    from collections.abc import Generator

INCONCLUSIVE_STATUS = 10  # exit status if a gate has no verdict and nothing else failed


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this plugin, each with an ini key."""
    flags.register(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Read the options.  If any was given, check the names in them before collection."""
    markers.register(config)
    try:
        config.stash[OPTIONS_KEY] = options.read(config)
        if config.stash[OPTIONS_KEY].selftest:
            config.args[:] = [str(options.SELFTEST_SUITE)]
        if config.stash[OPTIONS_KEY].is_given:
            _ = session_of(config).run_plan.plan
        if config.stash[OPTIONS_KEY].clean and not hasattr(config, "workerinput"):
            session_of(config).builds.clean()
    except FaError as problem:
        raise _usage_error(problem) from None
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Reports(Results(config.stash[OPTIONS_KEY])), "fa-reports")


def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """With `--fa-list`, print the list of variants and end the run."""
    if not options.wants_list(config):
        return None
    from pytest_fa.plugin.terminal import list_variants  # noqa: PLC0415  # only --fa-list needs it

    config._do_configure()  # noqa: SLF001  # pytest's own --markers and --fixtures do the same
    list_variants(session_of(config).run_plan.catalog)
    config._ensure_unconfigure()  # noqa: SLF001
    return 0


def pytest_report_header(config: pytest.Config) -> list[str] | None:
    """GPU, variants and cases, and one line for each deprecated name, if an option of this plugin is in use."""
    if not config.stash[OPTIONS_KEY].is_given:
        return None
    from pytest_fa.records.text import printable  # noqa: PLC0415  # only runs with kernels need it

    return [printable(line) for line in session_of(config).run_plan.header]


def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class, name: str) -> list[pytest.Item] | None:
    """Collect gates, profiles and sanitizers of the shipped suite only if an option requests them."""
    in_suite = name.startswith("test_") and str(getattr(collector.obj, "__name__", "")).startswith("pytest_fa.suite.")
    return [] if in_suite and not collector.config.stash[OPTIONS_KEY].offers(name) else None


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, tuple[str, dict[str, bool]]] | None:
    """Show a gate without a verdict as INCONCLUSIVE in the terminal, neither passed nor failed."""
    if report.when == "call" and getattr(report, "fa_record", {}).get("outcome") == "inconclusive":
        return "inconclusive", "I", ("INCONCLUSIVE", {"yellow": True})
    return None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize every test that uses `fa_variant`, `fa_case`, `fa_property` or `fa_sanitizer`."""
    if {"fa_variant", "fa_case", "fa_property", "fa_sanitizer"} & set(metafunc.fixturenames):
        from pytest_fa.plugin.items import parametrize  # noqa: PLC0415  # only runs with kernels import the catalog

        try:
            suites = markers.suites_of(metafunc.definition)
            parametrize(metafunc, session_of(metafunc.config).run_plan.plan_of(suites))
        except FaError as problem:
            raise _usage_error(problem) from None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect companions at shapes without a test of a selected variant, and placeholders without a variant."""
    if SESSION_KEY in config.stash:
        from pytest_fa.plugin.items import deselect  # noqa: PLC0415

        deselect(config, items, session_of(config).run_plan.plan)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Store which variants the selected tests need; they are built together."""
    if SESSION_KEY in session.config.stash:
        from pytest_fa.plugin.items import needed_variants, variants_with_build_test  # noqa: PLC0415

        session_of(session.config).builds.needed = needed_variants(session.items)
        first_reports_of(session.config).build_tests = variants_with_build_test(session.items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Attach record and output of a test to its report, which pytest-xdist sends to the controller."""
    report = yield
    if call.when == "call" and "fa_run" in getattr(item, "fixturenames", ()):
        from pytest_fa.plugin.items import attach, attach_output  # noqa: PLC0415

        attach_output(report, item.stash.get(OUTPUT_KEY, ""))
        attach(report, item, item.stash.get(RECORD_KEY, None), session_of(item.config).run_plan.plan)
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


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the workers."""
    if SESSION_KEY in config.stash:
        session_of(config).close()


def _usage_error(problem: FaError) -> pytest.UsageError:
    """The usage error with the words of `problem`, which may be those of a manifest."""
    from pytest_fa.records.text import printable  # noqa: PLC0415

    return pytest.UsageError(printable(str(problem)))


class _Reports:
    """The hooks of the process that writes to the terminal; with pytest-xdist, the controller, which runs no tests."""

    def __init__(self, results: Results) -> None:
        self._results = results

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the record of a report."""
        self._results.take(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Count a collection error as a failure."""
        self._results.note_collect(report)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Save the records and set the exit status: a run in which nothing ran or records were lost has failed."""
        self._results.finish()
        if self._results.is_inconclusive and exitstatus == pytest.ExitCode.TESTS_FAILED:
            session.exitstatus = INCONCLUSIVE_STATUS
        if (self._results.nothing_ran or self._results.is_lost) and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Write the table, the notes and the paths of the records; with -q, also the lines that the header has else."""
        self._results.write(terminalreporter)
        config = terminalreporter.config
        if config.get_verbosity() < 0 and SESSION_KEY in config.stash:
            for notice in session_of(config).run_plan.notices:
                terminalreporter.write_line(notice)

"""The hooks that keep the reports of a run which uses kernels, and write its table, answer and status line."""

from __future__ import annotations

from collections.abc import Generator, Iterable

import pytest

from pytest_fa.errors import Interrupted
from pytest_fa.options import command_line
from pytest_fa.plugin.asked import unheeded
from pytest_fa.plugin.keys import OPTIONS_KEY
from pytest_fa.plugin.state import RESULTS_KEY, STATUS_LINE_KEY
from pytest_fa.plugin.status_line import StatusLine, may_show
from pytest_fa.plugin.terminal import Results

ANSWERED = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)  # a run that was interrupted has no answer


class Reports:
    """The hooks of the process that writes to the terminal; with pytest-xdist, the controller, which runs no tests."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.results = config.stash[RESULTS_KEY] = Results(config.stash[OPTIONS_KEY])
        if config.pluginmanager.hasplugin("session"):  # else the terminal reporter may be registered after this plugin
            self._add_status_line()

    def take(self, reports: Iterable[pytest.CollectReport | pytest.TestReport]) -> None:
        """Take reports that came before these hooks were registered."""
        for report in reports:
            if isinstance(report, pytest.CollectReport):
                self.results.note_collect(report)
            else:
                self.results.take(report)

    def _add_status_line(self) -> None:
        if may_show(self._config):
            line = self._config.stash[STATUS_LINE_KEY] = StatusLine(
                self._config.pluginmanager.getplugin("terminalreporter")
            )
            self._config.pluginmanager.register(StatusLineHooks(line), "fa-progress")

    def pytest_sessionstart(self) -> None:
        """Add the status line."""
        self._add_status_line()

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
        problem = self._unheeded(session) if session.exitstatus == pytest.ExitCode.OK else ""
        if problem:
            session.exitstatus = pytest.ExitCode.USAGE_ERROR
        result = yield
        terminal = session.config.pluginmanager.getplugin("terminalreporter")
        if terminal and not terminal.no_summary:
            self._write_last_lines(session, exitstatus, terminal)
        if terminal and problem:
            terminal.write_line(f"ERROR: {problem}", red=True)
        return result

    def _unheeded(self, session: pytest.Session) -> str:
        """Why a run that would be green did not do what a typed option asks for; empty if it did."""
        if session.config.option.collectonly:
            return ""
        return unheeded(session.config, self.results.records, saw_kernels=self.results.saw_kernels)

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

    @pytest.hookimpl(trylast=True)  # after the terminal reporter, which would show the place in our code
    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Show what Ctrl-C interrupted; with --full-trace, pytest shows where."""
        terminal = self._config.pluginmanager.getplugin("terminalreporter")
        crash = getattr(getattr(terminal, "_keyboardinterrupt_memo", None), "reprcrash", None)
        if crash and isinstance(excinfo.value, Interrupted) and not self._config.option.fulltrace:
            crash.message = f"interrupted: {excinfo.value}"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Write the table, the notes and the paths of the records."""
        self.results.write(terminalreporter)

    @pytest.hookimpl(trylast=True)  # after the workers have ended
    def pytest_unconfigure(self, config: pytest.Config) -> None:
        """Write beside the records what the run has written."""
        self.results.end(config)


class StatusLineHooks:
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

"""The state of one pytest run that uses kernels: its session, and the records of its tests."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from pytest_fa.build.late_imports import LateImports
from pytest_fa.host.awaited import Awaited, ShowWait
from pytest_fa.locks import tells_wait, to_stderr
from pytest_fa.plugin.files_before import FilesBefore
from pytest_fa.plugin.keys import OPTIONS_KEY, WORKERS_KEY
from pytest_fa.plugin.status_line import StatusLine
from pytest_fa.records.environment import make_gpu_first
from pytest_fa.records.record import Record
from pytest_fa.records.text import printable
from pytest_fa.session.first_reports import FirstReports
from pytest_fa.session.session import Session

if TYPE_CHECKING:
    from pytest_fa.plugin.terminal import Results

SESSION_KEY: pytest.StashKey[Session] = pytest.StashKey()
RESULTS_KEY: pytest.StashKey[Results] = pytest.StashKey()  # in the process that writes to the terminal
RECORD_KEY: pytest.StashKey[Record] = pytest.StashKey()  # in the stash of a test item
IN_TABLE_KEY: pytest.StashKey[set[str]] = pytest.StashKey()  # node ids of the benchmarks that the table shows
STATUS_LINE_KEY: pytest.StashKey[StatusLine] = pytest.StashKey()  # only in runs that may show it
ALREADY_REPORTED_KEY: pytest.StashKey[bool] = pytest.StashKey()  # of a test that was skipped for another's failure
REFUSED_KEY: pytest.StashKey[bool] = pytest.StashKey()  # of a test that its variant does not support, on any machine
OUTPUT_KEY: pytest.StashKey[str] = pytest.StashKey()  # in the stash of a test item: what its workers printed
FIRST_REPORTS_KEY: pytest.StashKey[FirstReports] = pytest.StashKey()
IMPORTS_KEY: pytest.StashKey[LateImports] = pytest.StashKey()  # once this process is protected from kernels
FILES_KEY: pytest.StashKey[FilesBefore] = pytest.StashKey()  # from the same moment
LOST_KEY: pytest.StashKey[str] = pytest.StashKey()  # the test in which this process lost its device


def session_of(config: pytest.Config) -> Session:
    """The session of this run.  It is created at the first access, so that a wrong option ends a run before it."""
    if SESSION_KEY not in config.stash:
        if hasattr(config, "workerinput"):
            digits = re.search(r"[0-9]+$", config.workerinput["workerid"])
            make_gpu_first(int(digits[0]) if digits else 0)
        config.stash[SESSION_KEY] = Session(config.stash[OPTIONS_KEY], config.stash.get(WORKERS_KEY, None))
    return config.stash[SESSION_KEY]


def first_reports_of(config: pytest.Config) -> FirstReports:
    """The faults that tests of this run have reported, created for the first test that runs a kernel."""
    if FIRST_REPORTS_KEY not in config.stash:
        config.stash[FIRST_REPORTS_KEY] = FirstReports(session_of(config))
    return config.stash[FIRST_REPORTS_KEY]


def live_output(config: pytest.Config) -> Callable[[str], None] | None:
    """With `-s`, a function that writes a worker's output to the terminal; None otherwise and in xdist workers.

    Each line begins with `[worker]`, so that no kernel can print a line that looks like one of pytest's own.
    """
    terminal = config.pluginmanager.getplugin("terminalreporter")
    if config.getoption("capture") != "no" or terminal is None or hasattr(config, "workerinput"):
        return None

    def write(text: str) -> None:
        terminal.ensure_newline()
        for line in text.splitlines():
            terminal.write_line(f"[worker] {line}")

    return write


def status_of_wait(config: pytest.Config) -> ShowWait | None:
    """A function that shows in the status line what a job waits for; None in a run without a status line."""
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is None or STATUS_LINE_KEY not in config.stash:
        return None
    line = config.stash[STATUS_LINE_KEY]

    def show(awaited: Awaited | None) -> None:
        if line.note_wait(awaited):
            with capture.global_and_fixture_disabled():
                line.draw()

    return show


def progress_line(config: pytest.Config) -> Callable[[str], None]:
    """A function that writes a line to the terminal past pytest's capture; silent in xdist workers.

    With -q, it writes only what this process waits for.  Before pytest has its terminal, it writes that to stderr.
    """
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is None or hasattr(config, "workerinput"):
        return lambda _: None

    def say(text: str) -> None:
        terminal = config.pluginmanager.getplugin("terminalreporter")
        if (terminal is None or config.get_verbosity() < 0) and not tells_wait(text):
            return
        line = printable(f"fa: {text}")
        with capture.global_and_fixture_disabled():
            if terminal is None:
                to_stderr(line)
                return
            if STATUS_LINE_KEY in config.stash:
                config.stash[STATUS_LINE_KEY].clear()
            terminal.ensure_newline()
            terminal.write_line(line)
            terminal.flush()  # a log shows a wait while it lasts

    return say

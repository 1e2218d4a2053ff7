"""The record file of one pytest run: what was written to it, what was lost, and whether something else changed it."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from pytest_fa.plugin.state import FILES_KEY, IMPORTS_KEY
from pytest_fa.records.log import RecordLog
from pytest_fa.records.record import Record
from pytest_fa.records.written import WRITTEN_SCHEMA, WrittenRecords, write_written

SUSPECT = "a kernel of this run may have done it"


class RunFile:
    """Appends the records of a run to its file, and notices what became of them.

    `lost` says why a record is not in the file, or not saved.  `changed` says how the file differs from what was
    written, or which file of this package or of what is known of the machine differs from the one with which the run
    began.  `others` are record files of earlier runs that changed meanwhile.
    """

    def __init__(self, artifacts: Path) -> None:
        self._artifacts = artifacts
        self.lost = self.changed = ""
        self.others: list[str] = []
        self._lines: set[str] = set()  # those that were written to the terminal

    @functools.cached_property
    def log(self) -> RecordLog:
        """The file."""
        return RecordLog(self._artifacts)

    @property
    def is_bad(self) -> bool:
        """Whether a record was lost or changed."""
        return bool(self.lost or self.changed)

    def append(self, record: Record) -> None:
        """Append a record, or note why it is lost."""
        try:
            self.log.append(record)
        except OSError as problem:
            self.lost = self._unwritable(problem)

    def _unwritable(self, problem: OSError) -> str:
        """Why the folder cannot be written to, and what to do."""
        reason = problem.strerror or problem
        return f"{self.log.path.parent} cannot be written to: {reason}; make room, or type --fa-artifacts=DIR"

    def compare(self, config: pytest.Config) -> None:
        """Note whether the file is what was written, and whether this package and the machine's files are as before."""
        stash = config.stash
        if self.changed:
            return
        difference = self.log.difference() if "log" in self.__dict__ else ""
        files = stash[IMPORTS_KEY].changed_files() if IMPORTS_KEY in stash else []
        files += stash[FILES_KEY].changed_machine_files() if FILES_KEY in stash else []
        self.others = stash[FILES_KEY].changed_records() if FILES_KEY in stash else []
        if difference:
            self.changed = f"{self.log.path}: {difference}; {SUSPECT}"
        elif files:
            self.changed = f"{files[0]} changed during this run; {SUSPECT}"

    def end(self, config: pytest.Config) -> None:
        """Compare for the last time, when all kernels have ended, and write beside the file what was written.

        What the summary does not name yet gets a line, and the run has failed.
        """
        if "log" not in self.__dict__ or not self.log.count:
            return
        self.compare(config)
        session = config.pluginmanager.getplugin("session")
        if self.changed and session and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        self._write_written(int(session.exitstatus) if session else pytest.ExitCode.INTERNAL_ERROR)
        if terminal := config.pluginmanager.getplugin("terminalreporter"):
            self.write(terminal)

    def _write_written(self, exit_status: int) -> None:
        written = WrittenRecords(WRITTEN_SCHEMA, self.log.sha256, self.log.count, exit_status, self.changed)
        try:
            write_written(self.log.path, written)
        except OSError as problem:
            self.lost = self.lost or self._unwritable(problem)

    def write(self, terminal: pytest.TerminalReporter) -> None:
        """Write why records are not what this run made, each line once."""
        problems = (("lost", self.lost), ("changed", self.changed))
        lines = {f"fa: records were {what}: {text}": "red" for what, text in problems if text}
        lines |= {f"fa: {path} of an earlier run changed during this run": "yellow" for path in self.others}
        for line, colour in lines.items():
            if line not in self._lines:
                terminal.write_line(line, **{colour: True})
                self._lines.add(line)

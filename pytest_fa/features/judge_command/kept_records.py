"""The record file of one run of the judge command, and what a kernel of the run may have changed."""

from __future__ import annotations

from pathlib import Path

from pytest_fa.build.late_imports import EVERYWHERE, keep_package
from pytest_fa.options.options import Options
from pytest_fa.plugin.files_before import FilesBefore
from pytest_fa.plugin.record_file import SUSPECT
from pytest_fa.records.log import RecordLog
from pytest_fa.records.read import why_unreadable
from pytest_fa.records.record import Record
from pytest_fa.records.written import WRITTEN_SCHEMA, WrittenRecords, write_written


class KeptRecords:
    """The records of one run, in memory and in a file.

    From its creation on, which must be before the first kernel, this process imports nothing that changes.
    """

    def __init__(self, options: Options) -> None:
        self._log, self._lost = RecordLog(options.artifacts), ""
        self._imports = keep_package(EVERYWHERE)
        self._files = FilesBefore(options.artifacts, options.records_folder)
        self.records: list[Record] = []

    @property
    def path(self) -> Path | None:
        """The record file; None if nothing was written."""
        return self._log.path if self._log.count else None

    def append(self, record: Record) -> None:
        """Keep a record.  One that the disk does not take is `lost`.  Raises `ValueError` if a figure is impossible."""
        if reason := why_unreadable(record):
            raise ValueError(reason)
        self.records.append(record)
        try:
            self._log.append(record)
        except OSError as problem:
            self._lost = f"{self._log.path.parent} cannot be written to: {problem.strerror or problem}"

    def end(self, exit_status: int) -> str:
        """Write beside the records what was written, and return what is wrong with them; empty if nothing is.

        It is called when all kernels have ended.
        """
        changed = self._changed()
        if self._log.count:
            count, status = self._log.count, 1 if changed or self._lost else exit_status
            try:
                write_written(self._log.path, WrittenRecords(WRITTEN_SCHEMA, self._log.sha256, count, status, changed))
            except OSError as problem:
                folder = self._log.path.parent
                self._lost = self._lost or f"{folder} cannot be written to: {problem.strerror or problem}"
        return f"records were lost: {self._lost}" if self._lost else changed

    def _changed(self) -> str:
        """How the record file differs from what was written, or which other file changed meanwhile."""
        if difference := self._log.difference():
            return f"{self._log.path}: {difference}; {SUSPECT}"
        files = [*self._imports.changed_files(), *self._files.changed_machine_files()]
        return f"{files[0]} changed during this run; {SUSPECT}" if files else ""

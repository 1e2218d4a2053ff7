"""Files that a run reads late or does not write at all: whether they changed while its kernels ran."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

MACHINE_FILES = ("*/noise.json", "*/ceilings.json")  # in the records folder; verdicts and times depend on them
RECORD_FILES = ("*.jsonl", "*.written.json")
_PID_OF_RUN = re.compile(r"^[0-9]{8}T[0-9]{6}Z-([0-9]+)")

_State = tuple[int, int, int]  # inode, size, and the time of the last change, which only root can set


class FilesBefore:
    """The states of files before the first kernel of a run."""

    def __init__(self, artifacts: Path, records_folder: Path) -> None:
        self._earlier, self._records_folder = artifacts / "records", records_folder
        self._machine = _states(records_folder, MACHINE_FILES)
        self._records = _states(self._earlier, RECORD_FILES)

    def changed_machine_files(self) -> list[str]:
        """The files with what is known of this machine that were written, added or removed since."""
        now = _states(self._records_folder, MACHINE_FILES)
        return sorted(path for path in self._machine.keys() | now.keys() if self._machine.get(path) != now.get(path))

    def changed_records(self) -> list[str]:
        """The record files of earlier runs that were written or removed since; runs that go on may write to theirs."""
        now = _states(self._earlier, RECORD_FILES)
        changed = (path for path, state in self._records.items() if now.get(path) != state)
        return sorted(path for path in changed if not _is_running(Path(path).name))


def _states(folder: Path, patterns: Iterable[str]) -> dict[str, _State]:
    states = {}
    for path in (path for pattern in patterns for path in folder.glob(pattern)):
        with contextlib.suppress(OSError):
            state = path.lstat()
            states[str(path)] = (state.st_ino, state.st_size, state.st_ctime_ns)
    return states


def _is_running(name: str) -> bool:
    """Whether the run that writes a file of this name may still go on."""
    match = _PID_OF_RUN.match(name)
    return match is not None and int(match[1]) != os.getpid() and Path(f"/proc/{match[1]}").exists()

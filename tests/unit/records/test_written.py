"""A run knows what it has written to its record file, and a bundle is only made of that."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_fa.errors import UsageProblem
from pytest_fa.records.log import RecordLog
from pytest_fa.records.written import WRITTEN_SCHEMA, WrittenRecords, require_written, write_written, written_path
from tests.factories import record


@pytest.fixture
def log(tmp_path: Path) -> RecordLog:
    """The file of a run that has written three records."""
    log = RecordLog(tmp_path)
    for seed in range(3):
        log.append(record(case=f"b1h2s64d64-fp16-seed{seed}"))
    return log


def seal(log: RecordLog, difference: str = "") -> Path:
    """Write what the run has written beside its file, as pytest's process does at its end."""
    write_written(log.path, WrittenRecords(WRITTEN_SCHEMA, log.sha256, log.count, 1, difference))
    return log.path


def forge_outcome(path: Path) -> None:
    """Change an outcome."""
    path.write_bytes(path.read_bytes().replace(b'"outcome":"ok"', b'"outcome":"no"', 1))


def drop_a_record(path: Path) -> None:
    """Remove the first line."""
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[1:]))


def double_a_record(path: Path) -> None:
    """Repeat the first line."""
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines, lines[0]]))


def replace_by_link(path: Path) -> None:
    """Move the file away, and put a link to it there."""
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


def make_huge(path: Path) -> None:
    """Make a file of 64 MiB, which is not read."""
    os.truncate(path, 2**26)


FORGERIES: dict[Callable[[Path], None], str] = {
    forge_outcome: "line 1 is not the one that was written (3 lines, 3 were written)",
    drop_a_record: "line 1 is not the one that was written (2 lines, 3 were written)",
    double_a_record: "line 4 is not the one that was written (4 lines, 3 were written)",
    Path.unlink: "it cannot be read: No such file or directory",
    replace_by_link: "it cannot be read: Too many levels of symbolic links",
    make_huge: "it has 67108864 bytes, and ",
}


def test_an_unchanged_file_has_no_difference(log: RecordLog) -> None:
    """A file that only its run has written to is what was written; a run without a record has no file to compare."""
    assert log.difference() == ""
    assert RecordLog(log.path.parent / "none").difference() == ""
    assert require_written(seal(log)).count == 3


@pytest.mark.parametrize("forge", FORGERIES, ids=lambda forge: forge.__name__)
def test_a_forged_file_differs(log: RecordLog, forge: Callable[[Path], None]) -> None:
    """Whatever a kernel does to the file of its own run, its end says which line is another one."""
    forge(log.path)
    assert log.difference().startswith(FORGERIES[forge])


@pytest.mark.parametrize("forge", [forge_outcome, drop_a_record, double_a_record], ids=lambda forge: forge.__name__)
def test_a_file_that_was_changed_later_is_refused(log: RecordLog, forge: Callable[[Path], None]) -> None:
    """A kernel of a later run that changes the file does not change the hash of what was written."""
    forge(seal(log))
    with pytest.raises(UsageProblem, match=r"is not what its run wrote: its sha256 is \w{64}, \w{64} was written"):
        require_written(log.path)


def test_a_noticed_change_is_refused(log: RecordLog) -> None:
    """A run that noticed a change is not usable, even if its file is put back."""
    with pytest.raises(UsageProblem, match="was changed while its run's kernels ran: line 2 is another"):
        require_written(seal(log, "line 2 is another"))


def test_what_was_written_must_be_known(log: RecordLog) -> None:
    """A file without what its run wrote, or with another version's, is refused."""
    with pytest.raises(UsageProblem, match=r"there is no \S+\.written\.json beside it"):
        require_written(log.path)
    written_path(log.path).write_text('{"schema": 99, "sha256": "", "count": 3, "exit_status": 0}')
    with pytest.raises(UsageProblem, match="its schema is 99; this version reads schema 1"):
        require_written(log.path)


@pytest.mark.parametrize("trap", ["link", "fifo"])
def test_a_record_is_never_written_elsewhere(tmp_path: Path, trap: str) -> None:
    """A link or a FIFO in the place of the file loses the record instead of writing it elsewhere or waiting."""
    log = RecordLog(tmp_path)
    log.path.parent.mkdir()
    if trap == "link":
        log.path.symlink_to(tmp_path / "elsewhere")
    else:
        os.mkfifo(log.path)
    with pytest.raises(OSError, match="symbolic links" if trap == "link" else "No such device or address"):
        log.append(record())
    assert not (tmp_path / "elsewhere").exists()

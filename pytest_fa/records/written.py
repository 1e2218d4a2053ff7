"""What a run wrote to its record file, by the process that wrote it: the number of records and their sha256.

Pytest's process writes it when all kernels of the run have ended.  Until then the hash is only in its memory, which no
other process of its user can change.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from pytest_fa.errors import UsageProblem
from pytest_fa.records.files import UnreadableRecords, read_content
from pytest_fa.records.ranges import Natural
from pytest_fa.records.text import printable

WRITTEN_SCHEMA = 1


class WrittenRecords(msgspec.Struct, frozen=True):
    """The number and the sha256 of the records that a run wrote, the exit status, and how the file had changed."""

    schema: int
    sha256: str
    count: Natural
    exit_status: int
    difference: str = ""


def written_path(record_file: Path) -> Path:
    """The path of the file beside a record file."""
    return record_file.with_name(f"{record_file.stem}.written.json")


def write_written(record_file: Path, written: WrittenRecords) -> None:
    """Write what a run wrote beside its record file."""
    written_path(record_file).write_bytes(msgspec.json.format(msgspec.json.encode(written)) + b"\n")


def require_written(record_file: Path) -> WrittenRecords:
    """Return what the run of a record file wrote.

    Raises `UsageProblem` if the file is not what its run wrote, or if that is not known.
    """
    name = printable(str(record_file))
    written = read_written_or_none(record_file)
    if written is None:
        path = written_path(record_file)
        reason = "its run was ended before its last line, or an earlier version wrote it"
        raise UsageProblem(f"{name}: there is no {printable(path.name)} beside it: {reason}; repeat the run")
    remedy = "repeat the run, and do not trust its kernels"
    if written.difference:
        raise UsageProblem(f"{name} was changed while its run's kernels ran: {written.difference}; {remedy}")
    if (found := hashlib.sha256(record_file.read_bytes()).hexdigest()) != written.sha256:
        raise UsageProblem(
            f"{name} is not what its run wrote: its sha256 is {found}, {written.sha256} was written; {remedy}"
        )
    return written


def read_written_or_none(record_file: Path) -> WrittenRecords | None:
    """Return what the run of a record file says that it wrote, or None if it says nothing.

    Raises `UsageProblem` if that cannot be read.
    """
    try:
        return read_content(written_path(record_file), _decode, "repeat the run")
    except UnreadableRecords as problem:
        raise UsageProblem(str(problem)) from None


def _decode(content: bytes) -> WrittenRecords:
    written = msgspec.json.decode(content, type=WrittenRecords)
    if written.schema != WRITTEN_SCHEMA:
        raise ValueError(f"its schema is {written.schema}; this version reads schema {WRITTEN_SCHEMA}")
    return written

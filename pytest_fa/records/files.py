"""Read record files line by line.  Lines that are no records are counted and named, whatever they contain.

A file may come from another machine, another version or another author, so nothing in it is trusted: it must be a
regular file, its lines have a maximum length, and each figure must be in its range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar

import msgspec

from pytest_fa.errors import FaError
from pytest_fa.records.compact import Content
from pytest_fa.records.read import EarlierRecord, read_line
from pytest_fa.records.record import Record
from pytest_fa.records.text import is_suspicious, printable, printable_struct
from pytest_fa.regular_file import open_regular

AnyContent = TypeVar("AnyContent", bound=msgspec.Struct)
AnyDecoded = TypeVar("AnyDecoded")

LONGEST_LINE_BYTES = 16 * 2**20
MAX_BAD_LINES = 100_000
LONGEST_PROBLEM = 200  # characters
REMOVE = "remove it"  # said of regular files only


class UnreadableRecords(FaError):
    """A file of records, or a part of it, cannot be read."""


class BadLine(msgspec.Struct, frozen=True):
    """A line that is no record: its number, counted from 1, its place in the file in bytes, and the reason.

    `earlier_key` is the key of a record of an earlier schema; it is empty for other lines.
    """

    number: int
    start: int
    length: int
    problem: str
    earlier_key: tuple[str, ...] = ()


class RecordFile(msgspec.Struct, frozen=True):
    """The content of a record file.

    `problem` says why the file as a whole cannot be read; it is empty if it can.  `remedy` says what to do about it.
    `parts` has what its compact lines share, by name.
    """

    path: Path
    records: tuple[Record, ...] = ()
    bad_lines: tuple[BadLine, ...] = ()
    problem: str = ""
    remedy: str = ""
    parts: dict[str, Content] = {}

    @property
    def complaint(self) -> str:
        """A sentence about what cannot be read and what to do, to follow the file's path; empty if all was read."""
        if self.problem:
            return "; ".join(part for part in (f"it cannot be read: {self.problem}", self.remedy) if part)
        if not self.bad_lines:
            return ""
        first, count = self.bad_lines[0], len(self.records) + len(self.bad_lines)
        summary = f"{len(self.bad_lines)} of {count} lines cannot be read; line {first.number}: {first.problem}"
        if first.earlier_key:
            return summary  # it says what to do
        return f"{summary}; delete such lines, or read them with the version of pytest-fa that wrote them"


def read_record_file(path: Path) -> RecordFile:
    """Return the records of a file and the lines that are no records; neither if there is no such file."""
    try:
        with open_regular(path) as stream:
            file = read_stream(path, stream)
            return msgspec.structs.replace(file, remedy=REMOVE) if file.problem else file
    except (FileNotFoundError, NotADirectoryError):
        return RecordFile(path)
    except (OSError, ValueError) as problem:  # ValueError: the path contains NUL
        return RecordFile(path, problem=_sentence(problem), remedy=_remedy(path))


def read_stream(path: Path, stream: BinaryIO) -> RecordFile:
    """Return the content of an open record file.  All texts are printable."""
    records: list[Record] = []
    bad_lines: list[BadLine] = []
    parts: dict[str, Content] = {}
    for number, start, length, line in _lines(stream):
        record = _decoded(line, lambda line: _printable_record(line, parts))
        if isinstance(record, Record):
            records.append(record)
        elif record is not None and len(bad_lines) < MAX_BAD_LINES:
            bad_lines.append(BadLine(number, start, length, *record))
        elif record is not None:
            return RecordFile(path, problem=f"more than {MAX_BAD_LINES} of its lines are no records")
    return RecordFile(path, tuple(records), tuple(bad_lines), parts=parts)


def read_content(path: Path, decode: Callable[[bytes], AnyContent], remedy: str) -> AnyContent | None:
    """Return what `decode` makes of a file that is one JSON object; None if there is no such file.

    Raises `UnreadableRecords` if the file cannot be read or decoded.  Its sentence ends with `remedy`: what to do.
    """
    try:
        with open_regular(path) as stream:
            content = _decoded(stream.read(LONGEST_LINE_BYTES + 1), decode)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as problem:
        content = Unread(_sentence(problem))
    if isinstance(content, Unread):
        raise UnreadableRecords(f"{printable(str(path))} cannot be read: {content.problem}; {remedy}")
    return printable_struct(content)


def try_to_read(read: Callable[[], AnyContent | None]) -> tuple[AnyContent | None, str]:
    """Return what `read` returns, or None and the reason why the file cannot be read; the reason is empty otherwise."""
    try:
        return read(), ""
    except UnreadableRecords as problem:
        return None, str(problem)


def _remedy(path: Path) -> str:
    """What to do about a file that cannot be opened: a folder or a device may be needed by others."""
    try:
        return REMOVE if path.is_file() else "give the path of a regular file"
    except (OSError, ValueError):
        return ""


def _lines(stream: BinaryIO) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield the number, the start, the length and the bytes of each line that is not empty.

    Of a line that is too long, the bytes are cut off after the first one that is too many.
    """
    number = start = 0
    while line := stream.readline(LONGEST_LINE_BYTES + 1):
        length, part = len(line), line
        while not part.endswith(b"\n") and (part := stream.readline(LONGEST_LINE_BYTES)):
            length += len(part)
        number += 1
        if line.strip():
            yield number, start, length, line
        start += length


class Unread(NamedTuple):
    """Why data cannot be decoded, and the key of the record if it has an earlier schema."""

    problem: str
    earlier_key: tuple[str, ...] = ()


def _decoded(data: bytes, decode: Callable[[bytes], AnyDecoded]) -> AnyDecoded | Unread:
    """Return what `decode` makes of `data`, or the reason why it cannot be decoded."""
    if len(data) > LONGEST_LINE_BYTES:
        return Unread(f"it is longer than {LONGEST_LINE_BYTES // 2**20} MiB")
    try:
        data.decode()
        return decode(data)
    except UnicodeDecodeError as problem:
        return Unread(f"byte {problem.start} is not UTF-8")
    except RecursionError:
        return Unread("its JSON is nested too deeply")
    except EarlierRecord as problem:
        return Unread(_sentence(problem), record_key(problem.content))
    except ValueError as problem:
        return Unread(_sentence(problem))


def record_key(content: Mapping[str, object]) -> tuple[str, ...]:
    """Return the key of a record: a new record replaces a saved one that has the same.

    Without a case, the id is only the variant's name; the rerun command adds what was asked.
    """
    fields = ("kind", "id", "rerun_command") if content.get("case", "") is None else ("kind", "id")
    return tuple(str(content.get(field)) for field in fields)


def _printable_record(line: bytes, parts: dict[str, Content]) -> Record | None:
    record = read_line(line, parts)
    return printable_struct(record) if record is not None and is_suspicious(line) else record


def _sentence(problem: Exception) -> str:
    """Return the message of an exception in one line of limited length."""
    text = getattr(problem, "strerror", None) or str(problem)
    line = " ".join(printable(text).split())
    return line if len(line) <= LONGEST_PROBLEM else f"{line[:LONGEST_PROBLEM]}..."

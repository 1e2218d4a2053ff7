"""Write and read records, one JSON line each; a run that is killed loses none that it has written."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from typing import BinaryIO

from pytest_fa.records.compact import compact_lines, part_line, part_names
from pytest_fa.records.environment import gpu_folder
from pytest_fa.records.files import (
    LONGEST_LINE_BYTES,
    UnreadableRecords,
    read_record_file,
    read_stream,
    record_key,
)
from pytest_fa.records.record import Record, to_json
from pytest_fa.records.standing import Rank, rank_of, results_to_keep
from pytest_fa.records.text import printable
from pytest_fa.regular_file import open_regular


class RecordLog:
    """The record file of one run, `<folder>/records/<UTC time>-<pid>.jsonl`; the first record creates it.

    Kernels run as the user who owns the file, so they can change it.  This process keeps the hashes of the lines that
    it has written.
    """

    def __init__(self, folder: Path) -> None:
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        self.path = folder / "records" / f"{stamp}-{os.getpid()}.jsonl"
        self._line_hashes: list[bytes] = []
        self._hash = hashlib.sha256()
        self._size_bytes = 0

    @property
    def count(self) -> int:
        """The number of records that were written."""
        return len(self._line_hashes)

    @property
    def sha256(self) -> str:
        """The sha256 of what was written, whatever the file contains now."""
        return self._hash.hexdigest()

    def append(self, record: Record) -> None:
        """Append one line and close the file, so that the line survives a kill of this process.

        If the disk is full, half a line is removed again, and the `OSError` is raised.  A link or a FIFO in the place
        of the file is an `OSError`, too.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = to_json(record) + b"\n"
        with open(self.path, "ab", buffering=0, opener=_open_to_append) as stream:
            size, rest = stream.seek(0, os.SEEK_END), line
            try:
                while rest:
                    rest = rest[stream.write(rest) :]
            except OSError:
                stream.truncate(size)
                raise
        self._line_hashes.append(hashlib.sha256(line).digest())
        self._hash.update(line)
        self._size_bytes += len(line)

    def difference(self) -> str:
        """Return how the file differs from what was written; empty if it does not, or if nothing was written."""
        if not self._line_hashes:
            return ""
        try:
            with open_regular(self.path, follow=False) as stream:
                size = os.fstat(stream.fileno()).st_size
                if size > self._size_bytes + LONGEST_LINE_BYTES:
                    return f"it has {size} bytes, and {self._size_bytes} were written"
                lines = [hashlib.sha256(line).digest() for line in stream]
        except OSError as problem:
            return f"it cannot be read: {problem.strerror}"
        pairs = enumerate(zip_longest(self._line_hashes, lines), 1)
        number = next((number for number, (written, found) in pairs if written != found), 0)
        counts = f"{len(lines)} lines, {self.count} were written"
        return f"line {number} is not the one that was written ({counts})" if number else ""


def _open_to_append(path: str, flags: int) -> int:
    """Open a file without following a link and without waiting for a FIFO's reader."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def replace_records(path: Path, records: list[Record]) -> None:
    """Write a file with these records only.  A reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _replacing(path) as stream:
        stream.writelines(to_json(record) + b"\n" for record in records)


def remove_records(path: Path, is_kept: Callable[[Record], bool]) -> tuple[int, int]:
    """Remove the records of a file of `save_records` that are not kept; return how many these are, and of how many.

    Lines that are no records stay unchanged.  A file of which nothing is left is removed.  Other processes that save in
    the folder wait.

    Raises `UnreadableRecords` for a file that cannot be read, which stays as it is.
    """
    with _locked(path.parent):
        file = read_record_file(path)
        if file.problem:
            raise UnreadableRecords(f"{path}: {file.complaint}")
        kept = [record for record in file.records if is_kept(record)]
        if len(kept) < len(file.records):
            with _replacing(path) as stream:
                _copy_bad_lines(path, stream, ())
                stream.writelines(compact_lines(kept))
            if not path.stat().st_size:
                path.unlink()
    return len(file.records) - len(kept), len(file.records)


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that replaces the old one at the end, so that a kill does not damage the old one."""
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        with scratch.open("wb") as stream:
            yield stream
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def save_records(records: list[Record], folder: Path, root: Path | None = None) -> list[Path]:
    """Save records in `<folder>/<gpu>/<variant>.jsonl`, with paths relative to `root`; return the files written.

    An answer replaces all saved results of the same kind and id, also those of an earlier schema; without a case, the
    rerun command must be equal as well.  A failure is saved beside the newest answer, and replaces an earlier failure;
    `standing.Rank` has the order.  All other lines stay, and those that are no records of this version
    stay unchanged.  The lines are compact: what records share is written once.  The new file is written next to the old
    one and renamed, so that a kill does not damage the old file.  Other processes that save in the folder wait.

    Raises `UnreadableRecords` for a file that cannot be read, which is not written.
    """
    files: dict[Path, list[Record]] = {}
    for record in records:
        files.setdefault(saved_path(folder, record), []).append(record)
    for path, new_records in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent), _replacing(path) as stream:
            _write_saved(stream, path, new_records, root)
    return list(files)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes from saving in a folder, so that nothing is lost that two of them save at the same time.

    Where the file system has no locks, nothing keeps them apart.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that was forked meanwhile would hold it on
        os.close(descriptor)


def _write_saved(stream: BinaryIO, path: Path, new_records: list[Record], root: Path | None) -> None:
    """Write the unreadable lines of the old file, its records that are not replaced, and the new records."""
    answered = {_key(record) for record in new_records if rank_of(record) is Rank.ANSWER}
    saved = _copy_bad_lines(path, stream, answered)
    kept = results_to_keep([*saved, *new_records], _key)
    records = sorted(kept, key=lambda record: (_key(record), rank_of(record)))
    stream.writelines(compact_lines(records, lambda record: _without_local_paths(to_json(record), root)))


def _copy_bad_lines(path: Path, target: BinaryIO, replaced: Collection[tuple[str, ...]]) -> tuple[Record, ...]:
    """Copy the lines that are no records of this version to `target`, and return the records of the other lines.

    A line of an earlier schema is not copied if its key is one of `replaced`.
    """
    try:
        source = open_regular(path)
    except FileNotFoundError:
        return ()
    with source:
        file = read_stream(path, source)
        if file.problem:
            raise UnreadableRecords(f"{path}: {file.complaint}")
        for line in file.bad_lines:
            if line.earlier_key not in replaced:
                source.seek(line.start)
                names = part_names(source.read(min(line.length, LONGEST_LINE_BYTES)))
                target.writelines(part_line(name, file.parts[name]) for name in names if name in file.parts)
                source.seek(line.start)
                _copy_line(source, line.length, target)
    return file.records


def _copy_line(source: BinaryIO, length: int, target: BinaryIO) -> None:
    """Copy one line in parts, with a newline at its end."""
    last = b""
    while length and (part := source.read(min(length, LONGEST_LINE_BYTES))):
        target.write(part)
        length, last = length - len(part), part
    target.write(b"" if last.endswith(b"\n") else b"\n")


def _key(record: Record) -> tuple[str, ...]:
    return record_key(
        {"kind": record.kind, "id": record.id, "case": record.case, "rerun_command": record.rerun_command}
    )


def _without_local_paths(line: bytes, root: Path | None) -> bytes:
    """Remove the run's folder and the interpreter's folder from a line."""
    line = re.sub(rb'"/[^"]*/bin/python[0-9.]*"', b'"python"', line)
    return line.replace(f"{root}/".encode(), b"") if root else line


def saved_path(folder: Path, record: Record) -> Path:
    """Return the file in which a record is saved, by its GPU and variant."""
    return folder / gpu_folder(record.environment.gpu) / saved_name(record.variant)


def saved_name(variant: str) -> str:
    """Return the name of a variant's saved file, the same for every GPU."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", variant) + ".jsonl"


def read_records(path: Path) -> list[Record]:
    """Return the records of a file, each with its builds' kernels; an empty list if there is no such file.

    Raises `UnreadableRecords` if a line cannot be read.  `read_record_file` returns the readable lines of such a file.
    """
    file = read_record_file(path)
    if file.complaint:
        raise UnreadableRecords(f"{printable(str(path))}: {file.complaint}")
    return list(file.records)

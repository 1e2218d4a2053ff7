"""Read one side of a comparison: a record file, a folder of them, a bundle, or a git revision."""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from pytest_fa.errors import UsageProblem
from pytest_fa.records.files import RecordFile, read_record_file, read_stream
from pytest_fa.records.record import Record
from pytest_fa.records.standing import HiddenTime, standing_results
from pytest_fa.records.text import printable
from pytest_fa.regular_file import open_regular

GIT_FOLDER = "profiles"  # of a revision without a path
GIT_SECONDS = 60
COMMIT_DIGITS = 12
LARGEST_ARCHIVE_BYTES = 2**30  # unpacked
MAX_MEMBERS = 100_000
PART_BYTES = 2**20
UNREADABLE = (OSError, ValueError, EOFError, zlib.error, tarfile.TarError, subprocess.SubprocessError)
FORMS = "a .jsonl file, a folder that contains such files, a bundle (.tar.gz), or a git revision such as HEAD~50"


class Side(msgspec.Struct, frozen=True):
    """The results of one side that stand, and the times that do not count.

    `complaints` has a line for each file that cannot be fully read.
    """

    name: str
    records: tuple[Record, ...]
    complaints: tuple[str, ...] = ()
    hidden: tuple[HiddenTime, ...] = ()


def read_side(word: str, folder: Path) -> Side:
    """Return the results that `word` names: a path, or a git revision of the repository in `folder`.

    Raises `UsageProblem` if there is no such thing, or if it has no records.
    """
    read = _read(word, folder, is_mailed=False)
    return _standing(read.name, read.records, read.complaints)


def read_sides(words: Sequence[str], folder: Path) -> Side:
    """Return the results that stand of all words together, as one side that is mailed.

    Its name and its complaints have no folder outside of `folder`.  Raises `UsageProblem` as `read_side` does.
    """
    parts = [_read(word, folder, is_mailed=True) for word in words]
    records = [record for part in parts for record in part.records]
    complaints = tuple(complaint for part in parts for complaint in part.complaints)
    return _standing(", ".join(part.name for part in parts), records, complaints)


def _standing(name: str, records: Sequence[Record], complaints: tuple[str, ...]) -> Side:
    standing = standing_results(records)
    return Side(name, standing.records, complaints, standing.hidden)


class _Read(NamedTuple):
    """All records that a word names, and the complaints about their files."""

    name: str
    records: list[Record]
    complaints: tuple[str, ...]


def _read(word: str, folder: Path, *, is_mailed: bool) -> _Read:
    path = folder / word
    try:
        name, files = (word, _files_of_path(path)) if path.exists() else _files_of_revision(word, folder)
    except UNREADABLE as problem:
        raise UsageProblem(printable(f"{word!r} cannot be read: {problem}")) from None
    bases = (folder, Path(os.path.normpath(path)).parent) if is_mailed else (folder,)
    records = [record for file in files for record in file.records]
    complaints = tuple(printable(f"{_shown(file.path, bases)}: {file.complaint}") for file in files if file.complaint)
    if not records:
        reason = f"; {complaints[0]}" if complaints else ""
        raise UsageProblem(printable(f"{word!r} has no records{reason}; give {FORMS}"))
    return _Read(printable(_shown(folder / name, bases) if is_mailed else name), records, complaints)


def _shown(path: Path, bases: Sequence[Path]) -> str:
    """The path relative to the first of the folders that contains it; unchanged if none does."""
    plain = Path(os.path.normpath(path))
    return next((str(plain.relative_to(base)) for base in bases if plain.is_relative_to(base)), str(path))


def _files_of_path(path: Path) -> list[RecordFile]:
    if path.is_dir():
        return [read_record_file(file) for file in sorted(path.rglob("*.jsonl"))]
    if path.name.endswith((".tar.gz", ".tgz")):
        return _files_of_bundle(path)
    return [read_record_file(path)]


def _files_of_bundle(path: Path) -> list[RecordFile]:
    """Read the run's record files of an archive in memory; nothing is unpacked.

    The archive is read to its end, because gzip compares its checksum there.
    """
    with open_regular(path) as raw, gzip.GzipFile(fileobj=raw) as unzipped:
        with tarfile.open(fileobj=unzipped, mode="r|") as archive:
            files = list(_files_of_members(archive))
        while unzipped.read(PART_BYTES):
            _require_size(unzipped.tell())
    return files


def _files_of_members(archive: tarfile.TarFile) -> Iterator[RecordFile]:
    for number, member in enumerate(archive):
        _require_size(member.offset_data + member.size, number)
        is_of_run = "/artifacts/" in member.name and member.name.endswith(".jsonl")
        if member.isreg() and is_of_run and (stream := archive.extractfile(member)):
            yield read_stream(Path(member.name), io.BytesIO(stream.read()))


def _require_size(unpacked_bytes: int, members: int = 0) -> None:
    if members >= MAX_MEMBERS or unpacked_bytes > LARGEST_ARCHIVE_BYTES:
        raise ValueError(f"it has more than {MAX_MEMBERS} members or {LARGEST_ARCHIVE_BYTES} bytes")


def _files_of_revision(word: str, folder: Path) -> tuple[str, list[RecordFile]]:
    """Read the record files below `profiles/` of `REVISION`, or below PATH of `REVISION:PATH`.

    Return the word with the commit that it stands for, and the files.
    """
    revision, _, path = word.partition(":")
    output = _git(folder, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if output is None:
        raise UsageProblem(printable(f"{word!r} is neither a file nor a revision here; give {FORMS}"))
    commit = output.decode().strip()
    listed = _git(folder, "ls-tree", "-r", "-z", "--full-tree", "--name-only", commit, "--", path or GIT_FOLDER)
    names = [name for name in (listed or b"").decode().split("\0") if name.endswith(".jsonl")]
    files = []
    for name in names:
        content = _git(folder, "cat-file", "blob", f"{commit}:{name}")
        if content is not None:
            files.append(read_stream(Path(f"{revision}:{name}"), io.BytesIO(content)))
    return word if commit.startswith(revision) else f"{word} ({commit[:COMMIT_DIGITS]})", files


def _git(folder: Path, *words: str) -> bytes | None:
    """Return what a git command prints, or None if it fails."""
    run = subprocess.run(  # noqa: S603
        ["git", *words],  # noqa: S607
        cwd=folder,
        capture_output=True,
        check=False,
        timeout=GIT_SECONDS,
    )
    return run.stdout if run.returncode == 0 else None

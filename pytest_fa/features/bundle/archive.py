"""Read an archive that a stranger made: every member is checked, and nothing is unpacked or executed.

An archive is unusable if it could write outside its folder, would unpack to too much, or could be read in two ways.
"""

from __future__ import annotations

import gzip
import hashlib
import tarfile
import unicodedata
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import msgspec

from pytest_fa.errors import FaError
from pytest_fa.records.text import printable
from pytest_fa.regular_file import open_regular

LARGEST_ARCHIVE_BYTES = 2 * 2**30  # unpacked
LARGEST_KEPT_BYTES = 256 * 2**20  # of a file whose content is returned
MAX_MEMBERS = 20_000
LONGEST_NAME = 400  # characters
PART_BYTES = 2**20


class UnusableArchive(FaError):
    """An archive that is not read any further, with the reason."""


class ArchivedFile(msgspec.Struct, frozen=True):
    """One regular file of an archive.  `name` is relative to the archive's single top folder.

    `content` is None if it was not asked for.
    """

    name: str
    sha256: str
    git_blob: str  # the id that git gives to this content
    is_executable: bool
    content: bytes | None = None


class Archive(msgspec.Struct, frozen=True):
    """The files of an archive by name, and the name of its top folder."""

    top: str
    files: dict[str, ArchivedFile]


def read_archive(
    path: Path, wants: Callable[[str], bool], keep: Callable[[str, bytes, bool], None] | None = None
) -> Archive:
    """Return the hashes of all files, and the contents of those whose names `wants` accepts.

    `keep` is called with the name, the content and the executable bit of every file, in the order of the archive.
    Raises `UnusableArchive` with the member and the reason.
    """
    try:
        with open_regular(path) as raw, gzip.GzipFile(fileobj=raw) as unzipped:
            limited = _Limited(unzipped)
            options: dict[str, Any] = {"fileobj": limited, "mode": "r|", "bufsize": tarfile.BLOCKSIZE}
            with tarfile.open(**options) as tar:  # it reads no block past the one that ends the archive
                archive = _read_members(tar, wants, keep)
            _require_no_rest(limited)
            return archive
    except ValueError as problem:
        raise UnusableArchive(printable(f"{path.name}: a header cannot be read: {problem}")) from None
    except (OSError, EOFError, zlib.error, tarfile.TarError, RecursionError) as problem:
        raise UnusableArchive(printable(f"{path.name} cannot be read as an archive: {problem}")) from None


class _Limited:
    """A stream that ends with an error after `LARGEST_ARCHIVE_BYTES`: a small file must not unpack without end."""

    def __init__(self, stream: gzip.GzipFile) -> None:
        self._stream, self._bytes = stream, 0
        self.last = b""  # what was read last

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._bytes += len(data)
        if self._bytes > LARGEST_ARCHIVE_BYTES:
            raise UnusableArchive(f"it unpacks to more than {LARGEST_ARCHIVE_BYTES} bytes")
        self.last = data
        return data


def _read_members(
    tar: tarfile.TarFile, wants: Callable[[str], bool], keep: Callable[[str, bytes, bool], None] | None
) -> Archive:
    tops: set[str] = set()
    files: dict[str, ArchivedFile] = {}
    spellings: dict[str, str] = {}  # names and their folders as a file system without case sees them
    for number, member in enumerate(tar):
        if number >= MAX_MEMBERS:
            raise UnusableArchive(f"it has more than {MAX_MEMBERS} members")
        _require_plain(member)
        top, *parts = PurePosixPath(member.name).parts
        name = "/".join(parts)
        tops.add(top)
        if len(tops) > 1 or not parts:
            raise UnusableArchive(f"{member.name!r} is not in the archive's one top folder")
        _require_one_spelling(name, files, spellings)
        stream = tar.extractfile(member)
        assert stream is not None  # noqa: S101  # a regular file has content
        files[name] = _read_file(name, member, stream, wants, keep)  # type: ignore[arg-type]
    return Archive(next(iter(tops), ""), files)


def _require_plain(member: tarfile.TarInfo) -> None:
    """Require a regular file with a relative name that no file system reads in another way."""
    name = member.name
    parts = name.split("/")
    if not member.isreg() or member.issparse():
        raise UnusableArchive(f"{name!r} is not a regular file; links, folders and devices are not accepted")
    if len(name) > LONGEST_NAME or not name.isprintable() or "\\" in name or ":" in name:
        raise UnusableArchive(f"{name[:LONGEST_NAME]!r} is not a portable name")
    if any(part in ("", ".", "..") or part != part.strip() or part.endswith(".") for part in parts):
        raise UnusableArchive(f"{name!r} leads elsewhere, or is spelled in a way that can lead elsewhere")
    if parts[1:2] == [".git"] or any(part.casefold() == ".git" for part in parts):
        raise UnusableArchive(f"{name!r} is a part of a git repository")


def _require_one_spelling(name: str, files: dict[str, ArchivedFile], spellings: dict[str, str]) -> None:
    """Require that no two names are equal, differ only in case or in Unicode form, or are file and folder at once."""
    path = PurePosixPath(name)
    for part in (path, *list(path.parents)[:-1]):
        key = unicodedata.normalize("NFKC", str(part)).casefold()
        other = spellings.setdefault(key, str(part))
        if (
            other != str(part)
            or (part != path and str(part) in files)
            or (part == path and (name in files or _is_folder(name, files)))
        ):
            raise UnusableArchive(f"{name!r} and {other!r} are in the archive, and would be written to the same place")


def _is_folder(name: str, files: dict[str, ArchivedFile]) -> bool:
    return any(other.startswith(f"{name}/") for other in files)


def _read_file(
    name: str,
    member: tarfile.TarInfo,
    stream: BinaryIO,
    wants: Callable[[str], bool],
    keep: Callable[[str, bytes, bool], None] | None,
) -> ArchivedFile:
    sha256, blob = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % member.size, usedforsecurity=False)
    is_wanted = wants(name) or keep is not None
    if is_wanted and member.size > LARGEST_KEPT_BYTES:
        raise UnusableArchive(f"{name!r} has {member.size} bytes; at most {LARGEST_KEPT_BYTES} are read")
    content = bytearray()
    while part := stream.read(PART_BYTES):
        sha256.update(part)
        blob.update(part)
        if is_wanted:
            content += part
    is_executable = bool(member.mode & 0o100)
    if keep is not None:
        keep(name, bytes(content), is_executable)
    return ArchivedFile(
        name, sha256.hexdigest(), blob.hexdigest(), is_executable, bytes(content) if wants(name) else None
    )


def _require_no_rest(stream: _Limited) -> None:
    """Require that only zeros follow the last member: what a reader of archives skips could hide another archive.

    The block that ended the archive counts: a reader may take a header that it cannot read for the end.
    """
    part = stream.last
    while part:
        if part.strip(b"\0"):
            raise UnusableArchive("data follow the end of the archive")
        part = stream.read(PART_BYTES)

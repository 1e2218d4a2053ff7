"""Archives that a stranger made: each hostile one is refused with a sentence, before anything is unpacked."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_fa.features.bundle import archive as archive_module
from pytest_fa.features.bundle.archive import UnusableArchive, read_archive

Member = tuple[tarfile.TarInfo, bytes]


def _member(name: str, content: bytes = b"x", **changes: object) -> Member:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for attribute, value in changes.items():
        setattr(info, attribute, value)
    return info, content


def _tar(*members: Member) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def _link(name: str, kind: bytes, target: str) -> Member:
    return _member(name, b"", type=kind, linkname=target)


GOOD = (_member("top/a.txt", b"one"), _member("top/folder/b.txt", b"two", mode=0o755))

NAMES = {
    "/etc/passwd": "leads elsewhere",
    "top/../../x": "leads elsewhere",
    "../x": "leads elsewhere",
    "top/./x": "leads elsewhere",
    "top//x": "leads elsewhere",
    "top/x ": "leads elsewhere",
    "top/x.": "leads elsewhere",
    "top/ /x": "leads elsewhere",
    "top\\x": "not a portable name",
    "C:/x": "not a portable name",
    "top/a\x1b[31mb": "not a portable name",
    "top/a\nb": "not a portable name",
    "top/\u202egpj.exe": "not a portable name",
    "top/" + "a" * 500: "not a portable name",
    "top/.git/hooks/pre-commit": "a part of a git repository",
    "top/folder/.GIT/config": "a part of a git repository",
    "other/x": "not in the archive's one top folder",
    "top": "not in the archive's one top folder",
    "top/a.txt": "would be written to the same place",
    "top/A.TXT": "would be written to the same place",
    "top/a.txt/inside": "would be written to the same place",
    "top/folder": "would be written to the same place",
    "top/FOLDER/c.txt": "would be written to the same place",
    "top/\ufb01le and \N{LATIN SMALL LETTER SHARP S}": "",
}
KINDS = {
    "a symbolic link": _link("top/link", tarfile.SYMTYPE, "/etc/passwd"),
    "a symbolic link inside": _link("top/link", tarfile.SYMTYPE, "a.txt"),
    "a hard link": _link("top/link", tarfile.LNKTYPE, "top/a.txt"),
    "a FIFO": _link("top/fifo", tarfile.FIFOTYPE, ""),
    "a character device": _link("top/null", tarfile.CHRTYPE, ""),
    "a block device": _link("top/disk", tarfile.BLKTYPE, ""),
    "a folder": _link("top/empty", tarfile.DIRTYPE, ""),
}


def _hidden(ending: bytes) -> Callable[[bytes], bytes]:
    """Put a member behind what ends an archive, before the end of its last record of 20 blocks."""

    def change(data: bytes) -> bytes:
        members = gzip.decompress(data).rstrip(b"\0")
        members += bytes(-len(members) % tarfile.BLOCKSIZE)
        evil = _tar(_member("top/evil.py", b"evil"))[: 2 * tarfile.BLOCKSIZE]
        changed = members + ending + evil
        assert len(changed) < tarfile.RECORDSIZE
        return gzip.compress(changed + bytes(tarfile.RECORDSIZE - len(changed)))

    return change


# Each with a part of the sentence that refuses it.
BROKEN: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "truncated": ("ended before the end-of-stream marker", lambda data: data[: len(data) // 2]),
    "no end": ("ended before the end-of-stream marker", lambda data: data[:-12]),
    "a flipped bit": ("cannot be read as an archive: ", lambda data: data[:40] + bytes([data[40] ^ 8]) + data[41:]),
    "data after the archive": ("Not a gzipped file", lambda data: data + b"garbage"),
    "a second archive": ("data follow the end", lambda data: data + gzip.compress(_tar(_member("top/evil")))),
    "a member after a block of zeros": ("data follow the end", _hidden(bytes(tarfile.BLOCKSIZE))),
    "a member after the end": ("data follow the end", _hidden(bytes(2 * tarfile.BLOCKSIZE))),
    "a member after an unreadable header": ("data follow the end", _hidden(b"\1" * tarfile.BLOCKSIZE)),
    "a sparse file without a size": (
        "a header cannot be read",
        lambda _: gzip.compress(_tar(_member("top/x", pax_headers={"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}))),
    ),
    "not compressed": ("Not a gzipped file", gzip.decompress),
    "empty": ("cannot be read as an archive: ", lambda _: b""),
    "random bytes": ("Not a gzipped file", lambda _: bytes(range(256)) * 8),
}


def _write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def _read(path: Path) -> list[str]:
    return sorted(read_archive(path, lambda _: True).files)


def test_a_good_archive(tmp_path: Path) -> None:
    """Names are relative to the top folder; each file has its sha256, git's blob id, mode, and wanted content."""
    path = _write(tmp_path / "x.tar.gz", gzip.compress(_tar(*GOOD)))
    archive = read_archive(path, lambda name: name == "a.txt")
    assert (archive.top, sorted(archive.files)) == ("top", ["a.txt", "folder/b.txt"])
    first, second = archive.files["a.txt"], archive.files["folder/b.txt"]
    assert first.sha256 == "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"
    assert first.git_blob == "43dd47ea691c90a5fa7827892c70241913351963"
    assert (first.content, first.is_executable) == (b"one", False)
    assert (second.content, second.is_executable) == (None, True)


@pytest.mark.parametrize("name", NAMES)
def test_names(tmp_path: Path, name: str) -> None:
    """A name that leads elsewhere, or that a file system could take for another one, makes the archive unusable."""
    path = _write(tmp_path / "x.tar.gz", gzip.compress(_tar(*GOOD, _member(name))))
    if not NAMES[name]:
        assert len(_read(path)) == 3
        return
    with pytest.raises(UnusableArchive, match=NAMES[name]):
        _read(path)


@pytest.mark.parametrize("kind", KINDS)
def test_kinds(tmp_path: Path, kind: str) -> None:
    """Only regular files are accepted."""
    path = _write(tmp_path / "x.tar.gz", gzip.compress(_tar(*GOOD, KINDS[kind])))
    with pytest.raises(UnusableArchive, match="is not a regular file"):
        _read(path)


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_archives(tmp_path: Path, kind: str) -> None:
    """An archive that is cut off, damaged, or followed by other data is unusable."""
    sentence, change = BROKEN[kind]
    path = _write(tmp_path / "x.tar.gz", change(gzip.compress(_tar(*GOOD))))
    with pytest.raises(UnusableArchive, match=sentence):
        _read(path)


def test_a_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive that unpacks to too much is refused when the limit is reached, not after it was read."""
    monkeypatch.setattr(archive_module, "LARGEST_ARCHIVE_BYTES", 10**6)
    path = _write(tmp_path / "x.tar.gz", gzip.compress(_tar(_member("top/zeros", b"\0" * 10**7))))
    assert path.stat().st_size < 20_000
    with pytest.raises(UnusableArchive, match="it unpacks to more than 1000000 bytes"):
        _read(path)


def test_too_many_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of members is limited."""
    monkeypatch.setattr(archive_module, "MAX_MEMBERS", 1)
    with pytest.raises(UnusableArchive, match="it has more than 1 members"):
        _read(_write(tmp_path / "x.tar.gz", gzip.compress(_tar(*GOOD))))


def test_a_large_wanted_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file whose content is needed must fit in memory."""
    monkeypatch.setattr(archive_module, "LARGEST_KEPT_BYTES", 2)
    with pytest.raises(UnusableArchive, match=r"'a.txt' has 3 bytes; at most 2 are read"):
        _read(_write(tmp_path / "x.tar.gz", gzip.compress(_tar(*GOOD))))


def test_a_fifo_instead_of_an_archive(tmp_path: Path) -> None:
    """A path that is no regular file is refused without waiting."""
    os.mkfifo(tmp_path / "x.tar.gz")
    with pytest.raises(UnusableArchive, match="it is a FIFO"):
        _read(tmp_path / "x.tar.gz")

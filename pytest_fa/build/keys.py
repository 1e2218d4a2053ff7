"""The parts of cache keys: canonical digests and file hashes, and constants that all kinds of builds share."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import Any

import msgspec

import pytest_fa

KEY_SCHEMA = 3
HEADER_SUFFIXES = frozenset({".h", ".hh", ".hpp", ".hxx", ".cuh", ".inc", ".inl", ".ipp", ".tpp"})
PACKAGE = Path(pytest_fa.__file__).parent

Dependency = tuple[str, str]  # path, sha256


def digest(value: Any) -> str:  # noqa: ANN401  # any value that msgspec can encode as JSON
    """Return the first 16 hexadecimal digits of the sha256 of a value's canonical JSON."""
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()[:16]


_hashes: dict[tuple[str, int, int, int, int], str] = {}


def file_hash(path: str) -> str | None:
    """Return the sha256 of a regular file, or None if it cannot be read.

    Hashes are cached by inode, size, mtime and ctime, so an edited file is hashed again.  A store through a memory
    mapping may change none of them for seconds: `content_hash` reads the file each time.
    """
    try:
        state = os.stat(path)  # noqa: PTH116  # called 600 times in a warm start
        if not stat.S_ISREG(state.st_mode):
            return None
        key = (path, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
        if key not in _hashes:
            _hashes[key] = _read_hash(path)
    except OSError:
        return None
    return _hashes[key]


def content_hash(path: str) -> str | None:
    """Return the sha256 of a regular file as it is now, or None if it cannot be read."""
    try:
        return _read_hash(path) if stat.S_ISREG(os.stat(path).st_mode) else None  # noqa: PTH116  # as above
    except OSError:
        return None


def _read_hash(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()

"""What keys are made of: canonical digests, hashes of files, and the names that every recipe shares."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import msgspec

import pytest_fa

KEY_SCHEMA = 1
HEADER_SUFFIXES = frozenset({".h", ".hh", ".hpp", ".hxx", ".cuh", ".inc", ".inl", ".ipp", ".tpp"})
PACKAGE = Path(pytest_fa.__file__).parent

Dependency = tuple[str, str]  # path, sha256


def digest(value: Any) -> str:  # noqa: ANN401  # anything JSON-able
    """The first 16 hexadecimal digits of a canonical sha256."""
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()[:16]


_hashes: dict[tuple[str, int, int, int, int], str] = {}


def file_hash(path: str) -> str | None:
    """sha256 of a file, or None where there is none; remembered by inode, size, mtime and ctime, so an edit is seen."""
    try:
        state = os.stat(path)  # noqa: PTH116  # 600 of them in a warm start
        key = (path, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
        if key not in _hashes:
            _hashes[key] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return None
    return _hashes[key]

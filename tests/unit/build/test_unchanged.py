"""A library is loaded only if it and the files beside it are those that were built."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_fa.build.unchanged import require_unchanged
from pytest_fa.errors import ChangedBuild

LIBRARY, NAME = b"\x7fELF a library" * 1000, b"fa_mine_0123"
HASHES = {name: hashlib.sha256(data).hexdigest() for name, data in (("kernel.so", LIBRARY), ("module.txt", NAME))}


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """The library of a build of two files."""
    (tmp_path / "module.txt").write_bytes(NAME)
    path = tmp_path / "kernel.so"
    path.write_bytes(LIBRARY)
    return path


def test_what_was_built_may_be_loaded(library: Path) -> None:
    """There is no error for unchanged files, nor for a variant that is not built."""
    require_unchanged(str(library), HASHES)
    require_unchanged(None, {})


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("kernel.so", lambda path: path.write_bytes(b"another library"), "has changed since it was built"),
        ("kernel.so", lambda path: path.write_bytes(LIBRARY[:-1]), "has changed since it was built"),
        ("kernel.so", lambda path: path.write_bytes(b"\x7eELF" + LIBRARY[4:]), "has changed since it was built"),
        ("kernel.so", Path.unlink, "cannot be read"),
        ("module.txt", lambda path: path.write_bytes(b"fa_mine_4567"), "has changed since it was built"),
        ("module.txt", Path.unlink, "cannot be read"),
    ],
    ids=["swapped", "truncated", "one bit", "missing", "another companion", "no companion"],
)
def test_a_changed_file_is_not_loaded(library: Path, name: str, change: Callable[[Path], object], said: str) -> None:
    """The error names the file and what is wrong with it, also if it was unchanged a moment ago."""
    require_unchanged(str(library), HASHES)
    change(library.with_name(name))
    with pytest.raises(ChangedBuild) as raised:
        require_unchanged(str(library), HASHES)
    assert str(raised.value).startswith(f"{library.with_name(name)} {said}")
    assert "it was not loaded" in str(raised.value)


def test_both_hashes_are_named(library: Path) -> None:
    """The error begins both hashes: that of the file, and that of the build."""
    library.write_bytes(b"another library")
    actual = hashlib.sha256(b"another library").hexdigest()
    with pytest.raises(ChangedBuild, match=rf"its sha256 is {actual[:16]}\.\.\., .*build {HASHES['kernel.so'][:16]}"):
        require_unchanged(str(library), HASHES)

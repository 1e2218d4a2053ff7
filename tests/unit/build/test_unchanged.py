"""A library is loaded only if it and the files beside it are those that were built."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pytest_fa.build import unchanged
from pytest_fa.build.unchanged import FilesOfJob, require_unchanged
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import ChangedBuild
from tests.factories import variant

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


def test_a_change_through_a_memory_mapping_is_seen(library: Path) -> None:
    """Such a store may leave the file's times as they are.  The library is therefore read each time."""
    with library.open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as mapping:
        mapping[0] = LIBRARY[0]  # from here on, the page is writable, and a store into it is not noticed
        require_unchanged(str(library), HASHES)
        files = FilesOfJob({str(library): HASHES}, ())
        mapping[0] = LIBRARY[0] ^ 1
        with pytest.raises(ChangedBuild):
            require_unchanged(str(library), HASHES)
        with pytest.raises(ChangedBuild):
            files.require_unchanged()


# -- while a variant runs ---------------------------------------------------------------------------------------------


@pytest.fixture
def python_variant(tmp_path: Path) -> Variant:
    """A variant of kind `python` in a folder with a manifest, two modules and a file that is not code."""
    folder = tmp_path / "mine"
    (folder / "parts").mkdir(parents=True)
    for name in ("variant.yaml", "entry.py", "parts/tile.py", "choices.json"):
        (folder / name).write_text("before", encoding="utf-8")
    return msgspec.structs.replace(variant("mine", kind="python"), folder=str(folder))


@pytest.mark.parametrize(
    "name", ["kernel.so", "module.txt", "mine/entry.py", "mine/parts/tile.py", "mine/variant.yaml"]
)
@pytest.mark.parametrize("change", [lambda path: path.write_text("after", encoding="utf-8"), Path.unlink])
def test_a_file_that_changes_while_a_variant_runs_is_named(
    library: Path, python_variant: Variant, name: str, change: Callable[[Path], object]
) -> None:
    """The build's files and the code of a Python variant are compared once more; the error names the file."""
    files = FilesOfJob({str(library): HASHES}, (python_variant,))
    files.require_unchanged()
    path = library.parent / name
    change(path)
    with pytest.raises(ChangedBuild, match="changed while the variant ran") as raised:
        files.require_unchanged()
    assert str(raised.value).startswith(str(path))


def test_other_files_of_a_folder_may_change(library: Path, python_variant: Variant) -> None:
    """A variant may write files that are not code, such as what it chose in its first call."""
    files = FilesOfJob({str(library): HASHES, None: {}}, (python_variant,))
    (Path(python_variant.folder) / "choices.json").write_text("after", encoding="utf-8")
    (Path(python_variant.folder) / "new.py").write_text("after", encoding="utf-8")
    files.require_unchanged()


def test_files_of_the_package_are_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A variant that changes pytest-fa itself is named, too."""
    assert str(Path(unchanged.__file__)) in unchanged._package_files()
    (tmp_path / "judge.py").write_text("before", encoding="utf-8")
    monkeypatch.setattr(unchanged, "_package_files", lambda: (str(tmp_path / "judge.py"),))
    monkeypatch.setattr(unchanged, "_hashes_of_package", unchanged._hashes_of_package.__wrapped__)
    files = FilesOfJob({}, ())
    (tmp_path / "judge.py").write_text("after!", encoding="utf-8")
    with pytest.raises(ChangedBuild, match=r"judge\.py changed while the variant ran; run it again"):
        files.require_unchanged()

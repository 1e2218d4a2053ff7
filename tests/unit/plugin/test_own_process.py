"""What pytest's own process imports after the first kernel is what was there before it."""

from __future__ import annotations

import importlib
import os
import py_compile
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from importlib.util import cache_from_source
from pathlib import Path

import pytest

from pytest_fa.build.late_imports import (
    PACKAGE,
    LateImports,
    forget_package,
    installed_folders,
    refuse_changed_modules,
)

CLOCK_STEP_SECONDS = 0.02  # more than the resolution of a file's time


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An importable package `judged_fa` with one module, beside a module `other_fa`."""
    folder = tmp_path / "judged_fa"
    (folder / "inner").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "inner" / "__init__.py").write_text("")
    (folder / "inner" / "late.py").write_text("VALUE = 'right'\n")
    (tmp_path / "other_fa.py").write_text("VALUE = 'right'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    time.sleep(CLOCK_STEP_SECONDS)
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] in ("judged_fa", "other_fa")]:
        del sys.modules[name]


@pytest.fixture
def imports(package: Path, monkeypatch: pytest.MonkeyPatch) -> LateImports:
    """The finder of a process whose first kernel is about to run; `other_fa` is an installed module."""
    imports = LateImports(package, (f"{package.parent}{os.sep}",))
    monkeypatch.setattr(sys, "meta_path", [imports, *sys.meta_path])
    time.sleep(CLOCK_STEP_SECONDS)
    return imports


def test_a_later_run_reads_the_package_anew(package: Path) -> None:
    """After a run, the finder is gone, and the next run of the process keeps what is there then."""
    imports = LateImports(package)
    sys.meta_path.insert(0, imports)
    forget_package(imports)
    assert imports not in sys.meta_path
    (package / "inner" / "late.py").write_text("VALUE = 'newer'\n")
    spec = LateImports(package).find_spec("judged_fa.inner.late")
    assert spec is not None
    assert isinstance(spec.loader, SourceFileLoader)
    assert b"newer" in spec.loader.get_data(str(package / "inner" / "late.py"))


@pytest.mark.usefixtures("imports")
def test_a_module_of_the_package_is_the_one_of_before(package: Path) -> None:
    """A kernel that rewrites a module of the package which is imported later changes nothing."""
    (package / "inner" / "late.py").write_text("VALUE = 'forged'\n")
    assert importlib.import_module("judged_fa.inner.late").VALUE == "right"


@pytest.mark.usefixtures("imports")
def test_bytecode_of_the_package_is_not_read(package: Path) -> None:
    """Bytecode that a kernel puts beside a module of the package is not loaded."""
    forge_bytecode(package / "inner" / "late.py")
    assert importlib.import_module("judged_fa.inner.late").VALUE == "right"


@pytest.mark.usefixtures("imports")
def test_a_changed_installed_module_is_refused(package: Path) -> None:
    """A module of another package that is newer than the first kernel is not imported, and the error names it."""
    (package.parent / "other_fa.py").write_text("VALUE = 'forged'\n")
    with pytest.raises(ImportError, match=r"other_fa\.py has changed since the first kernel"):
        importlib.import_module("other_fa")


@pytest.mark.usefixtures("imports")
def test_newer_bytecode_of_an_installed_module_is_not_read(package: Path) -> None:
    """An unchanged module whose bytecode is newer than the first kernel is compiled anew."""
    forge_bytecode(package.parent / "other_fa.py")
    assert importlib.import_module("other_fa").VALUE == "right"


def test_without_the_finder_both_attacks_work(package: Path) -> None:
    """The two tests above would see the forged values without the finder."""
    forge_bytecode(package / "inner" / "late.py")
    (package.parent / "other_fa.py").write_text("VALUE = 'forged'\n")
    importlib.invalidate_caches()
    assert importlib.import_module("judged_fa.inner.late").VALUE == "forge"
    assert importlib.import_module("other_fa").VALUE == "forged"


def forge_bytecode(source: Path) -> None:
    """Write bytecode beside a source that fits its time and size, but has another value."""
    state, forged = source.stat(), source.with_suffix(".forged")
    forged.write_text(source.read_text().replace("right", "forge"))
    os.utime(forged, ns=(state.st_atime_ns, state.st_mtime_ns))
    py_compile.compile(str(forged), cfile=cache_from_source(str(source)), dfile=str(source))
    forged.unlink()


def test_unchanged_modules_are_imported(imports: LateImports) -> None:
    """Modules that did not change are found, and no file is reported."""
    assert importlib.import_module("judged_fa.inner.late").VALUE == importlib.import_module("other_fa").VALUE == "right"
    assert imports.changed_files() == []


def test_a_judge_refuses_what_a_candidate_may_import(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without folders, other packages are imported as usual; a judge, which is forked later, refuses changed ones."""
    imports = LateImports(package)
    monkeypatch.setattr(sys, "meta_path", [imports, *sys.meta_path])
    time.sleep(CLOCK_STEP_SECONDS)
    (package.parent / "other_fa.py").write_text("VALUE = 'changed'\n")
    assert importlib.import_module("other_fa").VALUE == "changed"
    del sys.modules["other_fa"]
    refuse_changed_modules()
    with pytest.raises(ImportError, match=r"other_fa\.py has changed since the first kernel"):
        importlib.import_module("other_fa")


def test_changed_files_of_the_package_are_named(imports: LateImports, package: Path) -> None:
    """A file of the package that was rewritten, added or removed is named; one with a new time only is not.

    An added file that is no code, such as one of an editor, is not named either.
    """
    (package / ".late.py.swp").write_text("")
    (package / "inner" / "late.py").write_text("VALUE = 'forged'\n")
    (package / "added.py").write_text("")
    (package / "__init__.py").touch()
    (package / "inner" / "__init__.py").unlink()
    expected = [package / "added.py", package / "inner" / "__init__.py", package / "inner" / "late.py"]
    assert [str(path) for path in expected] == imports.changed_files()


def test_this_package_is_kept_in_memory() -> None:
    """Every module of this package comes from memory, and the folders of installed packages are known."""
    imports = LateImports()
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(("pytest_fa", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
        spec = imports.find_spec(name)
        assert spec is not None, name
        assert isinstance(spec.loader, SourceFileLoader)
        assert spec.loader.get_data(str(path)) == path.read_bytes()
        assert type(spec.loader).__name__ == "_FromMemory"
    assert any(folder in f"{Path(pytest.__file__).parent}/" for folder in installed_folders())


def test_a_protected_process_is_not_dumpable() -> None:
    """`forbid_attaching` takes the flag away by which the kernel lets processes of the user attach and open files."""
    get_flag = "import ctypes; print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))"
    programs = (get_flag, f"from pytest_fa.processes import forbid_attaching; forbid_attaching(); {get_flag}")
    assert ["1", "0"] == [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
        for program in programs
    ]

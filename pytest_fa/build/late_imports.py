"""Finds the modules that a process imports after the first kernel of a run: they are those of before.

Kernels run as the user who owns the files of installed packages.  Of this package, the content is kept in memory.  Of
other packages, a module whose file has changed meanwhile can be refused.
"""

from __future__ import annotations

import functools
import os
import stat
import sys
import sysconfig
import time
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import cache_from_source, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import ModuleType

PACKAGE = Path(__file__).parents[1]
EVERYWHERE = (os.sep,)
CODE_SUFFIXES = (".py", ".so", ".cu", ".cpp", ".h", ".yaml")  # an added file of another kind may be an editor's
_INSTALLED = ("stdlib", "platstdlib", "purelib", "platlib")


def installed_folders() -> tuple[str, ...]:
    """The folders of the standard library and of installed packages."""
    return tuple({f"{path}{os.sep}" for name in _INSTALLED if (path := sysconfig.get_path(name))})


def keep_package(folders: Sequence[str] = ()) -> LateImports:
    """Let this process and its forks import this package from memory from now on."""
    imports = LateImports(folders=folders)
    sys.meta_path.insert(0, imports)
    return imports


def forget_package(imports: LateImports) -> None:
    """Undo `keep_package`, so that a later run of this process reads the package anew."""
    sys.meta_path.remove(imports)
    _contents_of.cache_clear()


def refuse_changed_modules() -> None:
    """In a fork of a process that called `keep_package`: also refuse all other modules that changed since."""
    for finder in sys.meta_path:
        if isinstance(finder, LateImports):
            finder.folders = EVERYWHERE


class LateImports(MetaPathFinder):
    """Finds the modules that this process imports from now on.

    Those of `package` come from memory.  A module of another file below `folders` is refused if that file is newer than
    this object.  The time of a file's last change (`ctime`) is the kernel's; only root can set it.
    """

    def __init__(self, package: Path = PACKAGE, folders: Sequence[str] = ()) -> None:
        self.folders, self._start_ns = tuple(folders), time.time_ns()
        self._name, self._root = package.name, package.parent
        self._contents = _contents_of(package)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where a module is, or None to let other finders look.  Raises `ImportError` for a newer file."""
        if fullname.partition(".")[0] == self._name:
            return self._kept(fullname)
        if not self.folders:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or not spec.has_location or not str(spec.origin).startswith(self.folders):
            return None
        if self._is_newer(str(spec.origin)):
            raise ImportError(
                f"{spec.origin} has changed since the first kernel of this run; {fullname} is not imported"
            )
        is_source = type(spec.loader) is SourceFileLoader
        if is_source and self._is_newer(cache_from_source(str(spec.origin))):
            spec.loader = _WithoutCache(fullname, str(spec.origin))
            return spec
        return None

    def changed_files(self) -> list[str]:
        """The files of the package whose content has changed since."""
        files = {str(path): path for path in _files_of(self._root / self._name)}
        newer = (name for name in self._contents.keys() & files.keys() if self._is_newer(name))
        differing = {name for name in newer if files[name].read_bytes() != self._contents[name]}
        added = {name for name in files.keys() - self._contents.keys() if name.endswith(CODE_SUFFIXES)}
        return sorted(differing | added | (self._contents.keys() - files.keys()))

    def _kept(self, fullname: str) -> ModuleSpec | None:
        base = self._root.joinpath(*fullname.split("."))
        for path, places in ((base / "__init__.py", [str(base)]), (base.with_suffix(".py"), None)):
            if str(path) in self._contents:
                loader = _FromMemory(fullname, str(path), self._contents)
                return spec_from_file_location(fullname, path, loader=loader, submodule_search_locations=places)
        return None

    def _is_newer(self, path: str) -> bool:
        try:
            state = os.stat(path)  # noqa: PTH116  # a name, once for each import
        except OSError:
            return False
        return state.st_ctime_ns > self._start_ns or not stat.S_ISREG(state.st_mode)


class _WithoutCache(SourceFileLoader):
    """Compiles a source anew, because its cached bytecode is newer than the first kernel."""

    def path_stats(self, path: str) -> Mapping[str, float]:
        """Say that there is no cache."""
        raise OSError(path)


class _FromMemory(SourceFileLoader):
    """Compiles a module from the contents of files that are kept in memory."""

    def __init__(self, fullname: str, path: str, contents: Mapping[str, bytes]) -> None:
        super().__init__(fullname, path)
        self._contents = contents

    def get_data(self, path: str) -> bytes:
        """Return the content of a file."""
        if path not in self._contents:
            raise OSError(path)
        return self._contents[path]

    def path_stats(self, path: str) -> Mapping[str, float]:
        """Say that there is no cache: the time of the source, to which its bytecode belongs, is not kept."""
        raise OSError(path)


@functools.cache
def _contents_of(package: Path) -> dict[str, bytes]:
    """The content of each file of a package by its path, as it was at the first call in this process."""
    return {str(path): path.read_bytes() for path in _files_of(package)}


def _files_of(package: Path) -> Iterator[Path]:
    """The files of a package that are not made while it runs."""
    for folder, folders, names in os.walk(package):
        folders[:] = [name for name in folders if name != "__pycache__"]
        yield from (Path(folder, name) for name in names)

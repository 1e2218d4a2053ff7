"""Protects pytest's own process, which decides, from the kernels of its run.  They run as the same user.

Other processes of the user can then neither attach to it nor open its files.  Modules that it imports after the first
kernel are those of before: of this package, the content is kept in memory; of other installed packages, a module that
has changed meanwhile is refused.
"""

from __future__ import annotations

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

from pytest_fa.plugin.files_before import FilesBefore
from pytest_fa.plugin.state import FILES_KEY, IMPORTS_KEY, OPTIONS_KEY, RECEIVER

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import ModuleType

    import pytest

PACKAGE = Path(__file__).parents[1]
_INSTALLED = ("stdlib", "platstdlib", "purelib", "platlib")


def protect_process(config: pytest.Config) -> None:
    """Protect this process, before the first kernel runs.  Later calls change nothing."""
    if IMPORTS_KEY in config.stash:
        return
    from pytest_fa.processes import forbid_attaching  # noqa: PLC0415  # only runs with kernels need it

    forbid_attaching()
    everywhere = config.pluginmanager.hasplugin(RECEIVER)  # the judge command runs no tests that write modules
    config.stash[IMPORTS_KEY] = imports = LateImports(PACKAGE, (os.sep,) if everywhere else installed_folders())
    sys.meta_path.insert(0, imports)
    options = config.stash[OPTIONS_KEY]
    config.stash[FILES_KEY] = FilesBefore(options.artifacts, options.records_folder)


def release_imports(config: pytest.Config) -> None:
    """Let this process import as usual again, when all kernels have ended.  The judge command ends soon."""
    if IMPORTS_KEY in config.stash and not config.pluginmanager.hasplugin(RECEIVER):
        sys.meta_path.remove(config.stash[IMPORTS_KEY])


def installed_folders() -> tuple[str, ...]:
    """The folders of the standard library and of installed packages."""
    return tuple({f"{path}{os.sep}" for name in _INSTALLED if (path := sysconfig.get_path(name))})


class LateImports(MetaPathFinder):
    """Finds the modules that this process imports from now on.

    Those of `package` come from memory.  A module of another file below `folders` is refused if that file is newer than
    this object.  The time of a file's last change (`ctime`) is the kernel's; only root can set it.
    """

    def __init__(self, package: Path, folders: Sequence[str]) -> None:
        self._folders, self._start_ns = tuple(folders), time.time_ns()
        self._name, self._root = package.name, package.parent
        self._contents = {str(path): path.read_bytes() for path in _files_of(package)}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where a module is, or None to let other finders look.  Raises `ImportError` for a newer file."""
        if fullname.partition(".")[0] == self._name:
            return self._kept(fullname)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or not spec.has_location or not str(spec.origin).startswith(self._folders):
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
        return sorted(differing | (self._contents.keys() ^ files.keys()))

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
    """Loads a module from the contents of files, with its bytecode if that was kept, too."""

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


def _files_of(package: Path) -> Iterator[Path]:
    """The files of a package that are not made while it runs."""
    for folder, folders, names in os.walk(package):
        folders[:] = [name for name in folders if name != "__pycache__"]
        yield from (Path(folder, name) for name in names)

"""Whether the files of a build, of a variant and of this package are still those that they were.  No torch."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from pytest_fa.build.keys import PACKAGE, content_hash, file_hash
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import ChangedBuild

MAX_FILES = 1000  # of a variant's folder
SOURCE_SUFFIXES = (".py", ".so", ".yaml")

SHOWN_DIGITS = 16


def change_of(path: Path, sha256: str) -> str:
    """Return how a file differs from the one whose hash was recorded, with both hashes; empty if it does not."""
    actual = content_hash(str(path))
    if actual == sha256:
        return ""
    if actual is None:
        return "cannot be read"
    return (
        f"has changed since it was built: its sha256 is {actual[:SHOWN_DIGITS]}..., "
        f"that of the build {sha256[:SHOWN_DIGITS]}..."
    )


def require_unchanged(library: str | None, file_hashes: Mapping[str, str]) -> None:
    """Raise `ChangedBuild` unless every file of a build has its recorded sha256.

    The judge, or the process of a profiler, calls it immediately before the library is loaded.  `file_hashes` has the
    names of the library and of the files beside it; it is empty for a variant that is not built.
    """
    for name, sha256 in file_hashes.items():
        path = Path(library or "").with_name(name)
        if change := change_of(path, sha256):
            raise ChangedBuild(f"{path} {change}; it was not loaded. The next run compiles it again")


class FilesOfJob:
    """The files that a job depends on: of its builds, its Python variants and this package.

    Those of the package must be as they were before the first job of this process, the others as before this job.  A
    variant runs as the user who owns these files.  It could change what the next process loads.  Libraries are read
    each time; the hundreds of other files only if their times or sizes have changed.
    """

    def __init__(self, builds: Mapping[str | None, Mapping[str, str]], variants: tuple[Variant, ...]) -> None:
        self._builds = builds  # by library, as `require_unchanged` needs them
        sources = [path for variant in variants if variant.entry.kind == "python" for path in _sources_of(variant)]
        self._before = _hashes_of_package() | {path: file_hash(path) for path in sources}

    def require_unchanged(self) -> None:
        """Raise `ChangedBuild` if one of the files has changed since."""
        for path, sha256 in self._before.items():
            if file_hash(path) != sha256:
                raise ChangedBuild(f"{path} changed while the variant ran; run it again, in a new process")
        for library, file_hashes in self._builds.items():
            for name, sha256 in file_hashes.items():
                path = str(Path(library or "").with_name(name))
                if content_hash(path) != sha256:
                    raise ChangedBuild(f"{path} changed while the variant ran. The next run compiles it again")


def source_hashes(variant: Variant, root: Path) -> dict[str, str]:
    """Return the sha256 of the files of a Python variant by their paths from `root`; nothing for other variants.

    The variants of this package have none: its version is that of the records.
    """
    if variant.entry.kind != "python" or Path(variant.folder).is_relative_to(PACKAGE):
        return {}
    return {os.path.relpath(path, root): file_hash(path) or "" for path in _sources_of(variant)}


def _sources_of(variant: Variant) -> Iterator[str]:
    """The modules, libraries and manifests in a variant's folder, at most `MAX_FILES`."""
    paths = (path for path in Path(variant.folder).rglob("*") if path.suffix in SOURCE_SUFFIXES)
    yield from sorted(str(path) for path, _ in zip(paths, range(MAX_FILES), strict=False))


def hash_package() -> None:
    """Hash this package's files now.  Processes that are forked from this one then need not read them."""
    for path in _files_of_package():
        file_hash(path)


def changed_package_file() -> str:
    """Return a file of this package that is no longer what it was at the first call; empty if there is none."""
    before = _hashes_of_package()
    return next((path for path, sha256 in before.items() if file_hash(path) != sha256), "")


@functools.cache
def _hashes_of_package() -> dict[str, str | None]:
    return {path: file_hash(path) for path in _package_files()}


@functools.cache
def _package_files() -> tuple[str, ...]:
    """The files of this package that are not made while it runs."""
    return tuple(sorted(_files_of_package()))


def _files_of_package() -> Iterator[str]:
    for folder, folders, names in os.walk(PACKAGE):
        folders[:] = [name for name in folders if name != "__pycache__"]
        yield from (f"{folder}/{name}" for name in names)

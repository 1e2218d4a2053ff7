"""The files on which the selected variants depend, and their content.

For a build, these are the sources and headers that the compiler has read, and those that it looked for in vain, as the
build cache knows them.  Where nothing was compiled, they are the files in the folders that a manifest names.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from pytest_fa.build.cache import sources_of
from pytest_fa.build.keys import HEADER_SUFFIXES, file_hash
from pytest_fa.build.unchanged import MAX_FILES, SOURCE_SUFFIXES
from pytest_fa.catalog.manifest import MANIFEST_NAME, PLANTED_NAME
from pytest_fa.catalog.plan import AnyVariant
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import FaError
from pytest_fa.records.built import Build
from pytest_fa.session.session import Session

Hashes = dict[str, str | None]  # by path; None for a file that is not there
Contents = dict[str, Hashes]  # by variant; the manifests themselves by MANIFESTS

MANIFESTS = ""
MAX_LOOKS = 20
BETWEEN_LOOKS_SECONDS = 0.05
COMPILED_SUFFIXES = frozenset({".cu", ".cpp", ".cc", ".cxx", ".c", *HEADER_SUFFIXES, *SOURCE_SUFFIXES})
# Files that editors write beside the one that is edited, such as `.kernel.cu.swp`, `kernel.cu~` and `4913`.
_SCRATCH = re.compile(r"^[.#]|[~#]$|^\d+$")


class FilesOfVariant(msgspec.Struct, frozen=True):
    """Files by path, and folders in which every file with one of the suffixes counts."""

    files: tuple[str, ...]
    folders: tuple[str, ...] = ()
    suffixes: frozenset[str] = frozenset()

    def paths(self) -> Iterator[str]:
        """The files, and those that the folders have now, at most 1000 of each."""
        yield from self.files
        for folder in self.folders:
            inside = (path for path in Path(folder).rglob("*") if path.suffix in self.suffixes and not is_scratch(path))
            yield from sorted(str(path) for path in itertools.islice(inside, MAX_FILES))


class WatchedFiles(msgspec.Struct, frozen=True):
    """The files of each variant.  Below `roots`, a new manifest counts, and a new content of those in `broken`."""

    roots: tuple[str, ...]
    broken: tuple[str, ...]
    variants: dict[str, FilesOfVariant]

    def contents(self) -> Contents:
        """The files that are there now, with the hash of each.

        A folder may vanish while it is listed, so the files are looked at again.  Raises `FaError` if that never helps.
        """
        for _ in range(MAX_LOOKS):
            try:
                return self._contents()
            except OSError as error:
                problem = error
                time.sleep(BETWEEN_LOOKS_SECONDS)
        raise FaError(f"--fa-watch: the files of the variants cannot be listed: {problem}")

    def _contents(self) -> Contents:
        names = (MANIFEST_NAME, PLANTED_NAME)
        manifests = {str(path): "" for root in self.roots for name in names for path in Path(root).glob(f"*/{name}")}
        broken = {path: file_hash(path) for path in self.broken}
        own = {name: {path: _hash(path) for path in each.paths()} for name, each in self.variants.items()}
        return {MANIFESTS: {**manifests, **broken}, **own}

    def places(self) -> tuple[str, ...]:
        """The folders that must be watched, each with all folders below it."""
        parents = {str(Path(path).parent) for each in self.variants.values() for path in each.files}
        folders = {folder for each in self.variants.values() for folder in each.folders}
        present = {Path(place).resolve() for place in (*self.roots, *parents, *folders) if Path(place).is_dir()}
        return tuple(sorted(str(place) for place in present if present.isdisjoint(place.parents)))


def _hash(path: str) -> str | None:
    """The hash of a file; empty for a folder, in which the compiler may find a file that it looked for."""
    sha256 = file_hash(path)
    return "" if sha256 is None and Path(path).is_dir() else sha256


def is_scratch(path: Path) -> bool:
    """Whether a file is an editor's own, or one that Python has compiled."""
    return bool(_SCRATCH.search(path.name)) or "__pycache__" in path.parts


def all_files(session: Session, watched: Iterable[AnyVariant]) -> WatchedFiles:
    """Every file in the folders of these variants, before anything was built."""
    return _watched(session, watched, _in_folders)


def files_of(session: Session, watched: Iterable[AnyVariant], earlier: WatchedFiles) -> WatchedFiles:
    """The files of these variants after their builds.  A variant without a build keeps its earlier ones."""

    def files(variant: Variant) -> FilesOfVariant:
        if variant.name in session.builds.needed:
            return _of_build(session, variant)
        return earlier.variants.get(variant.name) or _in_folders(variant)

    return _watched(session, watched, files)


def compiled_hashes(session: Session) -> Hashes:
    """The hashes of the sources and headers from which the builds of this run were compiled."""
    cache, hashes = session.options.cache, Hashes()
    for variant in session.builds.needed.values():
        for build in builds_of(session, variant):
            hashes.update(sources_of(cache, variant, build))
    return hashes


def with_known(contents: Contents, known: Mapping[str, str | None]) -> Contents:
    """The contents with other hashes for files whose content at an earlier time is known."""
    return {
        name: hashes if name == MANIFESTS else {path: known.get(path, sha256) for path, sha256 in hashes.items()}
        for name, hashes in contents.items()
    }


def flat(contents: Contents) -> Hashes:
    """The hashes of all variants' files by path."""
    return {path: sha256 for name, hashes in contents.items() if name != MANIFESTS for path, sha256 in hashes.items()}


def changed_paths(before: Contents, after: Contents) -> list[str]:
    """The files whose content is not the same, that are new, or that are gone."""
    names = (*before, *after)
    pairs = [(before.get(name, {}), after.get(name, {})) for name in dict.fromkeys(names)]
    return sorted({path for old, new in pairs for path in {*old, *new} if old.get(path, 0) != new.get(path, 0)})


def builds_of(session: Session, variant: Variant) -> list[Build]:
    """The successful builds of a variant in this run."""
    outcomes = session.builds.report.outcomes
    return [each for (name, _), each in outcomes.items() if name == variant.name and isinstance(each, Build)]


def _watched(
    session: Session, watched: Iterable[AnyVariant], files: Callable[[Variant], FilesOfVariant]
) -> WatchedFiles:
    variants, problems = dict[str, FilesOfVariant](), set[str]()
    for variant in watched:
        if isinstance(variant, Variant):
            variants[variant.name] = files(variant)
        else:
            problems.add(variant.problem)
    paths = tuple(path for path, broken in session.run_plan.catalog.broken.items() if broken.problem in problems)
    return WatchedFiles(tuple(str(root) for root in session.options.kernels), paths, variants)


def _manifests(variant: Variant) -> tuple[str, ...]:
    """The files that declare the variants of a folder, and what they are compared with.

    A variant may move from one manifest to the other.
    """
    paths = (Path(variant.folder, name) for name in (MANIFEST_NAME, PLANTED_NAME))
    truths = variant.own_truth.files if variant.own_truth else ()
    return (*(str(path) for path in paths if path.name == MANIFEST_NAME or path.is_file()), *truths)


def _in_folders(variant: Variant) -> FilesOfVariant:
    """The files in the folders that the manifest names; of a Python entry, those that a job depends on."""
    includes = (str((Path(variant.folder) / each).resolve()) for each in variant.entry.include)
    suffixes = COMPILED_SUFFIXES if variant.is_built else frozenset(SOURCE_SUFFIXES)
    return FilesOfVariant(_manifests(variant), (variant.folder, *includes), suffixes)


def _of_build(session: Session, variant: Variant) -> FilesOfVariant:
    """The sources and headers of a variant's builds; if a build failed, a file in any of its folders may mend it."""
    if not variant.is_built:
        return _in_folders(variant)
    outcomes = [each for (name, _), each in session.builds.report.outcomes.items() if name == variant.name]
    sources = {
        path for build in builds_of(session, variant) for path in sources_of(session.options.cache, variant, build)
    }
    files = tuple(dict.fromkeys((*_manifests(variant), *sorted(sources))))
    if outcomes and sources and all(isinstance(each, Build) for each in outcomes):
        return FilesOfVariant(files)
    in_folders = _in_folders(variant)
    return FilesOfVariant(files, in_folders.folders, in_folders.suffixes)

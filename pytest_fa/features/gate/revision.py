"""`--fa-gate-baseline=git:REV`: the same variant, from the sources of another commit, as the baseline of a gate.

revision -> commit -> tree of the kernels folder -> sources in the cache -> variant -> the same code, or a baseline

Today's harness builds, judges and times both sides.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from pytest_fa.build.cache import files_of, sources_of
from pytest_fa.build.machine_code import host_code
from pytest_fa.build.outcomes import BuildFailure
from pytest_fa.build.unchanged import source_hashes
from pytest_fa.catalog.discover import discover
from pytest_fa.catalog.manifest import MANIFEST_NAME, PLANTED_NAME
from pytest_fa.catalog.select import select_variants
from pytest_fa.catalog.variant import BrokenVariant, Variant
from pytest_fa.errors import UnknownVariant, UsageProblem
from pytest_fa.features.gate.extracted import ExtractedTree, content_ids, extract, paths_in
from pytest_fa.features.gate.gated import SHORT_DIGITS, CodeOfRevision, GatedRevision
from pytest_fa.features.gate.pilot import NoVerdict
from pytest_fa.features.gate.python_imports import import_from, is_installed
from pytest_fa.features.gate.repository import Repository, blob_id
from pytest_fa.records.built import Build
from pytest_fa.records.text import printable
from pytest_fa.session.builds import Builds
from pytest_fa.session.refusals import CannotRun

GIT = "git:"  # how a baseline begins that is a revision
OPTION = "--fa-gate-baseline"


class Revision(NamedTuple):
    """A commit, and its kernels folder in the cache.  `word` is the revision as it was typed."""

    word: str
    commit: str
    tree: str
    repository: Repository
    extracted: ExtractedTree

    @property
    def shown(self) -> str:
        """The revision as it was typed, with the beginning of its commit's id."""
        short = self.commit[:SHORT_DIGITS]
        return self.word if self.word.startswith(short) else f"{self.word} ({short})"

    @property
    def limits(self) -> str:
        """What of the commit is not there, for a variant that lacks a file."""
        left_out = "".join(f"; {text}" for text in self.extracted.left_out[:3])
        return f"only {self.repository.shown_prefix} of the commit is taken{left_out}"


class VariantAtRevision(NamedTuple):
    """A variant from the sources of a revision, under the name `VARIANT@COMMIT`."""

    variant: Variant
    revision: Revision


def variants_at(variants: list[Variant], word: str, cache: Path) -> dict[str, VariantAtRevision]:
    """Each of these variants as it is at a revision, by name.  Raises `UsageProblem`, which names option and revision.

    `word` is what stands behind `git:`.
    """
    try:
        revisions: dict[str, Revision] = {}
        for variant in variants:
            if variant.root not in revisions:
                revisions[variant.root] = _revision(Path(variant.root), word, cache)
        return {
            each.name: VariantAtRevision(_variant(each, revisions[each.root]), revisions[each.root])
            for each in variants
        }
    except UsageProblem as problem:
        raise UsageProblem(printable(f"{OPTION}={GIT}{word}: {problem}")) from None


def compared(variant: Variant, at: VariantAtRevision, builds: Builds, cache: Path) -> GatedRevision:
    """What a gate against a revision records: the commit, uncommitted changes, and the code if both sides have one.

    Raises `NoVerdict` if the revision's variant does not build, or was built from files of today's.
    """
    ours, theirs = builds.build_for_this_machine(variant), _build(at, builds)
    if theirs and (foreign := _foreign_file(at, theirs, cache)):
        reason = f"{at.variant.name} was built with {foreign}, which is not of {at.revision.shown}"
        raise NoVerdict(f"{reason}; {at.revision.limits}")
    code: CodeOfRevision | None = None
    if isinstance(ours, Build) and theirs:
        code = same_machine_code(ours, theirs, cache)
    elif ours is None and theirs is None:
        code = _same_sources(variant, at.revision)
    uncommitted = _uncommitted(variant, ours if isinstance(ours, Build) else None, at.revision, cache)
    return GatedRevision(at.revision.word, at.revision.commit, at.revision.tree, uncommitted, code)


def _build(at: VariantAtRevision, builds: Builds) -> Build | None:
    """The build of the revision's variant; None if it is not compiled.  Raises `NoVerdict` if it cannot be."""
    try:
        build = builds.build_for_this_machine(at.variant)
    except CannotRun as reason:
        raise NoVerdict(str(reason)) from None
    if isinstance(build, BuildFailure):
        raise NoVerdict(f"build of {at.variant.name} failed; {at.revision.limits}: {build.message}")
    return build


# -- the variant ------------------------------------------------------------------------------------------------------


def _revision(root: Path, word: str, cache: Path) -> Revision:
    """Resolve a revision in the repository of a kernels folder, and write its kernels folder to the cache."""
    repository = Repository.of(root)
    commit = repository.commit(word)
    tree = repository.tree(commit)
    if tree is None:
        raise UsageProblem(f"commit {commit[:SHORT_DIGITS]} has no folder {repository.shown_prefix}")
    return Revision(word, commit, tree, repository, extract(repository, tree, cache))


def _variant(variant: Variant, revision: Revision) -> Variant:
    """The variant of the same name from a revision's sources.  Raises `UsageProblem` if it cannot be used."""
    name, root = variant.name, revision.extracted.folder
    base, where = name.partition("@")[0], f"at {revision.shown}"
    catalog = discover((root,), with_installed=False)
    broken = {each.name: each for each in catalog.broken.values()}
    try:
        (found,) = select_variants(catalog, (name,))
    except UnknownVariant:
        folder = Path(variant.folder).name
        if folder not in broken:
            raise UsageProblem(f"there is no variant {base!r} {where}; choose a later revision") from None
        found = broken[folder]
    except UsageProblem as problem:
        raise UsageProblem(f"{where}: {problem}") from None
    if isinstance(found, BrokenVariant):
        reason = found.problem.replace(f"{root}/", f"{revision.word}:{revision.repository.prefix}/")
        raise UsageProblem(f"today's pytest-fa cannot use {base} {where}: {reason}; {revision.limits}")
    if found.entry.kind == "python" and (foreign := import_from(revision.repository.top, found)):
        raise UsageProblem(f"{name} {where} imports {foreign}, which would be today's; {revision.limits}")
    return msgspec.structs.replace(found, name=f"{name}@{revision.commit[:SHORT_DIGITS]}")


def _foreign_file(at: VariantAtRevision, build: Build, cache: Path) -> str:
    """A file of today's working tree, or of the cache outside the tree, from which a revision was built; else empty."""
    root = os.path.realpath(at.revision.extracted.folder)
    folders = (str(at.revision.repository.top), os.path.realpath(cache))
    for path in files_of(cache, at.variant, build):
        is_watched = any(Path(path).is_relative_to(folder) for folder in folders)
        if is_watched and not Path(path).is_relative_to(root) and not is_installed(Path(path)):
            return path
    return ""


# -- the same code ----------------------------------------------------------------------------------------------------


def same_machine_code(ours: Build, theirs: Build, cache: Path) -> CodeOfRevision | None:
    """The identity of the code if both builds are the same code, for the GPU and for the CPU; else None.

    Device code alone does not decide: the host code chooses the grid and the number of launches.
    """
    if ours.arch != theirs.arch or ours.code_identity is None or ours.code_identity != theirs.code_identity:
        return None
    if _resources(ours) != _resources(theirs):
        return None
    host = host_code(cache / ours.library)
    is_same = host is not None and host == host_code(cache / theirs.library)
    return CodeOfRevision("machine code", ours.code_identity) if is_same else None


def _resources(build: Build) -> list[tuple[object, ...]]:
    """The resources of the kernels, without their names, which may contain a hash of their file."""
    return sorted(
        (
            kernel.registers_per_thread,
            kernel.spill_bytes,
            kernel.stack_bytes,
            kernel.smem_bytes_per_block,
            kernel.max_threads_per_block or 0,
        )
        for kernel in build.kernels
    )


def _same_sources(variant: Variant, revision: Revision) -> CodeOfRevision | None:
    """The id of the kernels folder's tree if all of its files are those of the revision; else None.

    A variant in Python may read any of them.
    """
    root, blobs = Path(variant.root), {entry.path: entry.blob for entry in revision.extracted.entries}
    if paths_in(root) != blobs.keys() or content_ids(root, revision.tree) != blobs:
        return None
    return CodeOfRevision("sources", revision.tree)


# -- uncommitted changes ----------------------------------------------------------------------------------------------


def _uncommitted(variant: Variant, build: Build | None, revision: Revision, cache: Path) -> tuple[str, ...]:
    """The files of today's variant that are not as HEAD has them, by their paths from the top."""
    repository = revision.repository
    try:
        entries = repository.entries(repository.commit("HEAD"))
    except UsageProblem:  # there is no commit yet on this branch
        entries = []
    committed = {entry.path: entry.blob for entry in entries}
    sources = set(_sources(variant, build, cache))
    names = paths_in(Path(variant.folder)) if build is None else ()  # a variant in Python may read any file
    data = {os.path.realpath(Path(variant.folder, name)) for name in names} - sources
    changed = []
    for path in sorted(path for path in sources | data if Path(path).is_relative_to(repository.top)):
        name = Path(path).relative_to(repository.top).as_posix()
        # an untracked file that is no source may be anything, such as the file of an editor
        if (name in committed or path in sources) and committed.get(name) != _blob_id(path, revision.tree):
            changed.append(printable(name))
    return tuple(changed)


def _sources(variant: Variant, build: Build | None, cache: Path) -> Iterator[str]:
    """The real paths of the manifests and the sources of a variant."""
    folder = Path(variant.folder)
    yield from (os.path.realpath(path) for name in (MANIFEST_NAME, PLANTED_NAME) if (path := folder / name).is_file())
    looked_for = sources_of(cache, variant, build) if build else {}
    yield from (path for path, sha256 in looked_for.items() if sha256 is not None)
    yield from (os.path.realpath(folder / name) for name in source_hashes(variant, folder))


def _blob_id(path: str, like: str) -> str:
    return blob_id(Path(path).read_bytes() if Path(path).is_file() else b"", like)

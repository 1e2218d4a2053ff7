"""The build cache: builds are immutable, named by content, and found by hashing their source files again.

    <cache>/builds/<variant>-<arch>-<request key>/<toolchain key>-<content key>/{kernel.so, build.json, log.txt}
    <cache>/binding/<key>/binding.o
    <cache>/trees/<tree id>/: sources of a git revision
    <cache>/locks/<variant>-<arch>-<request key>.lock, <cache>/.lock, <cache>/.stage-*

A build is published by one atomic rename and never changes, so readers need no lock.  Who compiles a build, or deletes
it, holds its lock.  `.lock` is held only for moments.  After a kill, only a staging folder remains, whose lock is free:
the next builder deletes it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from pytest_fa.build.command import LIBRARY, links
from pytest_fa.build.extension import MODULE_NAME
from pytest_fa.build.keys import Dependency, digest, file_hash
from pytest_fa.build.lookups import CompiledFrom, Lookups, key_parts
from pytest_fa.build.recipe import request_key
from pytest_fa.build.source_trees import TREES
from pytest_fa.build.unchanged import change_of
from pytest_fa.catalog.variant import Target, Variant
from pytest_fa.errors import LockProblem, UsageProblem
from pytest_fa.locks import held_lock, lock_if_free, to_stderr
from pytest_fa.records.built import Build
from pytest_fa.regular_file import open_regular

MAX_JSON_BYTES = 2**26
MAX_LOCKS = 200  # that one process holds at once: each is an open file
MAX_NAME = 200  # characters of a lock's file, from the end, where the key is
STAGE = ".stage-"
BINDING, BINDING_HASH = "binding.o", "binding.sha256"


class StoredBuild(msgspec.Struct, frozen=True):
    """The content of `build.json`: the build, every file it was compiled from as (path, sha256), and what was missing.

    Paths below the links of the staging folder are relative (`src/kernel.cu`), so a build that is copied to another
    machine can be compared with the sources there.
    """

    build: Build
    dependencies: tuple[Dependency, ...]
    lookups: Lookups | None = None  # of builds since KEY_SCHEMA 3


def request_folder(cache: Path, variant: Variant, arch: Target) -> Path:
    """Return the folder of all builds for one request: a variant, its flags and definitions, and an architecture."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", variant.name)
    return cache / "builds" / f"{name}-{arch}-{request_key(variant, arch)}"


class Lookup(NamedTuple):
    """A build that was found in the cache, or the reason why there is none.

    `damage` names the first file of a build that would fit, but is not as it was when it was published.
    """

    build: Build | None
    reason: str
    damage: str = ""


def find_build(cache: Path, variant: Variant, arch: Target, toolchain: str | None) -> Lookup:
    """Return the newest build whose source files still have the same hashes and whose own files are unchanged.

    With `toolchain` = None, builds of any compiler match, and only files below the links of the staging folder are
    compared, so that builds from another machine can be used.
    """
    reason = damage = ""
    folder = request_folder(cache, variant, arch)
    candidates = [path for path in folder.glob("*-*") if toolchain is None or path.name.startswith(f"{toolchain}-")]
    for candidate in sorted(candidates, key=_mtime, reverse=True):
        stored = _read_stored(cache, candidate)
        if isinstance(stored, str):
            damage = damage or stored
        elif stored.build.variant != variant.name or stored.build.arch != arch or not _has_its_key(candidate, stored):
            damage = damage or f"{candidate.relative_to(cache)}/build.json is that of another build"
        elif changed := _changed(stored, variant, everything=toolchain is not None):
            reason = reason or f"changed since it was built: {', '.join(changed[:3])}"
        elif problem := _damage(cache, candidate, stored.build):
            damage = damage or problem
        else:
            return Lookup(_in_folder(stored.build, cache, candidate), "")
    return Lookup(None, reason or damage or "it was never built with these flags and definitions", damage)


def _mtime(path: Path) -> float:
    """Return when a folder was made; 0 if another process has just removed it."""
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


def _read_stored(cache: Path, folder: Path) -> StoredBuild | str:
    """Return the content of `build.json`, or a sentence if it cannot be read."""
    path = folder / "build.json"
    name = path.relative_to(cache)
    try:
        if not _is_inside(cache, path):
            return f"{name} is a symlink to a place outside the cache"
        with open_regular(path) as stream:
            data = stream.read(MAX_JSON_BYTES + 1)
        if len(data) > MAX_JSON_BYTES:
            return f"{name} is larger than {MAX_JSON_BYTES} bytes"
        return msgspec.json.decode(data, type=StoredBuild)
    except (OSError, RuntimeError, ValueError, msgspec.MsgspecError):  # RuntimeError: symlinks in a circle
        return f"{name} cannot be read"


def _has_its_key(folder: Path, stored: StoredBuild) -> bool:
    """Whether the key in `build.json` is that of its folder, whose name has the parts of the key.

    If not, the folder has the content of another build, for example of the same sources with other flags.
    """
    request, (toolchain, _, content) = folder.parent.name.rpartition("-")[2], folder.name.partition("-")
    parts = key_parts(stored.dependencies, stored.lookups)
    return (content, stored.build.key) == (digest(parts), digest([request, toolchain, parts]))


def _in_folder(build: Build, cache: Path, folder: Path) -> Build:
    """Return a build with the library of the folder that was checked, whatever its `build.json` says."""
    return msgspec.structs.replace(build, library=str((folder / LIBRARY).relative_to(cache)))


def _damage(cache: Path, folder: Path, build: Build) -> str:
    """Return which file of a published build is not as it was, and how; empty if all are."""
    present = {name for name in (LIBRARY, MODULE_NAME) if os.path.lexists(folder / name)} | {LIBRARY}
    if set(build.files) != present:
        return f"{folder.relative_to(cache)}/build.json does not list the files of its folder"
    for place in (folder.parent, folder):
        if place.stat().st_mode & stat.S_IWOTH:
            return f"every user may write to {place.relative_to(cache)}"
    problems = (_file_damage(cache, folder / name, sha256) for name, sha256 in build.files.items())
    return next((problem for problem in problems if problem), "")


def _file_damage(cache: Path, path: Path, sha256: str) -> str:
    """Return how a file of a build differs from what was published; empty if it does not."""
    shown = path.relative_to(cache)
    if not path.is_file():
        return f"{shown} is missing"
    if not _is_inside(cache, path):
        return f"{shown} is a symlink to a place outside the cache"
    if not path.stat().st_size:
        return f"{shown} is empty"
    change = change_of(path, sha256)
    return f"{shown} {change}" if change else ""


def publish_binding(staged: Path, cache: Path, target: Path) -> None:
    """Move a compiled binding to the cache, with its hash beside it, unless another process has done so."""
    with _locked(cache):
        if not has_binding(cache, target):
            _publish_binding(staged, cache, target)


def _publish_binding(staged: Path, cache: Path, target: Path) -> None:
    (staged / BINDING_HASH).write_text(file_hash(str(staged / BINDING)) or "", encoding="utf-8")
    _protect(staged)
    _remove(target)
    make_folder(target.parent, cache)
    staged.rename(target)


def has_binding(cache: Path, folder: Path) -> bool:
    """Whether the cache has a binding in this folder that is as it was when it was published."""
    try:
        with open_regular(folder / BINDING_HASH, follow=False) as stream:
            sha256 = stream.read(100).decode()
        return not _file_damage(cache, folder / BINDING, sha256)
    except (OSError, ValueError):
        return False


def _is_inside(cache: Path, path: Path) -> bool:
    """Whether a path, with all symlinks resolved, is in the cache."""
    return path.resolve().is_relative_to(cache.resolve())


def require_safe(cache: Path) -> None:
    """Raise `UsageProblem` if every user may write to the cache, because its libraries are loaded and run."""
    folders = (cache, cache / "builds", cache / "binding", cache / TREES)
    for folder in folders[1:]:
        if folder.is_symlink():
            raise UsageProblem(f"--fa-cache: {folder} is a symlink; remove it, or give the real folder as --fa-cache")
    if writable := [folder for folder in folders if folder.is_dir() and folder.stat().st_mode & stat.S_IWOTH]:
        listed = ", ".join(f"{folder} (mode {stat.S_IMODE(folder.stat().st_mode):o})" for folder in writable)
        raise UsageProblem(
            f"--fa-cache: every user may write to {listed}, and libraries in it are loaded and run; "
            f"`chmod o-w {shlex.join(map(str, writable))}`, or give another folder"
        )


def make_folder(path: Path, cache: Path) -> None:
    """Make a folder of the cache that other users cannot write to, whatever the umask is."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        if folder == cache or folder.is_relative_to(cache):
            folder.chmod(0o755)


def find_by_key(cache: Path, key: str) -> list[Build]:
    """Return the builds whose key starts with `key`, even if their sources have changed since.

    Raises `UsageProblem` if a file of such a build has changed.
    """
    builds = []
    for path in sorted((cache / "builds").glob("*/*/build.json")):
        stored = _read_stored(cache, path.parent)
        if isinstance(stored, StoredBuild) and stored.build.key.startswith(key):
            damage = _damage(cache, path.parent, stored.build)
            if not _has_its_key(path.parent, stored):
                damage = f"{path.relative_to(cache)} is that of another build"
            if damage:
                raise UsageProblem(f"key {key}: {damage}; build it again")
            builds.append(_in_folder(stored.build, cache, path.parent))
    return builds


def publish(cache: Path, variant: Variant, arch: Target, toolchain: str, staged: Path, stored: StoredBuild) -> Build:
    """Move a staged build to its final folder, replacing a damaged one, and return it.  Its lock must be held."""
    content = digest(key_parts(stored.dependencies, stored.lookups))
    target = request_folder(cache, variant, arch) / f"{toolchain}-{content}"
    (staged / "build.json").write_bytes(msgspec.json.format(msgspec.json.encode(stored)))
    for name in (LIBRARY, "build.json"):
        with (staged / name).open("rb") as stream:
            os.fsync(stream.fileno())
    if target.parent.is_symlink():
        target.parent.unlink()
    _remove(target)  # the lookup under this lock found it unusable
    make_folder(target.parent, cache)
    target.parent.chmod(0o755)
    _protect(staged)
    staged.rename(target)
    return stored.build


def sources_of(cache: Path, variant: Variant, build: Build) -> dict[str, str | None]:
    """Return the sources and headers that a build was compiled from, with their hashes.

    Files and folders that the compiler looked for in vain are None.  Without those of this package and of the
    compilers.  Empty if the cache no longer has the build.
    """
    roots = links(variant).keys() - {"fa"}
    stored = _stored(cache, build)
    missing = stored.lookups.missing if stored and stored.lookups else {}
    names: list[tuple[str, str | None]] = [(f"{folder}/{name}", None) for folder in missing for name in missing[folder]]
    known = (*names, *(stored.dependencies if stored else ()))
    own = [(path, sha256) for path, sha256 in known if path.partition("/")[0] in roots]
    return {os.path.realpath(dependency_path(path, variant, Path())): sha256 for path, sha256 in own}


def files_of(cache: Path, variant: Variant, build: Build) -> list[str]:
    """Return the real path of every file that a build was compiled from, but what its staging folder contained."""
    stored = _stored(cache, build)
    paths = (dependency_path(path, variant, Path()) for path, _ in (stored.dependencies if stored else ()))
    return [os.path.realpath(path) for path in paths if os.path.isabs(path)]  # noqa: PTH117  # a text


def _stored(cache: Path, build: Build) -> StoredBuild | None:
    stored = _read_stored(cache, (cache / build.library).parent)
    return None if isinstance(stored, str) else stored


def library_path(cache: Path, variant: Variant, arch: Target, toolchain: str, inputs: CompiledFrom) -> str:
    """Return the path that `publish` gives a library, relative to the cache."""
    content = digest(inputs.key_parts)
    return str((request_folder(cache, variant, arch) / f"{toolchain}-{content}" / LIBRARY).relative_to(cache))


def delete_builds(
    cache: Path, variant: Variant, arches: tuple[Target, ...], say: Callable[[str], object] = to_stderr
) -> None:
    """Delete all builds of one variant with its current flags and definitions, also those that are compiled now.

    Waits until they are published.
    """
    for arch in arches:
        with held_lock(_lock_path(cache, variant, arch), _of_build(variant, arch), say, notice_seconds=0.0):
            _remove(request_folder(cache, variant, arch))


def _protect(folder: Path) -> None:
    """Take the right to write to a folder and its files from other users, whatever the umask was."""
    for path in (folder, *folder.iterdir()):
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH))


def _remove(path: Path) -> None:
    """Delete a folder, or a symlink without what it points to."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _lock_path(cache: Path, variant: Variant, arch: Target) -> Path:
    """Return the lock of a build.  Its folder is made."""
    folder = cache / "locks"
    make_folder(folder, cache)
    return folder / f"{request_folder(cache, variant, arch).name[-MAX_NAME:]}.lock"


def _of_build(variant: Variant, arch: Target) -> str:
    return f"the build of {variant.name}/{arch}"


class BuildLocks:
    """The locks of the builds that this process compiles now, each released when its build is published."""

    def __init__(self, cache: Path) -> None:
        self._cache, self._held = cache, dict[tuple[str, str], ExitStack]()

    def take(self, requests: list[tuple[Variant, Target]], say: Callable[[str], None]) -> set[tuple[str, str]]:
        """Take the locks that are free, at most `MAX_LOCKS`; return the names of their builds.

        If none is free, wait for the first one.  While it waits, a process holds no lock.
        """
        for variant, arch in requests[:MAX_LOCKS]:
            self._take_if_free(variant, arch)
        if not self._held:
            variant, arch = requests[0]
            lock = held_lock(_lock_path(self._cache, variant, arch), _of_build(variant, arch), say, notice_seconds=0.0)
            self._keep(variant, arch, lock)
        return set(self._held)

    def release(self, name: str, arch: str) -> None:
        """Release the lock of a build, if it is held."""
        if (stack := self._held.pop((name, arch), None)) is not None:
            stack.close()

    def release_all(self) -> None:
        """Release what is held."""
        for name, arch in tuple(self._held):
            self.release(name, arch)

    def _take_if_free(self, variant: Variant, arch: Target) -> None:
        with ExitStack() as stack:
            if stack.enter_context(lock_if_free(_lock_path(self._cache, variant, arch), _of_build(variant, arch))):
                self._held[variant.name, arch] = stack.pop_all()

    def _keep(self, variant: Variant, arch: Target, lock: AbstractContextManager[None]) -> None:
        with ExitStack() as stack:
            stack.enter_context(lock)
            self._held[variant.name, arch] = stack.pop_all()


@contextmanager
def staging_folder(cache: Path) -> Iterator[Path]:
    """Make a private folder in the cache, and delete it at the end.  Those of killed processes are deleted before."""
    stage = cache / f"{STAGE}{uuid.uuid4().hex}"
    with ExitStack() as stack:
        with _locked(cache):  # no other process looks at a folder without a lock
            for stale in cache.glob(f"{STAGE}*"):
                _remove_if_stale(stale)
            stage.mkdir()
            stack.callback(shutil.rmtree, stage, ignore_errors=True)
            stack.enter_context(lock_if_free(stage / "lock", str(stage)))
        yield stage


def _remove_if_stale(stage: Path) -> None:
    """Delete a staging folder whose process has ended."""
    with contextlib.suppress(LockProblem), lock_if_free(stage / "lock", str(stage)) as is_stale:
        if is_stale:
            shutil.rmtree(stage, ignore_errors=True)


@contextmanager
def _locked(cache: Path) -> Iterator[None]:
    """Hold the lock of the whole cache for a moment."""
    make_folder(cache, cache)
    with held_lock(cache / ".lock", f"the build cache {cache}"):
        yield


def dependency_path(path: str, variant: Variant, folder: Path) -> str:
    """Return the real path of a dependency: below a link of the staging folder, in `folder`, or absolute."""
    return _real_path(path, links(variant), folder)


def _real_path(path: str, roots: dict[str, Path], folder: Path) -> str:
    prefix, _, rest = path.partition("/")
    return f"{roots[prefix]}/{rest}" if prefix in roots else str(folder / path)


def _changed(stored: StoredBuild, variant: Variant, *, everything: bool) -> list[str]:
    """Return what is not as it was: files with another hash, and files that would now be found first.

    Without `everything`, only what is below the staging folder's links.
    """
    roots = links(variant)

    def real_path(path: str) -> str | None:
        is_compared = everything or path.partition("/")[0] in roots
        return _real_path(path, roots, Path()) if is_compared else None

    paths = ((path, sha256, real_path(path)) for path, sha256 in stored.dependencies)
    changed = [path for path, sha256, real in paths if real is not None and file_hash(real) != sha256]
    return [*changed, *(stored.lookups.changed(real_path) if stored.lookups else ())]

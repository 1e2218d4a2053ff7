"""The build cache: builds are immutable, named by content, and found by hashing their source files again.

    <cache>/builds/<variant>-<arch>-<request key>/<toolchain key>-<content key>/{kernel.so, build.json, log.txt}
    <cache>/binding/<key>/binding.o
    <cache>/.lock, <cache>/.stage-*

A build is published by one atomic rename and never changes, so readers need no lock.  After a kill, only a staging
folder remains, which the next builder deletes.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock
import msgspec

from pytest_fa.build.command import links
from pytest_fa.build.keys import Dependency, digest, file_hash
from pytest_fa.build.recipe import request_key
from pytest_fa.catalog.variant import Target, Variant
from pytest_fa.records.built import Build


class StoredBuild(msgspec.Struct, frozen=True):
    """The content of `build.json`: the build, and every file it was compiled from as (path, sha256).

    Paths below the links of the staging folder are relative (`src/kernel.cu`), so a build that is copied to another
    machine can be compared with the sources there.
    """

    build: Build
    dependencies: tuple[Dependency, ...]


def request_folder(cache: Path, variant: Variant, arch: Target) -> Path:
    """Return the folder of all builds for one request: a variant, its flags and definitions, and an architecture."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", variant.name)
    return cache / "builds" / f"{name}-{arch}-{request_key(variant, arch)}"


def find_build(cache: Path, variant: Variant, arch: Target, toolchain: str | None) -> tuple[Build | None, str]:
    """Return the newest build whose source files still have the same hashes, or None and the reason.

    With `toolchain` = None, builds of any compiler match, and only files below the links of the staging folder are
    compared, so that builds from another machine can be used.
    """
    reason = ""
    folder = request_folder(cache, variant, arch)
    candidates = [path for path in folder.glob("*-*") if toolchain is None or path.name.startswith(f"{toolchain}-")]
    for candidate in sorted(candidates, key=lambda path: -path.stat().st_mtime):
        try:
            stored = msgspec.json.decode((candidate / "build.json").read_bytes(), type=StoredBuild)
        except (OSError, msgspec.MsgspecError):
            reason = reason or f"{candidate.relative_to(cache)}/build.json cannot be read"
            continue
        changed = _changed(stored.dependencies, variant, everything=toolchain is not None)
        if not changed and (candidate / "kernel.so").is_file():
            return stored.build, ""
        missing = f"{candidate.relative_to(cache)}/kernel.so is missing"
        reason = reason or (f"changed since it was built: {', '.join(changed[:3])}" if changed else missing)
    return None, reason or "it was never built with these flags and definitions"


def find_by_key(cache: Path, key: str) -> list[Build]:
    """Return the builds whose key starts with `key`, even if their sources have changed since."""
    builds = []
    for path in sorted((cache / "builds").glob("*/*/build.json")):
        try:
            build = msgspec.json.decode(path.read_bytes(), type=StoredBuild).build
        except (OSError, msgspec.MsgspecError):
            continue
        if build.key.startswith(key) and (path.parent / "kernel.so").is_file():
            builds.append(build)
    return builds


def publish(cache: Path, variant: Variant, arch: Target, toolchain: str, staged: Path, stored: StoredBuild) -> Build:
    """Move a staged build to its final folder, replacing a damaged one, and return it.  The cache must be locked."""
    target = request_folder(cache, variant, arch) / f"{toolchain}-{digest(stored.dependencies)}"
    (staged / "build.json").write_bytes(msgspec.json.format(msgspec.json.encode(stored)))
    for name in ("kernel.so", "build.json"):
        with (staged / name).open("rb") as stream:
            os.fsync(stream.fileno())
    shutil.rmtree(target, ignore_errors=True)  # the lookup under this lock found it unusable
    target.parent.mkdir(parents=True, exist_ok=True)
    staged.rename(target)
    return stored.build


def library_path(cache: Path, variant: Variant, arch: Target, toolchain: str, deps: tuple[Dependency, ...]) -> str:
    """Return the path that `publish` gives a library, relative to the cache."""
    return str((request_folder(cache, variant, arch) / f"{toolchain}-{digest(deps)}" / "kernel.so").relative_to(cache))


def delete_builds(cache: Path, variant: Variant, arches: tuple[Target, ...]) -> None:
    """Delete all builds of one variant with its current flags and definitions."""
    for arch in arches:
        shutil.rmtree(request_folder(cache, variant, arch), ignore_errors=True)


@contextmanager
def locked(cache: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the cache's file lock, and delete stale staging folders.

    The operating system releases the lock if this process dies.
    """
    cache.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(cache / ".lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        say(f"waiting for another build in {cache}")
        lock.acquire()
    try:
        for stale in cache.glob(".stage-*"):
            shutil.rmtree(stale, ignore_errors=True)
        yield
    finally:
        lock.release()


def dependency_path(path: str, variant: Variant, folder: Path) -> str:
    """Return the real path of a dependency: below a link of the staging folder, in `folder`, or absolute."""
    roots = links(variant)
    prefix, _, rest = path.partition("/")
    return f"{roots[prefix]}/{rest}" if prefix in roots else str(folder / path)


def _changed(deps: tuple[Dependency, ...], variant: Variant, *, everything: bool) -> list[str]:
    """Return the files whose hash has changed; without `everything`, only of those below the staging folder's links."""
    roots = links(variant)
    changed = []
    for path, sha256 in deps:
        if path.partition("/")[0] not in roots and not everything:
            continue
        if file_hash(dependency_path(path, variant, Path())) != sha256:
            changed.append(path)
    return changed

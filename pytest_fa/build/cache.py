"""The cache: immutable builds named by content, found by re-hashing what they were made from.

    <cache>/builds/<variant>-<arch>-<request key>/<toolchain key>-<content key>/{kernel.so, build.json, log.txt}
    <cache>/binding/<key>/binding.o
    <cache>/.lock, <cache>/.stage-*

A build appears by one atomic rename and never changes, so a reader needs no lock and a killed build leaves nothing but a
staging folder, which the next builder sweeps.
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
    """`build.json`: the build and every file it was made from, as (path, sha256).

    Paths under the staging folder's links stay relative (`src/kernel.cu`), so that a build can be checked elsewhere.
    """

    build: Build
    dependencies: tuple[Dependency, ...]


def scope(cache: Path, variant: Variant, arch: Target) -> Path:
    """The folder of all builds for one request."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", variant.name)
    return cache / "builds" / f"{name}-{arch}-{request_key(variant, arch)}"


def find_build(cache: Path, variant: Variant, arch: Target, toolchain: str | None) -> tuple[Build | None, str]:
    """The newest build whose files all still hash the same, and why there is none.

    With `toolchain` None any compiler's build will do, and only the project's own files are compared: that is how builds
    made on another machine are used.
    """
    why = ""
    folder = scope(cache, variant, arch)
    candidates = [each for each in folder.glob("*-*") if toolchain is None or each.name.startswith(f"{toolchain}-")]
    for candidate in sorted(candidates, key=lambda each: -each.stat().st_mtime):
        try:
            stored = msgspec.json.decode((candidate / "build.json").read_bytes(), type=StoredBuild)
        except (OSError, msgspec.MsgspecError):
            why = why or f"{candidate.relative_to(cache)}/build.json cannot be read"
            continue
        changed = _changed(stored.dependencies, variant, everything=toolchain is not None)
        if not changed and (candidate / "kernel.so").is_file():
            return stored.build, ""
        lost = f"{candidate.relative_to(cache)}/kernel.so is gone"
        why = why or (f"changed since it was built: {', '.join(changed[:3])}" if changed else lost)
    return None, why or "it was never built with these flags and definitions"


def find_by_key(cache: Path, key: str) -> list[Build]:
    """Every build whose build key begins with `key`, whatever its sources are by now."""
    found = []
    for path in sorted((cache / "builds").glob("*/*/build.json")):
        try:
            build = msgspec.json.decode(path.read_bytes(), type=StoredBuild).build
        except (OSError, msgspec.MsgspecError):
            continue
        if build.key.startswith(key) and (path.parent / "kernel.so").is_file():
            found.append(build)
    return found


def publish(cache: Path, variant: Variant, arch: Target, toolchain: str, staged: Path, stored: StoredBuild) -> Build:
    """Move a staged build to its final place; where another process was first, take its build."""
    target = scope(cache, variant, arch) / f"{toolchain}-{digest(stored.dependencies)}"
    (staged / "build.json").write_bytes(msgspec.json.format(msgspec.json.encode(stored)))
    for name in ("kernel.so", "build.json"):
        with (staged / name).open("rb") as stream:
            os.fsync(stream.fileno())
    shutil.rmtree(target, ignore_errors=True)  # the lock's holder looked: what lies there could not be used
    target.parent.mkdir(parents=True, exist_ok=True)
    staged.rename(target)
    return stored.build


def content_path(cache: Path, variant: Variant, arch: Target, toolchain: str, deps: tuple[Dependency, ...]) -> str:
    """Where `publish` will put a library, relative to the cache."""
    return str((scope(cache, variant, arch) / f"{toolchain}-{digest(deps)}" / "kernel.so").relative_to(cache))


def forget(cache: Path, variant: Variant, arches: tuple[Target, ...]) -> None:
    """Remove every build of one variant for its present flags and definitions."""
    for arch in arches:
        shutil.rmtree(scope(cache, variant, arch), ignore_errors=True)


@contextmanager
def locked(cache: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the cache's lock; it dies with its holder.  Stale staging folders are swept on entry."""
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


def located(path: str, variant: Variant, folder: Path) -> str:
    """Where a dependency lies: below one of a staging folder's links, in the folder itself, or where it says."""
    roots = links(variant)
    prefix, _, rest = path.partition("/")
    return f"{roots[prefix]}/{rest}" if prefix in roots else str(folder / path)


def _changed(deps: tuple[Dependency, ...], variant: Variant, *, everything: bool) -> list[str]:
    """The files that no longer hash the same."""
    roots = links(variant)
    changed = []
    for path, want in deps:
        if path.partition("/")[0] not in roots and not everything:
            continue
        if file_hash(located(path, variant, Path())) != want:
            changed.append(path)
    return changed

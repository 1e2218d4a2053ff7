"""The commit of a source tree, read from git or from the stamp file of a copied tree."""

from __future__ import annotations

import functools
import hashlib
import subprocess
from pathlib import Path

import msgspec

from pytest_fa.records.record import Source
from pytest_fa.records.text import printable

STAMP_NAME = ".fa-source.json"
RESULTS = "profiles/"  # written by runs, so not part of the source


class SourceStamp(msgspec.Struct, frozen=True):
    """The stamp file of a copied tree: its commit, whether it had changes, and the sha256 of each source file."""

    commit: str
    dirty: bool
    files: dict[str, str] = {}


@functools.cache
def read_source(folder: Path) -> Source:
    """Return the commit and the dirty state of `folder`.

    Git is used if its checkout is clean.  Otherwise a stamp whose hashes match the files takes precedence: the files
    may have been copied over an older checkout.
    """
    git, stamp = _from_git(folder), _from_stamp(folder)
    if git is not None and (not git.dirty or stamp is None or not stamp[1]):
        return git
    return stamp[0] if stamp else Source(commit=None, dirty=None, origin=f"no git commit and no {STAMP_NAME}")


def make_stamp(folder: Path, source: Source) -> SourceStamp:
    """Return the stamp of a git checkout."""
    names = _git(folder, "ls-files").splitlines()
    files = {name: sha256 for name in names if not name.startswith(RESULTS) and (sha256 := _hash(folder / name))}
    return SourceStamp(str(source.commit), bool(source.dirty), files)


def _from_git(folder: Path) -> Source | None:
    try:
        if not _git(folder, "ls-files"):  # an untracked copy inside another repository
            return None
        commit = _git(folder, "rev-parse", "HEAD")
        changes = _git(folder, "status", "--porcelain", "--", ":(top)", f":(exclude){RESULTS}")
        return Source(commit=commit, dirty=bool(changes), origin="git")
    except (OSError, subprocess.SubprocessError):
        return None


def _from_stamp(folder: Path) -> tuple[Source, bool] | None:
    """Return the source that the stamp names, and whether the hashes of all files match it."""
    path = folder / STAMP_NAME
    if not path.is_file():
        return None
    try:
        stamp = msgspec.json.decode(path.read_bytes(), type=SourceStamp)
    except (ValueError, RecursionError) as problem:
        return Source(commit=None, dirty=None, origin=printable(f"{STAMP_NAME} cannot be read: {problem}")), False
    fits = all(_hash(folder / name) == sha256 for name, sha256 in stamp.files.items())
    return Source(commit=stamp.commit, dirty=stamp.dirty or not fits, origin=STAMP_NAME), fits and bool(stamp.files)


def _hash(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _git(folder: Path, *words: str) -> str:
    run = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True, timeout=60)  # noqa: S603, S607
    return run.stdout.strip()


def folder_hash(folder: Path) -> str:
    """Return a sha256 over the names and contents of the files in a folder, which need not exist."""
    sha256 = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        sha256.update(f"{content}  {path.relative_to(folder)}\n".encode())
    return sha256.hexdigest()

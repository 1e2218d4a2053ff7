"""From which commit a tree is: git's word, or that of the stamp that was written before the tree was copied."""

from __future__ import annotations

import functools
import hashlib
import subprocess
from pathlib import Path

import msgspec

from pytest_fa.records.record import Source

STAMP_NAME = ".fa-source.json"
RESULTS = "profiles/"  # written by the tool, so that a run changes no source


class SourceStamp(msgspec.Struct, frozen=True):
    """The file that speaks for a copied tree: what was checked out, and the sha256 of every source file then."""

    commit: str
    dirty: bool
    files: dict[str, str] = {}


@functools.cache
def read_source(folder: Path) -> Source:
    """Commit and dirty state of `folder`.

    A clean checkout speaks for itself.  Else a stamp that fits the files does: a copy may lie over an older checkout.
    """
    git, stamp = _from_git(folder), _from_stamp(folder)
    if git is not None and (not git.dirty or stamp is None or not stamp[1]):
        return git
    return stamp[0] if stamp else Source(commit=None, dirty=None, origin=f"no git commit and no {STAMP_NAME}")


def make_stamp(folder: Path, source: Source) -> SourceStamp:
    """The stamp of a checkout whose source is known."""
    names = _git(folder, "ls-files").splitlines()
    files = {name: found for name in names if not name.startswith(RESULTS) and (found := _hash(folder / name))}
    return SourceStamp(str(source.commit), bool(source.dirty), files)


def _from_git(folder: Path) -> Source | None:
    try:
        if not _git(folder, "ls-files"):  # an untracked copy inside somebody else's repository
            return None
        commit = _git(folder, "rev-parse", "HEAD")
        return Source(commit=commit, dirty=bool(_git(folder, "status", "--porcelain")), origin="git")
    except (OSError, subprocess.CalledProcessError):
        return None


def _from_stamp(folder: Path) -> tuple[Source, bool] | None:
    """What the stamp says, and whether the files are those that it was written for."""
    path = folder / STAMP_NAME
    if not path.is_file():
        return None
    try:
        said = msgspec.json.decode(path.read_bytes(), type=SourceStamp)
    except msgspec.MsgspecError as problem:
        return Source(commit=None, dirty=None, origin=f"{STAMP_NAME} cannot be read: {problem}"), False
    fits = all(_hash(folder / name) == want for name, want in said.files.items())
    return Source(commit=said.commit, dirty=said.dirty or not fits, origin=STAMP_NAME), fits and bool(said.files)


def _hash(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _git(folder: Path, *words: str) -> str:
    run = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True)  # noqa: S603, S607
    return run.stdout.strip()

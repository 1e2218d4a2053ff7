"""The files of a git tree, written into the cache without a checkout.

Contents are those of the objects: no filter, no conversion of line ends.  A file of Git LFS is its pointer.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pytest_fa.build.cache import make_folder
from pytest_fa.build.source_trees import remove_tree, tree_folder
from pytest_fa.errors import UsageProblem
from pytest_fa.features.gate.repository import Repository, TreeEntry, blob_id

SYMLINK, SUBMODULE = "120000", "160000"
MAX_FILES = 100_000
MAX_BYTES = 2**30
CACHE_FOLDER = "__pycache__"  # which Python writes beside modules


class ExtractedTree(NamedTuple):
    """The folder of an extracted tree, what is in the tree, and a sentence for each entry that was left out."""

    folder: Path
    entries: tuple[TreeEntry, ...]
    left_out: tuple[str, ...]


def extract(repository: Repository, tree: str, cache: Path) -> ExtractedTree:
    """Write a tree to the cache, unless it is there and complete.

    A symlink that leads out of the tree, and a submodule, are left out.  Raises `UsageProblem` for a tree that is too
    large, whose objects are missing, or that cannot be written.
    """
    entries = [each for each in repository.entries(tree) if CACHE_FOLDER not in each.path.split("/")]
    folder = tree_folder(cache, tree)
    _require_fit(repository, entries)
    try:
        if not _is_whole(folder, entries):
            _publish(repository, entries, folder, cache)
    except OSError as problem:
        raise UsageProblem(f"the sources cannot be written to {folder}: {problem.strerror or problem}") from None
    return ExtractedTree(folder, tuple(entries), tuple(_left_out(folder, entries)))


def content_ids(folder: Path, like: str) -> dict[str, str]:
    """The git id of each file and symlink in a folder, without Python's caches; `like` is an id of the repository."""
    ids: dict[str, str] = {}
    for name, _, files in _walked(folder):
        for file in files:
            path = Path(name, file)
            content = os.fsencode(path.readlink()) if path.is_symlink() else _content(path)
            ids[path.relative_to(folder).as_posix()] = blob_id(content, like)
    return ids


def _walked(folder: Path) -> list[tuple[str, list[str], list[str]]]:
    """`os.walk` without Python's caches; a symlink to a folder is listed as a file."""
    walked = []
    for name, folders, files in os.walk(folder):
        links = [each for each in folders if Path(name, each).is_symlink()]
        folders[:] = [each for each in folders if each not in (CACHE_FOLDER, ".git", *links)]
        walked.append((name, folders, [each for each in (*files, *links) if each != ".git"]))
    return walked


def paths_in(folder: Path) -> set[str]:
    """The paths of the files and symlinks in a folder, as in `content_ids`."""
    return {Path(name, file).relative_to(folder).as_posix() for name, _, files in _walked(folder) for file in files}


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _require_fit(repository: Repository, entries: Sequence[TreeEntry]) -> None:
    if len(entries) > MAX_FILES:
        raise UsageProblem(f"{repository.shown_prefix} has {len(entries)} files; at most {MAX_FILES} are extracted")
    for entry in entries:
        parts = entry.path.split("/")
        if any(part in ("", ".", "..") or part.lower() == ".git" for part in parts):
            raise UsageProblem(f"{repository.shown_prefix} has the path {entry.path!r}, which git does not check out")


def _is_whole(folder: Path, entries: Sequence[TreeEntry]) -> bool:
    """Whether the folder has all files of the tree with their content, no other, and no symlink that leads out."""
    if not folder.is_dir() or folder.is_symlink():
        return False
    blobs = {entry.path: entry.blob for entry in entries if entry.mode != SUBMODULE}
    links = {entry.path for entry in entries if entry.mode == SYMLINK}
    paths = paths_in(folder)
    if not blobs.keys() - links <= paths <= blobs.keys():
        return False
    if any(not _leads_inside(folder / path, folder) for path in links & paths):
        return False
    return content_ids(folder, entries[0].blob) == {path: blobs[path] for path in paths} if entries else True


def _publish(repository: Repository, entries: Sequence[TreeEntry], folder: Path, cache: Path) -> None:
    """Write the files to a new folder, and rename that at once: another run may do the same."""
    blobs = [entry.blob for entry in entries if entry.mode != SUBMODULE]
    if (total := repository.total_bytes(blobs) if blobs else 0) > MAX_BYTES:
        raise UsageProblem(f"{repository.shown_prefix} has {total} bytes; at most {MAX_BYTES} are extracted")
    make_folder(folder.parent, cache)
    staged = folder.with_name(f".new-{secrets.token_hex(8)}")
    staged.mkdir(mode=0o755)
    try:
        _write(repository, entries, staged)
        if os.path.lexists(folder):  # it is not whole
            remove_tree(folder)
        try:
            staged.rename(folder)
        except OSError:
            if not _is_whole(folder, entries):  # else another run was faster
                raise
    finally:
        remove_tree(staged)


def _write(repository: Repository, entries: Sequence[TreeEntry], staged: Path) -> None:
    """Write the files, then the symlinks, so that no file is written through one."""
    kept = [entry for entry in entries if entry.mode != SUBMODULE]
    links: list[tuple[Path, bytes]] = []
    contents = repository.contents([entry.blob for entry in kept]) if kept else iter(())
    for entry, content in zip(kept, contents, strict=True):
        path = staged / entry.path
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        if entry.mode == SYMLINK:
            links.append((path, content))
            continue
        with path.open("xb") as stream:
            stream.write(content)
        path.chmod(0o755 if entry.mode == "100755" else 0o644)
    for path, target in links:
        path.symlink_to(os.fsdecode(target))
    for path, _ in links:  # all of them are there now, so the real path of each is known
        if not _leads_inside(path, staged):
            path.unlink()


def _leads_inside(path: Path, folder: Path) -> bool:
    """Whether the real path of a symlink is in the folder.  A chain may leave it and come back: that is outside."""
    try:
        target = path.readlink()
        with suppress(FileNotFoundError):
            path.stat()  # a circle is an error here; for `resolve`, it no longer is from Python 3.13 on
        return not target.is_absolute() and path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):  # a circle
        return False


def _left_out(folder: Path, entries: Sequence[TreeEntry]) -> list[str]:
    texts = []
    for entry in entries:
        if entry.mode == SUBMODULE:
            texts.append(f"{entry.path} is a submodule")
        elif entry.mode == SYMLINK and not (folder / entry.path).is_symlink():
            texts.append(f"{entry.path} is a symlink that leads out of the folder")
    return texts

"""The source trees of git revisions in the cache: `<cache>/trees/<id of the tree>/`, each named by its content."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from pathlib import Path

TREES = "trees"


def tree_folder(cache: Path, tree: str) -> Path:
    """Return the folder of a tree, whether or not it exists."""
    return cache / TREES / tree


def remove_tree(folder: Path) -> None:
    """Delete a folder, a file or a symlink, if it exists."""
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder, ignore_errors=True)
    elif os.path.lexists(folder):
        folder.unlink()


def delete_trees(cache: Path, kept: Collection[str]) -> None:
    """Delete all trees, and what remains of unfinished ones, but the folders `kept`."""
    folders = (cache / TREES).iterdir() if (cache / TREES).is_dir() else ()
    for folder in folders:
        if str(folder) not in kept:
            remove_tree(folder)

"""What is in a kernels folder that has no variants, where variants are instead, and the command that writes one.

Only errors need these sentences.  The module imports nothing of the catalog, so that reading the options stays cheap.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from pytest_fa.catalog.grammar import NAME

MANIFEST = "variant.yaml"
MAX_NAMES = 5  # names of entries that a sentence lists


def how_to_make(name: str, folder: Path) -> str:
    """The sentence with the command that writes the variant `name` into the kernels folder `folder`.

    With a name that no variant can have, the command contains NAME.
    """
    is_default = folder == Path.cwd() / "kernels"
    option = "" if is_default else f" --kernels={shlex.quote(str(folder))}"
    written = name if re.fullmatch(NAME, name) else "NAME"
    return f"`python -m pytest_fa new {written}{option}` writes a variant into {folder}"


def absence(folders: tuple[Path, ...], name: str, command: tuple[str, ...]) -> str:
    """Where variants were looked for, what is there instead, other folders nearby that have some, and how to make one.

    `folders` are the absolute paths of kernels folders without variants.  `name` is the variant that is looked for.
    `command` runs the shipped suite.
    """
    looked = "; ".join(f"looked for {folder}/<variant>/{MANIFEST}: {_content(folder)}" for folder in folders)
    named = [f"--fa-variant={name}"] if name else []
    hints = [
        f"{folder} has variants: `{shlex.join([*command, f'--fa-kernels={os.path.relpath(folder)}', *named])}`"
        for folder in _nearby(folders[0])
    ]
    return "; ".join((looked, *hints, how_to_make(name, folders[0])))


def missing_manifest(folders: tuple[Path, ...], name: str) -> str:
    """The sentence about a folder that has the name of a variant and no manifest; empty if there is no such folder."""
    for folder in folders if re.fullmatch(NAME, name) else ():
        if (folder / name).is_dir() and not (folder / name / MANIFEST).exists():
            start = f"the folder {folder / name} has no {MANIFEST}"
            if (other := folder / name / "variant.yml").exists():
                return f"{start}; rename {other.name} to {MANIFEST}"
            return f"{start}; {how_to_make('NAME', folder)}, with a manifest to copy"
    return ""


def _content(folder: Path) -> str:
    """What is in a kernels folder without variants."""
    if not folder.is_dir():
        return "there is no such folder"
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as problem:
        return f"it cannot be read ({problem.strerror})"
    if not names:
        return "the folder is empty"
    if MANIFEST in names:
        return f"{MANIFEST} is in the folder itself; move it and its sources into a folder below it"
    listed = ", ".join(names[:MAX_NAMES]) + (", ..." if len(names) > MAX_NAMES else "")
    return f"no folder in it has a {MANIFEST} (it contains {listed})"


def _nearby(folder: Path) -> list[Path]:
    """This user's first kernels folder with variants above `folder`, or in a folder of the current one; or none."""
    return next(([path] for path in _candidates(folder) if _is_own(path) and any(path.glob(f"*/{MANIFEST}"))), [])


def _is_own(path: Path) -> bool:
    """Whether a folder exists and belongs to this user: no message recommends to run what another user wrote."""
    try:
        return path.stat().st_uid == os.getuid()
    except OSError:
        return False


def _candidates(folder: Path) -> Iterator[Path]:
    for parent in folder.parents:
        yield parent / "kernels"
        if parent.name == "kernels":
            yield parent
    try:
        below = sorted(Path.cwd().iterdir())
    except OSError:
        return
    yield from (path / "kernels" for path in below)

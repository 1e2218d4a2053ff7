"""Paths of kernels on the command line: `pytest kernels/mine` and `pytest kernels/mine/kernel.cu` mean that variant."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_fa.options.command_line import SUITE
from pytest_fa.options.values import MANIFEST, default_folder

if TYPE_CHECKING:
    import pytest


def name_variants(config: pytest.Config) -> None:
    """Replace typed paths of variants and of kernels folders by the options that mean them, and by the shipped suite.

    A path below which pytest itself finds a test file stays as it is.  A typed option counts more than a path.
    """
    if config.args_source is not config.ArgsSource.ARGS or config.option.pyargs:
        return
    here = config.invocation_params.dir
    meant = {word: folder for word in config.args if (folder := _folder_of(here / word, config)) is not None}
    if not meant:
        return
    kernels = list(dict.fromkeys(each.parent if _is_variant(each) else each for each in meant.values()))
    if config.option.fa_kernels is None and kernels != [default_folder(here, config.rootpath)]:
        config.option.fa_kernels = ",".join(os.path.relpath(each, here) for each in kernels)
    if config.option.fa_variant is None and all(map(_is_variant, meant.values())):
        config.option.fa_variant = ",".join(_names(tuple(dict.fromkeys(meant.values()))))
    config.args[:] = [*(word for word in config.args if word not in meant), SUITE]
    config.option.pyargs = True


def _folder_of(path: Path, config: pytest.Config) -> Path | None:
    """The variant's folder, or the kernels folder, that a path means; None if it has tests, or means something else."""
    patterns = config.getini("python_files")
    folder = path.resolve() if path.is_dir() else path.resolve().parent
    if path.is_file():
        is_meant = _is_variant(folder) and not any(path.match(pattern) for pattern in patterns)
    else:
        is_meant = path.is_dir() and (_is_variant(folder) or any(folder.glob(f"*/{MANIFEST}")))
        is_meant = is_meant and not any(file for pattern in patterns for file in folder.rglob(pattern))
    return folder if is_meant else None


def _is_variant(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def _names(folders: tuple[Path, ...]) -> list[str]:
    """The variants of these folders: the candidates, or all if there is none; a broken manifest's by its folder."""
    from pytest_fa.catalog.discover import discover  # noqa: PLC0415  # only such paths need it

    catalog = discover(tuple(dict.fromkeys(each.parent for each in folders)), with_installed=False)
    names: list[str] = []
    for folder in folders:
        found = [each for each in catalog.variants.values() if Path(each.root, each.folder) == folder]
        chosen = [each.name for each in found if each.role == "candidate"] or [each.name for each in found]
        names += chosen or [folder.name]
    return names

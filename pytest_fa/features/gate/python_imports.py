"""Whether a variant in Python imports code of the working tree, which would not be that of its revision."""

from __future__ import annotations

import ast
import contextlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

from pytest_fa.build.keys import PACKAGE
from pytest_fa.build.late_imports import installed_folders
from pytest_fa.catalog.variant import Variant, is_shared_object


def import_from(top: Path, variant: Variant) -> str:
    """A module in the working tree `top` that a variant in another folder imports, with its place; else empty.

    The imports are read, not run.  Those of a name that only the running code knows are not seen.
    """
    own_folders = (Path(variant.folder), Path(variant.root))
    for name in dict.fromkeys(_imported_names(variant)):
        if any((folder / f"{name}.py").is_file() or (folder / name).is_dir() for folder in own_folders):
            continue
        for place in _places_of(name):
            if place.is_relative_to(top) and not is_installed(place):
                return f"{name!r} from {place}"
    return ""


def is_installed(path: Path) -> bool:
    """Whether a file belongs to this package or to an installed one.  A virtual environment may be in a repository."""
    return any(path.is_relative_to(folder) for folder in (str(PACKAGE), *installed_folders()))


def _imported_names(variant: Variant) -> Iterator[str]:
    """The first part of each imported name: of the manifest, and of the modules in the variant's folder."""
    entry = variant.entry
    modules = [name for name in entry.libraries if not is_shared_object(name)] if entry.is_operator else [entry.target]
    for text in filter(None, (*modules, entry.context)):
        module = text.partition(":")[0]
        if not (Path(variant.folder) / f"{module}.py").is_file():
            yield module.partition(".")[0]
    for path in sorted(Path(variant.folder).rglob("*.py")):
        yield from _names_in(path)


def _names_in(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return  # loading it says what is wrong
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _places_of(name: str) -> Iterator[Path]:
    """Where a worker, which starts in this folder, would find a module."""
    specs = [importlib.machinery.PathFinder.find_spec(name, [str(Path.cwd()), *sys.path])]
    with contextlib.suppress(ImportError, ValueError):
        specs.append(importlib.util.find_spec(name))
    for spec in filter(None, specs):
        origin = spec.origin if spec.has_location else None
        places = [*(spec.submodule_search_locations or ()), *([origin] if origin else [])]
        yield from (Path(place).resolve() for place in places)

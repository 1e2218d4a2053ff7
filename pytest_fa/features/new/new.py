"""`python -m pytest_fa new NAME`: write the folder of a new variant, which builds and passes as it is."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path

import pytest_fa
from pytest_fa.catalog.discover import discover
from pytest_fa.catalog.grammar import NAME
from pytest_fa.errors import UsageProblem

TEMPLATES = Path(pytest_fa.__file__).parent / "template"


def run(options: argparse.Namespace) -> None:
    """Write the folder, and print the command that tests it."""
    folder = write_variant(options.name, options.kind, options.kernels)
    option = "" if options.kernels == Path("kernels") else f" --fa-kernels={shlex.quote(str(options.kernels))}"
    sys.stdout.write(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}\n")
    sys.stdout.write(f"next: pytest --pyargs pytest_fa.suite{option} --fa-variant={options.name}\n")


def write_variant(name: str, kind: str, kernels: Path) -> Path:
    """Write `<kernels>/<name>/` from the template for `kind`, and return that folder.

    Raises `UsageProblem` if the name is malformed, or if a variant or folder of that name already exists.
    """
    if not re.fullmatch(NAME, name):
        form = "lowercase letters, digits and _, starting with a letter"
        raise UsageProblem(f"new: {name!r} is not a valid variant name; use {form}")
    roots = (kernels,) if kernels.is_dir() else ()
    catalog = discover(roots)
    if name in catalog.variants or name in catalog.clashes:
        raise UsageProblem(f"new: variant {name!r} already exists (see --fa-list); choose another name")
    folder = kernels / name
    if folder.exists():
        raise UsageProblem(f"new: folder {str(folder)!r} already exists; nothing was written; choose another name")
    folder.mkdir(parents=True)
    for template in sorted(path for path in (TEMPLATES / kind).iterdir() if path.is_file()):  # pip adds __pycache__
        text = re.sub(r"\bNAME\b", name, template.read_text(encoding="utf-8"))  # not part of TORCH_EXTENSION_NAME
        (folder / template.name).write_text(text, encoding="utf-8")
    return folder

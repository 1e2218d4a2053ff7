"""`python -m pytest_fa new NAME`: a variant folder that works, to be changed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest_fa
from pytest_fa.catalog.discover import discover
from pytest_fa.catalog.manifest import NAME
from pytest_fa.errors import UsageProblem

TEMPLATES = Path(pytest_fa.__file__).parent / "template"
KINDS = ("cuda", "torch", "python", "triton")


def write_variant(name: str, kind: str, kernels: Path) -> Path:
    """Write `<kernels>/<name>/` from the template of its kind, and give the folder.

    Raises `UsageProblem` for a name that cannot be, or that a variant or a folder already has.
    """
    if not re.fullmatch(NAME, name):
        form = "small letters, digits and _, a letter first"
        raise UsageProblem(f"new: {name!r} is no name for a variant; it must be {form}")
    roots = (kernels,) if kernels.is_dir() else ()
    if name in discover(roots).variants:
        raise UsageProblem(f"new: there is a variant {name!r} already (see --fa-list)")
    folder = kernels / name
    if folder.exists():
        raise UsageProblem(f"new: {str(folder)!r} exists already; nothing was written")
    folder.mkdir(parents=True)
    for template in sorted(path for path in (TEMPLATES / kind).iterdir() if path.is_file()):  # pip adds __pycache__
        text = re.sub(r"\bNAME\b", name, template.read_text(encoding="utf-8"))  # not in TORCH_EXTENSION_NAME
        (folder / template.name).write_text(text, encoding="utf-8")
    return folder

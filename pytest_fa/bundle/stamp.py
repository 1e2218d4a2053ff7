"""The stamp: commit and dirty state in a file, for a tree that is copied without its git folder."""

from __future__ import annotations

from pathlib import Path

from pytest_fa.errors import UsageProblem
from pytest_fa.records.record import to_json
from pytest_fa.records.source import STAMP_NAME, make_stamp, read_source


def write_stamp(folder: Path) -> Path:
    """Write `.fa-source.json` from git.  Raises `UsageProblem` where there is no git commit to write down."""
    source = read_source(folder)
    if source.origin != "git" or source.commit is None:
        raise UsageProblem(f"{folder}: no git commit to write down ({source.origin})")
    path = folder / STAMP_NAME
    path.write_bytes(to_json(make_stamp(folder, source)) + b"\n")
    return path

"""Write the stamp file: the commit and the dirty state, for a tree that is copied without its `.git` folder."""

from __future__ import annotations

from pathlib import Path

from pytest_fa.errors import UsageProblem
from pytest_fa.records.record import to_json
from pytest_fa.records.source import STAMP_NAME, make_stamp, read_source


def write_stamp(folder: Path) -> Path:
    """Write `.fa-source.json` with the git commit of `folder`.  Raises `UsageProblem` if there is no commit."""
    source = read_source(folder)
    if source.origin != "git" or source.commit is None:
        raise UsageProblem(f"{folder}: no git commit to record ({source.origin})")
    path = folder / STAMP_NAME
    path.write_bytes(to_json(make_stamp(folder, source)) + b"\n")
    return path

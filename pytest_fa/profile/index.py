"""`index.json` beside the reports: which report belongs to what, one entry for each report, the newest run's."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec

from pytest_fa.records.tool_results import NsightReport, NsightStatus

NAME = "index.json"


class IndexEntry(msgspec.Struct, frozen=True):
    """One report, or why there is none.  Paths are from the run's root, as in the records."""

    id: str
    preset: str
    status: NsightStatus
    message: str
    report: str | None
    table: str | None
    report_sha256: str | None
    kernels: tuple[str, ...]
    bottlenecks: tuple[str, ...]
    tool: str
    seconds: float
    measured_at: str


def add_entry(folder: Path, root: Path, item: str, profile: NsightReport, measured_at: str) -> Path:
    """Put one profile into the index of `folder`, in place of an older one of the same id and preset."""
    path = folder / NAME
    kept = {(each.id, each.preset): each for each in read_index(path)}
    kept[(item, profile.preset)] = IndexEntry(
        id=item,
        preset=profile.preset,
        status=profile.status,
        message=profile.message,
        report=profile.report,
        table=profile.table,
        report_sha256=_sha256(root / profile.report) if profile.report else None,
        kernels=tuple(each.name for each in profile.kernels),
        bottlenecks=tuple(each.bottleneck.sentence for each in profile.kernels if each.bottleneck),
        tool=profile.tool,
        seconds=profile.seconds,
        measured_at=measured_at,
    )
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    folder.mkdir(parents=True, exist_ok=True)
    scratch.write_bytes(msgspec.json.format(msgspec.json.encode([kept[key] for key in sorted(kept)])) + b"\n")
    scratch.replace(path)
    return path


def read_index(path: Path) -> tuple[IndexEntry, ...]:
    """The entries of an index; none where there is no file, or one that cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=tuple[IndexEntry, ...])
    except (OSError, msgspec.MsgspecError):
        return ()


def _sha256(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None

"""`index.json` in the reports' folder: one entry for each case and preset, made by its newest run."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import msgspec

from pytest_fa.features.ncu.nsight_report import NsightReport, NsightStatus

NAME = "index.json"


class IndexEntry(msgspec.Struct, frozen=True):
    """One report, or the reason why there is none.  Paths are relative to pytest's rootdir, as in the records."""

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
    """Write one profile into the index of `folder`, in place of an older entry with the same id and preset."""
    path = folder / NAME
    entries = {(entry.id, entry.preset): entry for entry in read_index(path)}
    if not entries and path.exists():
        path.replace(path.with_suffix(".unreadable.json"))  # it may be of a later version; nothing of it is lost
    entries[(item, profile.preset)] = IndexEntry(
        id=item,
        preset=profile.preset,
        status=profile.status,
        message=profile.message,
        report=profile.report,
        table=profile.table,
        report_sha256=_sha256(root / profile.report) if profile.report else None,
        kernels=tuple(kernel.name for kernel in profile.kernels),
        bottlenecks=tuple(kernel.bottleneck.sentence for kernel in profile.kernels if kernel.bottleneck),
        tool=profile.tool,
        seconds=profile.seconds,
        measured_at=measured_at,
    )
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    folder.mkdir(parents=True, exist_ok=True)
    scratch.write_bytes(msgspec.json.format(msgspec.json.encode([entries[key] for key in sorted(entries)])) + b"\n")
    scratch.replace(path)
    return path


def read_index(path: Path) -> tuple[IndexEntry, ...]:
    """The entries of an index; none if the file does not exist or cannot be read."""
    try:
        entries = msgspec.json.decode(path.read_bytes())
        return msgspec.convert([_upgraded(entry) for entry in entries], tuple[IndexEntry, ...])
    except (OSError, TypeError, AttributeError, ValueError, RecursionError, msgspec.MsgspecError):
        return ()


def _upgraded(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an entry with the current name of `bottlenecks`, which was `verdicts`."""
    return {"bottlenecks" if key == "verdicts" else key: value for key, value in entry.items()}


def _sha256(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None

"""The times of the rungs on a GPU, saved in `profiles/<gpu>/rungs.json` by `python -m kernels.auto.measure` there."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pytest_fa.records.environment import gpu_folder
from pytest_fa.records.files import read_content
from pytest_fa.records.record import Environment, Source

NAME = "rungs.json"


class RungTimes(msgspec.Struct, frozen=True):
    """The microseconds per call of each rung, by shape and rung."""

    us: dict[str, dict[str, float]]
    environment: Environment
    source: Source
    measured_at: str
    sms: int = 132  # a file without it is of an H200


def read_rung_times(folder: Path) -> RungTimes | None:
    """What was measured on the GPU of a folder, or None without a file.  Raises `UnreadableRecords`."""
    remedy = "measure it again with `python -m kernels.auto.measure`"
    return read_content(folder / NAME, lambda data: msgspec.json.decode(data, type=RungTimes), remedy)


def write_rung_times(times: RungTimes, records_folder: Path) -> Path:
    """Write what was measured, replacing older figures, and return the file."""
    path = records_folder / gpu_folder(times.environment.gpu) / NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(times), indent=0).replace(b",\n", b",") + b"\n")
    return path

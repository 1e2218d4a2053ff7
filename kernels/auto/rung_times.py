"""The times of the rungs on a GPU, saved in `profiles/<gpu>/` by `python -m kernels.auto.measure` there."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pytest_fa.records.environment import gpu_folder
from pytest_fa.records.files import read_content
from pytest_fa.records.record import Environment, Source

RUNG_TIMES = "rungs.json"
UNSEEN = "unseen.json"  # of problems that no cost is fitted to, also with SDPA
SDPA = ("sdpa_cudnn", "sdpa_flash", "sdpa_efficient")


class RungTimes(msgspec.Struct, frozen=True):
    """The microseconds per call of each rung, by shape and rung; of unseen problems also those of SDPA."""

    us: dict[str, dict[str, float]]
    environment: Environment
    source: Source
    measured_at: str
    sms: int = 132  # a file without it is of an H200


def read_rung_times(folder: Path, name: str = RUNG_TIMES) -> RungTimes | None:
    """What was measured on the GPU of a folder, or None without a file.  Raises `UnreadableRecords`."""
    remedy = "measure it again with `python -m kernels.auto.measure`"
    return read_content(folder / name, lambda data: msgspec.json.decode(data, type=RungTimes), remedy)


def write_rung_times(times: RungTimes, records_folder: Path, name: str = RUNG_TIMES) -> Path:
    """Write what was measured, replacing older figures, and return the file."""
    path = records_folder / gpu_folder(times.environment.gpu) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(times), indent=0).replace(b",\n", b",") + b"\n")
    return path

"""How far matrix products and softmax overlap on a GPU, saved in `profiles/<gpu>/pipes.json` by a test on that GPU."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pytest_fa.records.environment import gpu_folder
from pytest_fa.records.files import read_content
from pytest_fa.records.record import Environment, Source
from pytest_fa.records.timing import Clocks

NAME = "pipes.json"


class Loop(msgspec.Struct, frozen=True):
    """The time of one launch of a loop, and NVML's readings while it ran."""

    samples_us: tuple[float, ...]
    median_us: float
    clocks: Clocks | None


class Pipes(msgspec.Struct, frozen=True):
    """The times of all loops on one GPU.

    `tflops` counts the products that the loop computes or, for `softmax`, those of the same tiles.  `per_clock` are the
    maxima per clock and multiprocessor, at the clock that NVML read.
    """

    loops: dict[str, Loop]
    tflops: dict[str, float]
    per_clock: dict[str, float]
    environment: Environment
    source: Source | None = None  # of older files it is not known, nor is the time
    measured_at: str = ""


def read_pipes(records_folder: Path, gpu: str) -> Pipes | None:
    """Return what was measured on a GPU, or None without a file.  Raises `UnreadableRecords` if it cannot be read."""
    remedy = "measure it again with `FA_SAVE_PIPES=profiles pytest -c tests/pytest.ini tests/device/test_pipes.py`"
    return read_content(_path(records_folder, gpu), lambda data: msgspec.json.decode(data, type=Pipes), remedy)


def write_pipes(pipes: Pipes, records_folder: Path) -> Path:
    """Write what was measured on a GPU, replacing older figures, and return the file."""
    path = _path(records_folder, pipes.environment.gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(pipes)) + b"\n")
    return path


def _path(records_folder: Path, gpu: str | None) -> Path:
    return records_folder / gpu_folder(gpu) / NAME

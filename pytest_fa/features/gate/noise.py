"""The measured spread of times between processes on one machine, which limits what a gate can decide."""

from __future__ import annotations

import statistics
from pathlib import Path

import msgspec

from pytest_fa.records.environment import gpu_folder
from pytest_fa.records.files import read_content
from pytest_fa.records.paired import PairSamples
from pytest_fa.records.ranges import Natural, Seconds
from pytest_fa.records.record import Environment, Source

NAME = "noise.json"
MIN_SAMPLES = 2  # a standard deviation needs two


class Noise(msgspec.Struct, frozen=True):
    """The raw blocks of SDPA backends that were timed against each other in a pool of new processes.

    `candidates` names the first backend of each pair; `control` is the second backend against itself (the A/A control),
    with separate buffers and captured graphs.
    """

    pairs: tuple[PairSamples, ...]
    candidates: tuple[str, ...]
    processes: Natural
    seconds_per_process: Seconds
    environment: Environment
    source: Source
    measured_at: str

    @property
    def process_sd(self) -> float:
        """The largest standard deviation of process means among the pairs of different kernels."""
        return max(
            statistics.stdev(pair.means)
            for pair, name in zip(self.pairs, self.candidates, strict=True)
            if name != pair.baseline
        )


def noise_path(records_folder: Path, gpu: str | None) -> Path:
    """Return the file of a GPU's noise, such as `profiles/nvidia-h200/noise.json`."""
    return records_folder / gpu_folder(gpu) / NAME


def read_noise(records_folder: Path, gpu: str | None) -> Noise | None:
    """Return a GPU's saved noise, or None if there is no file.  Raises `UnreadableRecords` if it cannot be read."""
    return read_content(
        noise_path(records_folder, gpu), decode_noise, "measure it again with `python -m pytest_fa noise`"
    )


def decode_noise(data: bytes) -> Noise:
    """Return the noise of a file's content.

    Raises `msgspec.ValidationError` also if there are too few samples for a standard deviation.
    """
    noise = msgspec.json.decode(data, type=Noise)
    rows = [row for pair in noise.pairs for row in (*pair.blocks, *pair.control)]
    processes = {len(samples) for pair in noise.pairs for samples in (pair.blocks, pair.control)}
    if len(noise.pairs) != len(noise.candidates) or processes != {noise.processes} or noise.processes < MIN_SAMPLES:
        raise msgspec.ValidationError("the numbers of pairs, candidates and processes do not match")
    if any(len(row) < MIN_SAMPLES for row in rows):
        raise msgspec.ValidationError(f"a process has fewer than {MIN_SAMPLES} blocks")
    if all(name == pair.baseline for pair, name in zip(noise.pairs, noise.candidates, strict=True)):
        raise msgspec.ValidationError("no pair has two different kernels")
    return noise


def write_noise(noise: Noise, records_folder: Path) -> Path:
    """Write a GPU's noise, replacing an older one, and return the file."""
    path = noise_path(records_folder, noise.environment.gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(noise) + b"\n")
    return path

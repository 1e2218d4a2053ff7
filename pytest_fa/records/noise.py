"""How far fresh processes of one machine scatter: what a gate on it can decide at all."""

from __future__ import annotations

import statistics
from pathlib import Path

import msgspec

from pytest_fa.records.earlier import upgrade_noise
from pytest_fa.records.environment import gpu_folder
from pytest_fa.records.gated import PairSamples
from pytest_fa.records.record import Environment, Source

NAME = "noise.json"


class Noise(msgspec.Struct, frozen=True):
    """A pool of fresh processes in which SDPA backends met each other and themselves; raw blocks.

    In each pair `control` is the second backend against itself, with buffers and captures of its own.
    """

    pairs: tuple[PairSamples, ...]
    candidates: tuple[str, ...]
    processes: int
    seconds_per_process: float
    environment: Environment
    source: Source
    measured_at: str

    @property
    def process_sd(self) -> float:
        """The largest standard deviation of process means among pairs of different kernels."""
        return max(
            statistics.stdev(pair.means)
            for pair, name in zip(self.pairs, self.candidates, strict=True)
            if name != pair.baseline
        )


def noise_path(profiles: Path, gpu: str | None) -> Path:
    """`profiles/nvidia-h200/noise.json`."""
    return profiles / gpu_folder(gpu) / NAME


def read_noise(profiles: Path, gpu: str | None) -> Noise | None:
    """The machine's noise; None where it was never measured."""
    try:
        data = msgspec.json.decode(noise_path(profiles, gpu).read_bytes())
        return msgspec.convert(upgrade_noise(data), Noise)
    except (OSError, msgspec.MsgspecError):
        return None


def write_noise(noise: Noise, profiles: Path) -> Path:
    """Keep it in place of an older one."""
    path = noise_path(profiles, noise.environment.gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(noise) + b"\n")
    return path

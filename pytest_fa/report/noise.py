"""How far fresh processes of one machine scatter: what a gate on it can decide at all."""

from __future__ import annotations

import statistics
from pathlib import Path

import msgspec

from pytest_fa.gate.verdict import LOOKS, PairSamples, look
from pytest_fa.report.log import gpu_folder
from pytest_fa.report.record import Environment, Source

NAME = "noise.json"


class Noise(msgspec.Struct, frozen=True):
    """A pool of fresh processes in which SDPA backends met each other and themselves; raw blocks.

    In each pair `same` is the second backend against itself, with buffers and captures of its own.
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


class NoiseRow(msgspec.Struct, frozen=True):
    """One pair: its ratio, how far blocks and processes scatter, and how many of its groups would have a verdict."""

    shape_id: str
    candidate: str
    baseline: str
    ratio_mean: float
    block_sd: float
    process_sd: float
    groups: int
    decided: int


def noise_rows(noise: Noise) -> list[NoiseRow]:
    """Every pair, and every backend against itself once more from the `same` of its pair.

    Groups of 12 processes are gated at a ratio of 1; for a backend against itself no verdict is the right one.
    """
    rows = []
    for pair, name in zip(noise.pairs, noise.candidates, strict=True):
        rows.append(_row(name, pair, noise.process_sd))
        if name == pair.baseline:  # its `same` is a second sample of the same question
            turned = msgspec.structs.replace(pair, blocks=pair.same, same=pair.blocks)
            rows.append(_row(name, turned, noise.process_sd))
    return rows


def _row(candidate: str, pair: PairSamples, process_sd: float) -> NoiseRow:
    size = LOOKS[-1]
    starts = range(0, len(pair.blocks) - size + 1, size)
    groups = [
        msgspec.structs.replace(pair, blocks=pair.blocks[at : at + size], same=pair.same[at : at + size])
        for at in starts
    ]
    return NoiseRow(
        shape_id=pair.shape_id,
        candidate=candidate,
        baseline=pair.baseline,
        ratio_mean=statistics.fmean(pair.means),
        block_sd=statistics.fmean(statistics.stdev(row) for row in pair.blocks),
        process_sd=statistics.stdev(pair.means),
        groups=len(groups),
        decided=sum(_is_decided(each, process_sd) for each in groups),
    )


def _is_decided(pair: PairSamples, process_sd: float) -> bool:
    """Whether a gate at 1 over this group would have ended with PASS or FAIL."""
    for count in LOOKS:
        so_far = msgspec.structs.replace(pair, blocks=pair.blocks[:count], same=pair.same[:count])
        found = look([so_far], 1.0, is_last=count == LOOKS[-1], process_sd=process_sd)
        if found.verdict in ("PASS", "FAIL"):
            return True
    return False


def noise_path(profiles: Path, gpu: str | None) -> Path:
    """`profiles/nvidia-h200/noise.json`."""
    return profiles / gpu_folder(gpu) / NAME


def read_noise(profiles: Path, gpu: str | None) -> Noise | None:
    """The machine's noise; None where it was never measured."""
    try:
        return msgspec.json.decode(noise_path(profiles, gpu).read_bytes(), type=Noise)
    except (OSError, msgspec.MsgspecError):
        return None


def write_noise(noise: Noise, profiles: Path) -> Path:
    """Keep it in place of an older one."""
    path = noise_path(profiles, noise.environment.gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(noise) + b"\n")
    return path

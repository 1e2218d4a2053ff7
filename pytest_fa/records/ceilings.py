"""What a GPU can do at all, measured once and kept beside its records: the scale for every other figure."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pytest_fa.catalog.case import Case
from pytest_fa.records.environment import gpu_folder
from pytest_fa.records.record import Environment, Source
from pytest_fa.records.timing import Clocks, Timing

NAME = "ceilings.json"
IMPOSSIBLE = 1.05  # times the ceiling: past what measuring it again would explain


class Ceilings(msgspec.Struct, frozen=True):
    """Copy bandwidth, matrix rates on random data and the cheapest launch; raw samples beside each.

    `copy_gb_per_s` counts bytes read and bytes written, `matmul_tflops` has a rate for each dtype, `empty_launch_us` is
    the period of empty kernels of one block.
    """

    copy_gb_per_s: float
    matmul_tflops: dict[str, float]
    empty_launch_us: float
    timings: dict[str, Timing]
    clocks_during: Clocks | None
    environment: Environment
    source: Source
    measured_at: str

    def least_us(self, case: Case) -> float:
        """The least microseconds that the matrix products of a case can take; 0 where its dtype was not measured."""
        rate = self.matmul_tflops.get(case.dtype)
        return case.flops_per_call / rate / 1e6 if rate else 0.0


def ceilings_path(profiles: Path, gpu: str | None) -> Path:
    """`profiles/nvidia-h200/ceilings.json`."""
    return profiles / gpu_folder(gpu) / NAME


def read_ceilings(profiles: Path, gpu: str | None) -> Ceilings | None:
    """The GPU's ceilings; None where they were never measured."""
    path = ceilings_path(profiles, gpu)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Ceilings)
    except (OSError, msgspec.MsgspecError):
        return None


def write_ceilings(ceilings: Ceilings, profiles: Path) -> Path:
    """Keep a GPU's ceilings in place of older ones."""
    path = ceilings_path(profiles, ceilings.environment.gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(ceilings)) + b"\n")
    return path

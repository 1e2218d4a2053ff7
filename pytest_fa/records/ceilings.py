"""The measured peak rates of a GPU, saved in `profiles/<gpu>/ceilings.json` and used to judge every other time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from pytest_fa.catalog.case import Case
from pytest_fa.records.environment import gpu_folder
from pytest_fa.records.files import read_content
from pytest_fa.records.ranges import Rate, Us
from pytest_fa.records.record import Environment, Source
from pytest_fa.records.timing import Clocks, Timing

NAME = "ceilings.json"
CEILING_MARGIN = 1.05  # rates above 1.05 times the ceiling exceed the spread of repeated measurements
MAX_FASTER = 1.5  # by how much the SM clock of a call may exceed that of the matrix products
BYTES_MARGIN = 1.15  # the same for bytes: a call that mostly reads can be faster than a copy


class Floor(NamedTuple):
    """The times that no call on a case can undercut, in microseconds; 0 where a rate was not measured."""

    matrices_us: float = 0.0  # the matrix products at the peak rate
    bytes_us: float = 0.0  # q, k, v and the output, each read or written once, at the rate of a copy


class Ceilings(msgspec.Struct, frozen=True):
    """Copy bandwidth, matrix multiplication rates on random data, and the time of an empty launch.

    `copy_gb_per_s` counts bytes read and bytes written, in memory; `l2_copy_gb_per_s` does so for a copy within L2.
    `matmul_tflops` has a rate for each dtype.  `empty_launch_us` is the period of empty kernels of one block.
    `timings` holds the raw samples of each figure.
    """

    copy_gb_per_s: Rate
    matmul_tflops: Annotated[dict[str, Rate], msgspec.Meta(min_length=1)]
    empty_launch_us: Us
    timings: dict[str, Timing]
    clocks_during: Clocks | None
    environment: Environment
    source: Source
    measured_at: str
    l2_copy_gb_per_s: Rate | None = None

    def floor(self, case: Case, l2_bytes: int | None, sm_mhz: int | None = None) -> Floor:
        """Return the least times of a call on a case; `l2_bytes` is the size of the L2 cache.

        Up to `l2_bytes` may be in L2 from the call before.  They take the time of a copy within L2, or 0 if its rate is
        not known.  The other bytes come from memory.

        `sm_mhz` is the highest SM clock that was read around the calls.  The rate of matrix products was measured under
        a power cap, at a lower clock.  Timed calls come in short runs with pauses, so their clock lies between that and
        the highest.  They can exceed the rate as far as the clock is higher.
        """
        size = case.touched_bytes
        in_l2 = min(size, l2_bytes if l2_bytes is not None else size)
        l2_us = in_l2 / self.l2_copy_gb_per_s / 1e3 if self.l2_copy_gb_per_s else 0.0
        measured_mhz = self.clocks_during.sm_mhz if self.clocks_during else 0
        faster = min(MAX_FASTER, max(1.0, sm_mhz / measured_mhz)) if sm_mhz and measured_mhz else 1.0
        return Floor(self.least_us(case) / faster, l2_us + (size - in_l2) / self.copy_gb_per_s / 1e3)

    def least_us(self, case: Case) -> float:
        """Return the microseconds that the matrix products of a case take at the peak rate; 0 if that is not known."""
        rate = self.matmul_tflops.get(case.dtype)
        return case.flops_per_call / rate / 1e6 if rate else 0.0

    def copy_us(self, case: Case) -> float:
        """Return the microseconds that the bytes of a case take at the rate of a copy."""
        return case.bytes_per_call / self.copy_gb_per_s / 1e3

    def is_bound_by_bytes(self, case: Case) -> bool:
        """Return whether the bytes of a case take longer than its matrix products, and than an empty launch."""
        rate_is_known = case.dtype in self.matmul_tflops
        return rate_is_known and self.copy_us(case) > max(self.least_us(case), self.empty_launch_us)


def ceilings_path(records_folder: Path, gpu: str | None) -> Path:
    """Return the file of a GPU's ceilings, such as `profiles/nvidia-h200/ceilings.json`."""
    return records_folder / gpu_folder(gpu) / NAME


def read_ceilings(records_folder: Path, gpu: str | None) -> Ceilings | None:
    """Return a GPU's saved ceilings, or None if there is no file.  Raises `UnreadableRecords` if it cannot be read."""
    remedy = "measure them again with `python -m pytest_fa ceilings`"
    return read_content(
        ceilings_path(records_folder, gpu), lambda data: msgspec.json.decode(data, type=Ceilings), remedy
    )


def write_ceilings(ceilings: Ceilings, records_folder: Path) -> Path:
    """Write a GPU's ceilings, replacing older ones, and return the file."""
    path = ceilings_path(records_folder, ceilings.environment.gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(ceilings)) + b"\n")
    return path

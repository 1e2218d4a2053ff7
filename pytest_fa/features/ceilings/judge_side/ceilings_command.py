"""`python -m pytest_fa ceilings`: measures the peak rates of this GPU."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pytest_fa.features.ceilings.judge_side.measure_ceilings import measure_ceilings
from pytest_fa.host.timing_lock import timing_lock
from pytest_fa.records.ceilings import write_ceilings


def run(options: argparse.Namespace) -> None:
    """Measure the rates while nothing else is timed, save them, and print them."""
    with timing_lock():
        measured = measure_ceilings(Path())
    path = write_ceilings(measured, options.profiles)
    rates = ", ".join(f"{name} {rate:.0f} TFLOP/s" for name, rate in measured.matmul_tflops.items())
    sys.stdout.write(f"{measured.environment.gpu}: copy {measured.copy_gb_per_s:.0f} GB/s, {rates}, ")
    sys.stdout.write(f"empty launch {measured.empty_launch_us:.2f} us\n{path}\n")

"""`python -m pytest_fa noise`: measures the spread of times between processes, and saves it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pytest_fa.features.gate.measure_noise import measure_noise
from pytest_fa.features.gate.noise import write_noise
from pytest_fa.features.gate.noise_table import noise_rows


def run(options: argparse.Namespace) -> None:
    """Measure the noise of this GPU, save it in the records folder, and print a line for each pair."""
    noise = measure_noise(Path(), options.processes, lambda text: sys.stderr.write(f"\r{text}"))
    path = write_noise(noise, options.profiles)
    sys.stderr.write("\n")
    for row in noise_rows(noise):
        sys.stdout.write(
            f"{row.shape_id}  {row.candidate} / {row.baseline}: processes {100 * row.process_sd:.2f} %, "
            f"blocks {100 * row.block_sd:.2f} %, PASS or FAIL in {row.decided} of {row.groups} simulated gates\n"
        )
    sys.stdout.write(f"{path}\n")

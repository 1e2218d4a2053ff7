"""`python -m pytest_fa sweep show`: prints the history of a sweep, its defines and its end."""

from __future__ import annotations

import argparse
import sys

from pytest_fa.features.sweep.read_study import read_study
from pytest_fa.features.sweep.sweep_lines import show_lines
from pytest_fa.records.text import printable


def run(options: argparse.Namespace) -> None:
    """Print a study, and draw or export it if that was asked for."""
    study = read_study(options.study, options.name)
    for line in show_lines(study):
        sys.stdout.write(f"{printable(line)}\n")
    if options.svg:
        from pytest_fa.features.sweep.sweep_picture import draw_sweep  # noqa: PLC0415  # it needs matplotlib

        draw_sweep(study.facts, study.trials, study.end, options.svg)
        sys.stdout.write(f"{options.svg}\n")

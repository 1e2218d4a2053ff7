"""What `python -m pytest_fa doctor` is called with."""

from __future__ import annotations

import argparse
from pathlib import Path

from pytest_fa.feature import Feature, Subcommand


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--kernels", type=Path, default=Path("kernels"))
    parser.add_argument("--cache", type=Path, help="the folder of --fa-cache")
    parser.add_argument("--profiles", type=Path, default=Path("profiles"))


HELP = "list what this machine has for a run, what it lacks, and what to do"
FEATURE = Feature(
    "doctor",
    commands=(Subcommand("doctor", HELP, "doctor_command", add_arguments),),
    requires=("ncu", "sanitize"),
    has_hooks=False,
)

"""What `python -m pytest_fa ceilings` is called with."""

from __future__ import annotations

import argparse
from pathlib import Path

from pytest_fa.feature import Feature, Subcommand


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--profiles", type=Path, default=Path("profiles"))


HELP = "measure this GPU's peak rates, and save them in profiles/<gpu>/"
FEATURE = Feature(
    "ceilings", commands=(Subcommand("ceilings", HELP, "judge_side.ceilings_command", add_arguments),), has_hooks=False
)

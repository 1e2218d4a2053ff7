"""What `python -m pytest_fa costs` is called with."""

from __future__ import annotations

import argparse
from pathlib import Path

from pytest_fa.feature import Feature, Subcommand


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    forms = "a record file, a folder of them, a bundle, or a git revision; default: the newest run in --artifacts"
    parser.add_argument("records", metavar="RECORDS", nargs="*", help=f"{forms}; a second one is compared with it")
    parser.add_argument("--artifacts", type=Path, default=Path("artifacts"), help="the folder of --fa-artifacts")


FEATURE = Feature(
    "costs",
    commands=(
        Subcommand("costs", "say where the seconds of a run went, or of two runs", "costs_command", add_arguments),
    ),
    requires=("compare",),
    has_hooks=False,
)

"""What `python -m pytest_fa new` is called with."""

from __future__ import annotations

import argparse
from pathlib import Path

from pytest_fa.feature import Feature, Subcommand

KINDS = ("cuda", "torch", "python", "triton")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("name")
    parser.add_argument("--kind", choices=KINDS, default=KINDS[0])
    parser.add_argument("--kernels", type=Path, default=Path("kernels"))


FEATURE = Feature(
    "new",
    commands=(Subcommand("new", "write the folder of a new variant, which is correct but slow", "new", add_arguments),),
    has_hooks=False,
)

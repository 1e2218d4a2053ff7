"""What `python -m pytest_fa compare` is called with."""

from __future__ import annotations

import argparse
from pathlib import Path

from pytest_fa.feature import Feature, Subcommand


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    side = "a record file, a folder of them, a bundle, or a git revision (its profiles/; REVISION:FOLDER for another)"
    parser.add_argument("a", metavar="A", help=side)
    parser.add_argument("b", metavar="B", help="the same, to compare with A")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument("--markdown", action="store_true", help="print Markdown")
    parser.add_argument("--all", action="store_true", help="also list rows that did not change or that one side lacks")
    parser.add_argument("--fail-on", default="", metavar="VERDICT[,...]", help="exit with 1 if a row has this verdict")
    parser.add_argument("--profiles", type=Path, default=Path("profiles"), help="where noise.json of a GPU is")


FEATURE = Feature(
    "compare",
    commands=(Subcommand("compare", "say what changed between two sets of records", "compare_command", add_arguments),),
    requires=("gate", "bundle"),
    has_hooks=False,
)

"""What `python -m pytest_fa export` is called with."""

from __future__ import annotations

import argparse
from pathlib import Path

from pytest_fa.feature import Feature, Subcommand

FORMATS = ("csv", "github-action-benchmark", "perfetto")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("records", help="a record file, a folder of them, a bundle, or a git revision")
    parser.add_argument("--format", choices=FORMATS, required=True)
    parser.add_argument("-o", "--output", type=Path, help="the file to write; without it, stdout")


FEATURE = Feature(
    "export",
    commands=(Subcommand("export", "write records in the format of another tool", "export_command", add_arguments),),
    requires=("compare",),
    has_hooks=False,
)

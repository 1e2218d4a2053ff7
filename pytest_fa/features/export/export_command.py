"""`python -m pytest_fa export`: writes records in the format of another tool."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pytest_fa.features.compare.sides import read_side
from pytest_fa.features.export.export_formats import EXPORTS


def run(options: argparse.Namespace) -> None:
    """Write the file, or to stdout."""
    side = read_side(options.records, Path.cwd())
    content = EXPORTS[options.format](side.records)
    for complaint in side.complaints:
        sys.stderr.write(f"pytest_fa: {complaint}\n")
    if options.output is None:
        sys.stdout.buffer.write(content)
    else:
        options.output.write_bytes(content)

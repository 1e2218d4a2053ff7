"""`python -m pytest_fa report`: writes one HTML file about records."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pytest_fa.errors import UsageProblem
from pytest_fa.features.compare.sides import read_sides
from pytest_fa.features.html.machine import PageFacts
from pytest_fa.features.html.render import write_report


def run(options: argparse.Namespace) -> None:
    """Write the page.  Raises `UsageProblem` if its folder is missing."""
    if not options.output.parent.is_dir():
        raise UsageProblem(f"-o {options.output}: there is no folder {options.output.parent}; make it, or name another")
    side = read_sides(options.records, Path.cwd())
    facts = PageFacts(side.name, options.profiles, complaints=side.complaints, hidden=side.hidden)
    write_report(options.output, side.records, facts)
    for complaint in side.complaints:
        sys.stderr.write(f"pytest_fa: {complaint}\n")
    kilobytes = options.output.stat().st_size / 1000
    sys.stdout.write(f"{options.output}: {len(side.records)} records, {kilobytes:.0f} KB\n")

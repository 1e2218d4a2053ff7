"""`python -m pytest_fa costs`: says where the seconds of a run went."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pytest_fa.errors import UsageProblem
from pytest_fa.features.costs.cost_sides import newest_run, read_cost_side
from pytest_fa.features.costs.cost_table import cost_markdown

MAX_SIDES = 2


def run(options: argparse.Namespace) -> None:
    """Print the table of one run, or of two beside each other."""
    words = options.records or [newest_run(options.artifacts)]
    if len(words) > MAX_SIDES:
        raise UsageProblem(f"costs: {len(words)} runs; give one, or two to compare")
    sys.stdout.write(f"{cost_markdown([read_cost_side(word, Path.cwd()) for word in words])}\n")

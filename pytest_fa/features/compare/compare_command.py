"""`python -m pytest_fa compare`: prints what changed between two sets of records."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pytest_fa.features.compare.compare import compare, process_sd_of, require_verdicts
from pytest_fa.features.compare.comparison import comparison_markdown, comparison_text
from pytest_fa.features.compare.sides import read_side
from pytest_fa.records.record import to_json


def run(options: argparse.Namespace) -> int:
    """Print the comparison; return 1 if a row has a verdict of `--fail-on`."""
    failing = require_verdicts(options.fail_on)
    sides = [read_side(word, Path.cwd()) for word in (options.a, options.b)]
    comparison = compare(sides[0], sides[1], lambda gpu: process_sd_of(options.profiles, gpu))
    if options.json:
        text = to_json(comparison).decode()
    elif options.markdown:
        text = comparison_markdown(comparison, with_all=options.all)
    else:
        text = comparison_text(comparison, with_all=options.all)
    sys.stdout.write(f"{text}\n")
    return int(any(row.verdict in failing for row in comparison.rows))

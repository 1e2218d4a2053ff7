"""Measures again what README, docs and ladders show.

    python -m tools.measure                    what is left to measure of this commit, and how long that takes
    python -m tools.measure --run              measure it on all visible GPUs, in a clean tree, and save it in profiles/
    python -m tools.measure --run --seconds N  begin only what is expected to end within N seconds
    python -m tools.measure --check            which rows are stale, dirty, mixed, missing or of another method
    python -m tools.measure --prune            remove results of earlier sources that nothing shows or needs
    python -m tools.measure ... --code         sources whose code is the same do not count: builds both, and compares
    python -m tools.measure ... PAGE ...       only the tables of these pages, and those that show a result with them;
                                               kernels/long.md:6 is one table, the one at this line

Repeat the run until nothing is left.  Then
`python -m tools.docs.markdown` writes the tables.

Exit status: 0 if nothing is left or at fault; 1 if something is; 2 if a page or a record cannot be read, or if nothing
can be measured here.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pytest_fa.errors import FaError
from pytest_fa.options.options import default_cache
from pytest_fa.records.source import read_source
from tools.measure.faults import check_lines
from tools.measure.machine_code import compare_builds
from tools.measure.measure import require_cards, require_clean, run_pieces
from tools.measure.plan import PYTEST, make_plan
from tools.measure.prune import remove_old_results
from tools.measure.tables import ShownPages


def main(arguments: list[str], root: Path | None = None, pytest: tuple[str, ...] = PYTEST) -> int:
    """Print the plan, check the records, or measure; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.measure", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="say which rows are out of date")
    what.add_argument("--run", action="store_true", help="measure what is left")
    what.add_argument("--prune", action="store_true", help="remove old results that nothing shows or needs")
    parser.add_argument("--seconds", type=float, help="with --run: the time after which no piece ends")
    parser.add_argument("--code", action="store_true", help="changed sources with the same code do not count")
    parser.add_argument(
        "pages", nargs="*", metavar="PAGE", help="a page or a table, such as kernels/long.md:6; default: all"
    )
    options = parser.parse_args(arguments)
    if options.seconds is not None and not options.run:
        parser.error("--seconds needs --run")
    if options.prune and options.pages:
        parser.error("--prune takes no page: what other pages show stays")
    try:
        same_code = compare_builds(default_cache()) if options.code else None
        pages = ShownPages(root or Path.cwd(), chosen=options.pages, same_code=same_code)
        if options.check:
            return _check(pages)
        if options.prune:
            return _prune(pages)
        return _run(pages, options.seconds, pytest) if options.run else _print_plan(pages)
    except (FaError, OSError) as problem:
        sys.stderr.write(f"{problem}\n")
        return 2


def _check(pages: ShownPages) -> int:
    lines, faults = check_lines(pages)
    _say(*lines, f"{faults} faults" if faults else "every row is of these sources, of one clean commit and of one card")
    return int(bool(faults))


def _prune(pages: ShownPages) -> int:
    _say(*(remove_old_results(pages) or ["nothing to remove"]))
    return 0


def _print_plan(pages: ShownPages) -> int:
    plan = make_plan(pages, read_source(pages.root))
    _say(*plan.lines)
    return int(bool(plan.pieces))


def _run(pages: ShownPages, seconds: float | None, pytest: tuple[str, ...]) -> int:
    source = require_clean(pages.root)
    uuids = require_cards(pages.tables())
    plan = make_plan(pages, source, [*uuids], pytest)
    _say(*plan.lines)
    if not run_pieces(pages.root, plan, uuids, seconds, _say):
        return 1
    left = make_plan(pages.read_again(), source, [*uuids], pytest)
    missing = [f"not measured: {each}" for piece in left.pieces for each in (piece.results or (piece.file,))]
    _say(*(missing or ["nothing is left"]))
    return int(bool(left.pieces))


def _say(*lines: str) -> None:
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`python -m pytest_fa.bundle stamp | differences | make`: the steps of `repro.sh` that need more than a shell."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pytest_fa.bundle.constraints import differences, read_constraints
from pytest_fa.bundle.run import make_bundle
from pytest_fa.bundle.stamp import write_stamp
from pytest_fa.errors import FaError


def main(arguments: list[str]) -> int:
    """Run one command; 2 and one line for what cannot be done."""
    given = _parser().parse_args(arguments)
    try:
        given.run(given)
    except (FaError, OSError) as problem:
        sys.stderr.write(f"pytest_fa.bundle: {problem}\n")
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pytest_fa.bundle", description=__doc__)
    commands = parser.add_subparsers(required=True)

    stamp = commands.add_parser("stamp", help="write commit and dirty state to a file, before a tree is copied")
    stamp.add_argument("folder", type=Path, nargs="?", default=Path())
    stamp.set_defaults(run=lambda given: _say(f"wrote {write_stamp(given.folder)}"))

    differ = commands.add_parser("differences", help="name each package that is not as the constraints say")
    differ.add_argument("constraints", type=Path)
    differ.set_defaults(run=lambda given: _list(given.constraints))

    make = commands.add_parser("make", help="write manifest.yaml and the archive of a run")
    make.add_argument("--folder", type=Path, default=Path())
    make.add_argument("--artifacts", type=Path, default=Path("artifacts"))
    make.add_argument("--records", type=Path, required=True, help="the run's record file")
    make.add_argument("--exit-status", type=int, required=True, help="pytest's exit status")
    make.set_defaults(run=_make)
    return parser


def _make(given: argparse.Namespace) -> None:
    paths = (given.folder, given.artifacts, given.records)
    folder, artifacts, records = (path.resolve() for path in paths)
    _say(f"bundle: {make_bundle(folder, artifacts, records, given.exit_status).relative_to(folder)}")


def _list(constraints: Path) -> None:
    found = differences(read_constraints(constraints))
    for each in found:
        _say(f"  {each}")
    _say(f"{len(found)} packages differ from {constraints}" if found else f"every package is as {constraints} says")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

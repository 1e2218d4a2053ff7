"""`python -m pytest_fa.bundle stamp | differences | make`: the steps of `repro.sh` that are written in Python."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pytest_fa.bundle.constraints import differences, read_constraints
from pytest_fa.bundle.run import make_bundle
from pytest_fa.bundle.stamp import write_stamp
from pytest_fa.errors import FaError


def main(arguments: list[str]) -> int:
    """Run one command; return 0, or 2 after one line on stderr if it fails."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (FaError, OSError) as problem:
        sys.stderr.write(f"pytest_fa.bundle: {problem}\n")
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pytest_fa.bundle", description=__doc__)
    commands = parser.add_subparsers(required=True)

    stamp = commands.add_parser("stamp", help="write commit and dirty state to .fa-source.json, before a copy")
    stamp.add_argument("folder", type=Path, nargs="?", default=Path())
    stamp.set_defaults(run=lambda options: _print(f"wrote {write_stamp(options.folder)}"))

    differ = commands.add_parser("differences", help="list packages whose version differs from the constraints")
    differ.add_argument("constraints", type=Path)
    differ.set_defaults(run=lambda options: _list_differences(options.constraints))

    make = commands.add_parser("make", help="write manifest.yaml and the archive of a run")
    make.add_argument("--folder", type=Path, default=Path())
    make.add_argument("--artifacts", type=Path, default=Path("artifacts"))
    make.add_argument("--records", type=Path, required=True, help="the run's record file")
    make.add_argument("--exit-status", type=int, required=True, help="pytest's exit status")
    make.set_defaults(run=_make)
    return parser


def _make(options: argparse.Namespace) -> None:
    paths = (options.folder, options.artifacts, options.records)
    folder, artifacts, records = (path.resolve() for path in paths)
    _print(f"bundle: {make_bundle(folder, artifacts, records, options.exit_status).relative_to(folder)}")


def _list_differences(constraints: Path) -> None:
    changed = differences(read_constraints(constraints))
    for difference in changed:
        _print(f"  {difference}")
    _print(f"{len(changed)} packages differ from {constraints}" if changed else f"all packages match {constraints}")


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The commands of `python -m pytest_fa bundle`: stamp, differences, make, verify and replay."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from pytest_fa.errors import FaError
from pytest_fa.features.bundle.constraints import differences, read_constraints
from pytest_fa.features.bundle.make import make_bundle
from pytest_fa.features.bundle.questions import REQUESTED_LEVELS, ReplaySelection
from pytest_fa.features.bundle.replay import replay_bundle, replay_text
from pytest_fa.features.bundle.stamp import write_stamp
from pytest_fa.features.bundle.verify import verification_text, verify_bundle
from pytest_fa.options.options import default_cache
from pytest_fa.records.record import to_json

REPLAY_STATUS = {"REPRODUCED": 0, "NOT REPRODUCED": 1, "NOT COMPARABLE": 3, "INCONCLUSIVE": 10}


def main(arguments: list[str]) -> int:
    """Run one command; return its exit status, or 2 after one line on stderr if it fails."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options) or 0
    except (FaError, OSError) as problem:
        sys.stderr.write(f"pytest_fa bundle: {problem}\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pytest_fa bundle", description=__doc__)
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
    make.add_argument("--with-libraries", action="store_true", help="also pack the built libraries of the run")
    make.add_argument("--cache", type=Path, help="the folder of --fa-cache; default: that of a run without it")
    make.set_defaults(run=_make)

    verify = commands.add_parser("verify", help="check a bundle: complete, unchanged, and every verdict follows")
    verify.add_argument("file", type=Path, help="repro_bundle_*.tar.gz; nothing in it is unpacked or executed")
    verify.add_argument("--json", action="store_true", help="print one JSON object")
    verify.set_defaults(run=_verify)

    replay = commands.add_parser("replay", help="run a bundle again; this compiles and runs the code in it")
    replay.add_argument("file", type=Path, help="repro_bundle_*.tar.gz")
    replay.add_argument(
        "--level",
        choices=REQUESTED_LEVELS,
        default="right",
        help="same code, same outcomes, same gates, or all that the bundle has; default: right",
    )
    replay.add_argument("--variant", type=_globs, default=(), metavar="GLOB[,...]", help="only these variants")
    replay.add_argument("--case", type=_globs, default=(), metavar="GLOB[,...]", help="only these judged cases")
    replay.add_argument("-o", "--output", type=Path, help="also write the JSON object to this file")
    replay.add_argument("--use-libraries", action="store_true", help="compile nothing: run the libraries in the bundle")
    replay.add_argument("--folder", type=Path, help="a folder to work in, which must not exist; it is kept")
    replay.add_argument("--json", action="store_true", help="print one JSON object")
    replay.set_defaults(run=_replay)
    return parser


def _replay(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="fa-replay-") as scratch:
        folder = options.folder or Path(scratch) / "replay"
        folder.mkdir(parents=True)
        replay = replay_bundle(
            options.file,
            options.level,
            folder.resolve(),
            _say,
            use_libraries=options.use_libraries,
            selection=ReplaySelection(options.variant, options.case),
        )
    if options.output:
        options.output.write_bytes(to_json(replay) + b"\n")
    _print(to_json(replay).decode() if options.json else replay_text(replay))
    return REPLAY_STATUS[replay.answer]


def _globs(word: str) -> tuple[str, ...]:
    return tuple(glob for glob in word.split(",") if glob)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _verify(options: argparse.Namespace) -> int:
    verification = verify_bundle(options.file)
    if options.json:
        _print(to_json(verification).decode())
    else:
        _print(verification_text(verification))
    return 0 if verification.is_verified else 1


def _make(options: argparse.Namespace) -> None:
    paths = (options.folder, options.artifacts, options.records)
    folder, artifacts, records = (path.resolve() for path in paths)
    cache = (options.cache or default_cache()).resolve()
    libraries_of = cache if options.with_libraries else None
    bundle = make_bundle(folder, artifacts, records, options.exit_status, libraries_of)
    if bundle.names:
        _say(f"the libraries name {', '.join(bundle.names)}; in a library, such a name cannot be replaced")
    _print(f"bundle: {bundle.archive.relative_to(folder)}, digest {bundle.digest}")


def _list_differences(constraints: Path) -> None:
    changed = differences(read_constraints(constraints))
    for difference in changed:
        _print(f"  {difference}")
    _print(f"{len(changed)} packages differ from {constraints}" if changed else f"all packages match {constraints}")


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")

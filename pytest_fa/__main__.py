"""`python -m pytest_fa new | ceilings | noise | pictures`: what is done once, beside pytest's runs."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from pytest_fa.errors import FaError
from pytest_fa.new import KINDS, write_variant


def main(arguments: list[str]) -> int:
    """Run one command; 2 and one line for what cannot be done."""
    given = _parser().parse_args(arguments)
    try:
        given.run(given)
    except (FaError, OSError, ImportError) as problem:
        sys.stderr.write(f"pytest_fa: {problem}\n")
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pytest_fa", description=__doc__)
    commands = parser.add_subparsers(required=True)

    new = commands.add_parser("new", help="write the folder of a new variant, which is right and slow")
    new.add_argument("name")
    new.add_argument("--kind", choices=KINDS, default=KINDS[0])
    new.add_argument("--kernels", type=Path, default=Path("kernels"))
    new.set_defaults(run=_new)

    limits = commands.add_parser("ceilings", help="measure what this GPU can do, and keep it under profiles/<gpu>/")
    limits.add_argument("--profiles", type=Path, default=Path("profiles"))
    limits.set_defaults(run=_ceilings)

    noise = commands.add_parser("noise", help="measure how far fresh processes scatter, and keep it there")
    noise.add_argument("--profiles", type=Path, default=Path("profiles"))
    noise.add_argument("--processes", type=int, default=24, help="12 or more, about 3 s each")
    noise.set_defaults(run=_noise)

    draw = commands.add_parser("pictures", help="draw bars and a roofline from the records of a folder")
    draw.add_argument("folder", type=Path, help="such as profiles/nvidia-h200")
    draw.set_defaults(run=_pictures)
    return parser


def _new(given: argparse.Namespace) -> None:
    folder = write_variant(given.name, given.kind, given.kernels)
    where = "" if given.kernels == Path("kernels") else f" --fa-kernels={shlex.quote(str(given.kernels))}"
    sys.stdout.write(f"{folder}: {', '.join(sorted(each.name for each in folder.iterdir()))}\n")
    sys.stdout.write(f"next: pytest --pyargs pytest_fa.suite{where} --fa-variant={given.name}\n")


def _ceilings(given: argparse.Namespace) -> None:
    from pytest_fa.measure.ceilings import measure_ceilings  # noqa: PLC0415  # torch, only for this command
    from pytest_fa.measure.timing_lock import timing_lock  # noqa: PLC0415
    from pytest_fa.records.ceilings import write_ceilings  # noqa: PLC0415

    with timing_lock():
        found = measure_ceilings(Path())
    path = write_ceilings(found, given.profiles)
    rates = ", ".join(f"{name} {rate:.0f} TFLOP/s" for name, rate in found.matmul_tflops.items())
    sys.stdout.write(f"{found.environment.gpu}: copy {found.copy_gb_per_s:.0f} GB/s, {rates}, ")
    sys.stdout.write(f"empty launch {found.empty_launch_us:.2f} us\n{path}\n")


def _noise(given: argparse.Namespace) -> None:
    from pytest_fa.gate.measure_noise import measure_noise  # noqa: PLC0415
    from pytest_fa.records.noise import write_noise  # noqa: PLC0415
    from pytest_fa.report.noise_table import noise_rows  # noqa: PLC0415

    found = measure_noise(Path(), given.processes, lambda text: sys.stderr.write(f"\r{text}"))
    path = write_noise(found, given.profiles)
    sys.stderr.write("\n")
    for row in noise_rows(found):
        sys.stdout.write(
            f"{row.shape_id}  {row.candidate} / {row.baseline}: processes {100 * row.process_sd:.2f} %, "
            f"blocks {100 * row.block_sd:.2f} %, {row.decided} of {row.groups} groups of 12 decided at ratio 1\n"
        )
    sys.stdout.write(f"{path}\n")


def _pictures(given: argparse.Namespace) -> None:
    from pytest_fa.records.ceilings import read_ceilings  # noqa: PLC0415
    from pytest_fa.report.pictures import draw, read_timed  # noqa: PLC0415

    gpu = read_timed(given.folder)[0].environment.gpu
    for path in draw(given.folder, read_ceilings(given.folder.parent, gpu)):
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

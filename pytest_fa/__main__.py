"""`python -m pytest_fa new | ceilings | noise | pictures`: commands that are run once, outside pytest."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from pytest_fa.errors import FaError
from pytest_fa.new import KINDS, write_variant


def main(arguments: list[str]) -> int:
    """Run one command; return 0, or 2 after one line on stderr if it fails."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (FaError, OSError, ImportError) as problem:
        sys.stderr.write(f"pytest_fa: {problem}\n")
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pytest_fa", description=__doc__)
    commands = parser.add_subparsers(required=True)

    new = commands.add_parser("new", help="write the folder of a new variant, which is correct but slow")
    new.add_argument("name")
    new.add_argument("--kind", choices=KINDS, default=KINDS[0])
    new.add_argument("--kernels", type=Path, default=Path("kernels"))
    new.set_defaults(run=_new)

    ceilings = commands.add_parser("ceilings", help="measure this GPU's peak rates, and save them in profiles/<gpu>/")
    ceilings.add_argument("--profiles", type=Path, default=Path("profiles"))
    ceilings.set_defaults(run=_ceilings)

    noise = commands.add_parser("noise", help="measure the spread of times between processes, and save it there too")
    noise.add_argument("--profiles", type=Path, default=Path("profiles"))
    noise.add_argument("--processes", type=int, default=24, help="12 or more, about 3 s each")
    noise.set_defaults(run=_noise)

    pictures = commands.add_parser("pictures", help="draw the ladder, a bar chart and a roofline from records")
    pictures.add_argument("folder", type=Path, help="such as profiles/nvidia-h200")
    pictures.set_defaults(run=_pictures)
    return parser


def _new(options: argparse.Namespace) -> None:
    folder = write_variant(options.name, options.kind, options.kernels)
    option = "" if options.kernels == Path("kernels") else f" --fa-kernels={shlex.quote(str(options.kernels))}"
    sys.stdout.write(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}\n")
    sys.stdout.write(f"next: pytest --pyargs pytest_fa.suite{option} --fa-variant={options.name}\n")


def _ceilings(options: argparse.Namespace) -> None:
    from pytest_fa.measure.ceilings import measure_ceilings  # noqa: PLC0415  # torch, only for this command
    from pytest_fa.measure.timing_lock import timing_lock  # noqa: PLC0415
    from pytest_fa.records.ceilings import write_ceilings  # noqa: PLC0415

    with timing_lock():
        measured = measure_ceilings(Path())
    path = write_ceilings(measured, options.profiles)
    rates = ", ".join(f"{name} {rate:.0f} TFLOP/s" for name, rate in measured.matmul_tflops.items())
    sys.stdout.write(f"{measured.environment.gpu}: copy {measured.copy_gb_per_s:.0f} GB/s, {rates}, ")
    sys.stdout.write(f"empty launch {measured.empty_launch_us:.2f} us\n{path}\n")


def _noise(options: argparse.Namespace) -> None:
    from pytest_fa.gates.measure_noise import measure_noise  # noqa: PLC0415
    from pytest_fa.records.noise import write_noise  # noqa: PLC0415
    from pytest_fa.report.noise_table import noise_rows  # noqa: PLC0415

    noise = measure_noise(Path(), options.processes, lambda text: sys.stderr.write(f"\r{text}"))
    path = write_noise(noise, options.profiles)
    sys.stderr.write("\n")
    for row in noise_rows(noise):
        sys.stdout.write(
            f"{row.shape_id}  {row.candidate} / {row.baseline}: processes {100 * row.process_sd:.2f} %, "
            f"blocks {100 * row.block_sd:.2f} %, PASS or FAIL in {row.decided} of {row.groups} simulated gates\n"
        )
    sys.stdout.write(f"{path}\n")


def _pictures(options: argparse.Namespace) -> None:
    from pytest_fa.records.ceilings import read_ceilings  # noqa: PLC0415
    from pytest_fa.report.pictures import draw, read_timed  # noqa: PLC0415

    gpu = read_timed(options.folder)[0].environment.gpu
    for path in draw(options.folder, read_ceilings(options.folder.parent, gpu)):
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

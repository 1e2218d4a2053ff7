"""Draws the pictures in the records folder: the ladder, TFLOP/s over the length, time by phase, and errors.

python -m tools.docs.pictures profiles/nvidia-h200
"""

from __future__ import annotations

import sys
from pathlib import Path

from pytest_fa.errors import FaError
from pytest_fa.records.ceilings import Ceilings, read_ceilings
from pytest_fa.records.log import read_records
from pytest_fa.records.record import Record
from pytest_fa.records.standing import standing_results
from pytest_fa.table.picture_style import save_svg
from tools.docs.error_picture import error_picture
from tools.docs.ladder_picture import ladder_picture
from tools.docs.long_picture import long_picture
from tools.docs.phase_picture import phase_picture
from tools.docs.scaling_picture import scaling_picture


class NothingToShow(FaError):
    """There are no records with times."""


def read_timed(folder: Path) -> list[Record]:
    """Every result in `folder`, which is a `profiles/<gpu>`, that stands.

    Raises `NothingToShow` if none of them has a time, `UnreadableRecords` if a line of a file is no record.
    """
    saved = (record for path in sorted(folder.glob("*.jsonl")) for record in read_records(path))
    records = list(standing_results(saved).records)
    if not any(record.speed for record in records):
        raise NothingToShow(f"there are no records with times in {folder}; make some with pytest --fa-save")
    return records


def draw(folder: Path, ceilings: Ceilings | None) -> list[Path]:
    """Draw pictures of the records into `folder`, and return their paths.

    `ladder.svg` shows the candidates at one shape, `scaling.svg` TFLOP/s over the sequence length, `long.svg` the same
    for the suite `long`, `phases.svg` the time of each phase, and `errors.svg` the error of every variant against its
    bound.  A picture without data is not drawn.  The title of each is what the records say.

    Raises `NothingToShow` without timed records, `UnreadableRecords` if a line of a file is no record, `ImportError`
    without matplotlib.
    """
    records = read_timed(folder)
    pictures = {
        "ladder.svg": ladder_picture(records),
        "scaling.svg": scaling_picture(records, ceilings),
        "long.svg": long_picture(records),
        "phases.svg": phase_picture(records),
        "errors.svg": error_picture(records),
    }
    paths = []
    for name, figure in pictures.items():
        if figure is not None:
            save_svg(figure, folder / name)
            paths.append(folder / name)
    return paths


def main(arguments: list[str]) -> int:
    """Draw the pictures of one records folder; return 2 after one line on stderr if that fails."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        sys.stderr.write((__doc__ or "") + "\n")
        return 2
    folder = Path(arguments[0])
    try:
        gpu = read_timed(folder)[0].environment.gpu
        for path in draw(folder, read_ceilings(folder.parent, gpu)):
            sys.stdout.write(f"{path}\n")
    except (FaError, OSError, ImportError) as problem:
        sys.stderr.write(f"{problem}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

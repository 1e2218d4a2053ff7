"""The error map of a wrong output, as rows of tiles for an HTML page."""

from __future__ import annotations

import re
from typing import NamedTuple

from pytest_fa.records.checks import Diagnosis

_MAP_LINE = re.compile(r"(batch \d+ head +\d+  )([.N1-9]+)")


class MapRow(NamedTuple):
    """The tiles of one head, one mark each; a line that is no row of tiles has only a label."""

    label: str
    marks: str


def error_map_of(diagnosis: Diagnosis | None) -> tuple[str, tuple[MapRow, ...]]:
    """The title and the rows of the error map; an empty title without a map.

    Marks: `.` is within the bound, a digit d at least 2^(d-1) times the bound, N not finite.
    """
    if diagnosis is None or not diagnosis.error_map:
        return "", ()
    title, *lines = diagnosis.error_map
    return title, tuple(map(_row_of_map, lines))


def _row_of_map(line: str) -> MapRow:
    match = _MAP_LINE.fullmatch(line)
    return MapRow(match[1].strip(), match[2]) if match else MapRow(line, "")

"""Reads the CSV of `ncu --import REPORT --csv --page raw --print-units base`: names, units, one row for each kernel."""

from __future__ import annotations

import csv
import re

from pytest_fa.features.ncu.nsight_report import CountedKernel

_NUMBER = re.compile(r"-?[\d,]+(\.\d+)?([eE][-+]?\d+)?")


def read_raw_table(text: str) -> tuple[CountedKernel, ...]:
    """The kernels of a report with all their counters; none if the text contains no table or no rows."""
    lines = [line for line in text.splitlines() if not line.startswith("==")]
    start = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return ()
    table: list[list[str]] = [*csv.reader(lines[start:])]
    names, rows = table[0], table[2:]  # table[1] has the units
    return tuple(_kernel(dict(zip(names, row, strict=True))) for row in rows if len(row) == len(names))


def _kernel(cells: dict[str, str]) -> CountedKernel:
    counters = {name: float(cell.replace(",", "")) for name, cell in cells.items() if _is_counter(name, cell)}
    return CountedKernel(cells["Kernel Name"], counters)


def _is_counter(name: str, cell: str) -> bool:
    """Whether a column is a numeric counter.  Names of counters contain `__`; those of other columns do not."""
    return "__" in name and bool(_NUMBER.fullmatch(cell))

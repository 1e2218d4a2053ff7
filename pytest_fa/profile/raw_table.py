"""`ncu --import X --csv --page raw --print-units base`: one row for each kernel, below the names and the units."""

from __future__ import annotations

import csv
import re

from pytest_fa.records.tool_results import CountedKernel

_NUMBER = re.compile(r"-?[\d,]+(\.\d+)?([eE][-+]?\d+)?")


def read_raw_table(text: str) -> tuple[CountedKernel, ...]:
    """The kernels of a report with every figure; none where the table is empty or is no table."""
    lines = [line for line in text.splitlines() if not line.startswith("==")]
    start = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return ()
    table: list[list[str]] = [*csv.reader(lines[start:])]
    names, rows = table[0], table[2:]  # the units stand between
    return tuple(_kernel(dict(zip(names, row, strict=True))) for row in rows if len(row) == len(names))


def _kernel(cells: dict[str, str]) -> CountedKernel:
    counters = {name: float(cell.replace(",", "")) for name, cell in cells.items() if _is_figure(name, cell)}
    return CountedKernel(cells["Kernel Name"], counters)


def _is_figure(name: str, cell: str) -> bool:
    """Nsight's metrics are lower case with underscores; the columns about the process are not."""
    return "__" in name and bool(_NUMBER.fullmatch(cell))

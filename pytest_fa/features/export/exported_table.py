"""The table of a run for pages outside the terminal: the step summary and the page of pytest-html."""

from __future__ import annotations

from pytest_fa.records.ceilings import Ceilings
from pytest_fa.records.record import Record
from pytest_fa.table.rows import NOTHING, make_rows

# Field of a row -> title of its column.
COLUMNS = {
    "variant": "variant",
    "case": "case",
    "checks": "checks",
    "error": "error / allowed",
    "registers": "regs",
    "spills": "spill B",
    "device_us": "device_us",
    "cold_us": "cold_us",
    "call_us": "call_us",
    "peak": "peak KiB",
    "tflops": "TFLOP/s",
    "percent_of_peak": "% peak",
    "gb_per_s": "GB/s",
    "percent_of_copy": "% copy",
    "versus_baseline": "x baseline",
}
LEFT_COLUMNS = ("variant", "case", "checks", "error / allowed")  # words; the other columns are numbers


def exported_table(records: list[Record], ceilings: Ceilings | None) -> list[list[str]]:
    """The titles and the cells of each row, without columns that are empty in every row; empty without rows."""
    rows = make_rows(records, ceilings)
    fields = [field for field in COLUMNS if any(getattr(row, field) != NOTHING for row in rows)]
    cells = [[str(getattr(row, field)) for field in fields] for row in rows]
    return [[COLUMNS[field] for field in fields], *cells] if rows else []

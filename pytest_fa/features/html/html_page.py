"""What pytest-fa adds to the page of pytest-html: the table of the run, times, and the error map of a wrong output.

Every text is escaped; the page needs no other file.
"""

from __future__ import annotations

import html

from pytest_fa.features.export.exported_table import exported_table
from pytest_fa.features.html.error_map import MapRow, error_map_of
from pytest_fa.records.ceilings import Ceilings
from pytest_fa.records.record import Record
from pytest_fa.table.rows import headline

# Background of a tile of the error map by its mark: within the bound, up to 2, up to 8 times the bound, not finite.
_COLORS = {".": "#d8f0d8", "1": "#fff0b3", "2": "#ffd699", "3": "#ffd699", "N": "#c9a0e0"}
_LARGE = "#f2a0a0"


def table_html(records: list[Record], ceilings: Ceilings | None) -> str:
    """The terminal's table as HTML; empty if there is no row."""
    table = exported_table(records, ceilings)
    if not table:
        return ""
    titles, *rows = table
    head = "".join(f"<th>{html.escape(title)}</th>" for title in titles)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    style = 'style="border-collapse: collapse" border="1" cellpadding="4"'
    return f'<h2>Attention kernels</h2><table class="fa-table" {style}><tr>{head}</tr>{body}</table>'


def record_html(record: Record) -> str:
    """What stands below one test: its outcome with error and times, and the error map of a wrong output."""
    return f"<p>{html.escape(headline(record))}</p>{_error_map(record)}"


def _error_map(record: Record) -> str:
    """The error map, one coloured cell for each tile of queries, and the likely cause; empty without a map."""
    title, lines = error_map_of(record.diagnosis)
    if record.diagnosis is None or not title:
        return ""
    cause = f"<p>likely cause: {html.escape(record.diagnosis.cause)}</p>" if record.diagnosis.cause else ""
    style = 'style="border-collapse: collapse; font-family: monospace"'
    rows = "".join(map(_map_row, lines))
    return f'<div class="fa-error-map"><p>{html.escape(title)}</p><table {style}>{rows}</table>{cause}</div>'


def _map_row(row: MapRow) -> str:
    if not row.marks:
        return f'<tr><td colspan="99" style="white-space: pre">{html.escape(row.label)}</td></tr>'
    tiles = "".join(
        f'<td style="background: {_COLORS.get(mark, _LARGE)}; width: 1em; text-align: center">{mark}</td>'
        for mark in row.marks
    )
    return f"<tr><th>{html.escape(row.label)}</th>{tiles}</tr>"


def _cell(text: str) -> str:
    return f"<td>{html.escape(text)}</td>"

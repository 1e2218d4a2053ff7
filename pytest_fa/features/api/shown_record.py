"""`ShownRecord`, a record that a Python prompt or a notebook shows as a small table."""

from __future__ import annotations

from html import escape
from typing import NamedTuple

import msgspec

from pytest_fa.features.gate.decision import CONFIDENCE
from pytest_fa.features.gate.gate_lines import gate_details, gate_lines
from pytest_fa.features.gate.gated import Gate
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record
from pytest_fa.records.text import printable_struct
from pytest_fa.table.failure import failure_text, repeats_line
from pytest_fa.table.layout import BUILD_COLUMNS, SHAPE_COLUMNS, VARIANT, Column
from pytest_fa.table.rows import NOTHING, make_rows, notes


class ShownRecord(Record, frozen=True):
    """A record that is printed as a table of one row; below it the repeats, or the diagnosis if it failed.

    All fields are those of `Record`.  A gate has one row for each pair of shape and baseline.
    """

    @property
    def ok(self) -> bool:
        """Whether the outcome is `ok`: the output is correct, or the gate's verdict is PASS."""
        return self.outcome == Outcome.OK

    @property
    def gate(self) -> Gate | None:
        """What a gate measured and decided; None for other records."""
        return Gate.of(self)

    def __repr__(self) -> str:
        return as_text(self)

    def __str__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str:
        return as_html(self)


class SmallTable(NamedTuple):
    """The headers and rows of a table, and the lines below it."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    lines: tuple[str, ...]


def shown(record: Record) -> ShownRecord:
    """The record as one that is shown as a table, with printable texts."""
    clean = printable_struct(record)
    return ShownRecord(**{name: getattr(clean, name) for name in Record.__struct_fields__})


def as_text(record: Record) -> str:
    """The table and the lines below it as text."""
    from pytest_fa.features.api.text_table import text_table  # noqa: PLC0415  # rich, only for what is shown

    small = _small_table(record)
    lines = text_table(small.headers, small.rows) if small.rows else []
    return "\n".join((*lines, *small.lines))


def as_html(record: Record) -> str:
    """The table and the lines below it as HTML, with all texts escaped."""
    small = _small_table(record)
    head = "".join(f"<th>{escape(header)}</th>" for header in small.headers)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in small.rows)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>" if small.rows else ""
    return table + (f"<pre>{escape(chr(10).join(small.lines))}</pre>" if small.lines else "")


def _small_table(record: Record) -> SmallTable:
    gate = Gate.of(record)
    if gate is not None and gate.pairs:
        return _gate_table(record, gate)
    if record.case is not None:
        columns: tuple[Column, ...] = (VARIANT, Column("case", "case"), *SHAPE_COLUMNS)
        rows = [msgspec.structs.replace(row, case=record.case.id) for row in make_rows([record])]  # it has one seed
    else:
        columns, rows = (VARIANT, *BUILD_COLUMNS), make_rows([record])
    filled = [column for column in columns if any(getattr(row, column.field) != NOTHING for row in rows)]
    cells = tuple(tuple(str(getattr(row, column.field)) for column in filled) for row in rows)
    if record.outcome != Outcome.OK:
        lines = failure_text(record, gate_details(record)).splitlines()
    else:
        lines = [repeats_line(record.repeats).strip()] if record.repeats else []
    return SmallTable(tuple(column.header for column in filled), cells, (*lines, *notes([record])))


def _gate_table(record: Record, gate: Gate) -> SmallTable:
    """One row for each pair; below it the verdict, its reason, what it cost, and the excluded shapes."""
    rows = tuple(
        (
            record.variant,
            pair.samples.shape_id,
            pair.samples.baseline,
            _number(pair.ratio),
            f"{_number(pair.low)} to {_number(pair.high)}",
        )
        for pair in gate.pairs
    )
    lines = gate_lines(record.variant, gate)
    below = (*lines[:2], *lines[2 + len(rows) :], *([f"  rerun: {record.rerun_command}"] if record.message else []))
    return SmallTable(("variant", "case", "baseline", "ratio", f"{100 * CONFIDENCE:g} % interval"), rows, below)


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4f}"

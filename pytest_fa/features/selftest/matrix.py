"""The table of the self-test."""

from __future__ import annotations

from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record


def render_matrix(records: list[Record], width: int) -> str:
    """The kernels of the self-test, each with the checks that rejected it, as many as fit into `width` characters."""
    name = max(len(record.variant) for record in records)
    lines = [_row(record, name, width) for record in records]
    wrong = sum(record.outcome != Outcome.OK for record in records)
    lines.append(f"{len(records)} kernels, {wrong} of them with an unexpected result (marked WRONG)")
    return "\n".join(lines)


def _row(record: Record, name: int, width: int) -> str:
    checks, mark = record.caught_by, "" if record.outcome == Outcome.OK else "WRONG: "
    texts = [", ".join(checks) or "no check"]
    texts += [f"{', '.join(checks[:shown])} and {len(checks) - shown} more" for shown in range(len(checks) - 1, 0, -1)]
    rows = [f"{record.variant:{name}}  {mark}{text}" for text in texts]
    return next((row for row in rows if len(row) <= width), rows[-1])

"""The table of the self-test."""

from __future__ import annotations

from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record


def render_matrix(records: list[Record], width: int) -> str:
    """The kernels of the self-test, each with the checks that rejected it."""
    rows = [(record.variant, ", ".join(record.caught_by) or "no check", record.outcome) for record in records]
    name = max(len(row[0]) for row in rows)
    lines = [
        f"{variant:{name}}  {'' if outcome == Outcome.OK else 'WRONG: '}{checks}" for variant, checks, outcome in rows
    ]
    wrong = sum(outcome != Outcome.OK for _, _, outcome in rows)
    lines.append(f"{len(rows)} kernels, {wrong} of them with an unexpected result (marked WRONG)")
    return "\n".join(line if len(line) <= width else f"{line[: width - 3]}..." for line in lines)

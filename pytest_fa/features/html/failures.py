"""What failed: for each variant and fault the first failure with its error map, and the ids of the others."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import NamedTuple

from pytest_fa.features.gate.gate_lines import gate_details
from pytest_fa.features.html.error_map import MapRow, error_map_of
from pytest_fa.records.record import Record
from pytest_fa.table.failure import failure_text

MAX_CHARACTERS = 8000  # of the text of one failure
MAX_IDS = 20
BUDGET_BYTES = 100_000  # of all texts and maps together, and BYTES_PER_RECORD more for each record
BYTES_PER_RECORD = 300
TILE_BYTES = 16  # of a tile of an error map in the page


class FailurePart(NamedTuple):
    """One variant and fault: the text of the first failure, its error map, and the ids of other failures."""

    title: str
    text: str
    map_title: str
    map_rows: tuple[MapRow, ...]
    others: str


class Failures(NamedTuple):
    """The failures that are shown, and how many more variants and faults there are."""

    parts: tuple[FailurePart, ...]
    hidden: int


def failures_of(records: list[Record]) -> Failures:
    """The failures of the records, as many as the page has space for; at least one if there is one."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.outcome.exit_status != 0:
            groups.setdefault((record.variant, record.outcome), []).append(record)
    left = BUDGET_BYTES + BYTES_PER_RECORD * len(records)
    parts: list[FailurePart] = []
    for group in groups.values():
        part = _failure_part(group)
        left -= _bytes_of(part)
        if parts and left < 0:
            break
        parts.append(part)
    return Failures(tuple(parts), len(groups) - len(parts))


def _failure_part(group: list[Record]) -> FailurePart:
    first = next((record for record in group if record.diagnosis and record.diagnosis.error_map), group[0])
    map_title, map_rows = error_map_of(first.diagnosis)
    text = failure_text(first, gate_details(first))
    count = f" ({len(group)} tests)" if len(group) > 1 else ""
    return FailurePart(
        title=f"{first.variant}: {first.outcome.heading}{count}",
        text=text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}...",
        map_title=map_title,
        map_rows=map_rows,
        others=_ids(record for record in group if record is not first),
    )


def _ids(records: Iterable[Record]) -> str:
    ids = [record.id for record in records]
    more = f" and {len(ids) - MAX_IDS} more" if len(ids) > MAX_IDS else ""
    return f"{', '.join(ids[:MAX_IDS])}{more}"


def _bytes_of(part: FailurePart) -> int:
    tiles = sum(len(row.marks) * TILE_BYTES + len(row.label) for row in part.map_rows)
    return tiles + sum(len(escape(text).encode()) for text in (part.title, part.text, part.others))

"""Removes saved checks that say nothing about the kernels of today."""

from __future__ import annotations

from pytest_fa.records.files import read_record_file
from pytest_fa.records.log import keep_records
from pytest_fa.records.record import Record, RecordKind
from pytest_fa.records.standing import Rank, rank_of
from tools.measure.faults import arch_of
from tools.measure.tables import ShownPages

LASTING: tuple[RecordKind, ...] = ("speed", "gate")  # `auto` is fitted from times, and the noise of cards from both


def remove_old_checks(pages: ShownPages) -> list[str]:
    """Remove the checks and profiles that no table shows and whose sources have changed; return a line for each file.

    Times, gates and failures stay.  A file of which nothing is left is removed, too.  Raises `FaError` for a file that
    cannot be read.
    """
    tables, history = pages.tables(), pages.history()
    shown = {(result.kind, result.id) for table in tables for result in table.records}
    lines: list[str] = []

    def is_kept(record: Record) -> bool:
        # A failure hides times, which stay.
        if record.kind in LASTING or (record.kind, record.id) in shown or rank_of(record) is Rank.FAILURE:
            return True
        variant = pages.variants.get(record.variant)
        return (
            variant is not None
            and not record.source.dirty
            and not history.changes(record.source, variant, record.sources, arch_of(record))
        )

    for folder in sorted({table.folder for table in tables}):
        for path in sorted((pages.root / folder).glob("*.jsonl")):
            records = read_record_file(path).records
            kept = [record for record in records if is_kept(record)]
            if len(kept) == len(records):
                continue
            keep_records(path, kept)
            if not path.stat().st_size:
                path.unlink()
            number = len(records) - len(kept)
            lines.append(f"{path.relative_to(pages.root)}: {number} of {len(records)} results removed")
    return lines

"""Removes saved results that say nothing about the kernels of today."""

from __future__ import annotations

from kernels.auto.work import RUNGS
from pytest_fa.catalog.variant import COMPANION_ROLES
from pytest_fa.records.log import remove_records
from pytest_fa.records.record import Record
from pytest_fa.records.standing import Rank, rank_of
from tools.measure.faults import arch_of
from tools.measure.tables import ShownPages


def remove_old_results(pages: ShownPages) -> list[str]:
    """Remove results that no table shows and whose sources have changed; return a line for each file.

    Gates and failures stay.  Times stay unless they are from uncommitted changes or without the judge's clock; of
    these, those of baselines stay, which later runs look up, and those of the rungs that `auto` is fitted from.

    Raises `FaError` for a file that cannot be read, which stays as it is.
    """
    tables, history = pages.tables(), pages.history()
    shown = {(result.kind, result.id) for table in tables for result in table.records}

    def is_kept(record: Record) -> bool:
        # A failure hides times, which stay.
        if _is_needed(record) or (record.kind, record.id) in shown or rank_of(record) is Rank.FAILURE:
            return True
        variant = pages.variants.get(record.variant)
        return (
            variant is not None
            and not record.source.dirty
            and not history.changes(record.source, variant, record.sources, arch_of(record))
        )

    lines: list[str] = []
    for folder in sorted({table.folder for table in tables}):
        for path in sorted((pages.root / folder).glob("*.jsonl")):
            removed, number = remove_records(path, is_kept)
            if removed:
                lines.append(f"{path.relative_to(pages.root)}: {removed} of {number} results removed")
    return lines


def _is_needed(record: Record) -> bool:
    if record.kind != "speed":
        return record.kind == "gate"
    is_confirmed = not record.source.dirty and record.speed is not None and record.speed.outside is not None
    return is_confirmed or record.role in COMPANION_ROLES or record.variant in RUNGS

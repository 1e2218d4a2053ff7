"""What is wrong with the results that a table shows: missing, of another method, stale, dirty, or mixed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from pytest_fa.build.target import rank, runs_on
from pytest_fa.catalog.variant import Variant
from pytest_fa.records.origin import COMMIT_DIGITS, has_no_second_clock
from pytest_fa.records.record import Environment, Record, Source
from pytest_fa.records.standing import day_of
from tools.measure.json_files import FILES, read_origin
from tools.measure.sources import SourceHistory
from tools.measure.tables import PageTable, ShownPages

FaultKind = Literal["missing", "other method", "stale", "dirty", "mixed"]
FAULT_KINDS: tuple[FaultKind, ...] = get_args(FaultKind)


class RowFault(NamedTuple):
    """One thing that is wrong with one result, and why."""

    kind: FaultKind
    row: str
    reason: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.row}: {self.reason}"


def check_lines(pages: ShownPages) -> tuple[list[str], int]:
    """A line for each table with its counts, each followed by its faults; and the number of faults of all tables.

    Raises `FaError` for what cannot be read.
    """
    history = pages.history()
    lines: list[str] = []
    total = 0
    for table in pages.tables():
        faults = row_faults(table, pages.variants, history)
        faults += [fault for file in table.files for fault in file_faults(file, pages.variants, history)]
        counts = Counter(each.kind for each in faults)
        listed = ", ".join(f"{counts[kind]} {kind}" for kind in FAULT_KINDS)
        lines += [f"{table.name}: {len(table.records) + len(table.files)} results: {listed}"]
        lines += [f"  {each}" for each in faults]
        total += len(faults)
    return lines, total


def row_faults(table: PageTable, variants: dict[str, Variant], history: SourceHistory) -> list[RowFault]:
    """The faults of the records of a table, by result."""
    usual = Counter(origin_of_record(each) for each in table.records.values() if each).most_common(1)
    faults: list[RowFault] = []
    for result, record in table.records.items():
        if record is not None:
            changes = history.changes(record.source, variants[result.variant], record.sources, arch_of(record))
            if result.gate and not changes:
                changes = history.changes(record.source, variants[result.gate.baseline], {}, arch_of(record))
            row = f"{result} ({day_of(record)}, commit {_commit(record.source)})"
            faults += [RowFault(kind, row, reason) for kind, reason in _faults_of_record(record, changes)]
            if difference := _difference(record, *usual[0][0]):
                faults.append(RowFault("mixed", row, difference))
        elif result in table.earlier:
            faults.append(RowFault("other method", str(result), "its record has an earlier schema"))
        else:
            faults.append(RowFault("missing", str(result), "no record"))
    return faults


def arch_of(record: Record) -> str:
    """The architecture that a record's variant was built for; empty if it was not built."""
    return next((build.arch for build in record.builds if build.variant == record.variant), "")


def origin_of_record(record: Record) -> tuple[str | None, str | None]:
    """The card of a record, as the hash of its UUID, and its commit."""
    return record.machine.gpu_hash if record.machine else None, record.source.commit


def _faults_of_record(record: Record, changes: str) -> Iterator[tuple[FaultKind, str]]:
    if has_no_second_clock(record):
        yield "other method", "without the judge's clock"
    if changes:
        yield "stale", changes
    if record.source.dirty:
        yield "dirty", "from a tree with uncommitted changes"


def _difference(record: Record, card: str | None, commit: str | None) -> str:
    """How the origin of a record differs from that of most results of its table; empty if it does not.

    A card that is not known may be any, so that it differs from itself, too.
    """
    own_card, own_commit = origin_of_record(record)
    parts = ["card unknown"] if own_card is None else []
    if own_card is not None and own_card != card:
        parts.append(f"card {own_card}, most are of {card or 'an unknown one'}")
    if own_commit != commit:
        parts.append(f"most are of commit {(commit or 'unknown')[:COMMIT_DIGITS]}")
    return "; ".join(parts)


def file_faults(file: str, variants: dict[str, Variant], history: SourceHistory) -> Iterator[RowFault]:
    """The faults of a JSON file.  Raises `UnreadableRecords` if it cannot be read."""
    origin = read_origin(history.root / file)
    if origin is None:
        yield RowFault("missing", file, "no such file")
        return
    source = origin.source or Source(None, None, "")
    row = f"{file} ({origin.measured_at[:10] or 'day unknown'}, commit {_commit(source)})"
    measured = FILES[Path(file).name]
    paths = [path for pattern in measured.sources for path in sorted(history.root.glob(pattern))]
    changes = [history.changed_files(source, [path.relative_to(history.root).as_posix() for path in paths])]
    used = [variants[name] for name in measured.variants]
    changes += [history.changes(source, variant, {}, _arch_on(origin.environment, variant)) for variant in used]
    for change in dict.fromkeys(filter(None, changes)):
        yield RowFault("stale", row, change)
    if source.dirty:
        yield RowFault("dirty", row, "from a tree with uncommitted changes")


def _arch_on(environment: Environment, variant: Variant) -> str:
    """The architecture that a variant is built for on the GPU of a file; empty if it has none for it."""
    if environment.compute_capability is None:
        return ""
    major, minor = map(int, environment.compute_capability.split("."))
    return max((arch for arch in variant.arch if runs_on(arch, (major, minor))), key=rank, default="")


def _commit(source: Source) -> str:
    return (source.commit or "unknown")[:COMMIT_DIGITS]

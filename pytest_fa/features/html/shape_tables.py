"""The tables of the page: the gates, one table for each timed shape, and one row for each variant over all checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pytest_fa.catalog.suites import TARGET_SHAPE
from pytest_fa.features.compare.compare import ratio_interval
from pytest_fa.features.gate.gated import Gate
from pytest_fa.features.html.margins import worst_margins
from pytest_fa.records.ceilings import Ceilings
from pytest_fa.records.origin import origin_of
from pytest_fa.records.record import Record
from pytest_fa.records.standing import HiddenTime, day_of, words_of
from pytest_fa.table.answer import judged_counts, state_of
from pytest_fa.table.baselines import compared_baseline
from pytest_fa.table.layout import BUILD_COLUMNS, SHAPE_COLUMNS, VARIANT, Column
from pytest_fa.table.rows import NOTHING, UNCLEAR, Row, RowGroup, make_groups, ratio_text

MAX_OPEN = 4  # shapes with an open table; of more shapes, only the first table is open
MAX_OPEN_ROWS = 12  # of the table of gates; with more, it is folded
INTERVAL = "99.5 % interval"
INTERVAL_COLUMN = Column(INTERVAL, "interval")
# The answer first, because a narrow window shows only the first columns.
_BY_FIELD = {column.field: column for column in SHAPE_COLUMNS}
_FIRST = ("device_us", "versus_baseline")
COLUMNS_OF_SHAPE = (
    VARIANT,
    *(_BY_FIELD[field] for field in _FIRST),
    INTERVAL_COLUMN,
    *(column for column in SHAPE_COLUMNS if column.field not in _FIRST),
)


class PageCell(NamedTuple):
    """One cell: its text, and whether it is left-aligned."""

    text: str
    is_text: bool = False


class PageRow(NamedTuple):
    """One row, and how it is shown: `wrong`, `baseline`, `overhead` or nothing."""

    cells: tuple[PageCell, ...]
    style: str = ""


class PageTable(NamedTuple):
    """A table with the sentence above it, which says what the table shows."""

    title: str
    finding: str
    headers: tuple[PageCell, ...]
    rows: tuple[PageRow, ...]
    is_open: bool = False
    origin: str = ""


class Texts(NamedTuple):
    """What the cells of a shape need beside its rows, by shape and variant: intervals, and failures of hidden times."""

    intervals: dict[tuple[str, str], str]
    failures: dict[tuple[str, str], Record]


def shape_tables(
    records: list[Record], ceilings: Ceilings | None, process_sd: float, hidden: Sequence[HiddenTime] = ()
) -> tuple[PageTable, ...]:
    """One table for each shape with a time, the target shape first, then one of the variants that were only built.

    In place of a time that does not count stands the failure, with its date.
    """
    timed = {record.case.shape_id for record in records if record.speed and record.case}
    timed |= {each.timed.case.shape_id for each in hidden if each.timed.case}
    failures = {(each.timed.case.shape_id, each.timed.variant): each.failure for each in hidden if each.timed.case}
    origins = _origins(records)
    intervals = _intervals(records, process_sd)
    groups = [each for each in make_groups(records, ceilings) if each.kind == "builds" or each.rows[0].case in timed]
    places = {shape: place for place, shape in enumerate(shapes_in_order(records))}
    groups.sort(key=lambda group: places.get(group.rows[0].case, len(places)))
    return tuple(
        _table_of(
            group,
            Texts(intervals, failures),
            origins.get(group.rows[0].case, ""),
            is_open=index == 0 or len(groups) <= MAX_OPEN,
        )
        for index, group in enumerate(groups)
    )


def _origins(records: list[Record]) -> dict[str, str]:
    """Where and when the figures of each shape were measured."""
    by_shape: dict[str, list[Record]] = {}
    for record in records:
        if record.case:
            by_shape.setdefault(record.case.shape_id, []).append(record)
    return {shape: origin_of(of_shape) for shape, of_shape in by_shape.items()}


def shapes_in_order(records: Iterable[Record]) -> list[str]:
    """The target shape, then the others by the operations of a call."""
    work = {record.case.shape_id: record.case.flops_per_call for record in records if record.case}
    return sorted(work, key=lambda shape: (shape != TARGET_SHAPE, work[shape]))


VERDICT_STYLES = {"PASS": "", "FAIL": "wrong", "INCONCLUSIVE": "overhead"}


def gate_table(records: list[Record]) -> PageTable | None:
    """One row for each pair of each gate, and for each gate on equal code, which timed nothing; None without a gate."""
    gates = [(record.variant, gate) for record in records if (gate := Gate.of(record))]
    rows = [
        PageRow(
            (
                PageCell(variant, is_text=True),
                PageCell(gate.verdict, is_text=True),
                PageCell(f"below {gate.ratio:g}", is_text=True),
                PageCell(_figure(pair.ratio)),
                PageCell(f"{_figure(pair.low)} to {_figure(pair.high)}"),
                PageCell(pair.samples.baseline, is_text=True),
                PageCell(pair.samples.shape_id, is_text=True),
                PageCell(str(len(pair.samples.blocks))),
            ),
            VERDICT_STYLES[gate.verdict],
        )
        for variant, gate in gates
        for pair in gate.pairs
    ]
    rows += [
        PageRow(
            (
                PageCell(variant, is_text=True),
                PageCell(gate.verdict, is_text=True),
                PageCell(f"below {gate.ratio:g}", is_text=True),
                PageCell(f"the same {gate.revision.code.same}"),
                PageCell("not timed"),
                PageCell(gate.revision.baseline(variant), is_text=True),
                PageCell("", is_text=True),
                PageCell("0"),
            ),
            VERDICT_STYLES[gate.verdict],
        )
        for variant, gate in gates
        if gate.revision and gate.revision.code
    ]
    names = ("variant", "verdict", "asked", "ratio", INTERVAL, "baseline", "shape", "processes")
    headers = tuple(PageCell(name, is_text=name not in ("ratio", INTERVAL, "processes")) for name in names)
    verdicts = Counter(gate.verdict for _, gate in gates)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items(), reverse=True))
    ratio = "the ratio is the candidate's time divided by the baseline's"
    finding = f"{counts}; both kernels in the same fresh processes; {ratio}"
    rows.sort(key=lambda row: row.style != "wrong")  # the failed ones first
    origin = origin_of(record for record in records if Gate.of(record))
    is_open = len(rows) <= MAX_OPEN_ROWS
    return PageTable("Gates", finding, headers, tuple(rows), is_open=is_open, origin=origin) if rows else None


def check_table(records: list[Record]) -> PageTable | None:
    """One row for each variant that was judged: how many runs passed, and how close it came to each bound."""
    by_variant: dict[str, list[Record]] = {}
    for record in records:
        by_variant.setdefault(record.variant, []).append(record)
    judged = {name: group for name, group in by_variant.items() if judged_counts(group)[1]}
    rows = [_check_row(name, group) for name, group in judged.items()]
    headers = ("variant", "state", "passed", "shapes", "closest bound", "used", "at shape")
    cells = tuple(PageCell(header, is_text=header not in ("passed", "shapes", "used")) for header in headers)
    finding = "over all shapes, also those that were not timed; 1.00 of a bound is its limit"
    origin = origin_of((record for group in judged.values() for record in group), of_times=False)
    return PageTable("All checks", finding, cells, tuple(rows), origin=origin) if rows else None


def _check_row(name: str, group: list[Record]) -> PageRow:
    passed, judged = judged_counts(group)
    shapes = {record.case.shape_id for record in group if record.case}
    margins = worst_margins(group)
    worst = max(margins, key=lambda margin: margin.used, default=None)
    state = state_of(group)
    cells = (
        PageCell(name, is_text=True),
        PageCell(state, is_text=True),
        PageCell(f"{passed}/{judged}"),
        PageCell(str(len(shapes))),
        PageCell(worst.bound if worst else NOTHING, is_text=True),
        PageCell(f"{worst.used:.2f}" if worst else NOTHING),
        PageCell(worst.shape_id if worst else NOTHING, is_text=True),
    )
    return PageRow(cells, "wrong" if state.is_failure else "")


def _table_of(group: RowGroup, texts_of: Texts, origin: str, *, is_open: bool) -> PageTable:
    columns = COLUMNS_OF_SHAPE if group.kind == "shape" else (VARIANT, *BUILD_COLUMNS)
    texts = [[_text(row, column, texts_of) for column in columns] for row in group.rows]
    filled = [index for index in range(len(columns)) if any(line[index] != NOTHING for line in texts)]
    rows = [
        PageRow(tuple(PageCell(line[index], columns[index].is_text) for index in filled), _style(row))
        for row, line in zip(group.rows, texts, strict=True)
    ]
    headers = tuple(PageCell(columns[index].header, columns[index].is_text) for index in filled)
    title = group.rows[0].case if group.kind == "shape" else "Builds"
    return PageTable(title, _finding(group), headers, tuple(rows), is_open, origin)


def _style(row: Row) -> str:
    return "wrong" if row.is_wrong else row.role if row.role != "candidate" else ""


def _text(row: Row, column: Column, texts: Texts) -> str:
    if column is INTERVAL_COLUMN:
        return texts.intervals.get((row.case, row.variant), NOTHING)
    failure = texts.failures.get((row.case, row.variant))
    if failure and column.field == "device_us":
        return f"{words_of(failure)} ({day_of(failure)})"
    return str(getattr(row, column.field))


def _finding(group: RowGroup) -> str:
    """The fastest kernel of a shape with its ratio to the baseline, and the number of wrong kernels."""
    wrong = sum(row.is_wrong for row in group.rows)
    parts = [f"{wrong} of {len(group.rows)} failed"] if wrong else []
    if group.kind == "builds":
        return "; ".join([*parts, f"{len(group.rows)} builds, not run"])
    right = [row for row in group.rows if row.role in ("candidate", "probe") and not row.is_wrong]
    fastest = next((row for row in right if row.device_us != NOTHING), None)
    if fastest is None:
        return "; ".join([*parts, "no candidate has a time"])
    compared = (row for row in group.rows if row.role == "baseline" and row.versus_baseline == "1.000")
    baseline = next((row.variant for row in compared), "")
    ratio = f", {_ratio_words(fastest.versus_baseline)} {baseline}" if baseline else ""
    return "; ".join([f"fastest: {fastest.variant}, {fastest.device_us} us{ratio}", *parts])


def _ratio_words(ratio: str) -> str:
    return "too noisy to compare with" if ratio == UNCLEAR else f"{ratio} x"


def _intervals(records: Iterable[Record], process_sd: float) -> dict[tuple[str, str], str]:
    """The interval of the ratio to the fastest baseline, by shape and variant, where the ratio means anything."""
    timed = [record for record in records if record.speed]
    shapes: dict[str, list[Record]] = {}
    for record in timed:
        if record.case:
            shapes.setdefault(record.case.shape_id, []).append(record)
    intervals = {}
    for shape, group in shapes.items():
        baseline = compared_baseline(timed, shape)
        speed = baseline.speed if baseline else None
        for record in group if baseline else ():
            is_compared = record.role not in ("overhead", "baseline") and record.speed and speed
            if is_compared and record.speed and speed and ratio_text(record.speed, speed) != UNCLEAR:
                _, low, high = ratio_interval(speed, record.speed, process_sd, is_cpu=speed.is_on_cpu)
                intervals[(shape, record.variant)] = f"{low:.3f} to {high:.3f}"
    return intervals


def _figure(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4f}"

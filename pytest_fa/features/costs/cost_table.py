"""`python -m pytest_fa costs`: where the seconds of a run went, in Markdown, and the same before and after.

Every figure comes from records and from the file of the run beside them.  What they do not hold is said in words.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import msgspec

from pytest_fa.records.costs import RunSeconds
from pytest_fa.records.gated import Gate
from pytest_fa.records.paired import PARTS
from pytest_fa.records.record import Record, Stage

KINDS = ("build", "correct", "property", "speed", "baseline", "gate", "profile", "sanitize", "selftest", "other")
TITLES = {"baseline": "timings of baselines", "other": "tests without a record"}
SHOWN_SECONDS = 0.005  # of a part; less is shown as 0.00
INSIDE = "&nbsp;&nbsp;"  # before a part of the line above
INTERPRETER = "The time in which the interpreter itself ends comes after the last of these figures."


class CostRow(msgspec.Struct, frozen=True):
    """One line: a part of the run and its seconds, None if they are not known.

    A row that `is_inside` is a part of a row above it.
    """

    title: str
    seconds: float | None
    is_inside: bool = False


class CostSide(msgspec.Struct, frozen=True):
    """The records of one run, and its seconds or the reason why there are none."""

    name: str
    records: tuple[Record, ...]
    run: RunSeconds | str


def cost_markdown(sides: list[CostSide]) -> str:
    """The table of one run, or of two with the difference, and what their records do not hold."""
    columns = [{row.title: row for row in cost_rows(side)} for side in sides]
    heads = [side.name for side in sides] if len(sides) > 1 else ["seconds", "share"]
    lines = [_line(["part", *heads, *(["difference"] if len(sides) > 1 else [])])]
    lines.append(_line(["---", *["---:"] * (len(heads) + (len(sides) > 1))]))
    for title in _in_order(columns):
        row = next(column[title] for column in columns if title in column)
        name = f"{INSIDE}{title.rpartition(': ')[2]}" if row.is_inside else title
        cells = [column[title].seconds if title in column else None for column in columns]
        lines.append(_line([name, *(_compared(cells) if len(sides) > 1 else _shared(cells[0], columns[0]))]))
    notes = [f"- {f'{side.name}: ' * (len(sides) > 1)}{note}" for side in sides for note in cost_notes(side)]
    return "\n".join([*lines, "", *notes])


def cost_rows(side: CostSide) -> list[CostRow]:
    """The parts of a run in the order in which they happen; without the run's file, only the tests."""
    run = side.run if isinstance(side.run, RunSeconds) else None
    groups = _by_kind(side.records)
    rows = [CostRow("start of Python, pytest and its plugins", run.start_seconds)] if run else []
    if run:
        rows += [CostRow("collection", run.collection_seconds), CostRow("fixtures", run.fixture_seconds)]
        rows.append(CostRow("fixtures: the batch of builds", run.build_seconds, is_inside=True))
    for kind in KINDS:
        count, seconds = _calls(kind, groups.get(kind, []), run)
        if count:
            rows.append(CostRow(_title(kind), seconds))
            rows += _parts(kind, groups.get(kind, []), seconds)
    if run and not run.workers:
        known = sum(row.seconds or 0.0 for row in rows if not row.is_inside) + run.answer_seconds + run.end_seconds
        rows.append(CostRow("pytest between the tests", max(0.0, run.total_seconds - known)))
    if run:
        rows += [CostRow("tables and last lines", run.answer_seconds), CostRow("end of all processes", run.end_seconds)]
        rows.append(CostRow("total", run.total_seconds))
    return rows


def cost_notes(side: CostSide) -> list[str]:
    """What the table covers, and what the records do not hold."""
    groups = _by_kind(side.records)
    listed = ", ".join(f"{len(groups[kind])} {_title(kind)}" for kind in KINDS if kind in groups)
    notes = [f"{len(side.records)} record{'s' * (len(side.records) != 1)}: {listed}."]
    if isinstance(side.run, str):
        notes.append(f"Start, collection, fixtures, end and total of the run are not known: {side.run}.")
        unknown = [_title(row) for row, records in groups.items() if not sum(map(_known_seconds, records))]
        notes += [f"The records hold no seconds of {', '.join(unknown)}."] if unknown else []
    else:
        notes.append(INTERPRETER)
        if side.run.workers:
            notes.append(f"{side.run.workers} processes ran tests side by side, so the parts exceed the total.")
    judged = [record for record in side.records if record.stages and record.kind != "build"]
    if without := sum(record.costs is None for record in judged):
        text = "the profiler's time, the wait for other timings and the start of processes are not in them"
        notes.append(f"{without} of {len(judged)} records have no `costs`: {text}.")
    return [*notes, *_compiler_note(side.records)]


def _compiler_note(records: Iterable[Record]) -> list[str]:
    """The seconds of all compilers; a compilation that made the builds of several variants counts once."""
    builds = {(build.key, build.arch, build.variant): build for record in records for build in record.builds}
    if not builds:
        return []
    seconds = {(build.key, build.arch, build.built_at): build.build_seconds for build in builds.values()}
    compiled = f"{len(builds)} build{'s' * (len(builds) != 1)}"
    if len(seconds) < len(builds):
        compiled += f" of {len(seconds)} compilation{'s' * (len(seconds) != 1)}, each counted once,"
    text = f"{compiled} took {sum(seconds.values()):.1f} s of compilers"
    return [f"{text}, in this run or in an earlier one whose builds the cache had."]


def _kind(record: Record) -> str:
    return "baseline" if record.kind == "speed" and record.role in ("baseline", "overhead") else record.kind


def _by_kind(records: Iterable[Record]) -> dict[str, list[Record]]:
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(_kind(record), []).append(record)
    return groups


def _calls(kind: str, records: list[Record], run: RunSeconds | None) -> tuple[int, float | None]:
    """The number of tests of a kind and their seconds; without the run's file, those that the records know."""
    if run:
        counted = run.tests.get(kind)
        return (counted.count, counted.call_seconds) if counted else (0, 0.0)
    return len(records), sum(_known_seconds(record) for record in records) or None


def _known_seconds(record: Record) -> float:
    """The seconds of one record: those of its job, the wait and the profiler, else of its gate or its stages."""
    if record.costs is not None:
        return record.costs.waited_seconds + record.costs.job_seconds + record.costs.profiler_seconds
    return record.gate.seconds if record.gate else sum(stage.seconds for stage in _stages(record))


def _parts(kind: str, records: list[Record], seconds: float | None) -> list[CostRow]:
    """The parts of the tests of one kind.  A build's seconds are no part: it may come from the cache."""
    parts: defaultdict[str, float] = defaultdict(float)
    for stage in (stage for record in records for stage in _stages(record)):
        parts[f"stage {stage.name}"] += stage.seconds
    costs = [record.costs for record in records if record.costs is not None]
    if costs:
        in_stages = sum(stage.seconds for record in records if record.costs for stage in _stages(record))
        compiling = sum(record.compile_seconds for record in records if record.costs)
        outside_stages = sum(each.job_seconds for each in costs) - in_stages - compiling
        parts["first calls, which compile"] = compiling
        parts["import of torch, start of processes, messages"] = max(0.0, outside_stages)
        parts["profiler"] = sum(each.profiler_seconds for each in costs)
        parts["wait for other timings"] = sum(each.waited_seconds for each in costs)
        parts["records and reports"] = max(0.0, (seconds or 0.0) - sum(parts.values()))
    if kind == "gate":
        parts |= _gate_parts([record.gate for record in records if record.gate and record.gate.part_seconds])
    title = _title(kind)
    return [
        CostRow(f"{title}: {name}", value, is_inside=True) for name, value in parts.items() if value >= SHOWN_SECONDS
    ]


def _gate_parts(gates: list[Gate]) -> dict[str, float]:
    """The pilots of gates, and the parts of all their processes; those of several GPUs run side by side."""
    return _pilot_parts(gates) | {
        name: sum(gate.processes / gate.gpus * gate.part_seconds.get(part, 0.0) for gate in gates)
        for part, name in PARTS.items()
    }


def _pilot_parts(gates: list[Gate]) -> dict[str, float]:
    """The timings of pilots, the wait before them, their profiler, and the rest; in older records, only their sum."""
    total = sum(gate.pilot_seconds for gate in gates)
    costs = [gate.pilot_costs for gate in gates if gate.pilot_costs]
    if not costs:
        return {"pilots of gates": total}
    parts = {
        "wait of pilots for other timings": sum(each.waited_seconds for each in costs),
        "timings of pilots": sum(each.job_seconds for each in costs),
        "profiler of pilots": sum(each.profiler_seconds for each in costs),
    }
    return parts | {"rest of pilots": max(0.0, total - sum(parts.values()))}


def _stages(record: Record) -> list[Stage]:
    return [stage for stage in record.stages if stage.name != "build"]


def _title(kind: str) -> str:
    return TITLES.get(kind, f"test_{kind}")


def _in_order(columns: list[dict[str, CostRow]]) -> list[str]:
    """The titles of all columns, each after the one that it follows in its own column."""
    titles = list(columns[0])
    for column in columns[1:]:
        place = 0
        for title in column:
            if title in titles:
                place = titles.index(title) + 1
            else:
                titles.insert(place, title)
                place += 1
    return titles


def _shared(seconds: float | None, column: dict[str, CostRow]) -> list[str]:
    """The seconds, and their share of the total if that is known."""
    total = column["total"].seconds if "total" in column else None
    share = f"{100 * seconds / total:.0f} %" if total and seconds is not None else "-"
    return [_seconds(seconds), share]


def _compared(cells: list[float | None]) -> list[str]:
    before, after = cells
    difference = "-" if before is None or after is None else f"{after - before:+.2f}"
    return [_seconds(before), _seconds(after), difference]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"

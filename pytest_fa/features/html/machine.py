"""Everything that the page shows of the records of one GPU, or of the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from pytest_fa.features.compare.compare import process_sd_of
from pytest_fa.features.html.failures import Failures, failures_of
from pytest_fa.features.html.hierarchy import Hierarchy, hierarchy_of
from pytest_fa.features.html.reasons import AblationPart, ProfilePart, ablation_parts, profile_parts
from pytest_fa.features.html.shape_tables import PageCell, PageRow, PageTable, check_table, gate_table, shape_tables
from pytest_fa.features.html.strips import ClockLine, StripGroup, clock_lines, strip_groups
from pytest_fa.features.html.surroundings import PropertyRow, commands_of, environment_rows
from pytest_fa.records.added import added_kinds
from pytest_fa.records.ceilings import read_ceilings
from pytest_fa.records.files import try_to_read
from pytest_fa.records.origin import origin_of
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record
from pytest_fa.records.standing import HiddenTime
from pytest_fa.table.answer import RunFacts, answer_lines
from pytest_fa.table.layout import TextLine
from pytest_fa.table.rows import notes

MAX_NOTES = 100


class PageFacts(NamedTuple):
    """What the page needs beside the records: their name, the records folder, and the run; None for saved records."""

    name: str
    records_folder: Path
    run: RunFacts | None = None
    complaints: tuple[str, ...] = ()
    hidden: tuple[HiddenTime, ...] = ()  # times that do not count


class Machine(NamedTuple):
    """The parts of the page about one GPU, in their order."""

    name: str
    answer: tuple[TextLine, ...]
    origin: str
    hidden: tuple[str, ...]
    tables: tuple[PageTable, ...]
    shapes: tuple[PageTable, ...]
    hierarchy: Hierarchy | None
    profiles: tuple[ProfilePart, ...]
    ablations: tuple[AblationPart, ...]
    failures: Failures
    strips: tuple[StripGroup, ...]
    clocks: tuple[ClockLine, ...]
    notes: tuple[str, ...]
    environment: tuple[PropertyRow, ...]
    commands: tuple[str, ...]


def machine_of(name: str, records: list[Record], facts: PageFacts) -> Machine:
    """The parts of the page for the records of one GPU, or of the CPU."""
    gpu = records[0].environment.gpu
    ceilings, problem = try_to_read(lambda: read_ceilings(facts.records_folder, gpu))
    subjects = [record for record in records if record.kind != "selftest"]
    hierarchy = hierarchy_of(subjects, ceilings)
    tables = (gate_table(subjects), selftest_table(records), check_table(subjects))
    lines = notes(records)
    not_counted = [each for each in facts.hidden if each.timed.environment.gpu == gpu]
    hidden = [f"and {len(lines) - MAX_NOTES} more notes"] if len(lines) > MAX_NOTES else []
    return Machine(
        name=name,
        answer=_answer(records, facts.run),
        origin=origin_of(records),
        hidden=tuple(each.sentence for each in not_counted),
        tables=tuple(table for table in tables if table),
        shapes=shape_tables(subjects, ceilings, process_sd_of(facts.records_folder, gpu), not_counted),
        hierarchy=hierarchy,
        profiles=profile_parts(subjects),
        ablations=ablation_parts(subjects),
        failures=failures_of(records),
        strips=strip_groups(subjects),
        clocks=clock_lines(subjects),
        notes=(*([problem] if problem else []), *lines[:MAX_NOTES], *hidden),
        environment=environment_rows(records),
        commands=commands_of(records, hierarchy.shape_id if hierarchy else None),
    )


def selftest_table(records: list[Record]) -> PageTable | None:
    """One row for each kernel of the self-test with the checks that rejected it; None without a self-test."""
    tested = [record for record in records if record.kind == "selftest"]
    texts = [(each.variant, ", ".join(each.caught_by) or "no check", each.outcome) for each in tested]
    rows = [
        PageRow(tuple(PageCell(text, is_text=True) for text in row), "" if row[-1] == Outcome.OK else "wrong")
        for row in texts
    ]
    headers = tuple(PageCell(header, is_text=True) for header in ("kernel", "rejected by", "result"))
    finding = _selftest_words(tested)
    return PageTable("Self-test", finding, headers, tuple(rows), is_open=True) if rows else None


def _answer(records: list[Record], run: RunFacts | None) -> tuple[TextLine, ...]:
    """The answer of the run; of the self-test, how many kernels gave an unexpected result.

    Saved records are no run that failed because one gate of theirs did: what features found stands in its table.
    """
    shown = records if run else [each for each in records if each.kind not in added_kinds(spans_cases=True)]
    lines = answer_lines(shown or records, run or RunFacts())
    if lines:
        return tuple(lines)
    is_red = any(record.outcome != Outcome.OK for record in records)
    return (TextLine(f"self-test: {_selftest_words(records)}", "red" if is_red else "green"),)


def _selftest_words(records: list[Record]) -> str:
    wrong = sum(record.outcome != Outcome.OK for record in records)
    return f"{wrong} of {len(records)} kernels with an unexpected result"

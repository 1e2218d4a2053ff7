"""What is left to measure, in pieces: one process each, which ends within the time limit of one command."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pytest_fa.features.gate.gated import Gate
from pytest_fa.records.origin import has_no_second_clock
from pytest_fa.records.record import Record, Source
from tools.measure.faults import file_faults, origin_of_record, row_faults
from tools.measure.json_files import FILES, is_of_commit
from tools.measure.tables import PageTable, ShownPages, ShownResult, groups_of

LIMIT_SECONDS = 600.0  # of one piece; then it is interrupted
PIECE_SECONDS = 300.0  # that a piece may be expected to take, since the estimate may be wrong
START_SECONDS = 15.0  # of a process, until its first test
UNKNOWN_SECONDS = 5.0  # of a result, if no record says how long it took
GATE_SECONDS = 30.0  # of a shape of a gate, likewise
BUILDS_AT_ONCE = 4
SUITE = "pytest_fa.suite.test_attention"
RECORDS_FOLDER = "profiles"
PYTEST = (sys.executable, "-m", "pytest")


class TablePiece(NamedTuple):
    """What one process measures: these results, or one file.  `seconds` is an estimate."""

    command: tuple[str, ...]
    seconds: float
    results: tuple[ShownResult, ...] = ()
    file: str = ""
    environment: tuple[tuple[str, str], ...] = ()
    card: str | None = None  # the one that measures it, if that is known

    @property
    def title(self) -> str:
        """What is measured, in words."""
        if self.file:
            return self.file
        variants, shapes = ({getattr(each, name) for each in self.results} for name in ("variant", "shape"))
        return f"{len(self.results)} results of {len(variants)} variants at {len(shapes)} shapes"


class TablePlan(NamedTuple):
    """The tables, how much of each is left to measure, and the pieces that measure it."""

    tables: tuple[PageTable, ...]
    left: dict[str, int]
    pieces: tuple[TablePiece, ...]

    @property
    def seconds(self) -> float:
        """About how long the card with the most work takes."""
        return max((sum(piece.seconds for piece in pieces) for pieces in self.by_card.values()), default=0.0)

    @property
    def by_card(self) -> dict[str | None, list[TablePiece]]:
        """The pieces of each card that has some, in the order in which it measures them."""
        pieces: dict[str | None, list[TablePiece]] = {}
        for piece in self.pieces:
            pieces.setdefault(piece.card, []).append(piece)
        return pieces

    @property
    def lines(self) -> list[str]:
        """A line for each table, and one about all."""
        width = max((len(each.name) for each in self.tables), default=0)
        rows = [
            f"{each.name:{width}}  {self.left[each.name]} of {len(each.records) + len(each.files)} results to measure"
            for each in self.tables
        ]
        number = sum(len(piece.results) + bool(piece.file) for piece in self.pieces)
        total = f"{len(self.tables)} tables, {number} results to measure in {len(self.pieces)} pieces"
        return [*rows, f"{total}, about {self.seconds / 60:.0f} minutes"]


def make_plan(
    pages: ShownPages, source: Source, cards: Sequence[str | None] = (None,), pytest: tuple[str, ...] = PYTEST
) -> TablePlan:
    """What is left to measure of `source` on these cards, of which None is not known yet.

    A table is done if none of its rows is at fault: all are of one card and of one commit with the sources of today.
    A file is also done if it was measured at this commit.
    Tables that share a result have one record of it, so one card does them together.  Until they are done, what that
    card has measured of this commit is kept.  Raises `FaError` for what cannot be read.
    """
    tables, history = pages.tables(), pages.history()
    recorded = RecordedCosts(tables)
    groups = [
        group for group in groups_of(tables) if any(row_faults(table, pages.variants, history) for table in group)
    ]
    files = dict.fromkeys(file for table in tables for file in table.files)
    old_files = [
        file
        for file in files
        if not is_of_commit(pages.root / file, source) and any(file_faults(file, pages.variants, history))
    ]
    shares = _shared_out(groups, old_files, source, cards, recorded)
    pieces = [
        piece._replace(card=card)
        for card, share in shares.items()
        for piece in (*_pieces(share.results, recorded, pytest), *map(_piece_of_file, share.files))
    ]
    todo = {each for share in shares.values() for each in (*share.results, *share.files)}
    counts = {table.name: len(todo & {*table.records, *table.files}) for table in tables}
    return TablePlan(tuple(tables), counts, tuple(pieces))


class _Share:
    """What one card measures."""

    def __init__(self) -> None:
        self.results: list[ShownResult] = []
        self.files: list[str] = []
        self.seconds = 0.0


def _shared_out(
    groups: Sequence[Sequence[PageTable]],
    files: Sequence[str],
    source: Source,
    cards: Sequence[str | None],
    recorded: RecordedCosts,
) -> dict[str | None, _Share]:
    """Give each group to the card that has the least of it left to measure.

    Of equal cards, the one that is done first gets it.  The longest groups come first, so that all cards are done at
    about the same time.
    """
    shares = {card: _Share() for card in cards}
    left_of = [{card: _left_of(group, source, card) for card in cards} for group in groups]
    seconds_of = [{card: sum(map(recorded.of, left)) for card, left in each.items()} for each in left_of]
    chosen: dict[int, str | None] = {}
    for index in sorted(range(len(groups)), key=lambda index: -max(seconds_of[index].values())):
        seconds = seconds_of[index]
        card = min(cards, key=lambda card: (round(seconds[card], 3), shares[card].seconds))
        shares[card].seconds += seconds[card]
        chosen[index] = card
    for index, card in sorted(chosen.items()):
        shares[card].results += left_of[index][card]
    for file in files:
        share = min(shares.values(), key=lambda share: share.seconds)
        share.files.append(file)
        share.seconds += FILES[Path(file).name].seconds
    return shares


def _left_of(group: Sequence[PageTable], source: Source, card: str | None) -> list[ShownResult]:
    """The results that this card has not measured of this commit, without changes and by the method of today."""
    records = {result: record for table in group for result, record in table.records.items()}
    return [
        result
        for result, record in records.items()
        if record is None
        or has_no_second_clock(record)
        or record.source.dirty is not False
        or card is None
        or origin_of_record(record) != (card, source.commit)
    ]


# -- pieces -----------------------------------------------------------------------------------------------------------


def _piece_of_file(file: str) -> TablePiece:
    measured = FILES[Path(file).name]
    words = (each.format(profiles=RECORDS_FOLDER) for each in measured.arguments)
    environment = tuple((name, value.format(profiles=RECORDS_FOLDER)) for name, value in measured.environment)
    return TablePiece((sys.executable, *words), measured.seconds, file=file, environment=environment)


class RecordedCosts:
    """The seconds that the results of some tables took, by their records."""

    def __init__(self, tables: Iterable[PageTable]) -> None:
        records = [(result, record) for each in tables for result, record in each.records.items() if record]
        self._seconds = {result: _seconds_of(record) for result, record in records}
        self._of_kind: dict[str, list[float]] = {}
        for result, seconds in self._seconds.items():
            self._of_kind.setdefault(result.kind, []).append(seconds)
        builds = [(result.variant, each.counted_seconds) for result, record in records for each in record.builds]
        self._builds = dict(sorted(builds))  # of several, the longest

    def of(self, result: ShownResult) -> float:
        """The seconds of a result; without a record, the median of its kind."""
        if result.gate and result not in self._seconds:
            return GATE_SECONDS * len(result.gate.shapes)
        usual = statistics.median(self._of_kind.get(result.kind, [UNKNOWN_SECONDS]))
        return self._seconds.get(result, usual)

    def of_build(self, variant: str) -> float:
        """By how much the build of a variant makes a run longer."""
        return self._builds.get(variant, 0.0) / BUILDS_AT_ONCE


def _seconds_of(record: Record) -> float:
    if gate := Gate.of(record):
        return gate.seconds
    if record.costs:
        return record.costs.job_seconds + record.costs.profiler_seconds
    return sum(stage.seconds for stage in record.stages if stage.name != "build") or UNKNOWN_SECONDS


def _pieces(results: Iterable[ShownResult], recorded: RecordedCosts, pytest: tuple[str, ...]) -> Iterator[TablePiece]:
    """The results by options and shape: what is compared at a shape runs in one process, as far as it fits."""
    built: set[str] = set()
    by_options: dict[tuple[str, ...], dict[str, list[ShownResult]]] = {}
    for result in results:
        by_options.setdefault(_options_of(result), {}).setdefault(result.shape, []).append(result)
    for options, by_shape in by_options.items():
        chosen: list[ShownResult] = []
        seconds = START_SECONDS
        for result in (each for of_shape in by_shape.values() for each in of_shape):
            own = recorded.of(result) + (0.0 if result.variant in built else recorded.of_build(result.variant))
            built.add(result.variant)
            if chosen and (result.gate or seconds + own > PIECE_SECONDS):  # each gate has cases of its own
                yield TablePiece(_command(chosen, options, pytest), seconds, tuple(chosen))
                chosen, seconds = [], START_SECONDS
            chosen.append(result)
            seconds += own
        yield TablePiece(_command(chosen, options, pytest), seconds, tuple(chosen))


def _options_of(result: ShownResult) -> tuple[str, ...]:
    """The options without which pytest has no such test; properties have no case."""
    if result.gate:
        return result.gate.options
    if result.kind == "profile":
        return ("--ncu", f"--ncu-set={result.id.rpartition('-')[2]}")
    return ("property",) if result.kind == "property" else ()


def _command(results: Sequence[ShownResult], options: tuple[str, ...], pytest: tuple[str, ...]) -> tuple[str, ...]:
    """A run of exactly these tests, which saves their results."""
    is_property = options == ("property",)
    cases = dict.fromkeys(_case_of(each) for each in results)
    return (
        *pytest,
        *("-q", "--fa-save", f"--fa-profiles={RECORDS_FOLDER}"),
        f"--fa-variant={','.join(dict.fromkeys(each.variant for each in results))}",
        *(() if is_property else (f"--fa-case={','.join(cases)}", *options)),
        "--pyargs",
        *(f"{SUITE}::test_{each.kind}[{_test_of(each)}]" for each in results),
    )


def _case_of(result: ShownResult) -> str:
    """The case with its seed, which the id of a record has behind the variant; of a gate, all its cases."""
    if result.gate:
        return result.gate.cases
    seed = result.id.removeprefix(f"{result.variant}-{result.shape}-").partition("-")[0]
    return f"{result.shape}-{seed}"


def _test_of(result: ShownResult) -> str:
    """The id of a test; one that measures a shape has no seed, and a gate no case."""
    if result.gate:
        return result.variant
    return f"{result.variant}-{result.shape}" if result.kind in ("speed", "profile") else result.id

"""What every kind of block is made with: the words of its comment, its records, and the lines of a table."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from pytest_fa.errors import FaError
from pytest_fa.records.agreement import is_unconfirmed
from pytest_fa.records.log import read_records
from pytest_fa.records.origin import Share, origin_of
from pytest_fa.records.record import JUDGED_KINDS, Record, RecordKind
from pytest_fa.records.standing import Rank, day_of, rank_of, standing_results, words_of

NOTHING = "-"
SEED = "seed0"  # of the case of a shape
AnySpec = TypeVar("AnySpec", bound=msgspec.Struct)
AnyValue = TypeVar("AnyValue")
# Of one variant: its records of `test_correct` and `test_speed` at one shape, and its failures of any test there.
AtShape = tuple[Record, ...]
FAILURES_SAVED_SINCE = "2026-11-27"  # the records of this repository that are older are of results that passed only


class ShownGate(msgspec.Struct, frozen=True):
    """A gate that a block shows: `variant` against `baseline`, whose time is multiplied by `ratio`, on these shapes."""

    variant: str
    baseline: str
    ratio: float
    shapes: tuple[str, ...]

    @property
    def options(self) -> tuple[str, ...]:
        """The options of pytest that ask for it, beside the variant and the cases."""
        return (f"--fa-gate={self.ratio:g}", f"--fa-gate-baseline={self.baseline}")

    @property
    def cases(self) -> str:
        """The value of `--fa-case`."""
        return ",".join(f"{shape}-{SEED}" for shape in self.shapes)

    def is_of(self, record: Record) -> bool:
        """Whether a record is the result of this gate."""
        words = shlex.split(record.rerun_command)
        asked = {*self.options, f"--fa-case={self.cases}"}
        return record.kind == "gate" and record.variant == self.variant and asked <= {*words}


def newest_gate(gate: ShownGate, standing: Iterable[Record]) -> Record | None:
    """The newest of the saved results of a gate; there are several of commands that differ in other words."""
    return max(filter(gate.is_of, standing), key=lambda record: record.measured_at, default=None)


class Shown(msgspec.Struct, frozen=True):
    """What a block shows that was measured; nothing for one of what the code declares.

    In the records folder `profiles`, results of each kind in `kinds` of each of `variants` at each of `shapes`, and its
    failures there.  Those of `kinds_if_saved` only if there are such.  `files` are JSON files of that folder, by name.
    With `pairs`, it shows only these variants at these shapes.  `gates` are shown beside all that.
    """

    profiles: str = ""
    variants: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    kinds: tuple[RecordKind, ...] = ()
    kinds_if_saved: tuple[RecordKind, ...] = ()
    files: tuple[str, ...] = ()
    pairs: frozenset[tuple[str, str]] | None = None
    gates: tuple[ShownGate, ...] = ()

    def shows(self, variant: str, shape: str) -> bool:
        """Whether the block shows results of a variant at a shape."""
        is_pair = self.pairs is None or (variant, shape) in self.pairs
        return is_pair and variant in self.variants and shape in self.shapes


class TableProblem(FaError):
    """A table whose comment cannot be read, or whose records do not exist."""


def read_words(words: str, of: type[AnySpec]) -> AnySpec:
    """`key=value key=value` as the type of a kind.  Raises `TableProblem` for an unknown key or a missing value."""
    try:
        return msgspec.convert(dict(word.split("=", 1) for word in words.split()), of, strict=False)
    except (ValueError, msgspec.ValidationError) as problem:
        raise TableProblem(f"{words}: {problem}") from None


def one_of(name: str, allowed: dict[str, AnyValue], what: str) -> AnyValue:
    """The value of a name.  Raises `TableProblem`, which lists the names that are allowed."""
    if name not in allowed:
        raise TableProblem(f"{what} is {name!r} (allowed: {', '.join(allowed)})")
    return allowed[name]


def names_in(text: str) -> list[str]:
    """The names of a list with commas; none for an empty text."""
    return [name for name in text.split(",") if name]


def some_names_in(text: str, key: str) -> list[str]:
    """The names of a list with commas.  Raises `TableProblem` if there are none."""
    names = names_in(text)
    if not names:
        raise TableProblem(f"{key} names nothing")
    return names


def records_of(root: Path, profiles: str, variant: str) -> list[Record]:
    """The saved results of a variant that stand.  Raises `TableProblem` if there are none."""
    records = standing_of(root / profiles, variant)
    if not records:
        raise TableProblem(f"no record of {variant} in {profiles}")
    return records


def records_at(profiles: Path, variant: str, shapes: list[str]) -> list[AtShape]:
    """The records of a variant at each shape; none of a shape that was not measured."""
    records = [each for each in standing_of(profiles, variant) if each.kind in ("correct", "speed") or is_failure(each)]
    return [tuple(each for each in records if each.case and each.case.shape_id == shape) for shape in shapes]


def standing_of(profiles: Path, variant: str) -> list[Record]:
    """The saved results of a variant that stand; none if there is no file."""
    path = profiles / f"{variant}.jsonl"
    return list(_standing_in(path, path.stat().st_mtime_ns if path.exists() else None))


@functools.cache
def _standing_in(path: Path, _changed_ns: int | None) -> tuple[Record, ...]:
    """The results in a file that stand.  Many blocks show one file, and reading it takes a tenth of a second."""
    return tuple(standing_results(read_records(path)).records)


def is_failure(record: Record) -> bool:
    """Whether the output of a result was judged, and failed."""
    return record.kind in JUDGED_KINDS and rank_of(record) is Rank.FAILURE


def device_us(records: AtShape) -> float | None:
    """The time of a variant at one shape."""
    return next((each.speed.device.median_us for each in records if each.speed), None)


def is_contradicted(records: AtShape) -> bool:
    """Whether no other clock confirms the time of a variant at one shape."""
    return any(is_unconfirmed(record.speed) for record in records if record.speed)


def marked_us(records: AtShape) -> str:
    """The time of a variant at one shape, with a `!` if no other clock confirms it; after a failure, what it was."""
    failures = sorted(filter(is_failure, records), key=lambda record: record.measured_at)
    if failures:
        return f"{words_of(failures[-1])} ({day_of(failures[-1])})"
    return figure(device_us(records)) + ("!" if is_contradicted(records) else "")


def ratio(us: float | None, other_us: float | None) -> str:
    """A time divided by another one; a dash if one of them is missing."""
    return figure(us / other_us if us and other_us else None, 3)


def figure(value: float | None, digits: int = 2) -> str:
    """A number as a cell; a dash without one."""
    return NOTHING if value is None else f"{value:.{digits}f}"


def table(rows: list[list[str]], align: str = "---:") -> str:
    """The Markdown of a table whose first row has the heads."""
    rule = ["---", *[align] * (len(rows[0]) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (rows[0], rule, *rows[1:]))


def with_origin(markdown: str, records: Iterable[Record], *, has_checks: bool = False, has_times: bool = True) -> str:
    """A table with a line below it: where and when its figures were measured, and from which commits.

    With a column of checks, the line says how many results are older than the rule that failures are saved, too.  A
    table without times (`has_times`) is about all results.
    """
    all_records = list(records)
    judged = [each for each in all_records if each.kind in JUDGED_KINDS and (each.check or is_failure(each))]
    old = sum(day_of(record) < FAILURES_SAVED_SINCE for record in judged)
    old_checks = Share(old, len(judged), "check", f"older than the saving of failures ({FAILURES_SAVED_SINCE})")
    shares = [old_checks] if has_checks and judged else []
    return with_line(markdown, origin_of(all_records, of_times=has_times, shares=shares))


def with_line(markdown: str, line: str) -> str:
    """A table with a sentence below it; only the table if the sentence is empty."""
    return f"{markdown}\n\n{line[0].upper()}{line[1:]}." if line else markdown

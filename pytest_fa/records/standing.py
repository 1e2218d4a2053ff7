"""Which results stand: of each test the newest one, and no time where the newest result is a failure.

A saved file has up to three results of one test: the newest answer, a failure after it, and a result without a verdict
after these.  Saving a failure therefore removes no time from the file.  `standing_results` hides that time from
readers until the same test passes again, which removes the failure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from enum import IntEnum
from typing import NamedTuple

import msgspec

from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import JUDGED_KINDS, Record


class Rank(IntEnum):
    """What a result says.  A newer result replaces those of its own rank and of the ranks after it."""

    ANSWER = 0  # the test passed, or a feature has its figures, such as a gate that failed
    FAILURE = 1
    NO_VERDICT = 2


class HiddenTime(NamedTuple):
    """A time that does not count, and the failure at the same variant and shape because of which it does not."""

    timed: Record
    failure: Record

    @property
    def sentence(self) -> str:
        """What stands in place of the time, with both dates."""
        timed, failure = self.timed, self.failure
        shape = timed.case.shape_id if timed.case else timed.id
        time = f"{timed.speed.device.median_us:.2f} us" if timed.speed else "a time"
        return (
            f"{timed.variant} at {shape}: {words_of(failure)} ({day_of(failure)}) and not passed since, "
            f"so {time} of {day_of(timed)} does not count"
        )


class Standing(NamedTuple):
    """The results that stand, and the times that do not count."""

    records: tuple[Record, ...]
    hidden: tuple[HiddenTime, ...]


def is_saved(record: Record) -> bool:
    """Whether `--fa-save` saves a result: whatever came of it, unless nothing was judged or measured.

    Nothing was in a build, in a test of a variant that was not built, and in a timing without a time.  With
    `--benchmark-disable` nothing is timed, and such a record would replace a saved time.
    """
    is_untimed = record.kind == "speed" and record.speed is None and record.outcome == Outcome.OK
    has_run = record.outcome not in (Outcome.NOT_MEASURED, Outcome.NOT_BUILT)
    return record.kind != "build" and has_run and not is_untimed


def rank_of(record: Record) -> Rank:
    """What a result says: an answer, a failure, or that there is no verdict."""
    if record.outcome.defect is not None:
        return Rank.FAILURE
    return Rank.ANSWER if record.outcome == Outcome.OK or record.added else Rank.NO_VERDICT


def results_to_keep(records: Iterable[Record], key_of: Callable[[Record], Hashable]) -> list[Record]:
    """Of each key the newest result of each rank, without those that a newer one replaces; the oldest come first."""
    kept: dict[Hashable, dict[Rank, Record]] = {}
    for record in records:
        key, rank = key_of(record), rank_of(record)
        earlier = kept.get(key, {})
        kept[key] = {known: each for known, each in earlier.items() if known < rank} | {rank: record}
    return [record for results in kept.values() for record in results.values()]


def standing_results(records: Iterable[Record]) -> Standing:
    """The results that stand among saved records, those of several files or of several runs.

    A failure replaces an earlier answer of the same test.  No record has a time at a shape at which a result of its
    variant that stands is a failure.
    """
    all_records = list(records)
    places_in_input = {key: place for place, key in reversed(list(enumerate(map(_key, all_records))))}
    kept = results_to_keep(sorted(all_records, key=lambda record: record.measured_at), _key)
    kept.sort(key=lambda record: (places_in_input[_key(record)], rank_of(record)))
    failed = {_key(record) for record in kept if rank_of(record) is Rank.FAILURE}
    standing = [each for each in kept if not (rank_of(each) is Rank.ANSWER and _key(each) in failed)]
    failures = _newest_failures(standing)
    hidden = [each for each in kept if each.speed and _place(each) in failures]
    without_time = {id(each) for each in hidden}
    return Standing(
        tuple(msgspec.structs.replace(each, speed=None) if id(each) in without_time else each for each in standing),
        tuple(HiddenTime(each, failures[_place(each)]) for each in hidden),
    )


def _newest_failures(standing: list[Record]) -> dict[tuple[str | None, str, str | None], Record]:
    """The newest failure of each variant at each shape."""
    failures = [each for each in standing if each.case and each.kind in JUDGED_KINDS and rank_of(each) is Rank.FAILURE]
    return {_place(each): each for each in sorted(failures, key=lambda record: record.measured_at)}


def counts_text(records: Iterable[Record]) -> str:
    """How many results there are, and how many of each outcome that is not `ok`."""
    outcomes = Counter(words_of(record) for record in records)
    count = outcomes.total()
    others = "".join(f", {number} {words}" for words, number in outcomes.items() if words != Outcome.OK)
    return f"{count} results{others or ', all passed'}" if count != 1 else f"1 result{others or ', passed'}"


def words_of(record: Record) -> str:
    """The outcome of a result in words, such as `wrong` or `launch failed`."""
    return record.outcome.replace("_", " ")


def day_of(record: Record) -> str:
    """The day of a result, such as 2026-11-27."""
    return record.measured_at[:10]


def _key(record: Record) -> tuple[str | None, str, str]:
    """The test of a result; the id of a gate does not name its shapes, its command does."""
    return record.environment.gpu, record.kind, record.id if record.kind != "gate" else record.rerun_command


def _place(record: Record) -> tuple[str | None, str, str | None]:
    return record.environment.gpu, record.variant, record.case.shape_id if record.case else None

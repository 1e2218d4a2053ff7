"""A failure is saved beside the newest answer; readers get no time of a variant whose newest result is a failure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_fa.records.log import read_records, save_records
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record
from pytest_fa.records.standing import Rank, counts_text, is_saved, rank_of, standing_results
from tests.factories import OK, SHAPE, SMALL_SHAPE, record, speed

EARLY, LATE, LAST = (f"2026-01-0{day}T00:00:00+00:00" for day in (1, 2, 3))


def timed(variant: str = "mine", **changes: Any) -> Record:
    """A correct result with a time."""
    return record(variant, kind="speed", check=OK, speed=speed(9.0), **changes)


def failed(outcome: Outcome = Outcome.WRONG, **changes: Any) -> Record:
    """A later failure of the same variant at the same shape."""
    return record(outcome=outcome, **{"measured_at": LATE, **changes})


def times_of(records: list[Record]) -> list[float | None]:
    """The times that readers get."""
    return [each.speed.device.median_us if each.speed else None for each in standing_results(records).records]


@pytest.mark.parametrize("outcome", list(Outcome))
def test_what_is_saved(outcome: Outcome) -> None:
    """Every outcome is saved except those of a variant that was not built, or where nothing was measured."""
    expected = outcome not in (Outcome.NOT_BUILT, Outcome.NOT_MEASURED)
    assert is_saved(record(outcome=outcome)) == expected
    assert not is_saved(record(kind="build", outcome=outcome))


def test_a_timing_without_a_time_is_saved_only_after_a_failure() -> None:
    """A timing that was switched off is not saved, because it would replace a time; one that failed is."""
    assert not is_saved(record(kind="speed"))
    assert is_saved(record(kind="speed", outcome=Outcome.CHEAT))


@pytest.mark.parametrize(
    ("outcome", "rank"),
    [
        (Outcome.OK, Rank.ANSWER),
        (Outcome.WRONG, Rank.FAILURE),
        (Outcome.CHEAT, Rank.FAILURE),
        (Outcome.CRASHED, Rank.FAILURE),
        (Outcome.HUNG, Rank.FAILURE),
        (Outcome.INCONCLUSIVE, Rank.NO_VERDICT),
        (Outcome.GATE_FAILED, Rank.NO_VERDICT),
    ],
)
def test_ranks(outcome: Outcome, rank: Rank) -> None:
    """A gate without its figures is no answer; with them, it is one whatever its verdict."""
    assert rank_of(record(outcome=outcome)) is rank
    if rank is Rank.NO_VERDICT:
        assert rank_of(record(kind="gate", outcome=outcome, added={"gate": {}})) is Rank.ANSWER


@pytest.mark.parametrize(
    ("saved", "kept"),
    [
        ([Outcome.OK, Outcome.WRONG], [Outcome.OK, Outcome.WRONG]),
        ([Outcome.OK, Outcome.WRONG, Outcome.HUNG], [Outcome.OK, Outcome.HUNG]),
        ([Outcome.OK, Outcome.WRONG, Outcome.INCONCLUSIVE], [Outcome.OK, Outcome.WRONG, Outcome.INCONCLUSIVE]),
        ([Outcome.OK, Outcome.INCONCLUSIVE, Outcome.WRONG], [Outcome.OK, Outcome.WRONG]),
        ([Outcome.WRONG, Outcome.INCONCLUSIVE, Outcome.OK], [Outcome.OK]),
    ],
)
def test_a_result_replaces_those_of_its_rank_and_after(
    tmp_path: Path, saved: list[Outcome], kept: list[Outcome]
) -> None:
    """A failure never removes the newest answer from a file, and a result without a verdict removes no failure."""
    for outcome in saved:
        (path,) = save_records([record(outcome=outcome)], tmp_path)
    assert [each.outcome for each in read_records(path)] == kept


def test_a_failure_keeps_an_answer_of_an_earlier_schema(tmp_path: Path) -> None:
    """A line of an earlier schema, which may be an answer, stays until there is a new answer."""
    path = tmp_path / "cpu" / "mine.jsonl"
    path.parent.mkdir()
    earlier = f'{{"schema":5,"id":"mine-{SHAPE}-seed0","kind":"correct"}}\n'.encode()
    path.write_bytes(earlier)
    save_records([failed()], tmp_path)
    assert path.read_bytes().startswith(earlier)
    save_records([record()], tmp_path)
    assert earlier not in path.read_bytes()


@pytest.mark.parametrize("kind", ["correct", "speed", "property"])
@pytest.mark.parametrize("when", [EARLY, LAST])
def test_a_failure_that_stands_hides_the_time(kind: str, when: str) -> None:
    """No reader gets a time at a shape at which any result of the variant is a failure, whichever was first."""
    results = [timed(measured_at=LATE), failed(kind=kind, measured_at=when, id="one")]
    assert times_of(results) == [None, None]


def test_a_time_says_what_hides_it() -> None:
    """The sentence in place of the time has the outcome and both dates."""
    (hidden,) = standing_results([timed(), failed(Outcome.LAUNCH_FAILED)]).hidden
    assert hidden.sentence == (
        f"mine at {SHAPE}: launch failed (2026-01-02) and not passed since, so 9.00 us of 2026-01-01 does not count"
    )


def test_the_test_that_failed_hides_its_own_answer() -> None:
    """A failure of the timing itself stands in place of the earlier time."""
    results = standing_results([timed(), failed(Outcome.CHEAT, kind="speed")])
    assert ([each.outcome for each in results.records], len(results.hidden)) == ([Outcome.CHEAT], 1)


def test_a_newer_answer_restores_the_time() -> None:
    """After the failed test has passed again, the time counts; without a new time it is that of the first day."""
    assert times_of([record(), timed(), failed(), record(measured_at=LAST)]) == [None, 9.0]
    assert standing_results([timed(), failed(), record(measured_at=LAST)]).hidden == ()


@pytest.mark.parametrize(
    "other",
    [
        failed(variant="other"),
        failed(case=f"{SMALL_SHAPE}-seed0"),
        failed(environment=msgspec.structs.replace(record().environment, gpu="NVIDIA H200")),
        failed(Outcome.INCONCLUSIVE),
        failed(kind="sanitize"),
    ],
    ids=["variant", "shape", "gpu", "no verdict", "kind"],
)
def test_what_hides_no_time(other: Record) -> None:
    """A failure of another variant, shape or GPU hides no time, nor does a result without a verdict."""
    assert times_of([timed(), other]) == [9.0, None]


def test_without_failures_nothing_changes() -> None:
    """The records of a file without failures are those that stand, in their order."""
    records = [timed(measured_at=LATE), record(measured_at=EARLY), record("other")]
    assert standing_results(records) == (tuple(records), ())


def test_counts() -> None:
    """What the line after a save says."""
    assert counts_text([record()]) == "1 result, passed"
    assert counts_text([record(), failed(), failed(), failed(Outcome.HUNG)]) == "4 results, 2 wrong, 1 hung"

"""The line below a table names machine, days and commits, and counts times of another kind."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pytest_fa.records.origin import Share, origin_of, origin_of_file
from pytest_fa.records.record import Record, Source
from tests.factories import record, speed

H200 = msgspec.structs.replace(record().environment, gpu="NVIDIA H200")


def timed(day: int = 1, commit: str | None = "a", *, dirty: bool = False, judge: bool = True, **changes: Any) -> Record:
    """A time of one day and commit."""
    with_judge = speed(9.0)
    time = with_judge if judge else msgspec.structs.replace(with_judge, outside=None)
    source = Source(commit and commit * 40, dirty, "git")
    at = f"2026-11-{day:02}T00:00:00+00:00"
    fields = {"environment": H200, "speed": time, "source": source, "measured_at": at, **changes}
    return record(kind="speed", **fields)


ONE = "measured on an NVIDIA H200, 2026-11-01, commit aaaaaaaa"


@pytest.mark.parametrize(
    ("records", "line"),
    [
        ([], ""),
        ([timed()], ONE),
        (
            [timed(3, "b"), timed()],
            "measured on an NVIDIA H200, 2026-11-01 to 2026-11-03, commits aaaaaaaa to bbbbbbbb",
        ),
        (
            [timed(), timed(2, "b"), timed(3, "c")],
            "measured on an NVIDIA H200, 2026-11-01 to 2026-11-03, commits aaaaaaaa to cccccccc (3 commits)",
        ),
        ([timed(dirty=True), timed()], f"{ONE}; 1 of 2 times from a tree with uncommitted changes"),
        (
            [timed(judge=False), timed(dirty=True, judge=False)],
            f"{ONE}, older than the judge's clock; 1 of 2 times from a tree with uncommitted changes",
        ),
        (
            [timed(dirty=True, judge=False)],
            f"{ONE}, from a tree with uncommitted changes and older than the judge's clock",
        ),
        ([timed(judge=False)] * 2, f"{ONE}, older than the judge's clock"),
        ([timed(commit=None)], "measured on an NVIDIA H200, 2026-11-01, without a commit"),
        ([timed(), timed(environment=record().environment)], ONE.replace("H200", "H200 and the CPU a CPU")),
        ([timed(speed=None, dirty=True)], f"{ONE}, from a tree with uncommitted changes"),
        ([timed(), timed(9, "z", speed=None)], ONE),
    ],
)
def test_lines(records: list[Record], line: str) -> None:
    """With times, only these count; what is true of all precedes what is true of some; commits are in their order."""
    assert origin_of(records) == line


def test_lines_of_checks() -> None:
    """Where a table has no times, all results count, and no clock is named."""
    checks = [timed(judge=False), timed(2, dirty=True, speed=None)]
    expected = f"{ONE.replace('-01,', '-01 to 2026-11-02,')}; 1 of 2 results from a tree with uncommitted changes"
    assert origin_of(checks, of_times=False) == expected


def test_lines_with_shares_of_others() -> None:
    """What else is known of a table follows in the same way."""
    assert origin_of([timed()], shares=[Share(3, 3, "check", "old")]) == f"{ONE}, old"
    assert origin_of([timed()], shares=[Share(1, 3, "check", "old")]) == f"{ONE}; 1 of 3 checks old"
    assert origin_of([timed()], shares=[Share(0, 3, "check", "old")]) == ONE


def test_lines_of_files() -> None:
    """A file that is no record has the same line, and says what it lacks."""
    source = Source("a" * 40, dirty=True, origin="git")
    assert origin_of_file(H200, source, "2026-11-01T00:00:00") == f"{ONE}, from a tree with uncommitted changes"
    assert origin_of_file(H200, None, "") == (
        "measured on an NVIDIA H200, the file does not say when, without a commit"
    )

"""One line about where the figures of a table come from: machine, days, commits, and how they were measured."""

from __future__ import annotations

from collections.abc import Iterable

from pytest_fa.records.record import Environment, Record, Source
from pytest_fa.records.standing import day_of

COMMIT_DIGITS = 8


def origin_of(records: Iterable[Record], *, of_times: bool = True) -> str:
    """The machines, days and commits of these results, as sentences; of their times, if some have one and `of_times`.

    Times of a tree with uncommitted changes, times without a commit, and times that the judge's clock did not measure
    are counted.  Empty without a result.
    """
    all_records = list(records)
    timed = [record for record in all_records if record.speed and of_times]
    shown = sorted(timed or all_records, key=lambda record: record.measured_at)
    if not shown:
        return ""
    noun = "time" if timed else "result"
    without_judge = sum(has_no_second_clock(record) for record in timed)
    counts = (
        (sum(bool(record.source.dirty) for record in shown), "from a tree with uncommitted changes"),
        (sum(record.source.commit is None for record in shown), "without a commit"),
        (without_judge, "by the earlier method, without the judge's clock"),
    )
    parts = [f"{of_all(count, len(shown), noun)} {words}" for count, words in counts if count]
    where = ", ".join(filter(None, (f"measured on {_machines(shown)}", _days(shown), _commits(shown))))
    return "; ".join([where, *parts])


def origin_of_file(environment: Environment, source: Source | None, measured_at: str) -> str:
    """The machine, the day and the commit of a file that is no record, such as `noise.json`."""
    day = measured_at[:10] or "the file does not say when"
    commit = f"commit {source.commit[:COMMIT_DIGITS]}" if source and source.commit else "without a commit"
    changes = ", from a tree with uncommitted changes" if source and source.dirty else ""
    return f"measured on {_machine(environment)}, {day}, {commit}{changes}"


def has_no_second_clock(record: Record) -> bool:
    """Whether a time on a GPU was not measured by the judge's clock, which earlier versions did not have."""
    speed = record.speed
    return speed is not None and speed.outside is None and not speed.is_on_cpu


def of_all(count: int, total: int, noun: str) -> str:
    """How many of all, such as `3 of 12 times`."""
    if count < total:
        return f"{count} of {total} {noun}s"
    return f"all {total} {noun}s" if total > 1 else f"the only {noun}"


def _machines(shown: list[Record]) -> str:
    return " and ".join(dict.fromkeys(_machine(each.environment) for each in shown))


def _machine(environment: Environment) -> str:
    return f"an {environment.gpu}" if environment.gpu else f"the CPU {environment.cpu}"


def _days(shown: list[Record]) -> str:
    first, last = day_of(shown[0]), day_of(shown[-1])
    return first if first == last else f"{first} to {last}"


def _commits(shown: list[Record]) -> str:
    """The commits of the first and of the last result, and how many there are."""
    commits = list(dict.fromkeys(each.source.commit[:COMMIT_DIGITS] for each in shown if each.source.commit))
    if len(commits) < 2:  # noqa: PLR2004
        return f"commit {commits[0]}" if commits else ""
    return f"commits {commits[0]} to {commits[-1]}{f' ({len(commits)} commits)' if len(commits) > 2 else ''}"  # noqa: PLR2004

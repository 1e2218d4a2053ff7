"""One line about where the figures of a table come from: machine, days, commits, and how they were measured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pytest_fa.records.record import Environment, Record, Source
from pytest_fa.records.standing import day_of

COMMIT_DIGITS = 8


class Share(NamedTuple):
    """How many of all results something is true of, and the words for it."""

    number: int
    total: int
    noun: str
    words: str


def origin_of(records: Iterable[Record], *, of_times: bool = True, shares: Iterable[Share] = ()) -> str:
    """The machines, days and commits of these results, as a sentence; of their times, if some have one and `of_times`.

    What is true of all times follows, then what is true of some, with their number: a tree with uncommitted changes, no
    commit, no time by the judge's clock, and `shares`.  Empty without a result.
    """
    all_records = list(records)
    timed = [record for record in all_records if record.speed and of_times]
    shown = sorted(timed or all_records, key=lambda record: record.measured_at)
    if not shown:
        return ""
    of_shown = len(shown), "time" if timed else "result"
    all_shares = (
        Share(sum(bool(each.source.dirty) for each in shown), *of_shown, "from a tree with uncommitted changes"),
        Share(sum(each.source.commit is None for each in shown), *of_shown, "without a commit"),
        Share(sum(map(has_no_second_clock, timed)), *of_shown, "older than the judge's clock"),
        *shares,
    )
    whole = " and ".join(share.words for share in all_shares if share.number == share.total)
    parts = [
        f"{each.number} of {each.total} {each.noun}s {each.words}"
        for each in all_shares
        if 0 < each.number < each.total
    ]
    where = ", ".join(filter(None, (f"measured on {_machines(shown)}", _days(shown), _commits(shown), whole)))
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

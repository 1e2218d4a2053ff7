"""Pairs of options that make no sense together: such a run is refused before anything is collected."""

from __future__ import annotations

from typing import NamedTuple

from pytest_fa.errors import UsageProblem
from pytest_fa.feature import Reader
from pytest_fa.options.flags import all_options


class RefusedPair(NamedTuple):
    """An option, one that it cannot have beside it, and why."""

    flag: str
    other: str
    why: str

    @property
    def dests(self) -> tuple[str, str]:
        """The names of both in pytest's config."""
        return _dest(self.flag), _dest(self.other)


def refused_pairs() -> list[RefusedPair]:
    """The table of all pairs: those that the rows of options declare in `not_with`."""
    return [RefusedPair(row.flag, other, why) for row in all_options() for other, why in row.not_with]


def require_sensible(reader: Reader) -> None:
    """Raise `UsageProblem` for the first pair of which both options are used, one of them at least typed."""
    for pair in refused_pairs():
        dest, other = pair.dests
        if reader.is_used(dest) and reader.is_used(other) and (reader.is_typed(dest) or reader.is_typed(other)):
            off = "" if any(row.dest == other and row.metavar for row in all_options()) else "false"
            remedy = f"drop {pair.other}" if reader.is_typed(other) else f"the ini file sets {other}; -o {other}={off}"
            raise UsageProblem(f"{pair.flag}: {pair.why}; {remedy}")


def _dest(flag: str) -> str:
    return {"-n": "numprocesses"}.get(flag) or flag.removeprefix("--").replace("-", "_")

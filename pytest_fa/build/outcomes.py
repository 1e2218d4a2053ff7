"""The outcome of a batch of builds: a build, or the reason why there is none, for each request."""

from __future__ import annotations

import msgspec

from pytest_fa.catalog.variant import Target
from pytest_fa.records.built import Build


class BuildFailure(msgspec.Struct, frozen=True):
    """Why there is no build, and, for a failed compilation, the command."""

    variant: str
    arch: Target
    reason: str
    command: str = ""

    @property
    def message(self) -> str:
        """The text of this failure alone."""
        return explain([self])[0]


BuildOutcome = Build | BuildFailure


def explain(failures: list[BuildFailure]) -> list[str]:
    """Return one text for all failures of a variant with the same reason, with their architectures."""
    by_reason: dict[str, list[BuildFailure]] = {}
    for failure in failures:
        by_reason.setdefault(failure.reason, []).append(failure)
    return [_explain(group) for group in by_reason.values()]


def _explain(group: list[BuildFailure]) -> str:
    """The first line of the reason with the variant and its architectures, the other lines, and the command."""
    first_line, *lines = group[0].reason.splitlines() or [""]
    first_line += f" ({group[0].variant} for {', '.join(failure.arch for failure in group)})"
    lines += [f"command: {group[0].command}"] if group[0].command else []
    return "\n".join([first_line, *lines])


class BuildReport(msgspec.Struct, frozen=True):
    """The outcomes of a batch by (variant name, architecture), their counts, and the seconds it took.

    `lacking` says, by variant name, which tool this machine lacks; these variants have no outcome.
    """

    outcomes: dict[tuple[str, str], BuildOutcome]
    compiled: int
    cached: int
    seconds: float
    failed: int = 0
    lacking: dict[str, str] = {}

    @property
    def title(self) -> str:
        """One line for the terminal; empty if the batch was empty."""
        builds = [outcome for outcome in self.outcomes.values() if isinstance(outcome, Build)]
        if not self.outcomes:
            return ""
        places = "; ".join(dict.fromkeys(f"{build.built_on} with {build.compiler}" for build in builds))
        failed = f"{self.failed} failed, " if self.failed else ""
        count = f"{failed}{self.compiled} compiled, {self.cached} cached"
        return f"builds: {count} in {self.seconds:.3f} s" + (f" (built on {places})" if places else "")

"""The outcome of a batch of builds: a build, or the reason why there is none, for each request."""

from __future__ import annotations

import msgspec

from pytest_fa.catalog.variant import Target
from pytest_fa.records.built import Build


class BuildFailure(msgspec.Struct, frozen=True):
    """Why there is no build, and, for a failed compilation, the command.

    `shared_by` names the variants that the compilation was for; they fail together.
    """

    variant: str
    arch: Target
    reason: str
    command: str = ""
    shared_by: tuple[str, ...] = ()

    @property
    def of_all(self) -> BuildFailure:
        """The failed compilation itself: the same for each variant that shares it."""
        return msgspec.structs.replace(self, variant=next(iter(self.shared_by), self.variant))

    @property
    def message(self) -> str:
        """The text of this failure alone."""
        return explain([self])[0]


BuildOutcome = Build | BuildFailure


def explain(failures: list[BuildFailure]) -> list[str]:
    """Return one text for all failures of a variant with the same reason, with their architectures."""
    by_reason: dict[tuple[str, tuple[str, ...]], list[BuildFailure]] = {}
    for failure in failures:
        by_reason.setdefault((failure.reason, failure.shared_by), []).append(failure)
    return [_explain(group) for group in by_reason.values()]


def _explain(group: list[BuildFailure]) -> str:
    """The first line of the reason with the variants and architectures, the other lines, and the command."""
    first_line, *lines = group[0].reason.splitlines() or [""]
    variants = ", ".join(group[0].shared_by or (group[0].variant,))
    first_line += f" ({variants} for {', '.join(failure.arch for failure in group)})"
    lines += [f"command: {group[0].command}"] if group[0].command else []
    return "\n".join([first_line, *lines])


class BuildReport(msgspec.Struct, frozen=True):
    """The outcomes of a batch by (variant name, architecture), their counts, and the seconds it took.

    `lacking` says, by variant name, which tool this machine lacks; these variants have no outcome.  `shared` counts the
    builds that took the library of one of the `compiled`.
    """

    outcomes: dict[tuple[str, str], BuildOutcome]
    compiled: int
    cached: int
    seconds: float
    failed: int = 0
    lacking: dict[str, str] = {}
    shared: int = 0

    @property
    def title(self) -> str:
        """One line for the terminal; empty if the batch was empty."""
        builds = [outcome for outcome in self.outcomes.values() if isinstance(outcome, Build)]
        if not self.outcomes:
            return ""
        places = "; ".join(dict.fromkeys(f"{build.built_on} with {build.compiler}" for build in builds))
        failed = f"{self.failed} failed, " if self.failed else ""
        shared = f"{self.shared} shared, " if self.shared else ""
        count = f"{failed}{self.compiled} compiled, {shared}{self.cached} cached"
        return f"builds: {count} in {self.seconds:.3f} s" + (f" (built on {places})" if places else "")

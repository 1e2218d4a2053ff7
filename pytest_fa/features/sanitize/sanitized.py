"""What `--fa-sanitize` adds to a record: the result of one tool of compute-sanitizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pytest_fa.records.added import Added
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.ranges import Natural, Seconds
from pytest_fa.records.record import Record

ToolStatus = Literal["clean", "found", "suppressed", "not covered", "not measured", "incomplete"]


class Sanitized(Added, frozen=True):
    """The result of one compute-sanitizer tool on one variant, or the reason why there is none.

    `findings` are the first lines of each distinct report.  `count` is the number of errors and hazards in its summary.
    """

    feature: ClassVar = "sanitize"
    kind: ClassVar = "sanitize"

    tool: str
    status: ToolStatus
    message: str
    version: str
    seconds: Seconds
    command: tuple[str, ...]
    count: Natural | None = None
    findings: tuple[str, ...] = ()
    log: str | None = None

    def details(self) -> tuple[str, ...]:
        """The findings."""
        return self.findings

    @classmethod
    def words(cls, records: Sequence[Record]) -> list[str]:
        """The tools that found nothing; if there are none, whether one could not run."""
        clean = cls.all_of(record for record in records if record.outcome == Outcome.OK)
        if clean:
            return [f"clean under {', '.join(dict.fromkeys(result.tool for result in clean))}"]
        unchecked = (record for record in records if record.kind == cls.kind and record.outcome == Outcome.NOT_MEASURED)
        return ["not checked by compute-sanitizer"] if any(unchecked) else []

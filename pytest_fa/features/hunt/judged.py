"""The judgements of one hunt: each example is judged once, and its verdict kept.

So an example that hung or crashed its process is never launched again.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import NamedTuple, Protocol

from pytest_fa.features.hunt.example import Example
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record

NEVER_REPEATED = (Outcome.HUNG, Outcome.CRASHED, Outcome.DEVICE_ERROR)


class ExampleVerdict(NamedTuple):
    """The record of an example that was judged; None if the variant refused it, as it may."""

    record: Record | None

    @property
    def failed(self) -> bool:
        """Whether it shows a fault."""
        return self.record is not None and self.record.outcome.is_failure

    @property
    def outcome(self) -> Outcome:
        """The outcome of the record."""
        return self.record.outcome if self.record else Outcome.OK

    @property
    def ends_process(self) -> bool:
        """Whether the call ended its process, or would not end."""
        return self.outcome in NEVER_REPEATED


class ExampleBench(Protocol):
    """Judges examples of one variant."""

    def judge(self, example: Example) -> ExampleVerdict:
        """Judge an example with a few calls."""

    def judge_thoroughly(self, example: Example) -> ExampleVerdict:
        """Judge an example with as many calls as the suites make."""

    def is_usable(self, example: Example) -> bool:
        """Whether the example is possible, and the variant claims to support it."""


class Excuses(Protocol):
    """Known faults, which fail no hunt."""

    @property
    def examples(self) -> Collection[Example]:
        """An example of each."""

    def avoids(self, example: Example) -> bool:
        """Whether an example is not judged, because a known fault of its kind ends the process."""

    def excuses(self, example: Example, outcome: Outcome) -> bool:
        """Whether the failure of an example is a known one."""


class NoExcuses:
    """Nothing is known."""

    examples: tuple[Example, ...] = ()

    def avoids(self, example: Example) -> bool:  # noqa: ARG002
        """Every example is judged."""
        return False

    def excuses(self, example: Example, outcome: Outcome) -> bool:  # noqa: ARG002
        """Every failure is new."""
        return False


class Judgements:
    """The verdicts so far.  After `deadline` (in seconds of `time.monotonic`), every new example counts as right.

    With `repeats` above 1, an example fails if one of so many judgements does.
    """

    def __init__(self, bench: ExampleBench, deadline: float) -> None:
        self._bench, self.deadline, self.repeats = bench, deadline, 1
        self._known: dict[Example, ExampleVerdict] = {}
        self.judged = self.refused = 0
        self.seconds = 0.0

    @property
    def is_over(self) -> bool:
        """Whether no time is left."""
        return time.monotonic() >= self.deadline

    def of(self, example: Example) -> ExampleVerdict:
        """The verdict on an example, as it was, or of now."""
        if example in self._known:
            return self._known[example]
        if self.is_over:
            return ExampleVerdict(None)
        verdict = self.new(example)
        for _ in range(self.repeats - 1):
            if verdict.failed or self.is_over:
                break
            verdict = self.new(example)
        self._known[example] = verdict
        return verdict

    def of_known(self, example: Example, most: int) -> ExampleVerdict:
        """The verdict on an example that has failed before, also after the deadline: up to so many judgements."""
        verdict = self.new(example)
        for _ in range(most - 1):
            if verdict.failed or verdict.record is None:
                break
            verdict = self.new(example)
        self._known[example] = verdict
        return verdict

    def failures(self, example: Example, most: int) -> tuple[int, int]:
        """How many of up to so many further verdicts fail, and their number; one that ends the process is the last."""
        failed = judged = 0
        for _ in range(most):
            verdict = self.new(example)
            failed, judged = failed + verdict.failed, judged + 1
            if verdict.ends_process:
                break
        return failed, judged

    def new(self, example: Example) -> ExampleVerdict:
        """A further verdict on an example."""
        start = time.monotonic()
        verdict = self._bench.judge(example)
        self.seconds += time.monotonic() - start
        self.judged += verdict.record is not None
        self.refused += verdict.record is None
        return verdict

"""The hunt of one variant: known examples first, then random ones until the time is over; each fault is shrunk.

`hunt` is the flow.  Hypothesis makes the examples and shrinks them.  What fails because of a fault that was found
already is passed over: an example that has all that this fault needs (`what_matters`).
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from pytest_fa.catalog.variant import Variant
from pytest_fa.features.hunt.example import Example
from pytest_fa.features.hunt.judged import ExampleBench, ExampleVerdict, Excuses, Judgements, NoExcuses
from pytest_fa.features.hunt.optional_hypothesis import HealthCheck, NoSuchExample, Phase, find, settings, st
from pytest_fa.features.hunt.what_matters import Need, names_of, what_matters, with_one_text_less
from pytest_fa.records.outcome import Outcome

ROUND = 10  # random examples of one search; after the tenth, Hypothesis makes others like those before
SHRINK_SECONDS = 30.0  # for one fault, also after the end of the hunt
MAX_FAULTS = 8
RATE_JUDGEMENTS = 10  # of a failing example, after which its rate of failures is known
LEAST_REPEATS, MAX_REPEATS = 20, 200  # of each example while a fault is shrunk that does not always show
FIRST_JUDGEMENTS = 2  # further ones of a failing example, which tell whether it always fails
FEW_TOKENS = 17
NO_EXCUSES = NoExcuses()
ENOUGH_FAILURES = 3  # expected in the repeats of an example that has the fault


class FoundFault(NamedTuple):
    """One fault: the example with which it was found, the smallest one, its verdict, and what it needs.

    `failed` of `judged` judgements of the smallest example failed.  It was found with judgement number `after` of the
    hunt, and `shrinking` more led to the smallest example.
    """

    first: Example
    example: Example
    verdict: ExampleVerdict
    rules: tuple[Need, ...]
    failed: int
    judged: int
    after: int
    shrinking: int
    note: str = ""

    def explains(self, example: Example) -> bool:
        """Whether an example has all that the fault needs, so that it may show no other one."""
        return all(rule.holds(example) for rule in self.rules)


class _Search(NamedTuple):
    """How a fault was found: the first example, the smallest one, and the judgements before both and between them."""

    first: Example
    smallest: Example
    after: int
    shrinking: int = 0


class Hunted(NamedTuple):
    """The result of a hunt."""

    faults: tuple[FoundFault, ...]
    judged: int
    refused: int
    seconds: float
    judging_seconds: float


def hunt(  # noqa: PLR0913  # what a hunt is asked, and where it tells what it finds
    bench: ExampleBench,
    variant: Variant,
    strategy: st.SearchStrategy[Example],
    *,
    seconds: float,
    seed: int,
    known: Iterable[Example] = (),
    found: Callable[[FoundFault], object] = lambda _: None,
    right: Callable[[Example], object] = lambda _: None,
    max_faults: int = MAX_FAULTS,
    excuses: Excuses = NO_EXCUSES,
) -> Hunted:
    """Judge `known` examples and then random ones for so many seconds, or until there are so many faults.

    `found` is called with each fault, and `right` with each of the known examples that no longer fails.  What `excuses`
    knows is a fault once, and no random example that fails so is one.
    """
    start = time.monotonic()
    run = _Hunt(bench, variant, Judgements(bench, start + seconds), excuses, found)
    run.judge_known(known, right)
    number = 0
    while not run.judgements.is_over and len(run.faults) < max_faults and all(fault.rules for fault in run.new_faults):
        number += 1
        if (first := _first_failing(strategy, run.is_new, f"{seed}-{number}")) is not None:
            run.note(_shrunk(first, strategy, run, f"{seed}-{number}"))
    spent, judged = time.monotonic() - start, run.judgements
    return Hunted(tuple(run.faults), judged.judged, judged.refused, spent, judged.seconds)


class _Hunt:
    """The faults of one hunt so far, and what is no new one."""

    def __init__(
        self,
        bench: ExampleBench,
        variant: Variant,
        judgements: Judgements,
        excuses: Excuses,
        found: Callable[[FoundFault], object],
    ) -> None:
        self.bench, self._variant, self.judgements = bench, variant, judgements
        self._excuses, self._found = excuses, found
        self.faults: list[FoundFault] = []

    @property
    def new_faults(self) -> list[FoundFault]:
        """Those that are not known."""
        return [each for each in self.faults if not self._excuses.excuses(each.example, each.verdict.outcome)]

    def is_new(self, example: Example) -> bool:
        """Whether an example fails, and neither because of a fault that was found nor of a known one."""
        if self._excuses.avoids(example) or any(fault.explains(example) for fault in self.new_faults):
            return False
        verdict = self.judgements.of(example)
        return verdict.failed and not self._excuses.excuses(example, verdict.outcome)

    def judge_known(self, known: Iterable[Example], right: Callable[[Example], object]) -> None:
        """Judge examples that have failed before.  One that cannot be judged says nothing."""
        for example in dict.fromkeys((*self._excuses.examples, *known)):
            if not self.bench.is_usable(example):
                continue
            verdict = self.judgements.of_known(example, LEAST_REPEATS)
            if verdict.failed and (example in self._excuses.examples or self.is_new(example)):
                self.note(_Search(example, example, self.judgements.judged))
            elif not verdict.failed and verdict.record is not None:
                right(example)

    def note(self, search: _Search) -> None:
        """Explain a fault and keep it."""
        fault = _explained(search, self.judgements, self.bench, self._variant)
        self.faults.append(fault)
        self._found(fault)


def judge_again(bench: ExampleBench, examples: Iterable[Example]) -> Hunted:
    """Judge these examples alone, thoroughly."""
    start, faults, judgements = time.monotonic(), list[FoundFault](), Judgements(bench, math.inf)
    for example in examples:
        verdict = bench.judge_thoroughly(example)
        judgements.judged += verdict.record is not None
        judgements.refused += verdict.record is None
        if verdict.failed:
            faults.append(FoundFault(example, example, verdict, (), 1, 1, judgements.judged, 0))
    seconds = time.monotonic() - start
    return Hunted(tuple(faults), judgements.judged, judgements.refused, seconds, seconds)


def _first_failing(strategy: st.SearchStrategy[Example], fails: Callable[[Example], bool], seed: str) -> Example | None:
    """The first of `ROUND` random examples that fails; None if none does."""
    try:
        return find(strategy, fails, settings=_settings(Phase.generate), random=random.Random(seed))  # noqa: S311
    except NoSuchExample:
        return None


def _shrunk(first: Example, strategy: st.SearchStrategy[Example], run: _Hunt, seed: str) -> _Search:
    """The smallest example that fails as the first one.

    It stays as it is if the call hangs: another one might, too, and each takes as long as the watchdog waits.  A fault
    that does not always show is looked for with several judgements of each example.
    """
    judgements = run.judgements
    before, deadline = judgements.judged, judgements.deadline
    verdict = judgements.of(first)
    if verdict.outcome == Outcome.HUNG:
        return _Search(first, first, before)
    judgements.deadline = max(deadline, time.monotonic() + SHRINK_SECONDS)
    if not verdict.ends_process:
        failed, judged = judgements.failures(first, FIRST_JUDGEMENTS)
        if failed < judged:  # not always
            more, further = judgements.failures(first, RATE_JUDGEMENTS - 1 - judged)
            judgements.repeats = _repeats(1 + failed + more, 1 + judged + further)

    def fails_alike(example: Example) -> bool:
        """Whether an example fails as the first one, which may have another fault than simpler ones."""
        may_be_it = example.property_name in ("", first.property_name)
        return may_be_it and run.is_new(example) and judgements.of(example).outcome == verdict.outcome

    try:
        smallest = find(
            strategy,
            fails_alike,
            settings=_settings(Phase.generate, Phase.shrink),
            random=random.Random(seed),  # noqa: S311  # the same examples as before
        )
    except NoSuchExample:
        smallest = first
    smallest = with_fewer_texts(smallest, lambda example: run.bench.is_usable(example) and fails_alike(example))
    smallest = _with_fewer_tokens(smallest, fails_alike)
    judgements.deadline, judgements.repeats = deadline, 1
    return _Search(first, smallest, before, judgements.judged - before)


def with_fewer_texts(example: Example, fails: Callable[[Example], bool]) -> Example:
    """The example without texts of its id that it fails without: Hypothesis may stop where two must change at once."""
    while fewer := next(filter(fails, with_one_text_less(example)), None):
        example = fewer
    return example


def _with_fewer_tokens(example: Example, fails: Callable[[Example], bool]) -> Example:
    """The example with the fewest queries or keys that fail, of a few: Hypothesis stops at a length of a remainder."""
    for fields in (("seq_q", "seq_k"), ("seq_q",), ("seq_k",)):
        least = min(example.case.value_of(field) for field in fields)
        fewer = (
            example._replace(case=example.case.with_fields(dict.fromkeys(fields, count)))
            for count in range(1, min(FEW_TOKENS, least))
        )
        example = next(filter(fails, fewer), example)
    return example


def _explained(search: _Search, judgements: Judgements, bench: ExampleBench, variant: Variant) -> FoundFault:
    """The fault of the smallest example: judged thoroughly, its rate, and what matters.

    An example that ends its process is not judged again, and after a hang no other one is.
    """
    first, smallest, after, shrinking = search
    verdict, failed, judged, note, deadline = judgements.of(smallest), 1, 1, "", judgements.deadline
    if not verdict.ends_process:
        thorough = bench.judge_thoroughly(smallest)  # in a new process
        note = "" if thorough.failed else "in a new process it is right: look for a state that calls leave behind"
        verdict = thorough if thorough.failed else verdict
    if verdict.ends_process:
        note = "a call that ends or blocks its process is not made again"
    else:
        more, further = judgements.failures(smallest, RATE_JUDGEMENTS - 1)
        failed, judged = failed + more, judged + further
        judgements.repeats = 1 if failed == judged else _repeats(failed, judged)
    judgements.deadline = max(deadline, time.monotonic() + SHRINK_SECONDS)

    def fails(example: Example) -> bool | None:
        if not bench.is_usable(example) or (other := judgements.of(example)).record is None:
            return None
        return other.failed

    is_hang = verdict.outcome == Outcome.HUNG  # after which each other example may hang, too
    rules = names_of(smallest) if is_hang else what_matters(smallest, variant, fails)
    judgements.deadline, judgements.repeats = deadline, 1
    return FoundFault(first, smallest, verdict, rules, failed, judged, after, shrinking, note)


def _repeats(failed: int, judged: int) -> int:
    """The judgements of an example in which a fault shows that failed in so many of those judged."""
    return min(MAX_REPEATS, max(LEAST_REPEATS, math.ceil(ENOUGH_FAILURES * judged / failed)))


def _settings(*phases: Phase) -> settings:
    return settings(
        max_examples=ROUND,
        phases=phases,
        deadline=None,
        database=None,
        suppress_health_check=[*HealthCheck],
    )

"""A bench whose kernel is a function of the example, and the variants of this repository."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest_fa
from pytest_fa.catalog.discover import discover
from pytest_fa.catalog.variant import Variant
from pytest_fa.features.hunt.case_strategy import is_usable
from pytest_fa.features.hunt.example import Example, can_test
from pytest_fa.features.hunt.judged import ExampleVerdict
from pytest_fa.records.outcome import Outcome
from tests.factories import record

KERNELS = Path(pytest_fa.__file__).parent.parent / "kernels"
OutcomeOf = Callable[[Example], Outcome]


@functools.cache
def known_variant(name: str) -> Variant:
    """A variant of the kernels folder."""
    return discover((KERNELS,)).variants[name]


class SimulatedBench:
    """Judges examples of a variant by a function.  `calls` counts the judgements of each."""

    def __init__(self, variant: Variant, outcome_of: OutcomeOf) -> None:
        self._variant, self._outcome_of, self.calls = variant, outcome_of, Counter[Example]()

    def judge(self, example: Example) -> ExampleVerdict:
        """The outcome of an example."""
        self.calls[example] += 1
        return ExampleVerdict(record(case=example.case.id, outcome=self._outcome_of(example)))

    judge_thoroughly = judge

    def is_usable(self, example: Example) -> bool:
        """As for a real variant."""
        return is_usable(example.case, self._variant) and can_test(example.property_name, example.case)

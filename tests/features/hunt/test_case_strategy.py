"""Random examples are what the manifest claims: all of it, and nothing else."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("hypothesis")

from pytest_fa.attention import parts
from pytest_fa.catalog.variant import Supports
from pytest_fa.errors import UsageProblem
from pytest_fa.features.hunt.case_strategy import MAX_PRODUCTS, examples_of
from pytest_fa.features.hunt.example import Example, can_test, read_example
from pytest_fa.features.hunt.hunting import _settings
from pytest_fa.features.hunt.optional_hypothesis import NoSuchExample, Phase, find
from tests.factories import variant
from tests.features.hunt.simulated import known_variant
from tests.tiers import nightly_but

FEW = 4  # of many claims, such as sizes of pages, some are enough


def drawn(name: str, rounds: int = 40) -> list[Example]:
    """Random examples of a variant, in their order."""
    seen: list[Example] = []

    def is_found(example: Example) -> bool:
        seen.append(example)
        return False

    strategy = examples_of(known_variant(name), "cpu")
    for seed in range(rounds):
        with pytest.raises(NoSuchExample):
            find(strategy, is_found, settings=_settings(Phase.generate), random=random.Random(seed))  # noqa: S311
    return seen


@pytest.mark.parametrize("name", nightly_but(["reference", "minimal", "reference_backward", "stable"], "reference"))
def test_all_that_is_claimed_is_hunted(name: str) -> None:
    """Each value that the variant claims occurs, each example is possible, and hardly any occurs twice."""
    examples, hunted = drawn(name), known_variant(name)
    plainest = examples[0].case
    assert (plainest.batch, plainest.heads, plainest.seq_q, plainest.seed, plainest.modifiers or ()) == (1, 1, 1, 0, ())
    for example in examples:
        assert hunted.refuses(example.case) is None
        assert read_example(str(example)) == example
        assert can_test(example.property_name, example.case)
        sizes = example.case.batch * example.case.heads * example.case.seq_q * example.case.seq_k
        assert sizes * example.case.head_dim <= 4 * MAX_PRODUCTS["cpu"]  # some parts fix the number of batches
    for part in parts.claimed_parts():
        seen = {part.claimed_by(example.case) for example in examples}
        assert seen >= set(part.hunted_claims(hunted.supports)) - {None} or len(seen) > 5, part.name
    assert {example.case.dtype for example in examples} == set(hunted.supports.dtype)
    assert len(set(examples)) > 0.75 * len(examples)


def test_a_variant_with_cases_of_its_own_cannot_be_hunted() -> None:
    """The error says why."""
    with pytest.raises(UsageProblem, match="probe_qk_tile cannot be hunted: its manifest has cases of its own"):
        examples_of(known_variant("probe_qk_tile"), "cpu")
    with pytest.raises(UsageProblem, match="it supports no case in fp32"):
        examples_of(variant("mine"), "cpu", ("fp32",))
    assert Supports().dtype == ("fp16",)


def test_an_example_that_is_none() -> None:
    """The error has the form."""
    with pytest.raises(UsageProblem, match=r"no property 'padded_row'; did you mean 'padded_rows'\?; the form is"):
        read_example("padded_row:b1h1s1d64-fp16-seed0")
    with pytest.raises(UsageProblem, match="is malformed"):
        read_example("padded_rows:b1h1")

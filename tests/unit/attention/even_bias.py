"""A made-up part of attention: a number is added to the score of every second key.  Nothing else knows it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_fa.attention.mistake import Mistake, Positions
from pytest_fa.attention.part import CallInputs, Part, Shape
from pytest_fa.attention.token import Choice

if TYPE_CHECKING:
    import torch


class EvenBias(Part):
    """Its words, its place in the scores, and its mistakes."""

    name = "evens"
    summary = "a number is added to the scores of the keys 0, 2, 4, ..."
    tokens = (Choice("evens", (("evens2", 2.0),), 0.0),)
    rows = (("`-evens2`", "2 is added to the scores of every second key"),)
    shapes = {"edge": ("b1h2s65d64-fp16-causal-evens2",)}  # noqa: RUF012  # as `Part` declares it
    supports = "evens"
    is_in_c_interface = False
    claims = (0.0, 2.0)
    words = {"evens": ("evens", "score_evens")}  # noqa: RUF012  # as `Part` declares it

    def flops(self, case: Shape) -> int:
        """One addition for every second key."""
        return case.batch * case.heads * case.seq_q * -(-case.seq_k // 2) if case.value_of("evens") else 0

    def scores(self, inputs: CallInputs, scores: torch.Tensor, positions: Positions) -> torch.Tensor:
        """The scores with the bias."""
        return scores + (inputs.word("evens") or 0.0) * (positions.keys % 2 == 0)

    def order_matters(self, inputs: CallInputs) -> bool:
        """The bias depends on the place of a key."""
        return bool(inputs.word("evens"))

    def mistakes(self, inputs: CallInputs) -> Iterator[Mistake]:
        """A bias that is missing, and one of the other keys."""
        if bias := inputs.word("evens"):
            yield Mistake("the bias is not added: look at the scores", score=lambda scores, _: scores)
            yield Mistake(
                "the bias is added to the odd keys: look at the index of the key",
                score=lambda scores, positions: scores + bias * (positions.keys % 2 == 1),
            )


PART = EvenBias()

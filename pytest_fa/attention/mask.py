"""A boolean mask: true where a query sees a key.  It hides keys after the soft cap and the bias.

A row that sees no key is 0, and its log-sum-exp is -inf.  Hidden keys hold finite data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_fa.attention.axes import Axes, PerPair, hide_some, hide_where, misread, nothing
from pytest_fa.attention.mistake import ChangeScores, Mistake, Positions, exponentials
from pytest_fa.attention.part import CallInputs, Convention, PartTensor, Shape

if TYPE_CHECKING:
    import torch

VISIBLE = 0.75  # of the pairs; in tiles of a few keys, some are empty
LOOK = "look at the mask"


class BooleanMask(PerPair):
    """True where a key is visible."""

    name = "mask"
    summary = "a boolean mask of queries and keys"
    tokens = (Axes("mask", "mask"),)
    rows = (("`-maskbq`", "a boolean mask that all heads share"),)
    supports = "mask"
    names = ("attn_mask", "attention_mask", "mask", "custom_mask", "bool_mask")
    words = {"attn_mask": names}
    tensors = {"attn_mask": PartTensor("bool")}
    conventions = {
        "mask_true": Convention(
            {"keeps": "true in the mask keeps a key", "hides": "the mask is inverted: true hides a key"},
            is_seen_in=("attn_mask",),
        )
    }

    faults = {
        **dict.fromkeys(
            (
                "mask_ignored",
                "mask_inverted",
                "mask_added",
                "mask_of_next_batch",
                "mask_of_kv_head",
                "mask_taken_for_dense",
                "mask_in_pv_only",
                "mask_empty_row_mean",
                "mask_before_cap",
                "mask_replaces_causal",
                "mask_lost_with_bias",
            ),
            ("max", False),
        ),
        "mask_empty_row_divides": ("finite", False),
    }
    selftest_shapes = (
        "b2h4s77d64-fp16-kv2-maskbhq",
        "b2h2s77d64-fp16-causal-cap2-maskq",
        "b2h2s77d64-fp16-biash-maskb",
    )

    def size_bytes(self, case: Shape) -> int:
        """A byte for each number, along the axes that it has."""
        return self.elements(case)

    def claim_words(self, claim: Any) -> str:  # one of `claims`
        """The mask that was not judged."""
        return "a boolean mask" if claim else "attention without a mask"

    # -- the call ---------------------------------------------------------------------------------------------------

    def fill(self, word: str, numbers: torch.Tensor, generator: torch.Generator) -> None:  # noqa: ARG002  # the only one
        """1 for three of four."""
        numbers.bernoulli_(VISIBLE, generator=generator)

    def arrange(self, word: str, numbers: torch.Tensor) -> None:  # noqa: ARG002  # the only one
        """Some queries see no key, and some none of the first tiles."""
        hide_some(numbers, 0.0)

    def given(self, word: str, value: Any, conventions: Mapping[str, str]) -> Any:  # of the word's type
        """The opposite where true hides a key."""
        return ~value if word == "attn_mask" and conventions.get("mask_true") == "hides" else value

    meant = given

    # -- the judge --------------------------------------------------------------------------------------------------

    def hidden(self, inputs: CallInputs, positions: Positions) -> torch.Tensor | None:
        """The keys where the mask is false."""
        mask = inputs.word("attn_mask")
        return None if mask is None else ~positions.part_of(mask)

    def mistakes(self, inputs: CallInputs) -> Iterator[Mistake]:
        """No mask, another one, one at another place, and one that hides a part of the work only."""
        mask = inputs.word("attn_mask")
        if mask is None:
            return
        yield Mistake(f"the mask is ignored: {LOOK}", hide=nothing)
        for words, other in misread(mask, inputs):
            yield Mistake(f"the mask of another place is used: {words}: {LOOK}", hide=hide_where(~other))
        yield Mistake(
            "the mask is added to the scores as 0 and 1: it is boolean, hide where it is false",
            score=lambda scores, positions: scores + positions.part_of(mask),
            hide=nothing,
        )
        if inputs.word("softcap") and _hides_more(inputs):
            words = "the mask is applied before the soft cap, which makes -cap of -inf: hide keys after it"
            yield Mistake(words, score=_hidden_keys_lowest(mask), hide=nothing, is_score_first=True)
        words = "hidden keys are left out of P V, but not of the row sum: hide them before the softmax"
        yield Mistake(words, weigh=_only_in_pv)
        words = "hidden keys have a finite score: a row that sees no key is the mean of V, it must be 0"
        yield Mistake(words, weigh=_finite_score)


def _hides_more(inputs: CallInputs) -> bool:
    """Whether other parts hide keys or add to scores; if none does, this is the mistake that the soft cap names."""
    others = ("window_left", "window_right", "attn_bias", "alibi_slopes")
    return inputs.word("causal") != "none" or any(inputs.word(word) is not None for word in others)


def _hidden_keys_lowest(mask: torch.Tensor) -> ChangeScores:
    return lambda scores, positions: scores.masked_fill(~positions.part_of(mask), -math.inf)


def _only_in_pv(scores: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    p = exponentials(scores, hidden & ~hidden)
    return p.masked_fill(hidden, 0.0), p.sum(-1, keepdim=True)


def _finite_score(scores: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    p = exponentials(scores.masked_fill(hidden, -1e30), hidden & ~hidden)
    return p, p.sum(-1, keepdim=True)


PART = BooleanMask()

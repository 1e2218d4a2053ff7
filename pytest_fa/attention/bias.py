"""An additive bias: a number for each query and key, which is added to the scores after the soft cap.

-inf hides a key.  The bias is an input in the dtype of q, so that an ideal kernel does not round it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pytest_fa.attention.axes import Axes, PerPair, hide_some, hide_where, misread, nothing
from pytest_fa.attention.dtypes import ELEMENT_BYTES
from pytest_fa.attention.mistake import ChangeScores, Mistake, Positions, empty_row_mistakes, last_tiles
from pytest_fa.attention.part import CallInputs, PartTensor, Shape

if TYPE_CHECKING:
    import torch

LARGEST = 1.4  # of numbers from N(0, 1); -inf is in place of larger ones, which are 8 % of them
LOOK = "look at the bias"


class ScoreBias(PerPair):
    """Scale, soft cap, bias, and then the mask."""

    name = "bias"
    summary = "a bias that is added to the scores"
    tokens = (Axes("bias", "bias"),)
    rows = (("`-biasbhq`, `-bias`", "a bias for each batch, head, query and key; one for each key alone"),)
    supports = "bias"
    words = {"attn_bias": ("attn_bias", "attention_bias", "bias", "score_bias", "position_bias", "rel_pos_bias")}
    tensors = {"attn_bias": PartTensor("q")}

    faults = {
        **dict.fromkeys(
            (
                "bias_ignored",
                "bias_scaled",
                "bias_before_cap",
                "bias_twice_in_last_tile",
                "bias_of_kv_head",
                "bias_of_next_batch",
                "bias_taken_for_dense",
                "bias_read_as_bshd",
                "bias_inf_is_finite",
            ),
            ("max", False),
        ),
        "bias_times_mask": ("finite", False),
        "bias_not_in_lse": ("lse", True),
    }
    selftest_shapes = (
        "b2h4s77d64-fp16-kv2-biasbhq",
        "b2h3s77d64-fp16-biashq-bshd",
        "b2h2s77d64-fp16-cap2-biash-maskq",
    )

    def flops(self, case: Shape) -> int:
        """One addition for each visible pair."""
        return case.heads * case.all_pairs if self.claimed_by(case) else 0

    def size_bytes(self, case: Shape) -> int:
        """Each number once, along the axes that it has."""
        return self.elements(case) * ELEMENT_BYTES["fp32" if case.dtype == "e4m3" else case.dtype]

    def claim_words(self, claim: Any) -> str:  # one of `claims`
        """The bias that was not judged."""
        return "a bias of the scores" if claim else "scores without a bias"

    # -- the call ---------------------------------------------------------------------------------------------------

    def fill(self, word: str, numbers: torch.Tensor, generator: torch.Generator) -> None:  # noqa: ARG002  # the only one
        """N(0, 1), and -inf in place of the largest numbers."""
        numbers.normal_(generator=generator)
        numbers.masked_fill_(numbers > LARGEST, -math.inf)

    def arrange(self, word: str, numbers: torch.Tensor) -> None:  # noqa: ARG002  # the only one
        """Some queries see no key, and some none of the first tiles."""
        hide_some(numbers, -math.inf)

    # -- the judge --------------------------------------------------------------------------------------------------

    in_scores = "the bias"

    def scores(self, inputs: CallInputs, scores: torch.Tensor, positions: Positions) -> torch.Tensor:
        """The scores with the bias; where it is -inf, `hidden` hides the key."""
        bias = inputs.word("attn_bias")
        if bias is None:
            return scores
        added = positions.part_of(bias).double()
        return scores + (added if _is_capped(inputs) else _finite(added))

    def adds_to_scores(self, inputs: CallInputs) -> bool:
        """That is what a bias does."""
        return inputs.word("attn_bias") is not None

    def hidden(self, inputs: CallInputs, positions: Positions) -> torch.Tensor | None:
        """The keys with a bias of -inf."""
        bias = inputs.word("attn_bias")
        return None if bias is None or _is_capped(inputs) else positions.part_of(bias) == -math.inf

    def mistakes(self, inputs: CallInputs) -> Iterator[Mistake]:
        """No bias, another one, and one at another place."""
        bias, scale = inputs.word("attn_bias"), inputs.scale
        if bias is None:
            return
        yield Mistake(f"the bias is ignored: {LOOK}", score=lambda scores, _: scores, hide=nothing)
        for words, factor in {
            "multiplied by the softmax scale, as if it were added before the scale": scale,
            "in base 2 where the scores are in base e": math.log(2),
            "multiplied by log2 e once too often": 1 / math.log(2),
            "added twice": 2.0,
            "subtracted": -1.0,
        }.items():
            if factor != 1:
                yield Mistake(f"the bias is {words}: {LOOK}", score=_added(bias, factor))
        for start, last_tile in last_tiles(inputs.k.shape[2]):
            yield Mistake(f"the bias is added twice in {last_tile}: {LOOK}", score=_twice_from(start, bias))
        for words, other in misread(bias, inputs):
            yield Mistake(
                f"the bias of another place is added: {words}: {LOOK}", score=_added(other), hide=_hide(other)
            )
        if (cap := inputs.word("softcap")) and not _is_capped(inputs):
            words = f"the bias is added before the soft cap: {LOOK}"
            yield Mistake(words, score=_before_cap(bias, cap))
        yield from empty_row_mistakes()


def _is_capped(inputs: CallInputs) -> bool:
    """Whether the cap comes after the bias, so that -inf becomes -cap and hides no key."""
    return bool(inputs.word("softcap")) and inputs.convention("add") == "before_cap"


def _finite(bias: torch.Tensor) -> torch.Tensor:
    """The numbers, and 0 in place of -inf."""
    return bias.masked_fill(bias == -math.inf, 0.0)


def _hide(bias: torch.Tensor) -> Any:  # a `Hide`
    return hide_where(bias == -math.inf)


def _added(bias: torch.Tensor, factor: float = 1.0) -> ChangeScores:
    return lambda scores, positions: scores + factor * _finite(positions.part_of(bias).double())


def _twice_from(start: int, bias: torch.Tensor) -> ChangeScores:
    """The bias, twice for the keys from `start` on."""

    def score(scores: torch.Tensor, positions: Positions) -> torch.Tensor:
        added = _finite(positions.part_of(bias).double())
        return scores + added * (1 + (positions.keys >= start).double())

    return score


def _before_cap(bias: torch.Tensor, cap: float) -> ChangeScores:
    """The scores have their cap: tanh(a + b) follows from tanh(a) and tanh(b)."""

    def score(scores: torch.Tensor, positions: Positions) -> torch.Tensor:
        of_scores, of_bias = scores / cap, (positions.part_of(bias).double() / cap).tanh()
        return cap * ((of_scores + of_bias) / (1 + of_scores * of_bias)).nan_to_num()

    return score


PART = ScoreBias()

"""ALiBi: slope * |distance| is subtracted from the scores, with a slope for each head.

The last query stands at the last key, as under a bottom-right mask: query i has the position i + seq_k - seq_q.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_fa.attention.mistake import ChangeScores, Mistake, Positions
from pytest_fa.attention.part import CallInputs, Convention, Part, PartTensor, Shape
from pytest_fa.attention.token import Choice

if TYPE_CHECKING:
    import torch

MIN_LOG2, MAX_LOG2 = -7.0, -2.0  # of the slopes: no head is right with that of another one
ELEMENT_BYTES = 4
FLOPS_PER_PAIR = 2
LOOK = "look at the slopes"


class Alibi(Part):
    """One float32 for each query head."""

    name = "alibi"
    summary = "ALiBi: slope * distance is subtracted from the scores"
    tokens = (Choice("alibi", (("alibi", True),), False),)
    rows = (("`-alibi`", "ALiBi, with a slope for each head"),)
    supports = "alibi"
    claims = (False, True)
    words = {"alibi_slopes": ("alibi_slopes", "slopes", "alibi_slope", "slope")}
    tensors = {"alibi_slopes": PartTensor("float32", "heads")}
    conventions = {
        "alibi": Convention(
            {
                "distance": "slope * |key - query| is subtracted",
                "signed": "slope * (key - query) is added without its absolute value: keys after the query gain",
            },
            is_seen_in=("alibi_slopes",),
            is_other_function=True,
        ),
        "alibi_align": Convention(
            {
                "bottom_right": "distances are those of the last key and query",
                "top_left": "distances are those of the first key and query, not of the last",
            },
            is_seen_in=("alibi_slopes",),
            is_other_function=True,
        ),
    }

    faults = dict.fromkeys(
        (
            "alibi_ignored",
            "alibi_added",
            "alibi_signed",
            "alibi_first_key",
            "alibi_scaled",
            "alibi_usual_slopes",
            "alibi_of_next_head",
            "alibi_of_kv_head",
            "alibi_before_cap",
        ),
        ("max", False),
    )
    selftest_shapes = (
        "b1h4s77d64-fp16-kv2-sk150-alibi",
        "b1h2s113d64-fp16-cap2-alibi",
    )

    def impossible(self, case: Shape) -> str | None:
        """ALiBi is a bias."""
        if not case.value_of("alibi"):
            return None
        if case.computes == "scores":
            return "scores alone have no ALiBi; drop -alibi"
        return "ALiBi is a bias of the scores; drop -alibi or -bias" if case.value_of("bias") is not None else None

    def flops(self, case: Shape) -> int:
        """A product and a sum for each visible pair."""
        return FLOPS_PER_PAIR * case.heads * case.all_pairs if case.value_of("alibi") else 0

    def size_bytes(self, case: Shape) -> int:
        """A float32 for each head."""
        return ELEMENT_BYTES * case.heads if case.value_of("alibi") else 0

    # -- the manifest -----------------------------------------------------------------------------------------------

    def fields_with(self, claim: Any, heads: int) -> Mapping[str, Any]:  # noqa: ARG002  # one of `claims`
        """With ALiBi, there is no other bias."""
        return {"alibi": True, "bias": None} if claim else {"alibi": False}

    def needs_two_lengths(self, claim: Any) -> bool:  # one of `claims`
        """With equal lengths, distances from the first key would be right, too."""
        return bool(claim)

    def claim_words(self, claim: Any) -> str:  # one of `claims`
        """What was not judged."""
        return "ALiBi" if claim else "scores without ALiBi"

    # -- the call ---------------------------------------------------------------------------------------------------

    def axes(self, word: str, case: Shape) -> tuple[bool, bool, bool, bool] | None:  # noqa: ARG002  # the only one
        """A slope for each head."""
        return (False, True, False, False) if case.value_of("alibi") else None

    def fill(self, word: str, numbers: torch.Tensor, generator: torch.Generator) -> None:  # noqa: ARG002  # the only one
        """Random slopes, so that a kernel that computes the usual ones is wrong."""
        numbers.uniform_(MIN_LOG2, MAX_LOG2, generator=generator).exp2_()

    def plain_argument(self, word: str) -> None:  # noqa: ARG002  # the only one
        """No tensor."""
        return

    # -- the judge --------------------------------------------------------------------------------------------------

    in_scores = "ALiBi"

    def scores(self, inputs: CallInputs, scores: torch.Tensor, positions: Positions) -> torch.Tensor:
        """The scores with the distance of query and key."""
        slopes = inputs.word("alibi_slopes")
        return scores if slopes is None else _added(inputs, slopes)(scores, positions)

    def adds_to_scores(self, inputs: CallInputs) -> bool:
        """ALiBi is a bias."""
        return inputs.word("alibi_slopes") is not None

    def order_matters(self, inputs: CallInputs) -> bool:
        """It depends on the key's position."""
        return inputs.word("alibi_slopes") is not None

    def mistakes(self, inputs: CallInputs) -> Iterator[Mistake]:
        """Other slopes, and other distances."""
        slopes, scale = inputs.word("alibi_slopes"), inputs.scale
        if slopes is None:
            return
        heads = slopes.shape[1]
        yield Mistake(f"ALiBi is not applied: {LOOK}", score=lambda scores, _: scores)
        wrong = {
            "slope * distance is added, it must be subtracted": -slopes,
            "slope * distance is multiplied by the softmax scale": slopes * scale,
            "slope * distance is in base 2 where the scores are in base e": slopes.double() * math.log(2),
            "slope * distance is multiplied by log2 e once too often": slopes.double() / math.log(2),
            "the slopes are those of the usual formula, 2^(-8 h / heads): the tensor is not read": _usual(slopes),
        }
        if heads > 1:
            wrong |= {
                "each head has the slope of the next head": slopes.roll(-1, 1),
                "each head has the slope of the head before it": slopes.roll(1, 1),
                "each head has the slope of head 0": slopes[:, :1],
            }
        if (group := inputs.q.shape[1] // inputs.k.shape[1]) > 1:
            by_kv_head = slopes[:, : heads // group].repeat_interleave(group, 1)
            wrong["the slope is read at the index of the head of K and V"] = by_kv_head
        for words, other in wrong.items():
            yield Mistake(f"{words}: {LOOK}", score=_added(inputs, other))
        if inputs.word("seqlens_k") is not None:
            added, words = _added(inputs, slopes), "distances end at the last key of the longest sequence"
            yield Mistake(f"{words}: {LOOK}", score=lambda scores, at: added(scores, at._replace(shift=None)))


def _added(inputs: CallInputs, slopes: torch.Tensor) -> ChangeScores:
    """Slopes in the conventions of a call."""
    is_signed, is_top_left = inputs.convention("alibi") == "signed", inputs.convention("alibi_align") == "top_left"

    def score(scores: torch.Tensor, positions: Positions) -> torch.Tensor:
        distance = positions.own_keys(from_first=is_top_left) - positions.keys
        return scores - positions.part_of(slopes).double() * (distance if is_signed else distance.abs())

    return score


def _usual(slopes: torch.Tensor) -> torch.Tensor:
    """2^(-8 / n) and its powers for n heads, [1, heads, 1, 1]."""
    heads = slopes.shape[1]
    return slopes.new_tensor([2.0 ** (-8.0 * (head + 1) / heads) for head in range(heads)])[None, :, None, None]


PART = Alibi()

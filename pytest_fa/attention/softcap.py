"""The soft cap: scores s become cap * tanh(s / cap), so that none is larger than the cap."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_fa.attention.dtypes import FORMATS
from pytest_fa.attention.mistake import ChangeScores, Mistake, Positions, exponentials, last_tiles
from pytest_fa.attention.part import CallInputs, Convention, Part, Shape
from pytest_fa.attention.token import Float32, as_float32

if TYPE_CHECKING:
    import torch

# Data are N(0, 1), so scores have a standard deviation of about sqrt(head_dim) times the scale.  A cap shows if that is
# 0.4 to 1 of it.  With a cap of 2, a key that is hidden before the cap would still count; with 50 it would not.
SMALL_CAP = 2.0
LARGE_CAP, LARGE_SCALE = 50.0, 3.0
MAX_PLAIN_CAP = 8  # a larger one shows only with larger scores than those of N(0, 1) data
LOOK = "look at the soft cap"
HALVES = {f"torch.{each.torch_name}": name for name, each in FORMATS.items() if each.element_bytes == 2}  # noqa: PLR2004


class SoftCap(Part):
    """Scale, then the cap, then the mask."""

    name = "softcap"
    summary = "a soft cap of the scores: cap * tanh(score / cap)"
    tokens = (Float32("softcap", "cap", "cap", lambda _: 0.0),)
    rows = (("`-cap50`", "a soft cap of 50 on the scores"),)
    supports = "softcap"
    claims = (False, True)
    conventions = {
        "add": Convention(
            {
                "after_cap": "the bias or ALiBi is added after the soft cap",
                "before_cap": "the bias or ALiBi is added before the soft cap, which makes -cap of -inf",
            },
            is_seen_in=("softcap",),
            is_other_function=True,
        )
    }
    words = {"softcap": ("softcap", "soft_cap", "logits_soft_cap", "logit_softcapping", "attn_softcap", "tanh_cap")}

    faults = {
        **dict.fromkeys(
            (
                "cuda_cap_ignored",
                "cuda_cap_too_large",
                "cuda_cap_before_scale",
                "cuda_cap_twice",
                "cuda_cap_not_multiplied",
                "cuda_cap_of_log2",
                "cuda_cap_in_half",
                "cuda_cap_after_mask",
                "cap_before_scale",
                "cap_not_in_last_tile",
                "window_before_cap",
            ),
            ("max", False),
        ),
        "cap_not_in_lse": ("lse", True),
    }
    twins = ("cuda_twin_window_cap",)
    selftest_shapes = (
        f"b1h2s113d64-fp16-win37_0-cap{SMALL_CAP:g}",
        f"b1h2s113d64-fp16-scale{LARGE_SCALE:g}-cap{LARGE_CAP:g}",
    )

    def impossible(self, case: Shape) -> str | None:
        """A cap is positive, and only attention has one."""
        if self.tokens[0].plain(case) == (cap := case.value_of("softcap")):
            return None
        if cap < 0:
            return f"softcap is {cap:g}; it must be above 0"
        if as_float32(cap) in (0.0, float("inf")):
            return f"softcap is {cap:g}; float32 cannot hold it"
        return "scores alone have no soft cap; drop -cap" if case.computes == "scores" else None

    # -- the manifest -----------------------------------------------------------------------------------------------

    def claimed_by(self, case: Shape) -> bool:
        """Whether there is a cap."""
        return bool(case.value_of("softcap"))

    def fields_with(self, claim: Any, heads: int) -> Mapping[str, Any]:  # noqa: ARG002  # one of `claims`
        """A small cap."""
        return {"softcap": SMALL_CAP if claim else 0.0}

    def fields_in_turn(self, claim: Any, heads: int) -> tuple[Mapping[str, Any], ...]:  # one of `claims`
        """A small cap, and a large one of large scores."""
        small = self.fields_with(claim, heads)
        return (small, {"softcap": LARGE_CAP, "scale": LARGE_SCALE}) if claim else (small,)

    def random_fields(self, claim: Any, heads: int, whole: Callable[[int, int], int]) -> Mapping[str, Any]:  # noqa: ARG002
        """A cap from 1, of which every score of N(0, 1) data shows, to one of large scores."""
        if not claim:
            return {"softcap": 0.0}
        cap = whole(1, int(LARGE_CAP))
        return {"softcap": float(cap), **({"scale": LARGE_SCALE} if cap > MAX_PLAIN_CAP else {})}

    def claim_words(self, claim: Any) -> str:  # one of `claims`
        """The cap that was not judged."""
        return "a soft cap" if claim else "scores without a soft cap"

    def refusal(self, case: Shape, supports: Any, remedy: str) -> str | None:  # `catalog.variant.Supports`
        """A cap that the variant does not claim."""
        if self.claimed_by(case) in self.supported(supports):
            return None
        cap = case.value_of("softcap")
        return f"softcap is {cap:g}, supports none{remedy}" if cap else f"there is no softcap, supports one{remedy}"

    # -- the call ---------------------------------------------------------------------------------------------------

    def plain_argument(self, word: str) -> float:  # noqa: ARG002  # the only one
        """Libraries take 0 for no cap."""
        return 0.0

    # -- the judge --------------------------------------------------------------------------------------------------

    in_scores = "the soft cap"

    def scores(self, inputs: CallInputs, scores: torch.Tensor, positions: Positions) -> torch.Tensor:  # noqa: ARG002
        """The scores with the cap; `rounds: [tanh]` rounds what tanh gets and gives."""
        cap: float = inputs.word("softcap")
        if not cap:
            return scores
        return inputs.rounded(inputs.rounded(scores / cap, "tanh").tanh(), "tanh") * cap

    def is_last(self, inputs: CallInputs) -> bool:
        """A bias and ALiBi may come before it."""
        return inputs.convention("add") == "before_cap"

    def level_matters(self, inputs: CallInputs) -> bool:
        """A cap is at a fixed distance from 0."""
        return bool(inputs.word("softcap"))

    def mistakes(self, inputs: CallInputs) -> Iterator[Mistake]:
        """No cap, one that the last tile lacks, another one, one at another place, and one without its last factor."""
        cap, scale = inputs.word("softcap"), inputs.scale
        if not cap:
            return
        yield Mistake(f"the soft cap is not applied: {LOOK}", score=lambda scores, _: scores)
        for start, last_tile in last_tiles(inputs.k.shape[2]):
            yield Mistake(f"the soft cap is not applied in {last_tile}: {LOOK}", score=_capped_before(start, cap))
        for words, factor in (("1 % too large", 1.01), ("1 % too small", 0.99), ("twice as large", 2.0)):
            yield Mistake(f"the soft cap is {words}: {LOOK}", score=_with_cap(cap * factor))
        if scale not in (0.0, 1.0):
            words = f"the soft cap is applied before the scale: {LOOK}"
            yield Mistake(words, score=lambda scores, _: capped(scores / scale, cap) * scale)
        yield Mistake(f"the soft cap is applied twice: {LOOK}", score=lambda s, _: capped(capped(s, cap), cap))
        yield Mistake(f"tanh(score / cap) is not multiplied by the cap: {LOOK}", score=lambda s, _: (s / cap).tanh())
        if (name := HALVES.get(str(inputs.q.dtype))) is not None:
            words = f"tanh is computed in {name}: compute it in float32, or declare `rounds: [tanh]` if you mean it"
            yield Mistake(words, score=lambda s, _: _in_half(_in_half(s / cap, inputs).tanh(), inputs) * cap)
        yield Mistake(
            "keys are hidden before the soft cap, which makes -cap of -inf: hide them after it",
            weigh=lambda scores, hidden: _hidden_first(scores, hidden, cap),
        )


def capped(scores: torch.Tensor, cap: float) -> torch.Tensor:
    """Cap * tanh(scores / cap)."""
    return (scores / cap).tanh() * cap


def _in_half(value: torch.Tensor, inputs: CallInputs) -> torch.Tensor:
    return value.to(inputs.q.dtype).to(value.dtype)


def _with_cap(cap: float) -> ChangeScores:
    return lambda scores, _: capped(scores, cap)


def _capped_before(start: int, cap: float) -> ChangeScores:
    """The cap of the scores of the keys before `start` alone."""
    return lambda scores, positions: capped(scores, cap).where(positions.keys < start, scores)


def _hidden_first(scores: torch.Tensor, hidden: torch.Tensor, cap: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights if each hidden key has the score -cap."""
    p = exponentials(scores.masked_fill(hidden, -cap), hidden & ~hidden)
    return p, p.sum(-1, keepdim=True)


PART = SoftCap()

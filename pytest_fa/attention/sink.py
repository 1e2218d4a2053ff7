"""The attention sink: a score for each head that takes part in the softmax and has no value.

It is neither scaled nor capped.  The weights of a row then sum to less than 1, and a row that sees no key is 0 and has
the sink as its log-sum-exp.  A sink of -inf is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_fa.attention.mistake import TILES, Mistake, Positions, Sinks, exponentials
from pytest_fa.attention.part import CallInputs, Convention, Part, PartTensor, Shape
from pytest_fa.attention.token import Choice

if TYPE_CHECKING:
    import torch

# The sinks of the heads, in turn; the seed chooses one of two lists.  The second head has none, so that its rows that
# see no key have nothing at all.  At 100, exp(sink - max of the keys) overflows in float32.
SINKS = ((3.0, -math.inf, 0.0, 12.0, 100.0, -50.0), (100.0, -math.inf, -50.0, 3.0, 12.0, 0.0))
EMPTY_ROWS = (150, 77, {"causal": "bottom_right"})  # queries, keys and fields of a case in which some rows see no key
SPLITS = (2, 4, 8)
ELEMENT_BYTES = 4
LOOK = "look at the sink"
ChangeSinks = Callable[["torch.Tensor"], "torch.Tensor"]


class AttentionSink(Part):
    """One float32 for each query head, in the sum and the maximum of the softmax."""

    name = "sink"
    summary = "an attention sink: a score of each head without a value"
    tokens = (Choice("sink", (("sink", True),), False),)
    rows = (("`-sink`", "an attention sink for each head: -inf, -50, 0, 3, 12 or 100"),)
    supports = "sink"
    claims = (False, True)
    names = ("sink", "sinks", "s_aux", "attention_sink", "attention_sinks", "attn_sink", "attn_sinks")
    words = {"sink": (*names, "sink_logits", "learnable_sink", "softmax_sink", "sink_weights")}
    tensors = {"sink": PartTensor("float32", "heads")}
    conventions = {
        "sink": Convention(
            {
                "natural": "the sink is in base e",
                "base2": "the sink is in base 2 where the scores are in base e",
            },
            is_seen_in=("sink",),
        )
    }

    faults = {
        **dict.fromkeys(
            (
                "sink_missing",
                "sink_twice",
                "sink_scaled",
                "sink_in_base_2",
                "sink_of_next_head",
                "sink_of_kv_head",
                "sink_in_every_split",
                "sink_capped",
                "sink_has_value",
                "sink_hidden_by_window",
                "sink_without_maximum",
            ),
            ("max", False),
        ),
        "sink_not_in_maximum": ("lse", True),
        "sink_not_in_lse": ("lse", True),
        "sink_not_in_empty_rows": ("lse", True),
        "sink_inf_is_nan": ("finite", False),
    }
    selftest_shapes = (
        "b1h6s113d64-fp16-kv2-sk150-sink",
        "b1h6s150d64-fp16-causal_br-kv2-sk77-sink",  # the first queries see no key
        "b1h6s113d64-fp16-win37_0-sk150-cap2-sink",
    )

    def impossible(self, case: Shape) -> str | None:
        """Only attention has sinks."""
        is_scores = case.value_of("sink") and case.computes == "scores"
        return "scores alone have no sink; drop -sink" if is_scores else None

    def size_bytes(self, case: Shape) -> int:
        """A float32 for each head."""
        return ELEMENT_BYTES * case.heads if case.value_of("sink") else 0

    def claim_words(self, claim: Any) -> str:  # one of `claims`
        """The sink that was not judged."""
        return "an attention sink" if claim else "attention without a sink"

    def sized_in_turn(self, claim: Any) -> tuple[tuple[int, int, Mapping[str, Any]], ...]:  # one of `claims`
        """Rows that see no key, which are 0 and have the sink as their log-sum-exp."""
        queries, keys, fields = EMPTY_ROWS
        return ((queries, keys, {**fields, "sink": True}),) if claim else ()

    # -- the call ---------------------------------------------------------------------------------------------------

    def axes(self, word: str, case: Shape) -> tuple[bool, bool, bool, bool] | None:  # noqa: ARG002  # the only one
        """A sink for each head."""
        return (False, True, False, False) if case.value_of("sink") else None

    def fill(self, word: str, numbers: torch.Tensor, generator: torch.Generator) -> None:  # noqa: ARG002  # as above
        """One of `SINKS`, in turn."""
        sinks = SINKS[int(numbers.new_empty(1).uniform_(0, len(SINKS), generator=generator).clamp_max(len(SINKS) - 1))]
        flat = numbers.view(-1)
        for place, sink in enumerate(sinks):
            flat[place :: len(sinks)] = sink

    def plain_argument(self, word: str) -> None:  # noqa: ARG002  # the only one
        """No tensor."""
        return

    def given(self, word: str, value: Any, conventions: Mapping[str, str]) -> Any:  # of the word's type
        """The sink times log2 e."""
        is_other = word == "sink" and conventions.get("sink") == "base2"
        return (value.double() / math.log(2)).float() if is_other else value

    def meant(self, word: str, value: Any, conventions: Mapping[str, str]) -> Any:  # of the word's type
        """The sink as a score, in float64."""
        return value.double() * math.log(2) if word == "sink" and conventions.get("sink") == "base2" else value

    # -- the judge --------------------------------------------------------------------------------------------------

    def sinks(self, inputs: CallInputs, positions: Positions) -> torch.Tensor | None:
        """The sink of each head, [batch or 1, heads, 1, 1]."""
        sink = inputs.word("sink")
        return None if sink is None else positions.part_of(sink).double()

    def level_matters(self, inputs: CallInputs) -> bool:
        """A sink is at a fixed distance from 0."""
        return inputs.word("sink") is not None

    def mistakes(self, inputs: CallInputs) -> Iterator[Mistake]:
        """No sink, another one, one that is counted more than once, and one that has a value."""
        sink, scale, keys = inputs.word("sink"), inputs.scale, inputs.k.shape[2]
        if sink is None:
            return
        heads, group = sink.shape[1], inputs.q.shape[1] // inputs.k.shape[1]
        wrong: dict[str, ChangeSinks] = {
            "the sink is missing": lambda sinks: sinks - math.inf,
            "the sink is multiplied by the softmax scale": lambda sinks: sinks * scale,
            "the sink is divided by the softmax scale": lambda sinks: sinks / (scale or math.inf),
            "the sink is multiplied by log2 e once too often": lambda sinks: sinks / math.log(2),
            "each head has a sink of 0: the tensor is not read": lambda sinks: sinks.clamp(0, 0),
        }
        for times, reasons in _repeats(keys).items():
            wrong[f"the sink is counted {times} times, as if {' or '.join(reasons)} had it"] = _counted(times)
        for words, change in wrong.items():
            yield Mistake(f"{words}: {LOOK}", sinks=_changed(sink, change))
        yield Mistake(f"exp(sink) is added to the row sum, not exp(sink - max): {LOOK}", weigh=_without_max)
        words = f"the weight of the sink goes to V of key 0, as if the sink had a value: {LOOK}"
        yield Mistake(words, weigh=_with_value)
        if heads > 1:
            yield Mistake(f"each head has the sink of the next head: {LOOK}", sinks=_of(sink.roll(-1, 1)))
            yield Mistake(f"each head has the sink of the head before it: {LOOK}", sinks=_of(sink.roll(1, 1)))
            yield Mistake(f"each head has the sink of head 0: {LOOK}", sinks=_of(sink[:, :1]))
        if group > 1:
            of_keys = sink[:, ::group].repeat_interleave(group, 1)
            yield Mistake(f"each head has the sink of the first head of its group: {LOOK}", sinks=_of(of_keys))
            by_kv_head = sink[:, : heads // group].repeat_interleave(group, 1)
            yield Mistake(f"the sink is read at the index of the head of K and V: {LOOK}", sinks=_of(by_kv_head))
        if cap := inputs.word("softcap"):
            words = f"the sink is capped, too: {LOOK}"
            yield Mistake(words, sinks=_changed(sink, lambda sinks: (sinks / cap).tanh() * cap))
        if (left := inputs.word("window_left")) is not None:
            yield Mistake(f"the window hides the sink, as if it were key 0: {LOOK}", sinks=_of_key_0(sink, left))


def _repeats(keys: int) -> dict[int, list[str]]:
    """How often a kernel may count a sink, each with what may count it once."""
    reasons: dict[int, list[str]] = {}
    for count in SPLITS:
        reasons.setdefault(count, []).append(f"each of {count} splits")
    for tile in TILES:
        if tile < keys:
            reasons.setdefault(-(-keys // tile), []).append(f"each tile of {tile} keys")
    return reasons


def _of(sink: torch.Tensor) -> Sinks:
    return lambda positions: positions.part_of(sink).double()


def _changed(sink: torch.Tensor, change: ChangeSinks) -> Sinks:
    return lambda positions: change(positions.part_of(sink).double())


def _of_key_0(sink: torch.Tensor, window_left: int) -> Sinks:
    """The sink for queries whose window begins at key 0."""

    def sinks(positions: Positions) -> torch.Tensor:
        own = positions.own_keys()
        return positions.part_of(sink).double().masked_fill(own > window_left, -math.inf)

    return sinks


def _counted(times: int) -> ChangeSinks:
    return lambda sinks: sinks + math.log(times)


def _without_max(scores: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sink is behind the last key."""
    p = exponentials(scores[..., :-1], hidden[..., :-1])
    return p, p.sum(-1, keepdim=True) + scores[..., -1:].exp()


def _with_value(scores: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sink is behind the last key."""
    p = exponentials(scores, hidden)
    row_sum = p.sum(-1, keepdim=True)
    p[..., 0] += p[..., -1]
    return p, row_sum


PART = AttentionSink()

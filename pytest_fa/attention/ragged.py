"""Ragged batches: each sequence has its own numbers of queries and keys, padded to the longest ones.

A query or key at or behind the length of its sequence is padding.  It holds NaN in a checked call, because a kernel
must not read it arithmetically: 0 * NaN is NaN.  Its row of the output is not judged, but it must stay as it was, or
become zero, as the manifest declares.  The last query of each sequence stands at its last key.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_fa.attention.mistake import TILES, Mistake, Positions
from pytest_fa.attention.part import CallInputs, Convention, Part, PartTensor, Shape
from pytest_fa.attention.rows import Padding
from pytest_fa.attention.token import Choice

if TYPE_CHECKING:
    import torch

# The lengths of the sequences, in turn: that of the longest one, none, and edges of tiles.
LONGEST = None
EDGES = (LONGEST, 0, 1, 63, 64, 65, 127, 128, 129)
# By pattern, the steps through `EDGES` from one sequence to the next, for queries and for keys.  With a step of 0, all
# sequences have the longest length.  With `SPREAD`, lengths fall evenly from the longest one, as in a server's batch.
SPREAD = -1
STEPS = {1: (0, 4), 2: (7, 5), 3: (2, 8), 4: (0, SPREAD), 5: (0, 0)}
OF_QUERIES = tuple(pattern for pattern, (of_queries, _) in STEPS.items() if of_queries)
SEQUENCES = 4  # of a small case
LENGTH_BYTES = 4
LARGE = 100.0  # in padding that must be finite
# The claims for which a call has each of the tensors.
NEEDED_FOR = {"seqlens_q": ("both",), "seqlens_k": ("keys", "both")}
LOOK = "look at the lengths"
# Of the suite `ragged`: all edges on both sides, and batches as of a server: new tokens of Llama, Qwen and gpt-oss
# models, and chunks of prompts.
SHAPES = (
    "b9h4s129d64-fp16-kv2-var1",
    "b9h4s257d64-fp16-var2",
    "b9h4s257d128-bf16-causal_br-kv2-var3",
    "b9h4s129d128-fp16-causal_br-kv1-sk257-var2-bshd",
    "b16h32s1d128-fp16-kv8-sk4096-var4",
    "b64h32s1d128-fp16-kv8-sk8192-var4",
    "b8h64s1d128-bf16-kv8-sk32768-var4",
    "b8h32s4d128-fp16-causal_br-kv8-sk4096-var4",
    "b16h64s1d64-bf16-win127_0-kv8-sk8192-var4-sink",
    "b4h32s512d128-fp16-causal_br-kv8-sk4096-var4",
)


class Ragged(Part):
    """int32 lengths of the sequences, [batch]."""

    name = "ragged"
    summary = "each sequence has its own lengths"
    tokens = (Choice("ragged", tuple((f"var{number}", number) for number in STEPS), 0),)
    rows = (
        ("`-var1`", "a ragged batch: sequences with 0, 1, 63 to 65, 127 to 129 and all keys"),
        ("`-var2`, `-var3`", "the same for keys and queries, in other orders"),
        ("`-var4`", "a ragged batch: the numbers of keys fall evenly from the longest"),
        ("`-var5`", "all sequences have the longest length, which the call gets as lengths"),
    )
    shapes = {"ragged": SHAPES}
    supports = "ragged"
    claims = ("none", "keys", "both")
    words = {
        "seqlens_q": ("seqlens_q", "seqused_q", "q_lens", "actual_seq_lengths", "seq_len_q"),
        "seqlens_k": ("seqlens_k", "seqused_k", "kv_lens", "seq_lens", "cache_seqlens", "actual_seq_lengths_kv"),
    }
    tensors = {name: PartTensor("int32", "batch", is_random=False) for name in words}
    conventions = {
        "rows_past": Convention(
            {
                "untouched": "rows of the output that belong to no query stay as they were",
                "zero": "rows of the output that belong to no query become zero",
                "any": "rows of the output that belong to no query are undefined",
            },
            is_seen_in=("seqlens_q",),
        ),
        "padding": Convention(
            {
                "any": "padding of q, k and v, and what no sequence has of a cache, may hold NaN",
                "finite": "padding of q, k and v, and what no sequence has of a cache, must hold finite numbers",
            },
            is_seen_in=("seqlens_k",),
        ),
    }
    faults = {
        **dict.fromkeys(
            (
                "ragged_ignored",
                "ragged_masks_scores_only",
                "ragged_one_key_too_many",
                "ragged_last_tile_whole",
                "ragged_of_first",
                "ragged_of_next",
                "ragged_queries_of_next",
                "ragged_swapped",
                "ragged_skips_empty",
            ),
            ("finite", False),
        ),
        **dict.fromkeys(
            (
                "ragged_last_key_lost",
                "ragged_whole_tiles",
                "ragged_aligned_to_longest",
                "ragged_window_of_longest",
                "ragged_alibi_of_longest",
                "ragged_merges_as_first",
            ),
            ("max", False),
        ),
        "ragged_zeroes_rows": ("rows past", True),
        "ragged_writes_rows": ("rows past", True),
        "ragged_kept_lengths": ("new_lengths", True),
        "ragged_padding_in_lse": ("lse", True),
    }
    selftest_shapes = (
        "b4h4s150d64-fp16-kv2-var1",
        "b4h4s150d64-fp16-causal_br-kv2-var2",
        "b4h2s77d64-fp16-win37_9-sk150-var2-alibi",
    )

    # -- the case ---------------------------------------------------------------------------------------------------

    def impossible(self, case: Shape) -> str | None:
        """One sequence is not ragged."""
        if not case.value_of("ragged"):
            return None
        if case.computes == "scores":
            return "scores have no lengths; drop -var"
        return "a ragged batch has two sequences or more; write b2" if case.batch == 1 else None

    def sequence_lengths(self, case: Shape) -> tuple[tuple[int, int], ...] | None:
        """The numbers of queries and keys of each sequence."""
        if not (pattern := case.value_of("ragged")):
            return None
        of_queries, of_keys = STEPS[pattern]
        queries, keys = _lengths(of_queries, case.batch, case.seq_q), _lengths(of_keys, case.batch, case.seq_k)
        return tuple(zip(queries, keys, strict=True))

    def size_bytes(self, case: Shape) -> int:
        """An int32 for each length."""
        return LENGTH_BYTES * case.batch * sum(self.axes(word, case) is not None for word in self.words)

    def in_words(self, case: Shape) -> str:
        """What is ragged, for the title of a picture."""
        return {"none": "", "keys": ", ragged keys", "both": ", ragged"}[self.claimed_by(case)]

    # -- the manifest -----------------------------------------------------------------------------------------------

    def claimed_by(self, case: Shape) -> str:
        """Which lengths a call has."""
        pattern = case.value_of("ragged")
        if not pattern:
            return "none"
        return "both" if STEPS[pattern][0] else "keys"

    def fields_with(self, claim: Any, heads: int) -> Mapping[str, Any]:
        """A batch of a few sequences."""
        return self.fields_in_turn(claim, heads)[0]

    def fields_in_turn(self, claim: Any, heads: int) -> tuple[Mapping[str, Any], ...]:  # noqa: ARG002
        """Each pattern of a claim."""
        if claim == "none":
            return ({"ragged": 0},)
        patterns = [pattern for pattern, (of_queries, _) in STEPS.items() if bool(of_queries) == (claim == "both")]
        return tuple({"ragged": pattern, "batch": SEQUENCES} for pattern in patterns)

    def sized_in_turn(self, claim: Any) -> tuple[tuple[int, int, Mapping[str, Any]], ...]:  # one of `claims`
        """One query and many keys, and a batch with a sequence for each of `EDGES`."""
        if claim == "none":
            return ()
        fields = self.fields_with(claim, 1)
        return ((1, 1055, fields), (140, 140, {**fields, "batch": len(EDGES)}))

    def claim_words(self, claim: Any) -> str:  # one of `claims`
        """The lengths that were not judged."""
        words = {"keys": "ragged numbers of keys", "both": "ragged numbers of queries and keys"}
        return words.get(claim, "sequences of one length")

    def call_problem(self, call: Any, supports: Any) -> str | None:  # `catalog.variant.Call`, `Supports`
        """A call passes the lengths that are claimed; `thd.py` says what is wrong with one of starts."""
        if call.layout == "thd" and supports.layout != ("thd",):
            return None
        for word in self._words_for(supports):
            if not call.passes(word):
                claimed = self.shown_claims(supports)
                return f"entry.call does not pass {word!r}, but supports.ragged is {claimed}; pass it"
        return None

    def passed_by(self, variant: Any) -> tuple[str, ...]:  # `catalog.variant.Variant`
        """The lengths that are claimed."""
        return self._words_for(variant.supports)

    def _words_for(self, supports: Any) -> tuple[str, ...]:  # `catalog.variant.Supports`
        """The tensors that calls of a variant may have: none of them where starts of sequences say the same."""
        supported = set(self.supported(supports))
        words = tuple(word for word, claims in NEEDED_FOR.items() if supported & set(claims))
        if supports.layout != ("thd",):
            return words
        has_cache = supports.values_of("pages", ("none",)) != ("none",)
        return tuple(word for word in words if word == "seqlens_k" and has_cache)

    def convention_problem(self, key: str, variant: Any) -> str | None:  # `catalog.variant.Variant`
        """Only lengths of queries leave rows of the output, and only ragged batches have padding."""
        if key == "padding":
            return super().convention_problem(key, variant)
        if "both" in self.supported(variant.supports):
            return None
        return f"supports.ragged does not list both, and each row has a query; list it, or drop {key}"

    def refusal_in(self, case: Shape, conventions: Mapping[str, str]) -> str | None:
        """A window at the first key is that of the case with equal lengths only."""
        if not case.value_of("ragged") or conventions.get("window_align") is None:
            return None
        return "with `conventions: {window_align: top_left}`, no case is ragged"

    # -- the call ---------------------------------------------------------------------------------------------------

    def arguments(self, case: Shape) -> Mapping[str, Any]:  # noqa: ARG002
        """Its words are tensors."""
        return {}

    def axes(self, word: str, case: Shape) -> tuple[bool, bool, bool, bool] | None:
        """A length for each sequence."""
        return (True, False, False, False) if self.claimed_by(case) in NEEDED_FOR[word] else None

    def is_passed(self, word: str, case: Shape) -> bool:
        """Starts of sequences say the same."""
        has_starts = case.value_of("layout") == "thd" and (word == "seqlens_q" or case.value_of("pages") == "none")
        return super().is_passed(word, case) and not has_starts

    def fixed(self, word: str, case: Shape) -> list[int]:
        """The lengths."""
        side = list(self.words).index(word)
        return [lengths[side] for lengths in self.sequence_lengths(case) or ()]

    def plain_argument(self, word: str) -> None:  # noqa: ARG002  # one of both
        """No tensor."""
        return

    def call_fitted(self, inputs: Any) -> Any:  # `gpu.inputs.Inputs`
        """No sequence is longer than q or k."""
        longest = {"seqlens_q": inputs.q.shape[2], "seqlens_k": inputs.k.shape[2]}
        lengths = {name: inputs.extra[name].clamp_max(longest[name]) for name in longest if name in inputs.extra}
        return inputs._replace(extra={**inputs.extra, **lengths})

    def call_given(self, inputs: Any) -> Any:  # `gpu.inputs.Inputs`
        """Padding holds NaN, or large numbers for a kernel that needs finite ones."""
        return _with_padding(inputs, padding_of)

    def call_meant(self, inputs: Any) -> Any:  # `gpu.inputs.Inputs`
        """Padding means nothing, and 0 keeps it out of sums."""
        return _with_nothing_in_padding(inputs)

    # -- the judge --------------------------------------------------------------------------------------------------

    def shift(self, inputs: CallInputs) -> torch.Tensor | None:
        """The number of keys more than queries of each sequence, [batch, 1, 1, 1]."""
        of_queries, of_keys = (inputs.word(word) for word in self.words)
        if of_keys is None:
            return None
        shift: torch.Tensor = of_keys.long() - (inputs.q.shape[2] if of_queries is None else of_queries)
        return shift

    def hidden(self, inputs: CallInputs, positions: Positions) -> torch.Tensor | None:
        """Padding: no query sees it, and it sees no key."""
        of_queries, of_keys = (inputs.word(word) for word in self.words)
        if of_keys is None:
            return None
        hidden: torch.Tensor = positions.keys >= positions.part_of(of_keys)
        return hidden if of_queries is None else hidden | (positions.queries >= positions.part_of(of_queries))

    def padding(self, inputs: CallInputs) -> Padding | None:
        """The rows of the output behind the queries of each sequence."""
        return _padding(inputs, "seqlens_q", inputs.q.shape[2])

    def key_padding(self, inputs: CallInputs) -> Padding | None:
        """The rows of the gradients of K and V behind the keys of each sequence."""
        return _padding(inputs, "seqlens_k", inputs.k.shape[2])

    def nonfinite_cause(self, inputs: CallInputs, bad_rows: torch.Tensor, *, others_are_right: bool) -> str:  # noqa: ARG002
        """NaN of the padding, in sequences that have some."""
        for word, longest in (("seqlens_k", inputs.k.shape[2]), ("seqlens_q", inputs.q.shape[2])):
            lengths = inputs.word(word)
            if lengths is not None and not bool(bad_rows[lengths.flatten() == longest].any()):
                what = "K or V" if word == "seqlens_k" else "Q"
                words = f"NaN of the padding of {what}, at or behind {word}, reaches the output of shorter sequences"
                return f"{words}: do not read it, since 0 * NaN is NaN, or declare `conventions: {{padding: finite}}`"
        return ""

    def order_matters(self, inputs: CallInputs) -> bool:
        """Keys behind the length are hidden."""
        return inputs.word("seqlens_k") is not None

    def mistakes(self, inputs: CallInputs) -> Iterator[Mistake]:
        """Lengths of other sequences, lengths that are off by one, and masks of the padded sequence."""
        if inputs.word("seqlens_k") is None:
            return
        for word in self.words:
            if (lengths := inputs.word(word)) is None:
                continue
            longest = inputs.q.shape[2] if word == "seqlens_q" else inputs.k.shape[2]
            for words, other in {
                "each sequence has the length of the next one": lengths.roll(-1, 0),
                "each sequence has the length of the one before it": lengths.roll(1, 0),
                "all sequences have the length of the first one": lengths[:1].expand_as(lengths),
                "they are ignored": lengths.clamp_min(longest),
                "the last one of each sequence is left out": (lengths - 1).clamp_min(0),
                "each sequence has one too many": (lengths + 1).clamp_max(longest),
                "they are rounded down to tiles of 64": lengths // 64 * 64,
            }.items():
                yield Mistake(f"of {word}, {words}: {LOOK}", change=_with_lengths(word, other))
        words = "the mask is aligned to the last key of the longest sequence, not to that of each one"
        yield Mistake(f"{words}: {LOOK}", shift=inputs.k.shape[2] - inputs.q.shape[2])
        if inputs.word("sink") is None:
            yield from _merges_as_first(inputs.word("seqlens_k"))


def with_lengths(inputs: Any, lengths: Mapping[str, torch.Tensor]) -> Any:  # `gpu.inputs.Inputs`
    """The call with other lengths, [batch, 1, 1, 1] int32 by word.  What was padding before is 0."""
    meant = _with_nothing_in_padding(inputs)
    return _with_padding(meant._replace(extra={**meant.extra, **lengths}), padding_of)


def sequences_with_nan(inputs: Any) -> list[bool]:  # of `gpu.inputs.Inputs`
    """Whether each sequence has NaN among its keys or values."""
    lengths = inputs.extra["seqlens_k"].flatten().tolist()
    return [
        any(bool(tensor[batch, :, :length].isnan().any()) for tensor in (inputs.k, inputs.v))
        for batch, length in enumerate(lengths)
    ]


def _padding(inputs: CallInputs, word: str, longest: int) -> Padding | None:
    """The rows behind the lengths of a word, of as many as the longest sequence has."""
    if (lengths := inputs.word(word)) is None:
        return None
    return Padding(lengths.new_tensor(range(longest)) >= lengths[:, 0], inputs.convention("rows_past") or "untouched")


def _merges_as_first(lengths: torch.Tensor) -> Iterator[Mistake]:
    """Splits that only the first sequence has count in the others, too, with partial sums of 0."""
    for tile in TILES:
        splits = (lengths + tile - 1) // tile  # [batch, 1, 1, 1]
        stale = (splits[:1] - splits).clamp_min(0).double().log()
        words = f"as many splits of {tile} keys are merged as the first sequence has, with a log-sum-exp of 0"
        yield Mistake(f"{words}: {LOOK}", sinks=partial(Positions.part_of, tensor=stale))


def _lengths(step: int, batch: int, longest: int) -> list[int]:
    """The length of each sequence, at most the longest one."""
    if step == SPREAD:
        return [longest * (batch - number) // batch for number in range(batch)]
    edges = (EDGES[number * step % len(EDGES)] for number in range(batch))
    return [longest if edge is LONGEST else min(edge, longest) for edge in edges]


def padding_of(inputs: CallInputs, tensor: torch.Tensor) -> float | torch.Tensor:
    """What padding of a tensor, [batch, heads, seq, dim], holds: a number, or one for each head, [heads, 1, 1].

    Finite numbers of a quantised cache are no larger than others of their head, which leaves the scales as they are.
    """
    if inputs.convention("padding") != "finite":
        return math.nan
    if not getattr(inputs, "cache_dtype", "") or not tensor.numel():
        return LARGE
    return tensor.nan_to_num(0.0).abs().amax((0, 2, 3))[:, None, None]


def _with_nothing_in_padding(inputs: Any) -> Any:  # `gpu.inputs.Inputs`
    return _with_padding(inputs, lambda *_: 0.0)


def _with_padding(inputs: Any, value_of: Any) -> Any:  # `gpu.inputs.Inputs`, a function such as `padding_of`
    """The call with values in all padding of q, k and v; the call itself if it has none."""
    of_queries, of_keys = inputs.word("seqlens_q"), inputs.word("seqlens_k")
    if of_keys is None:
        return inputs
    k, v = (behind(tensor, of_keys, value_of(inputs, tensor)) for tensor in (inputs.k, inputs.v))
    q = inputs.q if of_queries is None else behind(inputs.q, of_queries, value_of(inputs, inputs.q))
    return inputs._replace(q=q, k=k, v=v)


def behind(tensor: torch.Tensor, lengths: torch.Tensor, value: float | torch.Tensor) -> torch.Tensor:
    """A copy of a tensor, [batch, heads, seq, dim], with a value at and behind the lengths, and with its strides."""
    copy = tensor.clone()  # which keeps the order of the axes
    for batch, length in enumerate(lengths.flatten().tolist()):
        copy[batch, :, length:] = value
    return copy


def _with_lengths(word: str, lengths: torch.Tensor) -> Any:  # a change of `gpu.inputs.Inputs`
    return lambda inputs: inputs._replace(extra={**inputs.extra, word: lengths})


PART = Ragged()

"""The causal mask: a query sees no key after its own position, from the top-left or the bottom-right corner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pytest_fa.attention.mistake import (
    LOOK_AT_MASK,
    TILES,
    Hide,
    Mistake,
    Positions,
    empty_row_mistakes,
    exponentials,
)
from pytest_fa.attention.part import CallInputs, Part, Shape, shown
from pytest_fa.attention.token import Choice

if TYPE_CHECKING:
    import torch

Causal = Literal["none", "top_left", "bottom_right"]
TOKEN = Choice("causal", (("causal", "top_left"), ("causal_br", "bottom_right")), "none")


class CausalMask(Part):
    """The mask, aligned to the top-left corner of the scores, as in SDPA, or to the bottom-right corner."""

    name = "causal"
    summary = "a query sees no key after its own position"
    tokens = (TOKEN,)
    rows = (
        ("`-causal`", "causal mask aligned to the top left, as in SDPA"),
        ("`-causal_br`", "causal mask aligned to the bottom right"),
    )
    supports = "causal"
    claims = ("none", "top_left", "bottom_right")
    words = {"causal": ("causal", "is_causal")}
    always = ("causal",)
    faults = {"mask_off_by_one": ("max", False)}
    selftest_shapes = ("b2h4s77d64-fp16-causal-kv2",)

    def impossible(self, case: Shape) -> str | None:
        """Scores have no mask."""
        value = case.value_of("causal")
        is_masked = case.computes == "scores" and value != "none"
        return f"scores have no mask; drop -{TOKEN.write(value)}" if is_masked else None

    def visible_pairs(self, case: Shape) -> int | None:
        """The pairs above the diagonal, and on it."""
        if (value := case.value_of("causal")) == "none":
            return None
        shift = 0 if value == "top_left" else case.seq_k - case.seq_q
        return _pairs_above(case.seq_q + shift, case.seq_k) - _pairs_above(shift, case.seq_k)

    def visible_keys(self, case: Shape, query: int) -> range:
        """The keys up to the diagonal."""
        if (value := case.value_of("causal")) == "none":
            return range(case.seq_k)
        shift = 0 if value == "top_left" else case.seq_k - case.seq_q
        return range(max(0, min(case.seq_k, query + shift + 1)))

    def lengths_touched(self, case: Shape) -> tuple[int, int] | None:
        """A call need not read queries and keys that see nothing of the other side."""
        length = min(case.seq_q, case.seq_k)
        return None if case.value_of("causal") == "none" else (length, length)

    def in_words(self, case: Shape) -> str:
        """The mask, for the title of a picture."""
        masks = {"none": "", "top_left": ", causal", "bottom_right": ", causal (bottom right)"}
        return masks[case.value_of("causal")]

    # -- the manifest -----------------------------------------------------------------------------------------------

    def needs_two_lengths(self, claim: Any) -> bool:  # one of `claims`
        """With equal lengths, the two masks are equal."""
        return bool(claim == "bottom_right")

    def claim_words(self, claim: Any) -> str:  # one of `claims`
        """The mask that was not judged."""
        return "no mask" if claim == "none" else f"the {claim.replace('_', '-')} mask"

    def call_problem(self, call: Any, supports: Any) -> str | None:  # `catalog.variant.Call`, `Supports`
        """A call passes true or false, so it must pass the word for more than one mask, and cannot for two of them."""
        supported = self.supported(supports)
        masks = ", ".join(map(shown, supported))
        if not call.passes("causal") and len(supported) > 1:
            return f"entry.call does not pass 'causal', but supports.causal is {masks}; pass it, or support one mask"
        if call.passes("causal") and {"top_left", "bottom_right"} <= set(supported):
            return f"entry.call passes 'causal' as true or false, but supports.causal is {masks}; support one alignment"
        return None

    # -- the call ---------------------------------------------------------------------------------------------------

    def arguments(self, case: Shape) -> Mapping[str, Any]:
        """Each call names its mask."""
        return {"causal": case.value_of("causal")}

    def passed(self, word: str, value: Any, conventions: Mapping[str, str]) -> bool:  # noqa: ARG002  # one of `claims`
        """Functions of libraries know one mask: true or false."""
        return bool(value != "none")

    # -- the judge --------------------------------------------------------------------------------------------------

    def hidden(self, inputs: CallInputs, positions: Positions) -> torch.Tensor | None:
        """The keys behind each query."""
        return hidden_under(inputs.word("causal"), positions)

    def order_matters(self, inputs: CallInputs) -> bool:
        """A mask hides keys by their position."""
        return bool(inputs.word("causal") != "none")

    def mistakes(self, inputs: CallInputs) -> Iterator[Mistake]:
        """Another mask, one that is moved, a tile that is not masked, and rows without keys."""
        causal, seq_q, keys = inputs.word("causal"), inputs.q.shape[2], inputs.k.shape[2]
        is_square = seq_q == keys
        for wrong in self.claims:
            if wrong != causal and not (wrong == "bottom_right" and is_square):
                words = f"the causal mask is {wrong.replace('_', ' ')} where it should be {causal.replace('_', ' ')}"
                if "none" not in (wrong, causal):
                    words += f": if that is meant, write `{wrong}` in `supports: {{causal: [...]}}`"
                yield Mistake(words, hide=_mask(wrong))
        if causal != "none":
            yield from _moved(causal, keys)
        if causal == "bottom_right" and seq_q > keys:
            yield from empty_row_mistakes()


def hidden_under(causal: str, positions: Positions, wider: int = 0) -> torch.Tensor | None:
    """True where a mask hides a key, [rows, keys]; each query sees `wider` keys too many.  None without a mask."""
    if causal == "none":
        return None
    return positions.keys > _own_keys(causal, positions) + wider


def _own_keys(causal: str, positions: Positions) -> torch.Tensor:
    """The last key that each query sees, as far as there is one."""
    return positions.own_keys(from_first=causal == "top_left")


def _pairs_above(row: int, seq_k: int) -> int:
    """The number of pairs in the first `row` rows of a triangle that is cut off after `seq_k` columns."""
    length = min(max(row, 0), seq_k)
    return length * (length + 1) // 2 + max(row - seq_k, 0) * seq_k


# -- mistakes ---------------------------------------------------------------------------------------------------------


def _moved(causal: str, keys: int) -> Iterator[Mistake]:
    """Masks whose diagonal or whose values are wrong."""
    yield Mistake(f"the causal mask is one key too wide: {LOOK_AT_MASK}", hide=_mask(causal, 1))
    yield Mistake(f"the causal mask is one key too narrow: {LOOK_AT_MASK}", hide=_mask(causal, -1))
    yield Mistake(
        f"the causal mask hides the past, not the future: {LOOK_AT_MASK}",
        hide=lambda positions: positions.keys < _own_keys(causal, positions),
    )
    for tile in (tile for tile in TILES if tile < keys):  # one tile of all keys: there is no mask, or no key
        tile_words = f"the diagonal tile of {tile} keys is"
        yield Mistake(f"{tile_words} not masked: look at the mask", hide=_to_tile_end(causal, tile, 1))
        yield Mistake(f"{tile_words} skipped: look at the last tile", hide=_to_tile_end(causal, tile, 0))
    yield Mistake("masked keys have a score of zero: mask with -inf, before the softmax", weigh=_masked_with_zero)
    yield Mistake("masked keys are counted in the row sum: mask the scores, not P", weigh=_masked_after_softmax)


def _mask(causal: str, wider: int = 0) -> Hide:
    def hidden(positions: Positions) -> torch.Tensor:
        mask = hidden_under(causal, positions, wider)
        return positions.nothing_hidden if mask is None else mask

    return hidden


def _to_tile_end(causal: str, tile: int, tiles: int) -> Hide:
    """Each query sees the tiles before its diagonal tile, and `tiles` more."""

    def hidden(positions: Positions) -> torch.Tensor:
        return positions.keys >= (_own_keys(causal, positions) // tile + tiles) * tile

    return hidden


def _masked_with_zero(scores: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    p = exponentials(scores.masked_fill(hidden, 0.0), hidden & ~hidden)
    return p, p.sum(-1, keepdim=True)


def _masked_after_softmax(scores: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    p = exponentials(scores, hidden & ~hidden)
    return p.masked_fill(hidden, 0.0), p.sum(-1, keepdim=True)


PART = CausalMask()

"""The common mistakes of attention kernels, each with the words for it and the output that it gives.

A mistake is offered only where its output differs from the right one, and mistakes with equal outputs share one entry.
The first clause of the words says what the output equals; the second says what to look at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from pytest_fa.gpu.inputs import Inputs
from pytest_fa.judge.key_ranges import TILES, key_range_mistake
from pytest_fa.judge.memory_mistakes import memory_mistakes
from pytest_fa.judge.mistaken import Hide, Mask, Mistake, Weigh, exponentials

LOG2_E = math.log2(math.e)
LOOK_AT_MASK = "look at the comparison of key and query index"


def attention_mistakes(inputs: Inputs) -> Iterator[Mistake]:
    """Every known mistake that can change the output of a case."""
    yield from _key_mistakes(inputs)
    yield from _scale_mistakes(inputs)
    yield from _mask_mistakes(inputs)
    yield from _softmax_mistakes(inputs)
    yield from _online_mistakes(inputs)
    yield from _head_mistakes(inputs)
    yield from _operand_mistakes(inputs)
    yield from memory_mistakes(inputs)


# -- keys -------------------------------------------------------------------------------------------------------------


def _key_mistakes(inputs: Inputs) -> Iterator[Mistake]:
    """Keys that are missing at the end, counted only in part, or counted past the end."""
    keys = inputs.k.shape[2]
    lost = [count for count in sorted({1, 16, *(keys % tile for tile in TILES)} - {0}) if count < keys]
    for count in lost:
        for kind in ("missing", "missing in PV", "missing in the sum"):
            yield key_range_mistake(kind, keys - count, keys, inputs)
    for tile in TILES:
        if tile < keys and keys - tile not in lost:
            yield key_range_mistake("missing", tile, keys, inputs)
        last_tile = (keys - 1) // tile * tile
        if tile < last_tile:
            yield key_range_mistake("missing", 0, last_tile, inputs)
            yield key_range_mistake("missing in PV", 0, last_tile, inputs)
        if keys > 3 * tile:  # two tiles or more are missing
            yield _every_second_tile(tile, inputs)
    for padded in sorted({-(-keys // tile) * tile for tile in TILES} - {keys}):
        yield _padding_counted(padded - keys)


def _every_second_tile(tile: int, inputs: Inputs) -> Mistake:
    words = f"every second tile of {tile} keys is missing: look at the loop's step or the double buffer"
    return Mistake(words, hide=lambda mask: mask.hidden(inputs.causal) | (mask.keys // tile % 2 == 1))


def _padding_counted(padding: int) -> Mistake:
    def padded(inputs: Inputs) -> Inputs:
        k, v = (torch.nn.functional.pad(tensor, (0, 0, 0, padding)) for tensor in (inputs.k, inputs.v))
        return inputs._replace(k=k, v=v)

    words = f"{padding} keys past the end are counted with a score of zero: look at the tail mask"
    return Mistake(words, padded)


# -- scale ------------------------------------------------------------------------------------------------------------


def _scale_mistakes(inputs: Inputs) -> Iterator[Mistake]:
    scale, head_dim = inputs.scale, inputs.q.shape[3]
    scales: dict[float, str] = {1.0: "the softmax scale is not applied"}
    if math.isclose(scale, head_dim**-0.5):
        scales[1 / head_dim] = "the softmax scale is 1/D, not 1/sqrt(D): look whether it is applied twice"
        scales[math.sqrt(head_dim)] = "the softmax scale is sqrt(D), not 1/sqrt(D)"
    scales[scale * 1.01] = "the softmax scale is 1 % too large"
    scales[scale * 0.99] = "the softmax scale is 1 % too small"
    scales[scale * LOG2_E] = "the softmax scale is multiplied by log2 e once too often: look for exp in place of exp2"
    scales[scale / LOG2_E] = "the softmax scale is missing its log2 e: look for exp2 in place of exp"
    scales[-scale] = "the softmax scale has the wrong sign"
    scales[0.0] = "the output is the mean of V: all scores are equal, look at Q K^T"
    for value, words in scales.items():
        if value != scale:
            yield Mistake(words, lambda inputs, value=value: inputs._replace(scale=value))  # type: ignore[misc]


# -- mask -------------------------------------------------------------------------------------------------------------


def _mask_mistakes(inputs: Inputs) -> Iterator[Mistake]:
    causal, seq_q, keys = inputs.causal, inputs.q.shape[2], inputs.k.shape[2]
    is_square = seq_q == keys
    for wrong in ("none", "top_left", "bottom_right"):
        if wrong != causal and not (wrong == "bottom_right" and is_square):
            words = f"the mask is {wrong.replace('_', ' ')} where it should be {causal.replace('_', ' ')}"
            yield Mistake(words, hide=lambda mask, wrong=wrong: mask.hidden(wrong))  # type: ignore[misc]
    if causal != "none":
        yield from _causal_mistakes(causal, keys)
    if causal == "bottom_right" and seq_q > keys:
        words = "queries that see no key get {}, not zero: look at the value of masked scores"
        yield Mistake(words.format("the mean of V"), weigh=_mean_without_key)
        yield Mistake(words.format("all keys"), weigh=_unmasked_without_key)


def _causal_mistakes(causal: str, keys: int) -> Iterator[Mistake]:
    def hide(words: str, rule: Hide) -> Mistake:
        return Mistake(words, hide=rule)

    yield hide(f"the causal mask is one key too wide: {LOOK_AT_MASK}", lambda mask: mask.hidden(causal, 1))
    yield hide(f"the causal mask is one key too narrow: {LOOK_AT_MASK}", lambda mask: mask.hidden(causal, -1))
    yield hide(
        f"the causal mask hides the past, not the future: {LOOK_AT_MASK}",
        lambda mask: mask.keys < mask.queries + mask.shift(causal),
    )
    for tile in (tile for tile in TILES if tile < keys):  # one tile of all keys: there is no mask, or no key
        yield hide(f"the diagonal tile of {tile} keys is not masked: look at the mask", _to_tile_end(causal, tile, 1))
        yield hide(f"the diagonal tile of {tile} keys is skipped: look at the last tile", _to_tile_end(causal, tile, 0))
    yield Mistake("masked keys have a score of zero: mask with -inf, before the softmax", weigh=_masked_with_zero)
    yield Mistake("masked keys are counted in the row sum: mask the scores, not P", weigh=_masked_after_softmax)


def _to_tile_end(causal: str, tile: int, tiles: int) -> Hide:
    """Each query sees the tiles before its diagonal tile, and `tiles` more."""

    def hidden(mask: Mask) -> torch.Tensor:
        return mask.keys >= ((mask.queries + mask.shift(causal)) // tile + tiles) * tile

    return hidden


def _masked_with_zero(scores: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    p = exponentials(scores.masked_fill(hidden, 0.0), torch.zeros_like(hidden))
    return p, p.sum(-1, keepdim=True)


def _masked_after_softmax(scores: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    p = exponentials(scores, torch.zeros_like(hidden))
    return p.masked_fill(hidden, 0.0), p.sum(-1, keepdim=True)


def _mean_without_key(scores: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _unmasked_without_key(scores.masked_fill(hidden.all(-1, keepdim=True), 0.0), hidden)


def _unmasked_without_key(scores: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    p = exponentials(scores, hidden & ~hidden.all(-1, keepdim=True))
    return p, p.sum(-1, keepdim=True)


# -- softmax ----------------------------------------------------------------------------------------------------------


def _softmax_mistakes(inputs: Inputs) -> Iterator[Mistake]:
    yield Mistake("the output is exp(S - max) V, not divided by the row sum: look at the end", weigh=_not_divided)
    yield Mistake("the output is exp(S) V, not divided by the row sum: look at the end", weigh=_no_maximum_not_divided)
    yield Mistake("the output is divided by the row sum twice: look at the end and the merge", weigh=_divided_twice)
    yield Mistake("the output is S V: no softmax is applied", weigh=_no_softmax)
    if inputs.q.shape[2] > 1:
        words = "the softmax is taken over the queries, not over the keys: look at the axis of max and sum"
        yield Mistake(words, weigh=_over_queries, needs_all_queries=True)


def _not_divided(scores: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    p = exponentials(scores, hidden)
    return p, torch.ones_like(p[..., :1])


def _no_maximum_not_divided(scores: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    p = torch.exp(scores.masked_fill(hidden, -math.inf))
    return p, torch.ones_like(p[..., :1])


def _divided_twice(scores: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    p = exponentials(scores, hidden)
    return p, p.sum(-1, keepdim=True).square()


def _no_softmax(scores: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    s = scores.masked_fill(hidden, 0.0)
    return s, torch.ones_like(s[..., :1])


def _over_queries(scores: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    s = scores.masked_fill(hidden, -math.inf)
    p = torch.exp(s - s.amax(2, keepdim=True).clamp_min(torch.finfo(s.dtype).min))
    return p / p.sum(2, keepdim=True).clamp_min(1e-300), torch.ones_like(p[..., :1])


# -- online softmax ---------------------------------------------------------------------------------------------------


def _online_mistakes(inputs: Inputs) -> Iterator[Mistake]:
    """Sums that are not rescaled when the running maximum grows."""
    wrong_sums = (("O", False, True), ("the row sum", True, False), ("O and the row sum", False, False))
    for tile in (tile for tile in TILES if tile < inputs.k.shape[2]):
        for name, rescales_o, rescales_sum in wrong_sums:
            for backwards in (False, True):
                order = ", from the last to the first" if backwards else ""
                words = f"{name} is not rescaled when the maximum grows: look at the tiles of {tile} keys{order}"
                yield Mistake(
                    words.replace("sum is", "sum are") if " and " in name else words,
                    weigh=_online(tile, rescales_o, rescales_sum, backwards),
                )


def _online(tile: int, rescales_o: bool, rescales_sum: bool, backwards: bool) -> Weigh:  # noqa: FBT001
    def weigh(scores: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        s = scores.masked_fill(hidden, -math.inf)
        lowest = torch.finfo(s.dtype).min
        running = _running_maximum(s, tile, backwards).clamp_min(lowest)
        final = s.amax(-1, keepdim=True).clamp_min(lowest)
        of_o, of_sum = (torch.exp(s - (final if rescales else running)) for rescales in (rescales_o, rescales_sum))
        return of_o, of_sum.sum(-1, keepdim=True)

    return weigh


def _running_maximum(scores: torch.Tensor, tile: int, backwards: bool) -> torch.Tensor:  # noqa: FBT001
    """For each key, the maximum of the row up to the end of its tile, [b, h, rows, keys]."""
    keys = scores.shape[-1]
    padded = torch.nn.functional.pad(scores, (0, -keys % tile), value=-math.inf)
    of_tile = padded.view(*scores.shape[:3], -1, tile).amax(-1)  # [b, h, rows, tiles]
    running: torch.Tensor = of_tile.flip(-1).cummax(-1).values.flip(-1) if backwards else of_tile.cummax(-1).values
    return running.repeat_interleave(tile, -1)[..., :keys]


# -- heads ------------------------------------------------------------------------------------------------------------


def _head_mistakes(inputs: Inputs) -> Iterator[Mistake]:
    """K and V of another head or batch."""
    heads, kv_heads, batches = inputs.q.shape[1], inputs.k.shape[1], inputs.q.shape[0]
    if kv_heads not in (1, heads):
        order = torch.arange(heads, device=inputs.q.device) % kv_heads
        words = "query heads are mapped to key heads modulo, not in groups: look at h % kv_heads"
        yield Mistake(words, lambda inputs: inputs._replace(k=inputs.k[:, order], v=inputs.v[:, order]))
    for names in (("k", "v"), ("k",), ("v",)):
        subject = " and ".join(name.upper() for name in names)
        if kv_heads > 1:
            words = f"every head reads {subject} of head 0: look at the head stride"
            yield Mistake(words, _replaced(names, lambda tensor: tensor[:, :1].expand_as(tensor)))
        if batches > 1:
            words = f"every batch reads {subject} of batch 0: look at the batch stride"
            yield Mistake(words, _replaced(names, lambda tensor: tensor[:1].expand_as(tensor)))
    if batches > 1:
        words = "every batch reads Q of batch 0: look at the batch stride"
        yield Mistake(words, _replaced(("q",), lambda tensor: tensor[:1].expand_as(tensor)))


def _replaced(names: tuple[str, ...], of: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Inputs], Inputs]:
    return lambda inputs: inputs._replace(**{name: of(getattr(inputs, name)) for name in names})


# -- operands ---------------------------------------------------------------------------------------------------------


def _operand_mistakes(inputs: Inputs) -> Iterator[Mistake]:
    """Operands that are exchanged, cut off or shifted."""
    q, k, v = inputs[:3]
    yield Mistake("K and V are exchanged: look at the order of the arguments", lambda i: i._replace(k=i.v, v=i.k))
    yield Mistake("K is read in place of V: look at the pointer of V", lambda i: i._replace(v=i.k))
    yield Mistake("V is read in place of K: look at the pointer of K", lambda i: i._replace(k=i.v))
    if q.shape == k.shape:
        yield Mistake("Q and K are exchanged: look at the order of the arguments", lambda i: i._replace(q=i.k, k=i.q))
        yield Mistake("Q and V are exchanged: look at the order of the arguments", lambda i: i._replace(q=i.v, v=i.q))
        for name in ("q", "k", "v"):
            words = f"the output is {name.upper()} itself"
            yield Mistake(words, arrange=lambda _, name=name: getattr(inputs, name).double())  # type: ignore[misc]
    for kept in sorted({8, 16, 32, 64, q.shape[3] // 2, q.shape[3] - 8, q.shape[3] - 16}):
        if 0 < kept < q.shape[3]:
            words = f"Q K^T sums only the first {kept} of {q.shape[3]} dims: look at the loop over D"
            yield Mistake(words, lambda i, kept=kept: i._replace(q=i.q[..., :kept], k=i.k[..., :kept]))  # type: ignore[misc]
    for shift in (step * sign for step in (1, *TILES) for sign in (1, -1)):
        if abs(shift) < v.shape[2] and 2 * abs(shift) != v.shape[2]:
            words = f"P meets V {abs(shift)} keys {'earlier' if shift > 0 else 'later'}: look at the index of V's tile"
            yield Mistake(words, _replaced(("v",), lambda tensor, shift=shift: tensor.roll(shift, 2)))  # type: ignore[misc]

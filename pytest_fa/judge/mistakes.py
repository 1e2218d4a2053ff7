"""The common mistakes of attention kernels, each with the words for it and the output that it gives.

A mistake is offered only where its output differs from the right one, and mistakes with equal outputs share one entry.
The first clause of the words says what the output equals; the second says what to look at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch

from pytest_fa.attention import parts
from pytest_fa.attention.mistake import TILES, Mistake, Weigh, exponentials, not_divided
from pytest_fa.gpu.inputs import Inputs
from pytest_fa.judge.key_ranges import key_range_mistake
from pytest_fa.judge.memory_mistakes import memory_mistakes
from pytest_fa.judge.mistaken import all_hidden
from pytest_fa.judge.other_kinds import other_kinds

LOG2_E = math.log2(math.e)
HEAD_DIMS = (16, 32, 40, 48, 56, 64, 72, 80, 96, 112, 120, 128, 160, 192, 224, 256, 384, 512, 576)
FINITE_STARTS = (0.0, -1e4, -5e4)  # 1e-30 and the like give what 0 gives


def attention_mistakes(inputs: Inputs) -> Iterator[Mistake]:
    """Every known mistake that can change the output of a case; what may be a convention comes first."""
    yield from parts.other_conventions(inputs)
    yield from _key_mistakes(inputs)
    yield from _scale_mistakes(inputs)
    yield from parts.mistakes(inputs)
    yield from _softmax_mistakes(inputs)
    yield from _online_mistakes(inputs)
    yield from other_kinds(inputs)
    yield from _range_mistakes(inputs)
    yield from _head_mistakes(inputs)
    yield from _operand_mistakes(inputs)
    yield from memory_mistakes(inputs)


# -- keys -------------------------------------------------------------------------------------------------------------


def _key_mistakes(inputs: Inputs) -> Iterator[Mistake]:
    """Keys that are missing at the end, counted only in part, or counted past the end."""
    keys = inputs.k.shape[2]
    yield from _length_mistakes(inputs)
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
    yield from _stale_tails(keys)


def _length_mistakes(inputs: Inputs) -> Iterator[Mistake]:
    """The number of queries taken for that of keys."""
    queries, keys = inputs.q.shape[2], inputs.k.shape[2]
    look = "look where S_q stands in place of S_k"
    if queries > keys:
        words = f"{queries - keys} keys past the end, up to S_q, are counted with a score of zero: {look}"
        yield _padding_counted(queries - keys)._replace(words=words)
    ends = {end: f", rounded up to {end}," for end in (-(-queries // tile) * tile for tile in TILES)}
    for end, rounded in (ends | {queries: ""}).items():
        if end < keys:
            words = f"the keys past S_q{rounded} are missing: {look}, in the loop over keys or its mask"
            yield key_range_mistake("missing", end, keys, inputs)._replace(words=words)


def _every_second_tile(tile: int, inputs: Inputs) -> Mistake:
    words = f"every second tile of {tile} keys is missing: look at the loop's step or the double buffer"
    return Mistake(words, hide=lambda each: all_hidden(inputs, each) | (each.keys // tile % 2 == 1))


def _padding_counted(padding: int) -> Mistake:
    def padded(inputs: Inputs) -> Inputs:
        k, v = (torch.nn.functional.pad(tensor, (0, 0, 0, padding)) for tensor in (inputs.k, inputs.v))
        return inputs._replace(k=k, v=v)

    words = f"{padding} keys past the end are counted with a score of zero: look at the tail mask"
    return Mistake(words, padded)


def _stale_tails(keys: int) -> Iterator[Mistake]:
    """The slots of the last tile that have no key keep those of one of the two tiles before, and are not masked."""
    tails = {
        (keys - back * tile, keys // tile * tile - (back - 1) * tile)
        for tile in TILES
        for back in (1, 2)
        if keys % tile and back * tile < keys
    }
    for start, stop in sorted(tails):
        for names in (("k", "v"), ("k",), ("v",)):
            tensors = " and ".join(name.upper() for name in names)
            words = f"the last tile still has {tensors} of keys {start} to {stop - 1}: mask the keys past the end"
            yield Mistake(words, partial(_with_stale, names, slice(start, stop)))


def _with_stale(names: tuple[str, ...], stale: slice, inputs: Inputs) -> Inputs:
    """K and V with a copy of some of their rows at the end; zeros in the one that is not named."""
    tails = {name: getattr(inputs, name)[:, :, stale] * (1 if name in names else 0) for name in ("k", "v")}
    return inputs._replace(k=torch.cat([inputs.k, tails["k"]], 2), v=torch.cat([inputs.v, tails["v"]], 2))


# -- scale ------------------------------------------------------------------------------------------------------------


def _scale_mistakes(inputs: Inputs) -> Iterator[Mistake]:
    scale, head_dim = inputs.scale, inputs.q.shape[3]
    is_usual = math.isclose(scale, head_dim**-0.5)
    scales = [(1.0, "the softmax scale is not applied")]
    if (of_v := inputs.v.shape[3]) != head_dim:
        words = f"the softmax scale is that of another width: 1/sqrt({of_v}), the head_dim of V, not 1/sqrt({head_dim})"
        scales.append((of_v**-0.5, words))
    if is_usual:
        scales += [
            (1 / head_dim, "the softmax scale is 1/D, not 1/sqrt(D): look whether it is applied twice"),
            (math.sqrt(head_dim), "the softmax scale is sqrt(D), not 1/sqrt(D)"),
            (2 * scale, "the softmax scale is 2/sqrt(D), not 1/sqrt(D)"),
            (scale / 2, "the softmax scale is 1/(2 sqrt(D)), not 1/sqrt(D)"),
        ]
    else:
        words = f"the softmax scale is 1/sqrt(D), not {scale:.4g}: the scale of the call is not used"
        scales.append((head_dim**-0.5, words))
    scales += [
        (scale * 1.01, "the softmax scale is 1 % too large"),
        (scale * 0.99, "the softmax scale is 1 % too small"),
    ]
    log2_words = "the softmax scale is multiplied by log2 e once too often: look for exp in place of exp2"
    scales.append((scale * LOG2_E, log2_words))
    scales.append((-scale, "the softmax scale has the wrong sign"))
    scales.append((0.0, "the output is the mean of V: all scores are equal, look at Q K^T"))
    scales += [(dim**-0.5, f"the softmax scale is that of D = {dim}, not {head_dim}") for dim in HEAD_DIMS]
    scales.append((0.5, "the softmax scale is 0.5"))
    taken = [scale]
    for value, words in scales:
        if not any(math.isclose(value, other) for other in taken):
            taken.append(value)
            yield Mistake(words, lambda inputs, value=value: inputs._replace(scale=value))  # type: ignore[misc]


# -- softmax ----------------------------------------------------------------------------------------------------------


def _softmax_mistakes(inputs: Inputs) -> Iterator[Mistake]:
    yield Mistake("the output is exp(S - max) V, not divided by the row sum: look at the end", weigh=not_divided)
    yield Mistake("the output is exp(S) V, not divided by the row sum: look at the end", weigh=_no_maximum_not_divided)
    yield Mistake("the output is divided by the row sum twice: look at the end and the merge", weigh=_divided_twice)
    yield Mistake("the output is S V: no softmax is applied", weigh=_no_softmax)
    if inputs.q.shape[2] > 1:
        words = "the softmax is taken over the queries, not over the keys: look at the axis of max and sum"
        yield Mistake(words, weigh=_over_queries, needs_all_queries=True)
    for start in FINITE_STARTS:
        words = f"the row maximum starts at {start:g}: exp underflows where all scores are far below, start at -inf"
        yield Mistake(words, weigh=partial(_finite_start, start, inputs.output_dtype))


def _finite_start(
    start: float, dtype: torch.dtype, scores: torch.Tensor, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """P, which is rounded to the dtype, and its sum in float32."""
    s = scores.masked_fill(hidden, -math.inf)
    p = torch.exp(s - s.amax(-1, keepdim=True).clamp_min(start))
    return p.to(dtype).double(), p.float().double().sum(-1, keepdim=True)


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


# -- ranges ---------------------------------------------------------------------------------------------------------


def _range_mistakes(inputs: Inputs) -> Iterator[Mistake]:
    """Values past the largest number of fp16 that are held in it, with saturation; subnormal numbers that are zero."""
    smallest = torch.finfo(inputs.output_dtype).smallest_normal
    if bool(((inputs.v != 0) & (inputs.v.abs() < smallest)).any()):
        words = f"subnormal numbers{{}}, below {smallest:.2g}, are flushed to zero: look at ftz in the conversion"
        flush = partial(_flushed, smallest)
        yield Mistake(words.format(" of V"), _replaced(("v",), flush))
        yield Mistake(words.format(" of V and of the output"), _replaced(("v",), flush), arrange=flush)
    largest = torch.finfo(torch.float16).max
    for name in ("q", "k", "v"):
        if bool((getattr(inputs, name).abs() > largest).any()):
            words = f"{name.upper()} is clamped at {largest:.0f}, the largest fp16: hold it in the dtype of the call"
            yield Mistake(words, _replaced((name,), lambda tensor: tensor.clamp(-largest, largest)))
    if bool((inputs.q.abs() * abs(inputs.scale) > largest).any()):
        words = f"Q * scale is clamped at {largest:.0f}, the largest fp16: hold it in float32"
        yield Mistake(words, lambda i: i._replace(q=(i.q.double() * i.scale).clamp(-largest, largest), scale=1.0))


def _flushed(smallest: float, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.masked_fill(tensor.abs() < smallest, 0.0)


# -- heads ------------------------------------------------------------------------------------------------------------


def _head_mistakes(inputs: Inputs) -> Iterator[Mistake]:
    """K and V of another head or batch."""
    kv_heads, batches = inputs.k.shape[1], inputs.q.shape[0]
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
    if k.shape == v.shape:
        yield Mistake("K and V are exchanged: look at the order of the arguments", lambda i: i._replace(k=i.v, v=i.k))
        yield Mistake("K is read in place of V: look at the pointer of V", lambda i: i._replace(v=i.k))
        yield Mistake("V is read in place of K: look at the pointer of K", lambda i: i._replace(k=i.v))
    if q.shape == k.shape:
        yield Mistake("Q and K are exchanged: look at the order of the arguments", lambda i: i._replace(q=i.k, k=i.q))
    if q.shape == v.shape:
        yield Mistake("Q and V are exchanged: look at the order of the arguments", lambda i: i._replace(q=i.v, v=i.q))
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.shape == (*q.shape[:3], v.shape[3]):
            words = f"the output is {name.upper()} itself"
            yield Mistake(words, arrange=lambda _, name=name: getattr(inputs, name).double())  # type: ignore[misc]
    whole = (q.shape[3] // tile * tile for tile in TILES)
    for kept in sorted({8, 16, 32, 64, q.shape[3] // 2, q.shape[3] - 8, q.shape[3] - 16, *whole}):
        if 0 < kept < q.shape[3]:
            words = f"Q K^T sums only the first {kept} of {q.shape[3]} dims: look at the loop over D"
            yield Mistake(words, lambda i, kept=kept: i._replace(q=i.q[..., :kept], k=i.k[..., :kept]))  # type: ignore[misc]
    for shift in (step * sign for step in (1, *TILES) for sign in (1, -1)):
        if abs(shift) < v.shape[2] and 2 * abs(shift) != v.shape[2]:
            words = f"P meets V {abs(shift)} keys {'earlier' if shift > 0 else 'later'}: look at the index of V's tile"
            yield Mistake(words, _replaced(("v",), lambda tensor, shift=shift: tensor.roll(shift, 2)))  # type: ignore[misc]

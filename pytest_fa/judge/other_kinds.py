"""Other kinds of attention than those that are judged: windows, soft caps, sinks and ALiBi, as a wrong output has them.

Until a part of attention judges one of them, its words say so, and what works.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch

from pytest_fa.attention import parts
from pytest_fa.attention.mistake import Mistake, Positions
from pytest_fa.attention.not_judged import remark
from pytest_fa.gpu.inputs import Inputs
from pytest_fa.judge.mistaken import Predictor, Selection, all_hidden, arranged
from pytest_fa.judge.truth import Truth

SOFT_CAPS = (5, 10, 15, 20, 25, 30, 40, 50, 100)
WINDOWS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
MIN_SINK_ROWS = 8  # per head; fewer rows have a sink that fits, whatever is wrong
SINK_STEPS = 40
EQUAL_SINKS = 0.02  # how much the sinks of heads may differ to be one number
WHOLE_COUNT = 0.02  # the distance of a number of keys from a whole one


def other_kinds(inputs: Inputs) -> Iterator[Mistake]:
    """The kinds of usual sizes, without those that the call has: the part of attention knows mistakes in its own."""
    for shift in () if _has(inputs, "window") else _shifts(inputs):
        for size in sorted({size + more for size in WINDOWS for more in (0, 1)}):
            yield from _windows(inputs, shift, size)
    words = "exp(0 - max) is added to the row sum: a key of zeros is counted, or an attention sink of 0 is on"
    if not _has(inputs, "sink"):
        yield Mistake(f"{words}{remark('sink')}", weigh=_with_sink)
    for cap in () if _has(inputs, "softcap") else SOFT_CAPS:
        words = f"the scores are {cap} tanh(S / {cap}): a soft cap of {cap} is on{remark('softcap')}"
        yield Mistake(words, score=partial(_soft_capped, inputs, cap))
    if not _has(inputs, "alibi"):
        yield from _alibi(inputs)


def _has(inputs: Inputs, name: str) -> bool:
    """Whether a call has a part of attention."""
    words = (word for part in parts.PARTS if part.name == name for word in part.words)
    return any(inputs.word(word) is not None for word in words)


def _with_sink(scores: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    s = scores.masked_fill(hidden, -math.inf)
    most = s.amax(-1, keepdim=True).clamp_min(0.0)  # the sink's score takes part
    p = torch.exp(s - most)
    return p, p.sum(-1, keepdim=True) + torch.exp(-most)


def _soft_capped(inputs: Inputs, cap: float, scores: torch.Tensor, positions: Positions) -> torch.Tensor:
    return cap * torch.tanh(parts.changed_scores(inputs, scores, positions) / cap)


# -- windows ----------------------------------------------------------------------------------------------------------


def _shifts(inputs: Inputs) -> tuple[int, ...]:
    """How many keys a query's own position is later: windows are aligned as the mask, and without one as either."""
    shift = inputs.k.shape[2] - inputs.q.shape[2]
    shifts = {"none": (0, shift), "top_left": (0,), "bottom_right": (shift,)}.get(inputs.word("causal"), (0,))
    return tuple(dict.fromkeys(shifts))


def _windows(inputs: Inputs, shift: int, size: int) -> Iterator[Mistake]:
    """A sliding window that hides keys of this case; without a mask, it may also hide those behind a query."""
    queries, keys, causal = inputs.q.shape[2], inputs.k.shape[2], inputs.word("causal")
    if not 0 < size < min(queries + shift, keys):
        return
    aligned = " from the bottom right" if shift and causal == "none" else ""
    words = f"only the last {size} keys up to the query are seen{aligned}: a sliding window is on{remark('window')}"
    yield Mistake(words, hide=partial(_outside_window, inputs, shift, size, math.inf))
    if causal == "none" and (size > 1 or shift):  # with one key, it would be the next window
        words = f"only the last {size} keys up to the query are seen{aligned}, and none ahead of it"
        words += f": a causal mask and a sliding window are on{remark('window')}"
        yield Mistake(words, hide=partial(_outside_window, inputs, shift, size, 1))
    if causal == "none" and not shift:
        words = f"only keys less than {size} away from the query are seen: a sliding window is on{remark('window')}"
        yield Mistake(words, hide=partial(_outside_window, inputs, shift, size, size))


def _outside_window(inputs: Inputs, shift: int, back: float, ahead: float, positions: Positions) -> torch.Tensor:
    distance = positions.queries + shift - positions.keys
    return all_hidden(inputs, positions) | (distance >= back) | (-distance >= ahead)


def likely_windows(
    predictor: Predictor,
    out: torch.Tensor,  # [batch, heads, seq_q, head_dim] float64
) -> Iterator[Mistake]:
    """Windows of the size that explains the last query of the first head best."""
    inputs = predictor.inputs
    if _has(inputs, "window"):
        return
    queries, keys = inputs.q.shape[2], inputs.k.shape[2]
    last = Selection(*(torch.tensor([index], device=out.device) for index in (0, 0, queries - 1)))
    p = predictor.weights(last)[0, 0, 0]  # [keys]
    weighted = p[:, None] * inputs.v[0, 0].double()
    for shift in _shifts(inputs):
        position = queries - 1 + shift  # the query's own key, which may be past the end
        if not 0 < position < keys + queries:
            continue
        # Row j is what the keys from j on give: those ahead of the query stay.
        sums, totals = (tensor.flip(0).cumsum(0).flip(0) for tensor in (weighted, p[:, None]))
        first = int((sums / totals.clamp_min(1e-300) - out[0, 0, -1]).square().sum(-1).argmin())
        yield from _windows(inputs, shift, position - first + 1)


# -- sinks ------------------------------------------------------------------------------------------------------------


def sinks(out: torch.Tensor, right: Truth, predictor: Predictor, selection: Selection) -> tuple[str, Truth] | None:
    """The score of a sink of each head that explains a selection best: words and result; None without enough rows."""
    batches, heads, rows = out.shape[:3]
    if batches * rows < MIN_SINK_ROWS or _has(predictor.inputs, "sink"):
        return None
    row_sum = predictor.row_sums(selection)  # log, [batch, heads, rows]
    power, product = right.out.square().sum(-1), (out * right.out).sum(-1)

    def remaining(sink: torch.Tensor) -> torch.Tensor:  # [heads]
        factors = torch.sigmoid(row_sum - sink[:, None])
        return (factors.square() * power - 2 * factors * product).nan_to_num().sum((0, 2))

    sink = torch.stack([torch.full_like(row_sum[0, :, 0], start) for start in range(-16, 17)])  # [starts, heads]
    sink = sink[torch.stack([remaining(each) for each in sink]).argmin(0), torch.arange(heads, device=out.device)]
    width = torch.full_like(sink, 1.0)
    for _ in range(SINK_STEPS):
        tried = torch.stack([sink - width, sink, sink + width])
        best = torch.stack([remaining(each) for each in tried]).argmin(0)
        sink = tried[best, torch.arange(heads, device=out.device)]
        width = torch.where(best == 1, width / 2, width)
    factors = torch.sigmoid(row_sum - sink[:, None])[..., None]
    result = arranged(lambda whole: factors * whole, right, right, predictor.inputs.output_dtype)
    return f"{_words_of_sinks(sink)}{remark('sink')}", result


def _words_of_sinks(sink: torch.Tensor) -> str:
    """One number if all heads have it; then the sum of a few keys of zeros is possible, too."""
    least, most = float(sink.min()), float(sink.max())
    if most - least > EQUAL_SINKS:
        values = ", ".join(f"{float(value):.3g}" for value in sink[:4]) + (", ..." if len(sink) > 4 else "")  # noqa: PLR2004
        return f"exp(s - max) is added to the row sum: an attention sink is on, s = {values} by head"
    middle = (least + most) / 2
    count = round(math.exp(middle))
    zeros = count > 0 and abs(math.exp(middle) - count) < WHOLE_COUNT * count
    also = f"{count} keys of zeros are counted, or " if zeros else ""
    return f"exp({middle:.3g} - max) is added to the row sum: {also}an attention sink of {middle:.3g} is on"


# -- ALiBi ------------------------------------------------------------------------------------------------------------


def _alibi(inputs: Inputs) -> Iterator[Mistake]:
    """A bias that grows with the distance of query and key, with the usual slopes of heads."""
    slopes = _slopes(inputs.q.shape[1])
    causal = inputs.word("causal")
    for shift in _shifts(inputs):
        aligned = " (bottom right)" if shift and causal == "none" else ""
        words = f"slope * distance of query and key is subtracted from the scores{aligned}"
        yield Mistake(f"{words}: ALiBi is on{remark('alibi')}", score=partial(_with_alibi, inputs, slopes, shift))
    if causal == "none":
        words = "slope * index of the key is added to the scores"
        yield Mistake(f"{words}: ALiBi is on{remark('alibi')}", score=partial(_with_alibi, inputs, slopes, None))


def _slopes(heads: int) -> list[float]:
    """2^(-8 / n), its square and so on for n heads; for another number than a power of two, some of twice as many."""
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (head + 1) / power) for head in range(power)]
    more = [2.0 ** (-4.0 * (head + 1) / power) for head in range(0, 2 * power, 2)]
    return [*slopes, *more][:heads]


def _with_alibi(
    inputs: Inputs, slopes: list[float], shift: int | None, scores: torch.Tensor, positions: Positions
) -> torch.Tensor:
    assert positions.heads is not None  # noqa: S101  # the diagnosis has them
    of_heads = scores.new_tensor(slopes)[positions.heads][:, None, None]
    bias = positions.keys if shift is None else -(positions.queries + shift - positions.keys).abs()
    return parts.changed_scores(inputs, scores, positions) + of_heads * bias

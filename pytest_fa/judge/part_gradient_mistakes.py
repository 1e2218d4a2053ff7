"""Find the likely cause of a wrong gradient of a bias or a sink: the known mistake that gives it.

These gradients are sums over batches, heads or queries, so each mistake is computed for the whole call, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from pytest_fa.attention import parts
from pytest_fa.attention.backward import OF_PARTS
from pytest_fa.attention.mistake import MAX_NAMES, TILES
from pytest_fa.gpu.inputs import Inputs
from pytest_fa.judge.gradients import Upstream
from pytest_fa.judge.mistaken_gradients import BackwardCall, Pass
from pytest_fa.judge.policies import rms
from pytest_fa.judge.truth import Truth

MAX_PAIRS = {"cuda": 2**24, "cpu": 2**21}  # of queries and keys of all heads, for which mistakes of a bias are computed
PART = 0.02  # of the way to a mistake's result that a gradient may be away from it
ROUNDINGS = 8.0  # times the error of rounding, by which it also may be
ALIKE = 2.0  # times the distance of the nearest mistake, up to which others are named, too
AXES = (("batch", "batches"), ("head", "heads"), ("query", "queries"))
OF_SINK = "dsink = sum of exp(sink - L) (dL - delta)"
WrongSum = tuple[str, torch.Tensor]  # words for a mistake, and the gradient that it gives


class AllRows(NamedTuple):
    """Figures of all rows of a call, [batch, heads, seq_q, 1] each."""

    delta: torch.Tensor
    dlse: torch.Tensor
    lse: torch.Tensor
    lse_of_keys: torch.Tensor  # without sinks


class AllPairs(NamedTuple):
    """Figures of all pairs of a call, [batch, heads, seq_q, seq_k] each."""

    p: torch.Tensor
    dp: torch.Tensor
    slope: torch.Tensor  # the derivative of the scores by the products


def explain_part_gradients(
    written: Mapping[str, torch.Tensor], truths: Mapping[str, Truth], inputs: Inputs, upstream: Upstream
) -> dict[str, tuple[str, ...]]:
    """Sentences for those of `written`, wrong gradients of a bias or a sink, that a known mistake gives."""
    found: dict[str, tuple[str, ...]] = {}
    names = [name for name in written if name in OF_PARTS]
    if not names:
        return found
    calls = [BackwardCall.of(inputs, upstream, batch) for batch in range(len(inputs.q))]
    rows = AllRows(*(torch.cat([getattr(call, name) for call in calls]) for name in AllRows._fields))
    for name in names:
        results = [*_factors(truths[name].out, name, inputs)]
        results += _of_sink(rows, inputs) if name == "dsink" else _of_bias(rows, calls, inputs)
        if words := _nearest(written[name].double(), truths[name], results):
            found["; or ".join(words)] = (name,)
    return found


def _nearest(written: torch.Tensor, truth: Truth, results: list[WrongSum]) -> list[str]:
    """The words of the mistakes whose results are nearest to a gradient, if it is at one of them."""
    size = rms(truth.out)
    noise = 0.0 if truth.float32_error is None else rms(truth.float32_error[0])
    relative = math.hypot(rms(truth.same_precision - truth.out), noise) / max(size, torch.finfo(truth.out.dtype).tiny)
    distances: dict[str, float] = {}
    for words, result in results:
        away, distance = rms(result - truth.out), rms(written - result)
        rounding = ROUNDINGS * relative * max(size, rms(result))
        if math.isfinite(away) and away > 2 * rounding and distance <= max(PART * away, rounding):
            distances[words] = max(distance, rounding / ROUNDINGS)
    least = min(distances.values(), default=0.0)
    return [words for words, distance in distances.items() if distance <= ALIKE * least][:MAX_NAMES]


def _factors(right: torch.Tensor, name: str, inputs: Inputs) -> Iterator[WrongSum]:
    """The right gradient with a wrong factor."""
    scale, log2e = inputs.scale, 1 / math.log(2)
    for words, factor in (
        (f"{name} is 0: it is never written, or what is written is never added up", 0.0),
        (f"{name} has the wrong sign", -1.0),
        (f"{name} is twice the right one: added to a buffer that is not zeroed, or added twice", 2.0),
        (f"{name} is half of the right one", 0.5),
        (f"{name} is multiplied by the softmax scale, and must not be", scale),
        (f"{name} is multiplied twice by the softmax scale, and must not be", scale**2),
        (f"{name} is divided by the softmax scale", 1 / scale if scale else math.inf),
        (f"{name} is multiplied by log2 e once too often", log2e),
        (f"{name} is multiplied by ln 2 once too often", 1 / log2e),
    ):
        yield words, factor * right


# -- the sink ---------------------------------------------------------------------------------------------------------


def _of_sink(rows: AllRows, inputs: Inputs) -> Iterator[WrongSum]:
    given, inputs = inputs, inputs.exact().meant()
    sink = inputs.word("sink").double()  # [1, heads, 1, 1]
    factor = float(parts.meant("sink", torch.ones(()), given.conventions))  # of the gradient by the sink as it is given
    p, change, has_dlse = (sink - rows.lse).exp(), rows.dlse - rows.delta, bool(rows.dlse.any())

    def summed(terms: torch.Tensor) -> torch.Tensor:
        return factor * terms.sum((0, 2), keepdim=True)

    right = p * change
    yield f"exp(sink - L) is missing in {OF_SINK}", summed(change)
    yield f"L is missing in {OF_SINK}: it is not normalised", summed(sink.exp() * change)
    yield (
        f"L lacks the sink in {OF_SINK}: use the log-sum-exp of the call",
        summed((sink - rows.lse_of_keys).exp() * change),
    )
    yield (
        f"sink is multiplied by the softmax scale in {OF_SINK}",
        summed((inputs.scale * sink - rows.lse).exp() * change),
    )
    if has_dlse:
        yield f"delta is missing in {OF_SINK}", summed(p * rows.dlse)
        yield f"dL, the gradient of the log-sum-exp, is ignored in {OF_SINK}", summed(-p * rows.delta)
        yield f"dL, the gradient of the log-sum-exp, is subtracted in {OF_SINK}", summed(-p * (rows.dlse + rows.delta))
    yield from _one_of_many("dsink", right, (0, 2), factor)
    if right.shape[1] > 1:
        yield "dsink is that of the next head: look at its index", summed(right).roll(-1, 1)
        yield "dsink is that of the head before it: look at its index", summed(right).roll(1, 1)
        yield "dsink is the sum over all heads", summed(right).sum(1, keepdim=True).expand_as(summed(right))
    queries = right.shape[2]
    for tile in (size for size in TILES if size < queries):
        last = (queries - 1) // tile * tile
        yield f"only the last tile of {tile} queries is in dsink: add up all tiles", summed(right[:, :, last:])
        yield f"only the first tile of {tile} queries is in dsink: add up all tiles", summed(right[:, :, :tile])
        yield f"the last tile of {tile} queries is missing in dsink", summed(right[:, :, :last])
    if queries > 1:
        yield "the last query is missing in dsink", summed(right[:, :, :-1])


def _one_of_many(name: str, terms: torch.Tensor, axes: tuple[int, ...], factor: float = 1.0) -> Iterator[WrongSum]:
    """Sums that lack all but one index of an axis, or are means over it."""
    whole = terms.sum(axes, keepdim=True)
    for axis in axes:
        count, (one, several) = terms.shape[axis], AXES[axis]
        if count > 1:
            others = tuple(other for other in axes if other != axis)
            rest = factor * (terms.sum(others, keepdim=True) if others else terms)
            yield f"{name} is that of {one} 0 alone: add up all {several}", rest.narrow(axis, 0, 1)
            yield f"{name} is that of the last {one} alone: add up all {several}", rest.narrow(axis, count - 1, 1)
            yield f"{name} is the mean over the {several}, it must be their sum", factor * whole / count


# -- the bias ---------------------------------------------------------------------------------------------------------


def _of_bias(rows: AllRows, calls: list[BackwardCall], inputs: Inputs) -> Iterator[WrongSum]:
    inputs = inputs.exact().meant()
    bias, queries, keys = inputs.word("attn_bias"), inputs.q.shape[2], inputs.k.shape[2]
    pairs_count = inputs.q.shape[0] * inputs.q.shape[1] * queries * keys
    if pairs_count > MAX_PAIRS[inputs.q.device.type]:
        return
    pairs = _pairs_of(calls, queries, keys)
    axes = tuple(axis for axis in range(3) if bias.shape[axis] == 1)
    is_capped = any(part.is_last(inputs) for part in parts.PARTS)  # the bias comes before the cap
    slope = pairs.slope if is_capped else torch.ones_like(pairs.slope)
    change = pairs.dp - rows.delta + rows.dlse
    right = pairs.p * change * slope
    visible = (pairs.p > 0).double()

    def summed(terms: torch.Tensor) -> torch.Tensor:
        return terms.sum(axes, keepdim=True) if axes else terms

    of_ds = "dbias = P (dP - delta)"
    yield f"delta is missing in {of_ds}", summed(pairs.p * (pairs.dp + rows.dlse) * slope)
    yield f"P is missing in {of_ds}", summed(visible * change * slope)
    yield "dbias is P, it must be dS = P (dP - delta)", summed(pairs.p)
    yield "dbias is dP, it must be dS = P (dP - delta)", summed(pairs.dp)
    if bool(rows.dlse.any()):
        ignored, subtracted = ((pairs.dp - rows.delta - times * rows.dlse) * pairs.p * slope for times in (0, 1))
        yield "dL, the gradient of the log-sum-exp, is ignored in dbias", summed(ignored)
        yield "dL, the gradient of the log-sum-exp, is subtracted in dbias", summed(subtracted)
    if inputs.word("softcap"):
        words = "is missing in dbias" if is_capped else "is in dbias, and must not be: the bias comes after the cap"
        other = pairs.p * change * (1.0 if is_capped else pairs.slope)
        yield f"the derivative of the soft cap, 1 - tanh(S / cap)^2, {words}", summed(other)
    if queries == keys and bias.shape[2] > 1:
        yield "dbias is transposed: look at the order of its rows and columns", summed(right).mT
    yield from _one_of_many("dbias", right, axes)
    for axis in (0, 1):
        if bias.shape[axis] > 1:
            one = AXES[axis][0]
            yield f"dbias is that of the next {one}: look at its index", summed(right).roll(-1, axis)
            yield f"dbias is that of the {one} before it: look at its index", summed(right).roll(1, axis)


def _pairs_of(calls: list[BackwardCall], queries: int, keys: int) -> AllPairs:
    """The figures of all pairs, from those of each batch."""
    device = calls[0].out.device
    places = torch.arange(queries, device=device), torch.arange(keys, device=device)
    passes = [Pass(call, *places, {}) for call in calls]
    return AllPairs(*(torch.cat([getattr(each, name) for each in passes]) for name in AllPairs._fields))

"""Mistakes in rounding: their output differs from the right one by little more than right roundings do.

The output of such a kernel cannot be computed to the last bit, because P is rounded against maxima that the diagnosis
does not know.  So each mistake here is compared by what it does on average.  Truncation makes every value smaller: the
error has the sign opposite to that of the value, by half a unit in the last place on average.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch

from pytest_fa.attention import parts
from pytest_fa.attention.mistake import Mistake, Positions, exponentials
from pytest_fa.catalog.variant import Rounding
from pytest_fa.gpu.inputs import Inputs, bits_of
from pytest_fa.judge.memory_mistakes import DTYPE_NAMES
from pytest_fa.judge.mistaken import Predictor, Selection, of_heads
from pytest_fa.judge.policies import ulps
from pytest_fa.judge.truth import Truth

STEP = 16  # products that a tensor core adds before it rounds
SPLIT_TILES = (32, 64, 128, 256)
SPLITS = (2, 3, 4, 8)


def rounding_mistakes(inputs: Inputs, rounds: tuple[Rounding, ...]) -> Iterator[Mistake]:
    """Values of a 16-bit kernel that are truncated, or rounded where the manifest declares no rounding."""
    dtype = inputs.output_dtype
    if dtype not in DTYPE_NAMES:
        return
    name = DTYPE_NAMES[dtype]
    nearest = "round to nearest"
    truncated_p, truncated_out = partial(_truncated_p, dtype), partial(_truncated_out, dtype)
    yield Mistake(f"P is truncated to {name}, which makes every row smaller: {nearest}", weigh=truncated_p)
    yield Mistake(f"the output is truncated to {name}, toward zero: {nearest}", arrange=truncated_out)
    words = f"P and the output are truncated to {name}, toward zero: {nearest}"
    yield Mistake(words, weigh=truncated_p, arrange=truncated_out)
    yield Mistake(f"the row sum is held in {name}: hold it in float32", weigh=partial(_rounded_sum, dtype))
    is_exact_scale = math.frexp(abs(inputs.scale))[0] in (0.0, 0.5)
    if "s" not in rounds:
        remedy = "keep S in float32, or declare `rounds: [s]` if you mean it"
        yield Mistake(f"S is rounded to {name}: {remedy}", score=partial(_rounded_scores, inputs, dtype, 1.0))
        if not is_exact_scale:
            words = f"Q K^T is rounded to {name} before the scale: {remedy}"
            yield Mistake(words, score=partial(_rounded_scores, inputs, dtype, inputs.scale))
    if "q" not in rounds and not is_exact_scale:
        words = f"Q * scale is rounded to {name}: scale S in float32, or declare `rounds: [q]` if you mean it"
        yield Mistake(words, lambda i: i._replace(q=(i.q.double() * i.scale).to(dtype), scale=1.0))


def _truncated_p(dtype: torch.dtype, scores: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    p = exponentials(scores, hidden)
    rounded = p.to(dtype)
    lower = (bits_of(rounded) - 1).view(dtype)  # of a positive number
    return torch.where(rounded.double() > p, lower, rounded).double(), p.sum(-1, keepdim=True)


def _truncated_out(dtype: torch.dtype, whole: torch.Tensor) -> torch.Tensor:
    """What truncation gives on average: half a unit in the last place less, and nothing for a number of the dtype."""
    shorter = whole - whole.sign() * ulps(whole.abs(), dtype) / 2
    return torch.where(whole.to(dtype).double() == whole, whole, shorter)


def _rounded_sum(dtype: torch.dtype, scores: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    p = exponentials(scores, hidden)
    return p, p.sum(-1, keepdim=True).to(dtype).double()


def _rounded_scores(
    inputs: Inputs, dtype: torch.dtype, scale: float, scores: torch.Tensor, positions: Positions
) -> torch.Tensor:
    rounded = (scores / scale).to(dtype).double() * scale
    return parts.changed_scores(inputs, rounded, positions)


# -- sums -------------------------------------------------------------------------------------------------------------


def half_sums(predictor: Predictor, selection: Selection, step: int = STEP) -> Iterator[tuple[str, Truth]]:
    """What sums in 16 bits give on the selected part, each with its words; the last one has all sums so.

    Sums are rounded after each `step` terms.
    """
    inputs = predictor.inputs
    dtype, right = inputs.output_dtype, predictor.predict(Mistake(""), selection)
    if dtype not in DTYPE_NAMES:
        return
    name = DTYPE_NAMES[dtype]
    v = of_heads(inputs.v, inputs.q, selection).double()
    exact = predictor.weights(selection)
    of_sinks = predictor.sink_weights(selection)[..., None]
    sums = exact.sum(-1, keepdim=True) + of_sinks

    def truth_of(products: torch.Tensor, sums: torch.Tensor) -> Truth:
        out = torch.where(sums > 0, products / sums, 0.0)
        return right._replace(out=out, same_precision=out.to(dtype).double())

    for keys in _split_sizes(inputs.k.shape[2]):
        words = f"the sums P V of each {keys} keys are kept in {name} before the division: keep partial sums in float32"
        yield words, truth_of(_partial_sums(exact, v, keys, dtype), sums)
    remedy = "accumulate in float32"
    yield (
        f"P V is accumulated in {name}: {remedy}",
        truth_of(accumulated(exact.to(dtype).double(), v, dtype, step), sums),
    )
    scores = accumulated(
        selection.of(inputs.q).double(), of_heads(inputs.k, inputs.q, selection).double().transpose(2, 3), dtype, step
    )
    p = predictor.weights_of(scores * inputs.scale, selection)
    remedy = f"{remedy}, or declare `rounds: [s]` if you mean S to be in {name}"
    yield f"Q K^T is accumulated in {name}: {remedy}", truth_of(p @ v, p.sum(-1, keepdim=True) + of_sinks)
    products = accumulated(p.to(dtype).double(), v, dtype, step)
    yield f"Q K^T and P V are accumulated in {name}: {remedy}", truth_of(products, p.sum(-1, keepdim=True) + of_sinks)


def _split_sizes(keys: int) -> list[int]:
    sizes = {*SPLIT_TILES, *(-(-keys // splits) for splits in SPLITS)}
    return sorted(size for size in sizes if STEP <= size < keys)


def _partial_sums(p: torch.Tensor, v: torch.Tensor, keys: int, dtype: torch.dtype) -> torch.Tensor:
    """P V, where the sum of each part of the keys, against the maximum of that part, is rounded."""
    total = torch.zeros((*p.shape[:3], v.shape[3]), dtype=p.dtype, device=p.device)
    for start in range(0, p.shape[3], keys):
        part = slice(start, start + keys)
        largest = p[..., part].amax(-1, keepdim=True)
        against_own = _rounded(p[..., part] / largest.clamp_min(1e-300), dtype)
        total += _rounded(against_own @ v[:, :, part], dtype) * largest
    return total


def accumulated(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype, step: int) -> torch.Tensor:
    """The product of two matrices, whose sum is rounded after each `step` terms."""
    total = torch.zeros((*left.shape[:3], right.shape[3]), dtype=left.dtype, device=left.device)
    for start in range(0, left.shape[3], step):
        part = slice(start, start + step)
        total = _rounded(total + left[..., part] @ right[:, :, part], dtype)
    return total


def _rounded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype).double()

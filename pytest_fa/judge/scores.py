"""Scores, scale * Q K^T, as an output of their own: truth, same-precision reference, and recognisable mistakes.

The policy `same_precision` judges scores as it judges attention.  Their same-precision reference rounds once, at the
end, so the bounds allow little more than that rounding.  The error of a float32 sum of head_dim products is negligible
in comparison, except for fp32, where it is the error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from pytest_fa.attention import parts
from pytest_fa.attention.mistake import Mistake
from pytest_fa.gpu.inputs import Inputs
from pytest_fa.judge.float32_error import TF32_SHRINK, UNIT, Float32Error, score_variance
from pytest_fa.judge.mistaken import arranged
from pytest_fa.judge.truth import Truth

SCALE_FACTORS = ((1.01, "1 % too large"), (0.99, "1 % too small"))


def make_scores_truth(inputs: Inputs, *, tf32: bool = False) -> Truth:
    """Compute scores in float64, and as same-precision reference the same rounded to the dtype.

    V and the mask are not read.  For fp32, the truth includes the size of the error of float32 sums, with `tf32` also
    that of inputs rounded to tf32.
    """
    inputs = inputs.meant()
    out = _scores(inputs.q, inputs.k, inputs.scale)
    rms_k = inputs.k.double().square().mean((-1, -2)).sqrt()[..., None]  # [batch, kv_heads, 1]
    rms_k = rms_k.repeat_interleave(inputs.q.shape[1] // inputs.k.shape[1], dim=1)
    row_size = abs(inputs.scale) * inputs.q.double().square().sum(-1).sqrt() * rms_k  # [batch, heads, seq_q]
    error = _float32_error(inputs, out, tf32=tf32) if inputs.q.dtype == torch.float32 else None
    return Truth(out, out.to(inputs.q.dtype).double(), inputs.q.shape[3], row_size, float32_error=error)


def _float32_error(inputs: Inputs, out: torch.Tensor, *, tf32: bool) -> Float32Error:
    k = inputs.k.double().repeat_interleave(inputs.q.shape[1] // inputs.k.shape[1], dim=1)
    variance = score_variance(inputs.q.double(), k, inputs.scale, tf32=tf32) + (UNIT * out) ** 2
    return Float32Error(variance.sqrt(), 2 * TF32_SHRINK * out.abs() if tf32 else torch.zeros_like(out))


def score_mistakes(inputs: Inputs) -> Iterator[Mistake]:
    """Common mistakes of scores; each changes the inputs or moves the elements of the output."""
    yield from parts.other_conventions(inputs)
    q, k, scale = inputs.q, inputs.k, inputs.scale
    scales = {scale * factor: f"the scale is {words}" for factor, words in SCALE_FACTORS}
    scales[1.0] = "the scale is not applied"
    if math.isclose(scale, q.shape[3] ** -0.5):
        scales[scale * scale] = "the scale is 1/D, not 1/sqrt(D): look whether it is applied twice"
    for value, words in scales.items():
        yield Mistake(words, lambda inputs, value=value: inputs._replace(scale=value))  # type: ignore[misc]
    if k.shape[2] == k.shape[3]:
        words = "K is transposed once too often, or not at all"
        yield Mistake(words, lambda inputs: inputs._replace(k=inputs.k.transpose(2, 3)))
    if q.shape[2] == k.shape[2]:
        words = "the output is transposed: queries and keys are exchanged"
        yield Mistake(words, arrange=lambda scores: scores.transpose(2, 3))


def mistaken_scores(mistake: Mistake, inputs: Inputs, *, tf32: bool = False) -> Truth:
    """The result of a mistake, in the form of a truth."""
    truth = make_scores_truth(mistake.change(inputs) if mistake.change else inputs, tf32=tf32)
    return arranged(mistake.arrange, truth, truth, inputs.q.dtype) if mistake.arrange else truth


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """The scores, [batch, heads, seq_q, seq_k] float64."""
    per_head = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return (q.double() * scale) @ per_head.transpose(2, 3)

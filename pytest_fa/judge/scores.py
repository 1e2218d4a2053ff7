"""Scores, scale * Q K^T, as an output of their own: truth, same-precision reference, and recognisable mistakes.

The policy `same_precision` judges scores as it judges attention.  Their same-precision reference rounds once, at the
end, so the bounds allow little more than that rounding.  The error of a float32 sum of head_dim products is negligible
in comparison, except for fp32, where it is the error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from pytest_fa.judge.float32_error import TF32_SHRINK, UNIT, Float32Error, score_variance
from pytest_fa.judge.truth import Truth
from pytest_fa.run.inputs import Inputs

SCALE_FACTORS = ((1.01, "1 % too large"), (0.99, "1 % too small"))


def make_scores_truth(inputs: Inputs, *, tf32: bool = False) -> Truth:
    """Compute scores in float64, and as same-precision reference the same rounded to the dtype.

    V and the mask are not read.  For fp32, the truth includes the size of the error of float32 sums, with `tf32` also
    that of inputs rounded to tf32.
    """
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


def score_mistakes(inputs: Inputs) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """Common mistakes, each with a function that computes the output it would give."""
    q, k, _, scale, _ = inputs
    for factor, words in SCALE_FACTORS:
        yield f"the scale is {words}", lambda factor=factor: _scores(q, k, scale * factor)  # type: ignore[misc]
    yield "the scale is not applied", lambda: _scores(q, k, 1.0)
    if math.isclose(scale, q.shape[3] ** -0.5):
        yield "the scale is 1/D, not 1/sqrt(D): look whether it is applied twice", lambda: _scores(q, k, scale * scale)
    if k.shape[1] not in (1, q.shape[1]):
        order = torch.arange(q.shape[1], device=q.device) % k.shape[1]
        words = "query heads are mapped to key heads modulo, not in groups: look at h % kv_heads"
        yield words, lambda: _scores(q, k[:, order], scale)
    if k.shape[2] == k.shape[3]:
        yield "K is transposed once too often, or not at all", lambda: _scores(q, k.transpose(2, 3), scale)
    if q.shape[2] == k.shape[2]:
        yield "the output is transposed: queries and keys are exchanged", lambda: _scores(q, k, scale).transpose(2, 3)


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """The scores, [batch, heads, seq_q, seq_k] float64."""
    per_head = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return (q.double() * scale) @ per_head.transpose(2, 3)

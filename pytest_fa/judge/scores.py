"""Scores alone, scale * q k^T: their truth and same-precision reference, and the mistakes whose result can be told.

The policy `same_precision` judges them as it judges attention.  The same-precision reference rounds once, at the end, so what is allowed is
little more than that rounding; a sum of head_dim products in float32 is off by next to nothing beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from pytest_fa.judge.truth import Truth
from pytest_fa.run.inputs import Inputs

SCALE_FACTORS = ((1.01, "1 % too large"), (0.99, "1 % too small"))


def make_scores_truth(inputs: Inputs) -> Truth:
    """Truth in float64, and the same-precision reference: the truth rounded to the dtype.  V and the mask are not read."""
    out = _scores(inputs.q, inputs.k, inputs.scale)
    rms_k = inputs.k.double().square().mean((-1, -2)).sqrt()[..., None]  # [batch, kv_heads, 1]
    rms_k = rms_k.repeat_interleave(inputs.q.shape[1] // inputs.k.shape[1], dim=1)
    row_size = abs(inputs.scale) * inputs.q.double().square().sum(-1).sqrt() * rms_k  # [batch, heads, seq_q]
    return Truth(out, out.to(inputs.q.dtype).double(), inputs.q.shape[3], row_size)


def score_mistakes(inputs: Inputs) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """Common mistakes, each with the output that it would give."""
    q, k, _, scale, _ = inputs
    for factor, words in SCALE_FACTORS:
        yield f"the scale is {words}", lambda factor=factor: _scores(q, k, scale * factor)  # type: ignore[misc]
    yield "the scale is not applied", lambda: _scores(q, k, 1.0)
    if k.shape[2] == k.shape[3]:
        yield "K is transposed once too often, or not at all", lambda: _scores(q, k.transpose(2, 3), scale)
    if q.shape[2] == k.shape[2]:
        yield "the output is transposed: queries stand where keys should", lambda: _scores(q, k, scale).transpose(2, 3)


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """[batch, heads, seq_q, seq_k] float64."""
    per_head = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return (q.double() * scale) @ per_head.transpose(2, 3)

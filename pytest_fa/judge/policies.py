"""Tolerance policies: an output's errors to bounds that hold or do not.  Every comparison fails on NaN.

`measured` compares with the error that an ideal kernel of the same precision makes on the same data, so it needs no
number that somebody picked per shape.  `absolute` is the older fixed threshold, kept for comparison with old results.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from pytest_fa.errors import UsageProblem
from pytest_fa.judge.truth import Truth
from pytest_fa.report.record import Bound

ABSOLUTE_MAX_DIFF = 0.002

# Significand bits after the leading one, and the exponent of the smallest subnormal (IEEE 754 binary16; bfloat16).
_FRACTION_BITS = {torch.float16: 10, torch.bfloat16: 7}
_SMALLEST_EXPONENT = {torch.float16: -24, torch.bfloat16: -133}
# What rounding alone may do to a head's gain, beside its random part.
_GAIN_FLOOR = {torch.float16: 3e-5, torch.bfloat16: 2.4e-4}


class Errors(NamedTuple):
    """out - truth, and what the yardstick's own error is."""

    out: torch.Tensor  # [batch, heads, seq_q, head_dim] float64
    error: torch.Tensor  # [batch, heads, seq_q, head_dim] float64, NaN and Inf where out has them
    truth: Truth
    dtype: torch.dtype


Policy = Callable[[Errors], tuple[Bound, ...]]


def measured(errors: Errors) -> tuple[Bound, ...]:
    """Maximum, RMS, each row's RMS and each head's gain against the yardstick's, with half an ulp for the rounding.

    With Y and R the yardstick's maximum and RMS error and u = ulp(max|truth|): max <= 2Y + u/2, RMS <= 1.5R + u/8, each
    row's RMS <= 5 max(the yardstick's in that row, R) + u/8, and per head |<out, truth>/<truth, truth> - 1| <=
    20 (R / rms of the head's truth) / sqrt(S_q D) + a floor.
    """
    truth = errors.truth.out
    ideal = errors.truth.yardstick - truth
    u = ulp(float(truth.abs().max()), errors.dtype)
    ideal_max, ideal_rms = float(ideal.abs().max()), rms(ideal)
    rows = errors.error.square().mean(-1).sqrt()  # [b, h, seq_q]
    rows_allowed = 5 * ideal.square().mean(-1).sqrt().clamp_min(ideal_rms) + u / 8
    return (
        _bound("finite", float((~errors.out.isfinite()).sum()), 0.0),
        _bound("max", float(errors.error.abs().max()), 2 * ideal_max + u / 2),
        _bound("rms", rms(errors.error), 1.5 * ideal_rms + u / 8),
        _worst("row rms", rows, rows_allowed),
        _gain(errors, ideal_rms),
    )


def absolute(errors: Errors) -> tuple[Bound, ...]:
    """max|out - truth| < 0.002, for fp16 only.  Raises `UsageProblem` for another dtype."""
    if errors.dtype != torch.float16:
        raise UsageProblem(f"policy 'absolute' judges fp16 only, the output is {errors.dtype}; use 'measured'")
    worst = float(errors.error.abs().max())
    return (
        _bound("finite", float((~errors.out.isfinite()).sum()), 0.0),
        Bound("max", _number(worst), ABSOLUTE_MAX_DIFF, worst < ABSOLUTE_MAX_DIFF),
    )


POLICIES: dict[str, Policy] = {"measured": measured, "absolute": absolute}


def ulp(magnitude: float, dtype: torch.dtype) -> float:
    """The distance between neighbouring values of `dtype` at `magnitude`."""
    smallest = _SMALLEST_EXPONENT[dtype]
    if magnitude == 0:
        return 2.0**smallest
    return 2.0 ** max(smallest, math.frexp(magnitude)[1] - 1 - _FRACTION_BITS[dtype])


def rms(tensor: torch.Tensor) -> float:
    """Root mean square."""
    return float(tensor.square().mean().sqrt())


def _gain(errors: Errors, ideal_rms: float) -> Bound:
    """How far each head is scaled: a lost key, a wrong scale or denominator moves the gain long before the maximum.

    A head whose truth is all zeros has no gain; the maximum rules there.
    """
    truth = errors.truth.out
    power = truth.square().sum((-1, -2))  # [b, h]
    has_gain = power > 0
    gain = ((errors.out * truth).sum((-1, -2)) / power - 1).abs()
    head_rms = truth.square().mean((-1, -2)).sqrt()
    samples = truth.shape[-1] * truth.shape[-2]
    allowed = 20 * (ideal_rms / head_rms) / math.sqrt(samples) + _GAIN_FLOOR[errors.dtype]
    return _worst("gain", gain.where(has_gain, 0.0), allowed.where(has_gain, 1.0))


def _worst(name: str, found: torch.Tensor, allowed: torch.Tensor) -> Bound:
    """The element that uses most of its own bound; one that is not finite comes first."""
    used = torch.where(found.isfinite(), found / allowed, torch.inf)
    at = int(used.argmax())
    return _bound(name, float(found.flatten()[at]), float(allowed.flatten()[at]))


def _bound(name: str, found: float, allowed: float) -> Bound:
    return Bound(name, _number(found), allowed, found <= allowed)


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None

"""Tolerance policies: an output's errors to bounds that hold or do not.  Every comparison fails on NaN.

`same_precision` compares with the error that an ideal kernel of the same precision makes on the same data, so it needs no
number that somebody picked per shape.  `fp8` is for kernels that round P to e4m3, by what that rounding does to a sum.
`absolute` is the older fixed threshold, kept for comparison with old results.  `tests/unit/judge/mutations.py` has the kernels that each
was tried on, right and wrong ones, and what it must reject.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from pytest_fa.errors import UsageProblem
from pytest_fa.judge.truth import Truth
from pytest_fa.records.judged import Bound

ABSOLUTE_MAX_DIFF = 0.002
FP8_RELATIVE_RMS = 0.035
FP8_OLD_MAX_ERR = 0.06
FP8_OLD_REL_ERR = 1e-3

# Significand bits after the leading one, and the exponent of the smallest subnormal (IEEE 754 binary16; bfloat16).
_FRACTION_BITS = {torch.float16: 10, torch.bfloat16: 7}
_SMALLEST_EXPONENT = {torch.float16: -24, torch.bfloat16: -133}
# What rounding alone may do to a head's gain, beside its random part.
_GAIN_FLOOR = {torch.float16: 3e-5, torch.bfloat16: 2.4e-4}
# And what tensor cores do to it, which drop what does not fit into float32 when they add: O shrinks by up to 2^-24 at
# each 16 keys.  Over 16384 keys torch's memory-efficient SDPA loses 3.5e-5 (fp16, D = 128, on an H200), a simulation
# with that rounding 2.7e-5, or 5.0e-5 with 8 keys at a time.
_GAIN_FLOOR_PER_KEY = 2.0**-24 / 16
_TINY = 1e-300  # in place of an RMS of 0


class Errors(NamedTuple):
    """out - truth, and what the same-precision reference's own error is."""

    out: torch.Tensor  # [batch, heads, seq_q, head_dim] float64
    error: torch.Tensor  # [batch, heads, seq_q, head_dim] float64, NaN and Inf where out has them
    truth: Truth
    dtype: torch.dtype


class PolicyResult(NamedTuple):
    """The bounds of a policy, and the error that it allows to each element."""

    bounds: tuple[Bound, ...]
    limit: float | torch.Tensor  # one for all, or [batch, heads, seq_q, head_dim]


Policy = Callable[[Errors], PolicyResult]


def same_precision(errors: Errors) -> PolicyResult:
    """Maximum, RMS, each row's RMS and each head's gain against the same-precision reference's, with half an ulp for the rounding.

    With Y and R the same-precision reference's maximum and RMS error and u = ulp(max|truth|): max <= 2Y + u/2, RMS <= 1.5R + u/8, each
    row as in `_rows`, and each head's gain <= 20 `_gain_noise` + `_gain_floor`.
    """
    ideal = errors.truth.same_precision - errors.truth.out
    u = ulp(float(errors.truth.out.abs().max()), errors.dtype)
    ideal_rms, most = rms(ideal), 2 * float(ideal.abs().max()) + u / 2
    gain_allowed = 20 * _gain_noise(errors, ideal, ideal_rms) + _gain_floor(errors)
    bounds = (
        _finite(errors),
        _bound("max", float(errors.error.abs().max()), most),
        _bound("rms", rms(errors.error), 1.5 * ideal_rms + u / 8),
        _rows(errors, ideal, ideal_rms),
        _gain(errors, gain_allowed),
    )
    return PolicyResult(bounds, most)


def fp8(errors: Errors) -> PolicyResult:
    """For kernels that round P to e4m3, whose inputs are the dequantised ones; the output is fp16 or bf16.

    Relative RMSE <= 3.5 %; per element |err| <= 0.12 sqrt(sum p^2 v^2) + max|v| / 512; per head a gain within
    0.002 + 0.3 / sqrt(S_q D).  Rounding P to four significant bits is off by 2.65 % in RMS, at random from key to key:
    the relative error of a sum of many keys is as large, and that of one element scatters with the root of the sum of
    squares.  1/512 is the smallest e4m3 number: what P is off by below the normal ones.  Right kernels use 0.74, 0.62
    and 0.57 of these.  They are for outputs that many weights make up: where V is zero but for keys that three queries
    see, P may be off by 6 % in all of them, and right kernels break the first and the last.  The thresholds of older
    results, 0.06 for the maximum and 1e-3 for the relative RMSE, are reported and not judged: right kernels break them.

    Raises `UsageProblem` where the truth has no `spread`.
    """
    truth, spread = errors.truth.out, errors.truth.spread
    if spread is None:
        raise UsageProblem("policy 'fp8' reads the truth's spread, and it has none; use make_truth(with_spread=True)")
    limit = 0.12 * spread.of_sum + spread.largest_v / 512  # [b, h, seq_q, d]
    relative = rms(errors.error) / max(rms(truth), _TINY)
    largest = float(errors.error.abs().max())
    bounds = (
        _finite(errors),
        _worst("max", errors.error.abs(), limit),
        _bound("relative rms", relative, FP8_RELATIVE_RMS),
        _gain(errors, torch.full_like(truth[..., 0, 0], 0.002 + 0.3 / math.sqrt(_samples(errors)))),
        _bound("max_err", largest, FP8_OLD_MAX_ERR, judged=False),
        _bound("rel_err", relative, FP8_OLD_REL_ERR, judged=False),
    )
    return PolicyResult(bounds, limit)


def absolute(errors: Errors) -> PolicyResult:
    """max|out - truth| < 0.002, for fp16 only.  Raises `UsageProblem` for another dtype."""
    if errors.dtype != torch.float16:
        raise UsageProblem(f"policy 'absolute' judges fp16 only, the output is {errors.dtype}; use 'same_precision'")
    worst = float(errors.error.abs().max())
    bounds = (_finite(errors), Bound("max", _number(worst), ABSOLUTE_MAX_DIFF, worst < ABSOLUTE_MAX_DIFF))
    return PolicyResult(bounds, ABSOLUTE_MAX_DIFF)


POLICIES: dict[str, Policy] = {"same_precision": same_precision, "absolute": absolute, "fp8": fp8}
READS_SPREAD = frozenset({"fp8"})  # the policies whose truth is made `with_spread`


def ulp(magnitude: float, dtype: torch.dtype) -> float:
    """The distance between neighbouring values of `dtype` at `magnitude`."""
    smallest = _SMALLEST_EXPONENT[dtype]
    if magnitude == 0:
        return 2.0**smallest
    return 2.0 ** max(smallest, math.frexp(magnitude)[1] - 1 - _FRACTION_BITS[dtype])


def _ulps(magnitude: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`ulp` of every element."""
    exponent = torch.frexp(magnitude).exponent - 1 - _FRACTION_BITS[dtype]
    exponent = exponent.where(magnitude > 0, _SMALLEST_EXPONENT[dtype])
    return torch.exp2(exponent.clamp_min(_SMALLEST_EXPONENT[dtype]).double())


def rms(tensor: torch.Tensor) -> float:
    """Root mean square."""
    return float(tensor.square().mean().sqrt())


def _finite(errors: Errors) -> Bound:
    return _bound("finite", float((~errors.out.isfinite()).sum()), 0.0)


def _rows(errors: Errors, ideal: torch.Tensor, ideal_rms: float) -> Bound:
    """Each row's RMS <= 5 max(the same-precision reference's in that row, r size) + ulp(max|truth's row|)/8.

    r = R / rms(truth) is the same-precision reference's relative error and the size the row's RMS, or sqrt(sum p^2) rms(v) if that is
    more: where V's columns are alike a row may come out as zero by chance, and its error does not.  Without that, right
    kernels broke the bound eightfold on such data.

    Each row by its own size: under a causal mask the first rows, which average few keys, are up to sqrt(S_k) times as
    large as the last, and by a bound of 5R + u/8 for all rows the last may lack a key: at 1023 and 4096 keys in fp16
    that used 0.44 and 0.19 of it, by this one it uses 1.7 and 1.5.  Right kernels use 0.25 at most on random data, and
    0.59 where all columns of V are alike, so that a row's error is one random number: hence 5 and not 3.
    """
    truth = errors.truth.out
    relative = ideal_rms / max(rms(truth), _TINY)
    expected = torch.maximum(_row_rms(ideal), relative * torch.maximum(_row_rms(truth), errors.truth.row_size))
    allowed = 5 * expected + _ulps(truth.abs().amax(-1), errors.dtype) / 8  # [b, h, seq_q]
    return _worst("row rms", _row_rms(errors.error), allowed)


def _row_rms(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.square().mean(-1).sqrt()  # [b, h, seq_q]


def _samples(errors: Errors) -> int:
    """Elements of one head."""
    return errors.out.shape[-1] * errors.out.shape[-2]


def _gain_noise(errors: Errors, ideal: torch.Tensor, ideal_rms: float) -> torch.Tensor:
    """How far random errors of the same-precision reference's size scale a head: (R / rms of the head's truth) / sqrt(S_q D), or more.

    More where few rows make up the head, as under a causal mask with V that is zero but for its last keys, where right
    kernels take 60 times the first: then sqrt(sum over rows of <the same-precision reference's error, truth>^2) / <truth, truth> / 2.
    More where rows are alike, as with a scale of zero, and are all rounded to the same side: then a tenth of the
    same-precision reference's own gain, of which a kernel may have twice as much.
    """
    truth = errors.truth.out
    power = truth.square().sum((-1, -2))  # [b, h]
    by_rows = (ideal * truth).sum(-1).square().sum(-1).sqrt() / power
    by_head = (ideal * truth).sum((-1, -2)).abs() / power
    return torch.maximum(torch.maximum(ideal_rms / power.sqrt(), by_rows / 2), by_head / 10)


def _gain_floor(errors: Errors) -> float:
    """What rounding may do to a head's gain beside its random part: 3e-5 (bf16 2.4e-4) + terms / 2^28."""
    return _GAIN_FLOOR[errors.dtype] + errors.truth.terms * _GAIN_FLOOR_PER_KEY


def _gain(errors: Errors, allowed: torch.Tensor) -> Bound:
    """How far each head is scaled, |<out, truth>/<truth, truth> - 1|, against what is `allowed`, [batch, heads].

    A lost key, a wrong scale or denominator moves it long before the maximum.  A head whose truth is all zeros has no
    gain; the maximum rules there.
    """
    truth = errors.truth.out
    power = truth.square().sum((-1, -2))  # [b, h]
    has_gain = power > 0
    gain = ((errors.out * truth).sum((-1, -2)) / power - 1).abs()
    return _worst("gain", gain.where(has_gain, 0.0), allowed.where(has_gain, 1.0))


def _worst(name: str, found: torch.Tensor, allowed: torch.Tensor) -> Bound:
    """The element that uses most of its own bound; one that is not finite comes first."""
    used = (found / allowed).masked_fill((found == 0) & (allowed == 0), 0.0)  # not NaN, which argmax would take
    used = torch.where(found.isfinite(), used, torch.inf)
    at = int(used.argmax())
    return _bound(name, float(found.flatten()[at]), float(allowed.flatten()[at]))


def _bound(name: str, found: float, allowed: float, *, judged: bool = True) -> Bound:
    return Bound(name, _number(found), allowed, found <= allowed, judged)


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None

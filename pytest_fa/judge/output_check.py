"""Compare one output with its truth: the verdict, with everything that a failure message needs."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
import torch

from pytest_fa.attention.backward import GRADIENTS, LIKE
from pytest_fa.attention.rows import RowTruth
from pytest_fa.errors import WrongResult
from pytest_fa.gpu.inputs import Output
from pytest_fa.judge.error_location import element_index, first_index
from pytest_fa.judge.padding import bound_of, cleared
from pytest_fa.judge.policies import POLICIES, Errors, policy_for, rms
from pytest_fa.judge.row_outputs import check_rows
from pytest_fa.judge.truth import Truth
from pytest_fa.records.checks import Bound, Check

UNBOUNDED = 1e99  # as large as a figure of a record can be


def check_output(out: torch.Tensor, truth: Truth, policy: str) -> Check:
    """Compare `out`, [batch, heads, seq_q, head_dim or seq_k], with its truth under a tolerance policy.

    A figure that is not finite is None in the result, and a bound on it does not hold.  Of
    padding, only whether it is as the manifest declares counts.
    """
    policy, padding = policy_for(truth, policy), truth.padding
    of_padding = () if padding is None else (bound_of(padding, out),)
    out = cleared(padding, out)
    errors = Errors(out.double(), out.double() - truth.out, truth, out.dtype)
    bounds, limit = POLICIES[policy](errors)
    bounds = (*bounds, *of_padding)
    ideal = truth.same_precision - truth.out
    size = errors.error.abs().nan_to_num(nan=math.inf, posinf=math.inf)  # NaN counts as the largest error
    bad = ~(size <= limit)
    worst = int(size.argmax())
    return Check(
        policy=policy,
        passed=all(bound.holds for bound in bounds if bound.enforced),
        bounds=tuple(map(_with_finite_limit, bounds)),
        max_abs_error=_finite(float(errors.error.abs().max())),
        rms_error=_finite(rms(errors.error)),
        same_precision_max_error=_limited(float(ideal.abs().max())),
        same_precision_rms_error=_limited(rms(ideal)),
        nonfinite_count=int((~errors.out.isfinite()).sum()),
        bad_count=int(bad.sum()),
        element_count=out.numel(),
        first_bad=first_index(bad),
        worst=element_index(worst, out),
        worst_got=_finite(float(errors.out.flatten()[worst])),
        worst_want=float(truth.out.flatten()[worst]),
        against=truth.against,
    )


MoreTruth = RowTruth | Truth  # of a further output, or of a gradient besides dq


def check_outputs(output: Output, truth: Truth, more: Mapping[str, MoreTruth], policy: str) -> Check:
    """The verdict on an output and those further ones whose truth is given."""
    check = check_output(output.out, truth, policy)
    if not LIKE.keys().isdisjoint(output.more):
        check = check.named(GRADIENTS[0])
    for name, of_more in more.items():
        check = with_more(check, name, output.more[name], of_more, policy)
    return check


def with_more(check: Check, name: str, written: torch.Tensor, truth: MoreTruth, policy: str) -> Check:
    """The verdict with that on a further output, [batch, heads, seq_q] float32, or on another gradient than dq."""
    if isinstance(truth, RowTruth):
        return check.with_rows(*check_rows(name, written, truth))
    return check.with_gradient(check_output(written, truth, policy).named(name))


def limits(out: torch.Tensor, truth: Truth, policy: str) -> float | torch.Tensor:
    """The largest error that a policy allows in each element of an output; one number if it is the same for all."""
    return POLICIES[policy_for(truth, policy)](Errors(out.double(), out.double() - truth.out, truth, out.dtype)).limit


def require_finite(check: Check) -> None:
    """Raise `WrongResult` if the output has NaN or Inf."""
    if check.nonfinite_count:
        nonfinite, total = check.nonfinite_count, check.element_count
        of_gradient, what = (f" of {check.output}", "it") if check.output else ("", "the output")
        message = (
            f"{nonfinite} of {total} elements{of_gradient} are NaN or Inf ({what} was full of NaN before the call)"
        )
        raise WrongResult("finite", message)


def require_passed(check: Check, where: str = "", check_name: str = "") -> None:
    """Raise `WrongResult` unless the check passed.

    The exception names the check that detected the fault: `check_name` if given, otherwise the broken bounds.
    """
    if not check.passed:
        broken = tuple(dict.fromkeys(bound.kind for bound in check.bounds if bound.enforced and not bound.holds))
        raise WrongResult(check_name or broken, f"{check.complaint}{where}")


def _with_finite_limit(bound: Bound) -> Bound:
    """The bound as a record can have it: where the reference itself is not finite, nothing is allowed or everything."""
    if math.isfinite(bound.allowed):
        return bound
    return msgspec.structs.replace(bound, allowed=0.0 if math.isnan(bound.allowed) else UNBOUNDED)


def _limited(value: float) -> float:
    return value if math.isfinite(value) else UNBOUNDED


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

"""SDPA cross-checks: the backends of SDPA on the inputs of a wrong output, judged by the same policy."""

from __future__ import annotations

from pytest_fa.candidate.module import open_forward
from pytest_fa.catalog.variant import Variant
from pytest_fa.gpu.device import synchronize
from pytest_fa.gpu.inputs import Inputs
from pytest_fa.judge.output_check import check_output
from pytest_fa.judge.truth import Truth
from pytest_fa.records.checks import CrossCheck


def cross_check_all(variants: tuple[Variant, ...], inputs: Inputs, truth: Truth, policy: str) -> tuple[CrossCheck, ...]:
    """Judge the output of each backend on these inputs.  For a backend that refuses them, `absent` has the reason."""
    return tuple(_cross_check(variant, inputs, truth, policy) for variant in variants)


def _cross_check(variant: Variant, inputs: Inputs, truth: Truth, policy: str) -> CrossCheck:
    try:
        with open_forward(variant, None) as forward:
            inputs = inputs.meant()
            out = forward(inputs.q, inputs.k, inputs.v, **inputs.keywords)
            synchronize(inputs.q.device)
        check = check_output(out, truth, policy)
    except Exception as problem:  # noqa: BLE001  # an error in a backend does not change the candidate's verdict
        reason = next(iter(str(problem).splitlines()), type(problem).__name__)
        return CrossCheck(variant.name, None, None, reason)
    return CrossCheck(variant.name, check.passed, check.max_abs_error, None)

"""Witnesses: SDPA's backends on the same inputs, judged by the same rule as the candidate that was found wrong."""

from __future__ import annotations

from pytest_fa.catalog.variant import Variant
from pytest_fa.judge.check import judge
from pytest_fa.judge.truth import Truth
from pytest_fa.records.judged import CrossCheck
from pytest_fa.run.device import synchronize
from pytest_fa.run.inputs import Inputs
from pytest_fa.run.module import open_forward


def cross_check_all(variants: tuple[Variant, ...], inputs: Inputs, truth: Truth, policy: str) -> tuple[CrossCheck, ...]:
    """What each backend makes of these inputs; one that refuses them is absent with its reason."""
    return tuple(_cross_check(variant, inputs, truth, policy) for variant in variants)


def _cross_check(variant: Variant, inputs: Inputs, truth: Truth, policy: str) -> CrossCheck:
    q, k, v, scale, causal = inputs
    try:
        with open_forward(variant, None) as forward:
            out = forward(q, k, v, scale=scale, causal=causal)
            synchronize(q.device)
        check = judge(out, truth, policy)
    except Exception as problem:  # noqa: BLE001  # whatever a cross-check does, the verdict is about another
        reason = next(iter(str(problem).splitlines()), type(problem).__name__)
        return CrossCheck(variant.name, None, None, reason)
    return CrossCheck(variant.name, check.passed, check.max_abs_error, None)

"""Witnesses: SDPA's backends on the same inputs, judged by the same rule as the candidate that was found wrong."""

from __future__ import annotations

from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import UnsupportedCase
from pytest_fa.judge.check import judge
from pytest_fa.judge.truth import Truth
from pytest_fa.report.record import Witness
from pytest_fa.run.device import synchronize
from pytest_fa.run.inputs import Inputs
from pytest_fa.run.module import open_forward


def hear(variants: tuple[Variant, ...], inputs: Inputs, truth: Truth, policy: str) -> tuple[Witness, ...]:
    """What each backend makes of these inputs; one that refuses them is absent with its reason."""
    return tuple(_hear(variant, inputs, truth, policy) for variant in variants)


def _hear(variant: Variant, inputs: Inputs, truth: Truth, policy: str) -> Witness:
    q, k, v, scale, causal = inputs
    try:
        with open_forward(variant, None) as forward:
            out = forward(q, k, v, scale=scale, causal=causal)
            synchronize(q.device)
    except (UnsupportedCase, RuntimeError) as problem:
        return Witness(variant.name, None, None, str(problem).splitlines()[0])
    check = judge(out, truth, policy)
    return Witness(variant.name, check.passed, check.max_abs_error, None)

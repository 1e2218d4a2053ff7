"""The log-sum-exp of every kernel of the ladder that declares it, on all its claims; and planted mistakes in one."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_fa.build.builder import ensure
from pytest_fa.build.target import native_arch
from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.claims import claim_cases
from pytest_fa.catalog.discover import discover
from pytest_fa.catalog.properties import property_case
from pytest_fa.catalog.variant import Variant
from pytest_fa.judge.pipeline import run_case
from pytest_fa.records.built import Build
from pytest_fa.wire.jobs import CaseJob, CaseResult
from tests.device.conftest import BuildSource, Built

KERNELS = Path(__file__).parents[2] / "kernels"
RUNGS = {
    variant.name: variant
    for variant in discover((KERNELS,)).variants.values()
    if variant.role == "candidate" and variant.is_built and "lse" in variant.returns
}
MINIMAL = (KERNELS / "minimal" / "kernel.cu").read_text(encoding="utf-8")
RIGHT = "(m + log2f(l)) * CUDART_LN2_F"
MISTAKES = {
    "log2": ("(m + log2f(l))", "the log-sum-exp is in base 2"),
    "no row max": ("log2f(l) * CUDART_LN2_F", "the row max is left out"),
    "twice ln 2": (f"{RIGHT} * CUDART_LN2_F", "multiplied by ln 2 once too often"),
}
REPEATS = 200
LONG = 1500  # queries and keys: the partial results of several groups, blocks or clusters are merged
MIN_RUNGS = 20


@pytest.fixture(scope="module")
def rungs(shared_cache: Path) -> dict[str, Built]:
    """The builds of all rungs that declare a log-sum-exp, built in one batch."""
    outcomes = ensure([(variant, native_arch(variant)) for variant in RUNGS.values()], shared_cache).outcomes
    assert {name for (name, _), outcome in outcomes.items() if not isinstance(outcome, Build)} == set()
    return {
        name: (RUNGS[name], str(shared_cache / outcome.library))
        for (name, _), outcome in outcomes.items()
        if isinstance(outcome, Build)
    }


def judged(variant: Variant, library: str, case: str) -> CaseResult:
    """The result of one judged case with a few repeats."""
    policy, repeats = variant.tolerance, REPEATS
    return run_case(
        CaseJob(variant, parse_case(case), library, "cuda", policy, checks_output=True, time=False, repeats=repeats)
    )


def test_the_ladder_declares_it() -> None:
    """Nearly all compiled rungs declare the log-sum-exp."""
    assert len(RUNGS) >= MIN_RUNGS


@pytest.mark.parametrize("name", RUNGS)
def test_lse_of_a_rung(rungs: dict[str, Built], name: str) -> None:
    """On every claim of its manifest, the output and the log-sum-exp are right, also in rows without keys."""
    variant, library = rungs[name]
    used = 0.0
    for case in claim_cases(variant, ()):
        result = judged(variant, library, case.id)
        assert (case.id, result.outcome, result.message) == (case.id, "ok", "")
        assert result.check is not None
        assert result.check.lse is not None
        used = max(used, result.check.bounds[-1].used or 0.0)
    print(f"{name}: {used:.2f} of the bound")  # noqa: T201  # shown with -rP


@pytest.mark.parametrize("name", RUNGS)
def test_nan_in_a_rung(rungs: dict[str, Built], name: str) -> None:
    """On every claim of its manifest, a NaN in a key or a query makes the log-sum-exp of each row that sees it NaN."""
    variant, library = rungs[name]
    policy, name_of_property = variant.tolerance, "contained_nan"
    for case in (*claim_cases(variant, ()), property_case(variant, LONG)):
        if case.seq_k == 0 or case.kv_heads == 1:  # there is no key, or no head that must stay as it is
            continue
        result = run_case(
            CaseJob(
                variant, case, library, "cuda", policy, checks_output=True, time=False, property_name=name_of_property
            )
        )
        assert (case.id, result.outcome, result.message) == (case.id, "ok", "")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_minimal(build_source: BuildSource, mistake: str) -> None:
    """A right output with a wrong log-sum-exp is caught by `lse` alone, and the cause is named."""
    expression, cause = MISTAKES[mistake]
    assert MINIMAL.count(RIGHT) == 1
    manifest = "supports: {dtype: [fp16], head_dim: [64]}\nreturns: [out, lse]\ndefines: {BLOCK_THREADS: 128}\n"
    source = MINIMAL.replace(RIGHT, expression).replace('#include "fa_forward.h"\n', "")
    variant, library = build_source("wrong_lse", source, manifest)
    result = judged(variant, library, "b1h2s150d64-fp16-seed0")
    assert (result.outcome, result.caught_by) == ("wrong", ("lse",))
    assert result.diagnosis is not None
    assert cause in result.diagnosis.cause

"""Cases of a suite are adapted to what a variant supports, and change in nothing else."""

from __future__ import annotations

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.fit import EVERYTHING, Fits, cases_for, fitted
from pytest_fa.catalog.plan import Plan
from pytest_fa.catalog.variant import Supports, Variant
from tests.factories import variant


def supporting(supports: Supports) -> Variant:
    """Return a variant with this `supports` and with all pairs of dtype and head_dim compiled."""
    pairs = tuple((dtype, dim) for dtype in supports.dtype for dim in supports.head_dim)
    return msgspec.structs.replace(variant("candidate"), supports=supports, instantiations=pairs)


@pytest.mark.parametrize(
    ("supports", "fits", "expected"),
    [
        (Supports(), EVERYTHING, "b2h4s77d64-fp16-causal-kv2-seed3"),
        (Supports(dtype=("bf16",)), EVERYTHING, "b2h4s77d64-bf16-causal-kv2-seed3"),
        (Supports(head_dim=(96, 128)), EVERYTHING, "b2h4s77d96-fp16-causal-kv2-seed3"),
        (Supports(layout=("bshd",)), EVERYTHING, "b2h4s77d64-fp16-causal-kv2-bshd-seed3"),
        (
            Supports(dtype=("bf16",), head_dim=(128,), layout=("bshd",)),
            EVERYTHING,
            "b2h4s77d128-bf16-causal-kv2-bshd-seed3",
        ),
        (Supports(dtype=("bf16",), head_dim=(128,)), ("head_dim", "layout"), "b2h4s77d64-fp16-causal-kv2-seed3"),
        (Supports(dtype=("bf16",), head_dim=(128,)), (), "b2h4s77d64-fp16-causal-kv2-seed3"),
    ],
    ids=["as it is", "dtype", "head_dim", "layout", "all three", "a selected dtype", "a named case"],
)
def test_an_unsupported_value_becomes_the_first_supported_one(supports: Supports, fits: Fits, expected: str) -> None:
    """Only the parameters in `fits` change; lengths, heads, mask and seed do not."""
    assert expected == fitted(supporting(supports), parse_case("b2h4s77d64-fp16-causal-kv2-seed3"), fits).id


def test_a_pair_that_is_not_compiled_is_not_used() -> None:
    """Of the compiled pairs of dtype and head_dim, one with the dtype of the case is preferred."""
    candidate = msgspec.structs.replace(
        supporting(Supports(dtype=("fp16", "bf16"), head_dim=(64, 128))), instantiations=(("bf16", 64), ("fp16", 128))
    )
    assert fitted(candidate, parse_case("b1h1s8d64-fp16-seed0"), EVERYTHING).id == "b1h1s8d128-fp16-seed0"


def test_a_plan_times_baselines_at_adapted_shapes_and_checks_no_shape_twice() -> None:
    """Two cases that become equal are checked once, and a baseline is timed at the adapted shape only."""
    cases = tuple(parse_case(f"b1h2s64d64-{dtype}-seed0") for dtype in ("fp16", "bf16"))
    candidate, baseline = supporting(Supports(head_dim=(128,))), variant("sdpa", role="baseline", kind="python")
    plan = Plan((candidate,), (baseline,), cases, fits=EVERYTHING)
    assert [case.id for _, case in plan.checks] == ["b1h2s64d128-fp16-seed0"]
    assert [case.shape_id for each, case in plan.timings if each is baseline] == ["b1h2s64d128-fp16"]


SHAPES = tuple(parse_case(f"b1h1s4d64-{dtype}-scores-seed0") for dtype in ("fp16", "bf16"))
SUITE = tuple(parse_case(f"b1h2s64d64-fp16-seed{seed}") for seed in (3, 5))


def probe() -> Variant:
    """Return a probe with two shapes."""
    supports = Supports(dtype=("fp16", "bf16"))
    return msgspec.structs.replace(supporting(supports), role="probe", computes="scores", cases=SHAPES)


@pytest.mark.parametrize(
    ("fits", "expected"),
    [
        (EVERYTHING, [f"b1h1s4d64-{dtype}-scores-seed{seed}" for dtype in ("fp16", "bf16") for seed in (3, 5)]),
        (("head_dim", "layout", "shape"), ["b1h1s4d64-fp16-scores-seed3", "b1h1s4d64-fp16-scores-seed5"]),
        ((), ["b1h2s64d64-fp16-scores-seed3", "b1h2s64d64-fp16-scores-seed5"]),
    ],
    ids=["a suite", "a selected dtype", "named cases"],
)
def test_a_probe_runs_on_its_own_shapes(fits: Fits, expected: list[str]) -> None:
    """A probe's shapes get the run's seeds and selected dtypes; a named case is only changed to what it computes."""
    assert expected == [case.id for case in cases_for(probe(), SUITE, fits)]


def test_a_case_of_scores_is_not_changed(snapshot: SnapshotAssertion) -> None:
    """A case whose id has `-scores` requires scores of every variant, and a candidate refuses it."""
    candidate = supporting(Supports())
    (case,) = cases_for(candidate, SHAPES[:1], ())
    assert snapshot == candidate.refuses(case)

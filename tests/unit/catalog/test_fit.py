"""A suite's case becomes what a variant takes, and nothing else of it changes."""

from __future__ import annotations

import msgspec
import pytest

from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.fit import EVERYTHING, Fits, cases_for, fitted
from pytest_fa.catalog.plan import Plan
from pytest_fa.catalog.variant import Supports, Variant
from tests.factories import variant


def taking(supports: Supports) -> Variant:
    """A variant that takes what it says, with every pair of dtype and head_dim compiled in."""
    pairs = tuple((dtype, dim) for dtype in supports.dtype for dim in supports.head_dim)
    return msgspec.structs.replace(variant("mine"), supports=supports, instantiations=pairs)


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
    ids=["as it is", "dtype", "head_dim", "layout", "all three", "a dtype that was asked for", "a named case"],
)
def test_what_is_not_taken_becomes_the_first_that_is(supports: Supports, fits: Fits, expected: str) -> None:
    """Only what may be fitted is, and lengths, heads, mask and seed stay."""
    assert expected == fitted(taking(supports), parse_case("b2h4s77d64-fp16-causal-kv2-seed3"), fits).id


def test_a_pair_that_is_not_compiled_in_is_not_made() -> None:
    """Of the pairs that are compiled in, the one of the case's dtype comes first."""
    mine = msgspec.structs.replace(
        taking(Supports(dtype=("fp16", "bf16"), head_dim=(64, 128))), instantiations=(("bf16", 64), ("fp16", 128))
    )
    assert fitted(mine, parse_case("b1h1s8d64-fp16-seed0"), EVERYTHING).id == "b1h1s8d128-fp16-seed0"


def test_a_plan_times_baselines_at_fitted_shapes_and_judges_no_shape_twice() -> None:
    """Two cases that become one are one, and what stands beside is timed at that shape too."""
    cases = tuple(parse_case(f"b1h2s64d64-{dtype}-seed0") for dtype in ("fp16", "bf16"))
    mine, beside = taking(Supports(head_dim=(128,))), variant("sdpa", role="baseline", kind="python")
    plan = Plan((mine,), (), (beside,), cases, fits=EVERYTHING)
    assert [case.id for _, case in plan.checks] == ["b1h2s64d128-fp16-seed0"]
    assert [case.shape_id for each, case in plan.timings if each is beside] == [
        "b1h2s64d64-fp16",
        "b1h2s64d64-bf16",
        "b1h2s64d128-fp16",
    ]


SHAPES = tuple(parse_case(f"b1h1s4d64-{dtype}-scores-seed0") for dtype in ("fp16", "bf16"))
SUITE = tuple(parse_case(f"b1h2s64d64-fp16-seed{seed}") for seed in (3, 5))


def probe() -> Variant:
    """A probe with two shapes."""
    supports = Supports(dtype=("fp16", "bf16"))
    return msgspec.structs.replace(taking(supports), role="probe", computes="scores", cases=SHAPES)


@pytest.mark.parametrize(
    ("fits", "expected"),
    [
        (EVERYTHING, [f"b1h1s4d64-{dtype}-scores-seed{seed}" for dtype in ("fp16", "bf16") for seed in (3, 5)]),
        (("head_dim", "layout", "shape"), ["b1h1s4d64-fp16-scores-seed3", "b1h1s4d64-fp16-scores-seed5"]),
        ((), ["b1h2s64d64-fp16-scores-seed3", "b1h2s64d64-fp16-scores-seed5"]),
    ],
    ids=["a suite", "a dtype that was asked for", "named cases"],
)
def test_a_probe_meets_its_own_shapes(fits: Fits, expected: list[str]) -> None:
    """With the run's seeds, in the dtypes that were asked for; a named case stays, of what the probe computes."""
    assert expected == [case.id for case in cases_for(probe(), SUITE, fits)]


def test_what_a_case_names_itself_stays() -> None:
    """A case that asks for scores asks everybody for scores, and a candidate refuses."""
    mine = taking(Supports())
    (case,) = cases_for(mine, SHAPES[:1], ())
    assert mine.refuses(case) == (
        f"{mine.name} does not support b1h1s4d64-fp16-scores: it computes attention, the case asks for scores"
    )

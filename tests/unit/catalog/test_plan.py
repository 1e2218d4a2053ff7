"""The plan pairs variants with cases: what is built, checked and timed, and what the user had asked for."""

from __future__ import annotations

import msgspec
import pytest

from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.discover import Catalog
from pytest_fa.catalog.fit import EVERYTHING
from pytest_fa.catalog.plan import AnyVariant, Plan, make_plan
from pytest_fa.catalog.select import select_variants
from pytest_fa.catalog.variant import BrokenVariant
from tests.factories import variant

CASES = tuple(parse_case(text) for text in ("b1h2s64d64-fp16-seed3", "b1h2s64d64-fp16-seed0", "b1h4s128d64-fp16-seed3"))


CATALOG = Catalog(
    {
        each.name: each
        for each in (
            variant("one"),
            variant("two", kind="python"),
            variant("slow", role="ablation"),
            variant("empty", role="overhead"),
            variant("sdpa", role="baseline", kind="python"),
        )
    },
    {"broken": BrokenVariant("broken", "its manifest cannot be read")},
)


def plan_for(*names: str) -> Plan:
    """The plan of `--fa-variant=names`."""
    return make_plan(CATALOG, select_variants(CATALOG, names), CASES)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ((), ["one", "broken"]),
        (("one",), ["one"]),
        (("two",), ["one"]),
        (("slow",), ["slow", "one"]),
        (("empty",), ["empty", "one"]),
        (("broken",), ["broken", "one"]),
    ],
)
def test_builds_are_the_sources_and_the_broken_manifests(asked: tuple[str, ...], expected: list[str]) -> None:
    """Every variant of the run that needs a compiler is built once, and a broken manifest fails there."""
    assert expected == [each.name for each in plan_for(*asked).builds]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ((), ["one", "two"]),
        (("slow",), ["slow", "one", "two"]),
        (("sdpa",), ["sdpa", "one", "two"]),
        (("empty",), ["one", "two"]),
        (("broken",), ["one", "two"]),
    ],
)
def test_checks_pair_each_judged_variant_with_each_case(asked: tuple[str, ...], expected: list[str]) -> None:
    """Every case, with all its seeds, meets every variant whose output means something."""
    pairs = [(each.name, case.id) for each, case in plan_for(*asked).checks]
    assert [(name, case.id) for name in expected for case in CASES] == pairs


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ((), ["one", "two", "empty", "sdpa"]),
        (("slow",), ["slow", "one", "two", "empty", "sdpa"]),
        (("sdpa",), ["sdpa", "one", "two", "empty"]),
        (("empty", "sdpa"), ["empty", "sdpa", "one", "two"]),
    ],
)
def test_timings_take_the_first_seed_of_each_shape(asked: tuple[str, ...], expected: list[str]) -> None:
    """Each shape is timed once per variant, at the first seed that was asked for, companions last and never twice."""
    pairs = [(each.name, case.id) for each, case in plan_for(*asked).timings]
    first = ["b1h2s64d64-fp16-seed3", "b1h4s128d64-fp16-seed3"]
    assert [(name, case) for name in expected for case in first] == pairs


@pytest.mark.parametrize(
    ("asked", "chosen", "companions"),
    [
        ((), {"one", "two", "broken"}, {"empty", "sdpa"}),
        (("one",), {"one"}, {"empty", "sdpa"}),
        (("one", "sdpa"), {"one", "sdpa"}, {"empty"}),
        (("slow",), {"slow"}, {"empty", "sdpa"}),
    ],
)
def test_what_was_asked_for_is_told_from_what_stands_beside(
    asked: tuple[str, ...], chosen: set[str], companions: set[str]
) -> None:
    """A companion that was asked for is a companion no more; a candidate that was not is neither."""
    plan = plan_for(*asked)
    everything: list[AnyVariant] = [*CATALOG.variants.values(), *CATALOG.broken.values()]
    assert chosen == {each.name for each in everything if plan.is_chosen(each)}
    assert companions == {each.name for each in everything if plan.is_companion(each)}


def test_a_redefined_variant_stands_beside_its_original() -> None:
    """`one@X=2` runs under its own name, and `one` itself stays among those that were not asked for."""
    redefined = msgspec.structs.replace(CATALOG.variants["one"], name="one@X=2", defines={"X": 2})
    plan = make_plan(CATALOG, (redefined,), CASES)
    expected = {"one@X=2": True, "one": False, "two": False}
    assert expected == {each.name: plan.is_chosen(each) for each in plan.runnable}


def test_a_second_manifest_of_the_same_name_still_fails() -> None:
    """A name that two manifests claim is not lost: the second claim stands among the builds with its problem."""
    twin = BrokenVariant("one", "variant 'one' is already defined in kernels/one")
    catalog = Catalog(CATALOG.variants, {"other/one": twin})
    plan = make_plan(catalog, select_variants(catalog, ()), CASES)
    assert [twin] == [each for each in plan.builds if isinstance(each, BrokenVariant)]


PROBE = msgspec.structs.replace(
    variant("probe", role="probe"), computes="scores", cases=(parse_case("b1h1s4d64-fp16-scores-seed0"),)
)
WITH_PROBE = Catalog({**CATALOG.variants, "probe": PROBE}, {})


def plan_with_probe(*names: str) -> Plan:
    """The plan of `--fa-variant=names` where there is a probe."""
    return make_plan(WITH_PROBE, select_variants(WITH_PROBE, names), CASES, fits=EVERYTHING)


def test_a_probe_is_not_run_by_default() -> None:
    """Candidates are."""
    assert "probe" not in [each.name for each, _ in plan_with_probe().checks]


def test_beside_scores_stands_the_floor_alone() -> None:
    """No baseline computes scores; the cost of a launch is the same."""
    timed = [each.name for each, case in plan_with_probe("probe").timings if case.computes == "scores"]
    assert timed == ["probe", "empty"]


def test_a_probe_is_never_gated() -> None:
    """Neither with candidates nor alone."""
    assert [each.name for each in plan_with_probe("probe", "one").gated] == ["one"]
    assert plan_with_probe("probe").gated == []


def test_cases_of_a_probe_are_counted_where_it_was_asked_for() -> None:
    """A probe alone is asked its own cases; beside a candidate the suite's are too."""
    own = ["b1h1s4d64-fp16-scores-seed3", "b1h1s4d64-fp16-scores-seed0"]
    assert [case.id for case in plan_with_probe("probe").asked] == own
    assert [case.id for case in plan_with_probe("one", "probe").asked] == [*(case.id for case in CASES), *own]
    assert plan_with_probe("one").asked == CASES


def test_a_probe_is_held_to_no_property_of_attention() -> None:
    """What is said of weights and values is no test of it."""
    properties = [(each.name, name) for each, name in plan_with_probe("probe", "one").properties]
    assert ("one", "hard_data") in properties
    assert ("probe", "hard_data") not in properties
    assert ("probe", "head_independence") in properties

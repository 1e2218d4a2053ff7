"""The plan pairs variants with cases: what is built, checked and timed, and what the user selected."""

from __future__ import annotations

import msgspec
import pytest

from pytest_fa.attention.dtypes import Dtype
from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.discover import Catalog
from pytest_fa.catalog.fit import EVERYTHING
from pytest_fa.catalog.plan import AnyVariant, Plan, make_plan
from pytest_fa.catalog.select import select_variants
from pytest_fa.catalog.variant import BrokenVariant, Device, Role, Supports, Variant
from pytest_fa.features.gate.opponents import gated_variants
from tests.factories import variant

CASES = tuple(parse_case(text) for text in ("b1h2s64d64-fp16-seed3", "b1h2s64d64-fp16-seed0", "b1h4s128d64-fp16-seed3"))


CATALOG = Catalog(
    {
        entry.name: entry
        for entry in (
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
    """Return the plan of `--fa-variant=names`."""
    return make_plan(CATALOG, select_variants(CATALOG, names), CASES)


@pytest.mark.parametrize(
    ("selected", "expected"),
    [
        ((), ["one", "broken"]),
        (("one",), ["one"]),
        (("two",), []),
        (("slow",), ["slow"]),
        (("empty",), ["empty"]),
        (("broken",), ["broken"]),
    ],
)
def test_builds_are_the_sources_and_the_broken_manifests(selected: tuple[str, ...], expected: list[str]) -> None:
    """Each selected variant that must be compiled is built once, and a broken manifest fails there."""
    assert expected == [each.name for each in plan_for(*selected).builds]


@pytest.mark.parametrize(
    ("selected", "expected"),
    [
        ((), ["one", "two"]),
        (("slow",), ["slow"]),
        (("sdpa",), ["sdpa"]),
        (("empty",), []),
        (("broken",), []),
    ],
)
def test_checks_pair_each_judged_variant_with_each_case(selected: tuple[str, ...], expected: list[str]) -> None:
    """Each selected variant whose output is judged is checked on each case, with all seeds."""
    pairs = [(each.name, case.id) for each, case in plan_for(*selected).checks]
    assert [(name, case.id) for name in expected for case in CASES] == pairs


@pytest.mark.parametrize(
    ("selected", "expected"),
    [
        ((), ["one", "two", "empty", "sdpa"]),
        (("slow",), ["slow", "empty", "sdpa"]),
        (("sdpa",), ["sdpa", "empty"]),
        (("empty", "sdpa"), ["empty", "sdpa"]),
        (("broken",), []),
    ],
)
def test_timings_take_the_first_seed_of_each_shape(selected: tuple[str, ...], expected: list[str]) -> None:
    """Each shape is timed once per variant, at the first selected seed; companions come last, and never twice."""
    pairs = [(each.name, case.id) for each, case in plan_for(*selected).timings]
    first = ["b1h2s64d64-fp16-seed3", "b1h4s128d64-fp16-seed3"]
    assert [(name, case) for name in expected for case in first] == pairs


def on(name: str, *devices: Device, role: Role = "candidate", dtype: Dtype = "fp16") -> Variant:
    """Return a Python variant that runs on these devices and supports one dtype."""
    plain = variant(name, role=role, kind="python")
    return msgspec.structs.replace(
        plain, supports=Supports(device=devices, dtype=(dtype,)), instantiations=((dtype, 64),)
    )


ON_DEVICES = {
    entry.name: entry
    for entry in (
        on("gpu", "cuda"),
        on("both", "cuda", "cpu"),
        on("cpu", "cpu"),
        on("cpu32", "cpu", dtype="fp32"),
        on("sdpa_gpu", "cuda", role="baseline"),
        on("sdpa_both", "cuda", "cpu", role="baseline"),
        on("sdpa_cpu", "cpu", role="baseline"),
    )
}


@pytest.mark.parametrize(
    ("selected", "gpu", "expected"),
    [
        (("gpu",), True, ["sdpa_gpu", "sdpa_both"]),
        (("both",), True, ["sdpa_gpu", "sdpa_both"]),
        (("cpu",), True, ["sdpa_cpu"]),
        (("gpu", "cpu"), True, ["sdpa_gpu", "sdpa_both", "sdpa_cpu"]),
        (("gpu", "sdpa_cpu"), True, ["sdpa_gpu", "sdpa_both"]),
        (("gpu",), False, ["sdpa_gpu", "sdpa_both", "sdpa_cpu"]),
        (("cpu",), False, ["sdpa_gpu", "sdpa_both", "sdpa_cpu"]),
    ],
)
def test_companions_run_on_the_device_of_the_selected(
    selected: tuple[str, ...], expected: list[str], *, gpu: bool
) -> None:
    """With a GPU, a baseline is timed only beside variants on its own device; without one, every baseline stays."""
    catalog = Catalog(ON_DEVICES, {})
    plan = make_plan(catalog, select_variants(catalog, selected), CASES[:1], fits=EVERYTHING, gpu=gpu)
    assert [each.name for each, _ in plan.timings if plan.is_companion(each)] == expected


def test_the_device_of_companions_is_chosen_for_each_shape() -> None:
    """A baseline of the CPU stays at the shape of a CPU variant, and is not timed at that of a GPU variant."""
    catalog = Catalog(ON_DEVICES, {})
    plan = make_plan(catalog, select_variants(catalog, ("gpu", "cpu32")), CASES[:1], fits=EVERYTHING, gpu=True)
    pairs = [(each.name, case.shape_id) for each, case in plan.timings if plan.is_companion(each)]
    assert pairs == [
        ("sdpa_gpu", "b1h2s64d64-fp16"),
        ("sdpa_both", "b1h2s64d64-fp16"),
        ("sdpa_cpu", "b1h2s64d64-fp32"),
    ]


@pytest.mark.parametrize(
    ("selected", "companions"),
    [((), {"empty", "sdpa"}), (("one", "sdpa"), {"empty"}), (("slow",), {"empty", "sdpa"}), (("empty", "sdpa"), set())],
)
def test_selected_variants_are_distinguished_from_companions(selected: tuple[str, ...], companions: set[str]) -> None:
    """A selected baseline is not a companion; a variant of another role never is, selected or not."""
    plan = plan_for(*selected)
    variants: list[AnyVariant] = [*CATALOG.variants.values(), *CATALOG.broken.values()]
    assert companions == {each.name for each in variants if plan.is_companion(each)}


@pytest.mark.parametrize(("selected", "times"), [((), 0), (("one", "rare"), 2)])
def test_an_optional_baseline_runs_only_if_it_is_named(selected: tuple[str, ...], times: int) -> None:
    """An optional baseline is timed on no shape unless it is selected, and is never a companion."""
    rare = msgspec.structs.replace(variant("rare", role="baseline", kind="python"), optional=True)
    catalog = Catalog({**CATALOG.variants, "rare": rare}, {})
    plan = make_plan(catalog, select_variants(catalog, selected), CASES)
    assert (times, False) == (sum(each is rare for each, _ in plan.timings), plan.is_companion(rare))


def test_a_broken_manifest_with_the_name_of_a_baseline_keeps_the_baseline_a_companion() -> None:
    """A second manifest named `sdpa` is broken and fails on its own; the first `sdpa` is still timed as a companion."""
    duplicate = BrokenVariant("sdpa", "variant 'sdpa' is already defined in builtin/sdpa")
    catalog = Catalog(CATALOG.variants, {"kernels/sdpa": duplicate})
    plan = make_plan(catalog, select_variants(catalog, ()), CASES)
    assert (False, True) == (plan.is_companion(duplicate), plan.is_companion(CATALOG.variants["sdpa"]))


def test_only_the_redefined_variant_runs() -> None:
    """`--fa-variant=one@X=2` runs `one@X=2`, and neither `one` nor another candidate."""
    redefined = msgspec.structs.replace(CATALOG.variants["one"], name="one@X=2", defines={"X": 2})
    assert ["one@X=2"] == [each.name for each in make_plan(CATALOG, (redefined,), CASES).runnable]


def test_a_second_manifest_of_the_same_name_still_fails() -> None:
    """If two manifests define the same name, the second one is among the builds, with its problem."""
    duplicate = BrokenVariant("one", "variant 'one' is already defined in kernels/one")
    catalog = Catalog(CATALOG.variants, {"other/one": duplicate})
    plan = make_plan(catalog, select_variants(catalog, ()), CASES)
    assert [duplicate] == [each for each in plan.builds if isinstance(each, BrokenVariant)]


PROBE = msgspec.structs.replace(
    variant("probe", role="probe"), computes="scores", cases=(parse_case("b1h1s4d64-fp16-scores-seed0"),)
)
WITH_PROBE = Catalog({**CATALOG.variants, "probe": PROBE}, {})


def plan_with_probe(*names: str) -> Plan:
    """Return the plan of `--fa-variant=names`, with a probe in the catalog."""
    return make_plan(WITH_PROBE, select_variants(WITH_PROBE, names), CASES, fits=EVERYTHING)


def test_a_probe_is_not_run_by_default() -> None:
    """Without a selection, only candidates run."""
    assert "probe" not in [each.name for each, _ in plan_with_probe().checks]


def test_only_the_launch_overhead_is_timed_with_scores() -> None:
    """The only companion of a probe of scores is the role `overhead`, because no baseline computes scores."""
    timed = [each.name for each, case in plan_with_probe("probe").timings if case.computes == "scores"]
    assert timed == ["probe", "empty"]


def test_a_probe_is_never_gated() -> None:
    """A probe is not gated, with candidates or alone."""
    assert [each.name for each in gated_variants(plan_with_probe("probe", "one"))] == ["one"]
    assert gated_variants(plan_with_probe("probe")) == []


def test_a_probe_of_scores_has_no_property_of_attention() -> None:
    """Properties of softmax weights and values are not tested on a probe of scores."""
    properties = [(each.name, name) for each, name in plan_with_probe("probe", "one").properties]
    assert ("one", "hard_data") in properties
    assert ("probe", "hard_data") not in properties
    assert ("probe", "head_independence") in properties

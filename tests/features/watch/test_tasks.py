"""Which tests are repeated after a save: those that were selected, in the order build, checks, properties, times."""

from __future__ import annotations

from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.discover import Catalog
from pytest_fa.catalog.plan import Plan, make_plan
from pytest_fa.catalog.variant import BrokenVariant
from pytest_fa.features.watch.tasks import SelectedTests, TaskKey, key_of
from tests.factories import variant

CASES = tuple(parse_case(f"b1h2s64d64-fp16-seed{seed}") for seed in (0, 1))


def plan(*names: str, cases_are_named: bool = True) -> Plan:
    """A plan with these variants at two seeds of one shape."""
    chosen = tuple(variant(name, kind="cuda") for name in names)
    catalog = Catalog({each.name: each for each in chosen}, {})
    return make_plan(catalog, chosen, CASES, cases_are_named=cases_are_named)


def keys(name: str) -> list[TaskKey]:
    """The tests of a variant in `plan`."""
    checks = [key_of("test_correct", name, case) for case in CASES]
    return [("test_build", name, ""), *checks, ("test_speed", name, "b1h2s64d64-fp16")]


def selected(run_plan: Plan, tests: SelectedTests, name: str) -> list[TaskKey]:
    """The keys of the tests that are repeated."""
    return [task.key for task in tests.tasks(run_plan, name)]


def test_all_tests_of_a_variant_are_repeated_in_order() -> None:
    """If every test was selected, a variant's build, checks and times are repeated, and those of a new variant."""
    tests = SelectedTests(plan("one"), keys("one"), timing=True)
    assert keys("one") == selected(plan("one", "two"), tests, "one")
    assert keys("two") == selected(plan("one", "two"), tests, "two")


def test_only_selected_tests_are_repeated() -> None:
    """If a part was selected, for example by -k, only that part is repeated, and nothing of a new variant."""
    tests = SelectedTests(plan("one"), keys("one")[1:2], timing=True)
    assert keys("one")[1:2] == selected(plan("one", "two"), tests, "one")
    assert [] == selected(plan("one", "two"), tests, "two")


def test_timings_can_be_off() -> None:
    """With --benchmark-disable, nothing is timed after a save."""
    tests = SelectedTests(plan("one"), keys("one"), timing=False)
    assert keys("one")[:-1] == selected(plan("one"), tests, "one")


def test_properties_follow_the_checks() -> None:
    """Properties are repeated after the cases and before the times."""
    run_plan = plan("one", cases_are_named=False)
    everything = [*keys("one"), *(key_of("test_property", "one", name) for _, name in run_plan.properties)]
    order = [key[0] for key in selected(run_plan, SelectedTests(run_plan, everything, timing=True), "one")]
    assert ["test_build", "test_correct", "test_property", "test_speed"] == list(dict.fromkeys(order))


def test_nothing_selected_is_empty() -> None:
    """A selection without a test of the plan is empty."""
    assert SelectedTests(plan("one"), [("test_own", "one", "")], timing=True).is_empty
    assert not SelectedTests(plan("one"), keys("one")[:1], timing=True).is_empty


def test_which_variants_have_a_selected_test() -> None:
    """With all tests, that is every variant, also a new or a broken one; with a part, those that it names."""
    tests = SelectedTests(plan("one"), keys("one"), timing=True)
    assert {"one", "two"} == tests.variants(plan("one", "two"))
    assert {"two"} == tests.variants(plan("one", "two"), apart_from=keys("one"))
    assert {"one"} == tests.variants(plan("one"), apart_from=keys("one")[1:])
    part = SelectedTests(plan("one", "two"), keys("one")[1:2], timing=True)
    assert {"one"} == part.variants(plan("one", "two"))
    broken = tuple(BrokenVariant(name, "a problem") for name in ("one", "two"))
    of_broken = make_plan(Catalog({}, {}), broken, CASES, cases_are_named=True)
    assert ({"one", "two"}, {"one"}) == (tests.variants(of_broken), part.variants(of_broken))


def test_times_that_are_off_are_not_repeated() -> None:
    """With --benchmark-disable, a failure of `test_speed` cannot be mended by a save, and alone it is no selection."""
    tests = SelectedTests(plan("one"), keys("one")[-1:], timing=False)
    assert tests.is_empty
    assert tests.keys == set(keys("one")[:-1])


def test_a_task_has_the_name_of_its_test() -> None:
    """A failure is shown under the id that pytest shows for the test."""
    names = [task.name for task in SelectedTests(plan("one"), keys("one"), timing=True).tasks(plan("one"), "one")]
    assert names[:2] == ["test_build[one]", "test_correct[one-b1h2s64d64-fp16-seed0]"]
    assert names[-1] == "test_speed[one-b1h2s64d64-fp16]"

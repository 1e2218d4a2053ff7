"""Parametrizes tests from the plan, deselects tests, finds the variants they need, and attaches records to reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pytest_fa.catalog.case import Case
from pytest_fa.catalog.plan import AnyVariant, Plan
from pytest_fa.catalog.variant import BrokenVariant, Variant
from pytest_fa.feature import suite_tests
from pytest_fa.options.command_line import SUITE_FOLDER
from pytest_fa.plugin.left_out import left_out_of
from pytest_fa.records.read import why_unreadable
from pytest_fa.records.record import Record
from pytest_fa.table.rows import headline

# A test that is skipped or fails has no samples, for which pytest-benchmark would emit a warning.
_UNUSED = pytest.mark.filterwarnings("ignore:Benchmark fixture was not used")


# `--show-capture=stdout` and `--show-capture=stderr` select sections by words in their titles.
OUTPUT_TITLE = "Captured stdout and stderr of the worker"


def parametrize(metafunc: pytest.Metafunc, plan: Plan) -> None:
    """Parametrize a test with variants, cases or properties, by the fixtures that it uses, or as a feature does.

    A test with variant and case, or variant and property, runs over every judged pair.  With `fa_benchmark`, it runs
    over the first seed of each shape, also with the companions.  A test with a variant only runs over each variant;
    `test_build` of the shipped suite also over broken manifests, and not over variants that are not compiled.
    """
    names = set(metafunc.fixturenames)
    if metafunc.config.hook.pytest_fa_parametrize(metafunc=metafunc, plan=plan):
        return
    if "fa_property" in names:
        pairs = [pytest.param(variant, name, id=f"{variant.name}-{name}") for variant, name in plan.properties]
        metafunc.parametrize(("fa_variant", "fa_property"), pairs, indirect=True)
    elif "fa_variant" not in names:
        metafunc.parametrize("fa_case", plan.cases, ids=lambda case: case.id, indirect=True)
    elif "fa_case" not in names:
        is_build = "fa_run" in names and metafunc.function.__name__ == "test_build"
        parametrize_variants(metafunc, plan.builds if is_build else plan.runnable)
    elif "fa_benchmark" in names:
        parametrize_pairs(metafunc, plan.timings, by_shape=True, marks=(_UNUSED,))
    else:
        has_claims = metafunc.function.__name__ == "test_correct" and "fa_run" in names
        parametrize_pairs(metafunc, plan.checks + plan.claims if has_claims else plan.checks)


def parametrize_variants(metafunc: pytest.Metafunc, variants: Sequence[AnyVariant]) -> None:
    """Run a test over these variants."""
    metafunc.parametrize("fa_variant", variants, ids=lambda variant: variant.name, indirect=True)


def parametrize_pairs(
    metafunc: pytest.Metafunc,
    pairs: Sequence[tuple[Variant, Case]],
    *,
    by_shape: bool = False,
    marks: Sequence[pytest.MarkDecorator] = (),
) -> None:
    """Run a test over pairs of variant and case.  With `by_shape`, its id has the shape, without the seed."""
    params = [
        pytest.param(variant, case, id=f"{variant.name}-{case.shape_id if by_shape else case.id}", marks=marks)
        for variant, case in pairs
    ]
    metafunc.parametrize(("fa_variant", "fa_case"), params, indirect=True)


def deselect(config: pytest.Config, items: list[pytest.Item], plan: Plan) -> None:
    """Deselect companions at shapes without a test of a selected variant, and placeholders of tests without parameters.

    Baselines that earlier records show to be slow are deselected, too, unless pytest-benchmark's table is wanted.
    Those with a recent time are not timed again; tests of the user's own run with them.
    """
    left_out, shapes = left_out_of(config), _shapes_of_selected(items, plan)
    slow = {(each.variant, each.shape_id) for each in left_out if not each.recent}
    recent = {(each.variant, each.shape_id) for each in left_out if each.recent}
    kept = [item for item in items if _is_kept(item, plan, shapes, slow | recent if is_shipped(item) else slow)]
    if len(kept) < len(items):
        kept_items = set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept_items])
        items[:] = kept


def needed_variants(items: list[pytest.Item]) -> dict[str, Variant]:
    """Every variant that a test runs over, by name."""
    variants = (variant_of(item) for item in items)
    return {variant.name: variant for variant in variants if isinstance(variant, Variant)}


def has_timings(items: list[pytest.Item]) -> bool:
    """Whether a test of the shipped suite that times variants is selected."""
    timed = ("test_speed", *(name for name, (_, test) in suite_tests().items() if test.times))
    return any(item.name.startswith(tuple(f"{name}[" for name in timed)) and is_shipped(item) for item in items)


def variants_with_build_test(items: list[pytest.Item]) -> frozenset[str]:
    """The names of the variants whose `test_build` of the shipped suite is selected."""
    tests = (item for item in items if item.name.startswith("test_build[") and is_shipped(item))
    return frozenset(variant.name for item in tests if (variant := variant_of(item)))


def attach_output(report: Any, output: str) -> None:  # noqa: ANN401  # a report of any kind
    """Attach what the worker printed as a section, and let pytest's summary line begin with the cause of a failure."""
    if output:
        report.sections.append((OUTPUT_TITLE, output))
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        crash.message = crash.message.removeprefix("Failed: ")


def attach(report: Any, item: pytest.Item, record: Record | None, plan: Plan) -> None:  # noqa: ANN401  # takes attributes
    """Attach the record to the report and its headline to the JUnit properties, or the reason if there is no record."""
    variant = variant_of(item)
    report.fa_companion = variant is not None and plan.is_companion(variant)
    if record is not None and (problem := why_unreadable(record)):
        report.fa_lost = f"{record.id}: {problem}"
    elif record is not None:
        properties = item.config.hook.pytest_fa_properties(record=record)
        report.duration = max(0.0, report.duration - record.compile_seconds)  # that is no part of the check
        report.fa_record = record
        item.user_properties.append(("fa", headline(record)))
        item.user_properties += [pair for pairs in properties for pair in pairs]
        extras = item.config.hook.pytest_fa_extras(record=record, config=item.config)
        report.extras = [*getattr(report, "extras", []), *(part for parts in extras for part in parts)]
    elif report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        case = param_of(item, "fa_case")
        report.fa_not_run = [case.shape_id if case else "", reason.removeprefix("Skipped: ")]  # as JSON has it


def _shapes_of_selected(items: list[pytest.Item], plan: Plan) -> set[str]:
    """The shape ids at which a selected variant has a test; for e4m3 also that in the dtype of the output."""
    selected = (item for item in items if (variant := variant_of(item)) and not plan.is_companion(variant))
    cases = {param_of(item, "fa_case") for item in selected}
    return {each.shape_id for case in cases if case for each in (case, case.with_dtype(case.out_dtype))}


def _is_kept(item: pytest.Item, plan: Plan, shapes: set[str], left_out: set[tuple[str, str]]) -> bool:
    if param_of(item, "fa_variant") is None:
        return True  # its test uses no variant
    variant, case = variant_of(item), param_of(item, "fa_case")
    if variant is None:
        return False  # pytest's placeholder for a test without parameters
    if not plan.is_companion(variant):
        return True
    return case is not None and case.shape_id in shapes and (variant.name, case.shape_id) not in left_out


def variant_of(item: pytest.Item) -> AnyVariant | None:
    """The variant that a test runs over."""
    variant = param_of(item, "fa_variant")
    return variant if isinstance(variant, Variant | BrokenVariant) else None


def is_shipped(item: pytest.Item) -> bool:
    """Whether a test is one of the shipped suite."""
    return item.path.parent == SUITE_FOLDER


def param_of(item: pytest.Item, name: str) -> Any:  # noqa: ANN401  # the type depends on the parameter
    """Return the value of a parameter of a test; None if it has no such parameter."""
    callspec = getattr(item, "callspec", None)
    return callspec.params.get(name) if callspec else None

"""Parametrizes tests from the plan, deselects tests, finds the variants they need, and attaches records to reports."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pytest_fa.catalog.case import Case
from pytest_fa.catalog.plan import AnyVariant, Plan
from pytest_fa.catalog.sweep_space import feasible_points
from pytest_fa.catalog.variant import BrokenVariant, Variant
from pytest_fa.features.watch.tasks import TaskKey, key_of
from pytest_fa.plugin.left_out import left_out_of
from pytest_fa.plugin.state import OPTIONS_KEY
from pytest_fa.records.record import Record, to_builtins
from pytest_fa.table.rows import headline
from pytest_fa.table.tool_lines import profile_lines, tool_properties

# A test that is skipped or fails has no samples, for which pytest-benchmark would emit a warning.
_UNUSED = pytest.mark.filterwarnings("ignore:Benchmark fixture was not used")


# `--show-capture=stdout` and `--show-capture=stderr` select sections by words in their titles.
OUTPUT_TITLE = "Captured stdout and stderr of the worker"
# Tests of the shipped suite that have a variant and no case -> the attribute of `Plan` with their variants.
_VARIANTS_OF = {"test_build": "builds", "test_judge": "faults", "test_gate": "gated", "test_sweep_end": "gated"}


def parametrize(metafunc: pytest.Metafunc, plan: Plan) -> None:
    """Parametrize a test with variants, cases, properties or sanitizers, by the fixtures that it uses.

    A test with variant and case, or variant and property, runs over every judged pair.  With `fa_benchmark`, it runs
    over the first seed of each shape, also with the companions.  A test with a variant only runs over each variant, or
    over those that the plan has for this test of the shipped suite.
    """
    names = set(metafunc.fixturenames)
    if "fa_property" in names:
        pairs = [pytest.param(variant, name, id=f"{variant.name}-{name}") for variant, name in plan.properties]
        metafunc.parametrize(("fa_variant", "fa_property"), pairs, indirect=True)
    elif "fa_sanitizer" in names:
        _parametrize_sanitized(metafunc, plan)
    elif "trial_number" in names:
        _parametrize_trials(metafunc, plan)
    elif "fa_variant" not in names:
        metafunc.parametrize("fa_case", plan.cases, ids=lambda case: case.id, indirect=True)
    elif "fa_case" not in names:
        variants: Sequence[AnyVariant] = plan.runnable
        if "fa_run" in names:
            variants = getattr(plan, _VARIANTS_OF.get(metafunc.function.__name__, "runnable"))
        metafunc.parametrize("fa_variant", variants, ids=lambda variant: variant.name, indirect=True)
    else:
        timed = "fa_benchmark" in names or is_profiled(metafunc)
        pairs = [
            pytest.param(
                variant,
                case,
                id=f"{variant.name}-{case.shape_id if timed else case.id}",
                marks=_UNUSED if "fa_benchmark" in names else (),
            )
            for variant, case in _pairs(metafunc, plan)
        ]
        metafunc.parametrize(("fa_variant", "fa_case"), pairs, indirect=True)


def _parametrize_sanitized(metafunc: pytest.Metafunc, plan: Plan) -> None:
    """Parametrize with variant and tool, and with the case if the test uses `fa_case`.

    The shape is part of the test id only if `--fa-case` selects cases.
    """
    if "fa_case" in metafunc.fixturenames:
        params = []
        for variant, case, tool in plan.sanitized:
            id_parts = (variant.name, case.shape_id, tool) if plan.cases_are_named else (variant.name, tool)
            params.append(pytest.param(variant, case, tool, id="-".join(id_parts)))
        metafunc.parametrize(("fa_variant", "fa_case", "fa_sanitizer"), params, indirect=True)
        return
    pairs = {(variant.name, tool): (variant, tool) for variant, _, tool in plan.sanitized}
    params = [pytest.param(*pair, id="-".join(key)) for key, pair in pairs.items()]
    metafunc.parametrize(("fa_variant", "fa_sanitizer"), params, indirect=True)


def _parametrize_trials(metafunc: pytest.Metafunc, plan: Plan) -> None:
    """Parametrize with the swept variant and the numbers of its trials, at most one for each feasible configuration."""
    most, params = metafunc.config.stash[OPTIONS_KEY].trials, []
    for variant in plan.gated:
        feasible = len(feasible_points(variant.sweep, variant.defines)) if variant.sweep else 0
        numbers = range(1, min(most, feasible) + 1)
        params += [pytest.param(variant, number, id=f"{variant.name}-t{number:03d}") for number in numbers]
    metafunc.parametrize(("fa_variant", "trial_number"), params, indirect=["fa_variant"])


def is_profiled(metafunc: pytest.Metafunc) -> bool:
    """Whether this is `test_profile` of the shipped suite."""
    return metafunc.function.__name__ == "test_profile" and "fa_run" in metafunc.fixturenames


def _pairs(metafunc: pytest.Metafunc, plan: Plan) -> list[tuple[Variant, Case]]:
    """The pairs of variant and case that a test runs over; only `test_correct` of the shipped suite has claims."""
    if is_profiled(metafunc):
        return plan.profiles
    if "fa_benchmark" in metafunc.fixturenames:
        return plan.timings
    has_claims = metafunc.function.__name__ == "test_correct" and "fa_run" in metafunc.fixturenames
    return plan.checks + plan.claims if has_claims else plan.checks


def deselect(config: pytest.Config, items: list[pytest.Item], plan: Plan) -> None:
    """Deselect companions at shapes without a test of a selected variant, and placeholders of tests without parameters.

    Baselines that earlier records show to be slow are deselected, too, unless pytest-benchmark's table is wanted.
    Those with a recent time are not timed again; tests of the user's own run with them.
    """
    left_out, shapes = left_out_of(config), _shapes_of_selected(items, plan)
    slow = {(each.variant, each.shape_id) for each in left_out if not each.recent}
    recent = {(each.variant, each.shape_id) for each in left_out if each.recent}
    kept = [item for item in items if _is_kept(item, plan, shapes, slow | recent if _is_shipped(item) else slow)]
    if len(kept) < len(items):
        kept_items = set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept_items])
        items[:] = kept


def needed_variants(items: list[pytest.Item]) -> dict[str, Variant]:
    """Every variant that a test runs over, by name."""
    variants = (_variant(item) for item in items)
    return {variant.name: variant for variant in variants if isinstance(variant, Variant)}


def has_timings(items: list[pytest.Item]) -> bool:
    """Whether a `test_speed` or a `test_gate` of the shipped suite is selected; the pilot of a gate times variants."""
    return any(item.name.startswith(("test_speed[", "test_gate[")) and _is_shipped(item) for item in items)


def variants_with_build_test(items: list[pytest.Item]) -> frozenset[str]:
    """The names of the variants whose `test_build` of the shipped suite is selected."""
    tests = (item for item in items if item.name.startswith("test_build[") and _is_shipped(item))
    return frozenset(variant.name for item in tests if (variant := _variant(item)))


def task_key(item: pytest.Item) -> TaskKey | None:
    """What identifies a test of the shipped suite after a manifest was read again; None for other tests."""
    variant = _variant(item)
    if variant is None or not _is_shipped(item):
        return None
    part = param_of(item, "fa_case") or param_of(item, "fa_property")
    return key_of(str(getattr(item, "originalname", item.name)), variant.name, part)


def attach_output(report: Any, output: str) -> None:  # noqa: ANN401  # a report of any kind
    """Attach what the worker printed as a section, and let pytest's summary line begin with the cause of a failure."""
    if output:
        report.sections.append((OUTPUT_TITLE, output))
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        crash.message = crash.message.removeprefix("Failed: ")


def attach(report: Any, item: pytest.Item, record: Record | None, plan: Plan) -> None:  # noqa: ANN401  # takes attributes
    """Attach the record to the report and its headline to the JUnit properties, or the reason if there is no record."""
    variant = _variant(item)
    report.fa_companion = variant is not None and plan.is_companion(variant)
    if record is not None:
        report.duration = max(0.0, report.duration - record.compile_seconds)  # that is no part of the check
        report.fa_record = to_builtins(record)
        item.user_properties.append(("fa", headline(record)))
        item.user_properties += tool_properties(record)
        report.extras = [*getattr(report, "extras", []), *_html_extras(item.config, record)]
    elif report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.fa_not_run = ["build" if param_of(item, "fa_case") is None else "case", reason.removeprefix("Skipped: ")]


def _html_extras(config: pytest.Config, record: Record) -> list[Any]:
    """Extras for the page of pytest-html: figures and error map; links to the Nsight report and its CSV."""
    page = config.getoption("htmlpath", default=None)
    if not page:
        return []
    from pytest_html import extras  # noqa: PLC0415  # an optional plugin, which is in use here

    from pytest_fa.features.html.html_page import record_html  # noqa: PLC0415

    parts = [extras.html(record_html(record))]
    if record.nsight is None:
        return parts
    folder = config.invocation_params.dir / Path(page).parent
    files = {"Nsight Compute report": record.nsight.report, "counters (CSV)": record.nsight.table}
    parts += [
        extras.url(os.path.relpath(config.rootpath / path, folder), name=name) for name, path in files.items() if path
    ]
    return [*parts, extras.text("\n".join(profile_lines([record])), name="profile")]


def _shapes_of_selected(items: list[pytest.Item], plan: Plan) -> set[str]:
    """The shape ids at which a selected variant has a test; for e4m3 also that in the dtype of the output."""
    selected = (item for item in items if (variant := _variant(item)) and not plan.is_companion(variant))
    cases = {param_of(item, "fa_case") for item in selected}
    return {each.shape_id for case in cases if case for each in (case, case.with_dtype(case.out_dtype))}


def _is_kept(item: pytest.Item, plan: Plan, shapes: set[str], left_out: set[tuple[str, str]]) -> bool:
    if param_of(item, "fa_variant") is None:
        return True  # its test uses no variant
    variant, case = _variant(item), param_of(item, "fa_case")
    if variant is None:
        return False  # pytest's placeholder for a test without parameters
    if not plan.is_companion(variant):
        return True
    return case is not None and case.shape_id in shapes and (variant.name, case.shape_id) not in left_out


def _variant(item: pytest.Item) -> AnyVariant | None:
    variant = param_of(item, "fa_variant")
    return variant if isinstance(variant, Variant | BrokenVariant) else None


def _is_shipped(item: pytest.Item) -> bool:
    return str(getattr(getattr(item, "module", None), "__name__", "")).startswith("pytest_fa.suite.")


def param_of(item: pytest.Item, name: str) -> Any:  # noqa: ANN401  # the type depends on the parameter
    """Return the value of a parameter of a test; None if it has no such parameter."""
    callspec = getattr(item, "callspec", None)
    return callspec.params.get(name) if callspec else None

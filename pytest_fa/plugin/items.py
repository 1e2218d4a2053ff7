"""Pairs to pytest items, items to what they need, and records to reports."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pytest_fa.catalog.case import Case
from pytest_fa.catalog.plan import AnyVariant, Plan
from pytest_fa.catalog.variant import Variant
from pytest_fa.records.record import Record, to_builtins
from pytest_fa.report.table import headline
from pytest_fa.report.tool_lines import profile_lines, tool_properties

# A case that is skipped or fails has no samples, and pytest-benchmark would warn of that.
_UNUSED = pytest.mark.filterwarnings("ignore:Benchmark fixture was not used")


# The suite's own tests of a variant alone.
_VARIANTS_OF = {"test_build": "builds", "test_judge": "faults", "test_gate": "gated"}


def parametrize(metafunc: pytest.Metafunc, plan: Plan) -> None:
    """Give a test its variants and cases, by the fixtures that it asks for.

    Variant and property, variant and case: every judged pair; with `fa_benchmark` too: the first seed of each shape,
    companions beside it.  A variant alone: each one, or, for the suite's own `test_build`, each that needs a compiler.
    """
    names = set(metafunc.fixturenames)
    if "fa_property" in names:
        pairs = [pytest.param(variant, name, id=f"{variant.name}-{name}") for variant, name in plan.properties]
        metafunc.parametrize(("fa_variant", "fa_property"), pairs, indirect=True)
    elif "fa_sanitizer" in names:
        _parametrize_sanitized(metafunc, plan)
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
    """Variant and tool, once for each case where the test takes one; the case is in the name where it was named."""
    if "fa_case" in metafunc.fixturenames:
        found = []
        for variant, case, tool in plan.sanitized:
            words = (variant.name, case.shape_id, tool) if plan.cases_are_named else (variant.name, tool)
            found.append(pytest.param(variant, case, tool, id="-".join(words)))
        metafunc.parametrize(("fa_variant", "fa_case", "fa_sanitizer"), found, indirect=True)
        return
    pairs = {(variant.name, tool): (variant, tool) for variant, _, tool in plan.sanitized}
    params = [pytest.param(*pair, id="-".join(key)) for key, pair in pairs.items()]
    metafunc.parametrize(("fa_variant", "fa_sanitizer"), params, indirect=True)


def is_profiled(metafunc: pytest.Metafunc) -> bool:
    """Whether this is the suite's own test of profiles."""
    return metafunc.function.__name__ == "test_profile" and "fa_run" in metafunc.fixturenames


def _pairs(metafunc: pytest.Metafunc, plan: Plan) -> list[tuple[Variant, Case]]:
    """The variants and cases of a test that asks for both."""
    if is_profiled(metafunc):
        return plan.profiles
    return plan.timings if "fa_benchmark" in metafunc.fixturenames else plan.checks


def deselect(config: pytest.Config, items: list[pytest.Item], plan: Plan) -> None:
    """Drop variants that were not asked for, and companions of shapes at which nothing asked for is left."""
    items[:] = [item for item in items if not _is_empty(item)]
    wanted = [item for item in items if (each := _variant(item)) is None or plan.is_chosen(each)]
    shapes = {case.shape_id for item in wanted if (case := _param(item, "fa_case")) and _variant(item)}
    kept = [item for item in items if item in set(wanted) or _stands_beside(item, plan, shapes)]
    dropped = [item for item in items if item not in set(kept)]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


def needed_variants(items: list[pytest.Item]) -> dict[str, Variant]:
    """Every variant that an item runs over, by name."""
    found = (_variant(item) for item in items)
    return {each.name: each for each in found if isinstance(each, Variant)}


def attach(report: Any, item: pytest.Item, record: Record | None, plan: Plan) -> None:  # noqa: ANN401  # takes attributes
    """Put the record on the report, a headline into the properties, and say what was not done and why."""
    variant = _variant(item)
    report.fa_companion = variant is not None and plan.is_companion(variant)
    if record is not None:
        report.fa_record = to_builtins(record)
        item.user_properties.append(("fa", headline(record)))
        item.user_properties += tool_properties(record)
        report.extras = [*getattr(report, "extras", []), *_html_extras(item.config, record)]
    elif report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.fa_not_run = ["build" if _param(item, "fa_case") is None else "case", reason.removeprefix("Skipped: ")]


def _html_extras(config: pytest.Config, record: Record) -> list[Any]:
    """For pytest-html, where it writes a page: links to the report and its CSV from there, and the verdict."""
    page = config.getoption("htmlpath", default=None)
    if not page or record.nsight is None:
        return []
    from pytest_html import extras  # noqa: PLC0415  # another plugin's, only where it is in use

    folder = config.invocation_params.dir / Path(page).parent
    files = {"Nsight Compute report": record.nsight.report, "counters (CSV)": record.nsight.table}
    links = [
        extras.url(os.path.relpath(config.rootpath / path, folder), name=name) for name, path in files.items() if path
    ]
    return [*links, extras.text("\n".join(profile_lines([record])), name="profile")]


def _stands_beside(item: pytest.Item, plan: Plan, shapes: set[str]) -> bool:
    variant, case = _variant(item), _param(item, "fa_case")
    return variant is not None and plan.is_companion(variant) and case is not None and case.shape_id in shapes


def _is_empty(item: pytest.Item) -> bool:
    """Pytest's placeholder for a test of properties or sanitizers that has none to run over."""
    return bool({"fa_property", "fa_sanitizer"} & set(getattr(item, "fixturenames", ()))) and _variant(item) is None


def _variant(item: pytest.Item) -> AnyVariant | None:
    variant: AnyVariant | None = _param(item, "fa_variant")
    return variant


def _param(item: pytest.Item, name: str) -> Any:  # noqa: ANN401  # a parameter's type is its test's business
    callspec = getattr(item, "callspec", None)
    return callspec.params.get(name) if callspec else None

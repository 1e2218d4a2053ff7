"""The results of the self-test's wrong kernels on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_fa.catalog.discover import discover
from pytest_fa.catalog.properties import PROPERTIES, case_of_property
from pytest_fa.catalog.variant import Variant
from pytest_fa.features.selftest.faults import FAULTS, cases_of
from pytest_fa.features.selftest.plugin import FOLDER
from pytest_fa.judge.pipeline import run_case
from pytest_fa.wire.jobs import CaseResult
from tests.factories import cpu_job


def variants_in(folder: str) -> dict[str, Variant]:
    """The kernels in a folder of the self-test."""
    known = discover((FOLDER,)).variants
    return {name: variant for name, variant in known.items() if variant.folder.endswith(folder)}


def wrong_results(variant: Variant, repeats: int = 0) -> Iterator[CaseResult]:
    """The results of the cases of the self-test, or of the property that rejects it, in which a kernel is wrong."""
    fault = FAULTS.get(variant.name)
    if fault and (check := fault.caught_by) in PROPERTIES:
        case = case_of_property(variant, check)
        return iter([run_case(cpu_job(variant, case.id, repeats=repeats, property_name=check))])
    cases = (case for case in cases_of(variant.name) if not variant.refuses(case))
    results = (run_case(cpu_job(variant, case.id, repeats=repeats)) for case in cases)
    return (result for result in results if result.outcome != "ok")

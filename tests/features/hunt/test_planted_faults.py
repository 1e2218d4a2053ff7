"""Hunts find the planted faults of the self-test that random cases can show, and shrink them to what they need."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("hypothesis")

import pytest_fa
from pytest_fa.catalog.case import Case
from pytest_fa.catalog.variant import Variant
from pytest_fa.features.api.arguments import Settings
from pytest_fa.features.api.functions import start
from pytest_fa.features.api.kept_workers import open_session
from pytest_fa.features.hunt.bench import RunBench
from pytest_fa.features.hunt.case_strategy import examples_of
from pytest_fa.features.hunt.hunting import FoundFault, hunt
from pytest_fa.features.hunt.plugin import REPEATS
from pytest_fa.session.run_plan import RunPlan

SELFTEST = Path(pytest_fa.__file__).parent / "features" / "selftest"
FOLDERS = ("python_part_faults", "python_backward_faults")
SECONDS = 60.0
MAX_CASES, MAX_PARTS = 200, 2
# What no random case shows: a state between calls, races that need thousands of calls, or layouts with views of others.
SHOWN_ELSEWHERE = frozenset(("gradients_kept_by_shape", "dq_flickers"))


def planted() -> Iterator[Variant]:
    """The faulty variants that run on a CPU."""
    catalog = RunPlan(Settings(kernels=SELFTEST).options()).catalog
    for variant in catalog.variants.values():
        is_meant = Path(variant.folder).name in FOLDERS and variant.role == "wrong"
        if is_meant and "cpu" in variant.supports.device and variant.name not in SHOWN_ELSEWHERE:
            yield variant


def first_fault(variant: Variant, seed: int) -> FoundFault | None:
    """The first fault that a hunt of a variant finds."""
    settings = Settings(kernels=SELFTEST)
    options = settings.options(variants=(variant.name,), soak=REPEATS, timing=False)
    with open_session(options) as session:
        start(session, variant)
        bench = RunBench(session.runner, variant)
        hunted = hunt(bench, variant, examples_of(variant, "cpu"), seconds=SECONDS, seed=seed, max_faults=1)
        return next(iter(hunted.faults), None)


def parts_of(case: Case) -> int:
    """How many parts of the case are not plain, besides what each gradient case has."""
    sizes = (case.batch > 1) + (case.heads > 1) + (case.seq_q != case.seq_k)
    return len(case.modifiers or ()) + (case.causal != "none") + (case.kv_heads != case.heads) + (sizes > 1)


@pytest.mark.nightly
def test_planted_faults_are_found_and_shrunk() -> None:
    """Half of them within 200 cases; nine of ten have at most two parts that are not plain."""
    faults = {variant.name: first_fault(variant, seed) for seed, variant in enumerate(planted())}
    missed = [name for name, fault in faults.items() if fault is None]
    found = {name: fault for name, fault in faults.items() if fault is not None}
    print(*(f"{name}: after {each.after}: {each.example}" for name, each in found.items()), sep="\n")  # noqa: T201
    assert len(missed) <= 0.1 * len(faults), missed
    assert statistics.median(fault.after for fault in found.values()) <= MAX_CASES
    few = [name for name, fault in found.items() if parts_of(fault.example.case) <= MAX_PARTS]
    assert len(few) >= 0.9 * len(found), set(found) - set(few)

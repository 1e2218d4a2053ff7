"""Whether a variant's code is the same as at a commit, although sources changed: built twice, and compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pytest_fa.build.builder import ensure
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import UsageProblem
from pytest_fa.features.gate.revision import same_machine_code, variants_at
from pytest_fa.records.built import Build

SameCode = Callable[[Variant, str, str], bool]  # of a variant, since a commit, for an architecture


def compare_builds(cache: Path) -> SameCode:
    """Return a function that compares the code for the GPU and for the CPU; each pair is built once.

    Code that cannot be built or read counts as another one.  The function raises `UsageProblem` without a compiler.
    """
    known: dict[tuple[str, str, str], bool] = {}

    def is_same(variant: Variant, commit: str, arch: str) -> bool:
        key = (variant.name, commit, arch)
        if key not in known:
            known[key] = _is_same(variant, commit, arch, cache)
        return known[key]

    return is_same


def _is_same(variant: Variant, commit: str, arch: str, cache: Path) -> bool:
    try:
        earlier = variants_at([variant], commit, cache)[variant.name].variant
    except UsageProblem:  # the commit has no such variant, or is not there
        return False
    report = ensure([(variant, arch), (earlier, arch)], cache)
    if report.lacking:
        raise UsageProblem(f"--code needs to build {variant.name}: {min(report.lacking.values())}")
    ours, theirs = (report.outcomes.get((name, arch)) for name in (variant.name, earlier.name))
    return isinstance(ours, Build) and isinstance(theirs, Build) and same_machine_code(ours, theirs, cache) is not None

"""Whether a variant's code is the same as at a commit, although sources changed: built twice, and compared."""

from __future__ import annotations

import functools
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
    variants: dict[str, Variant] = {}

    @functools.cache
    def is_same(name: str, commit: str, arch: str) -> bool:
        ours = variants[name]
        try:
            theirs = variants_at([ours], commit, cache)[name].variant
        except UsageProblem:  # the commit has no such variant, or is not there
            return False
        report = ensure([(ours, arch), (theirs, arch)], cache)
        if report.lacking:
            raise UsageProblem(f"--code needs to build {name}: {min(report.lacking.values())}")
        builds = [report.outcomes.get((each.name, arch)) for each in (ours, theirs)]
        first, second = (each if isinstance(each, Build) else None for each in builds)
        return first is not None and second is not None and same_machine_code(first, second, cache) is not None

    def of_variant(variant: Variant, commit: str, arch: str) -> bool:
        variants[variant.name] = variant
        return is_same(variant.name, commit, arch)

    return of_variant

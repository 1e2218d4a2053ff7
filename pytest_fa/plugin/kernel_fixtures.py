"""The fixtures by which a test uses kernels."""

from __future__ import annotations

from collections.abc import Iterable

from pytest_fa.feature import features

PARAMETERS = ("fa_variant", "fa_case", "fa_property")
OTHER_FIXTURES = ("fa_run", "fa_builds", "fa_benchmark")  # that use kernels also without one of these


def parameters() -> set[str]:
    """The fixtures that a test is parametrized with, those of features among them."""
    return {*PARAMETERS, *(name for feature in features() for name in feature.fixtures)}


def uses_kernels(names: Iterable[str]) -> bool:
    """Whether a test with these fixtures uses kernels."""
    return not {*OTHER_FIXTURES, *parameters()}.isdisjoint(names)

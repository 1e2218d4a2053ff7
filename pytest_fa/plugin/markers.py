"""The markers, with which a single test overrides the run's suite or tolerance policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import pytest

from pytest_fa.errors import UsageProblem
from pytest_fa.feature import features
from pytest_fa.options.values import TOLERANCES

if TYPE_CHECKING:
    from _pytest.nodes import Node

T = TypeVar("T")

MARKERS = (
    "fa_suite(*names): run this test, which uses fa_case, over the cases of these suites instead of --fa-suite",
    "fa_tolerance(policy): tolerance policy of fa_check, fa_truth and fa_benchmark; --fa-tolerance overrides it",
)


def register(config: pytest.Config) -> None:
    """Register the markers for `--markers` and `--strict-markers`."""
    for line in (*MARKERS, *(line for feature in features() for line in feature.markers)):
        config.addinivalue_line("markers", line)


def suites_of(node: Node) -> tuple[str, ...]:
    """The suites of a test's marker; empty without the marker.  Raises `UsageProblem` for a wrong marker."""
    mark = node.get_closest_marker("fa_suite")
    if mark is None:
        return ()
    if not mark.args or mark.kwargs or not all(isinstance(each, str) for each in mark.args):
        raise UsageProblem(f"{node.nodeid}: fa_suite takes one or more names of suites, such as fa_suite('edge')")
    return tuple(mark.args)


def tolerance_of(node: Node) -> str | None:
    """The tolerance policy of a test's marker; None without the marker.  Raises `UsageProblem` for a wrong marker."""
    mark = node.get_closest_marker("fa_tolerance")
    if mark is None:
        return None
    (policy,) = mark.args if len(mark.args) == 1 and not mark.kwargs else (None,)
    if policy not in TOLERANCES:
        raise UsageProblem(f"{node.nodeid}: fa_tolerance takes one of {', '.join(TOLERANCES)}; it is {policy!r}")
    return str(policy)


def read_marker(read: Callable[[pytest.Item], T], node: pytest.Item) -> T:
    """The result of `read`, one of the functions above.  A wrong marker fails its test."""
    try:
        return read(node)
    except UsageProblem as problem:
        pytest.fail(str(problem), pytrace=False)

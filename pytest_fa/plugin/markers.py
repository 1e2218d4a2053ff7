"""Markers: what a single test asks for in place of the run's own choice."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import pytest

from pytest_fa.earlier import POLICIES, renamed
from pytest_fa.errors import UsageProblem
from pytest_fa.options import LEAST_GATE, MOST_GATE, TOLERANCES

if TYPE_CHECKING:
    from _pytest.nodes import Node

T = TypeVar("T")

MARKERS = (
    "fa_suite(*names): the cases of these suites, in place of --fa-suite, for a test that asks for fa_case",
    "fa_tolerance(policy): judge by this policy in fa_check, fa_truth, fa_benchmark; --fa-tolerance has the last word",
    "fa_gate(ratio): the ratio of fa_run.gate in this test; --fa-gate has the last word",
)


def register(config: pytest.Config) -> None:
    """Make the markers known to `--markers` and `--strict-markers`."""
    for line in MARKERS:
        config.addinivalue_line("markers", line)


def suites_of(node: Node) -> tuple[str, ...]:
    """The suites that a test is marked with; none without the marker.  Raises `UsageProblem`."""
    mark = node.get_closest_marker("fa_suite")
    if mark is None:
        return ()
    if not mark.args or mark.kwargs or not all(isinstance(each, str) for each in mark.args):
        raise UsageProblem(f"{node.nodeid}: fa_suite takes names of suites, such as fa_suite('edge')")
    return tuple(mark.args)


def tolerance_of(node: Node) -> str | None:
    """The policy that a test is marked with.  Raises `UsageProblem`."""
    mark = node.get_closest_marker("fa_tolerance")
    if mark is None:
        return None
    (policy,) = mark.args if len(mark.args) == 1 and not mark.kwargs else (None,)
    if policy in POLICIES:
        warnings.warn(
            f"{node.nodeid}: fa_tolerance: {renamed(policy, POLICIES[policy])}", DeprecationWarning, stacklevel=2
        )
        policy = POLICIES[policy]
    if policy not in TOLERANCES:
        raise UsageProblem(f"{node.nodeid}: fa_tolerance takes one of {', '.join(TOLERANCES)}; it is {policy!r}")
    return str(policy)


def gate_of(node: Node) -> float | None:
    """The ratio that a test is marked with.  Raises `UsageProblem`."""
    mark = node.get_closest_marker("fa_gate")
    if mark is None:
        return None
    (ratio,) = mark.args if len(mark.args) == 1 and not mark.kwargs else (None,)
    if not isinstance(ratio, int | float) or not LEAST_GATE <= ratio <= MOST_GATE:
        raise UsageProblem(
            f"{node.nodeid}: fa_gate takes a ratio of {LEAST_GATE:g} to {MOST_GATE:g}, such as 0.95; it is {ratio!r}"
        )
    return float(ratio)


def read_marker(read: Callable[[pytest.Item], T], node: pytest.Item) -> T:
    """What one of the functions above reads from a test's marker; a marker that cannot be read fails its test."""
    try:
        return read(node)
    except UsageProblem as problem:
        pytest.fail(str(problem), pytrace=False)

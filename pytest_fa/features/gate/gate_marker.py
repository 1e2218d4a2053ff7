"""The marker `fa_gate(ratio)` of a user's own test."""

from __future__ import annotations

from _pytest.nodes import Node

from pytest_fa.errors import UsageProblem
from pytest_fa.features.gate.plugin import MAX_RATIO, MIN_RATIO


def gate_of(node: Node) -> float | None:
    """The ratio of a test's marker; None without the marker.  Raises `UsageProblem` for a wrong marker."""
    mark = node.get_closest_marker("fa_gate")
    if mark is None:
        return None
    (ratio,) = mark.args if len(mark.args) == 1 and not mark.kwargs else (None,)
    if not isinstance(ratio, int | float) or not MIN_RATIO <= ratio <= MAX_RATIO:
        raise UsageProblem(
            f"{node.nodeid}: fa_gate takes a ratio of {MIN_RATIO:g} to {MAX_RATIO:g}, such as 0.95; it is {ratio!r}"
        )
    return float(ratio)

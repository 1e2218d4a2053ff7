"""The memory of one call, and the limits that a manifest sets for it."""

from __future__ import annotations

from typing import NamedTuple

from pytest_fa.catalog.variant import Limits
from pytest_fa.errors import OverLimit


class CallMemory(NamedTuple):
    """How large a workspace a call asks for, and how much memory it has at most; `Record` explains both."""

    workspace_bytes: int | None = None
    peak_bytes: int | None = None


def require_within(memory: CallMemory, limits: Limits) -> None:
    """Raise `OverLimit` with a sentence for each limit that is exceeded, or that cannot be checked."""
    broken = []
    for name, value in memory._asdict().items():
        allowed = getattr(limits, name)
        if allowed is None:
            continue
        if value is None:
            reason = "on the CPU, where memory is not measured"
            broken.append(f"limits.{name} cannot be checked {reason}: judge it on a GPU, or leave the limit out")
        elif value > allowed:
            advice = f"use less, or raise limits.{name} in the manifest"
            broken.append(f"{name} is {value}, the limit is {allowed}: {advice}")
    if broken:
        raise OverLimit("\n".join(broken))

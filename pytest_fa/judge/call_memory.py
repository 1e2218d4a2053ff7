"""The memory of one call."""

from __future__ import annotations

from typing import NamedTuple


class CallMemory(NamedTuple):
    """How large a workspace a call asks for, and how much memory it has at most; `Record` explains both."""

    workspace_bytes: int | None = None
    peak_bytes: int | None = None

"""What a process does with the memory of a GPU between two jobs."""

from __future__ import annotations

import pytest
import torch

from pytest_fa.gpu.device import give_memory_back


@pytest.mark.parametrize(
    ("is_initialized", "reserved_bytes", "used_bytes", "gives_back"),
    [
        (True, 2**30, 0, False),
        (True, 2**30 + 1, 0, True),
        (True, 2**31, 2**30, False),
        (False, 2**31, 0, False),
    ],
)
def test_more_than_one_gib_is_given_back(
    monkeypatch: pytest.MonkeyPatch, reserved_bytes: int, used_bytes: int, *, is_initialized: bool, gives_back: bool
) -> None:
    """Other processes may need what torch keeps without a use; a little is kept, because allocations take time."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_initialized)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: reserved_bytes)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: used_bytes)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    give_memory_back()
    assert calls == ["empty_cache"] * gives_back


def test_a_lost_context_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next job notices the context; the result of this one must still be sent."""

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2**31)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", fail)
    give_memory_back()

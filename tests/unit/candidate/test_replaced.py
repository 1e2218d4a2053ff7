"""Functions that a variant replaces in its process are named."""

from __future__ import annotations

import time

import pytest
import torch

from pytest_fa.candidate.agent import Agent
from pytest_fa.candidate.replaced import Originals
from pytest_fa.errors import Tampering


def test_nothing_is_replaced() -> None:
    """Imports, and variants that replace nothing, are no tampering."""
    originals = Originals()
    originals.require_all()


@pytest.mark.parametrize(
    ("owner", "attribute", "name"),
    [
        (time, "perf_counter_ns", "time.perf_counter_ns"),
        (torch, "equal", "torch.equal"),
        (torch.cuda.Event, "elapsed_time", "torch.cuda.Event.elapsed_time"),
        (Agent, "execute", "pytest_fa.candidate.agent.Agent.execute"),
    ],
)
def test_a_replaced_function_is_named(
    monkeypatch: pytest.MonkeyPatch, owner: object, attribute: str, name: str
) -> None:
    """A clock, a comparison, an event and a method of this package are watched."""
    originals = Originals()
    with monkeypatch.context() as patch:
        patch.setattr(owner, attribute, lambda *_: 0)
        with pytest.raises(Tampering, match=name) as raised:
            originals.require_all()
    assert raised.value.caught_by == ("functions",)
    originals.require_all()


def test_many_replaced_functions_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three are named, the others are counted."""
    originals = Originals()
    with monkeypatch.context() as patch:
        for name in ("time_ns", "process_time", "process_time_ns", "perf_counter_ns"):
            patch.setattr(time, name, lambda: 0)
        with pytest.raises(Tampering, match=r"(time\.\w+, ){2}time\.\w+ and 1 others"):
            originals.require_all()

"""The profiler is loaded without what it does not need, and the clocks are read during its load."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from pytest_fa.measure import profiler_time
from pytest_fa.measure.profiler_time import REPLAYS
from pytest_fa.records.timing import Clocks

LOADED = """
import sys
from pytest_fa.measure.profiler_time import load_profiler
load_profiler("cpu")
print(*sorted({"torch.autograd.profiler", "torch._dynamo", "torch._inductor", "sympy"} & set(sys.modules)))
"""


def test_the_profiler_loads_no_compiler() -> None:
    """The first profile of a process does not import torch.compile's compiler, which takes seconds."""
    run = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    assert "torch.autograd.profiler" == run.stdout.strip()


@pytest.mark.parametrize("load_replays", [0, 1, 100])
def test_the_clocks_are_read_while_the_gpu_is_loaded(monkeypatch: pytest.MonkeyPatch, load_replays: int) -> None:
    """The clocks are read after three quarters of the load, while the rest of it runs; without load, they are not."""
    steps: list[str] = []
    clocks = Clocks(1700, 3201, 690.0, 60, 0x04)

    def read_clocks() -> Clocks:
        steps.append("read")
        return clocks

    event = SimpleNamespace(record=lambda: steps.append("record"), synchronize=lambda: steps.append("wait"))
    results = SimpleNamespace(kineto_results=SimpleNamespace(events=list))
    graph = cast("torch.cuda.CUDAGraph", SimpleNamespace(replay=lambda: steps.append("replay")))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: steps.append("end"))
    monkeypatch.setattr(profiler_time, "_profiler", lambda: nullcontext(results))

    durations, during = profiler_time._durations(graph, 0, load_replays, read_clocks)

    assert (durations, during) == ({}, clocks if load_replays else None)
    assert steps.count("replay") == load_replays + REPLAYS
    if load_replays:
        assert steps.index("record") == load_replays * 3 // 4 + 1
        assert steps[-3:] == ["wait", "read", "end"]
    else:
        assert steps[-2:] == ["replay", "end"]

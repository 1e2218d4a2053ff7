"""The profiler loads no compiler; its calls read new data and are judged; the judge reads the clocks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from pytest_fa.gpu import profiler
from pytest_fa.gpu.device_tools import DeviceTools
from pytest_fa.judge.candidate import CommandTimes
from pytest_fa.judge.clocks import launch_overhead, profiler_time
from pytest_fa.judge.clocks.fresh_data import FreshData
from pytest_fa.judge.clocks.profiler_time import HEADS, NotProfiled, profile_calls
from pytest_fa.records.environment import ClockMonitor
from pytest_fa.records.timing import CallNodes, Clocks, LaunchedKernel, NodeTime
from pytest_fa.wire.commands import Done, Load, Profile, ProfilerReport

KERNEL = LaunchedKernel("kernel", (8, 1, 1), (128, 1, 1), 0)
CLOCKS = Clocks(1700, 3201, 690.0, 60, 0x04)

LOADED = """
import sys
from pytest_fa.gpu.profiler import load_profiler
load_profiler("cpu")
print(*sorted({"torch.autograd.profiler", "torch._dynamo", "torch._inductor", "sympy"} & set(sys.modules)))
"""


def test_the_profiler_loads_no_compiler() -> None:
    """The first profile of a process does not import torch.compile's compiler, which takes seconds."""
    run = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    assert "torch.autograd.profiler" == run.stdout.strip()


def test_the_durations_have_short_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of what ran on the device, in the order in which it began; work of the host is left out."""
    gpu, host = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU  # type: ignore[attr-defined]

    def event(start: int, ns: int, name: str = "void kernel<float>(int)", device: object = gpu) -> SimpleNamespace:
        values = {"device_type": device, "start_ns": start, "duration_ns": ns, "name": name}
        return SimpleNamespace(**{key: lambda value=value: value for key, value in values.items()})

    events = [event(3, 5000), event(1, 9000), event(2, 100, device=host), event(4, 7000, "Memset (Device)")]
    replays: list[int] = []
    graph = cast("torch.cuda.CUDAGraph", SimpleNamespace(replay=lambda: replays.append(1)))
    results = SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: events))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(profiler, "_profiler", lambda: nullcontext(results))

    assert profiler.durations_us(graph, 2) == {"kernel": [9.0, 5.0], "Memset ": [7.0]}
    assert len(replays) == 2


def test_the_period_of_spins_contains_no_delay_and_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A delay of single runs does not change the period, and the host launches while the GPU is busy.

    On an H100, a delay of 3 ms of one graph of 30 spin kernels once took 33 us off their period, and a right kernel's
    time was not confirmed.  On another one, the host's time to launch a graph added 0.3 us for each of its nodes.
    """
    delays_us = iter([0.0, 0.0, 3000.0, 0.0, 0.0, 500.0, 20.0, 0.0, 0.0, 70.0])  # of N and of 3N calls in turn
    replays: list[int] = []

    def captured(_: object, calls: int) -> SimpleNamespace:
        return SimpleNamespace(replay=lambda: replays.append(calls))

    def event_us(replay: Callable[[], object]) -> float:
        is_busy = bool(replays)
        replay()
        calls = replays.pop()
        replays.clear()
        return calls * 95.0 + next(delays_us) + (0 if is_busy else 0.3 * calls)

    monkeypatch.setattr(launch_overhead, "capture", captured)
    monkeypatch.setattr(launch_overhead, "event_us", event_us)
    assert launch_overhead.period_of_spin_us(lambda: None, 10, lambda: None) == pytest.approx(95.0)
    assert [launch_overhead.calls_of_graph(us) for us in (0.0, 2.0, 30.0, 5000.0)] == [500, 500, 34, 10]


def test_the_offset_is_of_the_shortest_spins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose clock still rises does not change the profiler's offset, and lost records give none."""
    calls = 334  # of 3 us
    slow, fast = [5.0, 4.0] * calls, [3.0, 2.0] * calls
    rising = {"spin": [*slow, *fast, *slow], "Memset ": [2.0, 1.0, 1.5]}
    monkeypatch.setattr(profiler_time, "period_of_spin_us", lambda *_: 6.0)
    monkeypatch.setattr(profiler_time, "capture", lambda *_: SimpleNamespace(replay=lambda: None))
    data = cast("FreshData", SimpleNamespace(candidate=SimpleNamespace(before_launch=lambda: None)))
    tools = cast("DeviceTools", SimpleNamespace(cycles_per_us=1.0))
    monkeypatch.setattr(profiler_time, "durations_us", lambda *_: rising)
    offset_us = profiler_time._clock_offset_us(data, CallNodes((KERNEL,), {}), 3.0, tools)
    assert offset_us == pytest.approx(6.0 - (5.0 * calls + 1.0) / calls)
    rising["spin"].pop()
    with pytest.raises(NotProfiled, match="lost records"):
        profiler_time._clock_offset_us(data, CallNodes((KERNEL,), {}), 3.0, tools)
    rising.clear()
    with pytest.raises(NotProfiled, match="lost records"):
        profiler_time._clock_offset_us(data, CallNodes((KERNEL,), {}), 3.0, tools)


class Series:
    """Stands for `TimedSeries`: writes down its runs, and reports durations of 3 us for each of its records."""

    launches: tuple[LaunchedKernel, ...] = (KERNEL,)
    missing: str | None = None
    records_of_call = 1

    def __init__(self, data: FreshData, name: str, calls: int) -> None:
        self.data, self.name, self.calls = data, name, calls
        self.captured = Done(launches=self.launches, launches_missing=self.missing)
        self.nodes = CallNodes(self.launches, {})
        cast("Any", data).made.append(self)
        self.runs: list[tuple[int, object]] = []

    def time(self, heads: int = 1, command: Profile | None = None) -> CommandTimes:
        """Write the run down."""
        self.runs.append((heads, command))
        count = self.calls * self.records_of_call
        return CommandTimes(1.0, (), (), ProfilerReport((NodeTime("kernel", 3.0, 1),), count) if command else None)

    def written_head(self) -> str:
        """One head."""
        return "last"

    def written_heads(self) -> list[str]:
        """The chosen heads."""
        return ["chosen"] * HEADS


def simulated(monkeypatch: pytest.MonkeyPatch, series: type[Series] = Series) -> tuple[Any, Callable[[float], Any]]:
    """What a simulated judge has at hand, and `profile_calls` with it for calls of so many microseconds."""

    def timed(command: Load, meanwhile: Callable[[], object]) -> None:
        data.done.append(command)
        meanwhile()

    data = SimpleNamespace(made=[], done=[], candidate=SimpleNamespace(before_launch=lambda: None, timed=timed))
    data.require_untouched = lambda: data.done.append("require_untouched")
    monkeypatch.setattr(profiler_time, "TimedSeries", series)
    monkeypatch.setattr(profiler_time, "_clock_offset_us", lambda *_: 0.5)
    monkeypatch.setattr(profiler_time, "time", SimpleNamespace(sleep=data.done.append))
    watch, tools = cast("ClockMonitor", SimpleNamespace(now=lambda: CLOCKS)), cast("DeviceTools", None)
    return data, lambda device_us: profile_calls(cast("FreshData", data), device_us, tools, watch)


@pytest.mark.parametrize(
    ("device_us", "calls", "load_replays"),
    [(3.0, 30, 0), (29.9, 30, 0), (100.0, 30, 167), (5000.0, 6, 17), (1e6, 3, 1)],
)
def test_profiled_calls_are_judged_and_long_ones_loaded(
    monkeypatch: pytest.MonkeyPatch, device_us: float, calls: int, load_replays: int
) -> None:
    """Calls run on new data after a warm-up; heads are returned to be judged; the judge reads clocks in the load."""
    data, profile = simulated(monkeypatch)
    profiled = profile(device_us)
    (series,) = data.made
    assert (series.name, series.calls) == ("profiled", calls)
    assert series.runs == [(1, None), (HEADS, Profile("profiled"))]  # each on data of its own
    assert profiled.written == ["last", *["chosen"] * HEADS]
    load = [Load("profiled", load_replays), 0.375] if load_replays else []
    assert data.done == [*load, "require_untouched"]
    assert (profiled.time.profiler_us, profiled.time.clock_offset_us, profiled.time.missing_count) == (3.0, 0.5, 0)
    assert profiled.time.clocks == (CLOCKS if load_replays else None)


def test_lost_records_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge knows how many records there must be: the calls times the nodes that it read from the graph."""

    class Loses(Series):
        records_of_call = 0

    _, profile = simulated(monkeypatch, Loses)
    assert profile(3.0).time.missing_count == 30


@pytest.mark.parametrize(
    ("launches", "missing", "reason"),
    [((), None, "it launches no kernel"), ((), "30 calls in a row do not", "30 calls in a row do not")],
)
def test_calls_without_known_kernels_have_no_time(
    monkeypatch: pytest.MonkeyPatch, launches: tuple[LaunchedKernel, ...], missing: str | None, reason: str
) -> None:
    """A call that launches nothing, or whose nodes cannot be read, is not profiled, and the reason is given."""
    kind = type("Other", (Series,), {"launches": launches, "missing": missing})
    _, profile = simulated(monkeypatch, kind)
    with pytest.raises(NotProfiled, match=reason):
        profile(3.0)

"""Timing on the CPU, with a clock that the kernel itself advances: number and content of samples, timed outputs."""

from __future__ import annotations

import gc
import math
import time
from typing import Any

import pytest
import torch
from pytest_fa.measure.rotation import Rotation

from pytest_fa.catalog.case import parse_case
from pytest_fa.measure import call_time as call_time_module
from pytest_fa.measure import device_time as device_time_module
from pytest_fa.measure.call_time import call_time
from pytest_fa.measure.device_time import device_time
from pytest_fa.measure.measure import measure
from pytest_fa.run.inputs import make_inputs

CPU = torch.device("cpu")
CASE = parse_case("b1h1s16d64-fp16-seed0")


class Kernel:
    """A kernel that writes the number of its call into the output.

    Its calls take `costs_us` microseconds in turn; all further calls take as long as the last.
    """

    def __init__(self, *costs_us: float) -> None:
        self.now_ns = 0
        self.calls = 0
        self.collected: list[bool] = []
        self._costs_us = costs_us

    def __call__(self, *_: Any, **keywords: Any) -> torch.Tensor:
        """Advance the clock by the cost of this call and write the output."""
        self.now_ns += round(1000 * self._costs_us[min(self.calls, len(self._costs_us) - 1)])
        self.calls += 1
        self.collected.append(gc.isenabled())
        out: torch.Tensor = keywords["out"]
        return out.fill_(self.calls)

    def perf_counter_ns(self) -> int:
        """The clock, which only calls of this kernel advance."""
        return self.now_ns

    def process_time_ns(self) -> int:
        """The time on a core: half of the clock, as if another program had the core for the other half."""
        return self.now_ns // 2


@pytest.fixture
def rotation() -> Rotation:
    """The rotation of a CPU, which has one set of buffers."""
    return Rotation(CASE, make_inputs(CASE, CPU), None)


def clocked(monkeypatch: pytest.MonkeyPatch, *costs_us: float) -> Kernel:
    """A kernel whose clock replaces the real one in the timing modules."""
    kernel = Kernel(*costs_us)
    for module in (device_time_module, call_time_module):
        monkeypatch.setattr(module, "time", kernel)
    return kernel


# -- device time ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cost_us", "samples"),
    [(1.0, 50), (1_000.0, 50), (4_000.0, 50), (10_000.0, 20), (50_000.0, 5), (500_000.0, 5), (1e6, 3), (4e6, 1)],
)
def test_number_of_samples(monkeypatch: pytest.MonkeyPatch, rotation: Rotation, cost_us: float, samples: int) -> None:
    """At least 5 calls and 0.2 s, at most 50 calls, and none after 3 s; the first call is not a sample."""
    kernel = clocked(monkeypatch, cost_us)

    timing = device_time(kernel, rotation, CPU)

    assert timing.samples_us == (cost_us,) * samples
    assert (timing.median_us, timing.calls_per_sample, timing.method) == (cost_us, 1, "wall clock of one call")
    assert kernel.calls == samples + 1


def test_first_call_does_not_count(monkeypatch: pytest.MonkeyPatch, rotation: Rotation) -> None:
    """The first call, which includes one-time set-up, is not a sample."""
    kernel = clocked(monkeypatch, 1e6, 100.0)

    assert max(device_time(kernel, rotation, CPU).samples_us) == 100.0


def test_samples_are_raw(monkeypatch: pytest.MonkeyPatch, rotation: Rotation) -> None:
    """All samples are reported in order, outliers included, with their median."""
    kernel = clocked(monkeypatch, 1.0, 300_000.0, 100_000.0, 900_000.0, 200_000.0, 400_000.0)

    timing = device_time(kernel, rotation, CPU)

    assert timing.samples_us == (300_000.0, 100_000.0, 900_000.0, 200_000.0, 400_000.0)
    assert timing.median_us == 300_000.0


def test_outputs_are_those_of_timed_calls(monkeypatch: pytest.MonkeyPatch, rotation: Rotation) -> None:
    """After timing, the rotation's output is that of the last timed call."""
    kernel = clocked(monkeypatch, 50_000.0)

    device_time(kernel, rotation, CPU)

    # `outputs` negates back, because the timed data were negated.
    assert [float(out.flatten()[0]) for out in rotation.outputs] == [-kernel.calls]


def test_timed_call_that_writes_nothing_is_found(rotation: Rotation) -> None:
    """If a kernel writes only in its first call, the timed outputs are NaN."""
    written: list[torch.Tensor] = []

    def writes_once(*_: Any, **keywords: Any) -> torch.Tensor:
        out: torch.Tensor = keywords["out"]
        if not written:
            written.append(out.fill_(1.0))
        time.sleep(0.05)
        return out

    device_time(writes_once, rotation, CPU)

    assert [bool(out.isnan().all()) for out in rotation.outputs] == [True]


def test_real_clock(rotation: Rotation) -> None:
    """On the real clock, a kernel that sleeps for 5 ms takes at least 5 ms and less than 15 ms."""

    def sleeps(*_: Any, **keywords: Any) -> torch.Tensor:
        time.sleep(0.005)
        out: torch.Tensor = keywords["out"]
        return out

    timing = device_time(sleeps, rotation, CPU)

    assert 5_000 <= timing.median_us < 15_000
    assert min(timing.samples_us) >= 5_000


# -- call time --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cost_us", "calls", "samples"),
    [(1.0, 200, 20), (100.0, 20, 20), (2_000.0, 1, 20), (10_000.0, 1, 20), (100_000.0, 1, 10), (1e6, 1, 3)],
)
def test_batches(monkeypatch: pytest.MonkeyPatch, rotation: Rotation, cost_us: float, calls: int, samples: int) -> None:
    """Batches of 2 ms and at most 200 calls; 20 batches, or 3 to 20 that fit in 1 s; samples are per call."""
    kernel = clocked(monkeypatch, cost_us)

    timing = call_time(kernel, rotation, CPU)

    assert timing.samples_us == pytest.approx((cost_us,) * samples)
    assert (timing.calls_per_sample, timing.method) == (calls, f"wall clock of batches of {calls} calls")


def test_garbage_collector_is_off_during_samples(monkeypatch: pytest.MonkeyPatch, rotation: Rotation) -> None:
    """Python's garbage collector is off during samples and on again afterwards."""
    kernel = clocked(monkeypatch, 50_000.0)

    timing = call_time(kernel, rotation, CPU)

    assert set(kernel.collected[-len(timing.samples_us) :]) == {False}
    assert gc.isenabled()


def test_garbage_collector_is_on_after_a_failure(monkeypatch: pytest.MonkeyPatch, rotation: Rotation) -> None:
    """If a kernel raises while it is timed, the garbage collector is on again afterwards."""
    kernel = clocked(monkeypatch, 50_000.0)

    def fails(*arguments: Any, **keywords: Any) -> torch.Tensor:
        assert kernel.calls < 5, "worn out"
        return kernel(*arguments, **keywords)

    with pytest.raises(AssertionError, match="worn out"):
        call_time(fails, rotation, CPU)

    assert kernel.collected[-1] is False
    assert gc.isenabled()


# -- both -------------------------------------------------------------------------------------------------------------


def test_measure_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU there is one set of buffers, no launches and no clocks; timed outputs are returned to be judged."""
    kernel = clocked(monkeypatch, 50_000.0)

    speed, outputs = measure(kernel, CASE, make_inputs(CASE, CPU), CASE.id)

    assert (speed.device.median_us, speed.call.median_us) == (50_000.0, 50_000.0)
    assert (speed.buffers, speed.exceeds_l2) == (1, False)
    assert (speed.launches, speed.launches_missing) == ((), "runs on the CPU")
    assert (speed.clocks_before, speed.clocks_after) == (None, None)
    after_device, after_calls = (-float(out.flatten()[0]) for out in outputs)  # the timed data were negated
    assert (after_device, after_calls > after_device) == (1.0 + len(speed.device.samples_us), True)
    assert not math.isnan(float(outputs[0].flatten()[-1]))

"""What makes times on the CPU comparable: one thread, the time on a core, and the calibration."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from pytest_fa.measure.rotation import Rotation

from pytest_fa.catalog.case import parse_case
from pytest_fa.measure.cpu_time import CPU_THREADS, fixed_cpu_threads, make_calibration
from pytest_fa.measure.device_time import device_time
from pytest_fa.measure.measure import measure
from pytest_fa.run.inputs import make_inputs

CPU = torch.device("cpu")
CASE = parse_case("b1h1s16d64-fp16-seed0")


@pytest.fixture
def _two_threads() -> Any:
    """Torch uses two threads in this test."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_two_threads")
def test_every_call_has_one_thread() -> None:
    """Every timed call runs with one torch thread, the record says so, and the number of threads is restored."""
    threads = set()

    def kernel(*_: Any, **keywords: Any) -> torch.Tensor:
        threads.add(torch.get_num_threads())
        out: torch.Tensor = keywords["out"]
        return out.fill_(0.0)

    speed, _ = measure(kernel, CASE, make_inputs(CASE, CPU), "kernel")
    assert (threads, speed.cpu_threads, torch.get_num_threads()) == ({CPU_THREADS}, 1, 2)
    assert speed.is_on_cpu


@pytest.mark.usefixtures("_two_threads")
def test_a_kernel_that_takes_more_threads_is_recorded() -> None:
    """The record has the number of threads in the end, so that a kernel that sets another number is seen."""

    def kernel(*_: Any, **keywords: Any) -> torch.Tensor:
        torch.set_num_threads(2)
        out: torch.Tensor = keywords["out"]
        return out.fill_(0.0)

    assert measure(kernel, CASE, make_inputs(CASE, CPU), "kernel")[0].cpu_threads == 2


@pytest.mark.usefixtures("_two_threads")
def test_the_threads_are_restored_after_an_exception() -> None:
    """An exception restores the number of threads, too; on a GPU it is not changed."""
    with pytest.raises(ValueError, match="stop"), fixed_cpu_threads(CPU):
        raise ValueError("stop")
    with fixed_cpu_threads(torch.device("meta")):
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == 2


def test_time_that_the_process_does_not_run_is_seen() -> None:
    """A call that sleeps for 20 ms, as if another program had the core, is on a core for less than 10 ms."""

    def sleeps(*_: Any, **keywords: Any) -> torch.Tensor:
        time.sleep(0.02)
        out: torch.Tensor = keywords["out"]
        return out.fill_(0.0)

    timing = device_time(sleeps, Rotation(CASE, make_inputs(CASE, CPU), None), CPU)
    assert timing.on_core_us is not None
    assert timing.median_us >= 20_000
    assert timing.on_core_us < 10_000


def test_the_calibration_is_short() -> None:
    """The calibration takes a positive time, and less than 1 ms at least once."""
    calibration = make_calibration()
    times = [calibration() for _ in range(20)]
    assert min(times) > 0
    assert min(times) < 1000

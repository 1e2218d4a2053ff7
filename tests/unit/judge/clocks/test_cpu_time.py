"""What makes times on the CPU comparable: one thread, the time on a core, and the calibration."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from pytest_fa.catalog.case import parse_case
from pytest_fa.gpu.inputs import make_inputs
from pytest_fa.judge.candidate import Candidate
from pytest_fa.judge.clocks.cpu_time import CPU_THREADS, core_clock, make_calibration
from pytest_fa.judge.clocks.measure import measure

CASE = parse_case("b1h1s16d64-fp16-seed0")


@pytest.fixture
def _two_threads() -> Iterator[None]:
    """Torch uses two threads in this test."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def candidate_of(forward: Callable[..., torch.Tensor]) -> Candidate:
    """A candidate that is a function of this process."""
    return Candidate.of_function(forward, "cpu")


@pytest.mark.usefixtures("_two_threads")
def test_every_call_has_one_thread() -> None:
    """Every timed call runs with one torch thread, the record says so, and the number of threads is restored."""
    threads = set()

    def kernel(*_: torch.Tensor, out: torch.Tensor, **__: object) -> torch.Tensor:
        threads.add(torch.get_num_threads())
        return out.fill_(0.0)

    speed, _ = measure(candidate_of(kernel), CASE, make_inputs(CASE, torch.device("cpu")))
    assert (threads, speed.cpu_threads, torch.get_num_threads()) == ({CPU_THREADS}, 1, 2)
    assert speed.is_on_cpu


def test_time_that_a_process_does_not_run_is_seen() -> None:
    """While a process sleeps for 100 ms, its clock of the cores shows less than 50 ms."""
    clock_us = core_clock(os.getpid())
    start_us = clock_us()
    time.sleep(0.1)
    assert 0 <= clock_us() - start_us < 50_000


def test_time_that_a_process_runs_is_seen() -> None:
    """While a process uses 20 ms of a core by its own account, its clock of the cores shows that."""
    clock_us = core_clock(os.getpid())
    start_us, own_start = clock_us(), time.process_time()
    while time.process_time() - own_start < 0.02:
        pass
    assert clock_us() - start_us >= 20_000


def test_the_calibration_is_short() -> None:
    """The calibration takes a positive time, and less than 1 ms at least once."""
    calibration = make_calibration()
    times = [calibration() for _ in range(20)]
    assert min(times) > 0
    assert min(times) < 1000

"""What makes times on the CPU comparable: a fixed number of threads, and a calibration beside the samples.

Everything on the CPU, candidates and SDPA backends alike, is timed with `CPU_THREADS` torch threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

CPU_THREADS = 1  # times with several threads depend on what else runs on the machine, and on its number of cores
CALIBRATION_SIZE = 48  # rows and columns; three such matrices leave most of the L1 cache to the kernel
CALIBRATION_CALLS = 3  # of which the shortest counts: the first one finds cold caches


def core_clock(pid: int) -> Callable[[], float]:
    """A function that returns how long a process has run on the CPU's cores, in us, all its threads together."""
    clock = (~pid << 3) | 2  # what clock_getcpuclockid(3) makes of a process id
    return lambda: time.clock_gettime_ns(clock) / 1000


def make_calibration() -> Callable[[], float]:
    """A function that does a fixed piece of work, a product of two matrices, and returns its wall-clock time in us.

    The work is the same for every variant, so that a difference shows how fast the machine was at that moment.
    """
    left = torch.linspace(-1, 1, CALIBRATION_SIZE**2).view(CALIBRATION_SIZE, CALIBRATION_SIZE)
    right, product = left.t().contiguous(), torch.empty_like(left)

    def elapsed_us() -> float:
        start = time.perf_counter_ns()
        torch.mm(left, right, out=product)
        return (time.perf_counter_ns() - start) / 1000

    return lambda: min(elapsed_us() for _ in range(CALIBRATION_CALLS))

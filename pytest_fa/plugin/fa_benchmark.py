"""`FaBenchmark`, which passes times of kernels to pytest-benchmark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_fa.catalog.case import Case
from pytest_fa.plugin.replay_clock import ReplayClock, replay
from pytest_fa.plugin.state import IN_TABLE_KEY, RECORD_KEY
from pytest_fa.records.timing import Speed

if TYPE_CHECKING:
    from pytest_fa.candidate.forward import Forward
    from pytest_fa.gpu.inputs import Inputs


class FaBenchmark:
    """Times kernels through pytest-benchmark: `fa_benchmark(fa_module, fa_case, fa_inputs)`.

    `record` passes on a `Speed` that was measured elsewhere.
    """

    def __init__(self, request: pytest.FixtureRequest, clock: ReplayClock, benchmark: Any) -> None:  # noqa: ANN401
        self._request = request
        self._clock = clock
        self._benchmark = benchmark

    def __call__(self, forward: Forward, case: Case, inputs: Inputs) -> Speed:
        """Time `forward` in this process, pass its device times to pytest-benchmark, and return all times.

        The test fails if an output of the timed calls is wrong.
        """
        from pytest_fa.plugin.in_process import time_here  # noqa: PLC0415  # torch: only for in-process tests

        speed = time_here(self._request, forward, case, inputs)
        self.record(speed, case)
        return speed

    def record(self, speed: Speed, case: Case, **extra: float | str) -> None:
        """Pass the samples of `device_us` to pytest-benchmark, grouped by shape, with other figures as extra info."""
        if getattr(self._benchmark, "disabled", False):
            self._benchmark(lambda: None)
            return
        if RECORD_KEY in self._request.node.stash:
            self._request.config.stash.setdefault(IN_TABLE_KEY, set()).add(self._request.node.nodeid)
        self._benchmark.group = case.shape_id
        replay(self._clock, self._benchmark, speed.device.samples_us)
        self._benchmark.extra_info.update(
            method=speed.device.method,
            call_us=speed.call.median_us,
            tflops=case.flops_per_call / speed.device.median_us / 1e6,
            **extra,
        )

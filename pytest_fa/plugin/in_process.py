"""The work of the fixtures for a user's own tests, in pytest's process: find the device, judge outputs, time calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from pytest_fa.plugin.markers import read_marker, tolerance_of
from pytest_fa.plugin.replay_clock import ReplayClock, replay
from pytest_fa.plugin.state import IN_TABLE_KEY, LOST_KEY, OPTIONS_KEY, RECORD_KEY, SESSION_KEY, session_of

if TYPE_CHECKING:
    import torch

    from pytest_fa.candidate.forward import Forward
    from pytest_fa.catalog.case import Case
    from pytest_fa.catalog.variant import Variant
    from pytest_fa.gpu.inputs import Inputs
    from pytest_fa.records.checks import Check
    from pytest_fa.records.timing import Speed


@contextmanager
def device_kept(request: pytest.FixtureRequest, device: str) -> Iterator[None]:
    """The context of an in-process test, which notices if the test loses the device.

    After a sticky CUDA error, such as an illegal address, a process cannot use the GPU any more.  Later tests then fail
    with the name of the test that lost it.
    """
    import torch  # noqa: PLC0415  # only for in-process tests

    from pytest_fa.gpu.device import is_alive  # noqa: PLC0415

    stash = request.config.stash
    if device != "cpu" and LOST_KEY in stash:
        pytest.fail(f"this process can no longer use the GPU: {stash[LOST_KEY]}", pytrace=False)
    yield
    if device != "cpu" and LOST_KEY not in stash and not is_alive(torch.device(device)):
        stash[LOST_KEY] = f"its CUDA context was lost in {request.node.nodeid}"


def device_or_skip(variant: Variant) -> str:
    """The device on which a variant runs on this machine; skips the test if there is none."""
    from pytest_fa.session.builds import device_of  # noqa: PLC0415
    from pytest_fa.session.refusals import CannotRun  # noqa: PLC0415

    try:
        return device_of(variant)
    except CannotRun as reason:
        pytest.skip(str(reason))


def variant_of(request: pytest.FixtureRequest) -> Variant | None:
    """The variant under test; None if the test does not use `fa_variant`."""
    return request.getfixturevalue("fa_variant") if "fa_variant" in request.fixturenames else None


def policy_of(request: pytest.FixtureRequest, case: Case) -> str:
    """The tolerance policy of `--fa-tolerance`, else of the marker, else of the manifest, else `same_precision`."""
    variant = variant_of(request)
    marked = read_marker(tolerance_of, request.node)
    from pytest_fa.catalog.variant import tolerance_for  # noqa: PLC0415  # only a test that judges needs it

    of_variant = tolerance_for(variant.tolerance, case.dtype) if variant else "same_precision"
    policy = request.config.stash[OPTIONS_KEY].tolerance or marked or of_variant
    if case.computes == "scores" and policy != "same_precision":
        reason = f"tolerance policy {policy} judges attention; {case.shape_id} is a case of scores (use same_precision)"
        pytest.fail(reason, pytrace=False)
    return policy


def judge_outputs(
    request: pytest.FixtureRequest, case: Case, inputs: Inputs, outputs: Iterable[torch.Tensor], where: str = ""
) -> Check:
    """Judge the outputs and return the check of the last one.  Fails with every bound of the first wrong output.

    `where` is appended to the message of a failure.
    """
    from pytest_fa.candidate.output import require_output  # noqa: PLC0415
    from pytest_fa.errors import WrongResult  # noqa: PLC0415
    from pytest_fa.gpu.inputs import poisoned_output  # noqa: PLC0415
    from pytest_fa.judge.oracle import truth_of  # noqa: PLC0415
    from pytest_fa.judge.output_check import check_output  # noqa: PLC0415  # torch: only for in-process tests
    from pytest_fa.table.failure import check_lines  # noqa: PLC0415

    variant, policy = variant_of(request), policy_of(request, case)
    truth = truth_of(case.computes, inputs, variant.rounds if variant else (), policy)
    like = poisoned_output(inputs, case.computes)
    for out in outputs:
        try:
            check = check_output(require_output(out, like), truth, policy)
        except WrongResult as problem:
            pytest.fail(f"{problem}{where}", pytrace=False)
        if not check.passed:
            pytest.fail(
                f"wrong: {check.complaint}{where}\n" + "\n".join(check_lines(check, case.computes)), pytrace=False
            )
    return check


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
        from pytest_fa.host.timing_lock import timing_lock  # noqa: PLC0415
        from pytest_fa.judge.candidate import Candidate  # noqa: PLC0415  # torch: only for in-process tests
        from pytest_fa.judge.clocks.fresh_data import stacked  # noqa: PLC0415
        from pytest_fa.judge.clocks.measure import measure  # noqa: PLC0415

        if SESSION_KEY in self._request.config.stash:
            session_of(self._request.config).runner.profiler_workers.wait_until_prepared()
        with timing_lock():
            candidate = Candidate.of_function(forward, "cuda" if inputs.q.is_cuda else "cpu", case.computes)
            speed, written = measure(candidate, case, inputs)
        variant = variant_of(self._request)
        if variant is None or variant.is_judged:
            read, out = stacked(written)
            judge_outputs(self._request, case, read, [out], " in an output of the timed calls")
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

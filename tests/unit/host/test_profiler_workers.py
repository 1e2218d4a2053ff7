"""The client's side of the profiler: its process is prepared while checks run, and is ready before a timing begins."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from pytest_fa.catalog.case import parse_case
from pytest_fa.host.client import Workers
from pytest_fa.host.fork_server import ForkServer, ProcessRole, Worker
from pytest_fa.host.profiler_workers import PROFILED, ProfilerWorkers
from pytest_fa.options.options import Options
from pytest_fa.records.environment import Gpu
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import RecordKind
from pytest_fa.session.builds import Builds
from pytest_fa.session.case_runner import CaseRunner
from pytest_fa.session.record_factory import RecordFactory
from pytest_fa.session.run_plan import RunPlan
from pytest_fa.wire.jobs import CaseJob, CaseResult, PrepareProfiler, ProfilerJob, ProfilerResult
from tests.factories import PYTHON_SOURCE, options, speed
from tests.fake_nvml import pretend
from tests.worker_jobs import TINY, JobOfSource

KINDS: tuple[RecordKind, ...] = ("correct", "speed", "speed")
H200 = Gpu("NVIDIA H200", "GPU-aaaa", (9, 0), "580.1", "13.1")


def profiler_job(job_of_source: JobOfSource) -> ProfilerJob:
    """A job for a right function in Python."""
    return ProfilerJob(job_of_source(PYTHON_SOURCE).variant, parse_case(TINY), None, "same_precision", True, 1.0)


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="the profiler works on a GPU; tests/device has its test")
def test_without_a_gpu_it_says_so_once_a_call_is_profiled(job_of_source: JobOfSource) -> None:
    """The preparation fails, its process ends, and the job of a call has the reason, from a process of its own."""
    with ProfilerWorkers() as workers:
        workers.prepare()
        workers.wait_until_prepared()
        result = workers.run_profiler(profiler_job(job_of_source))
    assert result.profiler is None
    assert "CUDA" in (result.missing or "")


def test_a_process_that_is_lost_while_it_prepares_is_replaced(job_of_source: JobOfSource) -> None:
    """The next job runs in a new process."""
    with ProfilerWorkers() as workers:
        workers.prepare()
        assert workers._judge is not None
        lost = workers._judge.pid
        os.kill(lost, signal.SIGKILL)
        result = workers.run_profiler(profiler_job(job_of_source))
        assert workers._judge is None or workers._judge.pid != lost
    assert "crashed" not in (result.missing or "")


def test_it_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second `prepare` starts nothing, and neither does one after the process was ended."""
    forked: list[object] = []
    real = Workers._processes

    def fork(self: Workers, roles: tuple[ProcessRole, ...]) -> tuple[ForkServer, Worker]:
        forked.append(roles)
        return real(self, roles)

    monkeypatch.setattr(Workers, "_processes", fork)
    with ProfilerWorkers() as workers:
        workers.prepare()
        workers.prepare()
        workers.end_worker()
        workers.wait_until_prepared()
        workers.prepare()
    assert forked == [PROFILED]


def test_prepare_does_not_wait_for_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is stopped does not hold `prepare` up; it is ended after its time, and another one replaces it."""
    real = Workers._processes

    def stopped(self: Workers, roles: tuple[ProcessRole, ...]) -> tuple[ForkServer, Worker]:
        server, worker = real(self, roles)
        os.kill(worker.pid, signal.SIGSTOP)
        return server, worker

    monkeypatch.setattr(Workers, "_processes", stopped)
    with ProfilerWorkers() as workers:
        workers.prepare()
        assert workers._judge is not None
        begun = time.perf_counter()
        workers._preparing = PrepareProfiler(watchdog_seconds=1.0)
        workers.wait_until_prepared()
        assert 0.9 < time.perf_counter() - begun < 10
        assert workers._judge is None


# -- what calls it ----------------------------------------------------------------------------------------------------


class WritesDown(ProfilerWorkers):
    """Writes down what is asked of it, and starts nothing."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.calls = calls

    def prepare(self) -> None:
        """Write it down."""
        self.calls.append("prepare")

    def wait_until_prepared(self) -> None:
        """Write it down."""
        self.calls.append("wait")

    def run_profiler(self, job: ProfilerJob) -> ProfilerResult:
        """Write it down."""
        self.calls.append(f"profile {job.variant.name}")
        return ProfilerResult(None, "simulated")


class Jobs(Workers):
    """Writes down which jobs run, and returns results with a time for those that are timed."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.calls = calls

    def start_processes(self, job: CaseJob) -> None:
        """Start nothing."""

    def run(self, job: CaseJob) -> CaseResult:
        """Write the job down."""
        self.calls.append("time" if job.time else "check")
        return CaseResult(Outcome.OK, "", (), speed=speed(1.0) if job.time else None)


def runner_of(run_options: Options, calls: list[str]) -> CaseRunner:
    """A case runner whose workers write down what they are asked."""
    builds = Builds(run_options, RunPlan(run_options))
    return CaseRunner(run_options, builds, RecordFactory(run_options), Jobs(calls), WritesDown(calls))


@pytest.mark.usefixtures("fresh_gpu")
@pytest.mark.parametrize(
    ("has_timings", "gpus", "unprotected", "expected"),
    [
        (True, [H200], "", ["check", "prepare", "wait", "time", "wait", "time"]),
        (False, [H200], "", ["check", "wait", "time", "wait", "time"]),
        (True, [], "", ["check", "wait", "time", "wait", "time"]),
        (True, [H200], "one process on the GPU", ["check", "wait", "time", "wait", "time"]),
    ],
)
def test_it_is_ready_before_anything_is_timed(  # a case has four parts
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    job_of_source: JobOfSource,
    gpus: list[Gpu],
    unprotected: str,
    expected: list[str],
    *,
    has_timings: bool,
) -> None:
    """It is prepared after a check on a GPU, if timings follow, and waited for before a job that times."""
    pretend(monkeypatch, *gpus)
    monkeypatch.setattr("pytest_fa.host.timing_lock.SHARED_FOLDERS", (tmp_path,))  # where locks are
    calls: list[str] = []
    runner = runner_of(options(tmp_path), calls)
    runner.has_timings, runner.workers.unprotected = has_timings, unprotected
    job = job_of_source(PYTHON_SOURCE)
    for kind in KINDS:
        runner.run(job.variant, job.case, kind)
    assert [call for call in calls if not call.startswith("profile")] == expected

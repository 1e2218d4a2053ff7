"""A candidate that is started before its job, so that it opens a GPU while its variant is compiled."""

from __future__ import annotations

import os
import signal

import msgspec
import pytest
import torch

from pytest_fa.candidate import serving
from pytest_fa.host.client import Workers
from pytest_fa.host.fork_server import ForkServer
from pytest_fa.processes import children_of
from pytest_fa.wire.channel import Channel, channel_pair
from tests.factories import PYTHON_SOURCE, wait_until
from tests.worker_jobs import JobOfSource, is_running


def test_the_next_job_of_the_variant_gets_the_early_candidate(job_of_source: JobOfSource) -> None:
    """It was started once, and is not the one of the job before."""
    job = job_of_source(PYTHON_SOURCE)
    with Workers() as workers:
        assert workers.run(job).outcome == "ok"
        earlier = workers._candidates[0].pid
        workers.end_worker()
        workers.prepare_candidate(job.variant)
        workers.prepare_candidate(job.variant)
        (early,) = [each.pid for each in workers._candidates]
        assert is_running(early)
        result = workers.run(job)
        assert (result.outcome, result.message) == ("ok", "")
        assert [each.pid for each in workers._candidates] == [early]
    assert early != earlier


def started_on_gpu(workers: Workers) -> set[int]:
    """Start the server as on a machine with a GPU, and return the processes that it has forked on its own."""
    workers.start(on_gpu=True, with_candidate=True)
    server = workers._server
    assert server is not None
    assert wait_until(lambda: len(children_of(server.pid)) == len(("judge", "candidate")), 60.0)
    return set(children_of(server.pid))


def test_the_first_job_gets_the_candidate_that_was_started_with_the_judge(job_of_source: JobOfSource) -> None:
    """It opens the GPU before anything is known about the job.  Later jobs of its variant run in it, too."""
    job = job_of_source(PYTHON_SOURCE)
    with Workers() as workers:
        started = started_on_gpu(workers)
        for _ in range(2):
            assert workers.run(job).outcome == "ok"
            (candidate,) = [each.pid for each in workers._candidates]
            assert workers._judge is not None
            assert {candidate, workers._judge.pid} == started


def test_an_early_candidate_that_has_died_is_replaced(job_of_source: JobOfSource) -> None:
    """Its end says nothing about a variant that it has never loaded."""
    with Workers() as workers:
        started = started_on_gpu(workers)
        for process in started:
            os.kill(process, signal.SIGKILL)
        server = workers._server
        assert server is not None
        assert wait_until(lambda: not children_of(server.pid))
        result = workers.run(job_of_source(PYTHON_SOURCE))
        assert (result.outcome, result.message) == ("ok", "")
        (candidate,) = [each.pid for each in workers._candidates]
        assert candidate not in started


@pytest.mark.nightly
def test_without_a_candidate_only_the_judge_is_started(job_of_source: JobOfSource) -> None:
    """Where only one process may open the GPU, or another one may be timing, the candidate comes with its job."""
    with Workers() as workers:
        workers.start(on_gpu=True)
        server = workers._server
        assert server is not None
        assert wait_until(lambda: bool(children_of(server.pid)), 60.0)
        assert workers.run(job_of_source(PYTHON_SOURCE)).outcome == "ok"
        assert len(children_of(server.pid)) == 2


@pytest.mark.nightly
def test_a_candidate_that_no_job_has_needed_ends_with_the_others(job_of_source: JobOfSource) -> None:
    """Before a gate or another program, this run holds nothing on the GPU but its judge."""
    with Workers() as workers:
        started = started_on_gpu(workers)
        workers.end_worker()
        assert sum(map(is_running, started)) == 1
        assert workers.run(job_of_source(PYTHON_SOURCE)).outcome == "ok"


def test_a_job_of_another_variant_gets_a_new_candidate(job_of_source: JobOfSource) -> None:
    """A candidate belongs to the variant for which it was started."""
    job = job_of_source(PYTHON_SOURCE)
    elsewhere = msgspec.structs.replace(job.variant, folder="/elsewhere")
    with Workers() as workers:
        workers.run(job)
        workers.end_worker()
        workers.prepare_candidate(elsewhere)
        (early,) = [each.pid for each in workers._candidates]
        assert workers.run(job).outcome == "ok"
        assert [each.pid for each in workers._candidates] != [early]
        assert not is_running(early)


@pytest.mark.nightly
def test_without_a_judge_no_candidate_is_started(job_of_source: JobOfSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first job, and if the server does not answer, nothing is prepared and nothing fails."""
    job = job_of_source(PYTHON_SOURCE)
    with Workers() as workers:
        workers.prepare_candidate(job.variant)
        assert workers._candidates == []
        workers.run(job)
        workers.end_worker()

        def no_answer(*_: object) -> None:
            raise ConnectionError

        with monkeypatch.context() as patched:
            patched.setattr(ForkServer, "fork", no_answer)
            workers.prepare_candidate(job.variant)
        assert workers._candidates == []
        assert workers.run(job).outcome == "ok"


@pytest.mark.parametrize("without_attention", [False, True])
def test_processes_are_started_before_their_job(job_of_source: JobOfSource, *, without_attention: bool) -> None:
    """The job gets the judge and the candidates that were started for it."""
    job = msgspec.structs.replace(job_of_source(PYTHON_SOURCE), without_attention=without_attention)
    with Workers() as workers:
        workers.start_processes(job)
        started = [each.pid for each in workers._candidates]
        judge = workers._judge
        assert len(started) == 1 + without_attention
        result = workers.run(job)
        assert (result.outcome, result.message) == ("ok", "")
        assert (workers._judge, [each.pid for each in workers._candidates]) == (judge, started[:1])


@pytest.mark.nightly
def test_processes_of_another_variant_are_not_used(job_of_source: JobOfSource) -> None:
    """Those that were started for a variant end when a job of another one comes."""
    job = job_of_source(PYTHON_SOURCE)
    elsewhere = msgspec.structs.replace(job, variant=msgspec.structs.replace(job.variant, folder="/elsewhere"))
    with Workers() as workers:
        workers.start_processes(elsewhere)
        (started,) = [each.pid for each in workers._candidates]
        assert workers.run(job).outcome == "ok"
        assert [each.pid for each in workers._candidates] != [started]
        assert not is_running(started)


@pytest.mark.nightly
def test_only_the_first_job_has_processes_before(job_of_source: JobOfSource) -> None:
    """Later, others would have to end first, and they may hold memory of a GPU on which another process is timing."""
    job = job_of_source(PYTHON_SOURCE)
    elsewhere = msgspec.structs.replace(job, variant=msgspec.structs.replace(job.variant, folder="/elsewhere"))
    with Workers() as workers:
        workers.run(job)
        (kept,) = [each.pid for each in workers._candidates]
        workers.start_processes(elsewhere)
        assert [each.pid for each in workers._candidates] == [kept]
        assert is_running(kept)
        workers.end_worker()
        workers.start_processes(job)
        assert workers._candidates == []


@pytest.mark.nightly
def test_processes_that_cannot_be_started_are_missed_by_the_job(
    job_of_source: JobOfSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is raised before the job, which tries again."""
    job = job_of_source(PYTHON_SOURCE)

    def no_answer(*_: object) -> None:
        raise ConnectionError

    with Workers() as workers:
        with monkeypatch.context() as patched:
            patched.setattr(ForkServer, "fork", no_answer)
            workers.start_processes(job)
        assert workers._candidates == []
        assert workers.run(job).outcome == "ok"


@pytest.mark.parametrize("problem", [None, RuntimeError("no device")])
def test_it_opens_the_gpu_and_then_serves(monkeypatch: pytest.MonkeyPatch, problem: Exception | None) -> None:
    """Without a GPU, and where it cannot be opened, it serves as every candidate does."""
    opened: list[object] = []
    served: list[Channel] = []
    compiled: list[int] = []

    def zeros(*_: object, device: str) -> None:
        opened.append(device)
        if problem is not None:
            raise problem

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(serving, "device_tools", compiled.append)
    monkeypatch.setattr(serving, "serve_judge", served.append)
    ours, theirs = channel_pair()
    theirs.close()
    serving.serve_judge_on_gpu(ours)
    assert (opened, compiled, served) == (["cuda"], [] if problem else [0], [ours])
    ours.close()

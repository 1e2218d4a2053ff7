"""A judge that is requested before its first job, so that it opens a GPU while variants are compiled."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pytest_fa.host.client import Workers
from pytest_fa.host.fork_server import ForkServer
from pytest_fa.judge.truth_store import TruthStore
from pytest_fa.judge.warm_up import USUAL_CASE, USUAL_POLICY
from pytest_fa.processes import children_of
from pytest_fa.server import process
from pytest_fa.wire.channel import Channel, channel_pair
from pytest_fa.wire.jobs import PrepareJudge, encode
from tests.factories import PYTHON_SOURCE
from tests.worker_jobs import JobOfSource, is_running

MESSAGE = encode(PrepareJudge())


@pytest.fixture
def server() -> Iterator[ForkServer]:
    """A server of which a judge was requested."""
    server = ForkServer()
    server.request("judge", MESSAGE)
    yield server
    server.close()


def test_the_requested_judge_is_the_first_one(server: ForkServer) -> None:
    """`fork` returns it, then new ones; a second request changes nothing."""
    server.request("judge", MESSAGE)
    workers = [server.fork("judge"), server.fork("judge")]
    server.request("judge", MESSAGE)
    workers.append(server.fork("candidate"))
    assert [is_running(worker.pid) for worker in workers] == [True] * 3
    assert len({worker.pid for worker in workers}) == len(workers)
    server.end(*workers)


@pytest.mark.nightly
def test_each_process_gets_the_answer_that_belongs_to_it(server: ForkServer) -> None:
    """If another process is needed first, the requested one stays until it is needed, or until it is ended."""
    worker = server.fork("worker")
    judge = server.fork("judge")
    assert judge.pid < worker.pid  # it was requested before
    server.end(worker)
    assert [is_running(each.pid) for each in (judge, worker)] == [True, False]
    server.end(judge)


@pytest.mark.nightly
def test_a_process_that_nobody_wants_is_ended(server: ForkServer) -> None:
    """Its answer is taken first, also if the server is still importing torch."""
    server.request("early")
    server.end_requested("judge", "bare")
    server.end_requested("judge")
    early = server.fork("candidate")
    assert children_of(server.pid) == [early.pid]
    server.request("early")  # not after the first process
    other = server.fork("candidate")
    assert sorted(children_of(server.pid)) == sorted([early.pid, other.pid])
    server.end(early, other)


def test_nothing_stays_open_of_a_process_that_nobody_wanted() -> None:
    """Neither its connection nor its descriptor, also if its answer came before that of another one."""
    gc.collect()
    before = set(Path("/proc/self/fd").iterdir())
    server = ForkServer()
    server.request("judge", MESSAGE)
    server.request("early")
    server.end(server.fork("worker"))
    server.close()
    assert {path for path in Path("/proc/self/fd").iterdir() if path.exists()} <= before


@pytest.mark.nightly
def test_a_server_ends_with_a_judge_that_was_only_requested() -> None:
    """Whether it has forked the judge or still imports torch, all ends soon."""
    for pause_seconds in (0.0, 4.0):
        server = ForkServer()
        server.request("judge", MESSAGE)
        time.sleep(pause_seconds)
        start = time.monotonic()
        server.close()
        assert time.monotonic() - start < 3.0
        assert not is_running(server.pid)


def test_a_prepared_judge_judges(job_of_source: JobOfSource) -> None:
    """A job that comes later, or at once, has its result.  Without a GPU, the preparation fails in silence."""
    for pause_seconds in (0.0, 4.0):
        with Workers() as workers:
            workers.start(on_gpu=True)
            time.sleep(pause_seconds)
            result = workers.run(job_of_source(PYTHON_SOURCE))
        assert (result.outcome, result.message) == ("ok", "")


@pytest.mark.parametrize("has_job", [True, False])
def test_a_job_that_is_there_comes_first(monkeypatch: pytest.MonkeyPatch, *, has_job: bool) -> None:
    """Only a judge that has nothing else to do prepares itself."""
    prepared: list[object] = []

    def warm_up_of(_: TruthStore, *what: object) -> None:
        prepared.append(what)

    monkeypatch.setattr(process, "warm_up_of", warm_up_of)
    near, far = channel_pair()
    channel = Channel(far)
    if has_job:
        near.send(b"a job")
    process._prepare(channel, TruthStore())
    expected = [] if has_job else [(USUAL_CASE, USUAL_POLICY, torch.device("cuda"))]
    assert prepared == expected
    near.close()
    channel.close()

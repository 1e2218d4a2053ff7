"""The processes of a run give GPU memory back before they send a result: then another check may begin."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest

from pytest_fa.candidate import agent
from pytest_fa.records.outcome import Outcome
from pytest_fa.server import process
from pytest_fa.wire.channel import Channel
from pytest_fa.wire.commands import EndJob
from pytest_fa.wire.jobs import CaseResult
from tests.factories import PYTHON_SOURCE
from tests.worker_jobs import JobOfSource

OK = CaseResult(Outcome.OK, "", ())


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happened, in order: memory was given back, a result was sent."""
    happened: list[str] = []
    for module in (process, agent):
        monkeypatch.setattr(module, "give_memory_back", lambda: happened.append("given back"))
    return happened


class OneJob(Channel):
    """A channel with one job, which remembers that an answer was sent."""

    def __init__(self, unused: socket.socket, job: object, events: list[str]) -> None:
        super().__init__(unused)
        self._jobs: Iterator[object] = iter((job,))
        self._events = events

    def receive(self) -> bytes:
        """The job, and then the end."""
        for job in self._jobs:
            return job  # type: ignore[return-value]  # the test decodes nothing
        raise EOFError

    def send(self, data: bytes, descriptor: int | None = None) -> None:  # noqa: ARG002  # as the channel's own
        """Remember that something was sent."""
        self._events.append("sent")


@pytest.mark.parametrize("role", [process.judge_jobs, process.work])
def test_before_a_result_is_sent(
    monkeypatch: pytest.MonkeyPatch,
    events: list[str],
    job_of_source: JobOfSource,
    role: Callable[[Channel], None],
) -> None:
    """The judge and the process of the profiler give memory back first."""
    for decode in ("decode_request", "decode_job"):
        monkeypatch.setattr(process, decode, lambda job: job)
    for run in ("_judged", "run"):
        monkeypatch.setattr(process, run, lambda *_: OK)
    with socket.socket(socket.AF_UNIX) as unused:
        role(OneJob(unused, job_of_source(PYTHON_SOURCE), events))
    assert events == ["given back", "sent"]


def test_a_candidate_at_the_end_of_a_job(events: list[str]) -> None:
    """A candidate gives memory back when the judge ends the job."""
    agent.Agent().execute(EndJob())
    assert events == ["given back"]

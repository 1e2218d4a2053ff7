"""Arbitrary messages of a worker: each becomes a result or a sentence, soon, and never another exception.

FA_FUZZ_EXAMPLES sets the number of examples of each test.
"""

from __future__ import annotations

import os
import socket
import struct
from functools import cache
from typing import Any

import msgspec
import pytest

pytest.importorskip("hypothesis")

from hypothesis import given
from hypothesis import strategies as st

from pytest_fa.catalog.case import parse_case
from pytest_fa.host import job_output
from pytest_fa.host.client import Workers
from pytest_fa.host.fork_server import ForkServer, Worker
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.text import printable
from pytest_fa.wire.channel import Channel, channel_pair
from pytest_fa.wire.jobs import CaseJob, CaseResult, Progress, owner_of
from tests.factories import CHECK, SPEED, fuzz_settings, variant
from tests.fuzz import any_json, as_json, changed_bytes, changed_json

# A warning about the size of an example is no failure.
pytestmark = pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")

JOB = CaseJob(
    variant("mine"), parse_case("b1h2s64d64-fp16-seed0"), None, "cpu", "same_precision", checks_output=True, time=True
)


@cache
def empty_file() -> int:
    """The descriptor of a file without content."""
    return os.open(os.devnull, os.O_RDONLY)


class SilentServer(ForkServer):
    """A server without a process, whose workers have sent all they will ever send."""

    def __init__(self) -> None:
        self.log_bytes_now = 0

    @property
    def pid(self) -> int:
        """No process has this id."""
        return 2**22 - 1

    @property
    def log_bytes(self) -> int:
        """There is no output."""
        return 0

    @property
    def log(self) -> int:
        """There is no output."""
        return empty_file()

    def end(self, *workers: Worker, request: str = "kill") -> int | None:
        """Close the workers' connections."""
        for worker in workers:
            worker.close()
        return 9 if request == "kill" else 256


@cache
def answers() -> list[Any]:
    """Real answers: a result with figures, and a progress message."""
    result = CaseResult(Outcome.OK, "", (), check=CHECK, speed=SPEED)
    return [msgspec.to_builtins(result), msgspec.to_builtins(Progress("sanity", 5.0))]


def framed() -> st.SearchStrategy[bytes]:
    """A message with the right length."""
    payload = st.one_of(
        st.deferred(lambda: changed_json(answers())).map(as_json),
        st.deferred(lambda: st.sampled_from(answers())).map(as_json),
        st.deferred(lambda: changed_bytes([as_json(answer) for answer in answers()])),
        any_json().map(as_json),
        st.binary(max_size=50),
    )
    return payload.map(lambda data: struct.pack("!Q", len(data)) + data)


def streams() -> st.SearchStrategy[bytes]:
    """What a worker may send before it ends: messages, parts of messages, or anything."""
    messages = st.lists(framed(), max_size=4).map(b"".join)
    return st.one_of(
        messages, st.builds(lambda text, cut: text[:cut], messages, st.integers(0, 400)), st.binary(max_size=60)
    )


@fuzz_settings(200)
@given(streams())
def test_any_stream_gives_a_result(stream: bytes) -> None:
    """The result has an outcome of its own, a printable message, and stages of the job."""
    near, far = socket.socketpair()
    with far, pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_output, "SLICE_SECONDS", 0.01)
        far.send(stream)
        far.shutdown(socket.SHUT_WR)
        workers = Workers()
        channel, candidate_end = channel_pair()
        judge, candidate = Worker(2**22 - 1, Channel(near)), Worker(os.getpid(), channel)
        workers._server, workers._owner = SilentServer(), owner_of(JOB.variant)
        patch.setattr(
            SilentServer, "fork", lambda _, role="worker": judge if role == "judge" else candidate, raising=False
        )
        result = workers.run(JOB)
        judge.close()
        candidate.close()
        candidate_end.close()
    assert isinstance(result, CaseResult)
    assert result.message == printable(result.message)
    if result.outcome in ("crashed", "hung", "failed") and result.caught_by == ("isolation",):
        assert [stage.name for stage in result.stages] == list(JOB.wanted_stages)

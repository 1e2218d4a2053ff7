"""A variant that compiles at its first call has time for that, and its compilation is in no stage's seconds."""

from __future__ import annotations

import time

import msgspec
import pytest

from pytest_fa.catalog.case import parse_case
from pytest_fa.host.client import Workers
from tests.worker_jobs import TINY, JobOfSource

COMPILE_SECONDS = 3.0
WATCHDOG_SECONDS = 2.5  # also for commands that take milliseconds, on a machine that has other work to do

# It has loaded a package of a compiler, and its first call with other shapes takes some seconds.
SOURCE = """\
import sys, time, types

import torch

sys.modules[{compiler!r}] = types.ModuleType({compiler!r})
seen, calls = set(), []

def forward(q, k, v, *, scale, causal="none", out=None):
    if q.shape not in seen:
        seen.add(q.shape)
        time.sleep({seconds})
    {line}
    calls.append(1)
    scores = q.float() @ k.float().transpose(2, 3) * scale
    return out.copy_((torch.softmax(scores, -1) @ v.float()).to(q.dtype))
"""
COMPILED = """\
import torch

def attend(q, k, v, scale):
    scores = q.float() @ k.float().transpose(2, 3) * scale
    return (torch.softmax(scores, -1) @ v.float()).to(q.dtype)

compiled = torch.compile(attend, backend="aot_eager", dynamic=False)

def forward(q, k, v, *, scale, causal="none", out=None):
    return out.copy_(compiled(q, k, v, scale))
"""


def source(compiler: str = "triton", line: str = "pass", seconds: float = COMPILE_SECONDS) -> str:
    """The variant, with this module loaded, this line in each call, and this length of the first one."""
    return SOURCE.format(compiler=compiler, line=line, seconds=seconds)


def test_a_compilation_may_take_longer_than_the_watchdog_allows(workers: Workers, job_of_source: JobOfSource) -> None:
    """The first call may take longer than a launch; its seconds are in the result and in no stage's."""
    start = time.monotonic()
    result = workers.run(job_of_source(source(), watchdog_seconds=WATCHDOG_SECONDS))
    assert result.outcome == "ok", result.message
    assert COMPILE_SECONDS <= result.compile_seconds
    assert result.compile_seconds + sum(stage.seconds for stage in result.stages) <= time.monotonic() - start


@pytest.mark.nightly
def test_each_new_kind_of_arguments_may_compile_once(workers: Workers, job_of_source: JobOfSource) -> None:
    """In one process, a shape that was called before has no compilation any more, and a new shape has one."""
    job = job_of_source(source(), watchdog_seconds=WATCHDOG_SECONDS)
    other = msgspec.structs.replace(job, case=parse_case(TINY.replace("s64", "s32")))
    results = [workers.run(each) for each in (job, job, other)]
    assert [result.outcome for result in results] == ["ok", "ok", "ok"]
    assert [result.compile_seconds >= COMPILE_SECONDS for result in results] == [True, False, True]
    assert results[1].compile_seconds == 0.0


def test_without_a_compiler_the_watchdog_limits_the_first_call(workers: Workers, job_of_source: JobOfSource) -> None:
    """A variant that has loaded no compiler hangs if its first call takes longer than the watchdog allows."""
    result = workers.run(job_of_source(source("nothing", seconds=60), watchdog_seconds=WATCHDOG_SECONDS))
    assert (result.outcome, result.caught_by, result.compile_seconds) == ("hung", ("watchdog",), 0.0)


@pytest.mark.nightly
def test_a_hang_after_the_first_call_is_not_a_compilation(workers: Workers, job_of_source: JobOfSource) -> None:
    """A variant with a compiler that hangs in a later call is ended after the watchdog's time."""
    hangs = source(line="time.sleep(60 * (len(calls) > 0))")
    result = workers.run(job_of_source(hangs, watchdog_seconds=WATCHDOG_SECONDS, repeats=3))
    assert (result.outcome, result.caught_by) == ("hung", ("watchdog",)), result.message
    assert result.compile_seconds >= COMPILE_SECONDS


def test_the_first_call_is_judged(workers: Workers, job_of_source: JobOfSource) -> None:
    """The call that compiles is the one that is judged: a variant that is wrong only in it is wrong."""
    wrong = source(line="scale = scale if calls else 2 * scale")
    result = workers.run(job_of_source(wrong, watchdog_seconds=WATCHDOG_SECONDS))
    assert result.outcome == "wrong", result.message


@pytest.mark.nightly
def test_torch_compile_is_recognised(workers: Workers, job_of_source: JobOfSource) -> None:
    """A function that torch compiles at its first call is right and timed; its compilation is in no stage's seconds."""
    job = job_of_source(COMPILED, watchdog_seconds=30.0, time=True)
    first, again = workers.run(job), workers.run(job)
    assert (first.outcome, again.outcome) == ("ok", "ok"), first.message
    assert first.compile_seconds > 0.1
    assert again.compile_seconds == 0.0


@pytest.mark.nightly
def test_a_property_compiles_for_its_own_arguments(workers: Workers, job_of_source: JobOfSource) -> None:
    """A property that calls with another shape has time to compile for it, beside that for the case's shape."""
    job = job_of_source(source(), "b2h2s64d64-fp16-seed0", watchdog_seconds=WATCHDOG_SECONDS, property_name="new_shape")
    result = workers.run(job)
    assert result.outcome == "ok", result.message
    assert result.compile_seconds >= 2 * COMPILE_SECONDS

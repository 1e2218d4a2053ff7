"""The agent carries out commands; the judge's side of it, in this process and over a connection to another thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

from pytest_fa.candidate.agent import Agent
from pytest_fa.candidate.output import written
from pytest_fa.candidate.serving import problem_of
from pytest_fa.catalog.case import parse_case
from pytest_fa.errors import FaError, LaunchError, UnsupportedCase, WrongResult
from pytest_fa.gpu.graphs import CannotCapture
from pytest_fa.gpu.inputs import is_poison, make_inputs, poisoned_output
from pytest_fa.judge.candidate import Candidate
from pytest_fa.judge.connection import CandidateLost, KernelRaised, Remote
from pytest_fa.records.outcome import Outcome
from pytest_fa.wire.channel import Channel, channel_pair
from pytest_fa.wire.commands import (
    NUMBER_BYTES,
    Attach,
    CallProblem,
    Done,
    EndJob,
    Forget,
    MakeCall,
    Open,
    ProblemKind,
    ReplayCall,
    ReplaySeries,
    Run,
    decode_command,
    encode_answer,
)

CPU = torch.device("cpu")
CASE = parse_case("b1h2s16d64-fp16-seed0")
Function = Callable[..., torch.Tensor]
Connect = Callable[[Function], Candidate]


def copies_q(q: torch.Tensor, *_: torch.Tensor, out: torch.Tensor, **__: object) -> torch.Tensor:
    """A kernel whose output is q."""
    return out.copy_(q)


def in_this_process(forward: Function) -> Candidate:
    """A candidate that is a function of this process."""
    return Candidate.of_function(forward, "cpu")


def serve(channel: Channel, forward: Function) -> None:
    """Answer commands like the candidate's process, for a function."""
    agent = Agent(lambda *_: nullcontext(forward))
    while True:
        try:
            data = channel.receive()
        except EOFError:
            channel.close()
            return
        descriptor = channel.take_descriptor()
        try:
            answer: Done | CallProblem = agent.execute(decode_command(data[NUMBER_BYTES:]), descriptor)
        except Exception as problem:  # noqa: BLE001  # every exception becomes an answer
            answer = problem_of(problem, CPU)
        if descriptor is not None:
            os.close(descriptor)
        channel.send(data[:NUMBER_BYTES] + encode_answer(answer))


@pytest.fixture
def connect() -> Iterator[Connect]:
    """`connect(function)`: a candidate behind a socket, opened; its thread has nothing but messages and memory."""
    candidates, threads = [], []

    def connected(forward: Function) -> Candidate:
        near, far = channel_pair()
        thread = threading.Thread(target=serve, args=(Channel(far), forward))
        thread.start()
        candidate = Candidate(Remote(near, os.getpid()), os.getpid())
        candidate.open(None, None, "cpu", "attention")
        candidates.append(candidate)
        threads.append(thread)
        return candidate

    yield connected
    for candidate in candidates:
        candidate.abandon()
    for thread in threads:
        thread.join(10)


@contextmanager
def answering(*answers: bytes) -> Iterator[Candidate]:
    """A candidate whose process has sent these bytes as its answers; without any, it has closed the connection."""
    near, far = channel_pair()
    end = Channel(far)
    for answer in answers:
        end.send(bytes(NUMBER_BYTES) + answer)
    if not answers:
        end.close()
    candidate = Candidate(Remote(near, os.getpid()), os.getpid())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pytest_fa.judge.connection.secrets.token_bytes", bytes)  # the secret number is 0
        yield candidate
    candidate.abandon()
    end.close()


# -- calls ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["here", "connected"])
def test_a_call_writes_the_output_of_the_judge(connect: Connect, where: str) -> None:
    """A call on the judge's tensors writes its output, and the same bits in this process and behind a connection."""
    candidate = in_this_process(copies_q) if where == "here" else connect(copies_q)
    inputs = make_inputs(CASE, CPU)
    out = poisoned_output(inputs)
    candidate.call(inputs, out)
    assert torch.equal(out, inputs.q)


def test_an_output_that_the_function_allocates_is_copied(connect: Connect) -> None:
    """A function may return another tensor than `out`."""

    def allocates(q: torch.Tensor, *_: torch.Tensor, **__: object) -> torch.Tensor:
        return 2 * q

    inputs = make_inputs(CASE, CPU)
    out = poisoned_output(inputs)
    connect(allocates).call(inputs, out)
    assert torch.equal(out, 2 * inputs.q)


def test_what_is_not_written_is_poison(connect: Connect) -> None:
    """A function that returns `out` without writing it leaves NaN in the judge's memory."""

    def writes_nothing(*_: torch.Tensor, out: torch.Tensor, **__: object) -> torch.Tensor:
        return out

    inputs = make_inputs(CASE, CPU)
    out = poisoned_output(inputs)
    connect(writes_nothing).call(inputs, out)
    assert bool(is_poison(out).all())


def test_a_change_of_an_input_reaches_the_judge(connect: Connect) -> None:
    """What a call writes into an input is in the judge's tensor afterwards, so that it is noticed."""

    def changes_k(q: torch.Tensor, k: torch.Tensor, *_: torch.Tensor, out: torch.Tensor, **__: object) -> torch.Tensor:
        k.neg_()
        return out.copy_(q)

    inputs = make_inputs(CASE, CPU)
    k = inputs.k.clone()
    connect(changes_k).call(inputs, poisoned_output(inputs))
    assert torch.equal(inputs.k, -k)


def test_repeats_write_an_output_each(connect: Connect) -> None:
    """Each call of `repeat` writes an output of its own, in the order of the outputs."""
    count = 0

    def counts(*_: torch.Tensor, out: torch.Tensor, **__: object) -> torch.Tensor:
        nonlocal count
        count += 1
        return out.fill_(count)

    candidate, inputs = connect(counts), make_inputs(CASE, CPU)
    outs = candidate.lending.allocate(5 * inputs.q.nbytes)[: 5 * inputs.q.nbytes].view(torch.float16)
    outs = outs.view(5, *inputs.q.shape)
    candidate.repeat(inputs, outs, ((), ("poison_smem",)))
    assert [float(out.mean()) for out in outs] == [1.0, 2.0, 3.0, 4.0, 5.0]


class Sneaky(torch.Tensor):
    """A tensor that could compute when it is looked at."""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda out: out.as_subclass(Sneaky), "Sneaky"),
        (lambda out: out.float(), "float32"),
        (lambda out: out[:, :1].clone(), r"\[1, 1, 16, 64\]"),
        (lambda _: None, "the output is None"),
    ],
    ids=["subclass", "dtype", "shape", "none"],
)
def test_another_kind_of_output_is_refused(
    connect: Connect, make: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    """An output that is no plain tensor of the right shape and dtype is wrong, and the message names what it is."""

    def returns(*_: torch.Tensor, out: torch.Tensor, **__: object) -> torch.Tensor:
        return make(out)

    inputs = make_inputs(CASE, CPU)
    with pytest.raises(WrongResult, match=message):
        connect(returns).call(inputs, poisoned_output(inputs))


def test_written_returns_the_output_itself() -> None:
    """`written` copies only what is not in the output already."""
    out, result = torch.zeros(2, 2), torch.ones(2, 2)
    assert written(out, (out,)) is out
    assert written(result, (out,)) is out
    assert torch.equal(out, result)


# -- exceptions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (UnsupportedCase("no masks"), UnsupportedCase),
        (LaunchError("too many threads"), LaunchError),
        (WrongResult("output", "not a tensor"), WrongResult),
        (CannotCapture("it waits"), CannotCapture),
        (ValueError("not a number"), KernelRaised),
    ],
)
def test_exceptions_come_across(connect: Connect, raised: Exception, kind: type[Exception]) -> None:
    """An exception of a variant is raised at the judge's side as one of a known kind, with its message."""

    def raises(*_: torch.Tensor, **__: object) -> torch.Tensor:
        raise raised

    inputs = make_inputs(CASE, CPU)
    with pytest.raises(kind, match=str(raised)):
        connect(raises).call(inputs, poisoned_output(inputs))


def test_a_candidate_serves_on_after_an_exception(connect: Connect) -> None:
    """The call after one that raised is carried out."""
    raises = True

    def raises_once(q: torch.Tensor, *_: torch.Tensor, out: torch.Tensor, **__: object) -> torch.Tensor:
        nonlocal raises
        if raises:
            raises = False
            raise ValueError("once")
        return out.copy_(q)

    candidate, inputs = connect(raises_once), make_inputs(CASE, CPU)
    out = poisoned_output(inputs)
    with pytest.raises(KernelRaised):
        candidate.call(inputs, out)
    candidate.call(inputs, out)
    assert torch.equal(out, inputs.q)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (ReplayCall(), "no call is captured"),
        (Run("calls", 1), "no series 'calls' is prepared"),
        (ReplaySeries("calls"), "no series 'calls' is prepared"),
    ],
)
def test_a_command_without_what_it_needs_is_an_error(command: Run | ReplaySeries | ReplayCall, message: str) -> None:
    """A command about something that was not made before is an error that names it."""
    agent = Agent(lambda *_: nullcontext(copies_q))
    agent.execute(Open(None, None, "cpu", "attention"))
    with pytest.raises(FaError, match=message):
        agent.execute(command)


def test_a_call_before_open_is_an_error() -> None:
    """Without an opened variant there is no call, no workspace and no lending."""
    candidate = Candidate.in_this_process()
    inputs = make_inputs(CASE, CPU)
    with pytest.raises(FaError, match="no variant is open"):
        candidate.call(inputs, poisoned_output(inputs))


def test_the_end_of_a_job_closes_the_variant() -> None:
    """After the end of a job, the variant is closed, its memory is forgotten, and the next one can be opened."""
    events: list[str] = []

    class Opened:
        def __enter__(self) -> Function:
            events.append("opened")
            return copies_q

        def __exit__(self, *_: object) -> None:
            events.append("closed")

    candidate = Candidate.in_this_process(lambda *_: Opened())
    for _ in range(2):
        candidate.open(None, None, "cpu", "attention")
        inputs = make_inputs(CASE, CPU)
        candidate.call(inputs, poisoned_output(inputs))
        candidate.end_job()
    assert events == ["opened", "closed"] * 2


# -- a process that misbehaves ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answers", "ending", "words"),
    [
        ((), "crashed", "its process ended"),
        ((b"hello",), "failed", "an answer that cannot be read"),
        ((b'{"type":"done","size_bytes":"many"}',), "failed", "an answer that cannot be read"),
        ((b'{"type":"open"}',), "failed", "an answer that cannot be read"),
        ((b"[" * 100_000,), "failed", "an answer that cannot be read"),
    ],
    ids=["closed", "no JSON", "wrong type", "a command", "nested"],
)
def test_an_answer_that_is_none_ends_the_candidate(answers: tuple[bytes, ...], ending: str, words: str) -> None:
    """A closed connection and an answer that is not one end the job, with the way in which it ended."""
    with answering(*answers) as candidate, pytest.raises(CandidateLost, match=words) as lost:
        candidate.ask(Forget(), 5.0)
    assert lost.value.ending == ending


def test_silence_is_a_hang() -> None:
    """A candidate that does not answer within the limit hangs."""
    near, far = channel_pair()
    candidate = Candidate(Remote(near, os.getpid()), os.getpid())
    with pytest.raises(CandidateLost, match=r"does not answer within 0\.1 s") as lost:
        candidate.ask(EndJob(), 0.1)
    candidate.abandon()
    far.close()
    assert lost.value.ending == Outcome.HUNG


def test_the_judge_does_not_sleep_while_a_gpu_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """It polls for the answer to a timed command on a GPU, up to a limit, and sleeps through other commands."""
    near, far = channel_pair()
    remote, waits = Remote(near, os.getpid()), []

    def wait(seconds: float | None, *_: int) -> bool:
        waits.append(seconds)
        return len(waits) == 3

    monkeypatch.setattr(near, "wait", wait)
    remote._poll(60.0)
    assert waits == [0, 0, 0]
    remote._poll(0.01)
    assert len(waits) > 4
    assert not any(waits)

    asked: list[bool] = []

    def ask(*_: object, awake: bool = False, **__: object) -> Done:
        asked.append(awake)
        return Done(inside_us=(1.0,))

    monkeypatch.setattr(Remote, "ask", ask)
    monkeypatch.setattr("pytest_fa.judge.candidate.synchronize", lambda _: None)
    candidate = Candidate(remote, os.getpid())
    candidate.ask(Forget())
    for device in ("cpu", "cuda"):
        candidate.device = torch.device(device)
        candidate.timed(ReplaySeries("short"))
    assert asked == [False, False, True]
    remote.close()
    far.close()


def test_texts_of_a_candidate_are_bounded_and_printable() -> None:
    """A message of a candidate has control characters escaped, and at most 20,000 of its characters count."""
    answer = encode_answer(CallProblem(ProblemKind.FAILED, "\x1b[2J" + "a" * 100_000, ""))
    with answering(answer) as candidate, pytest.raises(KernelRaised) as raised:
        candidate.ask(Forget(), 5.0)
    assert str(raised.value).startswith("\\x1b[2Jaaa")
    assert len(str(raised.value)) < 21_000


def test_a_memory_that_is_not_there_is_an_error() -> None:
    """An `Attach` on a machine without a GPU, or with a handle that is none, is an error and not a crash."""
    agent = Agent(lambda *_: nullcontext(copies_q))
    agent.execute(Open(None, None, "cpu", "attention"))
    with pytest.raises((FaError, RuntimeError, AssertionError)):
        agent.execute(Attach(0, 4096, "00" * 64, 0))


def test_a_call_on_unknown_memory_is_an_error() -> None:
    """A call whose views name no mapped memory is an error that names it."""
    candidate = in_this_process(copies_q)
    inputs = make_inputs(CASE, CPU)
    views = candidate.views_of(inputs, poisoned_output(inputs))
    candidate.lending.end_job()
    with pytest.raises(FaError, match="is not mapped"):
        candidate.ask(MakeCall(views))


def test_tools_are_not_compiled_if_they_are_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant that is opened without tools has none, and the answer says why."""
    monkeypatch.setattr("pytest_fa.candidate.agent._find_tools", None)  # it cannot be called
    agent = Agent(lambda *_: nullcontext(copies_q))
    done = agent.execute(Open(None, None, "cpu", "attention", tools=False))
    assert done.why_no_tools == "the variant was opened without them"

"""The candidate's process: it carries out the commands of one connection until that is closed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import torch

from pytest_fa.candidate.agent import Agent
from pytest_fa.candidate.replaced import Originals
from pytest_fa.candidate.without_attention import replace_attention
from pytest_fa.errors import DeviceLost, LaunchError, Tampering, UnsupportedCase, WrongResult
from pytest_fa.gpu.device import is_alive
from pytest_fa.gpu.device_tools import device_tools
from pytest_fa.gpu.graphs import CannotCapture
from pytest_fa.gpu.profiler import load_profiler
from pytest_fa.wire.channel import Channel
from pytest_fa.wire.commands import (
    NUMBER_BYTES,
    CallProblem,
    CandidateAnswer,
    EndJob,
    ProblemKind,
    decode_command,
    encode_answer,
)
from pytest_fa.wire.user_traceback import explanation_of, is_wrong_call, message_of

KINDS: dict[type[Exception], ProblemKind] = {
    UnsupportedCase: ProblemKind.UNSUPPORTED,
    LaunchError: ProblemKind.LAUNCH_FAILED,
    DeviceLost: ProblemKind.DEVICE_ERROR,
    Tampering: ProblemKind.CHEAT,  # before WrongResult, which it is as well
    WrongResult: ProblemKind.WRONG,
    CannotCapture: ProblemKind.CANNOT_CAPTURE,
}
LARGEST_OOM_SCORE = 1000  # of all processes, the kernel ends this one first when memory is short


def serve_judge(channel: Channel) -> None:
    """Carry out commands until the judge closes the connection."""
    Path(f"/proc/{os.getpid()}/oom_score_adj").write_text(str(LARGEST_OOM_SCORE), encoding="utf-8")
    agent, originals = Agent(), Originals()
    while True:
        try:
            data = channel.receive()
        except EOFError:
            return
        number, command = data[:NUMBER_BYTES], data[NUMBER_BYTES:]
        channel.send(number + encode_answer(_answer(agent, originals, command, channel.take_descriptor())))


def serve_judge_on_gpu(channel: Channel) -> None:
    """`serve_judge` in a process that opens the GPU, and compiles its tools, before its first command.

    An error is ignored: the same one appears when a command needs the GPU.
    """
    _open_gpu()
    serve_judge(channel)


def serve_judge_with_profiler(channel: Channel) -> None:
    """`serve_judge_on_gpu` in a process that also loads the profiler before its first command."""
    _open_gpu(load_profiler)
    serve_judge(channel)


def _open_gpu(then: Callable[[], object] = lambda: None) -> None:
    """Open the GPU, if there is one, compile the tools for it, and call `then`."""
    with contextlib.suppress(Exception):
        if torch.cuda.is_available():
            torch.zeros(1, device="cuda")
            device_tools(0)
            then()


def serve_without_attention(channel: Channel) -> None:
    """`serve_judge` in a process in which torch's own attention computes something else."""
    replace_attention()
    serve_judge(channel)


def _answer(agent: Agent, originals: Originals, data: bytes, descriptor: int | None) -> CandidateAnswer:
    try:
        command = decode_command(data)
        done = agent.execute(command, descriptor)
        if isinstance(command, EndJob):
            originals.require_all()
    except Exception as problem:  # noqa: BLE001  # a kernel may raise anything; every exception becomes an answer
        return problem_of(problem, agent.device)
    else:
        return done
    finally:
        if descriptor is not None:
            os.close(descriptor)


def problem_of(problem: Exception, device: torch.device) -> CallProblem:
    """An exception as an answer.  Whatever it is, a lost CUDA context counts more."""
    kind = next((name for error, name in KINDS.items() if isinstance(problem, error)), ProblemKind.FAILED)
    if device.type == "cuda" and not is_alive(device):
        kind = ProblemKind.DEVICE_ERROR
    if isinstance(problem, Tampering):  # the functions that explain other exceptions may be replaced, too
        return CallProblem(kind, str(problem), str(problem), problem.caught_by)
    caught_by = problem.caught_by if isinstance(problem, WrongResult) else ()
    return CallProblem(kind, message_of(problem), explanation_of(problem), caught_by, is_wrong_call(problem))

"""Ways to have commands carried out: over a channel to another process, or by an agent in this one."""

from __future__ import annotations

import os
import secrets
import select
import time
from collections.abc import Callable
from typing import Protocol

from pytest_fa.candidate.agent import Agent, Opening, load_variant
from pytest_fa.errors import DeviceLost, FaError, LaunchError, Tampering, UnsupportedCase, WrongResult
from pytest_fa.gpu.graphs import CannotCapture
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.text import printable
from pytest_fa.wire.channel import Channel, Garbage
from pytest_fa.wire.commands import (
    MAX_ANSWER_CHARACTERS,
    NUMBER_BYTES,
    CallProblem,
    CandidateAnswer,
    Command,
    Done,
    Ending,
    ProblemKind,
    decode_candidate_answer,
    encode_command,
)

AWAKE_SECONDS = 0.5  # for which an answer is awaited without sleep: longer than a run of short calls takes


class CandidateLost(FaError):
    """The candidate's process ended, was silent for too long, or sent what is no answer.

    `during` says in which call, if that is known.
    """

    def __init__(self, ending: Ending, message: str) -> None:
        super().__init__(message)
        self.ending: Ending = ending
        self.during = ""


class KernelRaised(FaError):
    """The variant raised an exception of its own; `explanation` is its text for the author."""

    def __init__(self, message: str, explanation: str, *, is_wrong_call: bool) -> None:
        super().__init__(message)
        self.explanation, self.is_wrong_call = explanation, is_wrong_call


class Connection(Protocol):
    """A way to have commands carried out."""

    def ask(
        self,
        command: Command,
        seconds: float,
        descriptor: int | None = None,
        meanwhile: Callable[[], object] | None = None,
        *,
        awake: bool = False,
    ) -> Done:
        """Carry out a command, and call `meanwhile` while that runs, or right after it.

        With `awake`, this process does not sleep while it waits: a processor that slept for longer wakes more slowly,
        and the difference of two waits would contain that.  Raises what the command raised, and `CandidateLost` after
        `seconds` without an answer.
        """


class LocalConnection:
    """Commands are carried out by an agent in this process; exceptions come as they are."""

    def __init__(self, opening: Opening = load_variant) -> None:
        self.agent = Agent(opening)

    def ask(
        self,
        command: Command,
        seconds: float,  # noqa: ARG002  # nothing can end it
        descriptor: int | None = None,
        meanwhile: Callable[[], object] | None = None,
        *,
        awake: bool = False,  # noqa: ARG002  # this process carries it out itself
    ) -> Done:
        """Carry out a command, however long it takes."""
        done = self.agent.execute(command, descriptor)
        if meanwhile:
            meanwhile()
        return done


class Remote:
    """Commands go to another process over a channel."""

    def __init__(self, channel: Channel, pid: int) -> None:
        self._channel = channel
        try:
            self._pidfd: int | None = os.pidfd_open(pid)
        except OSError:
            self._pidfd = None  # it has already ended, or the kernel is older than 5.3

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def ask(
        self,
        command: Command,
        seconds: float,
        descriptor: int | None = None,
        meanwhile: Callable[[], object] | None = None,
        *,
        awake: bool = False,
    ) -> Done:
        """Send a command with a secret number and wait for the answer with that number.

        So a candidate cannot answer a command before it has read it.
        """
        number = secrets.token_bytes(NUMBER_BYTES)
        try:
            self._channel.send(number + encode_command(command), descriptor)
            if meanwhile:
                meanwhile()
            if awake:
                self._poll(min(seconds, AWAKE_SECONDS))
            answer = self._answer(number, seconds)
        except (EOFError, ConnectionError):
            raise CandidateLost(Outcome.CRASHED, "its process ended") from None
        except TimeoutError:
            raise CandidateLost(Outcome.HUNG, f"its process does not answer within {seconds:g} s") from None
        except (Garbage, ValueError, RecursionError) as problem:
            raise CandidateLost(Outcome.FAILED, f"its process sent an answer that cannot be read ({problem})") from None
        if isinstance(answer, CallProblem):
            raise _exception(answer)
        return answer

    @property
    def _process(self) -> tuple[int, ...]:
        """The descriptor that can be read when the process has ended, if there is one."""
        return () if self._pidfd is None else (self._pidfd,)

    def _poll(self, seconds: float) -> None:
        """Wait for an answer, or the end of the process, without sleep."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._channel.wait(0, *self._process):
            pass

    def _answer(self, number: bytes, seconds: float) -> CandidateAnswer:
        """Wait for an answer.  Raises `TimeoutError` and `EOFError`."""
        if not self._channel.wait(seconds, *self._process):
            raise TimeoutError
        if not self._channel.wait(0):  # only the process has ended; another one may hold its socket
            raise EOFError
        data = self._channel.receive()
        if self._pidfd is not None and select.select([self._pidfd], [], [], 0)[0]:
            raise EOFError  # a child of it answers in its place
        if data[:NUMBER_BYTES] != number:
            raise Garbage("it answers no command")
        return decode_candidate_answer(data[NUMBER_BYTES:])


def _exception(problem: CallProblem) -> Exception:
    """The exception that an answer tells of.  Its texts are a stranger's."""
    message = printable(problem.message[:MAX_ANSWER_CHARACTERS])
    explanation = printable(problem.explanation[:MAX_ANSWER_CHARACTERS])
    match problem.kind:
        case ProblemKind.UNSUPPORTED:
            raised: Exception = UnsupportedCase(message)
        case ProblemKind.LAUNCH_FAILED:
            raised = LaunchError(message)
        case ProblemKind.DEVICE_ERROR:
            raised = DeviceLost(message)
        case ProblemKind.WRONG:
            raised = WrongResult(problem.caught_by, message)
        case ProblemKind.CHEAT:
            raised = Tampering(problem.caught_by, message)
        case ProblemKind.CANNOT_CAPTURE:
            raised = CannotCapture(message)
        case ProblemKind.FAILED:
            raised = KernelRaised(message, explanation, is_wrong_call=problem.is_wrong_call)
    raised.explanation = explanation  # type: ignore[attr-defined]  # read by `explanation_of`
    return raised

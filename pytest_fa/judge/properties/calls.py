"""Properties about how the function is called: again, on streams, in a capture, on another device."""

from __future__ import annotations

import random
import shutil
import tempfile
import threading
from pathlib import Path

import torch

from pytest_fa.errors import UnsupportedCase, WrongResult
from pytest_fa.judge.subject import Subject
from pytest_fa.run.device import synchronize
from pytest_fa.run.forward import Forward
from pytest_fa.run.module import load_forward

SLOW_CYCLES = 2_000_000  # a millisecond: long enough that whoever does not wait is far ahead
THREAD_CALLS = 120  # with what is compared they fit into a stream's queue
MOST_GAP_CYCLES = 100_000  # 50 us: so that two threads' calls meet in every phase


def new_data(subject: Subject) -> None:
    """The inputs are overwritten where they lie: a result kept by address is the old one."""
    inputs = subject.inputs()
    out = subject.call(inputs)
    for _ in range(20):  # some keep a result only after a few calls
        out = subject.call(inputs, out)
    for mine, other in zip(inputs[:3], subject.inputs(seed=1)[:3], strict=True):
        mine.data.copy_(other)  # past the version counter, which a cache might watch
    subject.require_right("new_data", subject.call(inputs, out), inputs)


def new_shape(subject: Subject) -> None:
    """The same memory is called with its batches as heads of one batch."""
    inputs = subject.inputs()
    out = subject.call(inputs)
    batch, heads = inputs.q.shape[:2]
    if inputs.q.stride(0) != heads * inputs.q.stride(1):
        raise UnsupportedCase("batches and heads of this layout cannot be merged where they lie")
    q, k, v = (each.reshape(1, batch * heads, *each.shape[2:]) for each in inputs[:3])
    merged = inputs._replace(q=q, k=k, v=v)
    found = subject.call(merged, out.fill_(float("nan")).view(1, batch * heads, *out.shape[2:]))
    subject.require_right("new_shape", found, merged)


def streams(subject: Subject) -> None:
    """A stream with a slow writer, then two threads with a stream each."""
    _require_own_stream(subject)
    _require_no_shared_state(subject)


def _require_own_stream(subject: Subject) -> None:
    """On a stream of its own the inputs are written late; whoever launches elsewhere reads zeros."""
    real = subject.inputs()
    late = real._replace(q=torch.zeros_like(real.q), k=torch.zeros_like(real.k), v=torch.zeros_like(real.v))
    out = subject.call(late)  # what a first call sets up is not what is tried here
    stream = torch.cuda.Stream(subject.device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(subject.device))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLOW_CYCLES)  # type: ignore[no-untyped-call]  # noqa: SLF001
        for mine, other in zip(late[:3], real[:3], strict=True):
            mine.copy_(other)
        found = subject.call(late, out, is_waited_for=False)
        kept = found.clone()  # on the same stream: what the kernel left when the stream came here
    stream.synchronize()
    subject.require_right("streams", kept, real)


def _require_no_shared_state(subject: Subject) -> None:
    """Two threads call at once, each on its stream and data: state that they share is overwritten under their feet.

    The gaps between their calls are drawn, so that what is vulnerable for a moment meets the other's calls.
    """
    sets = [subject.inputs(seed) for seed in (0, 1)]
    wanted = [subject.call(each).clone() for each in sets]
    torch.cuda.synchronize(subject.device)
    drawn = random.Random(0)  # noqa: S311  # no secret
    gaps = [[drawn.randrange(MOST_GAP_CYCLES) for _ in range(THREAD_CALLS)] for _ in sets]
    wrong = [0, 0]
    problems: list[Exception] = []

    def run(index: int) -> None:
        try:
            stream = torch.cuda.Stream(subject.device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                differing = torch.zeros((), dtype=torch.int64, device=subject.device)
                torch.cuda._sleep(10 * SLOW_CYCLES)  # type: ignore[no-untyped-call]  # noqa: SLF001  # until both have queued up
                for cycles in gaps[index]:
                    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # noqa: SLF001
                    out = subject.call(sets[index], is_waited_for=False)
                    differing += (out.view(torch.int16) != wanted[index].view(torch.int16)).any()
                stream.synchronize()
                wrong[index] = int(differing)
                subject.require_right("streams", out, sets[index], f" (thread {index})")
        except Exception as problem:  # noqa: BLE001  # raised again by the thread that waits
            problems.append(problem)

    threads = [threading.Thread(target=run, args=(index,)) for index in (0, 1)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    if problems:
        raise problems[0]
    if any(wrong) and subject.variant.deterministic:
        found = " and ".join(f"{count} of {THREAD_CALLS}" for count in wrong)
        raise WrongResult("streams", f"streams: {found} outputs of two threads differ from those of one")


def graph_capture(subject: Subject) -> None:
    """One call is captured and replayed on other data; it may not wait, allocate or copy from the host."""
    _require_right_replay("graph_capture", subject, None)


def first_call_in_capture(subject: Subject) -> None:
    """The library is loaded anew from a copy, so that whatever it sets up once is set up inside the capture."""
    assert subject.library is not None  # noqa: S101  # applies() asks for a built variant
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copy(subject.library, Path(folder) / "fresh.so")
        _require_right_replay("first_call_in_capture", subject, load_forward(subject.variant, str(copy)))


def _require_right_replay(name: str, subject: Subject, fresh: Forward | None) -> None:
    inputs = subject.inputs()
    out = subject.output(inputs)
    if fresh is None:
        subject.call(inputs, out)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(subject.device)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(subject.device)
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            found = subject.call(inputs, out, fresh, is_waited_for=False)
        except Exception as problem:
            _end_capture(graph)
            raise WrongResult(name, f"{name}: the call cannot be captured: {_first_line(problem)}") from problem
        try:
            graph.capture_end()
        except RuntimeError as problem:
            raise WrongResult(name, f"{name}: the call cannot be captured: {_first_line(problem)}") from problem
    for seed in (1, 2):
        for mine, other in zip(inputs[:3], subject.inputs(seed=seed)[:3], strict=True):
            mine.copy_(other)
        found.fill_(float("nan"))
        graph.replay()
        subject.require_right(name, found, inputs, f", replay on seed {seed}")


def _end_capture(graph: torch.cuda.CUDAGraph) -> None:
    try:
        graph.capture_end()
    except RuntimeError:
        return


def _first_line(problem: Exception) -> str:
    return next(iter(str(problem).splitlines()), type(problem).__name__)


def other_device(subject: Subject) -> None:
    """Tensors on cuda:1 while cuda:0 is current."""
    if torch.cuda.device_count() < 2:  # noqa: PLR2004
        raise UnsupportedCase("needs two GPUs")
    here = subject.inputs()
    there = here._replace(q=here.q.to("cuda:1"), k=here.k.to("cuda:1"), v=here.v.to("cuda:1"))
    subject.call(here)
    with torch.cuda.device(0):
        out = subject.call(there)
    synchronize(torch.device("cuda:1"))
    subject.require_right("other_device", out, there)

"""Properties about the way a variant is called: repeatedly, on streams, in a graph capture, on another device."""

from __future__ import annotations

import random
import shutil
import tempfile
import threading
from pathlib import Path

import torch

from pytest_fa.errors import UnsupportedCase, WrongResult
from pytest_fa.judge.subject import PropertySubject
from pytest_fa.run.device import synchronize
from pytest_fa.run.forward import Forward
from pytest_fa.run.inputs import bits_of
from pytest_fa.run.module import load_forward

SLOW_CYCLES = 2_000_000  # about 1 ms: a kernel that does not wait for its stream is finished long before
THREAD_CALLS = 120  # together with their comparisons, these calls fit into a stream's launch queue
MOST_GAP_CYCLES = 100_000  # about 50 us: random gaps make the calls of two threads overlap in every phase


def new_data(subject: PropertySubject) -> None:
    """After the inputs are overwritten in place, a call gives the new result and not one cached by address."""
    inputs = subject.inputs()
    out = subject.call(inputs)
    for _ in range(20):  # a cache may begin to store results only after a few calls
        out = subject.call(inputs, out)
    for tensor, new_data in zip(inputs[:3], subject.inputs(seed=1)[:3], strict=True):
        tensor.data.copy_(new_data)  # `.data` bypasses the version counter, which a cache might compare
    subject.require_right("new_data", subject.call(inputs, out), inputs)


def new_shape(subject: PropertySubject) -> None:
    """A call on the same memory, with its batches as heads of one batch, gives the result for the new shape."""
    inputs = subject.inputs()
    out = subject.call(inputs)
    batch, heads = inputs.q.shape[:2]
    if inputs.q.stride(0) != heads * inputs.q.stride(1):
        raise UnsupportedCase("in this layout, batches and heads cannot be merged without a copy")
    q, k, v = (tensor.reshape(1, batch * heads, *tensor.shape[2:]) for tensor in inputs[:3])
    merged = inputs._replace(q=q, k=k, v=v)
    merged_out = subject.call(merged, out.fill_(float("nan")).view(1, batch * heads, *out.shape[2:]))
    subject.require_right("new_shape", merged_out, merged)


def streams(subject: PropertySubject) -> None:
    """A call waits for a slow write on its own stream, and calls from two threads do not interfere."""
    _require_own_stream(subject)
    _require_no_shared_state(subject)


def _require_own_stream(subject: PropertySubject) -> None:
    """Raise `WrongResult` if a call does not run on the current stream.

    The inputs are zero, and a side stream writes the data late.  A kernel on another stream reads the zeros.
    """
    source = subject.inputs()
    late = source._replace(q=torch.zeros_like(source.q), k=torch.zeros_like(source.k), v=torch.zeros_like(source.v))
    out = subject.call(late)  # the set-up of a first call is not part of this test
    stream = torch.cuda.Stream(subject.device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(subject.device))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLOW_CYCLES)  # type: ignore[no-untyped-call]  # noqa: SLF001
        for tensor, new_data in zip(late[:3], source[:3], strict=True):
            tensor.copy_(new_data)
        result = subject.call(late, out, waits=False)
        snapshot = result.clone()  # copied in stream order, so that a kernel that writes later is found
    stream.synchronize()
    subject.require_right("streams", snapshot, source)


def _require_no_shared_state(subject: PropertySubject) -> None:
    """Raise `WrongResult` if two threads that call at once, each on its own stream and data, disturb each other.

    Global state that both calls use, such as one workspace, would be overwritten.  The gaps between the calls are
    random, so that every phase of one thread's call meets a call of the other thread.
    """
    sets = [subject.inputs(seed) for seed in (0, 1)]
    expected = [subject.call(inputs).clone() for inputs in sets]
    torch.cuda.synchronize(subject.device)
    generator = random.Random(0)  # noqa: S311  # not for cryptography
    gaps = [[generator.randrange(MOST_GAP_CYCLES) for _ in range(THREAD_CALLS)] for _ in sets]
    differing_counts = [0, 0]
    problems: list[Exception] = []

    def run(index: int) -> None:
        try:
            stream = torch.cuda.Stream(subject.device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                differing = torch.zeros((), dtype=torch.int64, device=subject.device)
                torch.cuda._sleep(10 * SLOW_CYCLES)  # type: ignore[no-untyped-call]  # noqa: SLF001  # until both threads have queued their calls
                for cycles in gaps[index]:
                    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # noqa: SLF001
                    out = subject.call(sets[index], waits=False)
                    differing += (bits_of(out) != bits_of(expected[index])).any()
                stream.synchronize()
                differing_counts[index] = int(differing)
                subject.require_right("streams", out, sets[index], f" (thread {index})")
        except Exception as problem:  # noqa: BLE001  # raised again by the calling thread
            problems.append(problem)

    threads = [threading.Thread(target=run, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
    if any(differing_counts) and subject.variant.deterministic:
        counts = " and ".join(f"{count} of {THREAD_CALLS}" for count in differing_counts)
        raise WrongResult("streams", f"streams: {counts} outputs of two concurrent threads differ from those of one")


def graph_capture(subject: PropertySubject) -> None:
    """A captured call, replayed on other data, gives the new result.

    The capture fails if the call synchronizes, allocates or copies from the host.
    """
    _require_right_replay("graph_capture", subject, None)


def first_call_in_capture(subject: PropertySubject) -> None:
    """The first call of a library can be captured.

    The library is loaded from a copy, which has its own state, so that its one-time set-up happens in the capture.
    """
    assert subject.library is not None  # noqa: S101  # applies() requires a built variant
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copy(subject.library, Path(folder) / "fresh.so")
        _require_right_replay("first_call_in_capture", subject, load_forward(subject.variant, str(copy)))


def _require_right_replay(name: str, subject: PropertySubject, fresh: Forward | None) -> None:
    inputs = subject.inputs()
    out = subject.output(inputs)
    if fresh is None:
        subject.call(inputs, out)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(subject.device)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(subject.device)
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            result = subject.call(inputs, out, fresh, waits=False)
        except Exception as problem:
            _end_capture(graph)
            raise WrongResult(name, f"{name}: the call cannot be captured: {_first_line(problem)}") from problem
        try:
            graph.capture_end()
        except RuntimeError as problem:
            raise WrongResult(name, f"{name}: the call cannot be captured: {_first_line(problem)}") from problem
    for seed in (1, 2):
        for tensor, new_data in zip(inputs[:3], subject.inputs(seed=seed)[:3], strict=True):
            tensor.copy_(new_data)
        result.fill_(float("nan"))
        graph.replay()
        subject.require_right(name, result, inputs, f", replay on seed {seed}")


def _end_capture(graph: torch.cuda.CUDAGraph) -> None:
    try:
        graph.capture_end()
    except RuntimeError:
        return


def _first_line(problem: Exception) -> str:
    return next(iter(str(problem).splitlines()), type(problem).__name__)


def other_device(subject: PropertySubject) -> None:
    """A call on tensors of cuda:1 gives the right result while cuda:0 is the current device."""
    if torch.cuda.device_count() < 2:  # noqa: PLR2004
        raise UnsupportedCase("needs two GPUs")
    inputs = subject.inputs()
    on_gpu_1 = inputs._replace(q=inputs.q.to("cuda:1"), k=inputs.k.to("cuda:1"), v=inputs.v.to("cuda:1"))
    subject.call(inputs)
    with torch.cuda.device(0):
        out = subject.call(on_gpu_1)
    synchronize(torch.device("cuda:1"))
    subject.require_right("other_device", out, on_gpu_1)

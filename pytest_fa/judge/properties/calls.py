"""Properties about the way a variant is called: repeatedly, on streams, in a graph capture, on another device.

A candidate can write into the memory that it sees at any time.  So outputs are copied before they are judged, and truth
is computed from the judge's own inputs.
"""

from __future__ import annotations

import random

import torch

from pytest_fa.attention.backward import DLSE, LSE, OF_KEYS, OF_PARTS, rows_as_kernels_have
from pytest_fa.attention.backward import PART as BACKWARD
from pytest_fa.attention.ragged import PART as RAGGED
from pytest_fa.attention.ragged import with_lengths
from pytest_fa.errors import UnsupportedCase, WrongResult
from pytest_fa.gpu.device import synchronize
from pytest_fa.gpu.graphs import CannotCapture
from pytest_fa.gpu.inputs import Inputs, Output, as_kernels_have, clone, empty_rows, poisoned_more
from pytest_fa.judge.changed_inputs import require_only_written
from pytest_fa.judge.subject import PropertySubject
from pytest_fa.wire.commands import Copy, Launch, Script, ScriptStep, Sleep

SLOW_CYCLES = 2_000_000  # about 1 ms: a kernel that does not wait for its stream is finished long before
THREAD_CALLS = 120  # these calls fit into a stream's launch queue
MAX_GAP_CYCLES = 100_000  # about 50 us: random gaps make the calls of two threads overlap in every phase


def new_data(subject: PropertySubject) -> None:
    """After the inputs are overwritten in place, a call gives the new result and not one cached by address."""
    inputs, out = subject.visible_call(subject.inputs())
    for _ in range(21):  # a cache may begin to store results only after a few calls
        subject.call(inputs, out)
    others = subject.inputs(seed=1)
    _overwrite(subject, inputs, others)
    subject.require_right("new_data", subject.call(inputs, out).clone(), others)


def new_lengths(subject: PropertySubject) -> None:
    """After the lengths are overwritten in place, a call gives the result for the new ones, and so does a replay.

    No new sequence fills the tensors, as in a cache that grows.
    """
    inputs, out = subject.visible_call(subject.inputs())
    subject.call(inputs, out)
    others = subject.inputs(seed=1)
    lengths = {name: others.extra[name] for name in RAGGED.words if name in others.extra}
    changed = {name: each.flip(0).clamp_max(each.max() - 1) for name, each in lengths.items()}
    others = BACKWARD.call_given(with_lengths(BACKWARD.call_meant(others), changed))
    _overwrite(subject, inputs, others)
    out.poison()
    subject.require_right("new_lengths", subject.call(inputs, out).clone(), others)
    if subject.device.type == "cuda":
        _require_right_replay("new_lengths", subject, inputs, out, is_first_call=False)


def new_shape(subject: PropertySubject) -> None:
    """A call on the same memory, with its batches as heads of one batch, gives the result for the new shape."""
    private = subject.inputs()
    if not private.extra.keys().isdisjoint(RAGGED.words):
        raise UnsupportedCase("the batches have lengths of their own, and cannot be heads of one batch")
    if private.cache_dtype:
        raise UnsupportedCase("the batches and heads have scales of their own")
    inputs, out = subject.visible_call(private)
    subject.call(inputs, out)
    if inputs.q.stride(0) != inputs.q.shape[1] * inputs.q.stride(1):
        raise UnsupportedCase("in this layout, batches and heads cannot be merged without a copy")
    out.poison()
    one_batch = _merged(inputs)
    more = {
        name: poisoned_more(name, one_batch) if name in OF_PARTS else _one_batch_of_rows(name, rows, inputs)
        for name, rows in out.more.items()
    }
    merged = Output(_one_batch(out.out), more)
    subject.require_right("new_shape", subject.call(one_batch, merged).clone(), _merged(private))


def _merged(inputs: Inputs) -> Inputs:
    """The same memory, with batches as heads of one batch."""
    batch, heads = inputs.q.shape[:2]
    extra = {name: tensor.expand(batch, heads, -1, -1).flatten(0, 1)[None] for name, tensor in inputs.extra.items()}
    for name in (LSE, DLSE):
        if name in extra:
            extra[name] = rows_as_kernels_have(extra[name], inputs.conventions)
    descales = inputs.descales and inputs.descales.map(_one_batch)
    return inputs.map(_one_batch)._replace(descales=descales, extra=extra)


def _one_batch(tensor: torch.Tensor) -> torch.Tensor:
    batch, heads = tensor.shape[:2]
    return tensor.view(1, batch * heads, *tensor.shape[2:])


def _one_batch_of_rows(name: str, rows: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """The memory of a further output, for one batch."""
    if name in OF_KEYS:
        return _one_batch(rows)
    like = empty_rows(name, _one_batch(inputs.q), inputs.conventions)
    memory = as_kernels_have(name, rows, inputs.conventions).view(like.shape)
    return as_kernels_have(name, memory, inputs.conventions)


def streams(subject: PropertySubject) -> None:
    """A call waits for a slow write on its own stream, and calls from two threads do not interfere."""
    _require_own_stream(subject)
    _require_no_shared_state(subject)


def _require_own_stream(subject: PropertySubject) -> None:
    """Raise `WrongResult` if a call does not run on the current stream.

    The inputs are zero, and a side stream writes the data late.  A kernel on another stream reads the zeros.
    """
    source = subject.inputs()
    zeros = source.map(torch.zeros_like)
    late, out = subject.visible_call(zeros)
    subject.call(late, out)  # the set-up of a first call is not part of this test
    data, snapshot = subject.visible_call(source)
    candidate = subject.candidate
    call = subject.views_of(late, out)
    tensors = (late.parts.values(), data.parts.values())  # with scales, which the zeros have, too
    copies = zip(*map(candidate.lending.lend, tensors), strict=True)
    # The output is copied in stream order, so that a kernel that writes later is found.
    kept = zip(candidate.views_of_output(snapshot), call.written, strict=True)
    arriving, leaving = ([Copy(target, origin) for target, origin in pairs] for pairs in (copies, kept))
    candidate.run_script(Script(((Sleep(SLOW_CYCLES), *arriving, Launch(call), *leaving),)))
    candidate.lending.take_back()
    subject.require_right("streams", subject.settled(source, snapshot.clone()), source)


def _require_no_shared_state(subject: PropertySubject) -> None:
    """Raise `WrongResult` if two threads that call at once, each on its own stream and data, disturb each other.

    Global state that both calls use, such as one workspace, would be overwritten.  The gaps between the calls are
    random, so that every phase of one thread's call meets a call of the other thread.
    """
    private = [subject.inputs(seed) for seed in (0, 1)]
    sets = [subject.visible_call(inputs)[0] for inputs in private]
    expected = [subject.call(inputs).clone() for inputs in sets]
    outs = [[subject.visible_output(inputs) for _ in range(THREAD_CALLS)] for inputs in sets]
    generator = random.Random(0)  # noqa: S311  # not for cryptography
    subject.candidate.run_script(
        Script(tuple(_steps(subject, inputs, own, generator) for inputs, own in zip(sets, outs, strict=True)))
    )
    subject.candidate.lending.take_back()
    copies = [[subject.settled(inputs, out.clone()) for out in own] for inputs, own in zip(private, outs, strict=True)]
    for index, (inputs, own) in enumerate(zip(private, copies, strict=True)):
        subject.require_right("streams", own[-1], inputs, f" (thread {index})")
    differing = [sum(out.differs(right) > 0 for out in own) for own, right in zip(copies, expected, strict=True)]
    if any(differing) and subject.variant.deterministic:
        counts = " and ".join(f"{count} of {THREAD_CALLS}" for count in differing)
        raise WrongResult("streams", f"streams: {counts} outputs of two concurrent threads differ from those of one")


def _steps(
    subject: PropertySubject, inputs: Inputs, outs: list[Output], generator: random.Random
) -> tuple[ScriptStep, ...]:
    """One thread's calls, with random gaps; a long wait comes first, until both threads have queued their calls."""
    call = subject.views_of(inputs, outs[0])
    steps: list[ScriptStep] = [Sleep(10 * SLOW_CYCLES)]
    for out in outs:
        views = subject.candidate.views_of_output(out)
        steps += [Sleep(generator.randrange(MAX_GAP_CYCLES)), Launch(call.writing(*views))]
    return tuple(steps)


def graph_capture(subject: PropertySubject) -> None:
    """A captured call, replayed on other data, gives the new result.

    The capture fails if the call synchronizes, allocates or copies from the host.
    """
    inputs, out = subject.visible_call(subject.inputs())
    subject.call(inputs, out)
    _require_right_replay("graph_capture", subject, inputs, out, is_first_call=False)


def first_call_in_capture(subject: PropertySubject) -> None:
    """The first call of a library can be captured.

    The library is loaded from a copy, which has its own state, so that its one-time set-up happens in the capture.
    """
    inputs, out = subject.visible_call(subject.inputs())
    _require_right_replay("first_call_in_capture", subject, inputs, out, is_first_call=True)


def _require_right_replay(
    name: str, subject: PropertySubject, inputs: Inputs, out: Output, *, is_first_call: bool
) -> None:
    try:
        subject.candidate.capture_call(subject.views_of(inputs, out), is_first_call=is_first_call)
    except CannotCapture as problem:
        raise WrongResult(name, f"{name}: the call cannot be captured: {problem}") from problem
    for seed in (1, 2):
        others = subject.inputs(seed)
        _overwrite(subject, inputs, others)
        out.poison()
        before = clone(inputs)
        synchronize(subject.device)
        subject.candidate.replay_call()
        require_only_written(before, inputs, " in a replay")
        subject.require_right(name, subject.settled(others, out.clone()), others, f", replay on seed {seed}")
    subject.candidate.lending.take_back()


def other_device(subject: PropertySubject) -> None:
    """A call on tensors of cuda:1 gives the right result while cuda:0 is the current device."""
    if torch.cuda.device_count() < 2:  # noqa: PLR2004
        raise UnsupportedCase("needs two GPUs")
    inputs = subject.inputs()
    on_gpu_1 = inputs.map_all(lambda tensor: tensor.to("cuda:1"))
    subject.call(inputs)
    with torch.cuda.device(0):
        out = subject.call(on_gpu_1)
    synchronize(torch.device("cuda:1"))
    subject.require_right("other_device", out, on_gpu_1)


def _overwrite(subject: PropertySubject, inputs: Inputs, others: Inputs) -> None:
    data = clone(subject.taken(others)).parts
    for name, tensor in inputs.parts.items():
        tensor.copy_(data[name])

"""What must hold whatever the data: each property calls a variant in a way that some mistake does not survive.

A function raises `WrongResult` with the property's name where it does not hold, `UnsupportedCase` where the kernel
refuses, and returns nothing otherwise.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from pytest_fa.catalog.properties import least_lengths
from pytest_fa.errors import UnsupportedCase, WrongResult
from pytest_fa.judge.policies import ulp
from pytest_fa.judge.subject import Subject
from pytest_fa.run.device import synchronize
from pytest_fa.run.forward import Forward
from pytest_fa.run.inputs import LINEAR_IN, Inputs
from pytest_fa.run.module import load_forward

SLOW_CYCLES = 2_000_000  # a millisecond: long enough that whoever does not wait is far ahead
THREAD_CALLS = 120  # with what is compared they fit into a stream's queue
MOST_GAP_CYCLES = 100_000  # 50 us: so that two threads' calls meet in every phase
FAR_ELEMENTS = 2**31 + 64
MANY_HEADS = 2**16 + 1
MANY_HEADS_SEQUENCE = 16


# -- data -------------------------------------------------------------------------------------------------------------


def hard_data(subject: Subject) -> None:
    """Data on which shortcuts fail: every kind is judged, or compared with what it must equal."""
    inputs = subject.inputs()
    for name, changed, same_as in (
        ("scores 30 times as large", inputs._replace(q=inputs.q * 30), None),
        ("scores -30 times as large", inputs._replace(q=inputs.q * -30), None),
        ("one-hot rows", _one_hot(inputs), None),
        *_shifted(inputs),
        *_reversed(inputs),
    ):
        subject.require_right("hard_data", subject.call(changed), same_as or changed, f" ({name})")
    of_ones = inputs._replace(v=torch.ones_like(inputs.v))
    ones = subject.call(of_ones)
    subject.require_right("hard_data", ones, of_ones, " (values of one)")
    if not subject.is_exact:
        return
    worst = float((ones.double() - 1).abs().max())
    if not worst <= ulp(1.0, ones.dtype):
        raise WrongResult("hard_data", f"hard_data (values of one): the output is off from one by {worst:.3g}")


Kind = tuple[str, Inputs, Inputs | None]


def _one_hot(inputs: Inputs) -> Inputs:
    """One key in every 37 outweighs all others for its queries, so each row of the output is one row of V."""
    k, q = inputs.k / 8, torch.zeros_like(inputs.q)
    picked = range(0, k.shape[2], 37)
    for index, key in enumerate(picked):
        dim = index % q.shape[3]
        k[:, :, key] = 0
        k[:, :, key, dim] = 60
        q[:, :, index :: len(picked), dim] = 30
    return inputs._replace(q=q, k=k)


def _shifted(inputs: Inputs) -> Iterator[Kind]:
    """One vector is added to all keys: every score of a row moves alike.  K lies on a grid, so the sum is exact."""
    plain = inputs._replace(k=(inputs.k * 32).round() / 32)
    yield "keys shifted by 4", plain._replace(k=plain.k + 4), plain


def _reversed(inputs: Inputs) -> Iterator[Kind]:
    """Without a mask the order of keys means nothing."""
    if inputs.causal == "none":
        yield "keys in reverse order", inputs._replace(k=inputs.k.flip(2), v=inputs.v.flip(2)), inputs


def zero_scale(subject: Subject) -> None:
    """All keys weigh the same; scores are zero."""
    inputs = subject.inputs()._replace(scale=0.0)
    subject.require_right("zero_scale", subject.call(inputs), inputs)


def negative_scale(subject: Subject) -> None:
    """The smallest score has the most weight: a maximum taken before scaling is the wrong one."""
    inputs = subject.inputs()
    turned = inputs._replace(q=inputs.q * 8, scale=-inputs.scale)
    subject.require_right("negative_scale", subject.call(turned), turned)


def head_independence(subject: Subject) -> None:
    """Other, far larger data in head 1: the other heads keep every bit."""
    inputs = subject.inputs()
    before = subject.call(inputs).clone()
    changed = inputs._replace(q=inputs.q.clone(), k=inputs.k.clone(), v=inputs.v.clone())
    for each in changed[:3]:
        each[:, 1] = each[:, 1].flip(1) * 16
    _require_same_elsewhere("head_independence", subject, inputs, before, subject.call(changed))


def contained_nan(subject: Subject) -> None:
    """NaN in head 1 of V, or of K for scores: the other heads keep every bit."""
    inputs = subject.inputs()
    before = subject.call(inputs).clone()
    name = LINEAR_IN[subject.computes]
    spoiled: torch.Tensor = getattr(inputs, name).clone()
    spoiled[:, 1] = float("nan")
    after = subject.call(inputs._replace(**{name: spoiled}))  # type: ignore[arg-type]  # a tensor's name
    _require_same_elsewhere("contained_nan", subject, inputs, before, after)


def _require_same_elsewhere(
    name: str, subject: Subject, inputs: Inputs, before: torch.Tensor, after: torch.Tensor
) -> None:
    """Every head but 1 kept its bits; where a variant may differ from call to call, it is still right."""
    others = [each for each in range(before.shape[1]) if each != 1]
    if not subject.variant.deterministic:
        rest = inputs._replace(q=inputs.q[:, others], k=inputs.k[:, others], v=inputs.v[:, others])
        subject.require_right(name, after[:, others], rest)
        return
    differs = before[:, others].view(torch.int16) != after[:, others].view(torch.int16)
    if bool(differs.any()):
        raise WrongResult(name, f"{name}: {int(differs.sum())} elements of other heads changed with head 1")


# -- memory -----------------------------------------------------------------------------------------------------------


def padded_rows(subject: Subject) -> None:
    """Every row is followed by a row of NaN that belongs to nobody."""
    _require_right_in("padded_rows", subject, lambda each: _within(each, rows=2))


def expanded_heads(subject: Subject) -> None:
    """K and V of one head stand for all heads, by a stride of zero."""
    inputs = subject.inputs()
    one = inputs._replace(k=inputs.k[:, :1].expand_as(inputs.k), v=inputs.v[:, :1].expand_as(inputs.v))
    subject.require_right("expanded_heads", subject.call(one), one)


def offset_pointers(subject: Subject) -> None:
    """Tensors that begin 2 and 8 bytes into their allocation; a kernel that takes one may refuse the other."""
    refusals = []
    for elements in (1, 4):
        try:
            _require_right_in("offset_pointers", subject, partial(_at_offset, elements))
        except UnsupportedCase as reason:
            refusals.append(reason)
    if len(refusals) == 2:  # noqa: PLR2004  # both of them
        raise refusals[0]


def many_heads(subject: Subject) -> None:
    """More heads than a grid's second dimension or 16 bits can count, short ones; the last is unlike all others."""
    inputs = subject.inputs()
    queries, keys = least_lengths(subject.variant, MANY_HEADS_SEQUENCE)
    ends = (queries, keys, keys)
    q, k, v = (
        each[:1, :1, :end].expand(1, MANY_HEADS, -1, -1).clone() for each, end in zip(inputs[:3], ends, strict=True)
    )
    for each in (q, k, v):
        each[:, -1] = each[:, -1].flip(1)
    many = inputs._replace(q=q, k=k, v=v)
    subject.require_right("many_heads", subject.call(many), many)


def far_offsets(subject: Subject) -> None:
    """The second batch of K and V lies 2^31 elements after the first."""
    inputs = subject.inputs()
    need = 2 * (FAR_ELEMENTS + inputs.k[0].numel()) * inputs.k.element_size()
    free, _ = torch.cuda.mem_get_info(subject.device)
    if free < need * 1.2:
        raise UnsupportedCase(f"needs {need / 1e9:.0f} GB of free GPU memory, there are {free / 1e9:.0f}")
    far = inputs._replace(k=_far(inputs.k), v=_far(inputs.v))
    subject.require_right("far_offsets", subject.call(far), inputs)


def _require_right_in(name: str, subject: Subject, place: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Inputs and output, each moved to a place of the same shape and other strides or address."""
    inputs = subject.inputs()
    q, k, v = (place(each) for each in inputs[:3])
    out = subject.call(inputs._replace(q=q, k=k, v=v), place(subject.output(inputs)))
    subject.require_right(name, out, inputs)


def _within(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    batch, heads, seq, dim = tensor.shape
    room = torch.full((batch, heads, seq * rows, dim), float("nan"), dtype=tensor.dtype, device=tensor.device)
    return room[:, :, ::rows].copy_(tensor)


def _at_offset(elements: int, tensor: torch.Tensor) -> torch.Tensor:
    room = torch.empty(tensor.numel() + elements, dtype=tensor.dtype, device=tensor.device)
    return room[elements:].view(tensor.shape).copy_(tensor)


def _far(tensor: torch.Tensor) -> torch.Tensor:
    room = torch.empty(FAR_ELEMENTS + tensor[0].numel(), dtype=tensor.dtype, device=tensor.device)
    stride = tensor[0].contiguous().stride()
    return room.as_strided(tensor.shape, (FAR_ELEMENTS, *stride)).copy_(tensor)


# -- calls ------------------------------------------------------------------------------------------------------------


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


PROPERTIES: dict[str, Callable[[Subject], None]] = {
    each.__name__: each
    for each in (
        hard_data,
        zero_scale,
        negative_scale,
        head_independence,
        contained_nan,
        padded_rows,
        expanded_heads,
        offset_pointers,
        new_data,
        new_shape,
        streams,
        graph_capture,
        first_call_in_capture,
        many_heads,
        far_offsets,
        other_device,
    )
}

"""Malformed calls: a variant that promises to check its arguments refuses each, or computes it where it has a meaning.

A call that something refuses before the variant's own code gets it, such as the binding of the C interface, shows
nothing about the variant, and does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, get_args

import torch

from pytest_fa.attention import parts
from pytest_fa.attention.ragged import with_lengths
from pytest_fa.catalog.case import Case
from pytest_fa.catalog.properties import MALFORMED, Numbers, case_with_numbers
from pytest_fa.errors import DeviceLost, LaunchError, Tampering, UnsupportedCase, WrongResult
from pytest_fa.gpu.guards import CANARY_PATTERN, Guarded
from pytest_fa.gpu.inputs import TORCH_DTYPES, Inputs, Output, as_kernels_have, bits_of, is_poison, poison
from pytest_fa.judge.connection import CandidateLost, KernelRaised
from pytest_fa.judge.properties.cut import stored_like
from pytest_fa.judge.properties.memory import at_offset
from pytest_fa.judge.subject import PropertySubject
from pytest_fa.records.checks import Check
from pytest_fa.wire.commands import Comes

Tensors = Mapping[str, torch.Tensor]  # of a call, as a kernel has them: q, k, v, out, those of parts, further outputs
Judge = Callable[[Tensors], str]  # what is wrong with the outputs after a call; empty if they are right

NUMBERS: tuple[Numbers, ...] = get_args(Numbers)
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
SMALL = 2.0**-12  # smaller numbers of K become 0, so that each dtype has all its numbers
FINITE = 99.0  # in place of NaN in padding and in pages without a sequence
TOO_MANY = 7  # keys of a sequence, or pages, beyond those that there are
TABLES = ("block_table", "cu_seqlens_q", "cu_seqlens_k")  # with which batches are no axis of k
REMEDY = "refuse the call, or drop `checks_arguments`"


class MalformedCall(NamedTuple):
    """A call that is well-formed but for one thing.  Without `judge`, it has no correct result."""

    words: str
    inputs: Inputs  # of the well-formed call, as its tensors lie in memory
    tensors: Tensors
    judge: Judge | None
    argument: str  # the tensor that is malformed
    comes: Comes


class WellFormed(NamedTuple):
    """A well-formed call, from which malformed ones are made; its tensors stay as they are."""

    subject: PropertySubject
    inputs: Inputs  # the judge's own
    placed: Inputs
    tensors: Tensors

    @classmethod
    def of(cls, subject: PropertySubject, inputs: Inputs) -> WellFormed:
        """The call on these inputs, with outputs filled with NaN."""
        placed = subject.taken(inputs)
        output = subject.output(placed)
        more = {name: as_kernels_have(name, rows, inputs.conventions) for name, rows in output.more.items()}
        named = dict(zip(("q", "k", "v", "out"), (*placed[:3], output.out), strict=True))
        return cls(subject, inputs, placed, {**named, **placed.tensors, **more})

    def malformed(
        self, words: str, changed: Tensors, judge: Judge | None = None, argument: str = "k", comes: Comes = "as_viewed"
    ) -> MalformedCall:
        """The call with other tensors."""
        return MalformedCall(words, self.placed, {**self.tensors, **changed}, judge, argument, comes)

    def changed(self, inputs: Inputs) -> WellFormed:
        """The call on other inputs."""
        return WellFormed.of(self.subject, inputs)

    def judge(self, tensors: Tensors) -> str:
        """What is wrong with outputs that should be those of this call."""
        return _wrong(self.subject.check(self._settled(tensors), self.inputs))

    def judge_but_nan_in(self, sequence: int) -> Judge:
        """A judge that also takes outputs in which all rows of a sequence are NaN that the kernel wrote."""

        def judge(tensors: Tensors) -> str:
            if not self.judge(tensors):
                return ""
            out, is_of_query = self._settled(tensors).out, self._rows_of(sequence)
            if not bool((out.isnan() & ~is_poison(out))[is_of_query].all()):
                return f"{self.judge(tensors)}, and its rows are not NaN"
            right = out.where(~is_of_query, self.subject.exact(self.inputs).to(out.dtype))
            return _wrong(self.subject.check(Output(right), self.inputs))

        return judge

    def _settled(self, tensors: Tensors) -> Output:
        """A copy of the outputs, as they are judged."""
        placed, names = self.placed, self.subject.more_outputs
        rows = {name: as_kernels_have(name, tensors[name].clone(), placed.conventions) for name in names}
        return self.subject.settled(placed, Output(tensors["out"].to(placed.output_dtype, copy=True), rows))

    def _rows_of(self, sequence: int) -> torch.Tensor:
        """Where the output has the queries of a sequence, [batch, heads, seq_q, head_dim_v]."""
        exact, lengths = self.subject.exact(self.inputs), self.inputs.extra.get("seqlens_q")
        is_of_query = torch.zeros_like(exact, dtype=torch.bool)
        is_of_query[sequence, :, : exact.shape[2] if lengths is None else int(lengths[sequence])] = True
        return is_of_query

    def with_finite(self, *names: str) -> dict[str, torch.Tensor]:
        """These tensors without NaN, so that NaN in an output comes from the kernel."""
        return {name: self.tensors[name].nan_to_num(FINITE) for name in names}

    @property
    def has_tables(self) -> bool:
        """Whether keys lie in pages, or sequences behind one another."""
        return any(name in self.tensors for name in TABLES)

    @property
    def can_share_keys(self) -> bool:
        """Whether batches and rows may have the same memory of K and V: each number is only read, by its own place."""
        return not (self.has_tables or self.placed.cache_dtype or parts.written(self.placed))


class WellFormedCalls(NamedTuple):
    """The well-formed calls: one that is as plain as the variant takes it, and others with numbers in tensors."""

    plain: WellFormed
    with_numbers: Mapping[Numbers, WellFormed]

    @classmethod
    def of(cls, subject: PropertySubject) -> WellFormedCalls:
        """The calls of a variant."""
        of_numbers = {each: case_with_numbers(subject.variant, subject.case, each) for each in NUMBERS}
        calls = {each: WellFormed.of(subject, subject.inputs_of(case)) for each, case in of_numbers.items() if case}
        return cls(_plain(subject, subject.case), calls)


def malformed_arguments(subject: PropertySubject) -> str:
    """Each malformed call is refused, or computed correctly where it has a meaning, and writes nothing but outputs.

    Returns how many kinds were tried.
    """
    calls = WellFormedCalls.of(subject)
    for call in (calls.plain, *calls.with_numbers.values()):
        _require_right(subject, call)
    tried, complaints = 0, list[str]()
    for kind in KINDS:
        answers = [answer for call in kind(calls) if (answer := _complaint(subject, call)) is not None]
        tried += bool(answers)
        complaints += filter(None, answers)
    kinds = f"{tried} of {len(KINDS)} kinds of malformed calls apply"
    if not tried:
        raise UnsupportedCase(f"{MALFORMED}: {kinds}: all are refused before the variant gets them")
    if complaints:
        first, *others = (f"{MALFORMED}: {each}" for each in complaints)
        raise WrongResult(MALFORMED, "\n".join((f"{first}; {REMEDY} ({kinds})", *others)))
    return kinds


def _wrong(check: Check) -> str:
    """A verdict in words; empty if the output is right."""
    return "" if check.passed else f"the output has {check.bad_count} wrong elements ({check.complaint})"


def _require_right(subject: PropertySubject, call: WellFormed) -> None:
    """Raise unless a well-formed call that is made as malformed ones are is computed correctly."""
    tensors = {name: tensor.clone() for name, tensor in call.tensors.items()}
    is_reached = subject.candidate.malformed_call(call.placed, tensors, "q")
    if wrong := call.judge(tensors) if is_reached else "it does not reach the variant":
        raise WrongResult(MALFORMED, f"{MALFORMED}: a well-formed call, before malformed ones: {wrong}")


def _complaint(subject: PropertySubject, call: MalformedCall) -> str | None:
    """Make a call; what is wrong with its answer, empty if nothing is; None if the call does not reach the variant."""
    outputs, written = ("out", *subject.more_outputs), parts.written(call.inputs)
    memories = {
        name: _Memory(tensor, is_output=name in outputs, is_written=name in written)
        for name, tensor in call.tensors.items()
    }
    tensors = {name: memory.tensor for name, memory in memories.items()}
    said, is_refused = "", False
    try:
        if not subject.candidate.malformed_call(call.inputs, tensors, call.argument, call.comes):
            return None
    except CandidateLost as lost:
        lost.during = f"{MALFORMED}: {call.words}"
        raise
    except DeviceLost as lost:
        raise DeviceLost(f"{MALFORMED}: {call.words}: {lost}") from lost
    except Tampering:
        raise
    except WrongResult as problem:  # the function returned what is no output
        said = f"{call.words} was accepted: {problem}"
    except (UnsupportedCase, LaunchError, KernelRaised):
        is_refused = True
    damage = next((f"{name}: {memory.damage}" for name, memory in memories.items() if memory.damage), "")
    if damage:
        return f"{call.words}: the kernel wrote outside its output, {damage}"
    return said if said or is_refused else _accepted(call, tensors)


def _accepted(call: MalformedCall, tensors: Tensors) -> str:
    """What is wrong with a call that was not refused."""
    if call.judge is not None:
        wrong = call.judge(tensors)
        return f"{call.words} was accepted: {wrong}" if wrong else ""
    out = tensors["out"]
    written = int((~is_poison(out)).sum())
    return f"{call.words} was accepted: it has no correct result, and {written} of {out.numel()} elements were written"


class _Memory:
    """A tensor of a call, whose storage lies between guard bands."""

    def __init__(self, tensor: torch.Tensor, *, is_output: bool, is_written: bool) -> None:
        whole = tensor.new_empty(0).set_(tensor.untyped_storage())
        self._guarded = Guarded.like(whole, CANARY_PATTERN)  # which is no NaN
        self._guarded.tensor.copy_(whole)
        if is_output:
            poison(self._guarded.tensor)
        self._before = None if is_output or is_written else self._guarded.tensor.clone()
        start = self._guarded.tensor.storage_offset() + tensor.storage_offset()
        self.tensor = self._guarded.tensor.as_strided(tensor.shape, tensor.stride(), start)

    @property
    def damage(self) -> str:
        """What a call wrote where it must not; empty if it did not."""
        found = self._guarded.tensor
        if self._before is not None and not torch.equal(bits_of(found), bits_of(self._before)):
            return "an input was changed"
        return self._guarded.damage


# -- well-formed calls ------------------------------------------------------------------------------------------------


def _plain(subject: PropertySubject, case: Case) -> WellFormed:
    """A call in which K has numbers that each dtype has."""
    inputs = subject.inputs_of(case)
    k = inputs.k.clone()
    if k.dtype in (torch.float16, torch.bfloat16, torch.float32):
        k.copy_(k.where(k.abs() >= SMALL, 0.0).to(torch.bfloat16).to(torch.float16))
    return WellFormed.of(subject, inputs._replace(k=k))


# -- the kinds of malformed calls -------------------------------------------------------------------------------------


def _other_dtype(calls: WellFormedCalls) -> Iterator[MalformedCall]:
    """K has the same numbers in another dtype."""
    call = calls.plain
    q, k = call.tensors["q"], call.tensors["k"]
    if k.dtype != torch.int8:
        other = torch.bfloat16 if q.dtype == torch.float16 else torch.float16
        words = f"k of another dtype ({DTYPE_NAMES[other]} beside {DTYPE_NAMES[q.dtype]})"
        yield call.malformed(words, {"k": k.to(other)}, call.judge)


def _rank(calls: WellFormedCalls) -> Iterator[MalformedCall]:
    call = calls.plain
    yield call.malformed("k of 3 dimensions", {"k": call.tensors["k"][0]})


def _batch(calls: WellFormedCalls) -> Iterator[MalformedCall]:
    """K and V of the first batch, which means that all batches share it, if anything."""
    call = calls.plain
    if call.can_share_keys and call.inputs.descales is None:
        k, v = (call.tensors[name][:1].clone() for name in "kv")
        shared = call.inputs._replace(k=k.expand_as(call.inputs.k), v=v.expand_as(call.inputs.v))
        words = f"{len(call.inputs.q)} batches of q beside 1 of k and v"
        yield call.malformed(words, {"k": k, "v": v}, call.changed(shared).judge)


def _heads(calls: WellFormedCalls) -> Iterator[MalformedCall]:
    call = calls.plain
    heads, kv_heads = call.tensors["q"].shape[1], call.tensors["k"].shape[1]
    if heads > 2:  # noqa: PLR2004  # one head less does not divide them
        of_heads = torch.arange(heads - 1, device=call.placed.q.device) % kv_heads
        k, v = (stored_like(call.tensors[name][:, of_heads], call.tensors[name]) for name in "kv")
        yield call.malformed(f"{heads} heads of q beside {heads - 1} of k and v", {"k": k, "v": v})


def _head_dim(calls: WellFormedCalls) -> Iterator[MalformedCall]:
    call = calls.plain
    k = call.tensors["k"]
    dim = k.shape[3] - 8 if k.shape[3] > 8 else k.shape[3] // 2  # noqa: PLR2004  # 16 bytes of 16-bit elements
    yield call.malformed(f"head_dim {k.shape[3]} of q beside {dim} of k", {"k": stored_like(k[..., :dim], k)})


def _lengths_of_k_and_v(calls: WellFormedCalls) -> Iterator[MalformedCall]:
    call = calls.plain
    v = call.tensors["v"]
    if (keys := v.shape[2]) > 1:
        yield call.malformed(f"{keys} rows of k beside {keys - 1} of v", {"v": stored_like(v[:, :, :-1], v)})


def _shape_of_out(calls: WellFormedCalls) -> Iterator[MalformedCall]:
    call = calls.plain
    out = call.tensors["out"]
    rows = out.shape[2]
    words = f"an output of {rows - 1} rows beside {rows} of q"
    yield call.malformed(words, {"out": stored_like(out[:, :, :-1], out)}, argument="out")


def _dtype_of_out(calls: WellFormedCalls) -> Iterator[MalformedCall]:
    """An output with more bits, which can hold the correct result, or with fewer, which cannot."""
    call = calls.plain
    out = call.tensors["out"]
    is_wider = out.dtype != torch.float32
    other = torch.float32 if is_wider else torch.float16
    words = f"an output of another dtype ({DTYPE_NAMES[other]} instead of {DTYPE_NAMES[out.dtype]})"
    changed = {"out": torch.empty_like(out, dtype=other)}
    yield call.malformed(words, changed, call.judge if is_wider else None, "out")


def _unaligned(calls: WellFormedCalls) -> Iterator[MalformedCall]:
    call = calls.plain
    moved = {name: at_offset(None, call.tensors[name]) for name in ("q", "k", "v", "out")}
    yield call.malformed("pointers off by one element", moved, call.judge)


def _strides(calls: WellFormedCalls) -> Iterator[MalformedCall]:
    """Elements of K that are two apart, and rows of K that overlap."""
    call = calls.plain
    k = call.tensors["k"]
    twice = stored_like(k.repeat_interleave(2, 3), k)
    twice[..., 1::2] = 127 if k.dtype == torch.int8 else float("nan")
    yield call.malformed("k with a last stride of 2", {"k": twice[..., ::2]}, call.judge)
    if call.can_share_keys:
        step = max(1, k.shape[3] // 2)
        dense = k.clone(memory_format=torch.contiguous_format)
        overlapping = dense.as_strided(k.shape, (*dense.stride()[:2], step, 1))
        meant = call.changed(call.inputs._replace(k=stored_like(overlapping, k)))
        yield call.malformed("rows of k that overlap", {"k": overlapping}, meant.judge)


def _absent(calls: WellFormedCalls) -> Iterator[MalformedCall]:
    yield calls.plain.malformed("None for k", {}, comes="absent")


def _elsewhere(calls: WellFormedCalls) -> Iterator[MalformedCall]:
    where = "on the CPU" if calls.plain.placed.q.is_cuda else "on the device `meta`"
    yield calls.plain.malformed(f"k {where}", {}, comes="elsewhere")


def _lengths(calls: WellFormedCalls) -> Iterator[MalformedCall]:
    """A first sequence of more keys than there are, which may be taken for all, and of fewer than none."""
    if (call := calls.with_numbers.get("lengths")) is None or "seqlens_k" not in call.inputs.extra:
        return
    keys = call.inputs.k.shape[2]
    for length, meant in ((keys + TOO_MANY, keys), (-1, 0)):
        lengths = call.inputs.extra["seqlens_k"].clone()
        lengths[0] = meant
        near = call.changed(with_lengths(call.inputs, {"seqlens_k": lengths}))
        malformed = near.tensors["seqlens_k"].clone()
        malformed[0] += length - meant
        changed = {**near.with_finite("k", "v"), "seqlens_k": malformed}
        yield near.malformed(f"seqlens_k of {length} where k has {keys} rows", changed, near.judge_but_nan_in(0))


def _pages(calls: WellFormedCalls) -> Iterator[MalformedCall]:
    """The first page of the longest sequence is none."""
    if (call := calls.with_numbers.get("pages")) is None:
        return
    pages, longest = len(call.tensors["k"]), int(call.tensors["seqlens_k"].argmax())
    for number in (pages + TOO_MANY, -1):
        table = call.tensors["block_table"].clone()
        table[longest, 0] = number
        changed = {**call.with_finite("k", "v"), "block_table": table}
        yield call.malformed(f"page {number} of {pages} in block_table", changed, call.judge_but_nan_in(longest))


def _starts(calls: WellFormedCalls) -> Iterator[MalformedCall]:
    """The last sequence ends before it begins, which may be taken for no keys; of queries, it means nothing."""
    if (call := calls.with_numbers.get("starts")) is None:
        return
    name = "cu_seqlens_k" if "cu_seqlens_k" in call.tensors else "cu_seqlens_q"
    lengths = call.inputs.extra["seqlens_k"].clone()
    lengths[-1] = 0
    near = call.changed(with_lengths(call.inputs, {"seqlens_k": lengths}))
    starts = near.tensors[name].clone()
    starts[-1] = starts[-2] - 1
    judge = near.judge_but_nan_in(len(lengths) - 1) if name == "cu_seqlens_k" else None
    words = f"{name} that decreases ({starts[-2]}, {starts[-1]})"
    yield near.malformed(words, {**near.with_finite("k", "v"), name: starts}, judge)


def _other_head_dim(calls: WellFormedCalls) -> Iterator[MalformedCall]:
    """A head_dim that is not claimed, with which all tensors fit together."""
    subject = calls.plain.subject
    claimed, dim = subject.variant.supports.head_dim, subject.case.head_dim
    other = next(size for size in (dim + 8, dim + 4, dim + 1, 2 * max(claimed)) if size not in claimed)
    call = _plain(subject, subject.case.with_fields({"head_dim": other}))
    yield call.malformed(f"head_dim {other}, which supports.head_dim does not list", {}, call.judge)


def _empty(calls: WellFormedCalls) -> Iterator[MalformedCall]:
    """No batch, of which nothing is to be computed."""
    call = calls.plain
    if not call.has_tables:
        batch = len(call.tensors["q"])
        of_batches = {name: tensor[:0] for name, tensor in call.tensors.items() if len(tensor) == batch}
        yield call.malformed("0 batches", of_batches, lambda _: "")


KINDS: tuple[Callable[[WellFormedCalls], Iterator[MalformedCall]], ...] = (
    _other_dtype,
    _rank,
    _batch,
    _heads,
    _head_dim,
    _lengths_of_k_and_v,
    _shape_of_out,
    _dtype_of_out,
    _unaligned,
    _strides,
    _absent,
    _elsewhere,
    _lengths,
    _pages,
    _starts,
    _other_head_dim,
    _empty,
)

"""`FreshData`: the buffers of timed calls, in which every call reads data of its own and may be checked afterwards.

In each call, q, k, v and the tensors of parts of attention are views into random buffers, at secret offsets that are
multiples of 128 bytes.  The buffers are filled anew for each sample.  A result that was kept from an earlier call is
therefore wrong, whatever it was kept by.  Inputs that a call writes are at one place, so that calls write no other
call's data.  The judge has a private copy of the buffers, by which it computes truth.

`draw` makes new data in the judge's own memory, and `publish` copies them to where the candidate sees them.  The
judge's clock starts before `publish`: work that begins as soon as the data are there is inside the time.
"""

from __future__ import annotations

import functools
import itertools
import random
import secrets
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from pytest_fa.attention import parts
from pytest_fa.attention.backward import GRADIENTS, LIKE, OUT, RESULTS
from pytest_fa.attention.e4m3 import DESCALES
from pytest_fa.attention.grouped_heads import key_heads
from pytest_fa.catalog.case import Case
from pytest_fa.errors import WrongResult
from pytest_fa.gpu.device import synchronize
from pytest_fa.gpu.guards import NAN_PATTERN
from pytest_fa.gpu.inputs import Inputs, Output, at_places, bits_of, poison, poisoned_outputs
from pytest_fa.gpu.packed import memories_of, memory_of, with_memories
from pytest_fa.gpu.quantised import Descales, fill_random
from pytest_fa.judge.candidate import Candidate
from pytest_fa.judge.changed_inputs import require_only_written
from pytest_fa.judge.clocks.forward_passes import ForwardPasses
from pytest_fa.judge.clocks.gaps import Gaps
from pytest_fa.judge.clocks.shifts import RANGE_BYTES, random_shifts, shifted
from pytest_fa.judge.forward_results import with_results
from pytest_fa.judge.gradients import readers_of
from pytest_fa.judge.padding import padding_of
from pytest_fa.wire.commands import Series, View

MAX_OUTPUTS = 8  # that calls write in turn
OWN_OUTPUT_BYTES = {"cpu": 2**26, "cuda": 2**30}  # of outputs that one call each writes

USUAL_SCALE = 0.0625  # of a cache
GRADIENT_SCORES = 8  # times as long as the truth of an output takes that of gradients, per score
FILLS = 3  # of which the shortest counts
# The longest time to publish data that is believed: work of a candidate beside it must not lengthen it much.  It is a
# constant, and as long as a copy at the rate of a slow machine.
MAX_PUBLISH_US = 200.0
MIN_COPY_BYTES_PER_US = {"cpu": 4e3, "cuda": 100e3}


class Written(NamedTuple):
    """One head of one timed call: its inputs, [batch, 1, seq, head_dim], and what the call wrote.

    It is of one batch, or of all those that lie behind one another.  Of gradients, it is a head of K and V with all
    heads of Q that read it.
    """

    inputs: Inputs
    output: Output  # [batch, 1, seq_q, head_dim or seq_k]


class Heads(NamedTuple):
    """The heads of Q and of K and V that one `Written` has."""

    of_q: slice
    of_k: slice


class Place(NamedTuple):
    """Some heads of one batch of one output of a series."""

    slot: int
    batch: int
    heads: Heads

    def of_q(self, tensor: torch.Tensor) -> torch.Tensor:
        """These heads of q or of what is like it, [1, heads, seq, head_dim], as a view."""
        return tensor[self.batch : self.batch + 1, self.heads.of_q]

    def of_k(self, tensor: torch.Tensor) -> torch.Tensor:
        """These heads of k or of what is like it, [1, 1, seq, head_dim], as a view."""
        return tensor[self.batch : self.batch + 1, self.heads.of_k]

    def part_of(self, output: Output) -> Output:
        """These heads of an output, as views."""
        return Output(
            self.of_q(output.out),
            {name: (self.of_k if name in LIKE else self.of_q)(tensor) for name, tensor in output.more.items()},
        )


def _without_zero_scales(inputs: Inputs) -> Inputs:
    """The call with other scales in place of zeros: a kernel may skip a head of zeros, and random numbers are none."""
    of_numbers = {
        name: tensor.masked_fill(tensor == 0, USUAL_SCALE)
        for name, tensor in inputs.extra.items()
        if parts.tensor_form(name).vector == "scale"
    }
    return inputs._replace(extra={**inputs.extra, **of_numbers})


def _is_random(name: str) -> bool:
    """Whether the tensor of a name has new numbers in each call, as all but descales and lengths."""
    is_drawn = name not in parts.tensor_words() or parts.tensor_form(name).is_random
    return name in RESULTS or (name not in DESCALES and is_drawn)


def stacked(written: list[Written]) -> tuple[Inputs, Output]:
    """Heads of several calls as the batches of one case: its inputs and its output, [batches, 1, seq, head_dim]."""
    inputs = [head.inputs for head in written]
    q, k, v = (torch.cat(tensors) for tensors in zip(*(each[:3] for each in inputs), strict=True))
    listed = [each.descales for each in inputs if each.descales is not None]
    descales = Descales(*(torch.cat(tensors) for tensors in zip(*listed, strict=True))) if listed else None
    extra = {name: torch.cat([_of_each_batch(each, name) for each in inputs]) for name in inputs[0].extra}
    stacked_inputs = inputs[0]._replace(q=q, k=k, v=v, descales=descales, extra=extra)
    return stacked_inputs, joined([head.output for head in written])


def joined(outputs: list[Output]) -> Output:
    """Outputs as the batches of one."""
    more = {name: torch.cat([each.more[name] for each in outputs]) for name in outputs[0].more}
    return Output(torch.cat([each.out for each in outputs]), more)


def _of_each_batch(inputs: Inputs, name: str) -> torch.Tensor:
    """A part's tensor with the batches of q, also if it does not depend on them."""
    tensor = inputs.extra[name]
    return tensor.expand(len(inputs.q), *tensor.shape[1:])


def output_count(output: Output, l2_bytes: int | None) -> int:
    """How many outputs timed calls write in turn: at most eight, and as many as a quarter of the L2 holds."""
    return max(1, min(MAX_OUTPUTS, (l2_bytes or 0) // 4 // max(1, output.nbytes)))


class FreshData:
    """Input buffers and outputs of timed calls on one case; `inputs` gives shapes, strides, scale and mask."""

    def __init__(self, candidate: Candidate, case: Case, inputs: Inputs, l2_bytes: int | None) -> None:
        self.candidate, self.gaps = candidate, Gaps()
        self._random = random.Random(secrets.randbits(128))  # noqa: S311  # seeded with what no candidate knows
        self.last_run: tuple[Series, int] | None = None  # and the number of its calls
        self._generator = torch.Generator(device=candidate.device)
        self._like = inputs = _without_zero_scales(with_results(inputs).placed())
        tensors, self._written = memories_of(inputs), parts.written(inputs)
        self._moved = {name: each for name, each in tensors.items() if _is_random(name)}  # elsewhere in each call
        self._forward_passes = ForwardPasses(inputs, self._moved, self._random, l2_bytes) if OUT in tensors else None
        self._private = [self._new_buffer(name, tensor) for name, tensor in self._moved.items()]
        self._shared = [self._visible(buffer) for buffer in self._private]
        self._fixed = {name: each for name, each in tensors.items() if name not in self._moved}
        self._shared_fixed = {
            name: self._visible(each.flatten()).view(each.shape) for name, each in self._fixed.items()
        }
        self.exceeds_l2 = l2_bytes is not None and case.bytes_per_call > l2_bytes // 4
        of_truth = GRADIENT_SCORES * case.heads // case.kv_heads if case.computes == "gradients" else 1
        self.scores_per_head = max(1, of_truth * case.seq_q * case.seq_k)
        more = GRADIENTS[1:] if case.computes == "gradients" else ()
        self._out_like = output = poisoned_outputs(inputs, case.computes, more)
        self._heads = _heads_to_judge(inputs, is_backward=case.computes == "gradients")
        self._workspaces: dict[int, torch.Tensor] = {}  # by size in bytes; all calls of one size share a workspace
        self.outs = self.new_outputs(output_count(output, l2_bytes))
        self.redraw()

    def _new_buffer(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A private buffer in which a tensor has room at each of its places."""
        if name in RESULTS and self._forward_passes is not None:
            return self._forward_passes.new_buffer(tensor)
        return _slack_buffer(tensor)

    def own_outputs(self, calls: int) -> list[Output]:
        """One new output for each of `calls` calls, or as many as 64 MiB hold, on a GPU 1 GiB.

        If later calls wrote the same output, a candidate could skip a call whose output is written again.
        """
        most_bytes = OWN_OUTPUT_BYTES[self.candidate.device.type]
        return self.new_outputs(max(1, min(calls, most_bytes // max(1, self._out_like.nbytes))))

    def new_outputs(self, count: int) -> list[Output]:
        """Outputs in memory that the candidate sees, full of NaN."""
        of_each = {name: self._new_tensors(like, count) for name, like in self._out_like.named.items()}
        outs, more = of_each.pop("out"), of_each
        outputs = [Output(out, {name: more[name][index] for name in more}) for index, out in enumerate(outs)]
        _poison_all(outputs)
        return outputs

    def _new_tensors(self, like: torch.Tensor, count: int) -> list[torch.Tensor]:
        """Tensors in memory that the candidate sees, without gaps between them."""
        memory = self.candidate.lending.allocate(max(16, count * like.nbytes))
        whole = memory[: count * like.nbytes].view(like.dtype)
        start = whole.storage_offset()
        return [whole.as_strided(like.shape, like.stride(), start + index * like.numel()) for index in range(count)]

    def fill_us(self, outs: list[Output]) -> float:
        """The time in which this process writes all of these outputs once."""
        times_us = []
        for _ in range(FILLS):
            start = time.perf_counter_ns()
            _poison_all(outs)
            synchronize(self.candidate.device)
            times_us.append((time.perf_counter_ns() - start) / 1000)
        return min(times_us)

    def series(self, count: int, outs: list[Output] | None = None) -> Series:
        """`count` calls at secret offsets, which write the outputs in a secret order."""
        targets = outs or self.outs
        starts = dict(zip(self._moved, self._views(self._shared), strict=True))
        inputs = with_memories(self._like, {**starts, **self._shared_fixed})
        first_views = self.candidate.views_of(inputs, targets[0].out, self._workspace_of, targets[0].more)
        passes: Iterator[dict[str, int]] = (
            itertools.repeat({}) if self._forward_passes is None else self._forward_passes.of_calls()
        )
        shifts = tuple(self._shifts(of_pass) for of_pass in itertools.islice(passes, count))
        order = list(range(len(targets)))
        out_of: list[int] = []
        while len(out_of) < count:
            self._random.shuffle(order)
            out_of += order
        views, more = self._views_of_outputs(targets)
        return Series(first_views, views, shifts, tuple(out_of[:count]), self._moved_extra, more)

    def _views_of_outputs(self, outputs: list[Output]) -> tuple[tuple[View, ...], dict[str, tuple[View, ...]]]:
        """The views of outputs, and of the further ones by name."""
        lend = self.candidate.lending.lend
        more = {name: tuple(lend([each.more[name] for each in outputs])) for name in outputs[0].more}
        return tuple(lend([each.out for each in outputs])), more

    @property
    def _moved_extra(self) -> tuple[str, ...]:
        """The tensors of parts that are elsewhere in each call."""
        return tuple(name for name in self._moved if name in self._like.extra)

    def _shifts(self, of_pass: dict[str, int]) -> tuple[int, ...]:
        """How many elements after their beginnings q, k, v and `_moved_extra` lie in a call; one tensor has one."""
        of = random_shifts(self._moved, self._random) | of_pass
        of |= dict.fromkeys(self._written, 0)
        return tuple(of[memory_of(name, of)] for name in (*"qkv", *self._moved_extra))

    def _workspace_of(self, size_bytes: int) -> torch.Tensor:
        """A workspace, [size_bytes] uint8, that the candidate sees; `redraw` fills it with NaN."""
        if size_bytes not in self._workspaces:
            self._workspaces[size_bytes] = self.candidate.lending.allocate(size_bytes)
        return self._workspaces[size_bytes]

    def redraw(self, outs: list[Output] | None = None) -> None:
        """Draw new data, and publish them."""
        self.draw(outs)
        self.publish()

    def draw(self, outs: list[Output] | None = None) -> None:
        """Fill outputs and workspaces with NaN, and the private buffers with new data, which no candidate sees yet."""
        _poison_all(outs or self.outs)
        for workspace in self._workspaces.values():
            workspace[: len(workspace) // 2 * 2].view(torch.int16).fill_(NAN_PATTERN)
        self._generator.manual_seed(self._random.getrandbits(63))
        for name, private in zip(self._moved, self._private, strict=True):
            if name in RESULTS:
                continue
            if name in self._like.extra:
                numbers = torch.empty(len(private), device=private.device)
                parts.tensor_words()[name].fill(name, numbers, self._generator)
                private.copy_(numbers)
                private.copy_(parts.given(name, private, self._like.conventions))
            else:
                fill_random(private, self._generator)
        if self._forward_passes is not None:
            self._forward_passes.compute(self._like, dict(zip(self._moved, self._private, strict=True)))
        synchronize(self.candidate.device)

    @property
    def outputs_of_call(self) -> int:
        """How many tensors a call writes that the judge copies."""
        return len(self._out_like.tensors)

    def publish(self) -> None:
        """Copy the data to where the candidate sees them, and wait until they are there."""
        for private, shared in zip(self._private, self._shared, strict=True):
            shared.copy_(private)
        for name, private in self._fixed.items():
            self._shared_fixed[name].copy_(private)
        synchronize(self.candidate.device)

    @functools.cached_property
    def publish_us(self) -> float:
        """The time that `publish` takes, measured between buffers of this process, which no candidate sees."""
        whole = [private.view(torch.uint8) for private in self._private]
        scratch, times_us = torch.empty_like(max(whole, key=len)), []
        for _ in range(FILLS):
            start = time.perf_counter_ns()
            for private in whole:
                scratch[: len(private)].copy_(private)
            synchronize(self.candidate.device)
            times_us.append((time.perf_counter_ns() - start) / 1000)
        size_bytes = sum(private.nbytes for private in self._private)
        rate = MIN_COPY_BYTES_PER_US[self.candidate.device.type]
        return min(*times_us, MAX_PUBLISH_US + size_bytes / rate)

    def require_untouched(self) -> None:
        """Raise `WrongResult` if a timed call changed inputs that it must not write."""
        written: tuple[str, ...] = ()
        if self._written and self.last_run is not None:
            (series, count), written = self.last_run, self._written
            before, after = (self._call(series, count - 1, buffers) for buffers in (self._private, self._shared))
            require_only_written(before, after, " while it was timed")
        for name, private, shared in zip(self._moved, self._private, self._shared, strict=True):
            start = self._moved[name].numel() if name in written else 0
            if not torch.equal(bits_of(private[start:]), bits_of(shared[start:])):
                raise WrongResult("inputs", f"the kernel changed its input {name} while it was timed")
        for name, private in self._fixed.items():
            if not torch.equal(bits_of(private), bits_of(self._shared_fixed[name])):
                raise WrongResult("inputs", f"the kernel changed its input {name} while it was timed")

    def inputs_of(self, series: Series, count: int, outs: list[Output], place: Place) -> Inputs:
        """What the last of `count` calls that wrote an output read for one head, as private copies.

        Outputs of several slots may be the same memory, if the function returns a buffer of its own.
        """
        address = outs[place.slot].out.data_ptr()
        last = next(index for index in reversed(range(count)) if outs[series.out_of[index]].out.data_ptr() == address)
        call = self._call(series, last, self._private)
        index = partial(torch.tensor, device=call.q.device)
        batches = index([place.batch]) if len(call.q) > 1 else None  # None: all of one row of sequences
        heads = index([*range(call.q.shape[1])][place.heads.of_q])
        extra = {
            name: _of_head(name, tensor, call, batches, heads, place).clone() for name, tensor in call.extra.items()
        }
        of_each = (place.of_q, place.of_k, place.of_k)
        q, k, v = (part_of(tensor).clone() for part_of, tensor in zip(of_each, call[:3], strict=True))
        if call.cache is not None:
            k, v = (tensor[:, place.heads.of_k] for tensor in (call.k, call.v))
        descales = self._like.descales and Descales(
            *(part_of(tensor).clone() for part_of, tensor in zip(of_each, self._like.descales, strict=True))
        )
        return self._like._replace(q=q, k=k, v=v, descales=descales, extra=extra).dense()

    def dense(self, output: Output) -> Output:
        """An output, or heads of one, [batch, heads, seq_q, dim], as it is judged."""
        return self._like.dense_output(output)

    def _call(self, series: Series, index: int, buffers: list[torch.Tensor]) -> Inputs:
        """The inputs of one call of a series, as views of buffers."""
        starts = dict(zip(self._moved, self._views(buffers), strict=True))
        shifts = dict(zip((*"qkv", *series.moved), series.shifts[index], strict=True))
        tensors = with_memories(self._like, {**starts, **self._fixed}).parts
        return self._like.with_parts({name: shifted(each, shifts.get(name, 0)) for name, each in tensors.items()})

    def any_place(self, series: Series, count: int, outs: list[Output]) -> Place:
        """Heads, chosen at random, of one of the outputs that `count` calls write."""
        return self.place_in(self._random.choice(sorted(set(series.out_of[:count]))), outs)

    def place_in(self, slot: int, outs: list[Output]) -> Place:
        """Heads of an output, chosen at random."""
        return Place(slot, self._random.randrange(outs[slot].out.shape[0]), self._random.choice(self._heads))

    def unwritten(self, series: Series, count: int, outs: list[Output]) -> Place | None:
        """The first heads with a NaN, with which every output was filled."""
        slots = sorted(set(series.out_of[:count]))
        return next(filter(None, (self.missing_in(slot, outs[slot], torch.isnan) for slot in slots)), None)

    def missing_in(self, slot: int, output: Output, is_missing: Callable[[torch.Tensor], torch.Tensor]) -> Place | None:
        """The first heads of an output that have a missing element, besides those of padding; None if none do."""
        for name, tensor in output.named.items():
            padding, missing = padding_of(name, self._like), is_missing(tensor)
            places = (missing if padding is None else missing & ~padding.rows[..., None]).nonzero()  # [places, 4]
            if len(places):
                batch, head = int(places[0, 0]), int(places[0, 1])
                return Place(slot, batch, next(each for each in self._heads if head in _numbers(each, name)))
        return None

    def _views(self, buffers: list[torch.Tensor]) -> list[torch.Tensor]:
        """What is elsewhere in each call, at the beginning of its buffer."""
        return [
            buffer.as_strided(like.shape, like.stride(), buffer.storage_offset())
            for buffer, like in zip(buffers, self._moved.values(), strict=True)
        ]

    def _visible(self, buffer: torch.Tensor) -> torch.Tensor:
        memory = self.candidate.lending.allocate(buffer.nbytes)
        return memory[: buffer.nbytes].view(buffer.dtype)


def _heads_to_judge(inputs: Inputs, *, is_backward: bool) -> list[Heads]:
    """What is judged at once: a head of Q with its head of K and V, or one of K and V with all heads of Q it has."""
    if not is_backward:
        return [Heads(slice(head, head + 1), slice(key, key + 1)) for head, key in enumerate(key_heads(inputs))]
    heads = []
    for key, readers in enumerate(readers_of(inputs)):
        step = readers[1] - readers[0] if len(readers) > 1 else 1
        heads.append(Heads(slice(readers[0], readers[-1] + 1, step), slice(key, key + 1)))
    return heads


def _numbers(heads: Heads, output: str) -> range:
    """The numbers of the heads of an output."""
    of = heads.of_k if output in LIKE else heads.of_q
    return range(of.start, of.stop, of.step or 1)


def _poison_all(outputs: list[Output]) -> None:
    """Fill outputs with NaN."""
    for name in outputs[0].named:
        _poison_tensors([output.named[name] for output in outputs])


def _poison_tensors(outs: list[torch.Tensor]) -> None:
    """Fill tensors with NaN: with one kernel if they follow one another in memory without gaps."""
    like = outs[0]
    if not like.numel():
        return
    starts = [out.data_ptr() for out in outs]
    is_one = len({out.untyped_storage().data_ptr() for out in outs}) == 1
    is_dense = like.numel() == 1 + sum((size - 1) * step for size, step in zip(like.shape, like.stride(), strict=True))
    if is_one and is_dense and starts == list(range(starts[0], starts[0] + len(outs) * like.nbytes, like.nbytes)):
        poison(like.as_strided((len(outs) * like.numel(),), (1,), like.storage_offset()))
        return
    for out in outs:
        poison(out)


def _of_head(
    name: str, tensor: torch.Tensor, call: Inputs, batches: torch.Tensor | None, heads: torch.Tensor, place: Place
) -> torch.Tensor:
    """What one head of a call reads of a tensor of a part."""
    if not parts.tensor_form(name).is_made:
        return at_places(tensor, batches, heads)
    read: torch.Tensor = parts.of_head(name, tensor, place.batch, place.heads.of_k.start, call.cache)
    return read


def _slack_buffer(tensor: torch.Tensor) -> torch.Tensor:
    """A private buffer, one-dimensional, that is longer than a tensor by the range of the offsets."""
    length = tensor.numel() + RANGE_BYTES // tensor.element_size()
    return torch.zeros(length, dtype=tensor.dtype, device=tensor.device)

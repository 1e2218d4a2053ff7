"""`Candidate`: the judge's side of a variant that runs elsewhere, in a process of its own or in this one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import torch

from pytest_fa.attention import parts
from pytest_fa.attention.backward import LIKE
from pytest_fa.attention.rows import PLAIN
from pytest_fa.attention.scores import Computes
from pytest_fa.candidate.agent import Opening, load_variant
from pytest_fa.candidate.forward import Forward
from pytest_fa.catalog.variant import Device, Variant
from pytest_fa.errors import DeviceLost, FaError, Tampering
from pytest_fa.gpu.device import is_alive, synchronize
from pytest_fa.gpu.guards import Workspaces
from pytest_fa.gpu.inputs import NOTHING, Inputs, Output, as_called
from pytest_fa.gpu.shared_memory import (
    NoSharedMemory,
    map_on_gpu,
    mapped_bytes_on_gpu,
    require_sharing,
    unmap_on_gpu,
)
from pytest_fa.judge.call_memory import CallMemory
from pytest_fa.judge.connection import Connection, KernelRaised, LocalConnection, Remote
from pytest_fa.judge.lending import Lending, OtherProcess, SameProcess
from pytest_fa.wire.commands import (
    Allocated,
    CallViews,
    Capture,
    CaptureCall,
    Cold,
    Comes,
    Command,
    Delegates,
    Disturbance,
    Done,
    EndJob,
    Forget,
    Load,
    MakeCall,
    MakeMalformedCall,
    Open,
    PeakBytes,
    Prepare,
    Profile,
    ProfilerReport,
    Repeat,
    ReplayCall,
    ReplaySeries,
    Run,
    Script,
    Series,
    View,
    WorkspaceBytes,
)
from pytest_fa.wire.compiling import COMPILE_SECONDS, CompilingCalls
from pytest_fa.wire.user_traceback import explanation_of, message_of

MAX_WORKSPACE_BYTES = 2**36
OPEN_SECONDS = 300.0  # to start CUDA and to load a variant, which may import large packages


class CommandTimes(NamedTuple):
    """The times of one command in microseconds: by the judge's clock, by the candidate's own, and by the profiler."""

    outside_us: float
    inside_us: tuple[float, ...]
    allocated: tuple[Allocated | None, ...]
    profiled: ProfilerReport | None = None


class Candidate:
    """One variant at a time, on one device.  `limit_seconds` is how long one command may take.

    `before_launch` is called before each command that calls the variant, and `before_compilation` if that command may
    compile; `compiling` says which do, and how long they took.  `free_memory` is called if the GPU has no memory left
    for what the candidate shall see.
    """

    limit_seconds = OPEN_SECONDS

    def __init__(self, connection: Connection, pid: int, free_memory: Callable[[], object] = lambda: None) -> None:
        self._connection, self.pid, self._free_memory = connection, pid, free_memory
        self._lending: Lending | None = None
        self.device = torch.device("cpu")
        self.why_no_tools: str | None = None
        self._conventions: Mapping[str, str] = PLAIN  # of the variant
        self.workspaces = Workspaces()
        self.before_launch: Callable[[], object] = lambda: None
        self.before_compilation: Callable[[], object] = lambda: None
        self.compiling = CompilingCalls()
        self._mapped: dict[str, torch.Tensor] = {}  # by CUDA's handle: memory that the candidate allocated

    @classmethod
    def in_this_process(cls, opening: Opening = load_variant) -> Candidate:
        """A candidate whose code runs in this process, unprotected."""
        return cls(LocalConnection(opening), os.getpid())

    @classmethod
    def of_function(cls, forward: Forward, device: Device, computes: Computes = "attention") -> Candidate:
        """A candidate that is a function of this process, opened."""
        candidate = cls.in_this_process(lambda *_: nullcontext(forward))
        candidate.open(None, None, device, computes)
        return candidate

    def open(
        self,
        variant: Variant | None,
        library: str | None,
        device: Device,
        computes: Computes,
        *,
        tools: bool = True,
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        """Load a variant.  Raises what the loading raises, and `NoSharing` before it, if no memory can be shared.

        Without `tools`, no disturbance and no `Cold` is possible.  `meanwhile` is called while the variant is loaded.
        """
        if self._lending is None and isinstance(self._connection, Remote):
            require_sharing(torch.device(device))
        opened = self.ask(Open(variant, library, device, computes, tools), OPEN_SECONDS, meanwhile)
        if self._lending is None or torch.device(device) != self.device:
            if isinstance(self._lending, OtherProcess):
                self._lending.give_up()
            self.device = torch.device(device)
            self._lending = self._new_lending()
        self.why_no_tools, self.workspaces = opened.why_no_tools, Workspaces()
        self._conventions = variant.conventions if variant else PLAIN
        self.compiling.opened(variant.name if variant else "", compiles=opened.compiles)

    @property
    def lending(self) -> Lending:
        """How tensors become visible to the variant; there is none before `open`."""
        if self._lending is None:
            raise FaError("no variant is open")
        return self._lending

    def ask(
        self, command: Command, seconds: float | None = None, meanwhile: Callable[[], object] | None = None
    ) -> Done:
        """Have a command carried out, and call `meanwhile` while that runs."""
        with self._first_call(command) as limit_seconds:
            return self._connection.ask(command, seconds or limit_seconds, meanwhile=meanwhile)

    @contextmanager
    def _first_call(self, command: Command) -> Iterator[float]:
        """The time limit of a command: a longer one if it may compile, and then its seconds are counted apart."""
        new = self.compiling.new_in(command)
        if not new:
            yield self.limit_seconds
            return
        self.before_compilation()
        with self.compiling.clocked(new):
            yield max(self.limit_seconds, COMPILE_SECONDS)

    # -- series of calls ----------------------------------------------------------------------------------------------

    def prepare(self, name: str, series: Series, cpu_threads: int | None = None) -> None:
        """Have the arguments of a series made."""
        self.ask(Prepare(name, series, cpu_threads))

    def timed(
        self,
        command: Run | ReplaySeries | Cold | Load | Profile,
        meanwhile: Callable[[], object] | None = None,
        copy_outputs: Callable[[tuple[Allocated | None, ...]], object] | None = None,
        publish: Callable[[], object] = lambda: None,
    ) -> CommandTimes:
        """Have a command carried out, and time it from outside.

        The clock starts before `publish` makes the inputs visible, so that no work on them can precede it.  The answer
        alone does not stop it: `copy_outputs` then copies outputs to memory of this process, and the clock stops when
        these copies are complete.  It gets the places of outputs that the function allocated.
        """
        self.before_launch()
        with self._first_call(command) as limit_seconds:
            start = time.perf_counter_ns()
            publish()
            done = self._connection.ask(command, limit_seconds, meanwhile=meanwhile, awake=self.device.type == "cuda")
            if copy_outputs:
                copy_outputs(done.allocated)
                synchronize(self.device)
            outside_us = (time.perf_counter_ns() - start) / 1000
        return CommandTimes(outside_us, done.inside_us, done.allocated, done.profiled)

    def capture(self, name: str) -> Done:
        """Have a series captured as a graph, and its nodes read.  Raises `CannotCapture`."""
        self.before_launch()
        return self.ask(Capture(name))

    def outputs_of(self, name: str, outs: list[Output], allocated: tuple[Allocated | None, ...]) -> list[Output]:
        """The outputs of a series: those that were given, or the candidate's own memory where it allocated them.

        `allocated` has an entry for each tensor of each output.
        """
        if not any(allocated):
            return outs
        if isinstance(self._connection, LocalConnection):
            found: Iterator[torch.Tensor] = chain(*self._connection.agent.prepared.named(name).results)
        else:
            given = chain(*(each.tensors for each in outs))
            found = (self._map(place, out) if place else out for out, place in zip(given, allocated, strict=True))
        return [Output(next(found), {more: next(found) for more in each.more}) for each in outs]

    def forget_series(self) -> None:
        """Let the candidate forget all series."""
        self._unmap()
        self.ask(Forget())

    def _map(self, place: Allocated, like: torch.Tensor) -> torch.Tensor:
        """A tensor like `like` in the candidate's own memory.  Raises `Tampering` if it is not all mapped."""
        if place.handle not in self._mapped:
            self._mapped[place.handle] = map_on_gpu(place.handle, place.size_bytes, self.device)
        data = self._mapped[place.handle]
        steps = zip(like.shape, place.strides, strict=True)
        end = place.offset_bytes + (1 + sum((size - 1) * stride for size, stride in steps)) * like.element_size()
        if place.offset_bytes < 0 or min(place.strides) < 0 or end > min(mapped_bytes_on_gpu(data), place.size_bytes):
            raise Tampering("output", "the output that the function allocated lies outside its memory")
        empty = torch.empty(0, dtype=like.dtype, device=self.device)
        offset = place.offset_bytes // like.element_size()
        return empty.set_(data.untyped_storage(), offset, like.shape, place.strides)

    def _unmap(self) -> None:
        while self._mapped:
            unmap_on_gpu(self._mapped.popitem()[1])

    # -- calls on the judge's own tensors -----------------------------------------------------------------------------

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        out: torch.Tensor | None = None,
        **words: Any,  # noqa: ANN401  # values, tensors and further outputs
    ) -> torch.Tensor:
        """Make one call and wait for it; `Forward` says the rest."""
        if out is None:
            raise FaError("a call of a candidate needs an output")
        outputs = {name: words.pop(name, None) for name in (*parts.outputs(), *LIKE)}
        more = {name: tensor for name, tensor in outputs.items() if tensor is not None}
        self.call(Inputs.of_call(q, k, v, scale, out.dtype, **words), out, more=more)
        return out

    def call(
        self,
        inputs: Inputs,
        out: torch.Tensor,
        before: tuple[Disturbance, ...] = (),
        range_name: str | None = None,
        more: Mapping[str, torch.Tensor] = NOTHING,  # further outputs
    ) -> None:
        """Make one call and wait for it.  Afterwards `out`, and whatever else it wrote, is in the judge's tensors."""
        self._with_call(inputs, out, lambda views: self.ask(MakeCall(views, before, range_name)), more)

    def malformed_call(
        self, inputs: Inputs, tensors: Mapping[str, torch.Tensor], argument: str, comes: Comes = "as_viewed"
    ) -> bool:
        """Make a call with other tensors, one of which is malformed, and return whether it reached the variant.

        `inputs` are those of a well-formed call, and `tensors` all tensors as a kernel has them: q, k, v, `out`, those
        of `inputs.tensors`, and further outputs.  Raises as a variant in another process, also for one in this process.
        """
        self.before_launch()
        try:
            lent = dict(zip(tensors, self.lending.lend(tensors.values()), strict=True))
            q, k, v, out = (lent.pop(name) for name in ("q", "k", "v", "out"))
            of_inputs = {name: lent.pop(name) for name in inputs.tensors}
            call = CallViews(q, k, v, out, inputs.scale, inputs.words, None, of_inputs, lent)
            with _raised_as_elsewhere(self.device):
                return self.ask(MakeMalformedCall(call, argument, comes)).is_reached
        finally:
            self.lending.take_back()

    def repeat(
        self,
        inputs: Inputs,
        outs: torch.Tensor,  # [calls, batch, heads, seq_q, head_dim or seq_k], in memory from `lending.allocate`
        before: tuple[tuple[Disturbance, ...], ...],
        more: Mapping[str, torch.Tensor] = NOTHING,  # further outputs, [calls, ...], in such memory, too
    ) -> None:
        """Make one call for each output, and wait for them."""
        count, step = len(outs), outs.stride(0)
        first, steps = {name: each[0] for name, each in more.items()}, {name: x.stride(0) for name, x in more.items()}
        self._with_call(inputs, outs[0], lambda call: self.ask(Repeat(call, count, step, before, steps)), first)

    def operators_of(
        self, inputs: Inputs, out: torch.Tensor, more: Mapping[str, torch.Tensor] = NOTHING
    ) -> tuple[str, ...]:
        """Make one call and return the names of torch's operators that ran in it."""
        names: list[str] = []
        self._with_call(inputs, out, lambda views: names.extend(self.ask(Delegates(views)).names), more)
        return tuple(names)

    def memory_of(self, inputs: Inputs, out: torch.Tensor, more: Mapping[str, torch.Tensor] = NOTHING) -> CallMemory:
        """Make one call and return its memory.  On the CPU, where no workspace is allowed, no call is made."""
        if self.device.type == "cpu":
            return CallMemory(0, None)
        found: list[CallMemory] = []

        def measure(views: CallViews) -> None:
            workspace_bytes = views.workspace.shape[0] if views.workspace else 0
            found.append(CallMemory(workspace_bytes, workspace_bytes + self.ask(PeakBytes(views)).peak_bytes))

        self._with_call(inputs, out, measure, more)
        return found[0]

    def run_script(self, script: Script) -> None:
        """Queue the steps of a script on streams and wait for them."""
        self.before_launch()
        self.ask(script)

    def capture_call(self, call: CallViews, *, is_first_call: bool) -> None:
        """Capture a call as a graph.  Raises `CannotCapture`."""
        self.before_launch()
        self.ask(CaptureCall(call, is_first_call))

    def replay_call(self) -> None:
        """Replay the graph of `capture_call` and wait for it."""
        self.before_launch()
        self.ask(ReplayCall())

    def views_of(
        self,
        inputs: Inputs,
        out: torch.Tensor,
        allocate: Callable[[int], torch.Tensor] | None = None,
        more: Mapping[str, torch.Tensor] = NOTHING,  # further outputs
    ) -> CallViews:
        """The views of a call's arguments, with a workspace if the variant needs one.

        `allocate` makes a workspace of a size in bytes; without it, each call has a new one, or a guarded one.
        """
        tensors = inputs.tensors
        more = self._as_kernels_have(more)
        q, k, v, output, *others = self.lending.lend((*inputs[:3], out, *tensors.values(), *more.values()))
        of_tensors = dict(zip(tensors, others, strict=False))
        of_outputs = dict(zip(more, others[len(tensors) :], strict=True))
        views = CallViews(q, k, v, output, inputs.scale, inputs.words, None, of_tensors, of_outputs)
        size = self.ask(WorkspaceBytes(views)).size_bytes
        if not size:
            return views
        most = MAX_WORKSPACE_BYTES if self.device.type == "cuda" else 0
        if not 0 < size <= most:
            raise FaError(f"it asks for a workspace of {size} bytes; on {self.device}, at most {most} are allowed")
        (workspace,) = self.lending.lend([allocate(size) if allocate else self.workspaces(size, inputs.q.device)])
        return msgspec.structs.replace(views, workspace=workspace)

    def views_of_output(self, output: Output) -> list[View]:
        """The views of all outputs of a call."""
        return self.lending.lend((output.out, *self._as_kernels_have(output.more).values()))

    def _as_kernels_have(self, more: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: as_called(name, tensor, self._conventions) for name, tensor in more.items()}

    def end_job(self) -> None:
        """Let the candidate forget the job, and take its memory back."""
        if self._lending is not None:
            self._unmap()
            self.ask(EndJob())
            self._lending.end_job()

    def abandon(self) -> None:
        """Close the connection to a candidate whose process has ended, and free its memory."""
        if isinstance(self._connection, Remote):
            self._connection.close()
        with suppress(NoSharedMemory):  # what the candidate had allocated may have gone with it
            self._unmap()
        if isinstance(self._lending, OtherProcess):
            self._lending.close()
        self._lending = None

    def _with_call(
        self,
        inputs: Inputs,
        out: torch.Tensor,
        use: Callable[[CallViews], object],
        more: Mapping[str, torch.Tensor] = NOTHING,
    ) -> None:
        self.before_launch()
        try:
            use(self.views_of(inputs, out, more=more))
        finally:
            self.lending.take_back()

    def _new_lending(self) -> Lending:
        if isinstance(self._connection, LocalConnection):
            return SameProcess(self._connection.agent.memories, self.device)
        return OtherProcess(
            lambda command, descriptor: self._connection.ask(command, self.limit_seconds, descriptor),
            self.device,
            self._free_memory,
        )


@contextmanager
def _raised_as_elsewhere(device: torch.device) -> Iterator[None]:
    """Raise what a variant in this process raises as if it ran in another one."""
    try:
        yield
    except FaError:
        raise
    except Exception as problem:
        if device.type == "cuda" and not is_alive(device):
            raise DeviceLost(message_of(problem)) from problem
        raise KernelRaised(message_of(problem), explanation_of(problem), is_wrong_call=False) from problem

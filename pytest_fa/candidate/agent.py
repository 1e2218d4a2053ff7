"""`Agent`: carries out the judge's commands where the variant's code runs.

It is used in a process of its own, which holds nothing that is worth changing: no truth, no seeds, no verdict.  For
functions that are already in this process it is used directly.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import Any

import torch

from pytest_fa.candidate.cuda_backward import CudaBackward
from pytest_fa.candidate.cuda_forward import Allocate, CudaForward
from pytest_fa.candidate.delegated import operators_of
from pytest_fa.candidate.first_call import load_copy
from pytest_fa.candidate.forward import Forward
from pytest_fa.candidate.module import load_forward, open_forward
from pytest_fa.candidate.output import written
from pytest_fa.candidate.series import PreparedCalls, in_a_row, is_same_memory, keywords_of
from pytest_fa.errors import FaError, LaunchError, UnsupportedCase
from pytest_fa.gpu.device import give_memory_back, open_device, peak_bytes_of, synchronize
from pytest_fa.gpu.device_tools import DeviceTools, NoDeviceTools, device_tools
from pytest_fa.gpu.graphs import CannotCapture
from pytest_fa.gpu.shared_memory import Memories, map_on_cpu, map_on_gpu, unmap_on_gpu
from pytest_fa.records.timing import ON_CPU
from pytest_fa.wire.commands import (
    Attach,
    CallViews,
    CaptureCall,
    Comes,
    Command,
    Copy,
    Delegates,
    Detach,
    Disturbance,
    Done,
    EndJob,
    Launch,
    MakeCall,
    MakeMalformedCall,
    Open,
    PeakBytes,
    Repeat,
    ReplayCall,
    Script,
    ScriptStep,
    Sleep,
    View,
    WorkspaceBytes,
)
from pytest_fa.wire.compiling import loaded_compilers
from pytest_fa.wire.nvtx_range import nvtx_range

NO_TOOLS_WANTED = "the variant was opened without them"

Opening = Callable[[Open, Allocate], AbstractContextManager[Forward]]  # loads what a command names


def load_variant(command: Open, allocate: Allocate) -> AbstractContextManager[Forward]:
    """Load the variant of a command."""
    if command.variant is None:
        raise FaError("no variant is named")
    return open_forward(command.variant, command.library, allocate, command.computes)


class Watched:
    """A variant whose `is_reached` tells whether its own function was called since that was last set to False."""

    def __init__(self, opened: Open, forward: Forward, allocate: Allocate) -> None:
        self.is_reached = False
        self._is_bound = isinstance(forward, CudaForward)  # and says by its exceptions who refuses a call
        if opened.variant is None or self._is_bound:
            self._forward = forward if self._is_bound else self._watch(forward)
        else:
            self._forward = load_forward(opened.variant, opened.library, allocate, opened.computes, self._watch)

    def __call__(self, *arguments: Any, **keywords: Any) -> torch.Tensor:  # noqa: ANN401  # passed through
        """Call the variant."""
        return self._forward(*arguments, **keywords)

    def is_refused_before(self, problem: Exception) -> bool:
        """Whether an exception of the call came before the variant's own function, or from the binding."""
        return not (isinstance(problem, UnsupportedCase | LaunchError) if self._is_bound else self.is_reached)

    def _watch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401  # passed through
            self.is_reached = True
            return function(*arguments, **keywords)

        return watched


class Agent:
    """One variant at a time, and the memory that it was given."""

    def __init__(self, opening: Opening = load_variant) -> None:
        self._opening, self._scope = opening, ExitStack()
        self._loaded_before = loaded_compilers()
        self._forward: Forward | None = None
        self._watched: Watched | None = None
        self._opened: Open | None = None
        self._of_thread = threading.local()  # its `workspace` is that of the call that this thread makes
        self._mapped: dict[int, torch.Tensor] = {}
        self._graph: torch.cuda.CUDAGraph | None = None
        self.device = torch.device("cpu")
        self._tools: DeviceTools | None = None
        self.memories = Memories()
        self.prepared = PreparedCalls(self._forward_for, self._tensor)

    def execute(self, command: Command, descriptor: int | None = None) -> Done:  # noqa: C901, PLR0911, PLR0912  # a line each
        """Carry out one command.  Raises what the variant raises, and `WrongResult` for an output of another kind."""
        match command:
            case Open():
                return self._open(command)
            case Attach():
                return self._attach(command, descriptor)
            case Detach():
                return self._detach(command)
            case WorkspaceBytes():
                return Done(size_bytes=self._workspace_bytes(command.call))
            case MakeCall():
                return self._call(command)
            case MakeMalformedCall():
                return self._malformed_call(command)
            case Repeat():
                return self._repeat(command)
            case Script():
                return self._script(command)
            case CaptureCall():
                return self._capture_call(command)
            case ReplayCall():
                return self._replay_call()
            case Delegates():
                return Done(names=operators_of(lambda: self._launch(command.call)))
            case PeakBytes():
                return Done(peak_bytes=peak_bytes_of(lambda: self._launch(command.call), self.device))
            case EndJob():
                return self._end_job()
            case _:
                return self.prepared.execute(command, self._tools)

    # -- variant and memory -------------------------------------------------------------------------------------------

    def _open(self, command: Open) -> Done:
        self._scope.close()
        self.device = open_device(command.device)
        self._opened, self._watched = command, None
        synchronize(self.device)  # makes the CUDA context
        self._tools, why_no_tools = _find_tools(self.device) if command.tools else (None, NO_TOOLS_WANTED)
        self._forward = self._scope.enter_context(self._opening(command, self._allocate))
        return Done(why_no_tools=why_no_tools, compiles=bool(loaded_compilers() - self._loaded_before))

    def _attach(self, command: Attach, descriptor: int | None) -> Done:
        if descriptor is not None:
            data = map_on_cpu(descriptor, command.size_bytes)
        else:
            data = map_on_gpu(command.handle, command.size_bytes, torch.device("cuda", command.device_index))
            self._mapped[command.memory] = data
        self.memories.add(command.memory, data.untyped_storage())
        return Done()

    def _detach(self, command: Detach) -> Done:
        for memory in command.memories:
            self.memories.remove(memory)
            if memory in self._mapped:
                unmap_on_gpu(self._mapped.pop(memory))
        return Done()

    def _allocate(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        """The workspace that came with the call, or one of the candidate's own where none came."""
        workspace: torch.Tensor | None = getattr(self._of_thread, "workspace", None)
        if workspace is None or len(workspace) < size_bytes:
            return torch.empty(size_bytes, dtype=torch.uint8, device=device)
        return workspace[:size_bytes]

    def _workspace_bytes(self, call: CallViews) -> int:
        if not isinstance(self._forward, CudaForward | CudaBackward):
            return 0
        q, k, v, out = (self._tensor(view) for view in (call.q, call.k, call.v, call.out))
        outputs = {name: self._tensor(view) for name, view in call.outputs.items()}
        return self._forward.workspace_bytes(q, k, v, out, **{**keywords_of(call, self._tensor), **outputs})

    def _tensor(self, view: View) -> torch.Tensor:
        return self.memories.tensor(view)

    def _forward_for(self, call: CallViews) -> Forward:
        """The variant's function, with the workspace of this call."""
        if self._forward is None:
            raise FaError("no variant is open")
        self._of_thread.workspace = self._tensor(call.workspace) if call.workspace else None
        return self._forward

    # -- calls --------------------------------------------------------------------------------------------------------

    def _launch(self, call: CallViews, forward: Forward | None = None) -> torch.Tensor:
        """Make one call without waiting; return its output, copied to `call.out` if the function allocated it."""
        called = forward or self._forward_for(call)
        q, k, v, out = (self._tensor(view) for view in (call.q, call.k, call.v, call.out))
        # An output that is not requested is no keyword: a variant that does not return it has no such parameter.
        others: dict[str, Any] = {name: self._tensor(view) for name, view in call.outputs.items()}
        result = called(q, k, v, out=out, **keywords_of(call, self._tensor), **others)
        return written(result, (out, *others.values()))

    def _call(self, command: MakeCall) -> Done:
        self._disturb(command.before)
        with nvtx_range(command.range_name) if command.range_name else nullcontext():
            out = self._launch(command.call)
        synchronize(self.device)
        synchronize(out.device)  # a call may be on another device than the current one
        return Done()

    def _malformed_call(self, command: MakeMalformedCall) -> Done:
        """Make a malformed call.  Raises what the variant raises, and not what refuses the call before it."""
        call, watched = command.call, self._watched_forward()
        views = {"q": call.q, "k": call.k, "v": call.v, "out": call.out, **call.tensors, **call.outputs}
        tensors: dict[str, Any] = {name: self._tensor(view) for name, view in views.items()}
        malformed = _instead(tensors[command.argument], command.comes)
        q, k, v, out, *others = {**tensors, command.argument: malformed}.values()
        try:
            keywords = {**call.words, **dict(zip(list(views)[4:], others, strict=True))}
            result = watched(q, k, v, scale=call.scale, out=out, **keywords)
        except Exception as problem:
            synchronize(self.device)
            if watched.is_refused_before(problem):
                return Done(is_reached=False)
            raise
        is_unused = command.argument == "out" and result is not out and not is_same_memory(result, out)
        if not is_unused:  # else the function returns a tensor of its own, and has nothing to do with `out`
            written(result, (out, *(tensors[name] for name in call.outputs)))
        synchronize(self.device)
        return Done(is_reached=not is_unused)

    def _watched_forward(self) -> Watched:
        """The open variant, which then tells whether a call has reached it."""
        if self._watched is None:
            opened, forward = self._opened, self._forward
            if opened is None or forward is None:
                raise FaError("no variant is open")
            self._watched = Watched(opened, forward, self._allocate)
        self._watched.is_reached = False
        return self._watched

    def _repeat(self, command: Repeat) -> Done:
        call, forward = command.call, self._forward_for(command.call)
        q, k, v = (self._tensor(view) for view in (call.q, call.k, call.v))
        keywords, count = keywords_of(call, self._tensor), command.count
        outs = in_a_row(self._tensor(call.out), command.step, count)
        rows = {name: in_a_row(self._tensor(view), command.steps[name], count) for name, view in call.outputs.items()}
        others = [dict(zip(rows, tensors, strict=True)) for tensors in zip(*rows.values(), strict=True)] or [{}] * count
        for out, other, before in zip(outs, others, itertools.cycle(command.before), strict=False):
            if before:
                self._disturb(before)
            result = forward(q, k, v, out=out, **keywords, **other)
            if result is not out:
                written(result, (out, *other.values()))
        synchronize(self.device)
        return Done()

    def _disturb(self, before: tuple[Disturbance, ...]) -> None:
        for name in before if self._tools else ():
            getattr(self._tools, name)()

    # -- streams, threads and graphs ----------------------------------------------------------------------------------

    def _script(self, command: Script) -> Done:
        problems: list[Exception] = []
        synchronize(self.device)

        def run(steps: tuple[ScriptStep, ...]) -> None:
            try:
                stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
                with torch.cuda.stream(stream):
                    for step in steps:
                        self._step(step)
                stream.synchronize()
            except Exception as problem:  # noqa: BLE001  # raised again by the calling thread
                problems.append(problem)

        threads = [threading.Thread(target=run, args=(steps,)) for steps in command.threads[1:]]
        for thread in threads:
            thread.start()
        run(command.threads[0])
        for thread in threads:
            thread.join()
        if problems:
            raise problems[0]
        synchronize(self.device)
        return Done()

    def _step(self, step: ScriptStep) -> None:
        match step:
            case Sleep():
                torch.cuda._sleep(step.cycles)  # type: ignore[no-untyped-call]  # noqa: SLF001
            case Copy():
                self._tensor(step.target).copy_(self._tensor(step.source))
            case Launch():
                self._launch(step.call)

    def _capture_call(self, command: CaptureCall) -> Done:
        """Capture one call.  The graph then also holds the copy of an output that the function allocates."""
        forward = None
        if command.is_first_call and self._opened and self._opened.variant and self._opened.library:
            forward = self._scope.enter_context(load_copy(self._opened.variant, self._opened.library))
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        synchronize(self.device)
        with torch.cuda.stream(stream):
            graph.capture_begin()
            try:
                self._launch(command.call, forward)
            except Exception as problem:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise CannotCapture(_first_line(problem)) from problem
            try:
                graph.capture_end()
            except RuntimeError as problem:
                raise CannotCapture(_first_line(problem)) from problem
        self._graph = graph
        return Done()

    def _replay_call(self) -> Done:
        if self._graph is None:
            raise FaError("no call is captured")
        self._graph.replay()
        synchronize(self.device)
        return Done()

    def _end_job(self) -> Done:
        self._graph = None
        self.prepared.forget()
        self._scope.close()
        give_memory_back()
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # a variant may have closed or replaced it
                stream.flush()
        ctypes.CDLL(None).fflush(None)
        return Done()


def _instead(tensor: torch.Tensor, comes: Comes) -> torch.Tensor | None:
    """What comes in the place of a tensor."""
    if comes == "as_viewed":
        return tensor
    return None if comes == "absent" else tensor.to("cpu" if tensor.is_cuda else "meta")


def _find_tools(device: torch.device) -> tuple[DeviceTools | None, str | None]:
    """The device's tools and None, or None and the reason why they cannot be used."""
    if device.type == "cpu":
        return None, ON_CPU
    try:
        return device_tools(device.index or 0), None
    except NoDeviceTools as problem:
        return None, str(problem)


def _first_line(problem: Exception) -> str:
    return next(iter(str(problem).splitlines()), type(problem).__name__)

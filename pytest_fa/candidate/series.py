"""Prepared series of calls: run back to back, captured as a graph, replayed, or timed with a cold L2.

All arguments are made before anything is timed.  A copy of an output that the function allocates is made on the CPU
only, where the judge cannot map the candidate's own memory; on a GPU the output stays where it is, and the judge maps
it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch

from pytest_fa.candidate.forward import Forward
from pytest_fa.candidate.output import Returned, require_output, written
from pytest_fa.errors import FaError
from pytest_fa.gpu.device import synchronize
from pytest_fa.gpu.device_tools import DeviceTools, NoDeviceTools
from pytest_fa.gpu.graph_nodes import read_nodes
from pytest_fa.gpu.graphs import capture, event_us
from pytest_fa.gpu.profiler import durations_us
from pytest_fa.gpu.shared_memory import handle_on_gpu
from pytest_fa.records.timing import NodeTime
from pytest_fa.wire.commands import (
    Allocated,
    CallViews,
    Capture,
    Cold,
    Command,
    Done,
    Forget,
    Load,
    Prepare,
    Profile,
    ProfilerReport,
    ReplaySeries,
    Run,
    Series,
    View,
)

ForwardFor = Callable[[CallViews], Forward]  # the variant's function, with the workspace of a call at hand


class PreparedCalls:
    """The prepared series of a job, by name."""

    def __init__(self, forward_for: ForwardFor, tensor: Callable[[View], torch.Tensor]) -> None:
        self._forward_for, self._tensor = forward_for, tensor
        self._series: dict[str, PreparedSeries] = {}
        self._shifted: dict[View, ShiftedViews] = {}
        self._threads_before: int | None = None

    def execute(self, command: Command, tools: DeviceTools | None) -> Done:  # noqa: PLR0911  # one line each
        """Carry out a command about a series.  Raises what the variant raises."""
        match command:
            case Prepare():
                self._fix_threads(command.cpu_threads)
                forward = self._forward_for(command.series.first)
                self._series[command.name] = PreparedSeries(command.series, forward, self._tensor, self._shifted_from)
                return Done()
            case Run():
                return self.named(command.name).run(command.count)
            case Capture():
                return self.named(command.name).capture()
            case ReplaySeries():
                return self.named(command.name).replay()
            case Cold():
                return self.named(command.name).cold(tools)
            case Load():
                return self.named(command.name).load(command.replays)
            case Profile():
                return self.named(command.name).profile()
            case Forget():
                self.forget()
                return Done()
            case _:
                raise FaError(f"{type(command).__name__} is no command for a candidate")

    def forget(self) -> None:
        """Forget all series, and restore the number of threads."""
        self._series.clear()
        self._shifted.clear()
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)
            self._threads_before = None

    def named(self, name: str) -> PreparedSeries:
        """The series of a name.  Raises `FaError` if there is none."""
        if name not in self._series:
            raise FaError(f"no series {name!r} is prepared")
        return self._series[name]

    def _shifted_from(self, view: View) -> ShiftedViews:
        """The tensors that begin some elements after this view; all series of a job share them."""
        if view not in self._shifted:
            self._shifted[view] = ShiftedViews(self._tensor(view))
        return self._shifted[view]

    def _fix_threads(self, count: int | None) -> None:
        if count is not None and self._threads_before is None:
            self._threads_before = torch.get_num_threads()
            torch.set_num_threads(count)


class PreparedSeries:
    """The arguments of each call of a series, its outputs, and its graph."""

    def __init__(
        self,
        series: Series,
        forward: Forward,
        tensor: Callable[[View], torch.Tensor],
        shifted_from: Callable[[View], ShiftedViews],
    ) -> None:
        first = series.first
        self._forward = forward
        more_outs = {name: [tensor(view) for view in views] for name, views in series.more_outs.items()}
        self._outs = [
            (tensor(view), *(outs[slot] for outs in more_outs.values())) for slot, view in enumerate(series.outs)
        ]
        self.results: list[list[Any]] = [list(outs) for outs in self._outs]  # what the last call for each returned
        q, k, v, *more = (shifted_from(view) for view in (first.q, first.k, first.v, *_moved_views(series)))
        keywords = keywords_of(first, tensor)
        self._calls = []
        for (of_q, of_k, of_v, *of_more), slot in zip(series.shifts, series.out_of, strict=True):
            moved = {name: each[at] for name, each, at in zip(series.moved, more, of_more, strict=True)}
            moved |= {name: outs[slot] for name, outs in more_outs.items()}
            self._calls.append(((q[of_q], k[of_k], v[of_v]), {**keywords, **moved} if moved else keywords, slot))
        self._next = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._cold_ends: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []  # of the calls of a cold graph
        self._is_cpu = self._outs[0][0].device.type == "cpu"

    def run(self, count: int) -> Done:
        """Make the first `count` calls and wait for them."""
        self._next = 0
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            inside_us = self._wall_us(count) if self._is_cpu else event_us(self._call_next, count)
        finally:
            if was_enabled:
                gc.enable()
        return Done(inside_us=(inside_us,), allocated=self._allocated())

    def _wall_us(self, count: int) -> float:
        start = time.perf_counter_ns()
        for _ in range(count):
            self._call_next()
        return (time.perf_counter_ns() - start) / 1000

    def capture(self) -> Done:
        """Capture all calls, and read the nodes of one from those of all.  Raises `CannotCapture`."""
        self._graph = capture(self._call_next, len(self._calls), self._begin, keep_graph=True)
        read = read_nodes(self._graph, len(self._calls))
        return Done(
            launches=read.launches,
            launches_missing=read.missing,
            other_nodes=read.other_nodes,
            order=read.order,
            allocated=self._allocated(),
        )

    def replay(self) -> Done:
        """Replay the graph once and wait for it."""
        return Done(inside_us=(event_us(self._captured.replay),))

    def load(self, replays: int) -> Done:
        """Replay the graph so many times without a pause, and wait for them."""
        return Done(inside_us=(event_us(self._captured.replay, replays),))

    def profile(self) -> Done:
        """Replay the graph once under the profiler."""
        calls = len(self._calls)
        durations = durations_us(self._captured)
        nodes = tuple(
            NodeTime(name, sum(node_us) / len(node_us), round(len(node_us) / calls))
            for name, node_us in durations.items()
        )
        return Done(profiled=ProfilerReport(nodes, sum(map(len, durations.values()))))

    @property
    def _captured(self) -> torch.cuda.CUDAGraph:
        if self._graph is None:
            raise FaError("the series is not captured")
        return self._graph

    def cold(self, tools: DeviceTools | None) -> Done:
        """Time each call after L2 was read full of other data.  Raises `CannotCapture` and `NoDeviceTools`."""
        if tools is None:
            raise NoDeviceTools("the device's tools are missing")
        if not self._cold_ends:
            self._capture_cold(tools)
        tools.reset_persisting_l2()
        self._captured.replay()
        torch.cuda.synchronize()
        samples = tuple(start.elapsed_time(end) * 1000 for start, end in self._cold_ends)
        return Done(inside_us=samples, allocated=self._allocated())

    def _capture_cold(self, tools: DeviceTools) -> None:
        """Capture all calls, each after L2 is read full, between two events."""
        ends = [(_event(), _event()) for _ in self._calls]

        def round_of_calls() -> None:
            for start, end in ends:
                tools.clean_l2()
                start.record()
                self._call_next()
                end.record()

        self._graph, self._cold_ends = capture(round_of_calls, 1, self._begin), ends

    def _begin(self) -> None:
        self._next = 0

    def _call_next(self) -> None:
        (q, k, v), keywords, slot = self._calls[self._next % len(self._calls)]
        self._next += 1
        out = self._outs[slot][0]
        result = self._forward(q, k, v, out=out, **keywords)
        if result is not out and not is_same_memory(result, out):
            self._keep(result, slot)

    def _keep(self, result: object, slot: int) -> None:
        """Keep results that the function allocated; on the CPU, copy them."""
        if self._is_cpu:
            written(result, self._outs[slot])
            return
        results = tuple(result.values()) if isinstance(result, Returned) else (result,)
        for place, (each, out) in enumerate(zip(results, self._outs[slot], strict=False)):
            if each is not out and not is_same_memory(each, out):
                self.results[slot][place] = each

    def _allocated(self) -> tuple[Allocated | None, ...]:
        """Where each tensor of each output lies that the function allocated."""
        synchronize(self._outs[0][0].device)
        return tuple(
            None if result is out else _place_of(require_output(result, out))
            for results, outs in zip(self.results, self._outs, strict=True)
            for result, out in zip(results, outs, strict=True)
        )


def keywords_of(call: CallViews, tensor: Callable[[View], torch.Tensor]) -> dict[str, Any]:
    """The keyword arguments of a call: the scale, and the words and tensors of the parts of attention."""
    return {"scale": call.scale, **call.words, **{name: tensor(view) for name, view in call.tensors.items()}}


def _moved_views(series: Series) -> list[View]:
    """The tensors besides q, k and v that are at another place in each call."""
    return [series.first.tensors[name] for name in series.moved]


def is_same_memory(result: object, out: torch.Tensor) -> bool:
    """Whether a result is a view of all of `out`, such as `out[:]`."""
    return (
        type(result) is torch.Tensor
        and (result.data_ptr(), result.shape, result.stride()) == (out.data_ptr(), out.shape, out.stride())
        and result.dtype == out.dtype
    )


def _place_of(result: torch.Tensor) -> Allocated:
    return Allocated(*handle_on_gpu(result), tuple(result.stride()))


class ShiftedViews(dict[int, torch.Tensor]):
    """The tensors of the same shape and strides that begin some elements after a base, each made when it is first used.

    The calls of a job's series have far fewer offsets than calls, and to make a view takes some microseconds.
    """

    def __init__(self, base: torch.Tensor) -> None:
        super().__init__()
        self._base, self._layout, self._start = base, (base.shape, base.stride()), base.storage_offset()

    def __missing__(self, elements: int) -> torch.Tensor:
        view = self[elements] = self._base.as_strided(*self._layout, self._start + elements)
        return view


def in_a_row(first: torch.Tensor, step: int, count: int) -> list[torch.Tensor]:
    """`count` tensors like `first`, each of which begins `step` elements after the one before it.

    `unbind` would be faster, but autograd does not permit writing into its views what needs gradients.
    """
    rows = first.as_strided((count, *first.shape), (step, *first.stride()), first.storage_offset())
    return [rows[index] for index in range(count)]


def _event() -> torch.cuda.Event:
    """An event that becomes a node of a graph and can be read after each replay."""
    return torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call]

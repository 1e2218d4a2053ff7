"""`TimedSeries`: calls that are timed on new data, and the judge's copies of what they wrote.

The judge's clock starts before the new data are visible.  Whoever works on them early, a thread, a waiting kernel or a
helper process, works inside the time; so does a candidate that stops the judge in between.

The clock stops when the copies are complete.  They are made right after the candidate's answer: of the last call's
output, and of heads that were chosen before the calls began.  Only the copies are judged.  A candidate that answers
before its work is finished therefore gains no time: what is missing from the copies is wrong.

A run during which the judge was stopped, or lost its processor while it published the data, does not count: another one
follows.  A judge that is stopped again and again gives no time.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from pytest_fa.gpu.inputs import Output, is_poison
from pytest_fa.judge.candidate import CommandTimes
from pytest_fa.judge.clocks.cpu_time import CPU_THREADS
from pytest_fa.judge.clocks.fresh_data import FreshData, Place, Written
from pytest_fa.judge.clocks.gaps import stops
from pytest_fa.records.timing import CallNodes
from pytest_fa.wire.commands import Allocated, Cold, Done, Profile, ReplaySeries, Run, Series

PROOF_REPLAYS = 3
MAX_PROOF_REPLAYS = 12  # a busy machine delays some replays, and work that is skipped delays all of them
PROOF_PAUSE_SECONDS = 0.2  # before each replay after the third, so that a short disturbance passes
# Heads that are judged of each replay, besides one of the last output or chosen like it.  The fastest replay counts: a
# candidate that skips a tenth of the calls in it is found with 1 - 0.9 ** 24 = 92 %, a fifth with 99.5 %.
PROOF_HEADS = 24
MIN_PROOF_HEADS = 5
PROOF_SCORES = 2**31  # of the heads of one replay: truth of long sequences takes time


class Copies(NamedTuple):
    """The judge's copies after a run of `calls` calls: the whole last output, and single heads of any output."""

    calls: int
    last: Output  # [batch, heads, seq_q, head_dim or seq_k]
    heads: tuple[tuple[Place, Output], ...]  # [1, 1, seq_q, head_dim or seq_k] each


class TimedSeries:
    """A prepared series of calls, the outputs that it writes, and the way to take its time."""

    def __init__(
        self, data: FreshData, name: str, calls: int, outs: list[Output] | None = None, *, graph: bool = True
    ) -> None:
        self.data, self.name, self.calls, self._graph = data, name, calls, graph
        self._given = outs or data.outs
        self.series: Series = data.series(calls, self._given)
        self.outs = self._given
        self._copies: Copies | None = None
        self._published_us = 0.0  # that the data of the last run took
        data.candidate.prepare(name, self.series, CPU_THREADS if data.candidate.device.type == "cpu" else None)
        self.captured = Done()  # has the nodes of one call, read from those of all calls of the graph
        if graph:
            self.captured = data.candidate.capture(name)
            self.outs = data.candidate.outputs_of(name, self._given, self.captured.allocated)

    def time(
        self,
        calls: int | None = None,
        heads: int = 1,
        command: Cold | Profile | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> CommandTimes:
        """The time of all calls, or of the first `calls` without a graph, on new data, in a run without a gap.

        `heads` heads, chosen at random beforehand, are copied beside the last output.  With a `command`, that makes the
        calls.  `meanwhile` is called while they run.  Raises `StoppedJudge`.
        """
        while True:
            stops_before = stops()
            timed = self._timed(calls, heads, command, meanwhile)
            if not self.data.gaps.is_gap(stops() - stops_before, self._published_us, self.data.publish_us):
                return timed

    def _timed(
        self, calls: int | None, heads: int, command: Cold | Profile | None, meanwhile: Callable[[], object] | None
    ) -> CommandTimes:
        self.data.draw(self.outs)
        count = calls or self.calls
        self.data.last_run = (self.series, count)
        places = tuple(self.data.any_place(self.series, count, self.outs) for _ in range(heads))
        last = self.outs[0].map(torch.empty_like)  # allocated before the clock starts
        chosen = _room_for([place.part_of(self.outs[place.slot]) for place in places])

        def copy_outputs(allocated: tuple[Allocated | None, ...]) -> None:
            if any(allocated):
                self.outs = self.data.candidate.outputs_of(self.name, self._given, allocated)
            last.fill_from(self.outs[self.series.out_of[count - 1]])
            copies = _copied([place.part_of(self.outs[place.slot]) for place in places], chosen)
            self._copies = Copies(count, last, tuple(zip(places, copies, strict=True)))

        run = command or (ReplaySeries(self.name) if self._graph else Run(self.name, count))
        return self.data.candidate.timed(run, meanwhile, copy_outputs, self._publish)

    def _publish(self) -> None:
        start = time.perf_counter_ns()
        self.data.publish()
        self._published_us = (time.perf_counter_ns() - start) / 1000

    @property
    def nodes(self) -> CallNodes:
        """The nodes of one call of the graph."""
        return CallNodes(self.captured.launches, self.captured.other_nodes, self.captured.order)

    def difference(self, nodes: CallNodes, where: str) -> str:
        """How calls of the graph differ from a call with these nodes, which it has `where`; empty if they do not."""
        if self.captured.launches_missing:
            return self.captured.launches_missing
        if self.nodes.has_same(nodes):
            return ""
        return f"in the timed graph of {self.calls} calls, a call is {self.nodes.text}; {where} it is {nodes.text}"

    @property
    def shares_outputs(self) -> bool:
        """Whether calls that should write different outputs wrote the same memory, such as a buffer of their own."""
        return any(
            len({each.named[name].data_ptr() for each in self.outs}) < len(self.outs) for name in self.outs[0].named
        )

    def written_head(self) -> Written:
        """One of the heads that were copied by `time`: one with NaN left if there is one."""
        copies = self._known_copies
        place = self._unwritten(copies)
        if place is None and secrets.randbelow(2):
            return self.written_heads()[0]
        slot = self.series.out_of[copies.calls - 1]
        place = place or self.data.place_in(slot, self.outs)
        if place.slot == slot:
            return self._written(place, place.part_of(copies.last))
        return self._written(place, place.part_of(self.outs[place.slot]).clone())

    def written_heads(self) -> list[Written]:
        """The heads that were chosen before the last run."""
        return [self._written(place, head) for place, head in self._known_copies.heads]

    def proof(self, limit_us: float) -> tuple[float, list[Written]]:
        """The shortest time of a few runs, and heads that were written in each of them.

        For a series in which each call has an output of its own.  As long as all runs take longer than `limit_us`, more
        follow.
        """
        times_us: list[float] = []
        written: list[Written] = []
        heads = max(MIN_PROOF_HEADS, min(PROOF_HEADS, PROOF_SCORES // self.data.scores_per_head))
        while len(times_us) < PROOF_REPLAYS or (min(times_us) > limit_us and len(times_us) < MAX_PROOF_REPLAYS):
            if len(times_us) >= PROOF_REPLAYS:
                time.sleep(PROOF_PAUSE_SECONDS)
            times_us.append(self.time(heads=heads).outside_us)
            written += [self.written_head(), *self.written_heads()]
        return min(times_us), written

    @property
    def _known_copies(self) -> Copies:
        assert self._copies is not None  # noqa: S101  # `time` sets it
        return self._copies

    def _written(self, place: Place, output: Output) -> Written:
        inputs = self.data.inputs_of(self.series, self._known_copies.calls, self.outs, place)
        return Written(inputs, self.data.dense(output.clone()))

    def _unwritten(self, copies: Copies) -> Place | None:
        """A head that still has NaN with which outputs were filled.  On the CPU, all outputs are searched."""
        slot = self.series.out_of[copies.calls - 1]
        if missing := self.data.missing_in(slot, copies.last, is_poison):
            return missing
        if self.data.candidate.device.type == "cpu":
            return self.data.unwritten(self.series, copies.calls, self.outs)
        return None


def _room_for(outputs: list[Output]) -> dict[str, torch.Tensor]:
    """Uninitialized tensors for copies of outputs of one shape, by name."""
    first = outputs[0].named if outputs else {}
    return {name: each.new_empty((len(outputs), *each.shape)) for name, each in first.items()}


def _copied(outputs: list[Output], room: Mapping[str, torch.Tensor]) -> list[Output]:
    """Copies of outputs of one shape: one kernel for all of a name."""
    if not outputs:
        return []
    whole = {
        name: torch.stack([each.named[name] for each in outputs], out=copies).unbind() for name, copies in room.items()
    }
    outs, more = whole.pop("out"), whole
    return [Output(out, {name: more[name][index] for name in more}) for index, out in enumerate(outs)]

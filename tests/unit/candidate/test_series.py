"""Prepared series: each call has its own arguments, and outputs that the function allocates are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch

from pytest_fa.candidate.agent import Agent
from pytest_fa.errors import FaError, WrongResult
from pytest_fa.gpu.shared_memory import view_of
from pytest_fa.wire.commands import CallViews, Forget, Open, Prepare, Run, Series

SHAPE = (1, 1, 2, 4)


class Memory:
    """An agent with a series over one buffer of 0, 1, 2, ... for q, k and v, and three outputs."""

    def __init__(self, forward: Callable[..., torch.Tensor]) -> None:
        self.agent = Agent(lambda *_: nullcontext(forward))
        self.agent.execute(Open(None, None, "cpu", "attention"))
        self.buffer = torch.arange(64, dtype=torch.float32)
        self.outs = [torch.full(SHAPE, -1.0) for _ in range(3)]
        for number, tensor in enumerate((self.buffer, *self.outs)):
            self.agent.memories.add(number, tensor.untyped_storage())

    def prepare(self, *, cpu_threads: int | None = None) -> None:
        """Prepare four calls: q, k and v at other places for each, and outputs 2, 0, 1, 0."""
        base = view_of(self.buffer[:8].view(SHAPE), 0)
        outs = tuple(view_of(out, number) for number, out in enumerate(self.outs, 1))
        first = CallViews(base, base, base, outs[0], 0.5, {"causal": "top_left"})
        shifts = ((0, 8, 16), (1, 9, 17), (2, 10, 18), (3, 11, 19))
        self.agent.execute(Prepare("calls", Series(first, outs, shifts, (2, 0, 1, 0)), cpu_threads))


def adds(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, out: torch.Tensor, **_: object) -> torch.Tensor:
    """A kernel whose output is q + 100 k + 10,000 v."""
    return out.copy_(q + 100 * k + 10_000 * v)


def test_each_call_has_its_own_arguments() -> None:
    """Call i reads q, k and v at its own shifts and writes the output of its turn."""
    memory = Memory(adds)
    memory.prepare()
    memory.agent.execute(Run("calls", 3))
    assert [float(out.flatten()[0]) for out in memory.outs] == [170901.0, 181002.0, 160800.0]
    memory.agent.execute(Run("calls", 4))
    assert float(memory.outs[0].flatten()[0]) == 191103.0


def test_calls_have_scale_and_mask() -> None:
    """Every call gets the scale and the mask of the case."""
    seen: list[tuple[object, object]] = []

    def notes(*_: torch.Tensor, out: torch.Tensor, scale: float, causal: str) -> torch.Tensor:
        seen.append((scale, causal))
        return out

    memory = Memory(notes)
    memory.prepare()
    memory.agent.execute(Run("calls", 4))
    assert seen == [(0.5, "top_left")] * 4


def test_a_run_begins_with_the_first_call() -> None:
    """Each run makes the first calls again, however many the run before made; more calls than prepared start over."""
    memory = Memory(adds)
    memory.prepare()
    for count in (1, 2, 5):
        for out in memory.outs:
            out.fill_(-1.0)
        memory.agent.execute(Run("calls", count))
    assert [float(out.flatten()[0]) for out in memory.outs] == [191103.0, 181002.0, 160800.0]


def test_an_allocated_output_is_copied_on_the_cpu() -> None:
    """On the CPU, a result that the function allocated is copied to the output of the call."""

    def allocates(q: torch.Tensor, *_: torch.Tensor, **__: object) -> torch.Tensor:
        return q + 1

    memory = Memory(allocates)
    memory.prepare()
    done = memory.agent.execute(Run("calls", 3))
    assert done.allocated == (None, None, None)
    assert [float(out.flatten()[0]) for out in memory.outs] == [2.0, 3.0, 1.0]


def test_an_allocated_output_of_another_shape_is_wrong() -> None:
    """A result of another shape is refused in a timed call, too."""

    def allocates(q: torch.Tensor, *_: torch.Tensor, **__: object) -> torch.Tensor:
        return q[..., :2]

    memory = Memory(allocates)
    memory.prepare()
    with pytest.raises(WrongResult):
        memory.agent.execute(Run("calls", 1))


@pytest.fixture
def _two_threads() -> Iterator[None]:
    """Torch uses two threads in this test."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_two_threads")
def test_the_number_of_threads_is_restored() -> None:
    """A series may fix torch's number of threads; forgetting all series restores it, also after a second series."""
    memory = Memory(adds)
    memory.prepare(cpu_threads=1)
    memory.prepare(cpu_threads=1)
    assert torch.get_num_threads() == 1
    memory.agent.execute(Forget())
    assert torch.get_num_threads() == 2
    with pytest.raises(FaError, match="no series 'calls' is prepared"):
        memory.agent.execute(Run("calls", 1))

"""The memory of one call: what torch's allocator and the judge say of it."""

from __future__ import annotations

import pytest
import torch

from pytest_fa.candidate.cuda_forward import CudaForward
from pytest_fa.catalog.case import parse_case
from pytest_fa.gpu.device import peak_bytes_of
from pytest_fa.gpu.inputs import make_inputs, poisoned_output
from pytest_fa.judge.call_memory import CallMemory
from pytest_fa.judge.candidate import Candidate
from pytest_fa.judge.connection import LocalConnection

GPU = torch.device("cuda", 0)
CASE = parse_case("b1h2s16d64-fp16-seed0")


class Allocator:
    """The figures of torch's caching allocator, of which 1000 bytes are in use."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.used_bytes, self.peak_bytes = 1000, 5000  # an earlier call had more
        patch.setattr(torch.cuda, "synchronize", lambda _: None)
        patch.setattr(torch.cuda, "memory_allocated", lambda _: self.used_bytes)
        patch.setattr(torch.cuda, "max_memory_allocated", lambda _: self.peak_bytes)
        patch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: self.take(0, peak_bytes=0))

    def take(self, size_bytes: int, *, peak_bytes: int | None = None) -> None:
        """Allocate, or free where the size is negative."""
        self.used_bytes += size_bytes
        self.peak_bytes = max(self.used_bytes, self.peak_bytes if peak_bytes is None else peak_bytes)


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    """An allocator in place of torch's."""
    return Allocator(monkeypatch)


class Asks(CudaForward):
    """A CUDA source that asks for a workspace of 64 bytes, and whose call takes 300 bytes for a while."""

    def __init__(self, allocator: Allocator) -> None:
        self.allocator, self.calls = allocator, 0

    def workspace_bytes(self, *_: torch.Tensor, **__: object) -> int:
        """The size of the workspace."""
        return 64

    def __call__(self, *_: torch.Tensor, out: torch.Tensor | None = None, **__: object) -> torch.Tensor:
        """Take memory and free it."""
        assert out is not None
        self.calls += 1
        self.allocator.take(300)
        self.allocator.take(-300)
        return out


def memory_of(forward: CudaForward, device: torch.device) -> CallMemory:
    """The memory of one call, on tensors of the CPU, of a candidate on a device."""
    candidate = Candidate.of_function(forward, "cpu")
    assert isinstance(candidate._connection, LocalConnection)
    candidate.device = candidate._connection.agent.device = device
    inputs = make_inputs(CASE, torch.device("cpu"))
    return candidate.memory_of(inputs, poisoned_output(inputs))


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [((), 0), ((300,), 300), ((300, -300, 200), 300), ((200, -100, 300), 400), ((-500, 200), 0)],
    ids=["nothing", "kept", "freed", "twice", "less than before"],
)
def test_the_peak_of_a_call_is_what_it_adds(allocator: Allocator, sizes: tuple[int, ...], expected: int) -> None:
    """Neither what was in use before, nor the peak of an earlier call counts, and freed memory counts once."""

    def call() -> None:
        for size in sizes:
            allocator.take(size)

    assert peak_bytes_of(call, GPU) == expected


def test_the_workspace_is_part_of_the_peak(allocator: Allocator) -> None:
    """The judge knows the workspace that it lends, which the candidate's allocator does not see."""
    assert memory_of(Asks(allocator), GPU) == CallMemory(workspace_bytes=64, peak_bytes=364)


def test_nothing_is_measured_on_the_cpu(allocator: Allocator) -> None:
    """On the CPU, no further call is made; there is no workspace, and the peak is not known."""
    forward = Asks(allocator)
    assert (memory_of(forward, torch.device("cpu")), forward.calls) == (CallMemory(0, None), 0)

"""Lending: the judge's tensors are copied to memory that the candidate sees, and back."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from pytest_fa.gpu.shared_memory import PAGE_BYTES, Memories, map_on_cpu
from pytest_fa.judge import lending as lending_module
from pytest_fa.judge.lending import MAX_POWER_BYTES, MIN_PIECE_BYTES, OtherProcess, SameProcess
from pytest_fa.wire.commands import Attach, Detach

CPU = torch.device("cpu")


class Other:
    """The other process: maps and unmaps what it is told to."""

    def __init__(self) -> None:
        self.memories = Memories()
        self.mapped: list[int] = []
        self.sizes: list[int] = []

    def __call__(self, command: Attach | Detach, descriptor: int | None) -> None:
        """Carry out a command."""
        if isinstance(command, Detach):
            for number in command.memories:
                self.memories.remove(number)
                self.mapped.remove(number)
            return
        assert descriptor is not None
        self.memories.add(command.memory, map_on_cpu(descriptor, command.size_bytes).untyped_storage())
        self.mapped.append(command.memory)
        self.sizes.append(command.size_bytes)


@pytest.fixture
def other() -> Other:
    """The other process, which maps memory in this one."""
    return Other()


@pytest.fixture
def lending(other: Other) -> OtherProcess:
    """Lending to it."""
    return OtherProcess(other, CPU)


def test_a_lent_tensor_is_a_copy_until_it_is_taken_back(other: Other, lending: OtherProcess) -> None:
    """The other side reads what the judge's tensor holds; what it writes reaches the judge only at the end."""
    private = torch.arange(10.0)
    (view,) = lending.lend([private])
    seen = other.memories.tensor(view)
    assert torch.equal(seen, private)
    assert seen.data_ptr() != private.data_ptr()
    seen.fill_(3.0)
    assert torch.equal(private, torch.arange(10.0))
    lending.take_back()
    assert torch.equal(private, torch.full((10,), 3.0))


def test_guard_bands_travel_with_their_tensor(other: Other, lending: OtherProcess) -> None:
    """The whole storage is lent, so that a write past the end of a tensor is seen in the judge's memory."""
    whole = torch.zeros(30)
    inner = whole[10:20]
    (view,) = lending.lend([inner])
    seen = other.memories.tensor(view)
    torch.as_strided(seen, (11,), (1,)).fill_(1.0)
    lending.take_back()
    assert [float(whole[index]) for index in (9, 10, 19, 20, 21)] == [0.0, 1.0, 1.0, 1.0, 0.0]


def test_tensors_of_one_storage_share_a_copy(other: Other, lending: OtherProcess) -> None:
    """Tensors that overlap in the judge's memory overlap in the other one's, too."""
    whole = torch.zeros(20)
    first, second = lending.lend([whole[:10], whole[5:15]])
    other.memories.tensor(first)[5:].fill_(2.0)
    assert (first.memory, float(other.memories.tensor(second)[0])) == (second.memory, 2.0)


def test_allocated_memory_is_not_copied(other: Other, lending: OtherProcess) -> None:
    """Memory from `allocate` is seen by both sides at once, at the same place for all lendings of a job."""
    memory = lending.allocate(400).view(torch.float32)
    views = [lending.lend([memory])[0] for _ in range(2)]
    other.memories.tensor(views[0]).fill_(5.0)
    assert torch.equal(memory, torch.full((100,), 5.0))
    assert views[0] == views[1]
    lending.take_back()
    assert torch.equal(memory, torch.full((100,), 5.0))


def test_pieces_are_used_again(other: Other, lending: OtherProcess) -> None:
    """A piece that was taken back is lent again, also to a tensor of another size: small pieces have few sizes.

    Large ones consist of whole pages of the GPU.
    """
    for count in (1, 100, MIN_PIECE_BYTES // 4):
        lending.lend([torch.zeros(count), torch.zeros(100)])
        lending.take_back()
    assert other.sizes == [MIN_PIECE_BYTES, MIN_PIECE_BYTES]
    lending.lend([torch.zeros(MIN_PIECE_BYTES // 4 + 1)])
    lending.lend([torch.zeros(MAX_POWER_BYTES // 4 + 1)])
    assert other.sizes[2:] == [2 * MIN_PIECE_BYTES, MAX_POWER_BYTES + PAGE_BYTES]


def test_a_job_gives_up_its_memory(other: Other, lending: OtherProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a job its pieces serve the next one, unless they are more than what is kept; then they are unmapped."""
    lending.allocate(MIN_PIECE_BYTES)
    lending.lend([torch.zeros(100)])
    lending.end_job()
    lending.allocate(MIN_PIECE_BYTES)
    lending.allocate(MIN_PIECE_BYTES)
    assert (len(other.mapped), len(other.sizes)) == (2, 2)
    lending.end_job()
    monkeypatch.setattr(lending_module, "MAX_KEPT_BYTES", 0)
    lending.end_job()
    assert other.mapped == []


def descriptors_of_memory() -> int:
    """How many open descriptors of this process are of shared memory.  Others may be closed at any time."""
    gc.collect()
    links = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum(str(link).startswith("/memfd:") for link in links)


def test_descriptors_are_closed(other: Other, lending: OtherProcess) -> None:
    """Of a piece, no descriptor stays open but the one that Python keeps for each of the two mappings."""
    before = descriptors_of_memory()
    for size in range(1, 30):
        lending.allocate(size * MIN_PIECE_BYTES)
    assert len(other.mapped) == 29
    assert descriptors_of_memory() == before + 2 * 29


def test_in_one_process_tensors_are_lent_themselves() -> None:
    """In one process a view names the judge's own tensor, until the job ends."""
    memories = Memories()
    lending = SameProcess(memories, CPU)
    tensor = torch.zeros(4, 5).t()
    (view,) = lending.lend([tensor])
    memories.tensor(view)[3, 2] = 1.0
    assert float(tensor[3, 2]) == 1.0
    lending.take_back()
    assert memories.tensor(view).data_ptr() == tensor.data_ptr()
    lending.end_job()
    with pytest.raises(Exception, match="is not mapped"):
        memories.tensor(view)

"""Memory that two processes see: sealed pieces, views that survive JSON, and names that are checked."""

from __future__ import annotations

import errno
import os
from contextlib import nullcontext
from types import SimpleNamespace

import msgspec
import pytest
import torch
from syrupy.assertion import SnapshotAssertion

from pytest_fa.errors import FaError
from pytest_fa.gpu import shared_memory
from pytest_fa.gpu.shared_memory import (
    DTYPES,
    Memories,
    NoSharedMemory,
    NoSharing,
    allocate_on_cpu,
    allocate_on_gpu,
    bytes_of,
    map_on_cpu,
    require_sharing,
    view_of,
)
from pytest_fa.wire.commands import View


def test_both_mappings_see_the_same_bytes() -> None:
    """What is written through one mapping of a piece is read through another one, in both directions."""
    piece = allocate_on_cpu(8192)
    assert piece.descriptor is not None
    other = map_on_cpu(piece.descriptor, 8192)
    os.close(piece.descriptor)
    piece.data[5], other[8191] = 7, 9
    assert (int(other[5]), int(piece.data[8191]), len(other)) == (7, 9, 8192)


@pytest.mark.parametrize("size_bytes", [0, 1, 2**20])
def test_the_size_of_a_piece_is_sealed(size_bytes: int) -> None:
    """The other process can neither shorten a piece, which would crash the judge, nor extend it."""
    piece = allocate_on_cpu(8192)
    assert piece.descriptor is not None
    with pytest.raises(PermissionError):
        os.ftruncate(piece.descriptor, size_bytes)
    os.close(piece.descriptor)


@pytest.mark.parametrize("dtype", [dtype for name, dtype in DTYPES.items() if name != "uint8"])
def test_a_view_names_a_tensor(dtype: torch.dtype) -> None:
    """A view, sent as JSON, gives a tensor at the same place with the same shape, strides and dtype."""
    storage = torch.arange(4096, dtype=torch.uint8)
    tensor = storage.view(dtype)[16:528].view(2, 4, 8, 8).transpose(1, 2)
    memories = Memories()
    memories.add(3, storage.untyped_storage())
    view = msgspec.json.decode(msgspec.json.encode(view_of(tensor, 3)), type=View)
    named = memories.tensor(view)
    assert (named.data_ptr(), named.shape, named.stride()) == (tensor.data_ptr(), tensor.shape, tensor.stride())
    assert named.dtype == dtype


def test_a_piece_that_is_not_mapped_is_an_error() -> None:
    """A view of an unknown or removed piece is an error that names its number."""
    memories, storage = Memories(), torch.zeros(64, dtype=torch.uint8)
    view = View(4, 0, (64,), (1,), "uint8")
    with pytest.raises(FaError, match="memory 4 is not mapped"):
        memories.tensor(view)
    memories.add(4, storage.untyped_storage())
    assert memories.tensor(view).data_ptr() == storage.data_ptr()
    memories.remove(4)
    memories.remove(4)
    with pytest.raises(FaError, match="memory 4 is not mapped"):
        memories.tensor(view)


@pytest.mark.parametrize(
    ("offset", "shape"), [(0, (65,)), (33, (32,)), (-1, (4,)), (0, (2**62,))], ids=["long", "late", "early", "huge"]
)
def test_a_view_past_the_end_of_its_piece_reads_nothing_else(offset: int, shape: tuple[int, ...]) -> None:
    """A view that does not lie in its piece is refused, so that no other memory of the process is reached."""
    memories = Memories()
    memory = allocate_on_cpu(64)
    assert memory.descriptor is not None
    os.close(memory.descriptor)
    memories.add(0, memory.data.untyped_storage())
    with pytest.raises(RuntimeError):
        memories.tensor(View(0, offset, shape, (1,), "uint8"))


def test_all_bytes_of_a_storage_are_seen() -> None:
    """`bytes_of` has the bytes before and after a tensor, too."""
    whole = torch.arange(12, dtype=torch.float32)
    part = whole[4:6]
    assert torch.equal(bytes_of(part.untyped_storage()).view(torch.float32), whole)


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSYS, NoSharing), (errno.EPERM, NoSharing), (errno.EMFILE, OSError)]
)
def test_a_resource_that_is_used_up_is_no_missing_support(
    monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    """Without memory files nothing can be shared; too many open files are an ordinary error."""

    def memfd_create(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "memfd_create", memfd_create)
    with pytest.raises(kind, match=os.strerror(number)):
        require_sharing(torch.device("cpu"))


def test_a_gpu_needs_its_packages() -> None:
    """Where CUDA cannot share memory, the error says why."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises((FaError, RuntimeError, AssertionError), match=r"(?i)cuda"):
        allocate_on_gpu(4096, torch.device("cuda", 0))


@pytest.mark.parametrize("frees", [True, False])
def test_a_full_gpu_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, *, frees: bool, snapshot: SnapshotAssertion
) -> None:
    """If the driver has no memory left, the judge gives its own back, and the allocation is tried once more."""
    result = SimpleNamespace(CUDA_ERROR_OUT_OF_MEMORY=2, CUDA_ERROR_NOT_SUPPORTED=801, CUDA_ERROR_NOT_PERMITTED=800)
    freed = list[bool]()
    driver = SimpleNamespace(
        CUresult=result,
        cuMemAlloc=lambda _: (0, 4096) if any(freed) else (2, 0),
        cuIpcGetMemHandle=lambda _: (0, SimpleNamespace(reserved=b"handle")),
    )
    monkeypatch.setattr(shared_memory, "_driver", lambda _: nullcontext(driver))
    monkeypatch.setattr(shared_memory, "_device_tensor", lambda *_: torch.zeros(1))
    if frees:
        piece = allocate_on_gpu(4096, torch.device("cuda", 0), lambda: freed.append(True))
        assert (piece.handle, freed) == (b"handle".hex(), [True])
        return
    with pytest.raises(NoSharedMemory) as error:
        allocate_on_gpu(4096, torch.device("cuda", 0), lambda: freed.append(False))
    assert snapshot == str(error.value)
    assert freed == [False]

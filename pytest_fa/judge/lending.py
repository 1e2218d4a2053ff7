"""How the judge's tensors become visible to a candidate: by copies in shared memory, or directly in one process.

The judge's own tensors are private.  `lend` copies the whole storage of each tensor, so that guard bands travel with
it, and `take_back` copies everything back, so that the judge sees in its own memory what the candidate wrote.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from pytest_fa.gpu.device import MAX_KEPT_BYTES, synchronize
from pytest_fa.gpu.shared_memory import (
    PAGE_BYTES,
    Memories,
    Piece,
    allocate_on_cpu,
    allocate_on_gpu,
    bytes_of,
    free_on_gpu,
    view_of,
)
from pytest_fa.wire.commands import Attach, Detach, View

# Of a piece: the smallest size, and the largest of those that are powers of two.
MIN_PIECE_BYTES, MAX_POWER_BYTES = 2**16, 2**24

Send = Callable[[Attach | Detach, int | None], object]  # a command, and a descriptor that goes beside it


class Lending(Protocol):
    """Makes tensors visible to a candidate."""

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """New memory that both sides see, [size_bytes] uint8; tensors in it are not copied."""

    def lend(self, tensors: Iterable[torch.Tensor]) -> list[View]:
        """Make tensors visible, and return their views."""

    def take_back(self) -> None:
        """Copy what was lent back into the judge's tensors."""

    def end_job(self) -> None:
        """Give up what was allocated for this job."""


class SameProcess:
    """Lending within one process: the candidate gets the tensors themselves."""

    def __init__(self, memories: Memories, device: torch.device) -> None:
        self._memories, self._device = memories, device
        self._numbers = itertools.count()
        self._lent: list[int] = []

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """New memory, [size_bytes] uint8."""
        return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    def lend(self, tensors: Iterable[torch.Tensor]) -> list[View]:
        """The views of tensors, which stay visible until the job ends."""
        return [self._view(tensor) for tensor in tensors]

    def take_back(self) -> None:
        """Do nothing: there are no copies."""

    def end_job(self) -> None:
        """Forget the tensors."""
        for number in self._lent:
            self._memories.remove(number)
        self._lent.clear()

    def _view(self, tensor: torch.Tensor) -> View:
        number = next(self._numbers)
        self._memories.add(number, tensor.untyped_storage())
        self._lent.append(number)
        return view_of(tensor, number)


class OtherProcess:
    """Lending to another process.  `send` tells it which pieces to map and to unmap.

    `free_memory` is called if the GPU's memory is used up, before an allocation is tried once more.
    """

    def __init__(self, send: Send, device: torch.device, free_memory: Callable[[], object] = lambda: None) -> None:
        self._send, self._free_memory = send, free_memory
        self._device = torch.device("cuda", device.index or 0) if device.type == "cuda" else device
        self._numbers = itertools.count()
        self._pieces: dict[int, Piece] = {}
        self._own: dict[int, int] = {}  # address of memory from `allocate` -> its number
        self._free: dict[tuple[int, torch.device], list[int]] = {}  # size and device -> pieces without a use
        self._lent: list[tuple[torch.Tensor, torch.Tensor, int]] = []  # the judge's bytes, the shared ones, number

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """New memory that both sides see, [size_bytes] uint8."""
        number = self._piece(size_bytes, self._device)
        data = self._pieces[number].data
        self._own[data.data_ptr()] = number
        return data[:size_bytes]

    def lend(self, tensors: Iterable[torch.Tensor]) -> list[View]:
        """Copy the storages of tensors to shared memory, and return the views of the copies."""
        numbers: dict[int, int] = {}
        views = [view_of(tensor, self._number(tensor.untyped_storage(), numbers)) for tensor in tensors]
        self._wait()
        return views

    def take_back(self) -> None:
        """Copy what was lent back into the judge's tensors."""
        for private, shared, _ in self._lent:
            private.copy_(shared[: len(private)])
        self._wait()
        while self._lent:
            self._release(self._lent.pop()[2])

    def end_job(self) -> None:
        """Give up what was allocated and lent.  Up to 1 GiB stays mapped for the next job."""
        for number in (*self._own.values(), *(number for _, _, number in self._lent)):
            self._release(number)
        self._own.clear()
        self._lent.clear()
        if sum(len(piece.data) for piece in self._pieces.values()) > MAX_KEPT_BYTES:
            self.give_up()

    def give_up(self) -> None:
        """Let the other process unmap all pieces, and free them."""
        self._send(Detach(tuple(self._pieces)), None)
        self.close()

    def close(self) -> None:
        """Free all pieces.  The other process must have ended, or have unmapped them."""
        for piece in self._pieces.values():
            if self._device.type == "cuda":
                free_on_gpu(piece)
        self._pieces.clear()
        self._free.clear()

    def _number(self, storage: torch.UntypedStorage, numbers: dict[int, int]) -> int:
        """The number of the piece that holds the content of a storage; a copy unless it is a piece itself."""
        address = storage.data_ptr()
        if address in self._own:
            return self._own[address]
        if address not in numbers:
            private = bytes_of(storage)
            numbers[address] = self._piece(len(private), storage.device)
            shared = self._pieces[numbers[address]].data
            shared[: len(private)].copy_(private)
            self._lent.append((private, shared, numbers[address]))
        return numbers[address]

    def _piece(self, size_bytes: int, device: torch.device) -> int:
        """A piece of at least this size, from those without a use if there is one."""
        size = _rounded_up(size_bytes)
        if free := self._free.get((size, device)):
            return free.pop()
        number = next(self._numbers)
        on_gpu = device.type == "cuda"
        piece = allocate_on_gpu(size, device, self._free_memory) if on_gpu else allocate_on_cpu(size)
        self._pieces[number] = piece
        self._send(Attach(number, size, piece.handle, device.index or 0), piece.descriptor)
        if piece.descriptor is not None:
            os.close(piece.descriptor)
        return number

    def _release(self, number: int) -> None:
        data = self._pieces[number].data
        self._free.setdefault((len(data), data.device), []).append(number)

    def _wait(self) -> None:
        """Wait for copies: the other process's work does not wait for this one's."""
        for device in {self._device, *(private.device for private, _, _ in self._lent)}:
            synchronize(device)


def _rounded_up(size_bytes: int) -> int:
    """The size of a piece.  Small ones have few sizes, so that later tensors fit: a new one takes a millisecond."""
    if size_bytes <= MAX_POWER_BYTES:
        return max(MIN_PIECE_BYTES, 1 << (size_bytes - 1).bit_length())
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES

"""Guard bands: memory with a known bit pattern before and after a tensor, which reveals out-of-bounds accesses.

The bands of an input are NaN, so that a read out of bounds turns the output into NaN.  The bands of an output are
canaries.  A write into a band is found when its bits are compared with the pattern after the call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import torch

from pytest_fa.gpu.inputs import poison

BAND_ROWS = 256  # a band's length in rows of the tensor: more than any tile reaches past an end
MIN_BAND_BYTES = 4096
ALIGNMENT_BYTES = 512  # the alignment of torch's allocations, so that guarded tensors have the usual alignment

NAN_PATTERN = 0x7FFF  # NaN in fp16 and bf16; two in a row are NaN in fp32, and each byte is NaN in e4m3
CANARY_PATTERN = 0x5A5A


class Guarded:
    """A tensor with a guard band of one pattern on each side, all in one allocation.

    `storage` is counted in units of 16 bits for elements of 16 or 32 bits, and in bytes for e4m3.
    """

    def __init__(self, storage: torch.Tensor, like: torch.Tensor, band: int, pattern: int) -> None:
        self._storage, self._band, self._pattern = storage, band, pattern
        units = like.element_size() // storage.element_size()
        self.tensor = storage.view(like.dtype).as_strided(like.shape, like.stride(), band // units)
        self._bands = {"before": storage[:band], "past": storage[band + units * like.numel() :]}

    @classmethod
    def like(cls, tensor: torch.Tensor, pattern: int) -> Self:
        """A guarded tensor with the shape and strides of `tensor`, which must be dense; its content is undefined."""
        unit = torch.uint8 if tensor.element_size() == 1 else torch.int16
        units = tensor.element_size() // unit.itemsize
        rows = units * tensor.stride()[-2] * BAND_ROWS if tensor.dim() > 1 else 0
        band = _round_up(max(rows, MIN_BAND_BYTES // unit.itemsize), ALIGNMENT_BYTES // unit.itemsize)
        pattern = pattern >> 8 if unit == torch.uint8 else pattern  # the upper byte, which is NaN in e4m3, too
        storage = torch.full((units * tensor.numel() + 2 * band,), pattern, dtype=unit, device=tensor.device)
        return cls(storage, tensor, band, pattern)

    def to(self, device: torch.device) -> Guarded:
        """A copy on another device, bands included."""
        return Guarded(self._storage.to(device), self.tensor, self._band, self._pattern)

    @property
    def damage(self) -> str:
        """Where a band was overwritten, in bytes from the tensor's start or end; empty if both bands are intact."""
        for side, band in self._bands.items():
            hit = (band != self._pattern).nonzero().flatten()
            if len(hit):
                first, last, unit = int(hit[0]), int(hit[-1]), band.element_size()
                nearest = first if side == "past" else len(band) - 1 - last
                edge = "end" if side == "past" else "start"
                return f"{len(hit) * unit} bytes {side} its {edge}, the nearest {nearest * unit} bytes from it"
        return ""


def guard(tensor: torch.Tensor) -> Guarded:
    """A copy of an input between bands of NaN."""
    guarded = Guarded.like(tensor, NAN_PATTERN)
    guarded.tensor.copy_(tensor)
    return guarded


def guard_output(tensor: torch.Tensor) -> Guarded:
    """An output with the shape and strides of `tensor`, filled with NaN, between bands of canaries."""
    guarded = Guarded.like(tensor, CANARY_PATTERN)
    poison(guarded.tensor)
    return guarded


class Workspaces:
    """Allocates the workspaces of kernels: plain memory, or inside `guarded()` NaN-filled memory between bands."""

    def __init__(self) -> None:
        self._is_guarded = False
        self.guarded_by_size: dict[int, Guarded] = {}  # by size in bytes; guarded calls of one size share a workspace

    def __call__(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        """A workspace, [size_bytes] uint8."""
        if not self._is_guarded:
            return torch.empty(size_bytes, dtype=torch.uint8, device=device)
        if size_bytes not in self.guarded_by_size:
            self.guarded_by_size[size_bytes] = _poisoned_workspace(size_bytes, device)
        return self.guarded_by_size[size_bytes].tensor.view(torch.uint8)[:size_bytes]

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """While this context is active, calls get guarded workspaces, filled with NaN again on entry."""
        for guarded in self.guarded_by_size.values():
            guarded.tensor.view(torch.int16).fill_(NAN_PATTERN)
        self._is_guarded = True
        try:
            yield
        finally:
            self._is_guarded = False


def _poisoned_workspace(size_bytes: int, device: torch.device) -> Guarded:
    """A guarded workspace filled with NaN.

    It is made on the CPU and copied, because the first call requests it inside the variant's NVTX range, where no
    kernel of this package may run.
    """
    like = torch.empty((size_bytes + 1) // 2, dtype=torch.float16)
    guarded = Guarded.like(like, CANARY_PATTERN)
    guarded.tensor.view(torch.int16).fill_(NAN_PATTERN)  # also NaN if it is read as fp32
    return guarded.to(device)


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple

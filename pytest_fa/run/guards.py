"""Guard bands: tensors that lie between patterns, so that a read or a write past their ends shows.

An input's neighbours are NaN: what is read there spoils the output.  An output's neighbours are canaries: a write there
is found when the bands are compared.  Bands are compared bitwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import torch

BAND_ROWS = 256  # of the tensor's own row stride: more than any tile reaches past an end
LEAST_BAND_BYTES = 4096
ALIGNMENT_BYTES = 512  # that of torch's allocations, so that a guarded tensor is aligned like any other

NAN_PATTERN = 0x7FFF  # NaN as fp16, bf16, either half of fp32, and both its bytes as e4m3
CANARY_PATTERN = 0x5A5A


class Guarded:
    """A tensor of 16-bit elements with a band of one bit pattern on either side, in one allocation."""

    def __init__(self, storage: torch.Tensor, like: torch.Tensor, band: int, pattern: int) -> None:
        self._storage, self._band, self._pattern = storage, band, pattern
        self.tensor = storage.view(like.dtype).as_strided(like.shape, like.stride(), band)
        self._bands = {"before": storage[:band], "past": storage[band + like.numel() :]}

    @classmethod
    def like(cls, tensor: torch.Tensor, pattern: int) -> Self:
        """A dense tensor's shape and strides between bands; the content is undefined."""
        rows = tensor.stride()[-2] * BAND_ROWS if tensor.dim() > 1 else 0
        band = _round_up(max(rows, LEAST_BAND_BYTES // 2), ALIGNMENT_BYTES // 2)
        count = tensor.numel()
        storage = torch.full((count + 2 * band,), pattern, dtype=torch.int16, device=tensor.device)
        return cls(storage, tensor, band, pattern)

    def to(self, device: torch.device) -> Guarded:
        """The same bits in another device's memory."""
        return Guarded(self._storage.to(device), self.tensor, self._band, self._pattern)

    @property
    def damage(self) -> str:
        """Where a band was written, in bytes from the tensor's end; empty where both are intact."""
        for side, band in self._bands.items():
            hit = (band != self._pattern).nonzero().flatten()
            if len(hit):
                first, last = int(hit[0]), int(hit[-1])
                nearest = first if side == "past" else len(band) - 1 - last
                edge = "end" if side == "past" else "start"
                return f"{len(hit) * 2} bytes {side} its {edge}, the nearest {nearest * 2} bytes from it"
        return ""


def guard(tensor: torch.Tensor) -> Guarded:
    """A copy of an input, with NaN on either side."""
    guarded = Guarded.like(tensor, NAN_PATTERN)
    guarded.tensor.copy_(tensor)
    return guarded


def guard_output(tensor: torch.Tensor) -> Guarded:
    """An output like `tensor`, full of NaN, with canaries on either side."""
    guarded = Guarded.like(tensor, CANARY_PATTERN)
    guarded.tensor.fill_(float("nan"))
    return guarded


class Workspaces:
    """Where kernels get their workspaces: plain memory, or while `guarded()` poisoned memory between bands."""

    def __init__(self) -> None:
        self._is_guarded = False
        self.kept: dict[int, Guarded] = {}  # by size in bytes; every guarded call of that size gets the same one

    def __call__(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        """A workspace of `size_bytes` bytes, uint8."""
        if not self._is_guarded:
            return torch.empty(size_bytes, dtype=torch.uint8, device=device)
        if size_bytes not in self.kept:
            self.kept[size_bytes] = _poisoned_workspace(size_bytes, device)
        return self.kept[size_bytes].tensor.view(torch.uint8)[:size_bytes]

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Hand out guarded workspaces, poisoned anew."""
        for each in self.kept.values():
            each.tensor.view(torch.int16).fill_(NAN_PATTERN)
        self._is_guarded = True
        try:
            yield
        finally:
            self._is_guarded = False


def _poisoned_workspace(size_bytes: int, device: torch.device) -> Guarded:
    """Made on the CPU and copied: the first call asks for it where no kernel of ours may run."""
    like = torch.empty((size_bytes + 1) // 2, dtype=torch.float16)
    made = Guarded.like(like, CANARY_PATTERN)
    made.tensor.view(torch.int16).fill_(NAN_PATTERN)  # NaN as fp32 too
    return made.to(device)


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple

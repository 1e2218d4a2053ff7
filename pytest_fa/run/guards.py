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

    def __init__(self, tensor: torch.Tensor, before: torch.Tensor, after: torch.Tensor, pattern: int) -> None:
        self.tensor = tensor
        self._bands = {"before": before, "past": after}
        self._pattern = pattern

    @classmethod
    def like(cls, tensor: torch.Tensor, pattern: int) -> Self:
        """A dense tensor's shape and strides between bands; the content is undefined."""
        rows = tensor.stride()[-2] * BAND_ROWS if tensor.dim() > 1 else 0
        band = _round_up(max(rows, LEAST_BAND_BYTES // 2), ALIGNMENT_BYTES // 2)
        count = tensor.numel()
        storage = torch.full((count + 2 * band,), pattern, dtype=torch.int16, device=tensor.device)
        elements = storage.view(tensor.dtype)
        inner = elements.as_strided(tensor.shape, tensor.stride(), band)
        return cls(inner, storage[:band], storage[band + count :], pattern)

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
        self._kept: list[Guarded] | None = None

    def __call__(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        """A workspace of `size_bytes` bytes, uint8."""
        if self._kept is None:
            return torch.empty(size_bytes, dtype=torch.uint8, device=device)
        half = torch.empty((size_bytes + 1) // 2, dtype=torch.float16, device=device)
        workspace = Guarded.like(half, CANARY_PATTERN)
        workspace.tensor.fill_(float("nan"))
        self._kept.append(workspace)
        return workspace.tensor.view(torch.uint8)[:size_bytes]

    @contextmanager
    def guarded(self) -> Iterator[list[Guarded]]:
        """Hand out guarded workspaces, and give the list of them."""
        kept: list[Guarded] = []
        self._kept = kept
        try:
            yield kept
        finally:
            self._kept = None


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple

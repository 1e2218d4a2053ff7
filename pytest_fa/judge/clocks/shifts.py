"""The secret places of the tensors of timed calls."""

from __future__ import annotations

import random
from collections.abc import Mapping

import torch

OFFSET_BYTES = 128  # offsets are multiples of it, so that tensors stay aligned to 16 bytes
RANGE_BYTES = 2**18  # within which offsets lie; on an H200, ranges of 8 to 512 KB make no difference to a time
STEPS = RANGE_BYTES // OFFSET_BYTES


def random_shifts(tensors: Mapping[str, torch.Tensor], source: random.Random) -> dict[str, int]:
    """How many elements after its beginning each tensor lies in a call."""
    return {name: source.randrange(STEPS) * OFFSET_BYTES // each.itemsize for name, each in tensors.items()}


def shifted(start: torch.Tensor, shift: int) -> torch.Tensor:
    """The tensor that begins some elements after another one, in the same memory."""
    return start.as_strided(start.shape, start.stride(), start.storage_offset() + shift)

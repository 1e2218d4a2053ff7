"""Where in an output something is."""

from __future__ import annotations

import numpy as np
import torch

from pytest_fa.records.judged import Index


def place(flat: int, tensor: torch.Tensor) -> Index:
    """The four indices of a flat one; torch's own unravel_index imports half a second of sympy."""
    batch, head, query, dim = (int(each) for each in np.unravel_index(flat, tensor.shape))
    return (batch, head, query, dim)


def first_place(mask: torch.Tensor) -> Index | None:
    """Where a mask, [batch, heads, seq_q, head_dim or seq_k], is first true; None where it never is."""
    return place(int(mask.flatten().int().argmax()), mask) if bool(mask.any()) else None

"""Indices of elements in an output."""

from __future__ import annotations

import numpy as np
import torch

from pytest_fa.records.judged import Index


def place(flat: int, tensor: torch.Tensor) -> Index:
    """The four indices of the flat index `flat`.

    NumPy computes them, because torch's `unravel_index` imports sympy, which takes half a second.
    """
    batch, head, query, dim = (int(each) for each in np.unravel_index(flat, tensor.shape))
    return (batch, head, query, dim)


def first_place(mask: torch.Tensor) -> Index | None:
    """The first index at which a mask, [batch, heads, seq_q, head_dim or seq_k], is true; None if it is nowhere."""
    return place(int(mask.flatten().int().argmax()), mask) if bool(mask.any()) else None

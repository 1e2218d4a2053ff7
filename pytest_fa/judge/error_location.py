"""Where the errors of an output are: the index of one element, and in words which part of the output is bad."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from pytest_fa.attention.scores import AXES, Computes
from pytest_fa.records.checks import Index

ORDINALS = {2: "nd", 3: "rd"}


def element_index(flat: int, tensor: torch.Tensor) -> Index:
    """The four indices of the flat index `flat`.

    NumPy computes them, because torch's `unravel_index` imports sympy, which takes half a second.
    """
    batch, head, query, dim = (int(each) for each in np.unravel_index(flat, tensor.shape))
    return (batch, head, query, dim)


def first_index(mask: torch.Tensor) -> Index | None:
    """The first index at which a mask, [batch, heads, seq_q, head_dim or seq_k], is true; None if it is nowhere."""
    return element_index(int(mask.flatten().int().argmax()), mask) if bool(mask.any()) else None


def location_text(bad: torch.Tensor, computes: Computes) -> str:
    """Which part of [batch, heads, seq_q, head_dim or seq_k] is bad, in words."""
    return place_text(bad, AXES[computes])


def place_text(bad: torch.Tensor, axes: tuple[str, str, str, str]) -> str:
    """The same for a tensor whose four axes have these names."""
    parts = []
    for axis, name in enumerate(axes):
        other_axes = tuple(each for each in range(4) if each != axis)
        is_bad = bad.any(dim=other_axes[0], keepdim=True)
        for other_axis in other_axes[1:]:
            is_bad = is_bad.any(dim=other_axis, keepdim=True)
        indices = is_bad.flatten().nonzero().flatten().tolist()
        if len(indices) < bad.shape[axis]:
            parts.append(_span(name, indices, bad.shape[axis]))
    return ", ".join(parts) or "every {}, {}, {} and {}".format(*axes)


def _span(name: str, indices: list[int], size: int) -> str:
    """The bad indices of one axis of length `size`, in words: one index, a range, a regular pattern or a count."""
    first, last = indices[0], indices[-1]
    if len(indices) == 1:
        return f"{name} {first} of {size}"
    steps = {after - before for before, after in itertools.pairwise(indices)}
    if steps == {1}:
        return f"{name} {first} to {last} of {size}"
    if len(steps) == 1:
        step = steps.pop()
        return f"every {step}{ORDINALS.get(step, 'th')} {name} from {first}"
    return f"{len(indices)} of {size} {name} indices"

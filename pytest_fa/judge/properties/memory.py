"""Properties about where the tensors lie: strides, offsets, sizes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from pytest_fa.catalog.properties import least_lengths
from pytest_fa.errors import UnsupportedCase
from pytest_fa.judge.subject import Subject

FAR_ELEMENTS = 2**31 + 64
MANY_HEADS = 2**16 + 1
MANY_HEADS_SEQUENCE = 16


def padded_rows(subject: Subject) -> None:
    """Every row is followed by a row of NaN that belongs to nobody."""
    _require_right_in("padded_rows", subject, lambda each: _within(each, rows=2))


def expanded_heads(subject: Subject) -> None:
    """K and V of one head stand for all heads, by a stride of zero."""
    inputs = subject.inputs()
    one = inputs._replace(k=inputs.k[:, :1].expand_as(inputs.k), v=inputs.v[:, :1].expand_as(inputs.v))
    subject.require_right("expanded_heads", subject.call(one), one)


def offset_pointers(subject: Subject) -> None:
    """Tensors that begin 2 and 8 bytes into their allocation; a kernel that takes one may refuse the other."""
    refusals = []
    for elements in (1, 4):
        try:
            _require_right_in("offset_pointers", subject, partial(_at_offset, elements))
        except UnsupportedCase as reason:
            refusals.append(reason)
    if len(refusals) == 2:  # noqa: PLR2004  # both of them
        raise refusals[0]


def many_heads(subject: Subject) -> None:
    """More heads than a grid's second dimension or 16 bits can count, short ones; the last is unlike all others."""
    inputs = subject.inputs()
    queries, keys = least_lengths(subject.variant, MANY_HEADS_SEQUENCE)
    ends = (queries, keys, keys)
    q, k, v = (
        each[:1, :1, :end].expand(1, MANY_HEADS, -1, -1).clone() for each, end in zip(inputs[:3], ends, strict=True)
    )
    for each in (q, k, v):
        each[:, -1] = each[:, -1].flip(1)
    many = inputs._replace(q=q, k=k, v=v)
    subject.require_right("many_heads", subject.call(many), many)


def far_offsets(subject: Subject) -> None:
    """The second batch of K and V lies 2^31 elements after the first."""
    inputs = subject.inputs()
    need = 2 * (FAR_ELEMENTS + inputs.k[0].numel()) * inputs.k.element_size()
    free, _ = torch.cuda.mem_get_info(subject.device)
    if free < need * 1.2:
        raise UnsupportedCase(f"needs {need / 1e9:.0f} GB of free GPU memory, there are {free / 1e9:.0f}")
    far = inputs._replace(k=_far(inputs.k), v=_far(inputs.v))
    subject.require_right("far_offsets", subject.call(far), inputs)


def _require_right_in(name: str, subject: Subject, place: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Inputs and output, each moved to a place of the same shape and other strides or address."""
    inputs = subject.inputs()
    q, k, v = (place(each) for each in inputs[:3])
    out = subject.call(inputs._replace(q=q, k=k, v=v), place(subject.output(inputs)))
    subject.require_right(name, out, inputs)


def _within(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    batch, heads, seq, dim = tensor.shape
    room = torch.full((batch, heads, seq * rows, dim), float("nan"), dtype=tensor.dtype, device=tensor.device)
    return room[:, :, ::rows].copy_(tensor)


def _at_offset(elements: int, tensor: torch.Tensor) -> torch.Tensor:
    room = torch.empty(tensor.numel() + elements, dtype=tensor.dtype, device=tensor.device)
    return room[elements:].view(tensor.shape).copy_(tensor)


def _far(tensor: torch.Tensor) -> torch.Tensor:
    room = torch.empty(FAR_ELEMENTS + tensor[0].numel(), dtype=tensor.dtype, device=tensor.device)
    stride = tensor[0].contiguous().stride()
    return room.as_strided(tensor.shape, (FAR_ELEMENTS, *stride)).copy_(tensor)

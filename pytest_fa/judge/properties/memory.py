"""Properties about the memory layout of the tensors: strides, offsets, sizes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from pytest_fa.catalog.claims import least_lengths
from pytest_fa.errors import LacksMemory, UnsupportedCase
from pytest_fa.judge.subject import PropertySubject

FAR_ELEMENTS = 2**31 + 64
COPIES = 2  # of each tensor of a call: the judge's, and the one that the candidate sees
MANY_HEADS = 2**16 + 1
MANY_HEADS_SEQUENCE = 16


def padded_rows(subject: PropertySubject) -> None:
    """Outputs are right if each row of each tensor is followed by a row of NaN that belongs to no tensor."""
    _require_right_in("padded_rows", subject, lambda tensor: _with_row_pitch(tensor, rows=2))


def expanded_heads(subject: PropertySubject) -> None:
    """Outputs are right if all heads share one head of K and V through a head stride of zero."""
    inputs = subject.inputs()
    first = inputs.map(lambda tensor: tensor[:, :1].expand_as(tensor))
    expanded = inputs._replace(k=first.k, v=first.v)
    if inputs.descales is not None:
        of_first = inputs.descales.map(lambda descale: descale[:, :1].expand_as(descale))
        expanded = expanded._replace(descales=of_first._replace(q=inputs.descales.q))
    subject.require_right("expanded_heads", subject.call(expanded), expanded)


def offset_pointers(subject: PropertySubject) -> None:
    """Outputs are right for tensors that begin one element or 8 bytes into their allocation.

    A kernel may refuse one of the two offsets.  If it refuses both, the property is refused.
    """
    refusals = []
    for size_bytes in (None, 8):
        try:
            _require_right_in("offset_pointers", subject, partial(_at_offset, size_bytes))
        except UnsupportedCase as reason:
            refusals.append(reason)
    if len(refusals) == 2:  # noqa: PLR2004  # both offsets
        raise refusals[0]


def many_heads(subject: PropertySubject) -> None:
    """Outputs are right for 2^16 + 1 short heads, more than 16 bits or the y dimension of a grid can count.

    The last head has other data than the rest, so that a head computed in its place is found.
    """
    inputs = subject.inputs()
    queries, keys = least_lengths(subject.variant, MANY_HEADS_SEQUENCE)
    ends = (queries, keys, keys)
    q, k, v = (
        tensor[:1, :1, :end].expand(1, MANY_HEADS, -1, -1).clone() for tensor, end in zip(inputs[:3], ends, strict=True)
    )
    for tensor in (q, k, v):
        tensor[:, -1] = tensor[:, -1].flip(1)
    descales = inputs.descales and inputs.descales.map(lambda descale: descale[:1, :1].expand(1, MANY_HEADS))
    many = inputs._replace(q=q, k=k, v=v, descales=descales)
    subject.require_right("many_heads", subject.call(many), many)


def far_offsets(subject: PropertySubject) -> None:
    """Outputs are right if the second batch of K and V begins more than 2^31 elements after the first."""
    inputs = subject.inputs()
    bytes_of_k = (FAR_ELEMENTS + inputs.k[0].numel()) * inputs.k.element_size()
    needed_bytes = 1.1 * COPIES * 2 * bytes_of_k  # of K and V, and a tenth for all else
    free_bytes, total_bytes = torch.cuda.mem_get_info(subject.device)
    if total_bytes < needed_bytes:
        raise UnsupportedCase(f"needs {needed_bytes / 1e9:.0f} GB of GPU memory, found {total_bytes / 1e9:.0f} GB")
    if free_bytes < needed_bytes:
        raise LacksMemory(f"needs {needed_bytes / 1e9:.0f} GB of free GPU memory, found {free_bytes / 1e9:.0f} GB")
    far = inputs._replace(k=_far(inputs.k), v=_far(inputs.v))
    subject.require_right("far_offsets", subject.call(far), inputs)


def _require_right_in(name: str, subject: PropertySubject, place: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Judge a call whose inputs and output were moved by `place`, which returns the same shape at other strides."""
    inputs = subject.inputs()
    placed = inputs.map(place)
    output = subject.output(inputs)
    moved = output._replace(out=place(output.out))
    subject.require_right(name, subject.call(placed, moved), inputs)


def _with_row_pitch(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """A copy whose rows are `rows` row lengths apart, with NaN between them."""
    batch, heads, seq, dim = tensor.shape
    storage = torch.full((batch, heads, seq * rows, dim), float("nan"), dtype=tensor.dtype, device=tensor.device)
    return storage[:, :, ::rows].copy_(tensor)


def _at_offset(size_bytes: int | None, tensor: torch.Tensor) -> torch.Tensor:
    """A copy that begins this many bytes into its allocation; None: one element."""
    elements = size_bytes // tensor.element_size() if size_bytes else 1
    storage = torch.empty(tensor.numel() + elements, dtype=tensor.dtype, device=tensor.device)
    return storage[elements:].view(tensor.shape).copy_(tensor)


def _far(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose batches are `FAR_ELEMENTS` elements apart."""
    storage = torch.empty(FAR_ELEMENTS + tensor[0].numel(), dtype=tensor.dtype, device=tensor.device)
    stride = tensor[0].contiguous().stride()
    return storage.as_strided(tensor.shape, (FAR_ELEMENTS, *stride)).copy_(tensor)

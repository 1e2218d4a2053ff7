"""What the judge and the process of the user's functions say to each other; tensors are in memory that both map."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch

ELEMENT_BYTES = 8  # float64


class TruthQuestion(msgspec.Struct, frozen=True):
    """Call one function on q, k and v, which come as float64 tensors of these shapes beside the message.

    After them come the tensors of parts of attention that the `tensors` name, as `part.PartTensor` keeps them.

    The function is in the first of the `files`, which imports the others; `sha256` is that of all files together.
    `needed` are the keywords without which the function would compute something else than the call.  `dtype` is that
    of the kernel's output.  `is_exact` asks for float64: the truth, and not the same formula with roundings.
    """

    files: tuple[str, ...]
    sha256: str
    function: str
    device: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    out_shape: tuple[int, ...]
    keywords: dict[str, Any]
    needed: tuple[str, ...]
    is_exact: bool
    tensors: tuple[str, ...] = ()


class TruthAnswer(msgspec.Struct, frozen=True):
    """The shapes of what the function returned, which comes beside the message; or what it did instead."""

    shapes: tuple[tuple[int, ...], ...] = ()
    problem: str = ""
    details: str = ""


def memory_of(tensors: Sequence[torch.Tensor]) -> int:
    """A descriptor of memory with these float64 tensors one after the other; the caller closes it."""
    descriptor = os.memfd_create("pytest-fa-truth")
    with os.fdopen(os.dup(descriptor), "wb") as file:
        for tensor in tensors:
            file.write(tensor.contiguous().view(-1).numpy().tobytes())
    return descriptor


def read_tensors(descriptor: int | None, shapes: Sequence[Sequence[int]]) -> Iterator[torch.Tensor]:
    """Copies of the float64 tensors of such memory.  Raises `ValueError` if it is smaller."""
    sizes = [ELEMENT_BYTES * torch.Size(shape).numel() for shape in shapes]
    if descriptor is None or os.fstat(descriptor).st_size < sum(sizes):
        raise ValueError("a message without its tensors")
    if not sum(sizes):
        yield from (torch.zeros(tuple(shape), dtype=torch.float64) for shape in shapes)
        return
    with mmap.mmap(descriptor, sum(sizes), access=mmap.ACCESS_COPY) as memory:
        start = 0
        for shape, size in zip(shapes, sizes, strict=True):
            whole = torch.frombuffer(bytearray(memory[start : start + size]), dtype=torch.float64) if size else None
            yield torch.zeros(tuple(shape), dtype=torch.float64) if whole is None else whole.view(tuple(shape))
            start += size

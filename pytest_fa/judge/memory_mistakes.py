"""Mistakes in the order of elements in memory: transposed tensors, exchanged layouts, bits read as another dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from pytest_fa.attention.mistake import Mistake
from pytest_fa.gpu.inputs import Inputs

Move = Callable[[torch.Tensor], torch.Tensor]
OTHER_16_BIT = {torch.float16: torch.bfloat16, torch.bfloat16: torch.float16}
DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def memory_mistakes(inputs: Inputs) -> Iterator[Mistake]:
    """Every mistake of this kind that can change the output of a case."""
    yield from _transposed(inputs)
    yield from _other_layout(inputs)
    yield from _other_dtype(inputs)


def _transposed(inputs: Inputs) -> Iterator[Mistake]:
    """Matrices [S, D] that are read or written as [D, S], in both directions; they are equal if S = D."""
    for move in _moves(inputs.q.shape[2], inputs.v.shape[3]):
        yield Mistake("each head of the output is transposed: look at the store's row and column", arrange=move)
    for name in ("q", "k", "v"):
        words = f"each head of {name.upper()} is read transposed: look at the load's row and column"
        for move in _moves(*getattr(inputs, name).shape[2:]):
            yield Mistake(words, lambda i, name=name, move=move: i._replace(**{name: move(getattr(i, name))}))  # type: ignore[misc]


def _moves(rows: int, columns: int) -> tuple[Move, ...]:
    return (_rows_as_columns,) if rows == columns else (_rows_as_columns, _columns_as_rows)


def _rows_as_columns(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(2, 3).reshape(tensor.shape)


def _columns_as_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(*tensor.shape[:2], tensor.shape[3], tensor.shape[2]).transpose(2, 3)


def _heads_last(tensor: torch.Tensor) -> torch.Tensor:
    """[b, h, s, d] elements in the order of [b, s, h, d]."""
    return tensor.transpose(1, 2).reshape(tensor.shape)


def _heads_first(tensor: torch.Tensor) -> torch.Tensor:
    """The inverse of `_heads_last`."""
    batch, heads, seq, dim = tensor.shape
    return tensor.reshape(batch, seq, heads, dim).transpose(1, 2)


def _other_layout(inputs: Inputs) -> Iterator[Mistake]:
    """Tensors that are read or written in the other layout, and attention over the wrong axis."""
    q, k = inputs.q, inputs.k
    if q.shape[1] == 1:
        return
    is_bshd = q.stride(1) < q.stride(2)
    layouts = ("bshd", "bhsd") if is_bshd else ("bhsd", "bshd")
    read, write = (_heads_last, _heads_first) if is_bshd else (_heads_first, _heads_last)

    def misread(inputs: Inputs) -> Inputs:
        return inputs._replace(q=read(inputs.q), k=read(inputs.k), v=read(inputs.v))

    names = "{} {} as {} where the layout is {}: look at the strides"
    yield Mistake(names.format("the output is", "written", *layouts[::-1]), arrange=write)
    yield Mistake(names.format("Q, K and V are", "read", *layouts[::-1]), misread)
    yield Mistake(names.format("Q, K, V and the output are", "taken", *layouts[::-1]), misread, arrange=write)
    if q.shape[2] == k.shape[2] and q.shape[2] > 1:
        words = "attention runs over the heads, not over the keys: the axes of heads and sequence are exchanged"
        yield Mistake(words, _axes_exchanged, arrange=lambda tensor: tensor.transpose(1, 2))


def _axes_exchanged(inputs: Inputs) -> Inputs:
    q, k, v = (tensor.transpose(1, 2) for tensor in inputs[:3])
    return inputs._replace(q=q, k=k, v=v)


def _other_dtype(inputs: Inputs) -> Iterator[Mistake]:
    """Bits of fp16 that are read as bf16, and the reverse."""
    dtype = inputs.q.dtype
    if dtype not in OTHER_16_BIT or inputs.k.dtype != dtype:
        return
    other = OTHER_16_BIT[dtype]
    name, other_name = DTYPE_NAMES[dtype], DTYPE_NAMES[other]

    def misread(inputs: Inputs) -> Inputs:
        q, k, v = (tensor.view(other).to(torch.float64) for tensor in inputs[:3])
        return inputs._replace(q=q, k=k, v=v)

    def written(out: torch.Tensor) -> torch.Tensor:
        return out.to(other).view(dtype).double()

    yield Mistake(f"{name} inputs are read as {other_name}: look at the dtype dispatch", misread)
    yield Mistake(f"the {name} output is written as {other_name}: look at the dtype dispatch", arrange=written)
    words = f"{name} inputs and output are taken for {other_name}: look at the dtype dispatch"
    yield Mistake(words, misread, arrange=written)

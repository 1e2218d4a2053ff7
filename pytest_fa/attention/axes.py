"""What a bias and a mask have in common: a number for each query and key, which may be the same along some axes.

An id has the axes on which it depends, besides the keys: `b` batch, `h` head, `q` query.  `-maskbq` is a mask that all
heads share, and `-mask` one of keys alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_fa.attention.mistake import Hide, Positions
from pytest_fa.attention.part import CallInputs, Part, Shape

if TYPE_CHECKING:
    import torch

LETTERS = "bhq"
MAX_IN_MEMORY = 2**22  # elements of a tensor of all batches, heads, queries and keys
ALL = [
    "".join(letters) for count in range(len(LETTERS) + 1) for letters in itertools.combinations(LETTERS, count)
]  # "", "b", "h", "q", "bh", "bq", "hq", "bhq"


class Axes:
    """The texts of one field: a prefix, and the axes."""

    def __init__(self, field: str, prefix: str) -> None:
        self.field, self._prefix = field, prefix

    @property
    def pattern(self) -> str:
        """The prefix and axes, the most first."""
        return f"{self._prefix}(?:{'|'.join(reversed(ALL))})"

    @property
    def grammar(self) -> str:
        """The form in words."""
        return f"[-{self._prefix}<axes>]"

    def read(self, text: str) -> str:
        """The axes after the prefix."""
        return text.removeprefix(self._prefix)

    def plain(self, case: Any) -> None:  # noqa: ARG002  # the same in each case
        """Without a text, there is no such tensor."""
        return

    def write(self, value: str) -> str:
        """The prefix and the axes."""
        return f"{self._prefix}{value}"


class PerPair(Part):
    """A part with one tensor, [batch or 1, heads or 1, seq_q or 1, seq_k]; its only token is an `Axes`."""

    claims = (False, True)

    def impossible(self, case: Shape) -> str | None:
        """Only attention has such a tensor."""
        is_scores = self._axes(case) is not None and case.computes == "scores"
        return f"scores alone have no {self.name}; drop -{self.name}" if is_scores else None

    def claimed_by(self, case: Shape) -> bool:
        """Whether there is one."""
        return self._axes(case) is not None

    def fields_with(self, claim: Any, heads: int) -> Mapping[str, Any]:  # noqa: ARG002  # one of `claims`
        """One that depends on each axis."""
        return {self.tokens[0].field: LETTERS if claim else None}

    def fields_in_turn(self, claim: Any, heads: int) -> tuple[Mapping[str, Any], ...]:  # one of `claims`
        """Some that are the same along axes."""
        more = ({self.tokens[0].field: axes} for axes in ("q", "h", "bq")) if claim else ()
        return (self.fields_with(claim, heads), *more)

    def sized_in_turn(self, claim: Any) -> tuple[tuple[int, int, Mapping[str, Any]], ...]:  # one of `claims`
        """Each choice of axes that is not in turn already, also with one query and with many keys."""
        if not claim:
            return ()
        field = self.tokens[0].field
        sizes = {"": (77, 150), "b": (1, 1055), "bh": (150, 77), "hq": (77, 77)}
        return tuple((*lengths, {field: axes}) for axes, lengths in sizes.items())

    def _axes(self, case: Shape) -> str | None:
        """The axes of a case; None if it has no such tensor."""
        axes: str | None = case.value_of(self.tokens[0].field)
        return axes

    def elements(self, case: Shape) -> int:
        """The number of elements that a call reads; 0 if a case has none."""
        if (axes := self._axes(case)) is None:
            return 0
        heads, sequences = case.heads if "h" in axes else 1, case.sequences if "b" in axes else (case,)
        return heads * sum(each.seq_k * (each.seq_q if "q" in axes else 1) for each in sequences)

    def axes(self, word: str, case: Shape) -> tuple[bool, bool, bool, bool] | None:  # noqa: ARG002  # the only one
        """On which axes it depends."""
        if (axes := self._axes(case)) is None:
            return None
        batch, head, query = (letter in axes for letter in LETTERS)
        return batch, head, query, True

    def plain_argument(self, word: str) -> None:  # noqa: ARG002  # the only one
        """No tensor."""
        return

    def order_matters(self, inputs: Any) -> bool:  # `CallInputs`
        """It depends on the key."""
        return any(inputs.word(word) is not None for word in self.words)


def hide_some(numbers: torch.Tensor, hidden: float) -> None:
    """Hide all keys of some queries, and the first half of them for others; for one head if all queries are alike."""
    half = numbers.shape[3] // 2
    numbers[:, :, 2::7] = hidden
    numbers[:, :, 1::5, :half] = hidden
    if numbers.shape[2] == 1:
        numbers[-1:, -1:, :, :half] = hidden


def misread(tensor: torch.Tensor, inputs: CallInputs) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor as kernels with another index read it, each with words for it."""
    batches, heads, queries, keys = tensor.shape
    group = inputs.q.shape[1] // inputs.k.shape[1]
    if heads > group > 1:
        by_kv_head = tensor[:, : heads // group].repeat_interleave(group, 1)
        yield "each head reads that at the index of the head of K and V", by_kv_head
    if heads > 1:
        yield "each head reads that of the next head", tensor.roll(-1, 1)
        yield "each head reads that of the head before it", tensor.roll(1, 1)
        yield "each head reads that of head 0", tensor[:, :1]
    if batches > 1:
        yield "each batch reads that of the next batch", tensor.roll(-1, 0)
        yield "each batch reads that of batch 0", tensor[:1]
    if queries > 1:
        yield "each query reads that of query 0", tensor[:, :, :1]
        yield "each query reads that of the next query", tensor.roll(-1, 2)
    if keys > 1:
        yield "each key reads that of the next key", tensor.roll(-1, 3)
    if queries == keys > 1:
        yield "it is read transposed, with query and key exchanged", tensor.transpose(2, 3)
    yield from _misread_in_memory(tensor, (*inputs.q.shape[:3], inputs.k.shape[2]))


def _misread_in_memory(tensor: torch.Tensor, sizes: tuple[int, int, int, int]) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor as kernels with strides of their own read it in a call of these sizes."""
    if math.prod(sizes) > MAX_IN_MEMORY or not tensor.numel():
        return
    batch, heads, queries, keys = sizes
    dense = _read_densely(tensor, sizes)
    if not dense.equal(tensor.expand(sizes)):
        yield "it is read as if it were dense, its strides of 0 are ignored", dense
    if heads > 1 and queries > 1:
        words = "it is read as [batch, query, head, key], not as [batch, head, query, key]"
        yield words, _read_densely(tensor, (batch, queries, heads, keys)).transpose(1, 2)


def _read_densely(tensor: torch.Tensor, sizes: tuple[int, int, int, int]) -> torch.Tensor:
    """The numbers of a tensor's memory at dense strides, from the beginning again where it ends."""
    own, count = tensor.flatten(), math.prod(sizes)
    return own.repeat(-(-count // len(own)))[:count].view(sizes)


def hide_where(hidden: torch.Tensor) -> Hide:
    """The keys where a tensor is true."""
    return lambda positions: positions.part_of(hidden)


def nothing(positions: Positions) -> torch.Tensor:
    """No key."""
    return positions.nothing_hidden

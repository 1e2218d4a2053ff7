"""What a further output of a call is judged by: figures of each row, computed from blocks of scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

PLAIN: Mapping[str, str] = MappingProxyType({})


class Padding(NamedTuple):
    """The rows of an output that belong to no query, [batch, 1, seq_q] bool, and what must become of them."""

    rows: torch.Tensor
    rule: str  # untouched, zero or any: a value of the convention `rows_past`


class ScoreBlock(NamedTuple):
    """Some queries of a call in float64, and what the parts of attention do to their scores."""

    q: torch.Tensor  # [batch, heads, rows, head_dim]
    k: torch.Tensor  # [batch, heads, seq_k, head_dim]
    scale: float
    # Scaled products, [batch, heads, rows, seq_k], as scores: changed by the parts, -inf where a key is hidden.
    seen: Callable[[torch.Tensor], torch.Tensor]
    dtype: torch.dtype  # of the output
    rounds: tuple[str, ...]  # the roundings that a manifest declares
    policy: str
    sinks: torch.Tensor | None = None  # scores that have no value, [batch or 1, heads or 1, rows or 1, n]
    conventions: Mapping[str, str] = PLAIN  # that are declared, without plain ones
    # `seen` with the roundings of parts, if the manifest declares any.
    stored: Callable[[torch.Tensor], torch.Tensor] | None = None
    # `seen` without one of the parts that change the scores, by its name in a sentence.
    seen_without: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType({})


class RowTruth(NamedTuple):
    """The true value of each row and the largest error that is allowed, [batch, heads, seq_q] float64.

    `conventions` are those in which a kernel writes them.  Rows of `padding` are not judged.
    """

    exact: torch.Tensor
    allowed: torch.Tensor
    conventions: Mapping[str, str] = PLAIN
    padding: Padding | None = None

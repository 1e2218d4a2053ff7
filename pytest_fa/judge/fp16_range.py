"""Values past the largest number of fp16 that a kernel holds in it: which elements of the output become NaN or Inf."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from pytest_fa.attention.grouped_heads import repeated
from pytest_fa.gpu.inputs import Inputs
from pytest_fa.judge.row_scores import RowScores

# What is larger is Inf in fp16, what is smaller is not; numbers between the two may be rounded to either.
OVERFLOWS, FITS = 65520.0 * (1 + 2**-8), 65520.0 * (1 - 2**-8)


class _Held(NamedTuple):
    """A value that may be held in fp16, and the elements that become NaN or Inf: surely, and perhaps."""

    words: str
    sure: torch.Tensor  # broadcast to [batch, heads, rows, head_dim]
    maybe: torch.Tensor


def fp16_overflows(
    out: torch.Tensor,
    computed: torch.Tensor,  # [batch, heads, seq_q, head_dim]
    inputs: Inputs,
    rows: RowScores,
) -> Iterator[str]:
    """A sentence with the values that, held in fp16, make these elements NaN or Inf and no others; none if none do."""
    bad = rows.selection.of(computed)
    names = []
    for held in _values(inputs, rows, out.dtype):
        sure, maybe = held.sure.expand_as(bad), held.maybe.expand_as(bad)
        if bool(sure.any()) and bool(bad[sure].all()) and not bool((bad & ~maybe).any()):
            names.append(held.words)
    if len(names) == 1:
        yield f"NaN or Inf exactly where {names[0]} is past 65504: it is held in fp16"
    elif names:
        listed = f"{', '.join(names[:-1])} and {names[-1]}"
        yield f"NaN or Inf exactly where {listed} are past 65504: one of them is held in fp16"


def _values(inputs: Inputs, rows: RowScores, dtype: torch.dtype) -> Iterator[_Held]:
    heads, sees = inputs.q.shape[1], ~rows.hidden
    v = repeated(inputs.v.double(), heads)
    p = torch.exp(rows.scores - rows.largest.clamp_min(torch.finfo(torch.float64).min)[..., None])  # [b, h, rows, keys]
    products = p @ v
    yield _of_elements("P V before the division by the row sum", products)
    if dtype == torch.float16:
        return
    yield _of_elements("the output", products / p.sum(-1, keepdim=True).clamp_min(1e-300))
    large, perhaps = v.abs() > OVERFLOWS, v.abs() > FITS
    # A hidden key is multiplied by a P of zero, or skipped.
    yield _Held("V", (sees.double() @ large.double()) > 0, perhaps.any(2, keepdim=True))
    q, k = rows.selection.of(inputs.q).double(), repeated(inputs.k.double(), heads)
    yield _of_rows("Q", q.abs().amax(-1))
    yield _of_rows("Q * scale", (q * inputs.scale).abs().amax(-1))
    size_k = k.abs().amax(-1)[:, :, None]  # [b, h, 1, keys]
    yield _Held(
        "K",
        ((size_k > OVERFLOWS) & sees).any(-1, keepdim=True),
        (size_k > FITS).any(-1, keepdim=True),
    )
    yield _of_rows("a score", rows.largest, (rows.scores.masked_fill(rows.hidden, 0.0)).abs().amax(-1))
    products = rows.scores.masked_fill(rows.hidden, 0.0) / (inputs.scale or math.inf)
    yield _of_rows("Q K^T", (products * math.copysign(1, inputs.scale)).amax(-1), products.abs().amax(-1))


def _of_elements(words: str, values: torch.Tensor) -> _Held:
    return _Held(words, values.abs() > OVERFLOWS, values.abs() > FITS)


def _of_rows(words: str, sure: torch.Tensor, maybe: torch.Tensor | None = None) -> _Held:
    """Rows with such a value are NaN as a whole."""
    return _Held(words, (sure > OVERFLOWS)[..., None], ((sure if maybe is None else maybe) > FITS)[..., None])

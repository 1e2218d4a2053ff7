"""The likely cause of a wrong log-sum-exp beside a right output: known mistakes, each tried on the same inputs."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from pytest_fa.gpu.inputs import Inputs, is_poison
from pytest_fa.judge.log_sum_exp import LseTruth, exact_lse
from pytest_fa.judge.truth import hidden_keys, repeated_heads, rows_per_block

TILES = (16, 32, 64, 128, 256)  # keys
TOLERANCE = 2e-3  # of a mistake's value, besides the bound of the row: P may be rounded differently in it
FITTING_SHARE = 0.98  # of the rows


def explain_lse(lse: torch.Tensor, truth: LseTruth, inputs: Inputs) -> str:
    """The first mistake that gives this log-sum-exp, [batch, heads, seq_q] float32; else in which rows it is wrong."""
    if bool((unwritten := is_poison(lse)).any()):
        return f"the log-sum-exp of {int(unwritten.sum())} of {lse.numel()} rows is not written"
    rows = min(rows_per_block(inputs), lse.shape[2])
    block = slice(lse.shape[2] - rows, lse.shape[2])  # the last queries see the most keys
    written, exact, allowed = (tensor[:, :, block].double() for tensor in (lse, truth.exact, truth.allowed))
    for value, cause in _mistakes(inputs, exact, block):
        has_keys = exact.isfinite() & value.isfinite()
        fits = (written - value).abs() <= allowed + TOLERANCE
        if bool(has_keys.any()) and float(fits[has_keys].double().mean()) >= FITTING_SHARE:
            return cause
    return _where(lse, truth)


def _mistakes(inputs: Inputs, exact: torch.Tensor, block: slice) -> Iterator[tuple[torch.Tensor, str]]:
    """The values of each mistake in some rows, [batch, heads, rows] float64, and its sentence."""
    yield exact / math.log(2), "the log-sum-exp is log2, it must be the natural logarithm: multiply it by ln 2"
    yield exact * math.log(2), "the log-sum-exp is multiplied by ln 2 once too often"
    k = repeated_heads(inputs.k, inputs.q)
    products = inputs.q[:, :, block].double() @ k.transpose(2, 3)
    if (hidden := hidden_keys(inputs, block)) is not None:
        products = products.masked_fill(hidden, -math.inf)
    yield exact_lse(products), "the scale is missing in the log-sum-exp"
    scores = products * inputs.scale
    row_max = scores.amax(-1) if scores.shape[-1] else exact
    yield exact - row_max, "the row max is left out of the log-sum-exp: it is log(l), it must be m + log(l)"
    yield row_max, "the log-sum-exp is only the row max: log(l) is missing"
    for tile in TILES:
        if kept := (scores.shape[-1] - 1) // tile * tile:
            cause = f"the last tile of {tile} keys is left out of the log-sum-exp"
            yield exact_lse(scores[..., :kept]), cause


def _where(lse: torch.Tensor, truth: LseTruth) -> str:
    """In which rows a log-sum-exp is wrong."""
    bad = ~((lse.double() - truth.exact).abs() <= truth.allowed) & (lse.double() != truth.exact)
    no_keys = truth.exact == -math.inf
    if bool(bad.any()) and not bool((bad & ~no_keys).any()):
        return "the log-sum-exp of rows without keys must be -inf"
    queries = bad.any(0).any(0).nonzero().flatten()
    first, last = (int(queries[0]), int(queries[-1])) if len(queries) else (0, 0)
    return f"wrong in {int(bad.sum())} rows, of queries {first} to {last}; no known mistake gives this log-sum-exp"

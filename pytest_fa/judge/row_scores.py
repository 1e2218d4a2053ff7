"""The scores of the rows of an output in a few figures: where exp overflows or underflows follows from them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from pytest_fa.attention import parts
from pytest_fa.attention.mistake import Positions
from pytest_fa.gpu.inputs import Inputs
from pytest_fa.judge.mistaken import Selection, all_hidden

MAX_SCORES = 2**22  # scores that are computed to find the rows that overflow
# exp(-16.6) is the smallest fp16, exp(-104) the smallest float32.
FAR_BELOW = -16.0
ALL_FAR_BELOW = -87.0
LARGEST_WORDS = "the row maximum starts at a finite number, or is not subtracted: start it at -inf"


class RowScores(NamedTuple):
    """Figures of some rows, [batch, heads, rows] each, sinks among the scores; -inf in a row without any."""

    selection: Selection
    largest: torch.Tensor
    logsumexp: torch.Tensor
    hidden: torch.Tensor  # [rows, keys]
    scores: torch.Tensor  # [batch, heads, rows, keys] float64, -inf where a key is hidden


def row_scores(inputs: Inputs) -> RowScores:
    """The figures of as many rows, evenly spread, as have MAX_SCORES scores."""
    batch, heads, seq_q, _ = inputs.q.shape
    count = max(1, MAX_SCORES // max(1, batch * heads * inputs.k.shape[2]))
    queries = torch.arange(0, seq_q, max(1, -(-seq_q // count)), device=inputs.q.device)
    selection = Selection.all(inputs.q)._replace(queries=queries)
    k = inputs.k.repeat_interleave(heads // inputs.k.shape[1], 1).double()
    scores = (selection.of(inputs.q).double() * inputs.scale) @ k.transpose(2, 3)
    positions = positions_of(inputs, queries)
    hidden = all_hidden(inputs, positions)
    scores = parts.changed_scores(inputs, scores, positions).masked_fill(hidden, -math.inf)
    largest, logsumexp = scores.amax(-1), scores.logsumexp(-1)
    if (sinks := parts.sinks(inputs, positions)) is not None:
        largest = largest.maximum(sinks.amax(-1))
        logsumexp = logsumexp.logaddexp(sinks.logsumexp(-1))
    return RowScores(selection, largest, logsumexp, hidden, scores)


def positions_of(inputs: Inputs, queries: torch.Tensor) -> Positions:
    """The positions of some queries and of all keys."""
    return parts.positions_of(inputs, queries, torch.arange(inputs.k.shape[2], device=queries.device))


def rows_far_below(bad_rows: torch.Tensor, inputs: Inputs) -> str:
    """Which rows are bad, [batch, heads, seq_q], if these are all those whose scores are far below 0; else empty."""
    rows = row_scores(inputs)
    bad, sees = rows.selection.of(bad_rows), rows.largest > -math.inf
    if not bool(bad.any()) or bool((bad & ~sees).any()):
        return ""
    most = float(rows.largest[bad].max())
    others = rows.largest[sees & ~bad]
    if not others.numel():
        return f"in every row, and all scores are below {most:.3g}" if most < ALL_FAR_BELOW else ""
    if most < FAR_BELOW and most < float(others.min()):
        return f"exactly in the rows whose scores are all below {most:.3g}"
    return ""

"""Attention with a mistake: the output that a wrong kernel computes, in float64, for some of its heads and queries."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from pytest_fa.attention import parts
from pytest_fa.attention.mistake import Mistake, Positions, Weigh, exponentials
from pytest_fa.catalog.variant import Rounding
from pytest_fa.gpu.inputs import Inputs
from pytest_fa.judge.float32_error import UNIT, Float32Error
from pytest_fa.judge.truth import Operands, Precision, Spread, Truth, added_by, scaled_scores, truth_of_rows

MAX_KEPT = 2**23  # elements of K or V in float64, 64 MB


class Selection(NamedTuple):
    """Some batches, heads and queries of an output, as indices."""

    batches: torch.Tensor
    heads: torch.Tensor
    queries: torch.Tensor

    @classmethod
    def all(cls, q: torch.Tensor) -> Selection:
        """Everything of an output like `q`."""
        batches, heads, queries = (torch.arange(size, device=q.device) for size in q.shape[:3])
        return cls(batches, heads, queries)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The selected part of [batch, heads, seq_q, ...]."""
        return tensor[self.batches][:, self.heads][:, :, self.queries]

    def of_truth(self, truth: Truth) -> Truth:
        """The selected part of truth."""
        spread = truth.spread and Spread(
            self.of(truth.spread.of_sum),
            self.of(truth.spread.along_row),
            truth.spread.largest_v[self.batches][:, self.heads],
        )
        error = truth.float32_error and Float32Error(*(self.of(tensor) for tensor in truth.float32_error))
        parts = (self.of(tensor) for tensor in (truth.out, truth.same_precision, truth.row_size))
        out, same_precision, row_size = parts
        norm4_size = None if truth.norm4_size is None else self.of(truth.norm4_size)
        return Truth(out, same_precision, truth.terms, row_size, spread, error, norm4_size)


def scores_needed(mistake: Mistake, inputs: Inputs, selection: Selection) -> int:
    """The number of scores that `Predictor.predict` computes."""
    if mistake.is_arranged_truth:
        return 0
    if mistake.arrange is None or mistake.arranges_rows:
        queries = inputs.q.shape[2] if mistake.needs_all_queries else len(selection.queries)
        return len(selection.batches) * len(selection.heads) * queries * inputs.k.shape[2]
    changed = mistake.change(inputs) if mistake.change else inputs
    return math.prod(changed.q.shape[:3]) * changed.k.shape[2]


class _SharedOperands(NamedTuple):
    """What mistakes have in common: Q of a selection, its K and V in float64, and the right scores."""

    selection: Selection
    q: torch.Tensor
    operands: Operands
    scores: torch.Tensor  # [batch, heads, rows, seq_k]


class Predictor:
    """Computes the output that a mistake gives on the inputs of a wrong output, which hold exact values.

    It keeps K, V and the scores in float64 for each selection, if they are small: many mistakes are tried on them.
    Without `with_sizes`, it is quicker, and the sizes of rows are NaN.
    """

    def __init__(
        self, inputs: Inputs, truth: Truth, rounds: tuple[Rounding, ...] = (), *, with_sizes: bool = True
    ) -> None:
        self.inputs, self.truth, self.rounds, self.with_sizes = inputs, truth, rounds, with_sizes
        self._kept: list[_SharedOperands] = []

    def with_rounds(self, rounds: tuple[Rounding, ...]) -> Predictor:
        """The same with other roundings."""
        return Predictor(self.inputs, self.truth, rounds)

    def predict(self, mistake: Mistake, selection: Selection) -> Truth:
        """The selected part of a mistake's output, in the form of a truth: exact, and as an ideal kernel rounds it.

        Rows that belong to no query are 0, as in the output that is compared with it.
        """
        predicted = self._predict(mistake, selection)
        if (padding := parts.padding(self.inputs)) is None:
            return predicted
        rows = selection.of(padding.rows.expand(self.inputs.q.shape[:3]))[..., None]
        out, same_precision = (each.masked_fill(rows, 0.0) for each in (predicted.out, predicted.same_precision))
        return predicted._replace(out=out, same_precision=same_precision)

    def _predict(self, mistake: Mistake, selection: Selection) -> Truth:
        if mistake.arrange is not None and mistake.is_arranged_truth:
            return selection.of_truth(arranged(mistake.arrange, self.truth, self.truth, self.inputs.output_dtype))
        changed = mistake.change(self.inputs) if mistake.change else self.inputs
        if mistake.arrange is not None:
            if mistake.arranges_rows:
                rows, right = self._attend(changed, mistake, selection), selection.of_truth(self.truth)
                return arranged(mistake.arrange, rows, right, self.inputs.output_dtype)
            whole = self._attend(changed, mistake, Selection.all(changed.q))
            return selection.of_truth(arranged(mistake.arrange, whole, self.truth, self.inputs.output_dtype))
        if not mistake.needs_all_queries:
            return self._attend(changed, mistake, selection)
        whole_heads = selection._replace(queries=torch.arange(changed.q.shape[2], device=changed.q.device))
        every_pair = Selection.all(selection.of(changed.q))
        return every_pair._replace(queries=selection.queries).of_truth(self._attend(changed, mistake, whole_heads))

    def weights(self, selection: Selection) -> torch.Tensor:
        """P = exp(S - max) of the selection without any mistake, [b, h, rows, keys]."""
        inputs = self.inputs
        k = of_heads(inputs.k, inputs.q, selection).double()
        scores = (selection.of(inputs.q).double() * inputs.scale) @ k.transpose(2, 3)
        return self.weights_of(scores, selection)

    def weights_of(self, scores: torch.Tensor, selection: Selection) -> torch.Tensor:
        """P = exp(S - max) of the selection for these scores, which are scaled, [b, h, rows, keys]."""
        inputs = self.inputs
        positions = self._positions(inputs, Mistake(""), selection)
        changed = parts.changed_scores(inputs, scores, positions)
        hidden, sinks = _hidden(inputs, Mistake(""), positions), parts.sinks(inputs, positions)
        return _weighed(lambda *each: (exponentials(*each),) * 2, changed, hidden, sinks)[0]

    def sink_weights(self, selection: Selection) -> torch.Tensor:
        """The sum of P over the sinks of the selection, to the maximum of `weights`, [b, h, rows]; 0 without any."""
        inputs = self.inputs
        positions = self._positions(inputs, Mistake(""), selection)
        p = self.weights(selection)
        if (sinks := parts.sinks(inputs, positions)) is None:
            return torch.zeros_like(p[..., 0])
        row_sums = self.row_sums(selection)
        ratio = (sinks.logsumexp(-1) - row_sums).exp()  # of the sinks' weight to that of the keys
        return torch.where(row_sums == -math.inf, 1.0, ratio * p.sum(-1))

    def row_sums(self, selection: Selection) -> torch.Tensor:
        """The log of the sum of exp(S) of the selection without any mistake, [b, h, rows]; -inf without a key."""
        inputs, plain = self.inputs, Mistake("")
        k = of_heads(inputs.k, inputs.q, selection).double()
        positions = self._positions(inputs, plain, selection)
        scores = (selection.of(inputs.q).double() * inputs.scale) @ k.transpose(2, 3)
        changed = parts.changed_scores(inputs, scores, positions)
        return changed.masked_fill(_hidden(inputs, plain, positions), -math.inf).logsumexp(-1)

    @property
    def _precision(self) -> Precision:
        return Precision.of(self.inputs, self.rounds, p_in_e4m3=self.truth.spread is not None)

    def _attend(self, inputs: Inputs, mistake: Mistake, selection: Selection) -> Truth:
        operands = self._operands(inputs, selection)
        positions, precision = self._positions(inputs, mistake, selection), self._precision
        hidden = _hidden(inputs, mistake, positions)
        change = mistake.score or partial(parts.changed_scores, inputs)
        sinks = mistake.sinks(positions) if mistake.sinks else parts.sinks(inputs, positions)

        def softmax(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return _weighed(mistake.weigh, change(scores, positions), hidden, sinks)

        scores = self._scores(inputs, operands)
        adds = added_by(inputs, positions)
        q = self._q(inputs, selection)
        return truth_of_rows(q, operands, softmax, precision, scores, adds, with_sizes=self.with_sizes)

    def _q(self, inputs: Inputs, selection: Selection) -> torch.Tensor:
        """Q of the selected heads and queries."""
        for kept in self._kept if inputs.q is self.inputs.q else ():
            if kept.selection is selection:
                return kept.q
        return selection.of(inputs.q)

    def _operands(self, inputs: Inputs, selection: Selection) -> Operands:
        """K and V of the selected heads, in float64."""
        is_unchanged = inputs.k is self.inputs.k and inputs.v is self.inputs.v and inputs.q.shape == self.inputs.q.shape
        for kept in self._kept if is_unchanged else ():
            if kept.selection is selection:
                return kept.operands._replace(scale=inputs.scale)
        k, v = (of_heads(tensor, inputs.q, selection).double() for tensor in (inputs.k, inputs.v))
        operands = Operands.of(k, v, inputs.scale, with_spread=self.truth.spread is not None)
        if is_unchanged and k.numel() <= MAX_KEPT:
            right = operands._replace(scale=self.inputs.scale)
            q = selection.of(self.inputs.q)
            self._kept.append(_SharedOperands(selection, q, operands, scaled_scores(q, right)))
        return operands

    def _scores(self, inputs: Inputs, operands: Operands) -> torch.Tensor | None:
        """The scores if no mistake changed them before the softmax; None to compute them."""
        if inputs.q is not self.inputs.q or inputs.scale != self.inputs.scale:
            return None
        return next((kept.scores for kept in self._kept if kept.operands.k is operands.k), None)

    def _positions(self, inputs: Inputs, mistake: Mistake, selection: Selection) -> Positions:
        keys = torch.arange(inputs.k.shape[2], device=inputs.q.device)
        seq_k = (self.inputs if mistake.arrange is None else inputs).k.shape[2]  # without keys past the end
        positions = parts.positions_of(inputs, selection.queries, keys)._replace(
            seq_k=seq_k, heads=selection.heads, batches=selection.batches
        )
        if mistake.shift is None:
            return positions
        shift = inputs.q.new_zeros((1, 1, 1, 1), dtype=torch.long) + mistake.shift
        return positions._replace(shift=shift)


def _hidden(inputs: Inputs, mistake: Mistake, positions: Positions) -> torch.Tensor:
    """The keys that a wrong kernel hides, [rows, keys] or with batch and heads."""
    return mistake.hide(positions) if mistake.hide else all_hidden(inputs, positions)


def _weighed(
    weigh: Weigh, scores: torch.Tensor, hidden: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """P of the keys and the divisor; to `weigh`, sinks are visible keys behind the last one."""
    if sinks is None:
        return weigh(scores, hidden)
    keys, sinks = scores.shape[3], sinks.expand(*scores.shape[:3], -1)
    hidden = hidden.expand(*scores.shape)
    seen = torch.zeros(sinks.shape, dtype=torch.bool, device=sinks.device)
    p, divisor = weigh(torch.cat([scores, sinks], -1), torch.cat([hidden, seen], -1))
    return p[..., :keys], divisor


def all_hidden(inputs: Inputs, positions: Positions) -> torch.Tensor:
    """The keys that the parts of attention hide, [rows, keys] or with batch and heads."""
    hidden = parts.hidden_keys(inputs, positions)
    return positions.nothing_hidden if hidden is None else hidden


def of_heads(tensor: torch.Tensor, q: torch.Tensor, selection: Selection) -> torch.Tensor:
    """K or V of the selected query heads, [b, h, seq_k, d]."""
    return tensor[selection.batches][:, selection.heads // (q.shape[1] // tensor.shape[1])]


def arranged(arrange: Callable[[torch.Tensor], torch.Tensor], whole: Truth, truth: Truth, dtype: torch.dtype) -> Truth:
    """A whole output and its rounded form, arranged.

    The size of a row is that of its elements.  Any key may outweigh all others.
    """
    out = arrange(whole.out)
    same_precision = arrange(whole.same_precision).to(dtype).double()
    error = whole.float32_error
    if error is not None:  # `arrange` may move elements, multiply them or replace them
        deviation, bias = ((arrange(whole.out + part) - out).abs() for part in error)
        error = Float32Error((deviation.square() + (UNIT * out).square()).sqrt(), bias)
    row_size = out.square().mean(-1).sqrt()
    norm4_size = None if truth.norm4_size is None else row_size
    return Truth(out, same_precision, truth.terms, row_size, truth.spread, error, norm4_size)

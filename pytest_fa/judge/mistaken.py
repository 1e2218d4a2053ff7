"""Attention with a mistake: the output that a wrong kernel computes, in float64, for some of its heads and queries."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from pytest_fa.catalog.variant import Rounding
from pytest_fa.gpu.inputs import Inputs
from pytest_fa.judge.float32_error import UNIT, Float32Error
from pytest_fa.judge.truth import Operands, Precision, Spread, Truth, truth_of_rows

_LOWEST = torch.finfo(torch.float64).min  # replaces a maximum of -inf: exp(-inf - _LOWEST) = 0

# scores [b, h, rows, keys] and hidden [rows, keys] -> P before the division [b, h, rows, keys], divisor [b, h, rows, 1]
Weigh = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Mask(NamedTuple):
    """The positions that a mask compares: queries [rows, 1] and keys [keys], and the sizes of the case."""

    queries: torch.Tensor
    keys: torch.Tensor
    seq_q: int
    seq_k: int

    def shift(self, causal: str) -> int:
        """The number of keys that query 0 sees besides key 0."""
        return self.seq_k - self.seq_q if causal == "bottom_right" else 0

    def hidden(self, causal: str, wider: int = 0) -> torch.Tensor:
        """True where a key is hidden, [rows, keys]; each query sees `wider` keys too many."""
        if causal == "none":
            return torch.zeros(len(self.queries), len(self.keys), dtype=torch.bool, device=self.keys.device)
        return self.keys > self.queries + self.shift(causal) + wider


Hide = Callable[[Mask], torch.Tensor]  # the keys that each query does not see, [rows, keys]


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
        return Truth(out, same_precision, truth.terms, row_size, spread, error)


def softmax(scores: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """P = exp(S - max) and its row sum: no mistake."""
    p = exponentials(scores, hidden)
    return p, p.sum(-1, keepdim=True)


def exponentials(scores: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """exp(S - max), zero where a key is hidden."""
    scores = scores.masked_fill(hidden, -math.inf)
    return torch.exp(scores - scores.amax(-1, keepdim=True).clamp_min(_LOWEST))


class Mistake(NamedTuple):
    """One mistake: words for it, and how its output differs from attention.

    `change` replaces inputs.  `hide` replaces the mask.  `weigh` replaces the softmax.  `arrange` moves or changes the
    elements of the whole output, [batch, heads, seq_q, head_dim] or the axes that `change` made of them.
    """

    words: str
    change: Callable[[Inputs], Inputs] | None = None
    hide: Hide | None = None
    weigh: Weigh = softmax
    arrange: Callable[[torch.Tensor], torch.Tensor] | None = None
    needs_all_queries: bool = False

    @property
    def moves_elements(self) -> bool:
        """Whether it changes tensors: two directions of one transposition have equal words and unequal outputs."""
        return self.arrange is not None or self.change is not None

    @property
    def is_arranged_truth(self) -> bool:
        """Whether the output is the right one, only arranged in another way."""
        return self.arrange is not None and self.change is None and self.hide is None and self.weigh is softmax

    def scores_needed(self, inputs: Inputs, selection: Selection) -> int:
        """The number of scores that `predict` computes."""
        if self.is_arranged_truth:
            return 0
        if self.arrange is None:
            queries = inputs.q.shape[2] if self.needs_all_queries else len(selection.queries)
            return len(selection.batches) * len(selection.heads) * queries * inputs.k.shape[2]
        changed = self.change(inputs) if self.change else inputs
        return math.prod(changed.q.shape[:3]) * changed.k.shape[2]


class Predictor(NamedTuple):
    """Computes the output that a mistake gives on the inputs of a wrong output, which hold exact values."""

    inputs: Inputs
    truth: Truth
    rounds: tuple[Rounding, ...] = ()

    def predict(self, mistake: Mistake, selection: Selection) -> Truth:
        """The selected part of a mistake's output, in the form of a truth: exact, and as an ideal kernel rounds it."""
        if mistake.arrange is not None and mistake.is_arranged_truth:
            return selection.of_truth(arranged(mistake.arrange, self.truth, self.truth, self.inputs.output_dtype))
        changed = mistake.change(self.inputs) if mistake.change else self.inputs
        if mistake.arrange is not None:
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
        k = _of_heads(inputs.k, inputs.q, selection).double()
        scores = (selection.of(inputs.q).double() * inputs.scale) @ k.transpose(2, 3)
        return exponentials(scores, self._hidden(inputs, Mistake(""), selection))

    @property
    def _precision(self) -> Precision:
        return Precision.of(self.inputs, self.rounds, p_in_e4m3=self.truth.spread is not None)

    def _attend(self, inputs: Inputs, mistake: Mistake, selection: Selection) -> Truth:
        k, v = (_of_heads(tensor, inputs.q, selection).double() for tensor in (inputs.k, inputs.v))
        operands = Operands.of(k, v, inputs.scale, with_spread=self.truth.spread is not None)
        hidden, precision = self._hidden(inputs, mistake, selection), self._precision
        return truth_of_rows(selection.of(inputs.q), operands, lambda s: mistake.weigh(s, hidden), precision)

    def _hidden(self, inputs: Inputs, mistake: Mistake, selection: Selection) -> torch.Tensor:
        keys = torch.arange(inputs.k.shape[2], device=inputs.q.device)
        seq_k = (self.inputs if mistake.arrange is None else inputs).k.shape[2]  # without keys past the end
        mask = Mask(selection.queries[:, None], keys, inputs.q.shape[2], seq_k)
        return mistake.hide(mask) if mistake.hide else mask.hidden(inputs.causal)


def _of_heads(tensor: torch.Tensor, q: torch.Tensor, selection: Selection) -> torch.Tensor:
    """K or V of the selected query heads, [b, h, seq_k, d]."""
    return tensor[selection.batches][:, selection.heads // (q.shape[1] // tensor.shape[1])]


def arranged(arrange: Callable[[torch.Tensor], torch.Tensor], whole: Truth, truth: Truth, dtype: torch.dtype) -> Truth:
    """A whole output and its rounded form, arranged; the size of a row is that of its elements."""
    out = arrange(whole.out)
    same_precision = arrange(whole.same_precision).to(dtype).double()
    error = whole.float32_error
    if error is not None:  # `arrange` may move elements, multiply them or replace them
        deviation, bias = ((arrange(whole.out + part) - out).abs() for part in error)
        error = Float32Error((deviation.square() + (UNIT * out).square()).sqrt(), bias)
    return Truth(out, same_precision, truth.terms, out.square().mean(-1).sqrt(), truth.spread, error)

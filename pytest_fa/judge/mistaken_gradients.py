"""Backward passes with a mistake: the gradients that a wrong kernel computes, in float64, for some queries and keys.

A backward pass is a list of steps (`STEPS`).  A mistake replaces some of them.  dQ is computed for a few queries and
all keys, dK and dV for a few keys and all queries, so that long sequences fit into memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from pytest_fa.attention import parts
from pytest_fa.attention.lse import exact_lse, finite
from pytest_fa.gpu.inputs import Inputs
from pytest_fa.judge.gradients import Upstream, readers_of, scores_and_slope, without_padding
from pytest_fa.judge.mistaken import all_hidden
from pytest_fa.judge.truth import Truth, block_positions, repeated_heads, rounded_to, rows_per_block

NAMES = ("dq", "dk", "dv")
# Mostly a tensor, [1, heads, rows, ...] float64, with the heads of Q also for K and V.
GradientStep = Callable[["Pass"], Any]


class GradientMistake(NamedTuple):
    """One mistake: words for it, with a place for the names of gradients if it may be in each of them alone."""

    words: str
    steps: Mapping[str, GradientStep] = {}
    names: tuple[str, ...] = NAMES  # the gradients that it may change
    change: Callable[[Inputs], Inputs] | None = None  # what it reads in place of the inputs
    # What it makes of a right gradient, [1, heads, rows, dim] float64, in place of all steps.
    arrange: Callable[[torch.Tensor], torch.Tensor] | None = None
    factor: float = 1.0  # of what the steps give


class BackwardCall(NamedTuple):
    """One batch of a backward call in float64; tensors of K and V have the heads of Q."""

    inputs: Inputs
    k: torch.Tensor  # [1, heads, seq_k, head_dim]
    v: torch.Tensor  # [1, heads, seq_k, head_dim_v]
    out: torch.Tensor  # [1, heads, seq_q, head_dim_v]
    dout: torch.Tensor  # [1, heads, seq_q, head_dim_v]
    dlse: torch.Tensor  # [1, heads, seq_q, 1]
    delta: torch.Tensor  # [1, heads, seq_q, 1]
    readers: list[list[int]]  # for each head of K and V, the heads of Q that read it
    # Figures of the scores of each row, zero in a row that sees nothing, [1, heads, seq_q, 1] each.
    lse: torch.Tensor
    lse_of_keys: torch.Tensor  # without sinks
    row_max: torch.Tensor

    @classmethod
    def of(cls, inputs: Inputs, upstream: Upstream, batch: int) -> BackwardCall:
        """A batch of a call."""
        readers, given = readers_of(inputs), without_padding(inputs, upstream)
        inputs = _of_batch(inputs.exact().meant(), batch)
        out, dout, dlse = (tensor[batch : batch + 1].double() for tensor in given)
        k, v = (repeated_heads(tensor, inputs.q) for tensor in (inputs.k, inputs.v))
        delta = (dout * out).sum(-1, keepdim=True)
        return cls(inputs, k, v, out, dout, dlse[..., None], delta, readers, *_row_figures(inputs, k))

    def changed(self, change: Callable[[Inputs], Inputs] | None) -> BackwardCall:
        """The same with other inputs, but with the log-sum-exp that the kernel gets."""
        if change is None:
            return self
        inputs = change(self.inputs)
        k, v = (repeated_heads(tensor, inputs.q) for tensor in (inputs.k, inputs.v))
        return self._replace(inputs=inputs, k=k, v=v)


def _of_batch(inputs: Inputs, batch: int) -> Inputs:
    place = torch.tensor([batch], device=inputs.q.device)
    return inputs.map(lambda tensor: tensor[place])._replace(extra=inputs.extra_at(batches=place), given=None)


def _row_figures(inputs: Inputs, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The log-sum-exp of each row, that without sinks and the largest score, [1, heads, seq_q, 1] each."""
    queries, step = inputs.q.shape[2], rows_per_block(inputs)
    blocks = (slice(start, min(start + step, queries)) for start in range(0, queries, step))
    of_blocks = [_figures_of(inputs, k, block) for block in blocks]
    lse, of_keys, row_max = (finite(torch.cat(each, 2))[..., None] for each in zip(*of_blocks, strict=True))
    return lse, of_keys, row_max


def _figures_of(inputs: Inputs, k: torch.Tensor, block: slice) -> tuple[torch.Tensor, ...]:
    positions = block_positions(inputs, block)
    products = inputs.scale * (inputs.q[:, :, block].double() @ k.mT)
    scores = parts.changed_scores(inputs, products, positions).masked_fill(all_hidden(inputs, positions), -torch.inf)
    of_keys = exact_lse(scores)
    row_max = scores.amax(-1) if scores.shape[-1] else of_keys
    return exact_lse(scores, parts.sinks(inputs, positions)), of_keys, row_max


class Pass:
    """The part of a backward pass for some queries and keys.  Each step is an attribute, which is computed once."""

    def __init__(
        self,
        problem: BackwardCall,
        queries: torch.Tensor,
        keys: torch.Tensor,
        steps: Mapping[str, GradientStep],
        dtype: torch.dtype | None = None,  # to which P and dS are rounded before they are summed; None: not at all
    ) -> None:
        self.problem, self.inputs, self.scale = problem, problem.inputs, problem.inputs.scale
        self.queries, self.keys, self.dtype = queries, keys, dtype
        self._steps = {**STEPS, **steps}

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # of the step's type
        value = self._steps[name](self)
        setattr(self, name, value)
        return value

    def reuse(self, right: Pass, steps: Mapping[str, GradientStep]) -> Pass:
        """Take what comes before the first of some steps from a pass of the same queries and keys."""
        for name in STEPS:
            if name in steps:
                break
            setattr(self, name, getattr(right, name))
        return self

    def at_queries(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of [1, heads, seq_q, ...] for the queries."""
        return tensor[:, :, self.queries]

    def at_keys(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of [1, heads, seq_k, ...] for the keys."""
        return tensor[:, :, self.keys]

    def rounded(self, matrix: torch.Tensor) -> torch.Tensor:
        """A matrix as a product reads it."""
        return matrix if self.dtype is None else rounded_to(matrix, self.dtype)

    def of_group(self, gradient: torch.Tensor, heads: Callable[[list[int]], list[int]] = list) -> torch.Tensor:
        """The sums over the heads that share one of K and V, or over some of them: [1, kv_heads, keys, dim]."""
        return torch.stack([gradient[:, heads(each)].sum(1) for each in self.problem.readers], 1)


def p_of(each: Pass, scores: torch.Tensor, lse: torch.Tensor | float) -> torch.Tensor:
    """P of visible keys."""
    return (scores - lse).exp().masked_fill(each.hidden, 0.0)


# In an order in which each one needs only earlier ones.
STEPS: Mapping[str, GradientStep] = {
    "q": lambda each: each.at_queries(each.inputs.q).double(),
    "k": lambda each: each.at_keys(each.problem.k),
    "v": lambda each: each.at_keys(each.problem.v),
    "out": lambda each: each.at_queries(each.problem.out),
    "dout": lambda each: each.at_queries(each.problem.dout),
    "dlse": lambda each: each.at_queries(each.problem.dlse),
    "products": lambda each: each.scale * (each.q @ each.k.mT),
    "positions": lambda each: parts.positions_of(each.inputs, each.queries, each.keys),  # what a mask compares
    "hidden": lambda each: all_hidden(each.inputs, each.positions),
    "scores": lambda each: parts.changed_scores(each.inputs, each.products, each.positions),
    "slope": lambda each: scores_and_slope(each.inputs, each.products.detach().clone(), each.positions)[1],
    "lse": lambda each: each.at_queries(each.problem.lse),
    "p": lambda each: p_of(each, each.scores, each.lse),
    "dp": lambda each: each.dout @ each.v.mT,
    "delta": lambda each: each.at_queries(each.problem.delta),
    "p_of_ds": lambda each: each.p,
    "ds": lambda each: each.p_of_ds * (each.dp - each.delta + each.dlse) * each.slope,
    "ds_of_dq": lambda each: each.ds,
    "ds_of_dk": lambda each: each.ds,
    "p_of_dv": lambda each: each.p,
    "k_of_dq": lambda each: each.k,
    "q_of_dk": lambda each: each.q,
    "dout_of_dv": lambda each: each.dout,
    "product": lambda _: torch.matmul,
    "summed": lambda each: each.of_group,  # over the heads that share one of K and V
}
GRADIENTS: Mapping[str, GradientStep] = {
    "dq": lambda each: each.scale * each.product(each.rounded(each.ds_of_dq), each.k_of_dq),
    "dk": lambda each: each.summed(each.scale * each.product(each.rounded(each.ds_of_dk).mT, each.q_of_dk)),
    "dv": lambda each: each.summed(each.product(each.rounded(each.p_of_dv).mT, each.dout_of_dv)),
}


class GradientPlaces(NamedTuple):
    """The part of the gradients of one batch that is compared, as indices."""

    batch: int
    queries: torch.Tensor
    keys: torch.Tensor

    def rows(self, name: str) -> torch.Tensor:
        """The queries or the keys: the rows of a gradient."""
        return self.queries if name == "dq" else self.keys

    def of(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a gradient, [batch, heads, rows, ...]."""
        return tensor[self.batch : self.batch + 1][:, :, self.rows(name)]

    def of_truth(self, name: str, truth: Truth) -> Truth:
        """The part of a truth."""
        out, same_precision, row_size = (
            self.of(name, each) for each in (truth.out, truth.same_precision, truth.row_size)
        )
        noise, lost = (None if each is None else self.of(name, each) for each in (truth.row_noise, truth.row_lost))
        return Truth(
            *(out, same_precision, truth.terms, row_size),
            row_factor=truth.row_factor,
            row_noise=noise,
            row_lost=lost,
        )


class GradientPredictor:
    """Computes the gradients that a mistake gives at some places of a call."""

    def __init__(self, problem: BackwardCall, truths: Mapping[str, Truth], places: GradientPlaces) -> None:
        self.problem, self.truths, self.places = problem, truths, places
        self._right: dict[tuple[bool, torch.dtype | None], Pass] = {}

    def summed_by(self, product: GradientStep, name: str) -> torch.Tensor:
        """A gradient of an ideal kernel that sums in another way, [1, heads, rows, dim] float64."""
        return self._result(GradientMistake("", {"product": product}), name, self.problem.inputs.output_dtype)

    def exact(self, mistake: GradientMistake, name: str) -> torch.Tensor:
        """What a mistake gives, [1, heads, rows, dim] float64."""
        return self._result(mistake, name, None)

    def predict(self, mistake: GradientMistake, name: str) -> Truth:
        """The same in the form of a truth, with what an ideal kernel with the mistake gives."""
        right, dtype = self.places.of_truth(name, self.truths[name]), self.problem.inputs.output_dtype
        out, ideal = (self._result(mistake, name, rounds) for rounds in (None, dtype))
        size = torch.maximum(right.row_size, out.square().mean(-1).sqrt())
        return right._replace(out=out, same_precision=rounded_to(ideal, dtype), row_size=size)

    def right(self, name: str, dtype: torch.dtype | None = None) -> Pass:
        """The pass without a mistake from which a gradient is summed."""
        kind = (name == "dq", dtype)
        if kind not in self._right:
            self._right[kind] = self._pass(self.problem, name, {}, dtype)
        return self._right[kind]

    def _result(self, mistake: GradientMistake, name: str, dtype: torch.dtype | None) -> torch.Tensor:
        """A gradient that is exact, or from matrices that are rounded to a dtype."""
        truth = self.truths[name]
        right = truth.out if dtype is None else truth.same_precision
        if name not in mistake.names:
            return self.places.of(name, right)
        if mistake.arrange is not None:
            whole = mistake.arrange(right[self.places.batch : self.places.batch + 1])
            return whole[:, :, self.places.rows(name)]
        each = self._pass(self.problem.changed(mistake.change), name, mistake.steps, dtype)
        if mistake.change is None:
            each.reuse(self.right(name, dtype), mistake.steps)
        gradient: torch.Tensor = GRADIENTS[name](each)
        return gradient * mistake.factor

    def _pass(
        self, problem: BackwardCall, name: str, steps: Mapping[str, GradientStep], dtype: torch.dtype | None
    ) -> Pass:
        """The pass that a gradient needs: dQ needs all keys, dK and dV all queries."""
        device = problem.inputs.q.device
        if name == "dq":
            return Pass(problem, self.places.queries, torch.arange(problem.k.shape[2], device=device), steps, dtype)
        return Pass(problem, torch.arange(problem.out.shape[2], device=device), self.places.keys, steps, dtype)

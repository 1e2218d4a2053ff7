"""The gradients of attention: their truth, the same-precision reference, and the verdict on those of a kernel.

A backward call gets dO, the gradient of the output, and maybe dL, that of the log-sum-exp L.  It also gets the output O
and L of the forward.  Let S0 be the scaled products, S what the parts of attention make of them, and P = exp(S - L):

    dV = P^T dO    dP = dO V^T    delta = sum(dO * O)    dS = P (dP - delta + dL)    dS0 = dS * (derivative of S by S0)
    dQ = scale dS0 K    dK = scale dS0^T Q    dbias = sums of dS    dsink = sum of exp(sink - L) (dL - delta)

Truth is this in float64, with the exact output in delta.  The same-precision reference takes delta from the output that
the kernel gets, which is rounded already, and rounds P, dS0 and the gradients.  With an exact output in its place, a
right kernel would have up to 190 times the reference's error in a row that sees few keys.

Each gradient is compared as an output is (`policies.same_precision`), with what `Truth` has for it:

- The size of a row, to which its error is in proportion, is that before dP and delta cancel (`row_size`).
- A row may have 6 times its expected error (`row_factor`).  Simulated right kernels use 0.4 of that at most.
- Where dP and delta cancel to nothing, the error of their float32 sums and of exp(S - L) remains (`row_noise`).
- Few numbers may make up a gradient, which the reference may round well by chance (`policies.same_precision`).
- By autograd, a kernel takes delta from an output of its own, whose roundings are others (`OWN_OUT`).
- In a row of small numbers, P and dS are rounded to multiples of the smallest number of the dtype (`row_lost`).

Right kernels use at most 0.9 of any bound, also on hard data (`gradient_data`).  Wrong ones use 1.9 (dQ summed in 16
bits over 2048 keys), 2.9 (P 1 % too large), 5.5 (one key lost in dQ) and others 7 or more
(`tests/unit/judge/backward_kernels.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from pytest_fa.attention import parts
from pytest_fa.attention.backward import DLSE, DOUT, OF_PARTS, OUT, OWN_OUT
from pytest_fa.attention.grouped_heads import key_heads
from pytest_fa.attention.lse import exact_lse, finite
from pytest_fa.attention.mistake import Positions
from pytest_fa.catalog.variant import Rounding
from pytest_fa.errors import UsageProblem
from pytest_fa.gpu.inputs import Inputs
from pytest_fa.judge.float32_error import SMALLEST, UNIT, Float32Error
from pytest_fa.judge.output_check import check_output
from pytest_fa.judge.padding import cleared
from pytest_fa.judge.truth import (
    Operands,
    Truth,
    block_positions,
    repeated_heads,
    rounded_scores,
    rounded_to,
    rows_per_block,
    scaled_scores,
)
from pytest_fa.records.checks import Check

ROW_FACTOR = 6.0
# The error of rounding the smallest numbers: half of that of fp16, and all that float32 may flush to zero.
LOST = {torch.float16: 2.0**-25, torch.bfloat16: SMALLEST}
BLOCK_SHARE = 16  # of the queries of a forward's block, because more tensors of its size live at once
SLOPE_ERROR = 2.0**-15  # of 1 - tanh^2, if tanh is the GPU's fast one, with a relative error of 2^-16.5
EXP_ROUNDINGS = 8  # of exp(S - L) and of what it is multiplied with, besides those of its argument
DSINK = "dsink"


class Upstream(NamedTuple):
    """What a backward call gets besides the inputs of its forward and the log-sum-exp."""

    out: torch.Tensor  # [batch, heads, seq_q, head_dim_v], as the kernel gets it: rounded
    dout: torch.Tensor  # [batch, heads, seq_q, head_dim_v]
    dlse: torch.Tensor | None = None  # [batch, heads, seq_q]; None: zeros


Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # `Upstream`, where all three are tensors


class Sums(NamedTuple):
    """A gradient, or what some queries add to it, with the squares of figures of its rows as `Truth` has them."""

    exact: torch.Tensor  # [batch, heads, rows, dim]
    rounded: torch.Tensor  # [batch, heads, rows, dim], from rounded terms
    size: torch.Tensor  # [batch, heads, rows]
    noise: torch.Tensor  # [batch, heads, rows]
    lost: torch.Tensor  # [batch, heads, rows]


class Terms(NamedTuple):
    """A matrix from which gradients are summed, such as dS: [batch, heads, rows, keys] each."""

    exact: torch.Tensor
    rounded: torch.Tensor  # that of the reference
    size: torch.Tensor  # before dP and delta cancel
    noise: torch.Tensor  # the error of float32 sums
    lost: torch.Tensor  # the error of numbers that are too small for the dtype, or [batch, heads, rows, 1]

    @property
    def transposed(self) -> Terms:
        """Keys and queries exchanged."""
        return Terms(*(tensor.transpose(2, 3) for tensor in self))

    def times(self, factor: torch.Tensor) -> Terms:
        """Each multiplied by a factor."""
        return Terms(*(tensor * factor for tensor in self))

    def in_dtype(self, dtype: torch.dtype, factor: float = 1.0) -> Terms:
        """With the rounding of the reference; `factor` is that of `LOST`."""
        lost = self.lost.hypot(self.size.clamp_max(LOST[dtype] * factor))
        return self._replace(rounded=rounded_to(self.rounded, dtype), lost=lost)

    def weighted(self, weights: Terms) -> Terms:
        """Each multiplied by that of weights, whose errors are independent of these."""
        exact, rounded, size = (own * weight for own, weight in zip(self[:3], weights[:3], strict=True))
        noise, lost = (
            (own * weights.size).hypot(self.size * weight) for own, weight in zip(self[3:], weights[3:], strict=True)
        )
        return Terms(exact, rounded, size, noise, lost)

    def product(self, right: torch.Tensor) -> Sums:
        """The product with a matrix; figures of rows are those for signs at random."""
        power = right.square().mean(-1, keepdim=True)
        size, noise, lost = ((tensor.square() @ power)[..., 0] for tensor in self[2:])
        return Sums(self.exact @ right, self.rounded @ right, size, noise, lost)

    def sums(self, shape: tuple[int, ...]) -> Sums:
        """The sums over the axes that are 1 in a shape."""
        size, noise, lost = (tensor.square().sum_to_size(shape).mean(-1) for tensor in self[2:])
        return Sums(self.exact.sum_to_size(shape), self.rounded.sum_to_size(shape), size, noise, lost)


class Block(NamedTuple):
    """Some queries in float64."""

    q: torch.Tensor  # [batch, heads, rows, head_dim]
    dout: torch.Tensor  # [batch, heads, rows, head_dim_v]
    p: Terms  # the weights
    ds: Terms  # of the scores, not rounded
    ds0: Terms  # of the products
    of_sink: Terms | None  # [batch, heads, rows, 1]; None without a sink


def make_gradients(inputs: Inputs, upstream: Upstream, rounds: tuple[Rounding, ...] = ()) -> dict[str, Truth]:
    """The truth of `dq`, `dk` and `dv`, and of `dbias` and `dsink` if the call has these tensors.

    Each has the shape of its tensor, and is by the tensor that the call gets, such as a sink in base 2.  dsink is to be
    written in float32, all others in the dtype of q: fp16 or bf16.
    A query or key that sees nothing has a gradient of zero, and a gradient without elements is left out.  Declared
    roundings of scores (`q`, `s`, `tanh`) are part of the reference.  Raises `UsageProblem` for another dtype.
    """
    if inputs.output_dtype not in LOST:
        raise UsageProblem(f"gradients are judged in fp16 and bf16 only, the output is {inputs.output_dtype}")
    of_queries, of_keys = parts.padding(inputs), parts.key_padding(inputs)
    padding = {"dq": of_queries, "dk": of_keys, "dv": of_keys}
    terms = {"dq": inputs.k.shape[2]}  # the others are sums over queries
    queries = inputs.q.shape[0] * inputs.q.shape[2]
    return {
        name: _truth_of(name, sums, inputs.output_dtype, terms.get(name, queries))._replace(padding=padding.get(name))
        for name, sums in _sums_of(inputs, upstream, rounds).items()
        if sums.exact.numel()
    }


def truth_of_gradients(inputs: Inputs, rounds: tuple[Rounding, ...] = ()) -> dict[str, Truth]:
    """The truth of the gradients of a backward call that has the results of its forward pass."""
    return make_gradients(inputs, upstream_of(inputs), rounds)


def upstream_of(inputs: Inputs) -> Upstream:
    """What a backward call with the results of its forward pass gets besides q, k and v."""
    meant = inputs.meant()
    dlse = meant.extra.get(DLSE)
    return Upstream(meant.extra[OUT], meant.extra[DOUT], None if dlse is None else dlse[..., 0])


def check_gradients(gradients: Mapping[str, torch.Tensor], truths: Mapping[str, Truth]) -> dict[str, Check]:
    """The verdict on each gradient of a kernel, by name."""
    return {name: check_output(gradients[name], truth, "same_precision") for name, truth in truths.items()}


def _truth_of(name: str, sums: Sums, dtype: torch.dtype, terms: int) -> Truth:
    size, noise, lost = (tensor.sqrt() for tensor in sums[2:])
    if name == DSINK:
        error = Float32Error(noise[..., None], torch.zeros_like(sums.exact))
        return Truth(sums.exact, sums.rounded, terms, size, float32_error=error)
    rounded = rounded_to(sums.rounded, dtype)
    return Truth(sums.exact, rounded, terms, size, row_factor=ROW_FACTOR, row_noise=noise, row_lost=lost)


def _sums_of(inputs: Inputs, upstream: Upstream, rounds: tuple[Rounding, ...]) -> dict[str, Sums]:
    """All gradients before they are rounded, from blocks of queries."""
    readers, shapes, conventions = readers_of(inputs), _shapes(inputs), inputs.conventions
    given = without_padding(inputs, upstream)
    inputs = inputs.exact().meant()._replace(rounds=rounds)
    k, v = (repeated_heads(tensor, inputs.q) for tensor in (inputs.k, inputs.v))
    operands = Operands.of(k, v, inputs.scale, with_spread=False)
    whole = {name: _zeros(shape, inputs.q.device) for name, shape in shapes.items()}
    with_queries = {name for name in ("dq", "dbias") if name in shapes and shapes[name][2] > 1}
    queries, step = inputs.q.shape[2], max(1, rows_per_block(inputs) // BLOCK_SHARE)
    for start in range(0, queries, step):
        rows = slice(start, min(start + step, queries))
        block = _block_of(inputs, given, operands, rows)
        for name, sums in _gradients_of(block, inputs, k, readers).items():
            for target, source in zip(whole[name], sums, strict=True):
                target[:, :, rows if name in with_queries else slice(None)] += source
    return {name: _by_given(name, sums, conventions) for name, sums in whole.items()}


def _shapes(inputs: Inputs) -> dict[str, tuple[int, ...]]:
    """The shape of each gradient of a call."""
    tensors = {"dq": inputs.q, "dk": inputs.k, "dv": inputs.v}
    tensors |= {name: inputs.extra[word] for name, word in OF_PARTS.items() if word in inputs.extra}
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _by_given(name: str, sums: Sums, conventions: Mapping[str, str]) -> Sums:
    """A gradient by the tensor that a call gets, from that by what it means."""
    factor = float(parts.meant(OF_PARTS[name], torch.ones(()), conventions)) if name in OF_PARTS else 1.0
    if factor == 1.0:
        return sums
    return Sums(factor * sums.exact, factor * sums.rounded, *(factor**2 * square for square in sums[2:]))


def _zeros(shape: tuple[int, ...], device: torch.device) -> Sums:
    sizes = (shape, shape, shape[:3], shape[:3], shape[:3])
    return Sums(*(torch.zeros(size, dtype=torch.float64, device=device) for size in sizes))


def readers_of(inputs: Inputs) -> list[list[int]]:
    """For each head of K and V of a call as it is given, the heads of Q that read it."""
    readers: list[list[int]] = [[] for _ in range(inputs.k.shape[1])]
    for head, own in enumerate(key_heads(inputs)):
        readers[own].append(head)
    return readers


def without_padding(inputs: Inputs, upstream: Upstream) -> Given:
    """O, dO and dL with zeros in rows that belong to no query."""
    out, dout, dlse = upstream
    dlse = out.new_zeros(out.shape[:3]) if dlse is None else dlse
    padding = parts.padding(inputs)
    return cleared(padding, out), cleared(padding, dout), cleared(padding, dlse)


# -- blocks of queries ------------------------------------------------------------------------------------------------


def _block_of(inputs: Inputs, given: Given, operands: Operands, rows: slice) -> Block:
    """The weights and dS of some queries."""
    q, out, dout, dlse = (tensor[:, :, rows].double() for tensor in (inputs.q, *given))
    weights, slope, of_sink = _weights(inputs, q, operands, block_positions(inputs, rows))
    dp = dout @ operands.v.transpose(2, 3)
    less_delta = _less_delta(dlse[..., None], (weights.exact * dp).sum(-1, keepdim=True), dout, out)
    changes = Terms(
        dp + less_delta.exact,
        dp + less_delta.rounded,
        dp.abs() + less_delta.size,
        UNIT * _norm(dout) * _norm(operands.v).transpose(2, 3) + less_delta.noise,
        less_delta.lost,
    )
    dtype = inputs.output_dtype
    of_out = _norm(dout * (torch.finfo(dtype).eps / 2 * out.abs()).clamp_min(LOST[dtype]))  # its roundings
    if OWN_OUT in inputs.rounds:  # also those of P in it, which are alike in all elements if one key has the weight
        of_own = of_out.hypot(torch.finfo(dtype).eps / 2 * (weights.exact * dp).sum(-1, keepdim=True).abs())
        changes = changes._replace(noise=changes.noise.hypot(of_own))
    stored = weights.in_dtype(dtype)
    ds = changes.weighted(weights._replace(lost=stored.lost))
    ds0 = ds.weighted(_of_slope(slope)) if inputs.word("softcap") else ds
    ds0 = ds0.in_dtype(dtype, max(1.0, 1 / abs(inputs.scale or SMALLEST)))  # also if it is scaled before
    if of_sink is not None:
        of_sink = less_delta._replace(noise=less_delta.noise.hypot(of_out)).weighted(of_sink)
        of_sink = of_sink._replace(noise=of_sink.noise.clamp_min(SMALLEST))
    return Block(q, dout, stored, ds, ds0, of_sink)


def _of_slope(slope: torch.Tensor) -> Terms:
    """The derivative of the scores, with the error of 1 - tanh^2 where there is a soft cap."""
    nothing, is_changed = torch.zeros_like(slope), slope != 1
    return Terms(slope, slope, slope.abs(), nothing.masked_fill(is_changed, SLOPE_ERROR), nothing)


def _weights(
    inputs: Inputs, q: torch.Tensor, operands: Operands, positions: Positions
) -> tuple[Terms, torch.Tensor, Terms | None]:
    """P, the derivative of the scores, and the weight of the sink, [batch, heads, rows, 1]; nothing is rounded yet."""
    sinks, products = parts.sinks(inputs, positions), scaled_scores(q, operands)
    scores, slope = scores_and_slope(inputs._replace(rounds=()), products, positions)
    lse = finite(exact_lse(scores, sinks))[..., None]
    p = stored = (scores - lse).exp()
    noise = UNIT * (EXP_ROUNDINGS + scores.masked_fill(p == 0, 0.0).abs() + lse.abs()) * p
    if rounds := frozenset(inputs.rounds) & {"q", "s", "tanh"}:
        products = rounded_scores(q, operands, products.detach(), inputs.output_dtype, rounds)
        stored = (scores_and_slope(inputs, products, positions)[0] - lse).exp()
    nothing = torch.zeros_like(lse)
    weights = Terms(p, stored, p, noise, nothing)
    if sinks is None:
        return weights, slope, None
    p = (sinks - lse).exp()
    noise = SMALLEST + UNIT * (EXP_ROUNDINGS + finite(sinks).abs() + lse.abs()) * p  # it may be flushed to zero
    return weights, slope, Terms(p, p, p, noise, nothing)


def scores_and_slope(inputs: Inputs, products: torch.Tensor, positions: Positions) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores of scaled products, -inf where a key is hidden, and the derivative of each."""
    with torch.enable_grad():
        products.requires_grad_()
        scores = parts.changed_scores(inputs, products, positions)
        (slope,) = torch.autograd.grad(scores.sum(), products)
    hidden, scores = parts.hidden_keys(inputs, positions), scores.detach()
    return scores if hidden is None else scores.masked_fill(hidden, -torch.inf), slope


def _less_delta(dlse: torch.Tensor, delta: torch.Tensor, dout: torch.Tensor, out: torch.Tensor) -> Terms:
    """What dS adds to dP: dL - delta, [batch, heads, rows, 1].  The reference has the delta of the given output."""
    of_given = (dout * out).sum(-1, keepdim=True)
    return Terms(
        dlse - delta,
        dlse - of_given,
        dlse.abs() + delta.abs(),
        UNIT * _norm(dout) * _norm(out),
        torch.zeros_like(delta),
    )


def _norm(rows: torch.Tensor) -> torch.Tensor:
    """The length of each row, [batch, heads, rows, 1]."""
    return rows.square().sum(-1, keepdim=True).sqrt()


def _gradients_of(block: Block, inputs: Inputs, k: torch.Tensor, readers: list[list[int]]) -> dict[str, Sums]:
    """What some queries add to the gradients; k is in float64, for each head of q."""
    scale = inputs.scale
    gradients = {
        "dq": block.ds0.product(scale * k),
        "dk": _of_key_heads(block.ds0.transposed.product(scale * block.q), readers),
        "dv": _of_key_heads(block.p.transposed.product(block.dout), readers),
    }
    if (bias := inputs.word("attn_bias")) is not None:
        is_capped = any(part.is_last(inputs) for part in parts.PARTS)  # the bias comes before it, as the products do
        batch, heads, queries, keys = bias.shape
        ds = block.ds0 if is_capped else block.ds.in_dtype(inputs.output_dtype)
        gradients["dbias"] = ds.sums((batch, heads, min(queries, block.q.shape[2]), keys))
    if block.of_sink is not None:
        gradients[DSINK] = block.of_sink.sums(tuple(inputs.word("sink").shape))
    return gradients


def _of_key_heads(sums: Sums, readers: list[list[int]]) -> Sums:
    """The sums over the heads of q that share a head of k and v."""
    if len(readers) == sums.exact.shape[1]:
        return sums
    heads = torch.tensor(readers, device=sums.exact.device)  # [kv_heads, heads of a group]
    return Sums(*(tensor[:, heads].sum(2) for tensor in sums))

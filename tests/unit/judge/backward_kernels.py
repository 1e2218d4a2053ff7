"""Simulated backward kernels, right and wrong: float32 arithmetic, and the roundings of a FlashAttention backward pass.

P is recomputed from the log-sum-exp.  P and dS are rounded to the dtype before their products, which are summed tile by
tile in float32.  A variant replaces some steps of that computation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from pytest_fa.attention import parts
from pytest_fa.attention.backward import OF_PARTS
from pytest_fa.catalog.variant import Rounding
from pytest_fa.gpu.inputs import Inputs
from pytest_fa.judge.gradients import Upstream
from pytest_fa.judge.truth import block_positions

# Mostly a tensor, [batch, heads, ...] float32, with the heads of Q also for K and V.
Step = Callable[["Call"], Any]
DATA = ("random", "small", "peaked", "outlier")  # N(0, 1); a small dO; rows with few keys; large channels
# Cases, without dtype and seed, on which right kernels are tried: tiny ones, other sizes than multiples of tiles, and
# each part of attention.
SHAPES = (
    "b1h2s1d64-{}",
    "b1h2s2d64-{}",
    "b1h2s3d64-{}-sk1",
    "b1h2s1d64-{}-sk7",
    "b1h2s7d64-{}",
    "b1h2s64d64-{}",
    "b1h2s64d128-{}-causal",
    "b1h2s100d64-{}-causal",
    "b1h4s100d128-{}-kv2-sk77",
    "b1h4s77d64-{}-causal_br-kv1-sk150",
    "b1h2s150d64-{}-causal_br-sk77",
    "b1h6s100d64-{}-causal-sink",
    "b1h2s100d64-{}-cap2",
    "b1h2s100d64-{}-biashq",
    "b2h2s40d64-{}-cap2-biash",
)
LARGE_SHAPES = ("b1h2s300d64-{}", "b1h2s300d128-{}-causal", "b1h2s1024d64-{}", "b1h2s1024d128-{}-causal")
# Cases that show mistakes.
PLAIN = ("b1h2s64d64-{}", "b1h2s300d64-{}", "b1h2s300d64-{}-causal")
CAUSAL = ("b1h2s64d64-{}-causal", "b1h2s300d128-{}-causal")
GROUPED = ("b1h4s64d64-{}-kv2", "b1h4s300d64-{}-causal-kv2")
CAPPED = ("b1h2s64d64-{}-cap2", "b1h2s300d64-{}-causal-cap2")
SINKS = ("b1h6s64d64-{}-sink", "b1h6s300d64-{}-causal-sink")
BIASED = ("b1h2s64d64-{}-biashq", "b1h2s300d64-{}-causal-biashq")
SINK_OF_BATCHES = ("b2h6s64d64-{}-sink",)
SHARED_BIAS = ("b2h2s64d64-{}-biashq", "b2h2s100d64-{}-causal-biashq")
CAPPED_BIAS = ("b2h2s64d64-{}-cap2-biashq",)
UNEQUAL = ("b1h2s77d64-{}-causal_br-sk300",)
LONG = ("b1h1s64d64-{}-sk2048",)


class Variant(NamedTuple):
    """A kernel: its own steps, the cases and data on which it is tried, and the roundings that it would declare."""

    steps: Mapping[str, Step] = {}
    shapes: tuple[str, ...] = SHAPES
    data: tuple[str, ...] = DATA
    rounds: tuple[Rounding, ...] = ()


class Call:
    """A call of a kernel.  Each step is an attribute, which is computed once."""

    def __init__(self, inputs: Inputs, upstream: Upstream, lse: torch.Tensor, variant: Variant) -> None:
        self.inputs, self.positions = inputs, block_positions(inputs, slice(0, inputs.q.shape[2]))
        self.group, self.scale, self.dtype = inputs.q.shape[1] // inputs.k.shape[1], inputs.scale, inputs.q.dtype
        self.q, self.out, self.dout = (tensor.float() for tensor in (inputs.q, upstream.out, upstream.dout))
        self.k, self.v = (tensor.float().repeat_interleave(self.group, 1) for tensor in (inputs.k, inputs.v))
        self.lse = lse.float()[..., None]
        self.dlse = torch.zeros_like(self.lse) if upstream.dlse is None else upstream.dlse.float()[..., None]
        self._steps = {**STEPS, **variant.steps}

    def __getattr__(self, name: str) -> Any:
        value = self._steps[name](self)
        setattr(self, name, value)
        return value

    @property
    def gradients(self) -> dict[str, torch.Tensor]:
        """What the kernel writes; dsink in float32."""
        names = ["dq", "dk", "dv", *(name for name, word in OF_PARTS.items() if word in self.inputs.extra)]
        return {name: getattr(self, name).to(torch.float32 if name == "dsink" else self.dtype) for name in names}

    def product(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """The product of two matrices, summed tile by tile."""
        total = torch.zeros((*left.shape[:3], right.shape[3]))
        for start in range(0, right.shape[2], self.tile)[:: self.direction]:
            tile = slice(start, start + self.tile)
            total = self.kept(total + left[..., tile] @ right[:, :, tile])
        return total


def _hidden(call: Call) -> torch.Tensor:
    hidden = parts.hidden_keys(call.inputs, call.positions)
    return call.positions.nothing_hidden if hidden is None else hidden


def _slope(call: Call) -> torch.Tensor | float:
    cap = call.inputs.word("softcap")
    return 1 - (call.products / cap).tanh().square() if cap else 1.0


STEPS: Mapping[str, Step] = {
    "tile": lambda _: 64,
    "direction": lambda _: 1,
    "kept": lambda _: lambda total: total,  # what a sum keeps from tile to tile
    "rounded": lambda call: lambda matrix: matrix.to(call.dtype).float(),  # a matrix as a product reads it
    # The sum over the heads that share one of K and V.
    "of_keys": lambda call: lambda gradient: gradient.unflatten(1, (-1, call.group)).sum(2),
    "hidden": _hidden,
    "products": lambda call: call.scale * (call.q @ call.k.mT),
    "scores": lambda call: parts.changed_scores(call.inputs, call.products, call.positions).float(),
    "slope": _slope,
    "p": lambda call: (call.scores - call.lse).exp().masked_fill(call.hidden, 0.0),
    "p_of_ds": lambda call: call.p,
    "p_of_dv": lambda call: call.p,
    "dp": lambda call: call.dout @ call.v.mT,
    "delta": lambda call: (call.dout * call.out).sum(-1, keepdim=True),
    "ds_of_scores": lambda call: call.p_of_ds * (call.dp - call.delta + call.dlse),
    "ds": lambda call: call.ds_of_scores * call.slope,
    "ds_of_dq": lambda call: call.ds,
    "ds_of_dk": lambda call: call.ds,
    "dq": lambda call: call.scale * call.product(call.rounded(call.ds_of_dq), call.k),
    "dk": lambda call: call.of_keys(call.scale * call.product(call.rounded(call.ds_of_dk).mT, call.q)),
    "dv": lambda call: call.of_keys(call.product(call.rounded(call.p_of_dv).mT, call.dout)),
    "dbias": lambda call: call.ds_of_scores.sum_to_size(call.inputs.word("attn_bias").shape),
    # -inf of a sink and of a row that sees nothing else have no difference
    "p_of_sink": lambda call: (call.inputs.word("sink") - call.lse.clamp_min(-1e30)).exp(),
    "dsink": lambda call: (call.p_of_sink * (call.dlse - call.delta)).sum((0, 2), keepdim=True),
}


def without(tensor: torch.Tensor, *places: slice | int) -> torch.Tensor:
    """The tensor with zeros at some of the heads, queries and keys."""
    copy = tensor.clone()
    copy[(slice(None), *places)] = 0
    return copy


def stepwise(right: str, change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Step]:
    """A change of what a right step computes."""
    return {right: lambda call: change(STEPS[right](call))}


# -- right kernels ----------------------------------------------------------------------------------------------------

LOG2E = math.log2(math.e)
RIGHT = {
    "as the reference": Variant(),
    "tiles of 32": Variant({"tile": lambda _: 32}),
    "tiles of 128": Variant({"tile": lambda _: 128}),
    "no tiles": Variant({"tile": lambda _: 2**30}),
    "last tile first": Variant({"direction": lambda _: -1}),
    "P and dS in float32": Variant({"rounded": lambda _: torch.Tensor.float}),
    "P in float32": Variant({"dv": lambda c: c.of_keys(c.product(c.p.mT, c.dout))}),
    "delta from P dP": Variant({"delta": lambda c: (c.p * c.dp).sum(-1, keepdim=True)}),
    "delta from exact O": Variant({"delta": lambda c: (c.dout * (c.p @ c.v)).sum(-1, keepdim=True)}),
    "dL subtracted from delta": Variant({"ds_of_scores": lambda c: c.p * (c.dp - (c.delta - c.dlse))}),
    "dS from rounded P": Variant({"p_of_ds": lambda c: c.rounded(c.p)}),  # two roundings, as some libraries have
    "dS scaled before it is rounded": Variant(
        {
            "dq": lambda c: c.product(c.rounded(c.scale * c.ds), c.k),
            "dk": lambda c: c.of_keys(c.product(c.rounded(c.scale * c.ds).mT, c.q)),
        }
    ),
    "dK from rounded scale * Q": Variant(
        {"dk": lambda c: c.of_keys(c.product(c.rounded(c.ds).mT, c.rounded(c.scale * c.q)))}
    ),
    "S from rounded scale * Q": Variant({"products": lambda c: c.rounded(c.scale * c.q) @ c.k.mT}, rounds=("q",)),
    "S rounded": Variant({"products": lambda c: c.rounded(c.scale * (c.q @ c.k.mT))}, rounds=("s",)),
    "exp2": Variant({"p": lambda c: (c.scores * LOG2E - c.lse * LOG2E).exp2().masked_fill(c.hidden, 0.0)}),
    "dK and dV of each head are rounded": Variant(
        {"of_keys": lambda c: lambda gradient: STEPS["of_keys"](c)(c.rounded(gradient))}
    ),
}

# -- wrong kernels ----------------------------------------------------------------------------------------------------


def _wider(call: Call, more: int = 1) -> torch.Tensor:
    """The causal mask with more keys."""
    return call.positions.keys > call.positions.own_keys() + more


def _by_row_max(call: Call) -> torch.Tensor:
    scores: torch.Tensor = call.scores.masked_fill(call.hidden, -math.inf)
    return (scores - scores.amax(-1, keepdim=True)).exp()


def wrong(steps: Mapping[str, Step], shapes: tuple[str, ...] = PLAIN, data: tuple[str, ...] = DATA) -> Variant:
    """A mistake, which each of these cases shows on each of these data."""
    return Variant(steps, shapes, data)


WRONG = {
    "no delta": wrong({"delta": lambda c: torch.zeros_like(c.lse)}),
    "delta of the next row": wrong(stepwise("delta", lambda delta: delta.roll(-1, 2))),
    "delta of the next head": wrong(stepwise("delta", lambda delta: delta.roll(-1, 1))),
    "dq without scale": wrong({"dq": lambda c: STEPS["dq"](c) / c.scale}),
    "dk without scale": wrong({"dk": lambda c: STEPS["dk"](c) / c.scale}),
    "dk scaled twice": wrong({"dk": lambda c: STEPS["dk"](c) * c.scale}),
    "dS unmasked on the first hidden diagonal": wrong(
        {"p_of_ds": lambda c: (c.scores - c.lse).exp().masked_fill(_wider(c), 0.0)}, CAUSAL
    ),
    "mask one key too wide": wrong({"hidden": _wider}, CAUSAL),
    "mask one key too narrow": wrong({"hidden": lambda c: _wider(c, -1)}, CAUSAL),
    "mask aligned to the first key": wrong({"hidden": lambda c: c.positions.keys > c.positions.queries}, UNEQUAL),
    "heads summed modulo": wrong(
        {"of_keys": lambda c: lambda gradient: gradient.unflatten(1, (c.group, -1)).sum(1)}, GROUPED
    ),
    "heads overwrite one another": wrong({"of_keys": lambda c: lambda each: each[:, c.group - 1 :: c.group]}, GROUPED),
    "one head lost in dk": wrong({"ds_of_dk": lambda c: without(c.ds, 1)}, GROUPED),
    "K of h % kv_heads in dq": wrong(
        {"dq": lambda c: c.scale * c.product(c.rounded(c.ds), c.inputs.k.float().repeat(1, c.group, 1, 1))}, GROUPED
    ),
    "32 keys lost in dq": wrong(
        {"ds_of_dq": lambda c: without(c.ds, slice(None), slice(None), slice(32, 64))},
    ),
    "32 keys lost in dq of 32 rows of one head": wrong(
        {"ds_of_dq": lambda c: without(c.ds, 0, slice(-32, None), slice(32, 64))},
    ),
    "one key lost in dq": wrong({"ds_of_dq": lambda c: without(c.ds, slice(None), slice(None), 17)}),
    "dq overwritten by the last tile": wrong(
        {"ds_of_dq": lambda c: without(c.ds, slice(None), slice(None), slice(-32))}
    ),
    "last row lost in dv": wrong({"p_of_dv": lambda c: without(c.p, slice(None), -1)}),
    "last row lost in dk": wrong({"ds_of_dk": lambda c: without(c.ds, slice(None), -1)}),
    "P 1 % too large": wrong(stepwise("p", lambda p: 1.01 * p)),
    "log-sum-exp of the next row": wrong(
        {"p": lambda c: (c.scores - c.lse.roll(-1, 2)).exp().masked_fill(c.hidden, 0.0)}
    ),
    "log-sum-exp in base 2": wrong({"p": lambda c: (c.scores - c.lse * math.log(2)).exp().masked_fill(c.hidden, 0.0)}),
    "dv from P that is not normalised": wrong({"p_of_dv": _by_row_max}),
    "dL ignored": wrong({"ds_of_scores": lambda c: c.p * (c.dp - c.delta)}),
    "dL with the other sign": wrong({"ds_of_scores": lambda c: c.p * (c.dp - c.delta - c.dlse)}),
    "dq summed in 16 bits": wrong(
        {
            "tile": lambda _: 16,  # which a tensor core adds before it rounds
            "kept": lambda c: c.rounded,
            "dk": lambda c: c.of_keys(c.scale * (c.rounded(c.ds).mT @ c.q)),
            "dv": lambda c: c.of_keys(c.rounded(c.p).mT @ c.dout),
        },
        LONG,
        ("random",),  # where the rounding of dS is small beside it
    ),
    "no derivative of the cap": wrong({"slope": lambda _: 1.0}, CAPPED),
    "derivative at the capped score": wrong(
        {"slope": lambda c: 1 - (c.scores / c.inputs.word("softcap")).tanh().square()}, CAPPED
    ),
    "no sink in P": wrong({"p": lambda c: c.scores.masked_fill(c.hidden, -math.inf).softmax(-1)}, SINKS),
    "no bias in S": wrong({"scores": lambda c: c.products}, BIASED),
    "dO of the next head in dP": wrong({"dp": lambda c: c.dout.roll(-1, 1) @ c.v.mT}),
    "dO of the next row in dv": wrong({"dv": lambda c: c.of_keys(c.product(c.rounded(c.p).mT, c.dout.roll(-1, 2)))}),
    "dbias of the first batch": wrong({"dbias": lambda c: c.ds_of_scores[:1]}, SHARED_BIAS),
    "dbias with the derivative of the cap": wrong({"dbias": lambda c: c.ds.sum(0, keepdim=True)}, CAPPED_BIAS),
    "dbias with the scale": wrong({"dbias": lambda c: c.scale * STEPS["dbias"](c)}, SHARED_BIAS),
    "dbias transposed": wrong({"dbias": lambda c: STEPS["dbias"](c).mT}, SHARED_BIAS[:1]),
    "dbias of the next head": wrong({"dbias": lambda c: STEPS["dbias"](c).roll(-1, 1)}, SHARED_BIAS),
    "dsink of the next head": wrong(stepwise("dsink", lambda dsink: dsink.roll(-1, 1)), SINKS),
    "dsink of the first batch": wrong(
        {"dsink": lambda c: (c.p_of_sink * (c.dlse - c.delta))[:1].sum(2, keepdim=True)}, SINK_OF_BATCHES
    ),
    "dsink without P": wrong({"p_of_sink": lambda c: torch.ones_like(c.lse)}, SINKS),
    "dsink from dL alone": wrong({"dsink": lambda c: (c.p_of_sink * c.dlse).sum((0, 2), keepdim=True)}, SINKS),
    "dsink lacks the last row": wrong(
        {"dsink": lambda c: (c.p_of_sink * (c.dlse - c.delta))[:, :, :-1].sum((0, 2), keepdim=True)}, SINKS
    ),
}

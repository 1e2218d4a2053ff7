"""Each simulated mistake in the gradient of a bias or a sink gets the sentence of that mistake."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from pytest_fa.catalog.case import parse_case
from pytest_fa.gpu.inputs import make_inputs
from pytest_fa.judge.gradient_mistakes import explain_gradients
from pytest_fa.judge.gradients import make_gradients
from tests.unit.judge.backward_kernels import STEPS, Call, Step, Variant, stepwise
from tests.unit.judge.test_gradients import CPU, solved, upstream_of

pytestmark = pytest.mark.usefixtures("one_thread")

LN2 = math.log(2)
OF_SINK = "dsink = sum of exp(sink - L) (dL - delta)"
OF_BIAS = "dbias = P (dP - delta)"
SLOPE = "the derivative of the soft cap, 1 - tanh(S / cap)^2,"
DELTA = "delta = rowsum(dO * O) is missing in dS = P (dP - delta)"
SHAPES = {
    "sink": "b2h6s70d64-fp16-sink",
    "bias": "b2h3s64d64-bf16-biashq",
    "shared": "b2h3s40d64-fp16-bias",
    "capped": "b2h2s64d64-fp16-cap2-biashq",
}


def of_sink(call: Call) -> Any:
    """What each row adds to the gradient of the sink."""
    return call.p_of_sink * (call.dlse - call.delta)


def sink(step: Step) -> dict[str, Step]:
    """Another sum over batches and queries."""
    return {"dsink": lambda call: step(call).sum((0, 2), keepdim=True)}


def bias(step: Step) -> dict[str, Step]:
    """Another sum over what the bias lacks."""
    return {"dbias": lambda call: step(call).sum_to_size(call.inputs.word("attn_bias").shape)}


MISTAKES: dict[str, tuple[str, dict[str, Step], str]] = {
    "no dsink": (
        "sink",
        stepwise("dsink", torch.zeros_like),
        "dsink is 0: it is never written, or what is written is never added up",
    ),
    "sign": ("sink", stepwise("dsink", torch.neg), "dsink has the wrong sign"),
    "next head": (
        "sink",
        stepwise("dsink", lambda dsink: dsink.roll(-1, 1)),
        "dsink is that of the next head: look at its index",
    ),
    "first batch": ("sink", sink(lambda c: of_sink(c)[:1]), "dsink is that of batch 0 alone: add up all batches"),
    "mean": (
        "sink",
        stepwise("dsink", lambda dsink: dsink / 2),
        "dsink is half of the right one; or dsink is the mean over the batches, it must be their sum",
    ),
    "last query": ("sink", sink(lambda c: of_sink(c)[:, :, :-1]), "the last query is missing in dsink"),
    "no P of the sink": ("sink", sink(lambda c: c.dlse - c.delta), f"exp(sink - L) is missing in {OF_SINK}"),
    "no delta": ("sink", sink(lambda c: c.p_of_sink * c.dlse), f"delta is missing in {OF_SINK}"),
    "no dL": (
        "sink",
        sink(lambda c: -c.p_of_sink * c.delta),
        f"dL, the gradient of the log-sum-exp, is ignored in {OF_SINK}",
    ),
    "base 2": ("sink", stepwise("dsink", lambda dsink: dsink / LN2), "dsink is multiplied by log2 e once too often"),
    "scale": (
        "bias",
        {"dbias": lambda c: c.scale * STEPS["dbias"](c)},
        "dbias is multiplied by the softmax scale, and must not be",
    ),
    "scale twice": (
        "bias",
        {"dbias": lambda c: c.scale**2 * STEPS["dbias"](c)},
        "dbias is multiplied twice by the softmax scale, and must not be",
    ),
    "transposed": (
        "bias",
        stepwise("dbias", lambda dbias: dbias.mT),
        "dbias is transposed: look at the order of its rows and columns",
    ),
    "next head of dbias": (
        "bias",
        stepwise("dbias", lambda dbias: dbias.roll(-1, 1)),
        "dbias is that of the next head: look at its index",
    ),
    "last batch": (
        "bias",
        {"dbias": lambda c: c.ds_of_scores[-1:]},
        "dbias is that of the last batch alone: add up all batches",
    ),
    "P": ("bias", bias(lambda c: c.p), "dbias is P, it must be dS = P (dP - delta)"),
    "query 0": (
        "shared",
        bias(lambda c: c.ds_of_scores[:, :, :1]),
        "dbias is that of query 0 alone: add up all queries",
    ),
    "last head": (
        "shared",
        bias(lambda c: c.ds_of_scores[:, -1:]),
        "dbias is that of the last head alone: add up all heads",
    ),
    "cap": (
        "capped",
        bias(lambda c: c.ds),
        f"{SLOPE} is in dbias, and must not be: the bias comes after the cap",
    ),
    "no delta in all": (
        "bias",
        {"delta": lambda c: torch.zeros_like(c.lse)},
        f"{DELTA}; and delta is missing in {OF_BIAS}",
    ),
    "another dsink": (
        "sink",
        stepwise("dsink", lambda dsink: dsink.cos() + 3),
        "dsink is wrong in every batch, head, query and key; no known mistake gives these gradients",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_gets_its_sentence(name: str) -> None:
    """Also if other gradients are wrong, too."""
    case, steps, sentence = MISTAKES[name]
    problem = solved(SHAPES[case], "random")
    written = Call(problem.inputs, problem.upstream, problem.lse, Variant(steps)).gradients
    assert explain_gradients(written, problem.truths, problem.inputs, problem.upstream) == sentence


def test_a_sink_in_base_2_has_a_gradient_by_that_sink() -> None:
    """The gradient by the natural one is larger by log2 e, and is named as that."""
    inputs = make_inputs(parse_case(f"{SHAPES['sink']}-seed0"), CPU, {"sink": "base2"})
    upstream = upstream_of(inputs)
    truths = make_gradients(inputs, upstream)
    written = {name: truth.same_precision.half() for name, truth in truths.items()}
    written["dsink"] = (truths["dsink"].out / LN2).float()
    assert explain_gradients(written, truths, inputs, upstream) == "dsink is multiplied by log2 e once too often"

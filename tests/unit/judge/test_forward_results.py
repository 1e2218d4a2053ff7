"""The results of the forward pass that a backward call gets: those of the definition, in each convention."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch

from pytest_fa.attention.backward import DLSE, DOUT, LSE, OUT
from pytest_fa.catalog.case import Case, parse_case
from pytest_fa.gpu.inputs import Inputs, make_inputs
from pytest_fa.judge.forward_results import computed_results, with_results

CPU = torch.device("cpu")
EMPTY = "b1h2s9d64-fp16-causal_br-sk5-bwd-seed0"  # the first four queries see no key
RAGGED = "b4h2s20d64-bf16-causal_br-var3-bwd-seed0"
CASES = (
    "b2h3s9d64-fp16-bwd-seed0",
    "b1h4s7d64-bf16-causal-kv2-sk11-dv32-bwd-seed1",
    "b1h4s7d64-fp16-kv1-scalem0p3-cap2-bwd-seed2",
    "b1h3s9d64-fp16-causal_br-sk5-sink-bwd-seed3",
    "b2h2s9d64-fp16-bshd-bwd-dlse-seed4",
    EMPTY,
    "b4h2s20d64-fp16-var2-bwd-seed0",  # one sequence has no keys
    RAGGED,
)


def inputs_of(case: str, conventions: Mapping[str, str] | None = None) -> Inputs:
    """A backward call with its results."""
    return with_results(make_inputs(parse_case(case), CPU, conventions or {}))


def defined(case: Case, inputs: Inputs, batch: int, head: int, query: int) -> tuple[list[float], float] | None:
    """The output and the log-sum-exp of one query by the definition; None for one that no sequence has."""
    lengths = inputs.word("seqlens_q"), inputs.word("seqlens_k")
    queries, keys = (
        total if each is None else int(each.flatten()[batch])
        for each, total in zip(lengths, (case.seq_q, case.seq_k), strict=True)
    )
    if query >= queries:
        return None
    last = {"none": keys, "top_left": query + 1, "bottom_right": query + 1 + keys - queries}[case.causal]
    key_head = head // (case.heads // case.kv_heads)
    k, v = (tensor[batch, key_head].double() for tensor in (inputs.k, inputs.v))
    scores = [
        case.scale * float(inputs.q[batch, head, query].double() @ k[key]) for key in range(max(0, min(keys, last)))
    ]
    if cap := case.value_of("softcap"):
        scores = [cap * math.tanh(score / cap) for score in scores]
    weights = [math.exp(score) for score in scores]
    sink = inputs.word("sink")
    total = sum(weights) + (0.0 if sink is None else math.exp(sink.flatten()[head]))
    out = sum((weight / total * v[key] for key, weight in enumerate(weights)), torch.zeros(case.head_dim_v).double())
    return out.tolist(), math.log(total) if total else -math.inf


@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_the_definition(case: str) -> None:
    """The output is the definition's, rounded, and the log-sum-exp is a natural logarithm; padding is NaN in both."""
    parsed, inputs = parse_case(case), inputs_of(case)
    out, lse = inputs.extra[OUT], inputs.extra[LSE]
    assert (out.dtype, lse.dtype) == (inputs.q.dtype, torch.float32)
    assert out.shape == inputs.extra[DOUT].shape == (*inputs.q.shape[:3], parsed.head_dim_v)
    assert out.stride() == inputs.extra[DOUT].stride()
    assert lse.shape == (*inputs.q.shape[:3], 1)
    for place in torch.cartesian_prod(*map(torch.arange, inputs.q.shape[:3])).tolist():
        expected = defined(parsed, inputs, *place)
        batch, head, query = place
        own_out, own_lse = out[batch, head, query].double(), lse[batch, head, query, 0]
        if expected is None:
            assert bool(own_out.isnan().all() & own_lse.isnan())
            continue
        half_ulp = torch.finfo(out.dtype).eps / 2
        torch.testing.assert_close(own_out, torch.tensor(expected[0]).double(), rtol=half_ulp, atol=1e-7)
        assert float(own_lse) == pytest.approx(expected[1], rel=1e-6)


def test_padding_is_judged_as_nothing() -> None:
    """A ragged call gets NaN in the padding of all that comes with queries, and means zeros there."""
    inputs = inputs_of(RAGGED)
    assert [name for name in (DOUT, OUT, LSE) if not bool(inputs.extra[name].isnan().any())] == []
    meant = inputs.meant()
    assert not any(bool(meant.extra[name].isnan().any()) for name in (DOUT, OUT, LSE))


EMPTY_ROWS = slice(0, 4)


@pytest.mark.parametrize(
    ("conventions", "factor", "empty"),
    [
        ({}, 1.0, -math.inf),
        ({"lse": "base2"}, 1 / math.log(2), -math.inf),
        ({"lse_empty": "+inf"}, 1.0, math.inf),
        ({"lse_empty": "0"}, 1.0, 0.0),
        ({"lse": "base2", "lse_empty": "0"}, 1 / math.log(2), 0.0),
    ],
    ids=str,
)
def test_the_log_sum_exp_is_in_the_conventions_of_the_kernel(
    conventions: dict[str, str], factor: float, empty: float
) -> None:
    """The base, and the value of queries without a key, are those that the manifest declares; the output stays."""
    plain, inputs = inputs_of(EMPTY), inputs_of(EMPTY, conventions)
    assert torch.equal(inputs.extra[OUT], plain.extra[OUT])
    assert bool((plain.extra[OUT][:, :, EMPTY_ROWS] == 0).all())
    given = inputs.extra[LSE]
    assert {*given[:, :, EMPTY_ROWS].flatten().tolist()} == {empty}
    torch.testing.assert_close(given[:, :, 4:], plain.extra[LSE][:, :, 4:] * factor)


@pytest.mark.parametrize(("order", "axes"), [("bhs", (0, 1, 2)), ("bsh", (0, 2, 1)), ("hbs", (1, 0, 2))])
def test_the_axes_are_those_of_the_kernel(order: str, axes: tuple[int, int, int]) -> None:
    """A kernel gets the log-sum-exp and its gradient with the axes that it declares, contiguous."""
    case = "b2h3s5d64-fp16-bwd-dlse-seed0"
    plain, inputs = inputs_of(case), inputs_of(case, {"lse_order": order})
    for name in (LSE, DLSE):
        given = inputs.tensors[name]
        assert given.is_contiguous()
        assert torch.equal(given, plain.extra[name][..., 0].permute(axes))


@pytest.mark.parametrize("has_sink", ["true", "false"])
def test_the_sink_is_part_of_the_log_sum_exp_unless_declared(has_sink: str) -> None:
    """Without it, the log-sum-exp is that of the keys alone; the output is that with a sink."""
    case = "b1h3s9d64-fp16-sink-bwd-seed0"
    plain, inputs = inputs_of(case), inputs_of(case, {"lse_has_sink": has_sink})
    assert torch.equal(inputs.extra[OUT], plain.extra[OUT])
    scores = inputs.scale * (inputs.q.double() @ inputs.k.double().mT)
    sink = inputs.word("sink").double().view(1, 3, 1).expand(1, 3, 9)
    expected = scores.logsumexp(-1) if has_sink == "false" else scores.logsumexp(-1).logaddexp(sink)
    torch.testing.assert_close(inputs.extra[LSE][..., 0].double(), expected, rtol=1e-6, atol=1e-6)


def test_float32_gives_the_same_results() -> None:
    """Those of timed calls, in float32, differ from those in float64 by little more than a rounding."""
    inputs = make_inputs(parse_case("b2h3s70d64-fp16-causal-sk90-bwd-seed0"), CPU)
    precise, fast = (computed_results(inputs, dtype).extra for dtype in (torch.float64, torch.float32))
    torch.testing.assert_close(fast[LSE], precise[LSE], rtol=1e-6, atol=1e-6)
    assert float((fast[OUT] != precise[OUT]).float().mean()) < 0.01
    torch.testing.assert_close(fast[OUT], precise[OUT], rtol=2**-10, atol=1e-6)


def test_results_are_computed_once_and_only_for_backward_calls() -> None:
    """A call of attention stays as it is, and one that has its results keeps them."""
    attention = make_inputs(parse_case("b1h2s9d64-fp16-seed0"), CPU)
    assert with_results(attention) is attention
    backward = inputs_of(CASES[0])
    assert with_results(backward) is backward

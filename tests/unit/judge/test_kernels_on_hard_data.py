"""Mistakes that show only on special data, as the properties have them: each is named, and by no other words."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from pytest_fa.catalog.case import parse_case
from pytest_fa.gpu.inputs import Inputs, make_inputs
from pytest_fa.judge.diagnosis import diagnose
from pytest_fa.judge.oracle import truth_of
from pytest_fa.judge.output_check import check_output
from tests.unit.judge.mistaken_kernels import (
    attend,
    half_sums,
    heads_in_order,
    hidden_keys,
    keys_to,
    rounded_scores,
    scores_of,
    soft_capped,
    stale_tail,
    windowed,
)

pytestmark = pytest.mark.usefixtures("one_thread")

Kernel = Callable[[Inputs], torch.Tensor]
CPU = torch.device("cpu")
SMALLEST_FP16 = torch.finfo(torch.float16).smallest_normal


def as_they_are(i: Inputs) -> Inputs:
    """The inputs of the case."""
    return i


def large_scores(i: Inputs) -> Inputs:
    """Scores 30 times as large."""
    return i._replace(q=i.q * 30)


def far_below(i: Inputs) -> Inputs:
    """All scores are about -500 in even rows, and as they were in odd ones."""
    q, k = i.q.clone(), -i.k.abs()
    q[:, :, ::2] = 80
    return i._replace(q=q, k=k)


def all_far_below(i: Inputs) -> Inputs:
    """All scores are about -64,000."""
    return i._replace(q=torch.full_like(i.q, 128.0), k=torch.full_like(i.k, -63.0))


def times_v_of(factor: float) -> Callable[[Inputs], Inputs]:
    """V is larger or smaller."""
    return lambda i: i._replace(v=(i.v.float() * factor).to(i.v.dtype))


def ones_in_v(i: Inputs) -> Inputs:
    """V is full of ones."""
    return i._replace(v=torch.ones_like(i.v))


def some_large_queries(i: Inputs) -> Inputs:
    """Every third query is past the largest fp16, even after the scale."""
    every_third = torch.arange(i.q.shape[2])[:, None] % 3 == 0
    return i._replace(q=torch.where(every_third, i.q * 2e6, i.q))


def far_queries(i: Inputs) -> Inputs:
    """Every third query is past the largest fp16 after the scale, and no score is."""
    every_third = torch.arange(i.q.shape[2])[:, None] % 3 == 0
    return i._replace(q=torch.where(every_third, 2e4, i.q), k=i.k * 1e-6, scale=8.0)


def soft_max(i: Inputs, start: float, *, guards: bool = True) -> torch.Tensor:
    """Attention whose row maximum starts at `start`; if all P are zero, 0/0 is NaN unless it is guarded."""
    s = scores_of(i).masked_fill(hidden_keys(i), -math.inf)
    p = torch.exp(s - s.amax(-1, keepdim=True).clamp_min(start))
    row_sum = p.sum(-1, keepdim=True)
    o = p.to(i.v.dtype).float() @ i.v.float()
    return (o / (row_sum.clamp_min(1e-30) if guards else row_sum)).to(i.q.dtype)


def no_maximum(i: Inputs) -> torch.Tensor:
    """exp(S) without the row maximum."""
    s = scores_of(i).masked_fill(hidden_keys(i), -math.inf)
    return (torch.exp(s) @ i.v.float() / torch.exp(s).sum(-1, keepdim=True)).to(i.q.dtype)


def v_in_fp16(i: Inputs) -> torch.Tensor:
    """V is held in fp16."""
    p = torch.softmax(scores_of(i).masked_fill(hidden_keys(i), -math.inf), -1)
    return (p.to(i.q.dtype).float() @ i.v.half().float()).to(i.q.dtype)


def out_in_fp16(i: Inputs) -> torch.Tensor:
    """The output is held in fp16."""
    return attend(i, out_dtype=torch.float16).to(i.q.dtype)


def q_in_fp16(i: Inputs) -> torch.Tensor:
    """Q * scale is held in fp16."""
    s = (i.q.float() * i.scale).half().float() @ i.k.float().transpose(2, 3)
    return (torch.softmax(s, -1) @ i.v.float()).to(i.q.dtype)


def undivided_in_fp16(i: Inputs) -> torch.Tensor:
    """P V is held in fp16 before the division."""
    s = scores_of(i)
    p = torch.exp(s - s.amax(-1, keepdim=True))
    return ((p @ i.v.float()).half().float() / p.sum(-1, keepdim=True)).to(i.q.dtype)


def flushed(tensor: torch.Tensor) -> torch.Tensor:
    """Subnormal numbers of fp16 are zero."""
    return tensor.masked_fill(tensor.abs() < SMALLEST_FP16, 0.0)


def with_scale(scale: float) -> Kernel:
    """The scale of the call is not used."""
    return lambda i: attend(i._replace(scale=scale))


CASES = "b1h2s150d64-{}-seed0"
FP16, BF16, FP32 = (CASES.format(dtype) for dtype in ("fp16", "bf16", "fp32"))
MAX_NAMES = 2
STARTS = "exactly in the rows whose scores are all below -"
EVERY = "in every row, and all scores are below -"
HELD = "NaN or Inf exactly where {} is past 65504: it is held in fp16"


@pytest.mark.parametrize(
    ("case", "data", "kernel", "cause"),
    [
        # lengths and heads
        ("b1h2s113d64-fp16-sk203-seed0", as_they_are, lambda i: keys_to(i, 113), "the keys past S_q are missing"),
        ("b1h2s1d64-fp16-sk300-seed0", as_they_are, lambda i: keys_to(i, 1), "the keys past S_q are missing"),
        ("b1h2s1d64-fp16-sk300-seed0", as_they_are, lambda i: keys_to(i, 64), "the keys past S_q, rounded up to 64,"),
        ("b1h1s17d64-fp16-sk9000-seed0", as_they_are, lambda i: keys_to(i, 17), "the keys past S_q are missing"),
        ("b1h6s64d64-fp16-kv2-seed0", as_they_are, lambda i: heads_in_order(i, lambda h, _: h >> 2),
         "query heads share key heads in groups of 4, not 3: look whether the group is rounded up to a power of two"),
        ("b1h12s64d64-bf16-kv2-seed0", as_they_are, lambda i: heads_in_order(i, lambda h, _: h >> 3),
         "query heads share key heads in groups of 8, not 6"),
        ("b1h12s64d64-fp16-kv3-seed0", as_they_are, lambda i: heads_in_order(i, lambda h, _: h // 3 % 3, "k"), ""),
        ("b1h6s64d64-fp16-kv3-seed0", as_they_are, lambda i: heads_in_order(i, lambda h, group: h % group),
         "query heads are mapped to key heads h % group"),
        # scales
        ("b1h2s150d80-fp16-seed0", as_they_are, with_scale(128**-0.5), "the softmax scale is that of D = 128, not 80"),
        ("b1h2s150d72-bf16-seed0", as_they_are, with_scale(0.125), "the softmax scale is that of D = 64, not 72"),
        (FP16, lambda i: i._replace(scale=0.0), with_scale(0.125), "the softmax scale is 1/sqrt(D), not 0"),
        (FP16, lambda i: i._replace(scale=-0.125), with_scale(0.125), "the softmax scale is 1/sqrt(D), not -0.125"),
        # the row maximum
        (FP16, far_below, lambda i: soft_max(i, 0.0), "the row maximum starts at 0"),
        (BF16, far_below, lambda i: soft_max(i, 0.0, guards=False), f"NaN, as of 0/0, {STARTS}"),
        (FP32, far_below, lambda i: soft_max(i, 1e-30, guards=False), f"NaN, as of 0/0, {STARTS}"),
        (FP16, all_far_below, lambda i: soft_max(i, -5e4), f"the output is 0 {EVERY}"),
        (FP16, all_far_below, lambda i: soft_max(i, -1e4, guards=False), f"NaN, as of 0/0, {EVERY}"),
        (FP32, lambda i: i._replace(q=i.q * 40), no_maximum, "NaN or Inf exactly where exp(S) overflows fp32"),
        (BF16, lambda i: large_scores(i)._replace(k=i.k + 1), no_maximum, "NaN or Inf exactly where exp(S) overflows"),
        # ranges of values
        (BF16, times_v_of(3e4), v_in_fp16, HELD.format("V")),
        (BF16, times_v_of(2e5), out_in_fp16, HELD.format("the output")),
        (BF16, some_large_queries, q_in_fp16, "where Q, Q * scale, a score and Q K^T are past 65504: one of them is"),
        (BF16, far_queries, q_in_fp16, HELD.format("Q * scale")),
        (FP16, times_v_of(1e4), undivided_in_fp16, HELD.format("P V before the division by the row sum")),
        (BF16, times_v_of(3e4), lambda i: attend(i._replace(v=i.v.clamp(-65504, 65504))), "V is clamped at 65504"),
        (FP16, times_v_of(600), lambda i: attend(i).clamp(-100, 100), "the output is clamped at 100"),
        (FP16, times_v_of(3e-5), lambda i: flushed(attend(i)), "the output is 0 where the right value is subnormal"),
        (FP16, times_v_of(2e-3), lambda i: flushed(attend(i._replace(v=flushed(i.v)))),
         "subnormal numbers of V and of the output"),
        # options that are left on, and others
        (FP16, large_scores, lambda i: soft_capped(i, 30), "the scores are 30 tanh(S / 30): a soft cap of 30 is on"),
        (BF16, large_scores, lambda i: soft_capped(i, 50), "the scores are 50 tanh(S / 50): a soft cap of 50 is on"),
        ("b1h2s150d64-fp16-causal-seed0", as_they_are, lambda i: windowed(i, 128), "only the last 128 keys"),
        ("b1h1s1100d64-fp16-causal-seed0", as_they_are, lambda i: windowed(i, 1024), "only the last 1024 keys"),
        (FP16, large_scores, stale_tail, "the last tile still has K and V of keys 118 to 127"),
        (FP16, ones_in_v, lambda i: half_sums(i, of_s=False, of_o=True), "than that of sums in fp16"),
        (FP16, large_scores, rounded_scores, "S is rounded to fp16: keep S in float32, or declare `rounds: [s]`"),
    ],
)  # fmt: skip
def test_a_mistake_on_special_data_is_named(
    case: str, data: Callable[[Inputs], Inputs], kernel: Kernel, cause: str
) -> None:
    """The cause begins with the mistake's words; where the cause is empty, no mistake is known."""
    inputs = data(make_inputs(parse_case(case), CPU))
    truth, out = truth_of("attention", inputs, (), "same_precision"), kernel(inputs)
    check = check_output(out, truth, "same_precision")
    assert not check.passed
    named = diagnose(out, truth, inputs, check, None, ()).cause
    if cause:
        assert cause in named.partition(" (compared")[0]
        assert len(named.split("; or ")) <= MAX_NAMES
    else:
        assert "no known mistake" in named


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("data", [as_they_are, large_scores, far_below, all_far_below, times_v_of(9000)])
def test_a_right_kernel_is_right(dtype: str, data: Callable[[Inputs], Inputs]) -> None:
    """The data of this test are not themselves the reason of a failure."""
    inputs = data(make_inputs(parse_case(CASES.format(dtype)), CPU))
    truth = truth_of("attention", inputs, (), "same_precision")
    check = check_output(attend(inputs), truth, "same_precision")
    assert check.passed, check.complaint

"""The judge of scores: truth by the definition, right kernels pass, every mistake shows at the probes' own shapes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pytest_fa.catalog.case import parse_case
from pytest_fa.judge.check import judge
from pytest_fa.judge.diagnosis import diagnose
from pytest_fa.judge.oracle import truth_of
from pytest_fa.judge.scores import make_scores_truth
from pytest_fa.judge.truth import make_truth
from pytest_fa.records.judged import Check
from pytest_fa.run.inputs import Inputs, make_inputs

Wrong = Callable[[Inputs], torch.Tensor]

GEMM, TILE = "b1h1s4d4", "b1h1s32d64"
PROBES = [f"{GEMM}-fp16", f"{GEMM}-bf16", f"{TILE}-fp16-sk64", f"{TILE}-bf16-sk64"]
SEEDS = range(20)


def inputs_of(shape: str, seed: int = 0) -> Inputs:
    """The data of a shape."""
    return make_inputs(parse_case(f"{shape}-seed{seed}"), torch.device("cpu"))


def right(inputs: Inputs) -> torch.Tensor:
    """What a tensor core kernel gives: sums in float32, one rounding."""
    heads = inputs.q.shape[1] // inputs.k.shape[1]
    k = inputs.k.float().repeat_interleave(heads, dim=1)
    return (inputs.q.float() @ k.transpose(2, 3) * inputs.scale).to(inputs.q.dtype)


def check(out: torch.Tensor, inputs: Inputs) -> Check:
    """The verdict on it."""
    return judge(out, truth_of("scores", inputs, (), "same_precision"), "same_precision")


# -- truth ------------------------------------------------------------------------------------------------------------


def test_truth_is_the_definition() -> None:
    """Each element is scale times the product of one query and one key, of the key head that its head shares."""
    inputs = inputs_of("b2h4s3d8-bf16-kv2-sk5")
    q, k = inputs.q.double(), inputs.k.double()
    found = make_scores_truth(inputs)
    for batch, head, query, key in ((0, 0, 0, 0), (0, 1, 2, 4), (1, 2, 1, 3), (1, 3, 2, 0)):
        want = inputs.scale * sum(
            float(a) * float(b) for a, b in zip(q[batch, head, query], k[batch, head // 2, key], strict=True)
        )
        assert float(found.out[batch, head, query, key]) == pytest.approx(want, rel=1e-12)
    assert (found.out.shape, found.out.dtype, found.terms) == ((2, 4, 3, 5), torch.float64, 8)


def test_yardstick_is_truth_rounded_once() -> None:
    """An ideal kernel is off by the rounding of its output."""
    found = make_scores_truth(inputs_of(f"{TILE}-bf16-sk64"))
    assert torch.equal(found.same_precision, found.out.bfloat16().double())


def test_row_size_is_what_random_keys_would_give() -> None:
    """A row's RMS is its query's length times scale and the keys' RMS, for keys that have nothing to do with it."""
    inputs = inputs_of("b1h2s16d64-fp16-sk4096")
    found = make_scores_truth(inputs)
    torch.testing.assert_close(found.row_size, found.out.square().mean(-1).sqrt(), rtol=0.05, atol=0)


def test_v_is_not_read() -> None:
    """Truth is the same whatever v holds."""
    inputs = inputs_of(f"{TILE}-fp16-sk64")
    spoiled = inputs._replace(v=torch.full_like(inputs.v, float("nan")))
    assert torch.equal(make_scores_truth(inputs).out, make_scores_truth(spoiled).out)


def test_the_oracle_knows_what_is_computed() -> None:
    """Attention is judged by attention."""
    inputs = inputs_of("b1h1s8d8-fp16")
    assert torch.equal(truth_of("attention", inputs, (), "same_precision").out, make_truth(inputs).out)
    assert truth_of("attention", inputs, (), "fp8").spread is not None


# -- right ones -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [*PROBES, "b2h4s150d4-fp16-kv2", "b2h3s160d64-fp16-sk192", "b1h2s64d128-bf16"])
def test_right_scores_pass(shape: str) -> None:
    """A right kernel stays within 0.8 of every bound, whatever the data."""
    for seed in SEEDS:
        found = check(right(inputs_of(shape, seed)), inputs_of(shape, seed))
        assert found.passed
        assert (found.tightest.used or 0) < 0.8


@pytest.mark.parametrize("scale", [0.0, -1.0, 1.0, 30.0])
def test_any_scale_is_a_scale(scale: float) -> None:
    """Zero gives zeros, and is judged: nothing else is right there."""
    inputs = inputs_of(f"{TILE}-fp16-sk64")._replace(scale=scale)
    assert check(right(inputs), inputs).passed
    assert not check(right(inputs) + 1, inputs).passed


# -- wrong ones -------------------------------------------------------------------------------------------------------


def one_row(inputs: Inputs) -> torch.Tensor:
    """One query has its neighbour's row."""
    out = right(inputs)
    out[:, :, 2] = out[:, :, 1]
    return out


def transposed_k(inputs: Inputs) -> torch.Tensor:
    """Q K where Q K^T should be; where K is not square, its memory read the other way around."""
    k = inputs.k.reshape(*inputs.k.shape[:2], inputs.k.shape[3], inputs.k.shape[2])  # [b, h, d, s]
    return right(inputs._replace(k=k.transpose(2, 3)))


def key_dropped(inputs: Inputs, value: float = 0.0) -> torch.Tensor:
    """The last key's column is not computed."""
    out = right(inputs)
    out[..., -1] = value
    return out


MISTAKES: dict[str, Wrong] = {
    "scale 1 % off": lambda i: right(i._replace(scale=i.scale * 1.01)),
    "scale 1 % less": lambda i: right(i._replace(scale=i.scale * 0.99)),
    "scale forgotten": lambda i: right(i._replace(scale=1.0)),
    "one row wrong": one_row,
    "K transposed": transposed_k,
    "a key dropped": key_dropped,
    "a key not written": lambda i: key_dropped(i, float("nan")),
    "two keys changed places": lambda i: right(i)[..., [1, 0, *range(2, i.k.shape[2])]],
    "a dimension left out": lambda i: right(i._replace(q=i.q * (torch.arange(i.q.shape[3]) > 0))),
    "stale output": lambda i: right(inputs_of_like(i, seed=99)),
    "attention in its place": lambda i: torch.softmax(right(i).float(), -1).to(i.q.dtype),
}


def inputs_of_like(inputs: Inputs, seed: int) -> Inputs:
    """Other data of the same shape: what an earlier call had."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(each.shape, generator=generator).to(each.dtype) for each in inputs[:3])
    return inputs._replace(q=q, k=k, v=v)


@pytest.mark.parametrize("shape", PROBES)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_mistake_shows(mistake: str, shape: str) -> None:
    """At the probes' own shapes, in both dtypes, with each of twenty seeds."""
    passed = [seed for seed in SEEDS if check(MISTAKES[mistake](inputs_of(shape, seed)), inputs_of(shape, seed)).passed]
    assert passed == []


@pytest.mark.parametrize(
    ("mistake", "shape", "cause"),
    [
        ("scale 1 % off", PROBES[2], "the scale is 1 % too large"),
        ("scale 1 % less", PROBES[2], "the scale is 1 % too small"),
        ("scale forgotten", PROBES[2], "the scale is not applied"),
        ("K transposed", PROBES[2], "K is transposed once too often, or not at all"),
        ("one row wrong", PROBES[2], "wrong in query 2 of 32"),
        ("a key dropped", PROBES[2], "wrong in key 63 of 64"),
        ("a key not written", PROBES[2], "it was never written: the poison is still there, in key 63 of 64"),
    ],
)
def test_the_likely_cause_is_named(mistake: str, shape: str, cause: str) -> None:
    """In the words of scores: their last axis counts keys."""
    inputs = inputs_of(shape)
    out, truth = MISTAKES[mistake](inputs), make_scores_truth(inputs)
    found = diagnose(out, truth, inputs, judge(out, truth, "same_precision"), None, (), "scores")
    assert found.cause.startswith(cause)
    assert found.conclusion == "no SDPA backend takes this case: only truth speaks"


def test_a_transposed_output_is_told() -> None:
    """Where there are as many keys as queries, out^T fits, and is wrong."""
    inputs = inputs_of("b1h1s4d4-fp16")
    out, truth = right(inputs).transpose(2, 3).contiguous(), make_scores_truth(inputs)
    found = diagnose(out, truth, inputs, judge(out, truth, "same_precision"), None, (), "scores")
    assert found.cause == "the output is transposed: queries stand where keys should"

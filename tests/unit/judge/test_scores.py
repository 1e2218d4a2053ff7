"""Judging scores: truth is the definition, right kernels pass, and every mistake is found at the probes' shapes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

from pytest_fa.catalog.case import parse_case
from pytest_fa.gpu.inputs import Inputs, make_inputs, poison
from pytest_fa.judge.diagnosis import diagnose
from pytest_fa.judge.oracle import truth_of
from pytest_fa.judge.output_check import check_output
from pytest_fa.judge.scores import make_scores_truth
from pytest_fa.judge.truth import make_truth
from pytest_fa.records.checks import Check

Wrong = Callable[[Inputs], torch.Tensor]

GEMM, TILE = "b1h1s4d4", "b1h1s32d64"
PROBES = [f"{GEMM}-fp16", f"{GEMM}-bf16", f"{TILE}-fp16-sk64", f"{TILE}-bf16-sk64"]
SEEDS = range(20)


def inputs_of(shape: str, seed: int = 0) -> Inputs:
    """The inputs of a shape."""
    return make_inputs(parse_case(f"{shape}-seed{seed}"), torch.device("cpu"))


def right(inputs: Inputs) -> torch.Tensor:
    """The output of a right tensor-core kernel: sums in float32, rounded once at the end."""
    heads = inputs.q.shape[1] // inputs.k.shape[1]
    k = inputs.k.float().repeat_interleave(heads, dim=1)
    return (inputs.q.float() @ k.transpose(2, 3) * inputs.scale).to(inputs.q.dtype)


def check(out: torch.Tensor, inputs: Inputs) -> Check:
    """The verdict on an output of scores."""
    return check_output(out, truth_of("scores", inputs, (), "same_precision"), "same_precision")


# -- truth ------------------------------------------------------------------------------------------------------------


def test_truth_is_the_definition() -> None:
    """Each element is scale times the product of one query and one key; two query heads share a key head here."""
    inputs = inputs_of("b2h4s3d8-bf16-kv2-sk5")
    q, k = inputs.q.double(), inputs.k.double()
    truth = make_scores_truth(inputs)
    for batch, head, query, key in ((0, 0, 0, 0), (0, 1, 2, 4), (1, 2, 1, 3), (1, 3, 2, 0)):
        want = inputs.scale * sum(
            float(a) * float(b) for a, b in zip(q[batch, head, query], k[batch, head // 2, key], strict=True)
        )
        assert float(truth.out[batch, head, query, key]) == pytest.approx(want, rel=1e-12)
    assert (truth.out.shape, truth.out.dtype, truth.terms) == ((2, 4, 3, 5), torch.float64, 8)


def test_same_precision_reference_is_truth_rounded_once() -> None:
    """The same-precision reference of scores is truth rounded to the dtype."""
    truth = make_scores_truth(inputs_of(f"{TILE}-bf16-sk64"))
    assert torch.equal(truth.same_precision, truth.out.bfloat16().double())


def test_row_size_is_the_rms_of_random_scores() -> None:
    """For random keys, the row size is within 5 % of the row's RMS."""
    inputs = inputs_of("b1h2s16d64-fp16-sk4096")
    truth = make_scores_truth(inputs)
    torch.testing.assert_close(truth.row_size, truth.out.square().mean(-1).sqrt(), rtol=0.05, atol=0)


def test_v_is_not_read() -> None:
    """Truth does not depend on V."""
    inputs = inputs_of(f"{TILE}-fp16-sk64")
    with_nan = inputs._replace(v=torch.full_like(inputs.v, float("nan")))
    assert torch.equal(make_scores_truth(inputs).out, make_scores_truth(with_nan).out)


def test_truth_of_selects_by_what_is_computed() -> None:
    """`truth_of` returns the truth of attention for attention, with the spread if the policy needs it."""
    inputs = inputs_of("b1h1s8d8-fp16")
    assert torch.equal(truth_of("attention", inputs, (), "same_precision").out, make_truth(inputs).out)
    assert truth_of("attention", inputs, (), "fp8").spread is not None


# -- right ones -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [*PROBES, "b2h4s150d4-fp16-kv2", "b2h3s160d64-fp16-sk192", "b1h2s64d128-bf16"])
def test_right_scores_pass(shape: str) -> None:
    """A right kernel uses less than 0.8 of every bound, with each of twenty seeds."""
    for seed in SEEDS:
        verdict = check(right(inputs_of(shape, seed)), inputs_of(shape, seed))
        assert verdict.passed
        assert (verdict.tightest.used or 0) < 0.8


@pytest.mark.parametrize("scale", [0.0, -1.0, 1.0, 30.0])
def test_any_scale_is_a_scale(scale: float) -> None:
    """With any scale, zero included, the right scores pass and scores that are 1 too large fail."""
    inputs = inputs_of(f"{TILE}-fp16-sk64")._replace(scale=scale)
    assert check(right(inputs), inputs).passed
    assert not check(right(inputs) + 1, inputs).passed


# -- wrong ones -------------------------------------------------------------------------------------------------------


def one_row(inputs: Inputs) -> torch.Tensor:
    """Scores in which query 2 has the row of query 1."""
    out = right(inputs)
    out[:, :, 2] = out[:, :, 1]
    return out


def transposed_k(inputs: Inputs) -> torch.Tensor:
    """Q K instead of Q K^T: the memory of K is read with its two dimensions exchanged."""
    k = inputs.k.reshape(*inputs.k.shape[:2], inputs.k.shape[3], inputs.k.shape[2])  # [b, h, d, s]
    return right(inputs._replace(k=k.transpose(2, 3)))


def key_dropped(inputs: Inputs, value: float = 0.0) -> torch.Tensor:
    """Scores whose column of the last key is `value` instead."""
    out = right(inputs)
    out[..., -1] = value
    return out


def key_not_written(inputs: Inputs) -> torch.Tensor:
    """Scores whose column of the last key is still the poison."""
    out = right(inputs)
    out[..., -1] = poison(out[..., -1].clone())
    return out


MISTAKES: dict[str, Wrong] = {
    "scale 1 % off": lambda i: right(i._replace(scale=i.scale * 1.01)),
    "scale 1 % less": lambda i: right(i._replace(scale=i.scale * 0.99)),
    "scale forgotten": lambda i: right(i._replace(scale=1.0)),
    "one row wrong": one_row,
    "K transposed": transposed_k,
    "a key dropped": key_dropped,
    "a key not written": key_not_written,
    "two keys changed places": lambda i: right(i)[..., [1, 0, *range(2, i.k.shape[2])]],
    "a dimension left out": lambda i: right(i._replace(q=i.q * (torch.arange(i.q.shape[3]) > 0))),
    "stale output": lambda i: right(inputs_of_like(i, seed=99)),
    "attention in its place": lambda i: torch.softmax(right(i).float(), -1).to(i.q.dtype),
}


def inputs_of_like(inputs: Inputs, seed: int) -> Inputs:
    """Other inputs of the same shape, as of an earlier call."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(each.shape, generator=generator).to(each.dtype) for each in inputs[:3])
    return inputs._replace(q=q, k=k, v=v)


@pytest.mark.parametrize("shape", PROBES)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_mistake_is_found(mistake: str, shape: str) -> None:
    """Each mistake fails at the probes' shapes, in both dtypes, with each of twenty seeds."""
    passed = [seed for seed in SEEDS if check(MISTAKES[mistake](inputs_of(shape, seed)), inputs_of(shape, seed)).passed]
    assert passed == []


@pytest.mark.parametrize(
    ("mistake", "shape", "cause"),
    [
        ("scale 1 % off", PROBES[2], "the scale is 1 % too large"),
        ("scale 1 % less", PROBES[2], "the scale is 1 % too small"),
        ("scale forgotten", PROBES[2], "the scale is not applied"),
        ("K transposed", PROBES[2], "K is transposed once too often, or not at all"),
        ("one row wrong", PROBES[2], "query 2 holds query 1: look at the row of each store"),
        ("a key dropped", PROBES[2], "the output is 0 in key 63 of 64"),
        ("a key not written", PROBES[2], "the kernel never wrote key 63 of 64: the NaN poison is still there"),
    ],
)
def test_the_likely_cause_is_named(mistake: str, shape: str, cause: str, snapshot: SnapshotAssertion) -> None:
    """The diagnosis of scores names the mistake or its location, in which the last axis is `key`."""
    inputs = inputs_of(shape)
    out, truth = MISTAKES[mistake](inputs), make_scores_truth(inputs)
    diagnosis = diagnose(out, truth, inputs, check_output(out, truth, "same_precision"), None, (), "scores")
    assert diagnosis.cause.startswith(cause)
    assert snapshot == diagnosis.conclusion


def test_a_transposed_output_is_recognised(snapshot: SnapshotAssertion) -> None:
    """If there are as many keys as queries, a transposed output has the right shape, and the diagnosis names it."""
    inputs = inputs_of("b1h1s4d4-fp16")
    out, truth = right(inputs).transpose(2, 3).contiguous(), make_scores_truth(inputs)
    diagnosis = diagnose(out, truth, inputs, check_output(out, truth, "same_precision"), None, (), "scores")
    assert snapshot == diagnosis.cause

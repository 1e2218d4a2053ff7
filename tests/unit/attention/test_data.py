"""Data profiles: what each one is, and the cases that cannot have it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from pytest_fa.attention.data import LEVEL, PROFILES
from pytest_fa.attention.dtypes import FORMATS
from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.suites import SUITES
from pytest_fa.errors import UsageProblem
from pytest_fa.gpu.inputs import Inputs, make_inputs
from pytest_fa.judge.truth import hidden_keys, make_truth, repeated_heads

CPU = torch.device("cpu")
EACH_PROFILE = pytest.mark.parametrize("profile", PROFILES)
EACH_DTYPE = pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
EVERY_PART = (  # of attention, each with its own tensors
    "b2h4s20d64-fp16-win5_0-kv2-sk30-bshd",
    "b2h4s20d64-fp16-kv2-packed",
    "b4h4s20d64-fp16-causal_br-kv2-sk30-var2-thd",
    "b4h4s3d64-fp16-kv2-sk40-var1-page16",
    "b4h4s3d64-fp16-kv2-sk40-var4-page16hnd-append",
    "b2h2s20d64-fp16-sk30-dv32-maskq-sink",
    "b1h2s20d64-fp16-sk0",
)


def inputs_of(shape: str, profile: str, seed: int = 0) -> Inputs:
    """The inputs of a case with a profile."""
    return make_inputs(parse_case(f"{shape}-data_{profile}-seed{seed}"), CPU)


def scores_of(inputs: Inputs) -> torch.Tensor:
    """The scores that queries see, [batch, heads, seq_q, seq_k] float64."""
    scores = inputs.q.double() @ repeated_heads(inputs.k, inputs.q).mT * inputs.scale
    hidden = hidden_keys(inputs, slice(0, inputs.q.shape[2]))
    return scores if hidden is None else scores.masked_fill(hidden, -math.inf)


# -- the data ---------------------------------------------------------------------------------------------------------


@EACH_PROFILE
@EACH_DTYPE
def test_data_are_finite_and_those_of_the_seed(profile: str, dtype: str) -> None:
    """A profile changes the values alone, is the same in each call, and another one with another seed."""
    shape = f"b2h2s50d64-{dtype}"
    plain = make_inputs(parse_case(f"{shape}-seed0"), CPU)
    first, again, other = (inputs_of(shape, profile, seed) for seed in (0, 0, 1))
    for name, tensor in first.parts.items():
        assert bool(tensor.isfinite().all())
        assert torch.equal(tensor, again.parts[name])
        assert (tensor.shape, tensor.stride(), tensor.dtype) == (
            plain.parts[name].shape,
            plain.parts[name].stride(),
            plain.parts[name].dtype,
        )
    assert any(not torch.equal(tensor, plain.parts[name]) for name, tensor in first.parts.items())
    assert any(not torch.equal(tensor, other.parts[name]) for name, tensor in first.parts.items())


@EACH_PROFILE
@pytest.mark.parametrize("shape", EVERY_PART)
def test_other_parts_stay_as_they_are(profile: str, shape: str) -> None:
    """With any layout, cache and mask, tensors lie in memory as without the profile, and the truth is finite."""
    try:
        inputs = inputs_of(shape, profile)
    except UsageProblem:
        assert (shape, profile) == (EVERY_PART[5], "low_lse")  # which has a sink
        return
    plain = make_inputs(parse_case(f"{shape}-seed0"), CPU)
    ours, others = (
        {name: (tensor.shape, tensor.stride()) for name, tensor in each.placed().parts.items()}
        for each in (inputs, plain)
    )
    assert ours == others
    assert bool(make_truth(inputs).out.isfinite().all())


def test_scores_are_what_the_profiles_say() -> None:
    """The log-sum-exp, the weights, and the size of keys and dims."""
    scores = {name: scores_of(inputs_of("b1h2s113d64-fp16", name)) for name in PROFILES}
    lse = {name: each.logsumexp(-1) for name, each in scores.items()}
    assert bool(((lse["low_lse"] + LEVEL).abs() < 10).all())
    assert bool(((lse["high_lse"] - LEVEL).abs() < 10).all())
    assert float(scores["one_hot"].softmax(-1).amax(-1).min()) > 1 - 1e-12
    assert torch.equal(scores["equal_scores"][..., 2:], scores["equal_scores"][..., :-2])
    weights = scores["massive_key"].softmax(-1)[..., 0]
    assert 0.3 < float((weights > 0.99).double().mean()) < 0.7
    outliers = inputs_of("b1h2s113d64-fp16", "outlier_channels")
    for tensor, factor in ((outliers.q, 12), (outliers.k, 8)):
        sizes = tensor.double().square().mean((0, 1, 2)).sqrt()
        assert sizes.argmax() == 3
        assert float(sizes[3] / sizes.median()) == pytest.approx(factor, rel=0.2)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_long_tail_has_many_moderate_outliers(name: str) -> None:
    """Ten times as many numbers are above 4 RMS as in N(0, 1) data; none is above 30."""
    plain = make_inputs(parse_case("b1h2s113d64-fp32-seed0"), CPU).parts[name]
    tensor = inputs_of("b1h2s113d64-fp32", "long_tail").parts[name]
    above = [int((each.abs() > 4 * each.square().mean().sqrt()).sum()) for each in (tensor, plain)]
    assert above[0] > 10 * max(1, above[1])
    assert float(tensor.abs().max() / tensor.square().mean().sqrt()) < 30


@EACH_DTYPE
def test_small_and_large_values(dtype: str) -> None:
    """Only in fp16, V and its output, and some dims of K, are subnormal; large values fit into the output."""
    limits = torch.finfo(getattr(torch, FORMATS[dtype].torch_name))
    small, large = (inputs_of(f"b1h2s113d64-{dtype}", profile) for profile in ("subnormal", "value_range"))
    is_fp16 = dtype == "fp16"
    assert bool((make_truth(small).out.abs() < limits.smallest_normal).all()) == is_fp16
    assert bool((small.k[..., ::4].abs() < limits.smallest_normal).any()) == is_fp16
    assert float(small.v.abs().max()) < (limits.smallest_normal if is_fp16 else 2.0**-97)
    assert (
        float((scores_of(small) - scores_of(make_inputs(parse_case(f"b1h2s113d64-{dtype}-seed0"), CPU))).std()) < 0.01
    )
    largest = float(large.v.abs().max())
    assert largest == (60000 if is_fp16 else 2.0**96)
    assert 0.25 < float((large.v.abs() == largest).double().mean()) < 0.4
    assert bool((make_truth(large).out[..., ::2] > largest / 4).all())


def test_gradients_have_weaker_data_in_fp16() -> None:
    """V is neither so small nor so large that dS vanishes or overflows."""
    v = {name: inputs_of("b1h2s50d64-fp16-bwd", name).v for name in ("subnormal", "value_range")}
    plain = make_inputs(parse_case("b1h2s50d64-fp16-bwd-seed0"), CPU)
    assert torch.equal(v["subnormal"], plain.v)
    assert float(v["value_range"].abs().max()) == 256


# -- cases ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "profile", "message"),
    [
        ("b1h2s50d64-e4m3", "long_tail", "quantised data are special already; drop -data_long_tail"),
        ("b1h2s50d64-fp16-kv_int8_t", "one_hot", "quantised data are special already"),
        ("b1h2s50d64-fp16-cap50", "high_lse", "a soft cap keeps scores near 0"),
        ("b1h2s50d64-fp16-cap2", "one_hot", "a soft cap keeps scores near 0"),
        ("b1h2s50d64-fp16-scale0", "low_lse", "with the scale 0, no scores are near 100"),
        ("b1h2s50d64-fp16-scalem0p1", "one_hot", "with the scale -0.1, no key has all the weight"),
        ("b1h2s50d64-fp16-sink", "low_lse", "a sink is part of the log-sum-exp"),
        ("b1h2s50d64-fp16-biash", "equal_scores", "a bias makes scores differ"),
        ("b1h2s50d64-fp16-alibi", "equal_scores", "a bias makes scores differ"),
        ("b1h2s50d64-fp16-scores", "value_range", "scores alone do not read V"),
    ],
)
def test_impossible_cases_say_why(shape: str, profile: str, message: str) -> None:
    """What would undo a profile is an error, with the text to drop."""
    with pytest.raises(UsageProblem, match=message):
        parse_case(f"{shape}-data_{profile}-seed0")


def test_other_texts_are_malformed_and_e4m3_has_no_profile() -> None:
    """N(0, 1) data have no text, and a case that becomes e4m3 loses its profile."""
    with pytest.raises(UsageProblem, match="is malformed"):
        parse_case("b1h2s50d64-fp16-data_normal-seed0")
    assert parse_case("b1h2s50d64-fp16-data_one_hot-seed0").with_dtype("e4m3").id == "b1h2s50d64-e4m3-seed0"


def test_the_suite_has_each_profile_with_and_without_a_mask() -> None:
    """In the order of the profiles, with plain data first."""
    pairs = [(case.value_of("profile"), case.causal) for case in SUITES["data"]]
    assert pairs == list(itertools.product(("normal", *PROFILES), ("none", "top_left")))

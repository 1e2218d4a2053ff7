"""The truth of gradients agrees with autograd in float64, and its bounds pass right kernels and reject wrong ones."""

from __future__ import annotations

import functools
import itertools
import math
from functools import partial
from typing import NamedTuple

import pytest
import torch

from pytest_fa.attention import parts
from pytest_fa.attention.backward import OWN_OUT
from pytest_fa.attention.grouped_heads import key_heads
from pytest_fa.attention.lse import exact_lse
from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.variant import Rounding
from pytest_fa.errors import UsageProblem
from pytest_fa.gpu.inputs import Inputs, make_inputs, poison
from pytest_fa.judge import truth as truth_module
from pytest_fa.judge.gradients import BLOCK_SHARE, Upstream, check_gradients, make_gradients
from pytest_fa.judge.padding import rows_of
from pytest_fa.judge.row_outputs import make_row_truth
from pytest_fa.judge.truth import Truth, make_truth
from tests.tiers import nightly_after
from tests.unit.judge.backward_kernels import DATA, LARGE_SHAPES, RIGHT, SHAPES, WRONG, Call, Variant

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
MAX_USED, MIN_USED = 0.99, 1.1  # of a bound, by right kernels and by wrong ones
assert_close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
CASES = (
    "b2h3s65d64-fp16",
    "b1h2s1d64-bf16",
    "b1h2s3d64-fp16-sk1",
    "b1h2s48d64-fp16-causal-sk80",
    "b1h2s80d64-fp16-causal_br-sk48",  # the first queries see no key
    "b2h4s33d64-bf16-kv2-sk70-dv32-scalem0p3",
    "b1h4s40d64-fp16-kv1-sk50-cap2",
    "b1h3s40d64-fp16-sk50-alibi",
    "b2h6s40d64-fp16-kv2-sk50-sink",
    "b1h3s60d64-fp16-causal_br-sk37-sink",  # the first queries see the sink alone
    "b2h2s33d64-fp16-sk50-bias",
    "b2h2s33d64-fp16-sk50-biasbhq-maskbq",
    "b2h6s77d64-fp16-win37_9-kv2-sk150-cap2-biashq-sink",
    "b4h4s70d64-fp16-causal_br-kv2-sk77-var2",
    "b4h2s1d64-fp16-sk70-var1-cap5-sink",
)


def inputs_of(shape: str, seed: int = 0) -> Inputs:
    """The inputs of a case."""
    return make_inputs(parse_case(f"{shape}-seed{seed}"), CPU)


def upstream_of(inputs: Inputs, *, has_dlse: bool = True, rms: float = 1.0) -> Upstream:
    """The output, rounded, and random gradients of it and of the log-sum-exp."""
    generator = torch.Generator().manual_seed(17)
    out = make_truth(inputs).out.to(inputs.q.dtype)
    dout = (torch.randn(out.shape, generator=generator) * rms).to(out.dtype)
    return Upstream(out, dout, torch.randn(out.shape[:3], generator=generator) if has_dlse else None)


def dense(inputs: Inputs, upstream: Upstream) -> dict[str, torch.Tensor]:
    """The gradients by autograd, from attention as its definition says, without blocks or formulas."""
    leaves = {name: tensor.double() for name, tensor in inputs.parts.items() if tensor.is_floating_point()}
    leaves = {name: tensor.nan_to_num(0.0, math.inf, -math.inf).requires_grad_() for name, tensor in leaves.items()}
    order, seq_q, seq_k = key_heads(inputs), inputs.q.shape[2], inputs.k.shape[2]
    k, v = (leaves[name][:, order] for name in "kv")
    scores, is_last = leaves["q"] @ k.mT * inputs.scale, inputs.convention("add") == "before_cap"
    if (cap := inputs.word("softcap")) and not is_last:
        scores = cap * (scores / cap).tanh()
    lengths_q, lengths_k = (inputs.word(word) for word in ("seqlens_q", "seqlens_k"))
    lengths_q, lengths_k = (seq_q if lengths_q is None else lengths_q, seq_k if lengths_k is None else lengths_k)
    query, key = torch.arange(seq_q)[:, None], torch.arange(seq_k)
    own = query if inputs.causal == "top_left" else query + (lengths_k - lengths_q)
    hidden = torch.zeros(scores.shape, dtype=torch.bool) | (query >= lengths_q) | (key >= lengths_k)
    if (bias := leaves.get("attn_bias")) is not None:
        scores, hidden = scores + bias, hidden | (bias == -math.inf) & (not is_last)
    if (slopes := leaves.get("alibi_slopes")) is not None:
        scores = scores - slopes * (own - key).abs()
    if cap and is_last:
        scores = cap * (scores / cap).tanh()
    if inputs.causal != "none":
        hidden = hidden | (key > own)
    if (left := inputs.word("window_left")) is not None:
        hidden = hidden | (key < own - left) | (key > own + inputs.word("window_right"))
    if (mask := inputs.word("attn_mask")) is not None:
        hidden = hidden | ~mask
    has_sink = "sink" in leaves
    of_base = math.log(2) if inputs.convention("sink") == "base2" else 1.0
    sink = of_base * leaves["sink"].clamp_min(-1e300) if has_sink else None  # autograd has NaN for -inf
    lse = exact_lse(scores.masked_fill(hidden, -1e300), sink)
    is_seen = ~hidden.all(-1) | (leaves["sink"][..., 0] > -math.inf if has_sink else False)
    p = (scores - lse[..., None]).masked_fill(hidden, -math.inf).exp()
    total = ((p @ v) * upstream.dout.double().nan_to_num()).sum()
    if upstream.dlse is not None:
        total = total + lse.where(is_seen, 0.0).mul(upstream.dlse.double()).sum()
    names = {"q": "dq", "k": "dk", "v": "dv", "attn_bias": "dbias", "sink": "dsink"}
    words = [word for word in names if word in leaves]
    gradients = torch.autograd.grad(total, [leaves[word] for word in words])
    return {names[word]: gradient for word, gradient in zip(words, gradients, strict=True)}


@pytest.mark.parametrize("shape", CASES)
def test_gradients_are_those_of_autograd(shape: str) -> None:
    """Also with all parts of attention together, and the gradient of the log-sum-exp."""
    inputs = inputs_of(shape)
    upstream = upstream_of(inputs)
    got = {name: each.out for name, each in make_gradients(inputs, upstream).items()}
    expected = dense(inputs, upstream)
    assert got.keys() == expected.keys()
    for name, gradient in got.items():
        assert_close(gradient, expected[name])


@pytest.mark.parametrize(
    ("shape", "convention"),
    [
        ("b1h4s33d64-fp16-kv2-sk40", {"groups": "interleaved"}),
        ("b2h2s33d64-fp16-sk40-cap2-biashq", {"add": "before_cap"}),
        ("b2h6s33d64-fp16-kv2-sk40-sink", {"sink": "base2"}),
    ],
)
def test_gradients_of_a_kernel_with_conventions(shape: str, convention: dict[str, str]) -> None:
    """Key heads get the gradients of the query heads that read them, and a bias before the cap has its derivative.

    That of a sink in base 2 is by the sink as the call has it.
    """
    inputs = make_inputs(parse_case(f"{shape}-seed0"), CPU, convention)
    upstream, expected = upstream_of(inputs), dense(inputs, upstream_of(inputs))
    for name, each in make_gradients(inputs, upstream).items():
        assert_close(each.out, expected[name])


def test_gradients_without_elements_are_left_out() -> None:
    """A call without keys has only a gradient of its queries, which is zero."""
    inputs = inputs_of("b1h2s5d64-fp16-sk0")
    gradients = make_gradients(inputs, upstream_of(inputs))
    assert {name: bool(each.out.any()) for name, each in gradients.items()} == {"dq": False}
    assert check_gradients({"dq": torch.zeros_like(inputs.q)}, gradients)["dq"].passed


def test_gradients_in_float32_are_refused() -> None:
    """Their bounds would be those of other roundings."""
    inputs = inputs_of("b1h2s5d64-fp32")
    with pytest.raises(UsageProblem, match="fp16 and bf16 only"):
        make_gradients(inputs, upstream_of(inputs))


@pytest.mark.parametrize("shape", CASES)
def test_blocks_of_queries_change_nothing(monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    """The truth of blocks of 7 queries is that of one block, with the reference and all sizes."""
    inputs = inputs_of(shape)
    upstream = upstream_of(inputs)
    whole = make_gradients(inputs, upstream)
    row_bytes = 8 * inputs.q.shape[0] * inputs.q.shape[1] * inputs.k.shape[2]
    monkeypatch.setattr(truth_module, "BLOCK_BYTES", {"cpu": 7 * BLOCK_SHARE * row_bytes})
    for name, each in make_gradients(inputs, upstream).items():
        for tensor, expected in zip(each, whole[name], strict=True):
            if isinstance(tensor, torch.Tensor):
                assert_close(tensor, expected)


def test_padding_of_a_ragged_batch_is_judged_as_declared() -> None:
    """Rows at or behind the lengths hold NaN in what the call gets, and stay untouched in each gradient."""
    inputs = inputs_of("b4h4s70d64-fp16-causal_br-kv2-sk77-var2")
    padding, (out, dout, _) = parts.padding(inputs), upstream_of(inputs)
    assert padding is not None
    given = (tensor.masked_fill(rows_of(padding, tensor), math.nan) for tensor in (out, dout, dout[..., 0]))
    with_nan = Upstream(*given)
    for name, truth in make_gradients(inputs, with_nan).items():
        assert truth.padding is not None
        rows, written = rows_of(truth.padding, truth.out), truth.same_precision.half()
        untouched = written.where(~rows, poison(torch.empty_like(written)))
        assert (bool(rows.any()), bool(truth.out[rows].any())) == (True, False)
        assert check_gradients({name: untouched}, {name: truth})[name].passed
        assert check_gradients({name: written}, {name: truth})[name].tightest.name == "rows past"


# -- simulated kernels ------------------------------------------------------------------------------------------------


class Solved(NamedTuple):
    """What a kernel gets, and its truth."""

    inputs: Inputs
    upstream: Upstream
    lse: torch.Tensor
    truths: dict[str, Truth]


@functools.lru_cache(maxsize=512)
def solved(shape: str, data: str, seed: int = 0, rounds: tuple[Rounding, ...] = ()) -> Solved:
    """A problem with some kind of data; the gradient of the log-sum-exp is zero if the seed is odd."""
    inputs = inputs_of(shape, seed)
    q, k, v = (tensor.clone() for tensor in inputs[:3])
    if data == "peaked":
        q *= 6
    if data == "outlier":
        k[..., 5] *= 12
        v[..., 7] *= 12
    inputs = inputs._replace(q=q, k=k, v=v)
    upstream = upstream_of(inputs, has_dlse=seed % 2 == 0, rms=0.02 if data == "small" else 1.0)
    if data == "outlier":
        upstream.dout[..., 9] *= 12
    lse = make_row_truth(parts.outputs()["lse"], inputs).exact
    return Solved(inputs, upstream, lse, make_gradients(inputs, upstream, rounds))


def used_by(variant: Variant, shape: str, data: str, seed: int = 0) -> float:
    """The largest share of a bound that a simulated kernel uses; infinite for NaN."""
    inputs, upstream, lse, truths = solved(shape, data, seed, variant.rounds)
    written = Call(inputs, upstream, lse, variant).gradients
    checks = check_gradients(written, {name: truths[name] for name in written})
    shares = [math.inf if bound.used is None else bound.used for check in checks.values() for bound in check.bounds]
    assert all(check.passed for check in checks.values()) == (max(shares) <= 1)
    return max(shares)


EACH_DTYPE = pytest.mark.parametrize("dtype", nightly_after(1, ["fp16", "bf16"]))


@EACH_DTYPE
@pytest.mark.parametrize("name", RIGHT)
def test_right_kernel_passes(name: str, dtype: str) -> None:
    """With any tiles, roundings and formulas that are right, on all data, a kernel uses less than each bound."""
    variant = RIGHT[name]
    for shape, data in itertools.product(variant.shapes, variant.data):
        assert used_by(variant, shape.format(dtype), data, DATA.index(data) % 2) < MAX_USED, (shape, data)


@pytest.mark.nightly
@EACH_DTYPE
@pytest.mark.parametrize("shape", [*SHAPES, *LARGE_SHAPES])
def test_right_kernel_passes_with_more_seeds(shape: str, dtype: str) -> None:
    """The same at up to 1024 queries, with two more seeds, one of which is without a gradient of the log-sum-exp."""
    for seed, data, (name, variant) in itertools.product((1, 2), DATA, RIGHT.items()):
        if shape in (*variant.shapes, *LARGE_SHAPES):
            assert used_by(variant, shape.format(dtype), data, seed) < MAX_USED, (seed, data, name)


@EACH_DTYPE
@pytest.mark.parametrize("name", WRONG)
def test_wrong_kernel_is_rejected(name: str, dtype: str) -> None:
    """Each mistake breaks a bound on each case that shows it, on all data that it names."""
    variant = WRONG[name]
    for shape, data in itertools.product(variant.shapes, variant.data):
        assert used_by(variant, shape.format(dtype), data) > MIN_USED, (shape, data)


@EACH_DTYPE
def test_delta_may_be_that_of_an_own_output(dtype: str) -> None:
    """By autograd, a kernel has an output of its own, for which it rounds P: with few keys, delta is another one then.

    For a kernel that gets the output of the judge, the same gradients are wrong.
    """
    strict: list[float] = []
    own: list[float] = []
    for seed in range(6):
        inputs, upstream, lse, truths = solved(f"b3h4s229d64-{dtype}-sk3", "random", 2 * seed)
        given = Call(inputs, upstream, lse, Variant())
        p = given.p.to(inputs.q.dtype).float()
        rounded = (p @ given.v).to(inputs.q.dtype)
        written = Call(inputs, upstream._replace(out=rounded), lse, Variant()).gradients
        of_own = make_gradients(inputs, upstream, (OWN_OUT,))
        for shares, bounds in ((strict, truths), (own, of_own)):
            check = check_gradients({"dq": written["dq"]}, {"dq": bounds["dq"]})["dq"]
            shares += [bound.used or 0.0 for bound in check.bounds]
    assert max(own) < MAX_USED / 2
    assert max(strict) > 2 * max(own)

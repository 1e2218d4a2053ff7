"""Each simulated mistake of a backward kernel gets the sentence of that mistake, on random data in fp16 and bf16."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import pytest
import torch

from pytest_fa.gpu.inputs import poison
from pytest_fa.judge.gradient_mistakes import explain_gradients
from pytest_fa.judge.gradients import make_gradients
from pytest_fa.judge.mistaken_gradients import BackwardCall, GradientMistake, GradientPlaces, GradientPredictor
from pytest_fa.judge.truth import make_truth
from tests.tiers import nightly_after
from tests.unit.judge.backward_kernels import (
    CAPPED,
    CAUSAL,
    GROUPED,
    PLAIN,
    SINKS,
    STEPS,
    WRONG,
    Call,
    Variant,
    stepwise,
    wrong,
)
from tests.unit.judge.test_gradients import CASES, Solved, assert_close, inputs_of, solved, upstream_of

pytestmark = pytest.mark.usefixtures("one_thread")

Gradients = dict[str, torch.Tensor]
NAMES = ("dq", "dk", "dv")
LN2 = math.log(2)
UNEQUAL_ROWS = ("b1h2s77d64-{}-causal_br-sk40",)  # the first queries see no key
DELTA, OF_DLSE = "delta = rowsum(dO * O)", "dlse, the gradient of the log-sum-exp,"
OF_EXP2 = "P is exp2(S - L), it must be exp(S - L): look for log2 e in the scale"
# The sentences of mistakes in `backward_kernels`.
SENTENCES = {
    "no delta": f"{DELTA} is missing in dS = P (dP - delta)",
    "delta of the next row": f"{DELTA} is that of the next row: look at its index",
    "delta of the next head": f"{DELTA} is that of the next head: look at its index",
    "dq without scale": "the softmax scale is missing in dq",
    "dk without scale": "the softmax scale is missing in dk",
    "dk scaled twice": "the softmax scale is applied twice in dk",
    "dS unmasked on the first hidden diagonal": (
        "the causal mask is one key too wide: look at the comparison of key and query index (in dq and dk)"
    ),
    "mask one key too wide": "the causal mask is one key too wide: look at the comparison of key and query index",
    "mask one key too narrow": "the causal mask is one key too narrow: look at the comparison of key and query index",
    "mask aligned to the first key": (
        "the causal mask is top left where it should be bottom right: if that is meant, write `top_left` in "
        "`supports: {causal: [...]}`"
    ),
    "heads summed modulo": "the heads of Q are summed by h % kv_heads, not h // group, in dk and dv",
    "heads overwrite one another": (
        "only the last head of each group is in dk and dv: add up all heads that share a key head"
    ),
    "one head lost in dk": "head 1 of Q is missing in dk: look at the loop over the heads of a group",
    "K of h % kv_heads in dq": "dQ = dS K reads K of the key head by h % kv_heads, not h // group",
    "one key lost in dq": "key 17 is missing in dq: look at the loop over keys",
    "last row lost in dv": "the last query is missing in dv: look at the tail mask or the last tile",
    "last row lost in dk": "the last query is missing in dk: look at the tail mask or the last tile",
    "P 1 % too large": (
        "1.01 times the right values in dq, dk and dv: look at the factors, and at P if it is in all of them"
    ),
    "log-sum-exp of the next row": "the log-sum-exp in P = exp(S - L) is that of the next row: look at its index",
    "log-sum-exp in base 2": (
        "the log-sum-exp, which is in natural logarithms, is taken for one in base 2: P = exp(S - L) is right; "
        "if base 2 is meant, declare `conventions: {lse: base2}`"
    ),
    "dv from P that is not normalised": "P is exp(S - max), not normalised: it must be exp(S - L) (in dv)",
    "dL ignored": f"{OF_DLSE} is ignored: dS = P (dP - delta + dlse)",
    "dL with the other sign": f"{OF_DLSE} is subtracted: dS = P (dP - delta + dlse)",
    "dq summed in 16 bits": "the error of dq is no larger than that of sums in 16 bits: add up in float32",
    "no derivative of the cap": "the derivative of the soft cap, 1 - tanh(S / cap)^2, is missing in dS",
    "derivative at the capped score": (
        "the derivative of the soft cap, 1 - tanh(S / cap)^2, is computed of the scores after the cap"
    ),
    "no sink in P": "P leaves out the sink: use the log-sum-exp of the call, which has it",
    "no bias in S": "the bias is ignored: look at the bias",
    "dO of the next head in dP": "dP = dO V^T reads dO of the next head: look at its index",
    "dO of the next row in dv": "dV = P^T dO reads dO of the next row: look at its index",
}
# Further mistakes, with their sentences.
MORE: dict[str, tuple[Variant, str]] = {
    "no scale in dq and dk": (
        wrong({name: lambda c, name=name: STEPS[name](c) / c.scale for name in ("dq", "dk")}),  # type: ignore[misc]
        "the softmax scale is missing in dq and dk",
    ),
    "log2 e left in dq and dk": (
        wrong({name: lambda c, name=name: STEPS[name](c) / LN2 for name in ("dq", "dk")}),  # type: ignore[misc]
        "a factor of log2 e is too much in dq and dk: the scale of exp2 is used in place of the softmax scale",
    ),
    "dk twice": (
        wrong(stepwise("dk", lambda dk: 2 * dk)),
        "twice the right values in dk: added to a buffer that is not zeroed, or added twice",
    ),
    "zeros in dk and dv": (
        wrong(stepwise("dk", torch.zeros_like) | stepwise("dv", torch.zeros_like)),
        "all zeros in dk and dv: the kernel writes zeros, or the result is never written",
    ),
    "exp2 without log2 e": (
        wrong({"p": lambda c: (c.scores - c.lse).exp2().masked_fill(c.hidden, 0.0)}),
        OF_EXP2,
    ),
    "dS transposed in dk": (
        wrong({"dk": lambda c: c.scale * c.product(c.rounded(c.ds), c.q)}),
        "dS is transposed in dk: look at the order of its rows and columns",
    ),
    "P transposed in dv": (
        wrong({"dv": lambda c: c.product(c.rounded(c.p), c.dout)}),
        "P is transposed in dv: look at the order of its rows and columns",
    ),
    "K in place of V in dP": (
        wrong({"dp": lambda c: c.dout @ c.k.mT}),
        "dP = dO V^T reads K in place of V: look at the pointers",
    ),
    "first head of each group": (
        wrong({"of_keys": lambda c: lambda each: each[:, :: c.group]}, GROUPED),
        "only the first head of each group is in dk and dv: add up all heads that share a key head",
    ),
    "no mask": (
        wrong({"hidden": lambda c: c.positions.nothing_hidden}, CAUSAL),
        "the causal mask is none where it should be top left",
    ),
    "no cap": (
        wrong({"scores": lambda c: c.products, "slope": lambda _: 1.0}, CAPPED),
        "the soft cap is not applied: look at the soft cap",
    ),
    "delta of another sign beside a sink": (
        wrong(stepwise("delta", torch.neg), SINKS),
        f"{DELTA} is added to dP, it must be subtracted",
    ),
    "half of the dims in delta": (
        wrong({"delta": lambda c: (c.dout * c.out)[..., :32].sum(-1, keepdim=True)}),
        f"{DELTA} sums only the first 32 of 64 dims: look at the reduction",
    ),
    "no delta, and no scale in dk": (
        wrong({"delta": lambda c: 0 * c.lse, "dk": lambda c: STEPS["dk"](c) / c.scale}, PLAIN[:1]),
        (
            f"{DELTA} is missing in dS = P (dP - delta) (in dq); and "
            f"{DELTA} is missing in dS = P (dP - delta), and the softmax scale is missing in dk"
        ),
    ),
    "P of exp2, and no scale in dq and dk": (
        wrong(
            {
                "p": lambda c: (c.scores - c.lse).exp2().masked_fill(c.hidden, 0.0),
                "dq": lambda c: STEPS["dq"](c) / c.scale,
                "dk": lambda c: STEPS["dk"](c) / c.scale,
            },
            PLAIN[:1],
        ),
        (f"{OF_EXP2} (in dv); and {OF_EXP2}, and the softmax scale is missing in dq and dk"),
    ),
    "one wrong gradient that is not explained": (
        wrong({"delta": lambda c: 0 * c.lse, "dv": lambda c: STEPS["dv"](c).cos()}, PLAIN[:1]),
        f"{DELTA} is missing in dS = P (dP - delta); and dv is wrong in every batch, key head, key and dim, too",
    ),
}
# What the kernel does to right gradients, and the sentence.
CHANGED: dict[str, tuple[Callable[[Gradients], Gradients], str]] = {
    "dk and dv exchanged": (
        lambda g: {"dq": g["dq"], "dk": g["dv"], "dv": g["dk"]},
        "dk and dv are exchanged: look at the order of the outputs",
    ),
    "dk written to dv": (
        lambda g: g | {"dv": g["dk"]},
        "dv has the values of dk: look at the pointer of the output",
    ),
    "heads and sequence exchanged": (
        lambda g: g | {"dk": g["dk"].transpose(1, 2).reshape(g["dk"].shape)},
        "dk is written as bshd where the layout is bhsd: look at the strides",
    ),
    "rows and columns exchanged": (
        lambda g: g | {"dq": g["dq"].transpose(2, 3).reshape(g["dq"].shape)},
        "each head of dq is transposed: look at the store's row and column",
    ),
    "zeros in some rows": (
        lambda g: g | {"dv": g["dv"].index_fill(2, torch.arange(8, 16), 0.0)},
        "dv is 0 in key 8 to 15 of 64: never written there, or a zero accumulator is written",
    ),
    "never written": (
        lambda g: g | {"dk": _unwritten(g["dk"])},
        "the kernel never wrote dk in key 32 to 63 of 64: the NaN poison is still there",
    ),
    "unknown": (
        lambda g: g | {"dq": g["dq"].index_fill(2, torch.tensor([5]), 3.0)},
        "dq is wrong in query 5 of 64; no known mistake gives these gradients",
    ),
}
EACH_DTYPE = pytest.mark.parametrize("dtype", nightly_after(1, ["fp16", "bf16"]))


def _unwritten(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient with the NaN of a fresh output in its last rows."""
    fresh = poison(torch.empty_like(gradient))
    return torch.cat([gradient[:, :, :32], fresh[:, :, 32:]], 2)


def written_by(variant: Variant, problem: Solved) -> Gradients:
    """dq, dk and dv of a simulated kernel."""
    gradients = Call(problem.inputs, problem.upstream, problem.lse, variant).gradients
    return {name: gradients[name] for name in NAMES}


def cause_of(written: Gradients, problem: Solved) -> str:
    """The explanation of gradients."""
    return explain_gradients(written, problem.truths, problem.inputs, problem.upstream)


@EACH_DTYPE
@pytest.mark.parametrize("name", [*SENTENCES, *MORE])
def test_mistake_gets_its_sentence(name: str, dtype: str) -> None:
    """On each case that shows it."""
    variant, sentence = MORE[name] if name in MORE else (WRONG[name], SENTENCES[name])
    for shape in variant.shapes:
        problem = solved(shape.format(dtype), "random")
        assert cause_of(written_by(variant, problem), problem) == sentence, shape


@EACH_DTYPE
@pytest.mark.parametrize("name", CHANGED)
def test_changed_gradients_get_their_sentence(name: str, dtype: str) -> None:
    """Right gradients at wrong places, or in part."""
    change, sentence = CHANGED[name]
    problem = solved(f"b1h2s64d64-{dtype}", "random")
    assert cause_of(change(written_by(Variant(), problem)), problem) == sentence


@EACH_DTYPE
def test_lost_tiles_get_their_sentence(dtype: str) -> None:
    """The keys that dq lacks are named, also if only some rows lack them."""
    problem = solved(f"b1h2s300d64-{dtype}", "random")
    lost = "keys 32 to 63 are missing in dq: look at the loop over tiles of keys"
    for name, where in (
        ("32 keys lost in dq", ""),
        ("32 keys lost in dq of 32 rows of one head", ", in head 0 of 2, query 268 to 299 of 300"),
    ):
        assert cause_of(written_by(WRONG[name], problem), problem) == f"{lost}{where}"
    overwritten = "dq is the sum over the last 32 keys alone: the last tile overwrites what the others add"
    assert cause_of(written_by(WRONG["dq overwritten by the last tile"], problem), problem) == overwritten


@EACH_DTYPE
def test_rows_without_keys_get_their_sentence(dtype: str) -> None:
    """NaN where exp(-inf - -inf) is computed, which reaches dk and dv through the sums over queries."""
    problem = solved(UNEQUAL_ROWS[0].format(dtype), "random")
    right, no_key = written_by(Variant(), problem), problem.lse[..., None] == -math.inf
    nan = "exp(-inf - -inf) is NaN, P must be 0 where the log-sum-exp is -inf"
    in_dq = right | {"dq": right["dq"].masked_fill(no_key, math.nan)}
    assert cause_of(in_dq, problem) == f"NaN in dq exactly in the queries that see no key: {nan}"
    in_sums = right | {name: torch.full_like(right[name], math.nan) for name in ("dk", "dv")}
    assert cause_of(in_sums, problem) == f"NaN in dk and dv, and some queries see no key: {nan}"
    elsewhere = right | {"dq": right["dq"].index_fill(2, torch.tensor([76]), math.nan)}
    assert cause_of(elsewhere, problem) == (
        "the kernel computed NaN or Inf in dq in query 76 of 77: look for 0/0, an overflow, or unwritten memory that "
        "it reads"
    )


@pytest.mark.parametrize("shape", CASES)
def test_a_pass_without_mistake_gives_the_truth(shape: str) -> None:
    """With each part of attention, the steps that mistakes replace are those of the truth, for any queries and keys."""
    inputs = inputs_of(shape)
    upstream = upstream_of(inputs)._replace(out=make_truth(inputs).out)
    truths = make_gradients(inputs, upstream)
    for batch in range(inputs.q.shape[0]):
        places = GradientPlaces(batch, *(torch.arange(0, size, 2) for size in (inputs.q.shape[2], inputs.k.shape[2])))
        predictor = GradientPredictor(BackwardCall.of(inputs, upstream, batch), truths, places)
        for name in NAMES:
            assert_close(predictor.exact(GradientMistake(""), name), places.of(name, truths[name].out))


def test_explanation_is_quick_where_no_mistake_is_found() -> None:
    """On one thread it takes less than a second; the limit is for a slow machine."""
    problem = solved("b1h2s300d64-bf16", "random")
    written = written_by(Variant(), problem)
    written["dk"] = written["dk"] + torch.randn(written["dk"].shape).to(torch.bfloat16)
    start = time.process_time()
    assert cause_of(written, problem).endswith("no known mistake gives these gradients")
    assert time.process_time() - start < 5

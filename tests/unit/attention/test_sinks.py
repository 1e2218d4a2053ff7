"""Attention sinks: truth, right kernels, the names of mistakes, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pytest_fa.attention.lse import PART as LSE
from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.claims import claim_cases
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import FaError, UsageProblem
from pytest_fa.gpu.inputs import Inputs, make_inputs
from pytest_fa.judge.pipeline import run_case
from pytest_fa.judge.row_outputs import make_row_truth
from pytest_fa.judge.truth import make_truth
from pytest_fa.wire.jobs import CaseResult
from tests.factories import MANIFEST, WriteVariant, cpu_job

CPU = torch.device("cpu")
KERNEL = """\
import torch


def forward(q, k, v, *, scale, causal="none", out=None, lse=None, softcap=0.0, sink=None):
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q.float() @ k.float().transpose(2, 3) * scale
    seq_q, seq_k = scores.shape[2:]
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if causal != "none":
        shift = seq_k - seq_q if causal == "bottom_right" else 0
        hidden = torch.arange(seq_k) > torch.arange(seq_q)[:, None] + shift
        scores = scores.masked_fill(hidden, -torch.inf)
    if sink is not None:
        sinks = sink[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], -1)
    if lse is not None:
        lse.copy_(scores.logsumexp(-1))
    p = torch.softmax(scores, -1).nan_to_num()[..., :seq_k]
    return out.copy_(p @ v.float())
"""
SUPPORTS = (
    "{device: [cpu], dtype: [fp16, bf16, fp32], causal: [none, top_left, bottom_right], softcap: true, seq_k_min: 0, "
    "grouped_heads: true, sink: true}"
)
VariantOf = Callable[..., Variant]


@pytest.fixture
def variant_of(write_variant: WriteVariant, tmp_path: Path) -> VariantOf:
    """`variant_of(source)`: a variant that claims sinks."""

    def make(source: str = KERNEL, supports: str = SUPPORTS, more: str = "returns: [out, lse]\n") -> Variant:
        manifest = f'{MANIFEST}entry: {{target: "entry:forward"}}\nsupports: {supports}\n{more}'
        folder = write_variant("mine", manifest=manifest, **{"entry.py": source})
        (variant,) = read_manifest(folder / "variant.yaml", tmp_path / "kernels")
        return variant

    return make


def judged(variant: Variant, case: str, **changes: object) -> CaseResult:
    """The result of one case on the CPU."""
    return run_case(cpu_job(variant, f"b1h4s64d64-fp16-{case}-seed0", repeats=2, **changes))


# -- truth ------------------------------------------------------------------------------------------------------------


def rows_of(inputs: Inputs, bottom_right: bool) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: FBT001
    """Output and log-sum-exp by loops over rows and keys, with Python's floats."""
    q, k, v = (tensor.double().tolist() for tensor in inputs[:3])
    sinks = inputs.extra["sink"].flatten().tolist()
    out, lse = torch.zeros(inputs.q.shape, dtype=torch.float64), torch.zeros(inputs.q.shape[:3], dtype=torch.float64)
    batch, heads, seq_q, seq_k = *inputs.q.shape[:3], inputs.k.shape[2]
    for b in range(batch):
        for h in range(heads):
            kv = h * len(k[b]) // heads
            for i in range(seq_q):
                keys = [j for j in range(seq_k) if not bottom_right or j <= i + seq_k - seq_q]
                scores = [inputs.scale * sum(x * y for x, y in zip(q[b][h][i], k[b][kv][j], strict=True)) for j in keys]
                largest = max([*scores, sinks[h]])
                if largest == -math.inf:
                    lse[b, h, i] = -math.inf
                    continue
                weights = [math.exp(score - largest) for score in scores]
                total = sum(weights) + math.exp(sinks[h] - largest)
                lse[b, h, i] = largest + math.log(total)
                for weight, j in zip(weights, keys, strict=True):
                    out[b, h, i] += torch.tensor(v[b][kv][j], dtype=torch.float64) * (weight / total)
    return out, lse


@pytest.mark.parametrize(
    "case", ["b2h6s9d8-fp32-sink", "b1h6s9d8-fp16-causal_br-kv2-sk5-sink", "b1h2s3d8-fp32-sk0-sink"]
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_truth(case: str, seed: int) -> None:
    """A sink counts in the sum of each row; a row without keys is 0, and its log-sum-exp is the sink."""
    parsed = parse_case(f"{case}-seed{seed}")
    inputs = make_inputs(parsed, CPU)
    out, lse = rows_of(inputs, parsed.causal == "bottom_right")
    torch.testing.assert_close(make_truth(inputs).out, out, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(make_row_truth(LSE, inputs).exact, lse, rtol=1e-12, atol=1e-12)
    assert make_row_truth(LSE, inputs).allowed.isfinite().all()


def test_heads_have_all_sinks() -> None:
    """Six heads have all six; a single head has one that changes the output, and the second has none, with any seed."""
    sinks = [make_inputs(parse_case(f"b1h6s8d8-fp16-sink-seed{seed}"), CPU).extra["sink"] for seed in range(8)]
    assert {frozenset(each.flatten().tolist()) for each in sinks} == {frozenset((-math.inf, 0, 3, 12, 100, -50))}
    assert len({float(each[0, 0]) for each in sinks}) == 2
    assert {float(each[0, 1]) for each in sinks} == {-math.inf}
    first = {float(make_inputs(parse_case(f"b1h1s8d8-fp16-sink-seed{seed}"), CPU).extra["sink"]) for seed in range(8)}
    assert first == {3.0, 100.0}


def test_other_data_stay() -> None:
    """A case with a sink has the q, k and v of the case without it."""
    with_sink, plain = (make_inputs(parse_case(f"b1h2s8d8-fp16{part}-seed0"), CPU) for part in ("-sink", ""))
    assert all(torch.equal(*pair) for pair in zip(with_sink[:3], plain[:3], strict=True))
    assert plain.extra == {}


def test_its_bytes_are_counted() -> None:
    """One float32 for each head of q."""
    case, plain = (parse_case(f"b2h4s8d8-fp16{part}-seed0") for part in ("-sink", ""))
    assert case.bytes_per_call - plain.bytes_per_call == 16


# -- right kernels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        "b1h6s64d64-fp16-sink",
        "b2h4s150d64-bf16-causal_br-kv2-sk77-sink",
        "b1h6s77d64-fp32-causal-sk150-sink",
        "b1h6s64d64-fp16-cap2-sink-bshd",
        "b1h1s64d64-fp16-sk0-sink",
        "b1h1s31d64-fp32-sk1055-sink",
    ],
)
def test_a_right_kernel_passes(variant_of: VariantOf, case: str) -> None:
    """A plain kernel in float32 passes, with its log-sum-exp, for each half of the sinks, and in timed calls."""
    supports = SUPPORTS.replace("{", "{layout: [bhsd, bshd], ")
    for seed in (0, 1):
        job = cpu_job(variant_of(supports=supports), f"{case}-seed{seed}", repeats=2, time=True)
        result = run_case(job)
        assert result.outcome == "ok", result.message


ONE_SOFTMAX = "    p = torch.softmax(scores, -1).nan_to_num()[..., :seq_k]\n"
IN_STEPS = """\
    m = scores{keys}.amax(-1, keepdim=True)
    p = torch.exp(scores[..., :seq_k] - m)
    l = p.sum(-1, keepdim=True) + torch.exp(scores[..., seq_k:] - m)
    v = v.float()
    out.copy_(p.to(q.dtype).float() @ v / l)
    return out
"""


@pytest.mark.parametrize("keys", ["", "[..., :seq_k]"], ids=["in the maximum", "not in the maximum"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("seed", [0, 1])
def test_other_right_kernels_pass(variant_of: VariantOf, keys: str, dtype: str, seed: int) -> None:
    """P in the dtype of q, and a maximum with or without the sink, whose exponential then overflows, are right."""
    source = KERNEL.replace(ONE_SOFTMAX, IN_STEPS.format(keys=keys), 1)
    result = run_case(cpu_job(variant_of(source, more=""), f"b2h6s77d64-{dtype}-sk150-sink-seed{seed}", repeats=2))
    assert result.outcome == "ok", result.message


@pytest.mark.parametrize("name", ["hard_data", "head_independence", "contained_nan", "new_data", "new_shape"])
def test_properties_hold(variant_of: VariantOf, name: str) -> None:
    """A right kernel has each property on cases with sinks, also where shifted scores change the result."""
    for case in ("b2h6s77d64-fp16-sink-seed0", "b2h6s77d64-fp32-cap2-sink-seed1"):
        result = run_case(cpu_job(variant_of(), case, property_name=name))
        assert result.outcome == "ok", (name, result.message)


def test_what_is_claimed_is_judged(variant_of: VariantOf) -> None:
    """The cases of a manifest's claims have sinks with each mask."""
    cases = claim_cases(variant_of(), [])
    masks = {case.causal for case in cases if case.value_of("sink")}
    assert masks == {"none", "top_left", "bottom_right"}
    assert all(parse_case(case.id) == case for case in cases)


UNGUARDED = """\
    if sink is not None:
        largest = scores.amax(-1, keepdim=True)
        scores = scores - largest
        p = scores.exp() / scores.exp().sum(-1, keepdim=True)
        return out.copy_(torch.where(largest == -torch.inf, sinks.isneginf() * torch.nan, p[..., :seq_k] @ v.float()))
    if lse is not None:
"""


def test_a_row_without_keys_and_sink_is_judged(variant_of: VariantOf) -> None:
    """The claims have a case with such rows: a kernel that computes -inf - (-inf) there is wrong."""
    supports = "{device: [cpu], dtype: [fp16], causal: [none, bottom_right], sink: true}"
    variant = variant_of(KERNEL.replace("    if lse is not None:\n", UNGUARDED, 1), supports, "")
    cases = [case for case in claim_cases(variant, []) if case.value_of("sink")]
    assert {run_case(cpu_job(variant, case.id, repeats=2)).outcome for case in cases} == {"ok", "wrong"}


# -- the tensor is guarded as q, k and v ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("    if sink is not None:\n        sink.add_(0.5)\n", "the kernel changed its input sink"),
        (
            "    if sink is not None:\n        sink.as_strided((1,), (1,), sink.storage_offset() + 4).fill_(1.0)\n",
            "the kernel wrote out of bounds of sink: 4 bytes past its end, the nearest 0 bytes from it",
        ),
    ],
)
def test_a_sink_is_guarded(variant_of: VariantOf, source: str, message: str) -> None:
    """A kernel that writes into the sinks, or past their end, is wrong."""
    broken = KERNEL.replace("    groups =", f"{source}    groups =", 1)
    result = judged(variant_of(broken, more=""), "sink")
    assert result.outcome == "wrong"
    assert message in result.message


def test_a_timed_call_gets_its_own_sinks(variant_of: VariantOf) -> None:
    """A kernel that keeps the sinks of its first call is right in the checked call, and wrong in the timed ones."""
    kept = "KEPT = []\n\n\n" + KERNEL.replace(
        "    if sink is not None:\n",
        "    if sink is not None:\n        KEPT.append(sink.clone())\n        sink = KEPT[0]\n",
        1,
    )
    source = kept.replace("import torch\n", "", 1)
    result = run_case(
        cpu_job(variant_of(f"import torch\n\n{source}", more=""), "b1h4s64d64-fp16-sink-seed0", time=True)
    )
    assert (result.outcome, result.caught_by) == ("wrong", ("timed outputs",)), result.message


# -- mistakes ---------------------------------------------------------------------------------------------------------

SINKS = "sink[:, None, None].expand(*scores.shape[:3], 1)"
WITHOUT_MAX = """\
    m = scores[..., :seq_k].amax(-1, keepdim=True)
    p = torch.exp(scores[..., :seq_k] - m)
    p = p / (p.sum(-1, keepdim=True) + torch.exp(scores[..., seq_k:]))
"""
MISTAKES = [
    ("if sink is not None:", "if False:", "sink", "the sink is missing"),
    (
        SINKS,
        f"{SINKS} + 0.6931472",
        "sink",
        "the sink is counted 2 times, as if each of 2 splits or each tile of 32 keys had it",
    ),
    (SINKS, f"{SINKS} + 0.6931472", "sk1055-sink", "the sink is counted 2 times, as if each of 2 splits had it"),
    (SINKS, f"{SINKS} + 2.8332133", "sk1055-sink", "the sink is counted 17 times, as if each tile of 64 keys had it"),
    (SINKS, f"{SINKS} * scale", "sink", "the sink is multiplied by the softmax scale"),
    (SINKS, f"{SINKS} * 0.6931472", "sink", "the sink is in base 2 where the scores are in base e"),
    (SINKS, f"{SINKS} * 1.442695", "sink", "the sink is multiplied by log2 e once too often"),
    (SINKS, f"{SINKS}.clamp(0, 0)", "sink", "each head has a sink of 0"),
    (SINKS, SINKS.replace("sink[", "sink.roll(-1)["), "sink", "each head has the sink of the next head"),
    (SINKS, SINKS.replace("sink[", "sink.roll(1)["), "sink", "each head has the sink of the head before it"),
    (SINKS, SINKS.replace("sink[:,", "sink[:1,"), "sink", "each head has the sink of head 0"),
    (
        SINKS,
        SINKS.replace("sink[", "sink[: k.shape[1] // groups].repeat_interleave(groups)["),
        "kv2-sink",
        "the sink is read at the index of the head of K and V",
    ),
    (SINKS, f"softcap * torch.tanh({SINKS} / softcap)", "cap2-sink", "the sink is capped, too"),
    (
        "    p = torch.softmax(scores, -1).nan_to_num()[..., :seq_k]\n",
        WITHOUT_MAX,
        "sink",
        "exp(sink) is added to the row sum, not exp(sink - max)",
    ),
    (
        "nan_to_num()[..., :seq_k]",
        "nan_to_num()\n    p[..., 0] += p[..., -1]\n    p = p[..., :seq_k]",
        "sink",
        "the weight of the sink goes to V of key 0",
    ),
]


@pytest.mark.parametrize(("right", "wrong", "case", "cause"), MISTAKES, ids=[f"{row[2]}-{row[3]}" for row in MISTAKES])
def test_a_mistake_is_named(variant_of: VariantOf, right: str, wrong: str, case: str, cause: str) -> None:
    """A kernel with one mistake in its sink is wrong, and the diagnosis names the mistake."""
    assert right in KERNEL
    result = judged(variant_of(KERNEL.replace(right, wrong, 1), more=""), case)
    assert (result.outcome, result.diagnosis is None) == ("wrong", False), result.message
    assert result.diagnosis is not None
    assert cause in result.diagnosis.cause


@pytest.mark.parametrize(
    ("lse", "cause"),
    [
        ("scores[..., :seq_k].logsumexp(-1)", "the sink is left out of the log-sum-exp"),
        ("scores.logsumexp(-1).logaddexp(scores[..., -1])", "the sink is counted twice in the log-sum-exp"),
        ("scores.logsumexp(-1) / 0.6931472", "the log-sum-exp is in base 2"),
    ],
)
def test_a_mistake_in_the_log_sum_exp_is_named(variant_of: VariantOf, lse: str, cause: str) -> None:
    """A kernel whose output is right and whose log-sum-exp is not is told why."""
    result = judged(variant_of(KERNEL.replace("scores.logsumexp(-1)", lse, 1)), "sink")
    assert (result.outcome, result.diagnosis is None) == ("wrong", False), result.message
    assert result.diagnosis is not None
    assert cause in result.diagnosis.cause


@pytest.mark.parametrize(
    ("right", "wrong", "cause"),
    [
        ("* scale\n", "* scale * 1.01\n", "the softmax scale is 1 % too large"),
        ("    k, v =", "    v = v.roll(1, 2)\n    k, v =", "P meets V 1 keys earlier"),
        (
            "    scores = q",
            "    k = k[:, :, :48]\n    v = v[:, :, :48]\n    scores = q",
            "the last 16 keys are missing",
        ),
    ],
)
def test_other_mistakes_keep_their_names(variant_of: VariantOf, right: str, wrong: str, cause: str) -> None:
    """A mistake that is not about the sink is named beside a sink that is right."""
    result = judged(variant_of(KERNEL.replace(right, wrong, 1), more=""), "sink")
    assert result.diagnosis is not None
    assert cause in result.diagnosis.cause


# -- what is refused --------------------------------------------------------------------------------------------------


def test_what_is_not_claimed_is_refused(variant_of: VariantOf) -> None:
    """A case with sinks is refused with the key to write."""
    reason = variant_of(supports="{device: [cpu]}", more="").refuses(parse_case("b1h2s64d64-fp16-sink-seed0"))
    assert reason is not None
    assert "sink is true, supports false (extend supports.sink if the kernel can)" in reason


def test_scores_have_no_sink() -> None:
    """A probe of scores has no softmax."""
    with pytest.raises(UsageProblem, match="scores alone have no sink; drop -sink"):
        parse_case("b1h2s64d64-fp16-sink-scores-seed0")


@pytest.mark.parametrize(
    ("sink", "message"),
    [
        (torch.zeros(3), r"sink is torch.float32 \[3\]; it must be torch.float32 \[2\], \[heads\]"),
        (torch.zeros(2, dtype=torch.float16), r"sink is torch.float16 \[2\]; it must be torch.float32 \[2\]"),
    ],
)
def test_a_sink_of_another_kind_is_refused(sink: torch.Tensor, message: str) -> None:
    """A call with a tensor of another shape or dtype is refused before it is made."""
    q = torch.zeros(1, 2, 4, 8, dtype=torch.float16)
    with pytest.raises(FaError, match=message):
        Inputs.of_call(q, q, q, 1.0, sink=sink)

"""ALiBi, a bias and a mask: truth, right kernels, the names of mistakes, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_fa.attention import not_judged
from pytest_fa.attention.axes import ALL
from pytest_fa.attention.lse import PART as LSE
from pytest_fa.candidate.adapter import adapted
from pytest_fa.catalog.case import Case, parse_case
from pytest_fa.catalog.claims import claim_cases
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.variant import Call, Variant
from pytest_fa.errors import FaError, ManifestError, UsageProblem
from pytest_fa.gpu.inputs import Inputs, make_inputs
from pytest_fa.judge.pipeline import run_case
from pytest_fa.judge.row_outputs import make_row_truth
from pytest_fa.judge.truth import make_truth
from pytest_fa.wire.jobs import CaseResult
from tests.factories import MANIFEST, WriteVariant, cpu_job

CPU = torch.device("cpu")
KERNEL = """\
import torch


def forward(
    q, k, v, *, scale, causal="none", out=None, lse=None, softcap=0.0, sink=None,
    attn_bias=None, attn_mask=None, alibi_slopes=None,
):
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q.float() @ k.float().transpose(2, 3) * scale
    seq_q, seq_k = scores.shape[2:]
    own = torch.arange(seq_q)[:, None] + seq_k - seq_q
    keys = torch.arange(seq_k)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if attn_bias is not None:
        scores = scores + attn_bias.float()
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[:, None, None] * (own - keys).abs()
    if causal != "none":
        scores = scores.masked_fill(keys > own - (seq_k - seq_q if causal == "top_left" else 0), -torch.inf)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    if sink is not None:
        scores = torch.cat([scores, sink[:, None, None].expand(*scores.shape[:3], 1)], -1)
    if lse is not None:
        lse.copy_(scores.logsumexp(-1))
    p = torch.softmax(scores, -1).nan_to_num()[..., :seq_k]
    return out.copy_(p @ v.float())
"""
SUPPORTS = (
    "{device: [cpu], dtype: [fp16, bf16, fp32], causal: [none, top_left, bottom_right], softcap: true, seq_k_min: 0, "
    "grouped_heads: true, sink: true, bias: true, mask: true, alibi: true}"
)
VariantOf = Callable[..., Variant]


@pytest.fixture
def variant_of(write_variant: WriteVariant, tmp_path: Path) -> VariantOf:
    """`variant_of(source)`: a variant that claims all of it."""

    def make(source: str = KERNEL, supports: str = SUPPORTS, more: str = "returns: [out, lse]\n") -> Variant:
        manifest = f'{MANIFEST}entry: {{target: "entry:forward"}}\nsupports: {supports}\n{more}'
        folder = write_variant("mine", manifest=manifest, **{"entry.py": source})
        (variant,) = read_manifest(folder / "variant.yaml", tmp_path / "kernels")
        return variant

    return make


def judged(variant: Variant, case: str, **changes: object) -> CaseResult:
    """The result of one case on the CPU."""
    return run_case(cpu_job(variant, case, repeats=2, **changes))


# -- truth ------------------------------------------------------------------------------------------------------------


def number(inputs: Inputs, word: str, *places: int) -> float | None:
    """What a call has for a batch, head, query and key, from the tensor as it is handed over."""
    if word not in inputs.tensors:
        return None
    tensor = inputs.tensors[word]
    return float(tensor[places[1]] if tensor.dim() == 1 else tensor[places])


def rows_of(case: Case, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp by loops over rows and keys, with Python's floats."""
    q, k, v = (tensor.double().tolist() for tensor in inputs[:3])
    cap = case.value_of("softcap")
    out, lse = torch.zeros(inputs.q.shape, dtype=torch.float64), torch.zeros(inputs.q.shape[:3], dtype=torch.float64)
    for b in range(case.batch):
        for h in range(case.heads):
            kv = h * case.kv_heads // case.heads
            sink = number(inputs, "sink", b, h)
            for i in range(case.seq_q):
                own, seen = i + case.seq_k - case.seq_q, {}
                for j in range(case.seq_k):
                    score = case.scale * sum(x * y for x, y in zip(q[b][h][i], k[b][kv][j], strict=True))
                    score = cap * math.tanh(score / cap) if cap else score
                    score += number(inputs, "attn_bias", b, h, i, j) or 0.0
                    score -= (number(inputs, "alibi_slopes", b, h, i, j) or 0.0) * abs(own - j)
                    is_ahead = case.causal == "bottom_right" and j > own
                    if not is_ahead and number(inputs, "attn_mask", b, h, i, j) != 0 and score != -math.inf:
                        seen[j] = score
                scores = [*seen.values(), *([] if sink is None or sink == -math.inf else [sink])]
                largest = max(scores, default=0.0)
                total = sum(math.exp(score - largest) for score in scores)
                lse[b, h, i] = largest + math.log(total) if total else -math.inf
                for j, score in seen.items():
                    out[b, h, i] += torch.tensor(v[b][kv][j], dtype=torch.float64) * math.exp(score - largest) / total
    return out, lse


TRUTH = [
    *(f"b2h2s9d8-fp32-{part}{axes}" for part in ("bias", "mask") for axes in ALL),
    "b2h4s6d8-fp16-kv2-sk11-biashq",
    "b1h3s11d8-bf16-causal_br-sk6-cap2-biasbq-sink",
    "b2h2s7d8-fp32-cap2-biash-maskbq-sink",
    "b1h3s7d8-fp32-sk12-alibi",
    "b1h3s12d8-fp32-causal_br-sk7-cap2-alibi-maskq-sink",
    "b1h2s3d8-fp32-sk0-maskbhq",
    "b1h2s3d8-fp32-sk0-alibi-sink",
]


@pytest.mark.parametrize("name", TRUTH)
def test_the_truth(name: str) -> None:
    """Scale, cap, bias and ALiBi, mask, softmax; keys with a bias of -inf are hidden; a row without keys is 0."""
    case = parse_case(f"{name}-seed0")
    inputs = make_inputs(case, CPU)
    out, lse = rows_of(case, inputs)
    torch.testing.assert_close(make_truth(inputs).out, out, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(make_row_truth(LSE, inputs).exact, lse, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("part", ["biasbhq", "biashq", "maskbq", "maskbhq"])
def test_some_rows_see_no_key(part: str) -> None:
    """Rows without keys are in the data of each case with a query axis; others lack whole tiles of keys."""
    inputs = make_inputs(parse_case(f"b2h2s77d8-fp16-sk150-{part}-seed0"), CPU)
    (tensor,) = inputs.tensors.values()
    hidden = ~tensor if tensor.dtype == torch.bool else tensor == -math.inf
    empty = hidden.all(-1)
    assert 5 <= int(empty[0, 0].sum()) <= 20
    assert int((hidden[0, 0, :, :64].all(-1) & ~empty[0, 0]).sum()) >= 10
    assert 0.1 < float(hidden.double().mean()) < 0.6


def test_a_broadcast_axis_has_no_stride() -> None:
    """A tensor comes with all four axes, and with a stride of 0 along those on which it does not depend."""
    inputs = make_inputs(parse_case("b2h4s7d8-bf16-sk5-biasq-maskb-seed0"), CPU)
    bias, mask = (inputs.tensors[name] for name in ("attn_bias", "attn_mask"))
    assert (bias.shape, bias.stride(), bias.dtype) == ((2, 4, 7, 5), (0, 0, 5, 1), torch.bfloat16)
    assert (mask.shape, mask.stride(), mask.dtype) == ((2, 4, 7, 5), (5, 0, 0, 1), torch.bool)
    words: dict[str, Any] = dict(inputs.tensors)
    again = Inputs.of_call(*inputs[:4], **words)
    assert all(torch.equal(again.extra[name], tensor) for name, tensor in inputs.extra.items())


def test_their_work_is_counted() -> None:
    """A bias has an addition for each visible pair; each number is read once, and a mask has no operations."""
    plain = parse_case("b2h4s8d8-fp16-causal-seed0")
    pairs = 2 * 4 * 36
    for part, flops, size in (
        ("biasbhq", pairs, 2 * 2 * 4 * 8 * 8),
        ("bias", pairs, 2 * 8),
        ("maskbq", 0, 2 * 8 * 8),
        ("alibi", 2 * pairs, 4 * 4),
    ):
        case = parse_case(f"b2h4s8d8-fp16-causal-{part}-seed0")
        more = case.flops_per_call - plain.flops_per_call, case.bytes_per_call - plain.bytes_per_call
        assert more == (flops, size), part


# -- right kernels ----------------------------------------------------------------------------------------------------

CASES = [
    "b2h4s77d64-fp16-kv2-sk150-biasbhq",
    "b1h2s150d64-bf16-causal_br-sk77-cap2-biasq",
    "b2h2s64d64-fp32-biashq-maskb-sink",
    "b2h4s77d64-fp16-kv2-sk150-maskbhq",
    "b2h2s64d64-bf16-causal-mask-sink",
    "b1h2s150d64-fp32-sk77-maskq",
    "b1h4s77d64-fp16-causal_br-kv2-sk150-alibi",
    "b1h4s150d64-bf16-sk77-cap50-alibi-sink",
    "b1h2s64d64-fp32-alibi-maskhq-bshd",
    "b1h1s31d64-fp16-sk1055-alibi",
    "b1h1s1d64-fp16-sk1055-biasbhq",
]


@pytest.mark.parametrize("case", CASES)
def test_a_right_kernel_passes(variant_of: VariantOf, case: str) -> None:
    """A plain kernel in float32 passes, with its log-sum-exp, and in timed calls."""
    supports = SUPPORTS.replace("{", "{layout: [bhsd, bshd], ")
    result = judged(variant_of(supports=supports), f"{case}-seed0", time=True)
    assert result.outcome == "ok", result.message


@pytest.mark.parametrize(
    "name",
    [
        *("hard_data", "head_independence", "contained_nan", "new_data", "new_shape", "padded_rows", "unaligned_rows"),
        *("different_strides", "expanded_heads", "expanded_batch", "offset_pointers", "zero_scale", "negative_scale"),
    ],
)
def test_properties_hold(variant_of: VariantOf, name: str) -> None:
    """A right kernel has each property on cases with these tensors, which also move and get other strides."""
    for case in ("b2h3s77d64-fp16-sk150-biasbq-maskh-sink-seed0", "b2h3s77d64-fp16-sk150-alibi-maskbhq-seed0"):
        result = judged(variant_of(), case, property_name=name)
        assert result.outcome == "ok", (case, result.message)


def test_a_bias_that_is_read_densely_is_found(variant_of: VariantOf) -> None:
    """A kernel that ignores the strides of a bias is right on a dense one, and not on one with padded rows."""
    source = KERNEL.replace(
        "    if attn_bias is not None:\n",
        "    if attn_bias is not None:\n        attn_bias = attn_bias.as_strided(attn_bias.shape, "
        "(attn_bias.stride(0), attn_bias.stride(1), seq_k, 1))\n",
        1,
    )
    case = "b2h3s64d64-fp16-sk150-biasbhq-seed0"
    assert judged(variant_of(source), case).outcome == "ok"
    assert judged(variant_of(source), case, property_name="padded_rows").outcome == "wrong"


def test_what_is_claimed_is_judged(variant_of: VariantOf) -> None:
    """Each choice of axes is judged, ALiBi stands beside each of the others but a bias, and each id can be typed."""
    cases = claim_cases(variant_of(), [])
    assert all(parse_case(case.id) == case for case in cases)
    assert {case.value_of("bias") for case in cases} >= {"", "b", "bh", "hq", "bhq"}
    assert {case.value_of("mask") for case in cases} >= {"", "b", "bh", "hq", "bhq"}
    names = ("bias", "mask", "alibi", "sink", "softcap")
    has = [{name for name in names if case.value_of(name) not in (None, False, 0.0)} for case in cases]
    pairs = {(first, second) for each in has for first in each for second in each}
    missing = {(a, b) for a in names for b in names} - pairs
    assert missing == {("bias", "alibi"), ("alibi", "bias")}
    causal = {case.causal for case in cases if case.value_of("bias") is not None}
    assert causal == {"none", "top_left", "bottom_right"}


# -- the tensors are guarded ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "case", "message"),
    [
        ("attn_mask.logical_not_()", "maskbhq", "the kernel changed its input attn_mask"),
        ("attn_bias.add_(1)", "biasbhq", "the kernel changed its input attn_bias"),
        ("alibi_slopes.mul_(2)", "alibi", "the kernel changed its input alibi_slopes"),
        (
            "attn_mask.as_strided((1,), (1,), attn_mask.storage_offset() + 4096).fill_(False)",
            "maskq",
            "the kernel wrote out of bounds of attn_mask: 1 bytes past its end, the nearest 0 bytes from it",
        ),
    ],
)
def test_a_tensor_is_guarded(variant_of: VariantOf, line: str, case: str, message: str) -> None:
    """A kernel that writes into a tensor, or out of its bounds, is wrong."""
    result = judged(
        variant_of(KERNEL.replace("    groups =", f"    {line}\n    groups =", 1)), f"b1h1s64d64-fp16-{case}-seed0"
    )
    assert result.outcome == "wrong"
    assert message in result.message


@pytest.mark.parametrize(
    ("word", "case"), [("attn_mask", "maskhq"), ("attn_bias", "biashq"), ("alibi_slopes", "alibi")]
)
def test_a_timed_call_gets_its_own_tensor(variant_of: VariantOf, word: str, case: str) -> None:
    """A kernel that keeps the tensor of its first call is right in the checked call, and wrong in the timed ones."""
    kept = f"    KEPT.setdefault(0, {word}.clone())\n    {word} = KEPT[0]\n    groups ="
    source = KERNEL.replace("\n\n\ndef", "\n\nKEPT = {}\n\n\ndef", 1).replace("    groups =", kept, 1)
    result = judged(variant_of(source, more=""), f"b1h4s64d64-fp16-{case}-seed0", time=True)
    assert (result.outcome, result.caught_by) == ("wrong", ("timed outputs",)), result.message


# -- mistakes ---------------------------------------------------------------------------------------------------------

BIAS, SLOPES = "attn_bias.float()", "alibi_slopes[:, None, None]"
BEFORE_CAP = (
    "        scores = softcap * torch.tanh(scores / softcap)\n",
    "        scores = softcap * torch.tanh((scores + attn_bias.float()) / softcap)\n        attn_bias = None\n",
)
MISTAKES = [
    ("if attn_bias is not None", "if False", "biasbhq", "the bias is ignored"),
    (BIAS, f"{BIAS} * scale", "biasbhq", "the bias is multiplied by the softmax scale"),
    (BIAS, f"{BIAS} * 0.6931472", "bias", "the bias is in base 2 where the scores are in base e"),
    (BIAS, f"{BIAS} / 0.6931472", "biasq", "the bias is multiplied by log2 e once too often"),
    (BIAS, f"{BIAS}.roll(-1, 1)", "biasbhq", "each head reads that of the next head"),
    (BIAS, f"{BIAS}[:, :1]", "biashq", "each head reads that of head 0"),
    (BIAS, f"{BIAS}[:, :2].repeat_interleave(2, 1)", "kv2-biashq", "that at the index of the head of K and V"),
    (BIAS, f"{BIAS}[:1]", "biasbq", "each batch reads that of batch 0"),
    (BIAS, f"{BIAS}.roll(-1, 2)", "biasq", "each query reads that of the next query"),
    (BIAS, f"{BIAS}.transpose(2, 3)", "biasq", "it is read transposed, with query and key exchanged"),
    (BIAS, f"{BIAS} * (1 + (keys >= 48))", "biasbhq", "the bias is added twice in the last tile of 16 keys"),
    (
        BIAS,
        "attn_bias[:1, :, :1].flatten().repeat(128).view(attn_bias.shape).float()",
        "biash",
        "it is read as if it were dense, its strides of 0 are ignored",
    ),
    (
        BIAS,
        "attn_bias.reshape(2, seq_q, 4, seq_k).transpose(1, 2).float()",
        "biasbhq",
        "it is read as [batch, query, head, key], not as [batch, head, query, key]",
    ),
    (*BEFORE_CAP, "cap2-biasbhq", "the bias or ALiBi is added before the soft cap"),
    ("if attn_mask is not None", "if False", "maskbhq", "the mask is ignored"),
    ("~attn_mask", "attn_mask", "maskbhq", "the mask is inverted: true hides a key"),
    ("~attn_mask", "attn_mask", "mask", "the mask is inverted: true hides a key"),
    ("~attn_mask", "~attn_mask.roll(-1, 1)", "maskhq", "each head reads that of the next head"),
    ("~attn_mask", "~attn_mask[:, :1]", "maskbh", "each head reads that of head 0"),
    (
        "~attn_mask",
        "~attn_mask.reshape(2, seq_q, 4, seq_k).transpose(1, 2)",
        "maskbhq",
        "it is read as [batch, query, head, key], not as [batch, head, query, key]",
    ),
    (
        "~attn_mask",
        "~attn_mask[:, :2].repeat_interleave(2, 1)",
        "kv2-maskhq",
        "that at the index of the head of K and V",
    ),
    ("~attn_mask", "~attn_mask[:1]", "maskb", "each batch reads that of batch 0"),
    ("~attn_mask", "~attn_mask.transpose(2, 3)", "maskq", "it is read transposed, with query and key exchanged"),
    (
        "scores.masked_fill(~attn_mask, -torch.inf)",
        "scores + attn_mask",
        "maskbhq",
        "the mask is added to the scores as 0 and 1",
    ),
    (
        "scores.masked_fill(~attn_mask, -torch.inf)",
        "scores.masked_fill(~attn_mask, -1e9)",
        "maskq",
        "a row that sees no key is the mean of V, it must be 0",
    ),
    (
        "p = torch.softmax(scores, -1).nan_to_num()[..., :seq_k]",
        "p = torch.softmax(scores, -1)[..., :seq_k]",
        "maskbq",
        "NaN exactly in the queries that see no key: 0/0 at the end, write zeros there",
    ),
    (
        "scores = scores.masked_fill(~attn_mask, -torch.inf)",
        "return out.copy_((torch.softmax(scores, -1) * attn_mask) @ v.float())",
        "maskh",
        "hidden keys are left out of P V, but not of the row sum",
    ),
    ("if alibi_slopes is not None", "if False", "alibi", "ALiBi is not applied"),
    (f"scores - {SLOPES}", f"scores + {SLOPES}", "alibi", "slope * distance is added, it must be subtracted"),
    (
        "(own - keys)",
        "(torch.arange(seq_q)[:, None] - keys)",
        "sk80-alibi",
        "distances are those of the first key and query",
    ),
    ("(own - keys).abs()", "(own - keys)", "alibi", "slope * (key - query) is added without its absolute value"),
    (SLOPES, "alibi_slopes.roll(-1)[:, None, None]", "alibi", "each head has the slope of the next head"),
    (SLOPES, f"{SLOPES} * scale", "alibi", "slope * distance is multiplied by the softmax scale"),
    (SLOPES, f"{SLOPES} * 0.6931472", "alibi", "slope * distance is in base 2 where the scores are in base e"),
    (SLOPES, "2.0 ** (-2.0 * torch.arange(1, 5))[:, None, None]", "alibi", "the slopes are those of the usual formula"),
    (
        SLOPES,
        "alibi_slopes[: k.shape[1] // groups].repeat_interleave(groups)[:, None, None]",
        "kv2-alibi",
        "the slope is read at the index of the head of K and V",
    ),
]


@pytest.mark.parametrize(("right", "wrong", "part", "cause"), MISTAKES, ids=[f"{row[2]}-{row[3]}" for row in MISTAKES])
def test_a_mistake_is_named(variant_of: VariantOf, right: str, wrong: str, part: str, cause: str) -> None:
    """A kernel with one mistake is wrong, and the diagnosis names the mistake."""
    assert right in KERNEL
    result = judged(variant_of(KERNEL.replace(right, wrong, 1), more=""), f"b2h4s64d64-fp16-{part}-seed0")
    assert (result.outcome, result.diagnosis is None) == ("wrong", False), result.message
    assert result.diagnosis is not None
    assert cause in result.diagnosis.cause


@pytest.mark.parametrize(
    ("part", "cause"),
    [
        ("biasq", "the bias is left out of the log-sum-exp"),
        ("alibi", "ALiBi is left out of the log-sum-exp"),
    ],
)
def test_a_log_sum_exp_without_a_part_is_named(variant_of: VariantOf, part: str, cause: str) -> None:
    """A kernel whose output is right, and whose log-sum-exp is that of scores without a part, is told which."""
    source = KERNEL.replace("    if attn_bias", "    plain = scores\n    if attn_bias", 1)
    source = source.replace("scores.logsumexp(-1)", "plain.masked_fill(scores.isinf(), -torch.inf).logsumexp(-1)", 1)
    result = judged(variant_of(source), f"b2h4s64d64-fp16-{part}-seed0")
    assert (result.outcome, result.diagnosis is None) == ("wrong", False), result.message
    assert result.diagnosis is not None
    assert result.diagnosis.cause == cause


@pytest.mark.parametrize("part", ["biasbhq", "maskhq", "alibi"])
@pytest.mark.parametrize(
    ("right", "wrong", "cause"),
    [
        ("* scale\n", "* scale * 1.01\n", "the softmax scale is 1 % too large"),
        ("v.float()", "v.roll(1, 2).float()", "P meets V 1 keys earlier"),
    ],
)
def test_other_mistakes_keep_their_names(variant_of: VariantOf, part: str, right: str, wrong: str, cause: str) -> None:
    """A mistake that is not about the tensor is named beside a tensor that is right."""
    result = judged(variant_of(KERNEL.replace(right, wrong, 1), more=""), f"b1h2s64d64-fp16-{part}-seed0")
    assert result.diagnosis is not None
    assert cause in result.diagnosis.cause


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("biasbhq-alibi", "ALiBi is a bias of the scores; drop -alibi or -bias"),
        ("biasq-scores", "scores alone have no bias; drop -bias"),
        ("mask-scores", "scores alone have no mask; drop -mask"),
        ("alibi-scores", "scores alone have no ALiBi; drop -alibi"),
        ("biasqb", "is malformed; the form is"),
        ("maskx", "is malformed; the form is"),
        ("mask-bias", "is malformed; the form is"),
    ],
)
def test_an_id_that_is_not_possible(text: str, message: str) -> None:
    """An id that says what no case can have is refused with what to write."""
    with pytest.raises(UsageProblem) as problem:
        parse_case(f"b1h1s64d64-fp16-{text}-seed0")
    assert message in str(problem.value)


@pytest.mark.parametrize(
    ("part", "refusal"),
    [
        ("biasq", "bias is true, supports false (extend supports.bias if the kernel can)"),
        ("mask", "mask is true, supports false (extend supports.mask if the kernel can)"),
        ("alibi", "alibi is true, supports false (extend supports.alibi if the kernel can)"),
    ],
)
def test_what_is_not_claimed_is_refused(variant_of: VariantOf, part: str, refusal: str) -> None:
    """A case of what a manifest does not claim is refused with the key to write."""
    reason = variant_of(supports="{device: [cpu]}").refuses(parse_case(f"b1h2s64d64-fp16-{part}-seed0"))
    assert reason is not None
    assert refusal in reason


@pytest.mark.parametrize(
    ("entry", "supports", "message"),
    [
        (
            '{target: "entry:forward", call: {arguments: [q, k, v]}}',
            "{device: [cpu], mask: true}",
            "entry.call does not pass 'attn_mask', but supports.mask is false, true; pass it",
        ),
        (
            '{target: "entry:forward"}',
            "{device: [cpu], bias: bhq}",
            "allowed are true, false, or a list of false, true",
        ),
        (
            '{target: "entry:forward", call: {arguments: [q, k, v, attn_masks]}}',
            "{device: [cpu]}",
            "entry.call.arguments[3] is 'attn_masks'; allowed: q, k, v, out, lse, dq, dk, dv, dbias, dsink",
        ),
        (
            '{target: "entry:forward"}',
            "{device: [cpu], masks: true}",
            "unknown key 'masks' in supports; did you mean 'mask'?",
        ),
    ],
)
def test_a_manifest_that_cannot_be_judged_is_refused(
    write_variant: WriteVariant, tmp_path: Path, entry: str, supports: str, message: str
) -> None:
    """A claim without its word, a word or key that does not exist, and a value that is none: one error each."""
    manifest = f"{MANIFEST}entry: {entry}\nsupports: {supports}\n"
    folder = write_variant("mine", manifest=manifest, **{"entry.py": KERNEL, "kernel.cu": ""})
    with pytest.raises(ManifestError) as problem:
        read_manifest(folder / "variant.yaml", tmp_path / "kernels")
    assert message in str(problem.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            {"attn_mask": torch.zeros(1, 2, 4, 6, dtype=torch.uint8)},
            r"attn_mask is torch.uint8 \[1, 2, 4, 6\]; it must be torch.bool \[1, 2, 4, 6\], each of these or 1",
        ),
        (
            {"attn_bias": torch.zeros(1, 3, 4, 6, dtype=torch.float16)},
            r"attn_bias is torch.float16 \[1, 3, 4, 6\]; it must be torch.float16 \[1, 2, 4, 6\], each of these or 1",
        ),
        ({"attn_bias": torch.zeros(4, 6, dtype=torch.float16)}, r"attn_bias is torch.float16 \[4, 6\]; it must be"),
        (
            {"alibi_slopes": torch.zeros(1, 2)},
            r"alibi_slopes is torch.float32 \[1, 2\]; it must be torch.float32 \[2\]",
        ),
    ],
)
def test_a_tensor_of_another_kind_is_refused(words: dict[str, Any], message: str) -> None:
    """A call with a tensor of another shape or dtype is refused before it is made."""
    q, k = torch.zeros(1, 2, 4, 8, dtype=torch.float16), torch.zeros(1, 2, 6, 8, dtype=torch.float16)
    with pytest.raises(FaError, match=message):
        Inputs.of_call(q, k, k, 1.0, **words)


def test_a_library_gets_its_own_words() -> None:
    """`entry.call` passes the tensors by any name, and None in a plain call."""
    seen: list[object] = []

    def library(q: object, k: object, v: object, *, attention_bias: object, s_aux: object) -> object:  # noqa: ARG001
        seen.append([None if each is None else each.shape for each in (attention_bias, s_aux)])  # type: ignore[attr-defined]
        return q

    call = Call(keywords={"attention_bias": "attn_bias", "s_aux": "sink"})
    for part in ("-biasq-sink", ""):
        inputs = make_inputs(parse_case(f"b1h2s8d8-fp16{part}-seed0"), CPU)
        adapted(library, call)(*inputs[:3], **inputs.keywords)
    assert seen == [[(1, 2, 8, 8), (2,)], [None, None]]


def test_they_are_no_longer_answered_with_not_judged() -> None:
    """The names of libraries are known; masks of blocks and functions of scores are not judged."""
    names = ("attn_bias", "attention_mask", "alibi_slopes", "s_aux", "sinks")
    assert [not_judged.recognised(name) for name in names] == [None] * len(names)
    others = ("block_mask", "mask_mod", "score_mod", "key_padding_mask")
    assert all(not_judged.recognised(name) for name in others)

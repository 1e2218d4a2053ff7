"""A sliding window, a soft cap and another scale: ids, truth, refusals, right kernels and the names of mistakes."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pytest_fa.attention import not_judged
from pytest_fa.attention.token import shortest
from pytest_fa.attention.window import Window
from pytest_fa.candidate.adapter import adapted
from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.claims import claim_cases
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.variant import Call, Variant
from pytest_fa.errors import ManifestError, UsageProblem
from pytest_fa.gpu.inputs import make_inputs
from pytest_fa.judge.pipeline import run_case
from pytest_fa.judge.truth import make_truth
from pytest_fa.wire.jobs import CaseResult
from tests.factories import MANIFEST, WriteVariant, cpu_job

CPU = torch.device("cpu")
KERNEL = """\
import torch


def forward(q, k, v, *, scale, causal="none", out=None, lse=None, softcap=0.0, window_left=None, window_right=None):
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q.float() @ k.float().transpose(2, 3) * scale
    seq_q, seq_k = scores.shape[2:]
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    own = torch.arange(seq_q)[:, None] + seq_k - seq_q
    keys = torch.arange(seq_k)
    hidden = torch.zeros(seq_q, seq_k, dtype=torch.bool)
    if causal != "none":
        hidden |= keys > own - (seq_k - seq_q if causal == "top_left" else 0)
    if window_left is not None:
        hidden |= keys < own - window_left
    if window_right is not None:
        hidden |= keys > own + window_right
    scores = scores.masked_fill(hidden, -torch.inf)
    p = torch.softmax(scores, -1).nan_to_num()
    if lse is not None:
        lse.copy_(scores.logsumexp(-1))
    return out.copy_(p @ v.float())
"""
SUPPORTS = (
    "{device: [cpu], causal: [none, top_left, bottom_right], window: [none, left, both, negative], softcap: true, "
    "seq_k_min: 0, grouped_heads: true}"
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


def judged(variant: Variant, case: str) -> CaseResult:
    """The result of one case on the CPU."""
    return run_case(cpu_job(variant, case, repeats=2))


# -- the case ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("wino_0", "is the bottom-right mask: write -causal_br"),
        ("causal-win3_0", "a window and a causal mask are one thing"),
        ("win3_m4", "the window (3, -4) has no key; the sum of both sides must be 0 or more"),
        ("win3_2-scores", "scores alone have no window; drop -win"),
        ("cap2-scores", "scores alone have no soft cap; drop -cap"),
        ("capm3", "softcap is -3; it must be above 0"),
        ("cap0", "is not in its shortest form; write 'b1h1s64d64-fp16-seed0'"),
        ("cap2p50", "write 'b1h1s64d64-fp16-cap2p5-seed0'"),
        ("scale0p125", "is not in its shortest form; write 'b1h1s64d64-fp16-seed0'"),
        ("scale" + "9" * 40, "float32 cannot hold it"),
        ("cap0p" + "0" * 49 + "1", "is not in its shortest form"),
        ("cap" + "9" * 44, "softcap is 1e+44; float32 cannot hold it"),
        ("win9999999999_0", "a side of a window has at most 2147483647 keys"),
        ("scalem0", "is not in its shortest form; write 'b1h1s64d64-fp16-scale0-seed0'"),
        ("scale0p" + "0" * 45 + "1", "is not in its shortest form; write 'b1h1s64d64-fp16-scale0-seed0'"),
        ("cap2-win3_0", "is malformed; the form is"),
    ],
)
def test_an_id_has_one_form(text: str, message: str) -> None:
    """An id that says something else than it seems to, or that says it in two ways, is refused with what to write."""
    with pytest.raises(UsageProblem) as problem:
        parse_case(f"b1h1s64d64-fp16-{text}-seed0")
    assert message in str(problem.value)


def test_numbers_come_back() -> None:
    """The shortest decimal of any float32 is read as that float32, and has no exponent."""
    generator = random.Random(5)  # noqa: S311  # no secret
    for _ in range(2000):
        value = torch.tensor(generator.uniform(-1, 1) * 10 ** generator.randint(-12, 12)).item()
        text = shortest(value)
        assert (torch.tensor(float(text)).item(), "e" in text) == (value, False)
    assert [shortest(value) for value in (50.0, 0.1, 2.5, -0.7)] == ["50", "0.1", "2.5", "-0.7"]


@pytest.mark.parametrize("window", [(5, 0), (0, 0), (None, 3), (4, None), (-2, 6), (9, -3), (100, 100)])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(17, 17), (9, 30), (30, 9), (1, 12)])
def test_the_truth_of_a_window(window: tuple[int | None, int | None], seq_q: int, seq_k: int) -> None:
    """Truth is the softmax over the keys of a plain loop; the counted pairs and what a call reads agree with it."""
    case = parse_case(f"b1h1s{seq_q}d8-fp32-seed0").with_fields({"seq_k": seq_k, "window": Window(*window)})
    assert parse_case(case.id) == case
    inputs = make_inputs(case, CPU)
    q, k, v = (tensor.double()[0, 0] for tensor in inputs[:3])
    left, right = (math.inf if side is None else side for side in window)
    pairs, rows, read = 0, [], set[int]()
    for query in range(seq_q):
        own = query + seq_k - seq_q
        keys = [key for key in range(seq_k) if own - left <= key <= own + right]
        pairs, read = pairs + len(keys), read | set(keys)
        weights = torch.softmax(q[query] @ k[keys].T * case.scale, -1)
        rows.append(weights @ v[keys] if keys else torch.zeros(8, dtype=torch.float64))
    assert (case.visible_pairs, case.touched.seq_k) == (pairs, len(read))
    torch.testing.assert_close(make_truth(inputs).out[0, 0], torch.stack(rows), rtol=1e-12, atol=1e-12)


def test_the_truth_of_a_cap_and_a_scale() -> None:
    """The scale comes first, then the cap."""
    case = parse_case("b1h2s20d16-fp32-scale1p5-cap4-seed0")
    inputs = make_inputs(case, CPU)
    q, k, v = (tensor.double() for tensor in inputs[:3])
    scores = 4 * torch.tanh(1.5 * q @ k.transpose(2, 3) / 4)
    torch.testing.assert_close(make_truth(inputs).out, torch.softmax(scores, -1) @ v, rtol=1e-12, atol=1e-12)


# -- right kernels ----------------------------------------------------------------------------------------------------

CASES = [
    "b1h2s64d64-fp16-win15_0-seed0",
    "b1h4s77d64-fp16-win37_21-kv2-sk150-seed0",
    "b1h2s150d64-fp16-winm8_57-sk77-seed0",
    "b1h2s64d64-bf16-cap2-seed0",
    "b1h2s64d64-fp16-causal-scale3-cap50-seed0",
    "b1h2s64d64-fp32-wino_5-cap2-seed0",
    "b1h2s64d64-fp16-win0_0-seed0",
    "b1h2s64d64-fp16-scalem0p5-seed0",
]


@pytest.mark.parametrize("case", CASES)
def test_a_right_kernel_passes(variant_of: VariantOf, case: str) -> None:
    """A plain kernel in float32 passes, with its log-sum-exp."""
    result = judged(variant_of(supports=SUPPORTS.replace("{", "{dtype: [fp16, bf16, fp32], ")), case)
    assert result.outcome == "ok", result.message


def test_what_is_claimed_is_judged(variant_of: VariantOf) -> None:
    """The cases of a manifest's claims have every kind of window, a small and a large cap, and pairs of both."""
    cases = claim_cases(variant_of(), [])
    kinds = {case.value_of("window") for case in cases}
    assert {Window(37, 0), Window(37, 21), Window(-8, 57), Window(None, None)} <= kinds
    assert {(case.value_of("softcap"), case.scale) for case in cases} >= {(0.0, 0.125), (2.0, 0.125), (50.0, 3.0)}
    assert any(case.value_of("softcap") and case.value_of("window") != Window(None, None) for case in cases)
    windows = [case for case in cases if case.value_of("window") != Window(None, None)]
    assert {1, 300} <= {case.seq_q for case in windows if case.seq_k == 1055}
    assert {Window(70, -3), Window(300, 5), Window(200, 0)} <= kinds
    assert any(case.seq_q > case.seq_k for case in cases if case.value_of("window") != Window(None, None))
    assert all(variant_of().refuses(case) is None for case in cases)


PAIRS = [
    ("window_left is not None and softcap", "window_left = None"),
    ("(window_left or 0) < 0 and q.shape[1] != k.shape[1]", "window_left = None"),
    ("window_right is not None and q.dtype == torch.bfloat16", "window_right += 1"),
    ("softcap and not q.is_contiguous()", "softcap = 0.0"),
    ("softcap and causal == 'bottom_right'", "causal = 'top_left'"),
]


@pytest.mark.parametrize(("condition", "mistake"), PAIRS)
def test_a_mistake_in_a_pair_is_found(variant_of: VariantOf, condition: str, mistake: str) -> None:
    """A kernel that is wrong only where two features meet fails in a case of its claims."""
    source = KERNEL.replace("    groups =", f"    if {condition}:\n        {mistake}\n    groups =", 1)
    supports = SUPPORTS.replace("{", "{dtype: [fp16, bf16], layout: [bhsd, bshd], ")
    variant = variant_of(source, supports)
    assert any(judged(variant, case.id).outcome == "wrong" for case in claim_cases(variant, ()))


# -- mistakes ---------------------------------------------------------------------------------------------------------

MISTAKES = [
    ("own - window_left", "own - window_left - 1", "win15_3-sk80", "the window is one key too long before the query"),
    (
        "own - window_left",
        "own - window_left + 1",
        "win15_3",
        "the window counts the query itself",
    ),
    ("own + window_right", "own + window_right + 1", "win15_3", "the window is one key too long after the query"),
    ("own + window_right", "own + window_right - 1", "win15_3", "the window is one key too short after the query"),
    ("window_left is not None", "False", "win15_3", "the window has no end before the query"),
    ("window_right is not None", "False", "win15_3", "the window has no end after the query"),
    (
        "    groups =",
        "    window_left, window_right = window_right, window_left\n    groups =",
        "win15_3",
        "the two sides of the window are exchanged",
    ),
    ("+ seq_k - seq_q\n", "\n", "win15_3-sk80", "the window is aligned to the first key, not to the last"),
    (
        "own - window_left",
        "own - window_left - seq_k + seq_q",
        "win15_3-sk80",
        "the left side is aligned to the first key",
    ),
    (
        "own + window_right",
        "own + window_right - seq_k + seq_q",
        "win15_3-sk80",
        "the right side is aligned to the first key",
    ),
    ("(hidden, -torch.inf)", "(hidden, -1e30)", "winm8_57", "queries that see no key get the mean of V"),
    ("keys < own - window_left", "keys < own // 16 * 16", "win15_0", "queries see chunks of 16 keys"),
    ("if softcap:", "if False:", "cap2", "the soft cap is not applied"),
    ("softcap * torch.tanh(scores / softcap)", "torch.tanh(scores / softcap)", "cap2", "is not multiplied by the cap"),
    ("if softcap:", "if softcap:\n        softcap *= 1.01\n    if softcap:", "cap2", "the soft cap is 1 % too large"),
    (
        "scores = softcap * torch.tanh(scores / softcap)",
        "scores = softcap * torch.tanh(scores / scale / softcap) * scale",
        "cap2",
        "the soft cap is applied before the scale",
    ),
    (
        "scores = softcap * torch.tanh(scores / softcap)",
        "scores[..., :64] = softcap * torch.tanh(scores[..., :64] / softcap)",
        "sk80-cap2",
        "the soft cap is not applied in the last tile of 16, 32 or 64 keys",
    ),
]


@pytest.mark.parametrize(("right", "wrong", "part", "cause"), MISTAKES, ids=[row[3] for row in MISTAKES])
def test_a_mistake_is_named(variant_of: VariantOf, right: str, wrong: str, part: str, cause: str) -> None:
    """A kernel with one mistake in a window or a cap is wrong, and the diagnosis names the mistake."""
    assert right in KERNEL
    result = judged(variant_of(KERNEL.replace(right, wrong, 1), more=""), f"b1h2s64d64-fp16-{part}-seed0")
    assert (result.outcome, result.diagnosis is None) == ("wrong", False)
    assert result.diagnosis is not None
    assert cause in result.diagnosis.cause


def test_a_cap_after_the_mask_is_named(variant_of: VariantOf) -> None:
    """Keys that are hidden before the cap get the score -cap, and count."""
    capped = "    if softcap:\n        scores = softcap * torch.tanh(scores / softcap)\n"
    filled = "    scores = scores.masked_fill(hidden, -torch.inf)\n"
    source = KERNEL.replace(capped, "").replace(filled, filled + capped)
    result = judged(variant_of(source, more=""), "b1h2s64d64-fp16-causal-cap2-seed0")
    assert result.diagnosis is not None
    assert "keys are hidden before the soft cap" in result.diagnosis.cause


# -- the manifest and the call ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("supports", "case", "refusal"),
    [
        ("{device: [cpu]}", "win15_0", "window is left, supports none (extend supports.window if the kernel can)"),
        ("{device: [cpu], window: true}", "winm8_57", "window is negative, supports none, left, both"),
        ("{device: [cpu]}", "cap2", "softcap is 2, supports none (extend supports.softcap if the kernel can)"),
        ("{device: [cpu], fixed_scale: true}", "scale3", "scale is 3, supports 1/sqrt(64) = 0.125 (fixed_scale: true)"),
    ],
)
def test_what_is_not_claimed_is_refused(variant_of: VariantOf, supports: str, case: str, refusal: str) -> None:
    """A case of what a manifest does not claim is refused with the key to write."""
    reason = variant_of(supports=supports, more="").refuses(parse_case(f"b1h2s64d64-fp16-{case}-seed0"))
    assert reason is not None
    assert refusal in reason


@pytest.mark.parametrize(
    ("entry", "supports", "message"),
    [
        (
            '{target: "entry:forward", call: {arguments: [q, k, v]}}',
            "{device: [cpu], window: [none, left]}",
            "entry.call does not pass 'window_size', but supports.window is none, left; pass it, or both sides",
        ),
        (
            '{target: "entry:forward", call: {arguments: [q, k, v, window_size]}}',
            "{device: [cpu], window: [none, negative]}",
            "entry.call passes -1 for an open side, so supports.window is not none, negative; drop negative",
        ),
        ('{target: "entry:forward"}', "{device: [cpu], window: [lft]}", "allowed are true, false, or a list of none"),
        (
            '{target: "entry:forward"}',
            "{device: [cpu], causal: [top_left], window: [none, left]}",
            "supports.window has left, but a case with it needs causal: none, and supports.causal is top_left; add",
        ),
        (
            '{target: "entry:forward"}',
            "{device: [cpu], causal: [none, bottom_right], window: [left]}",
            "needs window: none, and supports.window is left; add none to supports.window, or drop bottom_right",
        ),
    ],
)
def test_a_claim_that_cannot_be_judged_is_refused(
    write_variant: WriteVariant, tmp_path: Path, entry: str, supports: str, message: str
) -> None:
    """A manifest whose kernel could not get what it claims is refused."""
    manifest = f"{MANIFEST}entry: {entry}\nsupports: {supports}\n"
    folder = write_variant("mine", manifest=manifest, **{"entry.py": KERNEL, "kernel.cu": ""})
    with pytest.raises(ManifestError) as problem:
        read_manifest(folder / "variant.yaml", tmp_path / "kernels")
    assert message in str(problem.value)


def test_a_cuda_source_may_claim_both(write_variant: WriteVariant, tmp_path: Path) -> None:
    """The C interface has fields for windows and soft caps."""
    manifest = f"{MANIFEST}entry: {{kind: cuda}}\nsupports: {{window: [none, negative], softcap: true}}\n"
    folder = write_variant("mine", manifest=manifest, **{"kernel.cu": ""})
    (variant,) = read_manifest(folder / "variant.yaml", tmp_path / "kernels")
    assert variant.refuses(parse_case("b1h1s64d64-fp16-winm8_57-cap2-seed0")) is None


def test_a_library_gets_its_own_words() -> None:
    """`entry.call` passes both sides as a pair with -1 for an open one, and a cap of 0 for none."""
    seen: list[object] = []

    def library(q: object, k: object, v: object, *, window_size: tuple[int, int], softcap: float) -> object:  # noqa: ARG001
        seen.append((window_size, softcap))
        return q

    call = Call(keywords={"window_size": "window_size", "softcap": "softcap"})
    for part in ("-win15_0-cap2", "-wino_5", ""):
        inputs = make_inputs(parse_case(f"b1h1s8d8-fp16{part}-seed0"), CPU)
        adapted(library, Call(arguments=("q", "k", "v"), keywords={**call.keywords}))(
            *inputs[:3], **{**inputs.keywords, "scale": 8**-0.5}
        )
    assert seen == [((15, 0), 2.0), ((-1, 5), 0.0), ((-1, -1), 0.0)]


def test_they_are_no_longer_answered_with_not_judged() -> None:
    """Windows and caps are judged; dropout is not."""
    assert [not_judged.recognised(name) for name in ("sliding_window", "softcap")] == [None, None]
    assert not_judged.recognised("dropout_p") is not None


# -- tanh in half precision -------------------------------------------------------------------------------------------

TANH = "scores = softcap * torch.tanh(scores / softcap)"
IN_HALF = "scores = softcap * torch.tanh((scores / softcap).to(q.dtype)).float()"
TANH_CASES = ("b1h4s200d64-fp16-scale3-cap50-seed0", "b1h4s150d64-fp16-causal-cap2-seed0")
BF16 = SUPPORTS.replace("{device", "{dtype: [fp16, bf16], device")


def with_tanh_error(error: float) -> str:
    """A kernel whose tanh has up to this relative error, with random signs."""
    factor = f"(1 + {error} * (2 * torch.rand(scores.shape, generator=torch.Generator().manual_seed(1)) - 1))"
    return KERNEL.replace(TANH, f"{TANH} * {factor}")


@pytest.mark.parametrize("case", [TANH_CASES[0], "b1h4s200d64-bf16-scale3-cap50-seed0"])
def test_a_tanh_in_half_precision_needs_a_declaration(variant_of: VariantOf, case: str) -> None:
    """Without it, the failure names it and the line to write; with it, output and log-sum-exp are correct."""
    source = KERNEL.replace(TANH, IN_HALF)
    assert source != KERNEL
    undeclared = judged(variant_of(source, BF16), case)
    dtype = "bf16" if "bf16" in case else "fp16"
    assert undeclared.outcome == "wrong"
    assert undeclared.diagnosis is not None
    expected = f"tanh is computed in {dtype}: compute it in float32, or declare `rounds: [tanh]` if you mean it"
    assert expected in undeclared.diagnosis.cause
    declared = judged(variant_of(source, BF16, "returns: [out, lse]\nrounds: [tanh]\n"), case)
    assert (declared.outcome, declared.message) == ("ok", "")


@pytest.mark.parametrize(
    ("error", "case", "outcome"),
    [
        (1.113e-5, TANH_CASES[0], "ok"),
        (1.113e-5, TANH_CASES[1], "ok"),
        (2.0**-11, TANH_CASES[0], "wrong"),
    ],
)
def test_the_fast_tanh_of_a_gpu_needs_none(variant_of: VariantOf, error: float, case: str, outcome: str) -> None:
    """`tanh.approx.f32` is off by 1.113e-5 at most, as tests/device/test_tanh.py measures; 2^-11 would be too much."""
    assert judged(variant_of(with_tanh_error(error)), case).outcome == outcome


@pytest.mark.parametrize("new", [f"{IN_HALF}.half().float() * 1.01", "pass"])
def test_a_rounded_tanh_allows_no_other_mistake(variant_of: VariantOf, new: str) -> None:
    """Scores that are 1 % too large, and a cap that is left out, fail with `rounds: [tanh]`."""
    variant = variant_of(KERNEL.replace(TANH, new), SUPPORTS, "returns: [out, lse]\nrounds: [tanh]\n")
    assert judged(variant, TANH_CASES[0]).outcome == "wrong"


def test_a_tanh_without_a_cap_is_refused(variant_of: VariantOf) -> None:
    """A rounding of something that a variant does not compute is a mistake in its manifest."""
    message = "rounds has 'tanh', which applies to soft caps; supports.softcap is false; write `softcap: true` or drop"
    with pytest.raises(ManifestError, match=re.escape(message)):
        variant_of(KERNEL, "{device: [cpu]}", "rounds: [tanh]\n")

"""Ranges of head sizes, and values with a head size of their own: ids, truth, claims, refusals, names of mistakes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pytest_fa.attention import not_judged, parts
from pytest_fa.attention.sizes import in_order, judged_sizes, paired_sizes, shown_sizes
from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.claims import claim_cases, unjudged
from pytest_fa.catalog.factors import claim_of
from pytest_fa.catalog.fit import EVERYTHING, fitted
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.properties import (
    GRADIENTS_ONLY,
    ON_GPU,
    PROMISED,
    PROPERTIES,
    case_of_property,
    property_case,
)
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import ManifestError, UsageProblem
from pytest_fa.gpu.inputs import make_inputs, poisoned_output
from pytest_fa.judge.pipeline import run_case
from pytest_fa.judge.truth import make_truth
from pytest_fa.wire.jobs import CaseResult
from tests.factories import MANIFEST, WriteVariant, cpu_job

CPU = torch.device("cpu")
NAMES = ("dtype", "head_dim", *(part.name for part in parts.claimed_parts()))  # of the values of a claim
ALL = tuple(range(8, 257, 8))
RANGE = "{from: 8, to: 256, step: 8}"
KERNEL = """\
import torch


def forward(q, k, v, *, scale, causal="none", out=None, lse=None):
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q.float() @ k.float().transpose(2, 3) * scale
    if causal == "top_left":
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    if lse is not None:
        lse.copy_(scores.logsumexp(-1))
    result = torch.softmax(scores, -1) @ v.float()
    return out.copy_(result)
"""
SUPPORTS = (
    f"{{device: [cpu], dtype: [fp16, bf16, fp32], causal: [none, top_left], layout: [bhsd, bshd], grouped_heads: true, "
    f"head_dim: {RANGE}, head_dim_v: {RANGE}}}"
)
VariantOf = Callable[..., Variant]


@pytest.fixture
def variant_of(write_variant: WriteVariant, tmp_path: Path) -> VariantOf:
    """`variant_of(source)`: a variant that supports all sizes, or what else `supports` says."""

    def make(source: str = KERNEL, supports: str = SUPPORTS, more: str = "", entry: str = "") -> Variant:
        entry = entry or '{target: "entry:forward"}'
        manifest = f"{MANIFEST}entry: {entry}\nsupports: {supports}\n{more}"
        folder = write_variant("mine", manifest=manifest, **{"entry.py": source, "kernel.cu": ""})
        (variant,) = read_manifest(folder / "variant.yaml", tmp_path / "kernels")
        return variant

    return make


def judged(variant: Variant, case: str, property_name: str | None = None) -> CaseResult:
    """The result of one case on the CPU."""
    return run_case(cpu_job(variant, case, repeats=2, property_name=property_name))


# -- the case ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["d80-fp16", "d192-bf16-dv128", "d8-fp16-causal-kv1-sk9-dv256-scale2-bshd", "d72-e4m3-dv8"]
)
def test_an_id_comes_back(text: str) -> None:
    """The sizes of an id are those of the case, whose id is the same."""
    assert parse_case(f"b1h2s64{text}-seed0").id == f"b1h2s64{text}-seed0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("d64-fp16-dv64", "is not in its shortest form; write 'b1h1s8d64-fp16-seed0'"),
        ("d64-fp16-dv0", "head_dim_v is 0; it must be at least 1"),
        ("d64-fp16-dv9999999999", "head_dim_v is 9999999999; it must be at most 2147483647"),
        ("d64-fp16-dv128-scores", "scores alone have no V; drop -dv"),
        ("d64-fp16-dv128-sk9", "is malformed; the form is"),
    ],
)
def test_an_id_has_one_form(text: str, message: str) -> None:
    """An id that is impossible, or that says the same as a shorter one, is refused with what to write."""
    with pytest.raises(UsageProblem) as problem:
        parse_case(f"b1h1s8{text}-seed0")
    assert message in str(problem.value)


def test_another_head_dim_keeps_an_id_in_its_shortest_form() -> None:
    """A case whose head_dim becomes that of its values loses the text, and None takes it away."""
    case = parse_case("b1h1s8d64-fp16-dv128-seed0")
    assert [case.with_fields({"head_dim": dim}).id for dim in (80, 128)] == [
        "b1h1s8d80-fp16-dv128-seed0",
        "b1h1s8d128-fp16-seed0",
    ]
    assert case.with_fields({"head_dim_v": None}).id == "b1h1s8d64-fp16-seed0"


def test_work_is_counted() -> None:
    """2 pairs (d + d_v) operations; K has d elements a row, V and the output d_v."""
    case = parse_case("b2h4s10d192-fp16-kv2-sk12-dv128-seed0")
    assert case.flops_per_call == 2 * 2 * 4 * 10 * 12 * (192 + 128)
    assert case.bytes_per_call == 2 * 2 * (4 * 10 * 192 + 2 * 12 * 192 + 2 * 12 * 128 + 4 * 10 * 128)
    assert case.out_shape == (2, 4, 10, 128)


# -- truth ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["d8-fp32-dv24", "d24-fp16-dv8", "d16-fp32-causal-kv1-dv40", "d40-bf16-kv2-sk11-dv16-bshd"]
)
def test_truth_is_that_of_a_plain_loop(text: str) -> None:
    """Truth is the weighted mean of rows of V, one row and number after the other; the scale is that of Q and K."""
    case = parse_case(f"b2h4s7{text}-seed0")
    inputs = make_inputs(case, CPU)
    q, k, v = (tensor.double() for tensor in inputs[:3])
    expected = torch.zeros(case.out_shape, dtype=torch.float64)
    for batch in range(2):
        for head in range(4):
            kv_head = head // (4 // case.kv_heads)
            for query in range(7):
                keys = range(query + 1 if case.causal == "top_left" else case.seq_k)
                dots = [
                    float(q[batch, head, query] @ k[batch, kv_head, key]) / math.sqrt(case.head_dim) for key in keys
                ]
                weights = [math.exp(dot - max(dots)) for dot in dots]
                for dim in range(case.head_dim_v):
                    terms = (
                        weight * float(v[batch, kv_head, key, dim]) for key, weight in zip(keys, weights, strict=True)
                    )
                    expected[batch, head, query, dim] = sum(terms) / sum(weights)
    torch.testing.assert_close(make_truth(inputs).out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("layout", "strides"), [("", (720, 240, 24, 1)), ("-bshd", (720, 24, 72, 1))])
def test_the_output_has_the_layout(layout: str, strides: tuple[int, ...]) -> None:
    """The output is dense, with its axes in the order of those of Q, and V has strides of its own."""
    inputs = make_inputs(parse_case(f"b2h3s10d8-fp16-dv24{layout}-seed0"), CPU)
    assert (poisoned_output(inputs).stride(), inputs.v.stride(), inputs.v.shape[3]) == (strides, strides, 24)


# -- right kernels ----------------------------------------------------------------------------------------------------


SIZES = [f"d{size}-fp16" for size in (8, 40, 72, 80, 96, 112, 192, 256)]
PAIRS = ["d192-fp16-dv128", "d64-bf16-causal-dv256", "d80-fp32-kv1-dv72-bshd", "d8-bf16-dv16", "d128-fp16-sk100-dv64"]


@pytest.mark.parametrize("text", [*SIZES, *PAIRS])
def test_a_right_kernel_passes(variant_of: VariantOf, text: str) -> None:
    """A plain kernel in float32 passes at each size, with its log-sum-exp."""
    result = judged(variant_of(more="returns: [out, lse]\n"), f"b1h2s70{text}-seed0")
    assert result.outcome == "ok", result.message


def test_e4m3_has_a_size_of_v(variant_of: VariantOf) -> None:
    """In e4m3, V has its own descales, whatever its size."""
    source = KERNEL.replace("lse=None)", "lse=None, q_descale=None, k_descale=None, v_descale=None)")
    dequantised = (
        "    q, k, v = (x.float() * s[:, :, None, None] for x, s in ((q, q_descale), (k, k_descale), (v, v_descale)))\n"
    )
    source = source.replace("    groups =", f"{dequantised}    groups =")
    variant = variant_of(source, supports=SUPPORTS.replace("fp16, bf16, fp32", "e4m3"))
    result = judged(variant, "b1h4s70d64-e4m3-kv2-dv72-bshd-seed0")
    assert result.outcome == "ok", result.message


@pytest.mark.parametrize("name", [name for name in PROPERTIES if name not in ON_GPU | PROMISED | GRADIENTS_ONLY])
def test_the_properties_hold_with_another_size_of_v(variant_of: VariantOf, name: str) -> None:
    """Each property holds of a right kernel whose V is wider than its K."""
    result = judged(variant_of(supports=SUPPORTS.replace("bshd", "bhsd")), "b2h3s150d72-fp16-dv80-seed0", name)
    assert result.outcome == "ok", result.message


def test_the_reference_computes_all_sizes() -> None:
    """The kernel `reference` is right with a V that is wider or narrower than K."""
    kernels = Path(__file__).parents[3] / "kernels"
    (reference,) = read_manifest(kernels / "reference" / "variant.yaml", kernels)
    for text in ("d72-fp16-causal_br-sk90-dv136", "d192-bf16-win20_3-kv1-dv128-bshd"):
        result = judged(reference, f"b1h2s70{text}-seed0")
        assert result.outcome == "ok", result.message


def test_sdpa_takes_them_where_torch_does() -> None:
    """The math backend takes another size of V; the flash backend refuses it with torch's reason."""
    folder = Path(not_judged.__file__).parents[1] / "builtin"
    variants = {each.name: each for each in read_manifest(folder / "sdpa" / "variant.yaml", folder)}
    results = {name: judged(variants[name], "b1h2s70d72-fp16-dv80-seed0") for name in ("sdpa_math", "sdpa_flash")}
    assert {name: result.outcome for name, result in results.items()} == {
        "sdpa_math": "ok",
        "sdpa_flash": "unsupported",
    }
    assert "same last dimension" in results["sdpa_flash"].message


# -- mistakes ---------------------------------------------------------------------------------------------------------

CUT_OFF = "result[..., 64:] = 0\n    return"
UNDIVIDED = "result[..., 64:] *= (scores - scores.amax(-1, keepdim=True)).exp().sum(-1, keepdim=True)\n    return"
ROWS_OF_K = "v.as_strided(v.shape, (*v.stride()[:2], k.shape[3], 1)).float()"
SCORES = "q.float() @ k.float()"
MISTAKES = [
    (
        "* scale\n",
        "* v.shape[3] ** -0.5\n",
        "d192-fp16-dv128",
        "the softmax scale is that of another width: 1/sqrt(128), ",
    ),
    ("return", CUT_OFF, "d64-fp16-dv128", "only the first 64 of the 128 dims of V are computed"),
    ("return", CUT_OFF, "d80-fp16-dv96", "only the first 64 of the 96 dims of V are computed"),
    ("return", CUT_OFF, "d128-fp16", "only the first 64 of the 128 dims of V are computed"),
    (
        "return",
        "out[..., :64] = result[..., :64]\n    return out  #",
        "d64-fp16-dv128",
        "the kernel never wrote dim 64 to 127",
    ),
    (
        "return",
        UNDIVIDED,
        "d64-fp16-dv128",
        "first 64 of the 128 dims of the output are divided by the row sum",
    ),
    ("return", UNDIVIDED, "d128-bf16", "first 64 of the 128 dims of the output are divided by the row sum"),
    ("return", UNDIVIDED, "d80-fp32-dv96", "first 64 of the 96 dims of the output are divided by the row sum"),
    ("v.float()", ROWS_OF_K, "d64-fp16-dv128", "rows of V are read as if they had 64 elements, as those of K, not 128"),
    ("v.float()", ROWS_OF_K, "d80-fp32-dv96", "rows of V are read as if they had 80 elements, as those of K, not 96"),
    (SCORES, "q[..., :128].float() @ k[..., :128].float()", "d192-fp16", "sums only the first 128 of 192 dims"),
    (SCORES, "q[..., :64].float() @ k[..., :64].float()", "d72-fp16", "sums only the first 64 of 72 dims"),
    ("* scale\n", "* 128 ** -0.5\n", "d112-fp16", "the softmax scale is that of D = 128, not 112"),
]


@pytest.mark.parametrize(("right", "wrong", "text", "cause"), MISTAKES)
def test_a_mistake_is_named(variant_of: VariantOf, right: str, wrong: str, text: str, cause: str) -> None:
    """A kernel with one mistake in a size is wrong, and the diagnosis names the mistake alone."""
    result = judged(variant_of(KERNEL.replace(right, wrong, 1)), f"b1h2s70{text}-seed0")
    assert (result.outcome, result.diagnosis is None) == ("wrong", False)
    assert result.diagnosis is not None
    assert cause in result.diagnosis.cause
    assert "; or " not in result.diagnosis.cause


def test_an_output_like_q_is_refused(variant_of: VariantOf) -> None:
    """A function that returns an output of Q's shape is wrong, and the message has both shapes."""
    source = KERNEL.replace("return out.copy_(result)", "return torch.zeros_like(q)")
    result = judged(variant_of(source), "b1h2s70d64-fp16-dv128-seed0")
    assert result.outcome == "wrong"
    assert "[1, 2, 70, 64]" in result.message
    assert "[1, 2, 70, 128]" in result.message


# -- the manifest -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "shown", "judged_by_default", "paired"),
    [
        ((64, 128), "64, 128", (64, 128), (64, 128)),
        (ALL, "8 to 256 in steps of 8", (64, 128, 192, 80, 96, 112, 72, 256, 8), (128, 72)),
        (ALL[::-1], "8 to 256 in steps of 8", (64, 128, 192, 80, 96, 112, 72, 256, 8), (128, 72)),
        (tuple(range(16, 513, 16)), "16 to 512 in steps of 16", (64, 128, 192, 80, 96, 112, 256, 16, 512), (128,)),
        ((40, 48, 56, 64, 80), "40, 48, 56, 64, 80", (40, 48, 56, 64, 80), (40, 48, 56, 64, 80)),
        (tuple(range(264, 361, 8)), "264 to 360 in steps of 8", (264, 360), (264, 360)),
    ],
)
def test_a_range_is_judged_at_a_few_sizes(
    sizes: tuple[int, ...], shown: str, judged_by_default: tuple[int, ...], paired: tuple[int, ...]
) -> None:
    """A list is judged at each of its sizes; a long range at its ends and at sizes that show mistakes."""
    assert (shown_sizes(sizes), judged_sizes(sizes), paired_sizes(sizes)) == (shown, judged_by_default, paired)
    assert sorted(in_order(sizes)) == sorted(sizes)


def test_what_is_claimed_is_judged(variant_of: VariantOf) -> None:
    """The cases of a range have sizes that are multiples of 8 only, and V wider and narrower than K."""
    variant = variant_of()
    cases = claim_cases(variant, [])
    assert {case.head_dim for case in cases} == {*judged_sizes(ALL)}
    assert {case.head_dim_v for case in cases} == {*judged_sizes(ALL)}
    assert {(case.head_dim_v > case.head_dim) - (case.head_dim_v < case.head_dim) for case in cases} == {-1, 0, 1}
    assert {case.dtype for case in cases if case.head_dim == 72} == {"fp16", "bf16", "fp32"}
    assert [variant.refuses(case) for case in cases] == [None] * len(cases)
    assert [parse_case(case.id) for case in cases] == cases
    assert unjudged(variant, cases) == []
    assert {"D = 192", "head_dim 192 of V"} <= {each.text for each in unjudged(variant, cases[:1])}
    assert len(cases) < 40


def test_two_sizes_of_a_range_have_every_pair(variant_of: VariantOf) -> None:
    """Of a range, 128 and 72 are judged with each dtype, mask, layout, grouping and size of V."""
    variant = variant_of()
    judged_values = [dict(zip(NAMES, claim_of(case).flat, strict=True)) for case in claim_cases(variant, [])]
    for head_dim, of_v in ((128, ("equal", 72)), (72, ("equal", 128))):
        expected = {
            "dtype": ("fp16", "bf16", "fp32"),
            "causal": ("none", "top_left"),
            "layout": ("bhsd", "bshd"),
            "grouped_heads": (False, True),
            "head_dim_v": of_v,
        }
        for name, values in expected.items():
            assert {each[name] for each in judged_values if each["head_dim"] == head_dim} >= {*values}


@pytest.mark.parametrize(
    ("supports", "pairs"),
    [
        ("head_dim: [64, 128]", {(64, 64), (128, 128)}),
        ("head_dim: [192], head_dim_v: [128]", {(192, 128)}),
        ("head_dim: [64, 128], head_dim_v: [64, 128]", {(64, 64), (64, 128), (128, 64), (128, 128)}),
        ("head_dim: [64, 192], head_dim_v: [equal, 128]", {(64, 64), (64, 128), (192, 192), (192, 128)}),
        ("head_dim: [64, 192], head_dim_v: [64, 128]", {(64, 64), (64, 128), (192, 64), (192, 128)}),
        ("head_dim: [192], head_dim_v: [192]", {(192, 192)}),
        ("head_dim: [64, 128], head_dim_v: [72], causal: [none, top_left]", {(64, 72), (128, 72)}),
    ],
)
def test_pairs_of_sizes(variant_of: VariantOf, supports: str, pairs: set[tuple[int, int]]) -> None:
    """Without `head_dim_v`, V is as wide as K; with it, each size of V is judged with each of K, and no other one."""
    variant = variant_of(supports=f"{{device: [cpu], {supports}}}")
    judged_cases = claim_cases(variant, [])
    assert {(case.head_dim, case.head_dim_v) for case in judged_cases} == pairs
    assert unjudged(variant, judged_cases) == []
    cases = [property_case(variant), *(case_of_property(variant, name) for name in PROPERTIES)]
    assert {(case.head_dim, case.head_dim_v) for case in cases} <= pairs
    assert [parse_case(case.id) for case in cases] == cases


def test_a_suite_uses_the_usual_size_of_a_range(variant_of: VariantOf) -> None:
    """A suite's case keeps head_dim 64; a range without it gives the first size that is judged."""
    case = parse_case("b1h2s64d64-fp16-seed0")
    above = variant_of(supports="{device: [cpu], head_dim: {from: 72, to: 256, step: 8}}")
    assert [fitted(each, case, EVERYTHING).head_dim for each in (variant_of(), above)] == [64, 128]


@pytest.mark.parametrize(
    ("supports", "text", "refusal"),
    [
        (f"head_dim: {RANGE}", "d7", "head_dim is 7, supports 8 to 256 in steps of 8 (extend supports.head_dim if the"),
        (f"head_dim: {RANGE}", "d264", "head_dim is 264, supports 8 to 256 in steps of 8 (extend supports.head_dim if"),
        ("head_dim: [64]", "d72-fp16-dv64", "head_dim is 72, supports 64 (extend supports.head_dim if"),
        (
            "head_dim: [64]",
            "d64-fp16-dv128",
            "head_dim_v is 128, supports the head_dim of Q and K (extend supports.head_dim_v",
        ),
        ("head_dim_v: [128]", "d64", "head_dim_v is 64, supports 128 (extend supports.head_dim_v if"),
        (
            "head_dim_v: [equal, 128]",
            "d64-fp16-dv80",
            "head_dim_v is 80, supports the head_dim of Q and K, 128 (extend",
        ),
        (f"head_dim_v: {RANGE}", "d64-fp16-dv7", "head_dim_v is 7, supports 8 to 256 in steps of 8 (extend"),
    ],
)
def test_what_is_not_claimed_is_refused(variant_of: VariantOf, supports: str, text: str, refusal: str) -> None:
    """A size that a manifest does not claim is refused, with the sizes in short and the key to write."""
    dtype = "" if "fp16" in text else "-fp16"
    variant = variant_of(supports=f"{{device: [cpu], {supports}}}")
    reason = variant.refuses(parse_case(f"b1h2s64{text}{dtype}-seed0"))
    assert reason is not None
    assert refusal in reason


@pytest.mark.parametrize("key", ["head_dim", "head_dim_v"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{from: 256, to: 8, step: 8}", ", which begins after its end: write `{from: 8, to: 256, step: 8}`"),
        ("{from: 8, to: 256}", "; a range has `from`, `to` and `step`: write `{from: 8, to: 256, step: 8}`"),
        ("{from: 0, to: 256, step: 8}", "; `from` must be a whole number from 1 to 65536, as in `{from: 8, "),
        ("{from: 8, to: 256.0, step: 8}", "; `to` must be a whole number from 1 to 65536"),
        ("{from: 8, to: 100, step: 8}", ", but steps of 8 from 8 lead to 96 and 104: write one of both"),
        ("{from: 8, to: 65536, step: 8}", ", which has 8192 sizes; at most 256 are allowed: use a larger step"),
    ],
)
def test_a_range_that_is_none_is_refused(variant_of: VariantOf, key: str, value: str, message: str) -> None:
    """A range has one form, and the message has what to write."""
    with pytest.raises(ManifestError) as problem:
        variant_of(supports=f"{{device: [cpu], {key}: {value}}}")
    assert f"supports.{key} is {value}{message}" in str(problem.value)


@pytest.mark.parametrize(
    ("supports", "message"),
    [
        ("head_dim: [0]", "supports.head_dim[0] is 0; it must be at least 1"),
        (
            "head_dim_v: [0]",
            "supports.head_dim_v is [0]; write a list of sizes, such as `[64, 128]` or `[equal, 128]`",
        ),
        ("head_dim_v: true", "supports.head_dim_v is true; write a list of sizes, such as"),
        ("head_dim_v: 128", "supports.head_dim_v is 128; write a list of sizes, such as"),
        ("head_dim_v: [like_q]", "supports.head_dim_v is [like_q]; write a list of sizes, such as"),
    ],
)
def test_a_claim_that_cannot_be_judged_is_refused(variant_of: VariantOf, supports: str, message: str) -> None:
    """A value that is no size ends with what to write."""
    with pytest.raises(ManifestError) as problem:
        variant_of(supports=f"{{{supports}}}")
    assert message in str(problem.value)


def test_the_launch_overhead_has_such_cases(variant_of: VariantOf) -> None:
    """An empty kernel fits a V of another shape, and a window."""
    noop = variant_of(supports="{device: [cuda]}", more="role: overhead\n", entry="{kind: cuda}")
    refusals = [noop.refuses(parse_case(f"b1h2s64d64-fp16-{text}-seed0")) for text in ("dv128", "win5_0")]
    assert refusals == [None, None]


def test_it_is_no_longer_answered_with_not_judged() -> None:
    """Another size of V is judged."""
    assert not_judged.recognised("head_dim_v") is None

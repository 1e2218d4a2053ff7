"""Quantised caches: numbers and scales of calls, the values that they represent, claims, bytes, and errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_fa.attention import parts
from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.claims import claim_cases
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.properties import applies, case_of_property, declared_against, properties_of
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import ManifestError, UsageProblem
from pytest_fa.gpu.inputs import make_inputs
from pytest_fa.judge.candidate import Candidate
from pytest_fa.judge.clocks.fresh_data import FreshData
from pytest_fa.judge.pipeline import run_case
from pytest_fa.wire.commands import Run
from tests.factories import MANIFEST, WriteVariant, cpu_job

CPU = torch.device("cpu")
KINDS = [f"{of}_{by}" for of in ("e4m3", "int8") for by in ("t", "h", "th")]
KERNEL = """\
import torch


def product(numbers, scale):
    return numbers.float() * (scale[..., None] if scale.dim() > 1 else scale.view(1, -1, 1, 1))


def forward(q, k, v, *, scale, causal="none", out=None, k_scale, v_scale, seqlens_k=None):
    group = q.shape[1] // k.shape[1]
    k, v = (product(*each).repeat_interleave(group, 1) for each in ((k, k_scale), (v, v_scale)))
    keys = torch.full((len(q),), k.shape[2]) if seqlens_k is None else seqlens_k
    hidden = torch.arange(k.shape[2]) >= keys[:, None, None, None]
    scores = (q.float() @ k.transpose(2, 3) * scale).masked_fill(hidden, -torch.inf)
    m = scores.amax(-1, keepdim=True).clamp_min(-1e30)
    p = torch.exp(scores - m)
    v = v.masked_fill(hidden.transpose(2, 3), 0.0)
    return out.copy_((p @ v) / p.sum(-1, keepdim=True).clamp_min(1e-30))
"""
CLAIMS = "device: [cpu], dtype: [fp16, bf16], grouped_heads: true"
VariantOf = Callable[..., Variant]


@pytest.fixture
def variant_of(write_variant: WriteVariant, tmp_path: Path) -> VariantOf:
    """`variant_of(supports)`: the variant of `KERNEL` that claims this, too."""

    def make(supports: str) -> Variant:
        text = f'{MANIFEST}entry: {{target: "entry:forward"}}\nsupports: {{{CLAIMS}, {supports}}}\n'
        folder = write_variant("mine", manifest=text, **{"entry.py": KERNEL})
        return read_manifest(folder / "variant.yaml", tmp_path)[0]

    return make


@pytest.mark.parametrize(
    "supports", [*(f"cache_dtype: [{kind}]" for kind in KINDS), "cache_dtype: [e4m3_h, int8_th], ragged: [none, keys]"]
)
def test_a_right_kernel_is_right_in_all_that_it_claims(variant_of: VariantOf, supports: str) -> None:
    """Also in its properties, on numbers that are rounded after each change."""
    variant = variant_of(supports)
    cases = claim_cases(variant, ())
    results = {case.id: run_case(cpu_job(variant, case.id, repeats=2)) for case in cases}
    assert {case: found.message for case, found in results.items() if found.outcome != "ok"} == {}
    assert {case.value_of("cache_dtype") for case in cases} == {*variant.supports.values_of("cache_dtype", ())}
    names = [name for name in properties_of(variant) if applies(name, variant, "cpu")]
    assert ("contained_nan" in names, "head_independence" in names) == ("e4m3" in supports, "_t]" not in supports)
    for name in names:
        if name != "new_shape" and declared_against(name, variant) is None:
            job = cpu_job(variant, case_of_property(variant, name).id, property_name=name)
            found = run_case(job)
            assert (name, found.outcome, found.message) == (name, "ok", "")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("more", ["", "-var4", "-var4-page16", "-var4-page16hnd"])
def test_the_judge_has_the_exact_products(kind: str, more: str) -> None:
    """Numbers and scales are those of a second quantisation, no scale is 1, and what no sequence has is not finite."""
    inputs = make_inputs(parse_case(f"b3h4s5d16-bf16-kv2-sk40{more}-kv_{kind}-seed0"), CPU)
    placed = inputs.placed()
    again = placed.dense().placed()
    for word in ("k_scale", "v_scale"):
        torch.testing.assert_close(again.extra[word], placed.extra[word], atol=0, rtol=0, equal_nan=True)
    assert torch.equal(placed.k.view(torch.uint8), again.k.view(torch.uint8))
    shapes = {"t": (1,), "h": (2,), "th": placed.k.shape[:3]}
    for word in ("k_scale", "v_scale"):
        assert placed.extra[word].shape == shapes[kind.split("_")[1]]
        assert not bool((placed.extra[word] == 1).any())
    assert placed.dense().placed().k.stride() == placed.k.stride()
    if "e4m3" in kind:  # int8 has no NaN behind a length
        assert not bool(inputs.k[:, -1].nan_to_num(0.0).any())
    if more and "int8_th" in kind:
        assert bool(placed.extra["k_scale"].isnan().any())
    if more and "e4m3" in kind:
        assert bool(placed.k.float().isnan().any())
    assert parts.represented(inputs) is not inputs


def test_timed_calls_are_judged_on_their_products() -> None:
    """What a timed call read of one head is its numbers times its scales."""
    case = parse_case("b2h4s8d8-fp16-kv2-kv_int8_th-seed0")

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, out: Any, **words: Any) -> torch.Tensor:
        products = [each.float() * words[word][..., None] for each, word in ((k, "k_scale"), (v, "v_scale"))]
        written: torch.Tensor = out.copy_((products[0] + products[1]).repeat_interleave(2, 1) + q)
        return written

    function: Callable[..., torch.Tensor] = forward
    candidate = Candidate.of_function(function, "cpu")
    data = FreshData(candidate, case, make_inputs(case, CPU), None)
    outs = data.own_outputs(3)
    series = data.series(3, outs)
    candidate.prepare("calls", series)
    candidate.timed(Run("calls", 3))
    data.require_untouched()
    for _ in range(6):
        place = data.any_place(series, 3, outs)
        read = data.inputs_of(series, 3, outs, place)
        head = place.part_of(outs[place.slot]).out
        torch.testing.assert_close((read.k + read.v + read.q).half(), head, atol=1e-2, rtol=1e-3)


def test_bytes_are_those_of_numbers_and_scales() -> None:
    """A byte for each element of k and v, and four for each scale."""
    plain = parse_case("b2h8s1d128-fp16-kv2-sk1000-seed0")
    elements = 2 * 2 * 1000 * 2 * 128
    for kind, scales in {"e4m3_t": 1, "int8_h": 2, "int8_th": 2 * 2 * 1000}.items():
        case = parse_case(f"b2h8s1d128-fp16-kv2-sk1000-kv_{kind}-seed0")
        assert plain.touched_bytes - case.touched_bytes == elements - 2 * 4 * scales


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("b1h2s8d64-fp32-kv_e4m3_h-seed0", "a quantised cache is judged beside fp16 and bf16, not fp32"),
        ("b1h2s8d64-fp16-kv_e5m2_h-seed0", "is malformed"),
    ],
)
def test_impossible_cases_are_refused(case: str, message: str) -> None:
    """Other dtypes of q and of the cache."""
    with pytest.raises(UsageProblem, match=message):
        parse_case(case)


def test_an_unknown_cache_is_refused(variant_of: VariantOf) -> None:
    """The message lists what is allowed."""
    message = r"supports.cache_dtype is .*int4.*; allowed are true, false, or a list of none, e4m3_t"
    with pytest.raises(ManifestError, match=message):
        variant_of("cache_dtype: [int4_t]")


EXCHANGED = KERNEL.replace("((k, k_scale), (v, v_scale))", "((k, v_scale), (v, k_scale))")


def test_scales_of_k_and_v_differ(write_variant: WriteVariant, tmp_path: Path) -> None:
    """A kernel that exchanges two scales of whole tensors is found, and named."""
    text = f'{MANIFEST}entry: {{target: "entry:forward"}}\nsupports: {{{CLAIMS}, cache_dtype: [int8_t]}}\n'
    folder = write_variant("mine", manifest=text, **{"entry.py": EXCHANGED})
    variant = read_manifest(folder / "variant.yaml", tmp_path)[0]
    result = run_case(cpu_job(variant, "b2h4s70d64-fp16-kv2-kv_int8_t-seed0", repeats=2))
    assert result.outcome == "wrong"
    assert result.diagnosis is not None
    assert "k and v have each other's scales" in result.diagnosis.cause


def test_timed_calls_have_no_head_of_zeros() -> None:
    """Random numbers with a scale of 0 would be a head that a kernel may skip."""
    case = parse_case("b2h4s8d8-fp16-kv2-kv_e4m3_h-seed0")
    inputs = make_inputs(case, CPU)
    assert float(inputs.placed().extra["k_scale"].min()) == 0
    data = FreshData(Candidate.of_function(lambda *_, **__: None, "cpu"), case, inputs, None)  # type: ignore[arg-type]
    series = data.series(1)
    read = data.inputs_of(series, 1, data.outs, data.any_place(series, 1, data.outs))
    assert bool(read.k.any())


@pytest.mark.parametrize("kind", ["e4m3_t", "e4m3_h", "e4m3_th", "int8_t", "int8_th"])
def test_sequences_without_keys_have_scales(kind: str) -> None:
    """One for the tensor, for each head, or none at all, whatever the number of heads."""
    inputs = make_inputs(parse_case(f"b2h4s3d64-fp16-kv2-sk0-kv_{kind}-seed0"), torch.device("cpu")).placed()
    assert inputs.tensors["k_scale"].numel() == {"t": 1, "h": 2, "th": 0}[kind.rpartition("_")[2]]
    assert inputs.k.shape == (2, 2, 0, 64)

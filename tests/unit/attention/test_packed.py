"""One tensor for q, k and v: a function that takes it gets all calls in it, without a copy, and is judged and timed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_fa.attention.layout import is_packed, views_of_whole, whole_of
from pytest_fa.candidate.module import load_forward
from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.claims import claim_cases
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.properties import STRIDES_OF, applies, case_of_property, declared_against, properties_of
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import FaError, ManifestError, UnsupportedCase, UsageProblem
from pytest_fa.gpu.inputs import clone, make_inputs
from pytest_fa.judge.candidate import Candidate
from pytest_fa.judge.clocks.fresh_data import FreshData
from pytest_fa.judge.pipeline import run_case
from pytest_fa.judge.truth import make_truth
from pytest_fa.wire.commands import Run
from tests.factories import MANIFEST, WriteVariant, cpu_job

CPU = torch.device("cpu")
KERNELS = """\
import torch


def attend(q, k, v, scale, causal):  # [batch, seq, heads, dim]
    q, k, v = (tensor.transpose(1, 2).float() for tensor in (q, k, v))
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).transpose(2, 3) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), -torch.inf)
    return (torch.softmax(scores, -1) @ v.repeat_interleave(group, 1)).transpose(1, 2)


def of_qkv(qkv, scale, causal=False):
    assert qkv.shape[2] == 3
    return attend(*qkv.unbind(2), scale, causal).to(qkv.dtype)


def of_kv(q, kv, scale, causal=False):
    assert kv.shape[2] == 2
    return attend(q, *kv.unbind(2), scale, causal).to(q.dtype)


def of_heads(qkv, k, scale, causal=False):
    kv = k.shape[2]
    return attend(*qkv.split([qkv.shape[2] - 2 * kv, kv, kv], 2), scale, causal).to(qkv.dtype)


def by_head(qkv, scale, causal=False):
    return of_qkv(qkv.flatten(2, 3).unflatten(2, (-1, 3)).transpose(2, 3), scale, causal)


def writes_v(qkv, scale, causal=False):
    out = of_qkv(qkv, scale, causal)
    qkv[0, 0, 2] += 1
    return out


def writes_past(qkv, scale, causal=False):
    qkv.as_strided((1,), (1,), qkv.storage_offset() + qkv.numel())[0] = 1
    return of_qkv(qkv, scale, causal)
"""
SUPPORTS = (
    "{device: [cpu], dtype: [fp16, bf16], causal: [none, top_left], layout: [packed], self_attention_only: true%s}"
)
CALLS = {"of_qkv": "qkv", "of_kv": "q, kv", "of_heads": "qkv_heads, k"}
VariantOf = Callable[..., Variant]


@pytest.fixture
def variant_of(write_variant: WriteVariant, tmp_path: Path) -> VariantOf:
    """`variant_of(target)`: the variant of one function of `KERNELS`."""

    def make(target: str, arguments: str = "", supports: str = "") -> Variant:
        more = ", grouped_heads: true" if target == "of_heads" else ""
        call = f"{{arguments: [{arguments or CALLS.get(target, 'qkv')}, scale, causal], layout: bshd}}"
        entry = f'{{target: "entry:{target}", call: {call}}}'
        manifest = f"{MANIFEST}entry: {entry}\nsupports: {supports or SUPPORTS % more}\n"
        folder = write_variant("mine", manifest=manifest, **{"entry.py": KERNELS})
        return read_manifest(folder / "variant.yaml", tmp_path)[0]

    return make


@pytest.mark.parametrize("target", CALLS)
def test_every_claim_and_property_is_right(variant_of: VariantOf, target: str) -> None:
    """The cases of what a function claims are right, each in one tensor, and so are its properties."""
    variant = variant_of(target)
    cases = claim_cases(variant, ())
    wrong = {case.id: found.message for case in cases if (found := run_case(cpu_job(variant, case.id))).outcome != "ok"}
    assert (wrong, len(cases) > 8, {case.layout for case in cases}) == ({}, True, {"packed"})
    names = [name for name in properties_of(variant) if applies(name, variant, "cpu")]
    judged = [name for name in names if declared_against(name, variant) is None]
    assert {name for name in names if name not in judged} == {name for name in STRIDES_OF if name in names}
    for name in judged:
        job = cpu_job(variant, case_of_property(variant, name).id, property_name=name)
        assert (name, run_case(job).outcome) in ((name, "ok"), ("new_shape", "unsupported"))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("by_head", "of the one tensor, q, k and v of a head are read behind each other, [heads, 3, head_dim]"),
        ("writes_v", "the kernel changed its input v"),
        ("writes_past", "the kernel wrote out of bounds of qkv: 2 bytes past its end, the nearest 0 bytes from it"),
    ],
)
def test_a_wrong_one_is_caught(variant_of: VariantOf, target: str, message: str) -> None:
    """Heads in another order are named; a write into the one tensor or past it is found."""
    result = run_case(cpu_job(variant_of(target), "b2h4s150d64-fp16-packed-seed0"))
    assert (result.outcome, message in f"{result.message} {result.diagnosis}") == ("wrong", True)


def test_a_call_is_views_of_one_tensor() -> None:
    """A case of the layout is made so, and so is its copy, at another address."""
    inputs = make_inputs(parse_case("b2h4s7d16-fp16-kv2-packed-seed0"), CPU)
    plain = make_inputs(parse_case("b2h4s7d16-fp16-kv2-seed0"), CPU)
    whole = whole_of(*inputs[:3])
    assert (whole.shape, whole.is_contiguous()) == ((2, 7, 8, 16), True)
    assert all(torch.equal(own, other) for own, other in zip(inputs[:3], plain[:3], strict=True))
    copy = clone(inputs)
    assert is_packed(*copy[:3])
    assert copy.q.data_ptr() != inputs.q.data_ptr()
    assert not is_packed(*plain[:3])
    assert all(map(torch.equal, views_of_whole(whole, 2), inputs[:3]))


def test_timed_calls_move_the_one_tensor() -> None:
    """In each timed call, q, k and v begin equally many elements further on, and truth has what that call read."""
    case = parse_case("b1h2s40d64-fp16-packed-seed0")
    inputs = make_inputs(case, CPU)
    seen = []

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, out: Any, **_: Any) -> torch.Tensor:
        assert is_packed(q, k, v)
        seen.append(q.storage_offset())
        written: torch.Tensor = out.copy_(q + k + v)
        return written

    function: Callable[..., torch.Tensor] = forward
    candidate = Candidate.of_function(function, "cpu")
    data = FreshData(candidate, case, inputs, None)
    outs = data.own_outputs(5)
    series = data.series(5, outs)
    candidate.prepare("calls", series)
    candidate.timed(Run("calls", 5))
    data.require_untouched()
    assert len(set(seen)) > 1
    assert all(len(set(shifts)) == 1 for shifts in series.shifts)
    for _ in range(5):
        place = data.any_place(series, 5, outs)
        read = data.inputs_of(series, 5, outs, place)
        assert torch.equal(read.q + read.k + read.v, place.part_of(outs[place.slot]).out)


@pytest.mark.parametrize(
    ("arguments", "supports", "message"),
    [
        ("qkv", "{layout: [bshd]}", "passes 'qkv', but supports.layout is bshd; write `layout: [packed]`"),
        ("qkv", "{layout: [packed]}", "q, k and v have one length; add `self_attention_only: true`"),
        ("qkv", SUPPORTS % ", grouped_heads: true", "pass 'qkv_heads', [batch, seq, heads + 2 kv_heads, head_dim]"),
        ("kv", SUPPORTS % "", "entry.call does not pass 'q'; add it to arguments or keywords"),
    ],
)
def test_a_manifest_that_contradicts_it_is_refused(
    variant_of: VariantOf, arguments: str, supports: str, message: str
) -> None:
    """Each contradiction has one message with what to write."""
    with pytest.raises(ManifestError) as problem:
        variant_of("of_qkv", arguments, supports)
    assert message in str(problem.value)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("b1h2s40d64-fp16-sk41-packed-seed0", "q, k and v are views of one tensor, which has one length; drop -sk"),
        ("b2h2s40d64-fp16-var5-page16-packed-seed0", "which is no cache; drop -packed"),
        ("b2h2s40d64-fp16-kv_e4m3_h-packed-seed0", "which is no cache; drop -packed"),
        ("b1h2s40d64-fp16-dv32-packed-seed0", "q, k and v are views of one tensor, which has one head_dim; drop -dv"),
    ],
)
def test_impossible_cases_are_refused(case: str, message: str) -> None:
    """One tensor has one length and one head_dim."""
    with pytest.raises(UsageProblem, match=message):
        parse_case(case)


@pytest.mark.parametrize(
    "source",
    [
        "qkv, dropout_p, softmax_scale=None, causal=False: of_qkv(qkv, softmax_scale, causal)",
        "q, kv, sm_scale: of_kv(q, kv, sm_scale)",
    ],
)
def test_the_line_of_the_failure_makes_the_function_callable(
    write_variant: WriteVariant, tmp_path: Path, source: str
) -> None:
    """What a function of such a tensor fails with is the manifest that calls it correctly."""
    files = {"entry.py": f"{KERNELS}\n\nforward = lambda {source}\n"}
    folder = write_variant("mine", manifest=f'{MANIFEST}entry: {{target: "entry:forward"}}\n', **files)
    with pytest.raises(FaError) as caught:
        load_forward(read_manifest(folder / "variant.yaml", tmp_path)[0], None)
    line, supports = (text.split("`")[0] for text in str(caught.value).split("`")[1:4:2])
    assert supports == "layout: [packed], self_attention_only: true"
    (folder / "variant.yaml").write_text(f"{MANIFEST}{line}\nsupports: {{{supports}}}\n", encoding="utf-8")
    forward = load_forward(read_manifest(folder / "variant.yaml", tmp_path)[0], None)
    inputs = make_inputs(parse_case("b2h3s70d64-fp32-packed-seed0"), CPU)
    out = forward(*inputs[:3], scale=inputs.scale, causal="none")
    torch.testing.assert_close(out.double(), make_truth(inputs).out, atol=1e-5, rtol=1e-5)


def test_tensors_that_are_not_one_are_refused(variant_of: VariantOf) -> None:
    """A caller with q, k and v of their own gets the reason, not memory beyond q."""
    forward = load_forward(variant_of("of_qkv"), None)
    inputs = make_inputs(parse_case("b1h2s40d64-fp16-seed0"), CPU)
    with pytest.raises(UnsupportedCase, match="qkv is passed, but q, k and v are no views of one tensor"):
        forward(*inputs[:3], scale=inputs.scale, causal="none")

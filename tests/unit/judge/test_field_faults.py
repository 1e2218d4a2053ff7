"""Faults of published kernels, as a run without options meets them: a case of the claims or a property fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from pytest_fa.catalog.case import Case
from pytest_fa.catalog.claims import claim_cases
from pytest_fa.catalog.fit import EVERYTHING, cases_for
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.properties import ON_GPU, case_of_property, declared_against, properties_of
from pytest_fa.catalog.suites import SUITES
from pytest_fa.catalog.variant import Variant
from pytest_fa.judge.pipeline import run_case
from pytest_fa.wire.jobs import CaseJob
from tests.factories import MANIFEST, WriteVariant
from tests.tiers import nightly_after, nightly_but

# Attention with the mask of each alignment.  A fault replaces one line.
RIGHT = """\
import math

import torch


def at(tensor, batch, head, row):
    steps, begin = (batch, head, row, 1), tensor.storage_offset()
    room = tensor.untyped_storage().nbytes() // tensor.element_size() - begin
    last = sum((size - 1) * step for size, step in zip(tensor.shape, steps))
    return tensor.as_strided(tensor.shape, steps, begin) if last < room else tensor * 0


def forward(q, k, v, *, scale, causal="none", out=None):
    dtype, group = q.dtype, q.shape[1] // k.shape[1]
    heads = [head // group for head in range(q.shape[1])]
    rows, keys = q.shape[2], k.shape[2]
    shift = keys - rows if causal == "bottom_right" else 0
    # before
    q, k, v = q.float(), k[:, heads].float(), v[:, heads].float()
    s = q @ k.transpose(2, 3) * scale
    if causal != "none":
        s = s.masked_fill(torch.ones(rows, keys, dtype=torch.bool).triu(1 + shift), -math.inf)
    m = s.amax(-1, keepdim=True).clamp_min(-1e30)
    p = torch.exp(s - m)
    result = p @ v / p.sum(-1, keepdim=True).clamp_min(1e-30)
    # after
    return result.to(dtype) if out is None else out.copy_(result)
"""
BEFORE, AFTER, START = "    # before\n", "    # after\n", "clamp_min(-1e30)"
ALL = (
    "{dtype: [fp16, bf16], head_dim: [64], causal: [none, top_left, bottom_right], layout: [bhsd, bshd], "
    "grouped_heads: true"
)
PLAIN = "{dtype: [fp16], head_dim: [64]"
SQUARE = "{dtype: [fp16], head_dim: [64], causal: [none, bottom_right]"
BF16 = "{dtype: [bf16], head_dim: [64]"


def before(line: str) -> tuple[str, str]:
    """A fault in what the kernel reads."""
    return BEFORE, f"{BEFORE}    {line}\n"


def after(line: str) -> tuple[str, str]:
    """A fault in what the kernel writes."""
    return AFTER, f"{AFTER}    {line}\n"


IN_FP16 = "torch.float16).float()"
# Name: what the manifest claims, the fault, and the property that fails; None: a case fails.
FAULTS: dict[str, tuple[str, tuple[str, str], str | None]] = {
    # strides
    "v_strides_of_k": (ALL, before("v = at(v, *k.stride()[:3])"), "different_strides"),
    "v_rows_of_k": (ALL, before("v = at(v, *v.stride()[:2], k.stride(2))"), "different_strides"),
    "v_batch_of_k": (ALL, before("v = at(v, k.stride(0), *v.stride()[1:3])"), "different_strides"),
    "k_rows_of_q": (PLAIN, before("k = at(k, *k.stride()[:2], q.stride(2))"), "different_strides"),
    "out_strides_of_q": (
        PLAIN,
        before("out = out if out is None or out.stride() == q.stride() else at(out, *q.stride()[:3])"),
        "different_strides",
    ),
    "batch_stride_zero": (
        PLAIN,
        before("k = k if k.stride(0) else at(k, k.shape[1] * k.stride(1), *k.stride()[1:3])"),
        "expanded_batch",
    ),
    "expanded_and_one_mod_32": (
        PLAIN,
        before(
            "v = v * (1 - (v.stride(1) == 0 and keys % 32 == 1) * (torch.arange(keys) == keys - 1)[:, None].to(dtype))"
        ),
        "expanded_heads",
    ),
    "aligned_16_rows": (PLAIN, before("k = at(k, *k.stride()[:2], k.stride(2) // 8 * 8)"), "unaligned_rows"),
    # range of values
    "max_starts_at_zero": (PLAIN, (START, "clamp_min(0.0)"), "hard_data"),
    "max_starts_at_1e-30": (BF16, (START, "clamp_min(1e-30)"), "hard_data"),
    "sentinel_5e4": (PLAIN, (START, "clamp_min(-5e4)"), "hard_data"),
    "sentinel_5e4_at_16": ("{head_dim: [16]", (START, "clamp_min(-5e4)"), "hard_data"),
    "sentinel_lowest_fp16": (PLAIN, (START, "clamp_min(-65504)"), "hard_data"),
    "sentinel_1e6": (BF16, (START, "clamp_min(-1e6)"), "hard_data"),
    "v_in_fp16": (BF16, before(f"v = v.to({IN_FP16}"), "hard_data"),
    "out_staged_in_fp16": (BF16, after(f"result = result.to({IN_FP16}"), "hard_data"),
    "q_in_fp16": (BF16, before(f"q = (q * scale).to({IN_FP16} / scale"), "hard_data"),
    "clamps_output": (PLAIN, after("result = result.clamp(-100, 100)"), "hard_data"),
    "sums_overflow_fp16": (PLAIN, after(f"result = (p @ v).to({IN_FP16} / p.sum(-1, keepdim=True)"), "hard_data"),
    "flushes_subnormals": (PLAIN, before("v = v.masked_fill(v.abs() < 2.0**-14, 0)"), "hard_data"),
    "hides_nan": (PLAIN, after("result = result.nan_to_num()"), "contained_nan"),
    # lengths and groups
    "keys_are_queries": (PLAIN, before("k, v, keys = k[:, :, :rows], v[:, :, :rows], min(keys, rows)"), None),
    "last_key_after_a_tile": (PLAIN, before("keys -= keys % 64 == 1; k, v = k[:, :, :keys], v[:, :, :keys]"), None),
    "split_when_long": (PLAIN, after("result = result * (1 + 0.01 * (keys > 1024))"), None),
    "many_keys_of_a_mask": ("{causal: [top_left]", after("result[:, :, 1024:] *= 1.05"), None),
    "groups_of_four": ("{grouped_heads: true", after("result = result * (1 + 0.05 * (group == 4))"), None),
    "one_query": (PLAIN, after("result = result * (1 + 0.01 * (rows == 1))"), None),
    "more_queries": (PLAIN, after("result[:, :, keys:] = 0"), None),
    "mask_switches": (SQUARE, before("shift = max(shift, 0)"), None),
    "masked_rows_are_nan": (
        SQUARE,
        after("result[:, :, : max(0, -shift)] *= math.nan"),
        None,
    ),
    "group_by_shift": (
        "{grouped_heads: true",
        before("heads = [min(head >> (group - 1).bit_length(), k.shape[1] - 1) for head in range(len(heads))]"),
        None,
    ),
}


MakeVariant = Callable[[str, str], Variant]


@pytest.fixture
def variant_of(write_variant: WriteVariant, tmp_path: Path) -> MakeVariant:
    """`variant_of(supports, source)`: a Python variant for the CPU."""

    def make(supports: str, source: str) -> Variant:
        manifest = (
            f"{MANIFEST}entry: {{kind: python, target: 'entry:forward'}}\nsupports: {supports}, device: [cpu]}}\n"
        )
        folder = write_variant("from_the_field", manifest=manifest, **{"entry.py": source})
        (variant,) = read_manifest(folder / "variant.yaml", tmp_path / "kernels")
        return variant

    return make


def job_of(variant: Variant, case: Case, name: str | None = None) -> CaseJob:
    """One check on the CPU, of a case or of a property."""
    only_once = CaseJob(variant, case, None, "cpu", "same_precision", checks_output=True, time=False, repeats=0)
    return msgspec.structs.replace(only_once, property_name=name)


def wrong_cases(variant: Variant) -> Iterator[str]:
    """The cases that fail, of a seed of the suite and of the claims."""
    suite = cases_for(variant, tuple(case for case in SUITES["history"] if case.seed == 0), EVERYTHING)
    for case in (*claim_cases(variant, suite), *suite):
        if not variant.refuses(case) and run_case(job_of(variant, case)).outcome != "ok":
            yield case.id


def fails(variant: Variant, name: str) -> bool:
    """Whether a property is judged and does not hold."""
    job = job_of(variant, case_of_property(variant, name), name)
    return not declared_against(name, variant) and run_case(job).outcome not in ("ok", "unsupported")


def wrong_properties(variant: Variant) -> list[str]:
    """The properties that fail on a CPU."""
    return [name for name in properties_of(variant) if name not in ON_GPU and fails(variant, name)]


# Keys in parts that are merged by their log-sum-exp in float32, as in decoding.
SPLIT = RIGHT.replace(
    "    m = s.amax(-1, keepdim=True).clamp_min(-1e30)\n",
    """\
    parts = [slice(start, start + 50) for start in range(0, keys, 50)]
    logs = [torch.logsumexp(s[..., part], -1, keepdim=True) for part in parts]
    outs = [torch.softmax(s[..., part], -1).nan_to_num() @ v[:, :, part] for part in parts]
    total = torch.logsumexp(torch.cat(logs, -1), -1, keepdim=True)
    weights = [torch.exp(log - total).nan_to_num() for log in logs]
    merged = sum(weight * part for weight, part in zip(weights, outs))
    m = s.amax(-1, keepdim=True).clamp_min(-1e30)
""",
).replace("    result = p @ v / p.sum(-1, keepdim=True).clamp_min(1e-30)\n", "    result = merged\n")


@pytest.mark.parametrize(
    "supports", nightly_after(2, ["{causal: [top_left]", BF16, PLAIN, "{head_dim: [128]", "{dtype: [fp32]"])
)
def test_a_right_kernel_with_split_keys_holds_hard_data(variant_of: MakeVariant, supports: str) -> None:
    """float32 rounds the log-sum-exp of each part, which matters where scores are far from zero."""
    assert SPLIT != RIGHT
    assert not fails(variant_of(supports, SPLIT), "hard_data")


@pytest.mark.parametrize("supports", nightly_after(1, [ALL, PLAIN, SQUARE, BF16]))
def test_the_right_kernel_passes(variant_of: MakeVariant, supports: str) -> None:
    """Without a fault, every case and property holds."""
    variant = variant_of(supports, RIGHT)
    assert [*wrong_cases(variant), *wrong_properties(variant)] == []


@pytest.mark.parametrize(
    "name",
    nightly_but(
        FAULTS,
        "v_strides_of_k",
        "out_strides_of_q",
        "batch_stride_zero",
        "aligned_16_rows",
        "sentinel_5e4",
        "q_in_fp16",
        "flushes_subnormals",
        "hides_nan",
        "keys_are_queries",
        "mask_switches",
        "group_by_shift",
    ),
)
def test_a_fault_is_found(variant_of: MakeVariant, name: str) -> None:
    """The property or the case that is there for it fails."""
    supports, (old, new), caught_by = FAULTS[name]
    assert RIGHT.count(old) == 1
    variant = variant_of(supports, RIGHT.replace(old, new))
    assert fails(variant, caught_by) if caught_by else next(wrong_cases(variant))


@pytest.mark.parametrize(
    ("declared", "name"),
    [
        ("strides: aligned16", "aligned_16_rows"),
        ("strides: equal", "v_strides_of_k"),
        ("strides: dense", "batch_stride_zero"),
        ("self_attention_only: true", "keys_are_queries"),
    ],
)
def test_what_is_declared_is_not_judged(variant_of: MakeVariant, declared: str, name: str) -> None:
    """A kernel passes with the assumption that its manifest declares."""
    supports, (old, new), _ = FAULTS[name]
    variant = variant_of(f"{supports}, {declared}", RIGHT.replace(old, new))
    assert [*wrong_cases(variant), *wrong_properties(variant)] == []

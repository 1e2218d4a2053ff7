"""Kernels of ragged batches: none is blamed for what it may do, and mistakes in lengths get their names."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pytest_fa.catalog.case import Case, parse_case
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.properties import ON_GPU, case_of_property, properties_of
from pytest_fa.catalog.variant import Variant
from pytest_fa.judge.pipeline import run_case
from pytest_fa.wire.jobs import CaseJob, CaseResult
from tests.factories import MANIFEST, WriteVariant

# ALIGNED is the key at which query 0 stands, EMPTY what rows without a key become, and PAST what becomes of the rest.
SOURCE = """\
import torch


def forward(q, k, v, *, scale, out, seqlens_q, seqlens_k, causal="none", **descales):
    factors = descales.values() if descales else [torch.ones(1, 1)] * 3
    q, k, v = (tensor.float() * factor[..., None, None] for tensor, factor in zip((q, k, v), factors))
    for batch, (queries, keys) in enumerate(zip(seqlens_q.tolist(), LENGTHS.tolist())):
        s = q[batch, :, :queries] @ k[batch, :, :keys].mT * scale
        if causal == "bottom_right":
            s = s + torch.full(s.shape[1:], -torch.inf).triu(ALIGNED + 1)
        p = torch.softmax(s, -1).nan_to_num().to(out.dtype).float()
        out[batch, :, :queries] = p @ v[batch, :, :keys] if keys else EMPTY
        out[batch, :, queries:].PAST
    return out
"""
RIGHT = {"LENGTHS": "seqlens_k", "ALIGNED": "keys - queries", "EMPTY": "0.0", "PAST": "size()"}


def kernel(
    write_variant: WriteVariant, tmp_path: Path, words: dict[str, str], more: str = "", dtype: str = "fp16"
) -> Variant:
    """A kernel of ragged batches alone, with some words of the source, and lines of its manifest."""
    source = SOURCE
    for name, text in {**RIGHT, **words}.items():
        source = source.replace(name, text)
    supports = f"supports: {{device: [cpu], dtype: [{dtype}], causal: [none, bottom_right], ragged: [both]}}\n"
    manifest = MANIFEST + 'entry: {kind: python, target: "entry:forward"}\nrounds: [p]\n' + supports + more
    folder = write_variant("ragged_alone", manifest=manifest, **{"entry.py": source})
    (variant,) = read_manifest(folder / "variant.yaml", tmp_path / "kernels")
    return variant


def judged(variant: Variant, case: Case, property_name: str | None = None) -> CaseResult:
    """The result of a case, or of a property, on the CPU."""
    job = CaseJob(variant, case, None, "cpu", variant.tolerance, checks_output=True, time=False, repeats=0)
    return run_case(msgspec.structs.replace(job, property_name=property_name))


@pytest.mark.parametrize("dtype", ["fp16", "e4m3"])
@pytest.mark.parametrize(("rule", "past"), [("untouched", "size()"), ("any", "random_()")])
def test_a_kernel_that_takes_no_other_batches_keeps_every_property(
    write_variant: WriteVariant, tmp_path: Path, dtype: str, rule: str, past: str
) -> None:
    """None blames it for rows that belong to no query, and that of lengths is among them."""
    more = f"conventions: {{rows_past: {rule}}}\n" + "tolerance: fp8\n" * (dtype == "e4m3")
    variant = kernel(write_variant, tmp_path, {"PAST": past}, more, dtype)
    names = [name for name in properties_of(variant) if name not in ON_GPU]
    outcomes = {name: judged(variant, case_of_property(variant, name), name).outcome for name in names}
    assert (outcomes.pop("new_shape"), "new_lengths" in outcomes) == ("unsupported", True)
    assert outcomes == dict.fromkeys(outcomes, "ok")


@pytest.mark.parametrize(
    ("word", "text", "cause"),
    [
        ("PAST", "size()", ""),
        ("ALIGNED", "keys - q.shape[2]", "of seqlens_q, they are ignored"),
        ("EMPTY", "torch.nan", "NaN exactly in the queries that see no key"),
        ("PAST", "random_()", "or declare `conventions: {rows_past: any}`"),
    ],
)
def test_a_mistake_gets_its_name(write_variant: WriteVariant, tmp_path: Path, word: str, text: str, cause: str) -> None:
    """Rows that belong to no query do not hide which mistake it is."""
    case = parse_case(f"b4h2s77d64-fp16{'-causal_br' * (word == 'ALIGNED')}-sk150-var2-seed0")
    diagnosis = judged(kernel(write_variant, tmp_path, {word: text}), case).diagnosis
    assert bool(diagnosis) == bool(cause)
    assert diagnosis is None or cause in diagnosis.cause


def test_no_sequence_need_fill_the_tensors(write_variant: WriteVariant, tmp_path: Path) -> None:
    """A kernel that takes the longest sequence for as long as K is wrong."""
    lengths = "seqlens_k.where(seqlens_k < seqlens_k.max(), k.shape[2])"
    variant = kernel(write_variant, tmp_path, {"LENGTHS": lengths})
    result = judged(variant, case_of_property(variant, "new_lengths"), "new_lengths")
    assert result.caught_by == ("new_lengths",)

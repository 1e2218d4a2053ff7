"""Gradients of sequences that lie behind one another: written by a function, returned by it, and by autograd."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pytest_fa.catalog.case import Case, parse_case
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.variant import Variant
from pytest_fa.judge.pipeline import run_case
from pytest_fa.wire.jobs import CaseJob, CaseResult
from tests.factories import MANIFEST, WriteVariant

SOURCE = """\
import torch


def sequences(cu_q, cu_k):
    q, k = cu_q.tolist(), cu_k.tolist()
    return [(slice(*of_q), slice(*of_k)) for of_q, of_k in zip(zip(q, q[1:]), zip(k, k[1:]))]


def scores(q, k, scale, causal):
    s = torch.einsum("qhd,khd->hqk", q.float(), k.float().repeat_interleave(q.shape[1] // k.shape[1], 1)) * scale
    if causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(s.shape[2] - s.shape[1] + 1), -torch.inf)
    return s


def backward(dout, q, k, v, out, lse, cu_q, cu_k, scale, causal, dq, dk, dv, dlse=None):
    group = q.shape[1] // k.shape[1]
    for of_q, of_k in sequences(cu_q, cu_k):
        s = scores(q[of_q], k[of_k], scale, causal)
        p = torch.exp(s - lse[:, of_q, None].clamp_min(-1e30))
        do, keys = dout[of_q].float(), k[of_k].float().repeat_interleave(group, 1)
        values = v[of_k].float().repeat_interleave(group, 1)
        delta = (do * out[of_q].float()).sum(-1).T
        if dlse is not None:
            delta = delta - dlse[:, of_q]
        ds = p * (torch.einsum("qhd,khd->hqk", do, values) - delta[..., None])
        dq[of_q] = (torch.einsum("hqk,khd->qhd", ds, keys) * scale).to(q.dtype)
        for grad, matrix, other in ((dv, p, do), (dk, ds * scale, q[of_q].float())):
            whole = torch.einsum("hqk,qhd->khd", matrix, other)
            grad[FROM] = whole.unflatten(1, (-1, group)).sum(2).to(q.dtype)


def returned(dout, q, k, v, out, lse, cu_q, cu_k, scale, causal):
    found = [torch.zeros_like(each) for each in (q, k, v)]
    backward(dout, q, k, v, out, lse, cu_q, cu_k, scale, causal, *found)
    return tuple(found)


def forward(q, k, v, cu_q, cu_k, scale, causal):
    rows = [torch.zeros_like(q)[: 0]]
    for of_q, of_k in sequences(cu_q, cu_k):
        s = scores(q[of_q], k[of_k], scale, causal)
        p = torch.softmax(s, -1).nan_to_num()
        values = v[of_k].float().repeat_interleave(q.shape[1] // k.shape[1], 1)
        rows.append(torch.einsum("hqk,khd->qhd", p, values).to(q.dtype))
    whole = torch.cat(rows)
    return torch.cat([whole, whole.new_zeros(len(q) - len(whole), *q.shape[1:])])
"""
GIVEN = "dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, scale, causal"
CALLS = {
    "backward": f"arguments: [{GIVEN}, dq, dk, dv], layout: thd",
    "returned": f"arguments: [{GIVEN}], returns: [dq, dk, dv], layout: thd",
    "forward": "arguments: [q, k, v, cu_seqlens_q, cu_seqlens_k, scale, causal], layout: thd",
}
CASES = ("b5h4s70d64-fp16-causal_br-kv2-var2-thd-bwd-seed3", "b3h2s33d64-bf16-sk90-var3-thd-bwd-seed2")


def kernel(
    write_variant: WriteVariant, tmp_path: Path, way: str, place: str = "of_k", more: str = "", supports: str = ""
) -> Variant:
    """A kernel that is one of the functions; `place` says into which rows of the keys it writes."""
    autograd = ", autograd: true" if way == "forward" else ""
    claims = f"device: [cpu], dtype: [fp16, bf16], causal: [none, bottom_right], ragged: [both]{supports}"
    past = "untouched" if way == "backward" else "any"
    entry = f'kind: python, target: "entry:{way}"{autograd}, call: {{{CALLS[way]}{more}}}'
    manifest = (
        f"{MANIFEST}computes: gradients\nentry: {{{entry}}}\nconventions: {{rows_past: {past}}}\n"
        f"supports: {{{claims}, layout: [thd], grouped_heads: true}}\n"
    )
    folder = write_variant("packed", manifest=manifest, **{"entry.py": SOURCE.replace("FROM", place)})
    (variant,) = read_manifest(folder / "variant.yaml", tmp_path / "kernels")
    return variant


def judged(variant: Variant, case: Case, property_name: str | None = None) -> CaseResult:
    """The result of a case, or of a property, on the CPU."""
    job = CaseJob(variant, case, None, "cpu", variant.tolerance, checks_output=True, time=False, repeats=2)
    return run_case(msgspec.structs.replace(job, property_name=property_name))


@pytest.mark.parametrize("way", CALLS)
@pytest.mark.parametrize("case", CASES)
def test_right_gradients_pass(write_variant: WriteVariant, tmp_path: Path, way: str, case: str) -> None:
    """Each way of getting them, with grouped heads, a mask and other lengths on both sides."""
    result = judged(kernel(write_variant, tmp_path, way), parse_case(case))
    assert (result.outcome, result.message) == ("ok", "")


def test_the_gradient_of_the_log_sum_exp_comes_packed(write_variant: WriteVariant, tmp_path: Path) -> None:
    """It is [heads, rows], as the log-sum-exp is."""
    variant = kernel(write_variant, tmp_path, "backward", more=", keywords: {dlse: dlse}", supports=", dlse: true")
    result = judged(variant, parse_case("b5h4s70d64-fp16-kv2-var2-thd-bwd-dlse-seed3"))
    assert (result.outcome, result.message) == ("ok", "")


@pytest.mark.parametrize("place", ["slice(of_k.start + 1, of_k.stop + 1)", "slice(0, of_k.stop - of_k.start)"])
def test_gradients_of_other_rows_are_wrong(write_variant: WriteVariant, tmp_path: Path, place: str) -> None:
    """Rows one too far, and those of the first sequence."""
    result = judged(kernel(write_variant, tmp_path, "backward", place), parse_case(CASES[0]))
    assert result.outcome == "wrong"
    assert "of dk are NaN" in result.message


def test_rows_behind_the_last_sequence_must_stay(write_variant: WriteVariant, tmp_path: Path) -> None:
    """A kernel that zeroes all of dK and dV first writes rows that belong to no key."""
    zeroing = SOURCE.replace("    group = q.shape[1]", "    dk.zero_(), dv.zero_()\n    group = q.shape[1]", 1)
    variant = kernel(write_variant, tmp_path, "backward")
    (Path(variant.folder) / "entry.py").write_text(zeroing.replace("FROM", "of_k"), encoding="utf-8")
    result = judged(variant, parse_case(CASES[0]))
    assert (result.outcome, result.caught_by) == ("wrong", ("rows past",))

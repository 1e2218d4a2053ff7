"""Sequences behind one another: what a call gets, what becomes of its output, and which kernels are right."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.claims import claim_cases
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.properties import applies, case_of_property, properties_of
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import ManifestError, UsageProblem
from pytest_fa.gpu.inputs import Inputs, Output, make_inputs
from pytest_fa.judge.pipeline import run_case
from pytest_fa.records.outcome import Outcome
from tests.factories import MANIFEST, WriteVariant, cpu_job

CPU = torch.device("cpu")
KERNEL = """\
import torch


def attend(q, k, v, scale, causal):  # [seq, heads, dim]
    q, k, v = (x.transpose(0, 1).float() for x in (q, k, v))
    group = q.shape[0] // k.shape[0]
    scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) * scale
    if causal:
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + k.shape[1] - q.shape[1])
        scores = scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1)
    if not scores.shape[2]:
        return q.new_zeros(q.shape).transpose(0, 1), lse
    p = (scores - scores.amax(-1, keepdim=True).clamp_min(-1e30)).exp()
    out = p.half().float() @ v.repeat_interleave(group, 0) / p.sum(-1, keepdim=True).clamp_min(1e-30)
    return out.transpose(0, 1), lse


def of_rows(q, k, v, starts_q, starts_k, longest_q, longest_k, *, scale, causal=False):
    out, lse = torch.zeros_like(q), q.new_zeros((q.shape[1], q.shape[0]), dtype=torch.float32)
    assert longest_q >= int(starts_q.diff().max()) and longest_k >= int(starts_k.diff().max())
    for a, b, c, d in zip(starts_q[:-1], starts_q[1:], starts_k[:-1], starts_k[1:]):
        out[a:b], lse[:, a:b] = attend(q[a:b], k[c:d], v[c:d], scale, causal)
    return out, lse


def of_rows_first(*arguments, **keywords):
    out, lse = of_rows(*arguments, **keywords)
    return out, lse.transpose(0, 1).contiguous()


def of_heads_first(*arguments, **keywords):
    out, lse = of_rows(*arguments, **keywords)
    return out.transpose(-3, -2), lse


def of_given(*arguments, out, lse, **keywords):
    out[...], lse[...] = of_rows(*arguments, **keywords)


def of_tiles(q, k, v, starts_q, starts_k, *_, scale, causal=False, last_is_hidden=True):
    out = torch.zeros_like(q)
    for a, b, c, d in zip(starts_q[:-1], starts_q[1:], starts_k[:-1], starts_k[1:]):
        end = c + (d - c + 63) // 64 * 64  # whole tiles, which go on with rows of others
        scores = q[a:b].transpose(0, 1).float() @ k[c:end].permute(1, 2, 0).float() * scale
        if last_is_hidden:
            scores[:, :, d - c :] = -torch.inf
        p = torch.softmax(scores, -1).nan_to_num(0.0) if d > c else torch.zeros_like(scores)
        out[a:b] = (p.half().float() @ v[c:end].transpose(0, 1).float()).transpose(0, 1)
    return out


def of_whole_tiles(*arguments, **keywords):
    return of_tiles(*arguments, **keywords, last_is_hidden=False)


def of_dense_rows(q, k, v, *arguments, **keywords):
    q, k, v = (x.as_strided(x.shape, (x.shape[1] * x.shape[2], x.shape[2], 1)) for x in (q, k, v))
    return of_rows(q, k, v, *arguments, **keywords)
"""
CALL = (
    "arguments: [q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k], "
    "keywords: {scale: scale, causal: causal}, layout: thd, returns: [out, lse]"
)
SUPPORTS = "dtype: [fp16], layout: [thd], ragged: [both], causal: [none, bottom_right], grouped_heads: true"
MORE = "returns: [out, lse]\ninvariant: [batch, position]\nconventions: {rows_past: zero}\n"

VariantOf = Callable[..., Variant]


@pytest.fixture
def variant_of(write_variant: WriteVariant, tmp_path: Path) -> VariantOf:
    """`variant_of(target, call, supports)`: the variant of one function of `KERNEL`."""

    def make(target: str = "of_rows", call: str = CALL, supports: str = SUPPORTS, more: str = MORE) -> Variant:
        entry = f'{{target: "entry:{target}", call: {{{call}}}}}'
        text = f"{MANIFEST}entry: {entry}\nsupports: {{device: [cpu], {supports}}}\n{more}"
        folder = write_variant("mine", manifest=text, **{"entry.py": KERNEL})
        return read_manifest(folder / "variant.yaml", tmp_path)[0]

    return make


def call_of(case: str) -> tuple[Inputs, Inputs]:
    """The judge's own tensors of a case, and the call."""
    inputs = make_inputs(parse_case(case), CPU)
    return inputs, inputs.placed()


def test_a_call_has_the_rows_of_each_sequence_behind_those_before_it() -> None:
    """Rows of padding, which are NaN, come last; with odd seeds, the longest numbers are too large."""
    inputs, placed = call_of("b9h4s129d8-fp16-kv2-sk257-var2-thd-seed1")
    starts_q, starts_k = (placed.extra[f"cu_seqlens_{side}"].tolist() for side in "qk")
    assert [tuple(tensor.shape) for tensor in placed[:3]] == [(1, 4, 9 * 129, 8), *[(1, 2, 9 * 257, 8)] * 2]
    assert all(tensor.transpose(1, 2).is_contiguous() for tensor in placed[:3])
    assert placed.words == {"causal": "none", "max_seqlen_q": 129 + 64, "max_seqlen_k": 257 + 64}
    for batch, each in enumerate(parse_case("b9h4s129d8-fp16-kv2-sk257-var2-thd-seed0").sequences):
        assert starts_q[batch + 1] - starts_q[batch] == each.seq_q
        own = placed.k[0, :, starts_k[batch] : starts_k[batch + 1]]
        assert torch.equal(own, inputs.k[batch, :, : each.seq_k])
    assert bool(placed.k[:, :, starts_k[-1] :].isnan().all())
    assert not bool(placed.k[:, :, : starts_k[-1]].isnan().any())


def test_an_output_of_rows_becomes_that_of_sequences() -> None:
    """What lies behind the last sequence is found in the padding."""
    inputs, placed = call_of("b9h4s129d8-fp16-var3-thd-seed0")
    dense = placed.dense()
    assert all(torch.equal(dense.parts[name].nan_to_num(), each.nan_to_num()) for name, each in inputs.parts.items())
    rows = torch.arange(9 * 129).expand(1, 4, -1).float()
    padded = placed.dense_output(Output(rows[..., None], {"lse": rows}))
    starts = placed.extra["cu_seqlens_q"].tolist()
    first_padding = starts[-1]
    for batch, (start, end) in enumerate(pairwise(starts)):
        assert padded.out[batch, 0, :, 0].tolist()[: end - start] == [*range(start, end)]
        assert padded.more["lse"][batch, 3].tolist()[end - start :] == [
            *range(first_padding, first_padding + 129 - end + start)
        ]
        first_padding += 129 - end + start


def test_beside_pages_only_queries_lie_behind_one_another() -> None:
    """The cache keeps its lengths of keys."""
    _, placed = call_of("b4h4s5d8-fp16-kv2-sk150-var2-page16-thd-seed0")
    assert {*placed.extra} == {"cu_seqlens_q", "seqlens_k", "block_table"}
    assert (placed.q.shape, placed.k.shape[2], placed.word("max_seqlen_k")) == ((1, 4, 20, 8), 16, 150)


def test_a_right_function_is_right_in_all_that_it_claims(variant_of: VariantOf) -> None:
    """Its log-sum-exp is [heads, rows], and each of its calls has this layout."""
    variant = variant_of()
    cases = claim_cases(variant, ())
    wrong = {case.id: result.message for case in cases if (result := run_case(cpu_job(variant, case.id))).message}
    assert (wrong, {case.layout for case in cases}) == ({}, {"thd"})
    for name in properties_of(variant):
        if applies(name, variant, "cpu"):
            result = run_case(cpu_job(variant, case_of_property(variant, name).id, property_name=name))
            assert (name, result.message) == (name, "") or result.outcome == Outcome.UNSUPPORTED


@pytest.mark.parametrize(
    ("target", "more", "message"),
    [
        ("of_tiles", "", "or declare `conventions: {padding: finite}`"),
        ("of_tiles", ", padding: finite", ""),
        ("of_whole_tiles", ", padding: finite", "wrong in"),
    ],
)
def test_a_kernel_may_need_finite_numbers_behind_a_sequence(
    variant_of: VariantOf, target: str, more: str, message: str
) -> None:
    """It is right if it declares that, and only if these numbers have no weight."""
    call, supports = CALL.replace(", returns: [out, lse]", ""), SUPPORTS.replace(", grouped_heads: true", "")
    variant = variant_of(target, call, supports, f"conventions: {{rows_past: zero{more}}}")
    result = run_case(cpu_job(variant, "b4h2s129d64-fp16-var3-thd-seed0"))
    assert message in (result.diagnosis.cause if result.diagnosis else "")
    assert (result.outcome == "ok") == (not message)


@pytest.mark.parametrize(
    ("target", "order"), [("of_rows", "hbs"), ("of_rows_first", "bsh"), ("of_given", "bhs"), ("of_given", "hbs")]
)
def test_a_log_sum_exp_has_no_batch_in_any_order(variant_of: VariantOf, target: str, order: str) -> None:
    """Of [heads, batch, rows], [heads, rows] remains."""
    call = CALL
    if target == "of_given":
        call = CALL.replace(", returns: [out, lse]", "").replace("causal: causal", "causal: causal, out: out, lse: lse")
    variant = variant_of(target, call, SUPPORTS, MORE.replace("zero", f"zero, lse_order: {order}"))
    assert run_case(cpu_job(variant, "b4h2s65d64-fp16-var2-thd-seed0")).message == ""


def test_a_function_need_not_take_the_longest_numbers(variant_of: VariantOf) -> None:
    """The starts say them, too."""
    call = CALL.replace(", max_seqlen_q, max_seqlen_k", "").replace(", returns: [out, lse]", "")
    variant = variant_of("of_tiles", call, SUPPORTS, "conventions: {rows_past: zero, padding: finite}")
    assert run_case(cpu_job(variant, "b4h2s129d64-fp16-var3-thd-seed1")).outcome == "ok"


def test_the_line_for_exchanged_axes_fits_three_of_them(variant_of: VariantOf) -> None:
    """An output [heads, rows, dim] is answered with a line that exchanges its first two axes."""
    result = run_case(cpu_job(variant_of("of_heads_first"), "b4h2s65d64-fp16-var2-thd-seed0"))
    assert "write `return out.transpose(-3, -2)`" in result.message


def test_what_becomes_of_rows_without_a_query_is_said_without_lengths(variant_of: VariantOf) -> None:
    """A call has no seqlens_q."""
    result = run_case(cpu_job(variant_of(more="returns: [out, lse]\n"), "b4h2s65d64-fp16-var2-thd-seed0"))
    assert result.diagnosis is not None
    assert result.diagnosis.cause.startswith("rows of the output that belong to no query become zero")


@pytest.mark.parametrize("name", ["padded_rows", "different_strides"])
def test_rows_of_a_call_have_strides_of_their_own(variant_of: VariantOf, name: str) -> None:
    """A function that takes them for dense is wrong."""
    variant = variant_of("of_dense_rows")
    case = case_of_property(variant, name)
    assert run_case(cpu_job(variant, case.id)).message == ""
    result = run_case(cpu_job(variant, case.id, property_name=name))
    assert (result.outcome, name in result.caught_by) == ("wrong", True)


@pytest.mark.parametrize(
    ("call", "supports", "message"),
    [
        (CALL, SUPPORTS.replace("[both]", "[keys]"), "supports.layout has thd, but supports.ragged does not list both"),
        (CALL, SUPPORTS.replace("[thd]", "[bshd]"), "supports.layout is bshd; write `layout: [thd], ragged: [both]`"),
        (
            CALL,
            SUPPORTS.replace("[thd]", "[bhsd, thd]"),
            "passes starts of sequences in each call; write `layout: [thd]`",
        ),
        (CALL.replace(", cu_seqlens_k", ", 5"), SUPPORTS, "does not pass 'cu_seqlens_k', but supports.layout has thd"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(
    variant_of: VariantOf, call: str, supports: str, message: str
) -> None:
    """The message says what to write."""
    with pytest.raises(ManifestError) as caught:
        variant_of(call=call, supports=supports)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("b2h2s64d64-fp16-thd", "add -var2 or -var3, or drop -thd"),
        ("b4h2s64d64-fp16-var1-thd", "add -var2 or -var3, or drop -thd"),
        ("b4h2s64d64-fp16-var2-maskq-thd", "a mask is padded, [batch, heads, seq_q, seq_k]; drop it or -thd"),
        ("b4h2s64d64-fp16-var2-kv_int8_t-thd", "add -page16, or drop -kv_ or -thd"),
    ],
)
def test_a_case_that_cannot_be_is_refused(case: str, message: str) -> None:
    """The message says what to add or to drop."""
    with pytest.raises(UsageProblem) as caught:
        parse_case(f"{case}-seed0")
    assert message in str(caught.value)

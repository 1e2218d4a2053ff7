"""Pages: caches that calls get, the places in them that hold NaN, claims, manifests, calls of libraries, and bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_fa.attention.pages import SPARE, TAILS
from pytest_fa.candidate.module import load_forward
from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.claims import claim_cases
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.properties import applies, case_of_property, properties_of
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import FaError, ManifestError, UsageProblem
from pytest_fa.gpu.inputs import Inputs, make_inputs
from pytest_fa.judge.candidate import Candidate
from pytest_fa.judge.clocks.fresh_data import FreshData
from pytest_fa.judge.pipeline import run_case
from pytest_fa.judge.truth import make_truth
from pytest_fa.wire.commands import Run
from pytest_fa.wire.jobs import CaseResult
from tests.factories import MANIFEST, WriteVariant, cpu_job

CPU = torch.device("cpu")
KERNEL = """\
import torch


def gathered(cache, row, count):  # [pages, page_size, heads, dim] -> [heads, count, dim]
    return cache[row].flatten(0, 1)[:count].transpose(0, 1)


def paged(q, k_cache, v_cache, block_table, cache_seqlens, scale, causal=False, tail=False):  # [batch, seq, heads, dim]
    page, group, outs = k_cache.shape[1], q.shape[2] // k_cache.shape[2], []
    assert tail or k_cache.is_contiguous()
    for rows, table, count in zip(q, block_table.long(), cache_seqlens.tolist()):
        used = table if tail else table[: -(-count // page)]
        k, v = (gathered(x, used, count).float().repeat_interleave(group, 0) for x in (k_cache, v_cache))
        scores = rows.transpose(0, 1).float() @ k.transpose(1, 2) * scale
        if causal:
            own = torch.arange(len(rows))[:, None] + count - len(rows)
            scores = scores.masked_fill(torch.arange(count) > own, -torch.inf)
        weights = torch.softmax(scores, -1).nan_to_num(0.0) if count else scores
        outs.append((weights @ v).transpose(0, 1).to(q.dtype))
    return torch.stack(outs)


def hnd(q, k_cache, v_cache, block_table, cache_seqlens, scale):  # caches [pages, heads, page_size, dim]
    caches = (cache.transpose(1, 2).contiguous() for cache in (k_cache, v_cache))
    assert k_cache.is_contiguous()
    return paged(q, *caches, block_table, cache_seqlens, scale)
"""
CALL = "{arguments: [q, k, v, block_table, seqlens_k, scale%s], layout: bshd}"
CLAIMS = "device: [cpu], dtype: [fp16, bf16], grouped_heads: true"
VariantOf = Callable[..., Variant]


@pytest.fixture
def variant_of(write_variant: WriteVariant, tmp_path: Path) -> VariantOf:
    """`variant_of(target, more, supports)`: the variant of one function of `KERNEL`."""

    def make(target: str = "paged", more: str = "", supports: str = "pages: [16]", manifest: str = "") -> Variant:
        entry = f'{{target: "entry:{target}", call: {CALL % more}}}'
        lengths = "" if "ragged" in supports else ", ragged: [keys]"
        text = f"{MANIFEST}entry: {entry}\nsupports: {{{CLAIMS}, {supports}{lengths}}}\n{manifest}"
        folder = write_variant("mine", manifest=text, **{"entry.py": KERNEL})
        return read_manifest(folder / "variant.yaml", tmp_path)[0]

    return make


def judged(variant: Variant, case: str, property_name: str | None = None) -> CaseResult:
    """The result of one case on the CPU, or of a property."""
    return run_case(cpu_job(variant, case, repeats=2, property_name=property_name))


def call_of(case: str) -> Inputs:
    """The call of a case, as its tensors lie in memory."""
    return make_inputs(parse_case(case), CPU).placed()


@pytest.mark.parametrize(
    ("target", "more", "supports"),
    [
        ("paged", ", causal", "causal: [none, bottom_right], pages: [1, 16, 64, 128, 256]"),
        ("hnd", "", "pages: [16hnd, 64hnd]"),
    ],
)
def test_a_right_kernel_is_right_in_all_that_it_claims(
    variant_of: VariantOf, target: str, more: str, supports: str
) -> None:
    """Also without entries that can be read behind the last page, and with all its properties."""
    variant = variant_of(target, more, supports)
    cases = claim_cases(variant, ())
    wrong = {case.id: found.message for case in cases if (found := judged(variant, case.id)).outcome != "ok"}
    assert (wrong, {case.value_of("pages") for case in cases}) == (
        {},
        {*map(str, variant.supports.values_of("pages", ()))},
    )
    for name in properties_of(variant):
        if applies(name, variant, "cpu") and name not in ("new_shape", "batch_invariance"):
            result = judged(variant, case_of_property(variant, name).id, name)
            assert (name, result.outcome, result.message) == (name, "ok", "")


def test_what_no_sequence_has_is_nan() -> None:
    """Unused pages and slots are NaN, tails of the table are no page's, and two sequences share their first page."""
    case = parse_case("b4h4s1d8-fp16-kv2-sk150-var1-page16-seed3")
    inputs = make_inputs(case, CPU)
    placed, table = inputs.placed(), inputs.extra["block_table"][:, 0, 0]
    lengths = [each.seq_k for each in case.sequences]
    assert (placed.k.shape, placed.k.transpose(1, 2).is_contiguous()) == ((4 * 10 + SPARE, 2, 16, 8), True)
    used: dict[int, int] = {}
    for row, length in zip(table.tolist(), lengths, strict=True):
        count = -(-length // 16)
        assert set(row[count:]) <= {*TAILS}
        for place, page in enumerate(row[:count]):
            used[page] = max(used.get(page, 0), min(16, length - 16 * place))
    for page, slots in enumerate(placed.k):
        keys = used.get(page, 0)
        assert (bool(slots[:, :keys].isfinite().all()), bool(slots[:, keys:].isnan().all())) == (True, True)
    assert table[0, 0] == table[1, 0]
    assert torch.equal(inputs.k[0, :, :16], inputs.k[1, :, :16])
    assert {int(entry) for entry in table.flatten()} & {-1}


@pytest.mark.parametrize("order", ["", "hnd"])
def test_the_judge_has_k_and_v_without_pages(order: str) -> None:
    """A call that lies in pages means the case without them, and other keys get a table of their own."""
    plain = make_inputs(parse_case("b3h4s5d8-bf16-kv2-sk40-var4-seed1"), CPU)
    inputs = make_inputs(parse_case(f"b3h4s5d8-bf16-kv2-sk40-var4-page64{order}-seed1"), CPU)
    assert torch.equal(plain.q, inputs.q)
    placed = inputs.placed()
    assert (placed.k.stride(1) > placed.k.stride(2)) == (order == "hnd")
    assert torch.equal(make_truth(placed).out, make_truth(inputs).out)
    assert placed.placed() is placed
    more = inputs._replace(k=inputs.k.repeat(1, 1, 4, 1), v=inputs.v.repeat(1, 1, 4, 1))
    other = more.placed()
    assert other.extra["block_table"].shape == (3, 1, 1, 3)
    own = other.dense()
    lengths = inputs.extra["seqlens_k"].flatten().tolist()
    assert all(torch.equal(own.k[row, :, :count], more.k[row, :, :count]) for row, count in enumerate(lengths))


def test_a_kernel_that_reads_the_tail_of_the_table_declares_it(variant_of: VariantOf) -> None:
    """Without the declaration it fails at a number that is no page's; with it, it is right."""
    case = "b4h4s3d64-fp16-kv2-sk150-var1-page16-seed0"
    call = "{arguments: [q, k, v, block_table, seqlens_k, scale], keywords: {tail: true}, layout: bshd}"
    manifest = f'entry: {{target: "entry:paged", call: {call}}}\n'
    variant = variant_of()
    assert judged(variant, case).outcome == "ok"
    Path(variant.folder, "variant.yaml").write_text(
        f"{MANIFEST}{manifest}supports: {{{CLAIMS}, ragged: [keys], pages: [16]}}\n", encoding="utf-8"
    )
    reading = read_manifest(Path(variant.folder, "variant.yaml"), Path(variant.root))[0]
    assert "index" in judged(reading, case).message
    with Path(variant.folder, "variant.yaml").open("a", encoding="utf-8") as file:
        file.write("conventions: {table_tail: valid}\n")
    declared = read_manifest(Path(variant.folder, "variant.yaml"), Path(variant.root))[0]
    assert judged(declared, case).outcome == "ok"


def test_timed_calls_read_their_caches() -> None:
    """What a timed call read is the judge's own k and v, of one head, through the table."""
    case = parse_case("b3h2s4d8-fp16-sk50-var4-page16-seed0")

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, out: Any, **words: Any) -> torch.Tensor:
        pages = words["block_table"].clamp(0, len(k) - 1).long()
        keys = (k + v)[pages].transpose(1, 2).flatten(2, 3)  # [batch, heads, keys, dim]
        seen = torch.arange(keys.shape[2])[:, None] < words["seqlens_k"][:, None, None, None]
        written: torch.Tensor = out.copy_(q + (keys * seen).sum(2, keepdim=True))
        return written

    function: Callable[..., torch.Tensor] = forward
    candidate = Candidate.of_function(function, "cpu")
    data = FreshData(candidate, case, make_inputs(case, CPU), None)
    outs = data.own_outputs(4)
    series = data.series(4, outs)
    candidate.prepare("calls", series)
    candidate.timed(Run("calls", 4))
    data.require_untouched()
    for _ in range(6):
        place = data.any_place(series, 4, outs)
        read = data.inputs_of(series, 4, outs, place)
        keys = (read.k + read.v)[:, :, : int(read.extra["seqlens_k"])]
        torch.testing.assert_close(read.q + keys.sum(2, keepdim=True), place.head_of(outs), atol=0.1, rtol=0.01)


def test_bytes_are_those_that_must_be_read() -> None:
    """Keys of each sequence, those of a shared page once, and the entries of the table."""
    plain = parse_case("b4h32s1d128-fp16-kv8-sk4096-var4-seed0")
    paged = parse_case("b4h32s1d128-fp16-kv8-sk4096-var4-page16-seed0")
    of_key = 2 * 2 * 8 * 128
    entries = sum(-(-each.seq_k // 16) for each in plain.sequences)
    assert paged.touched_bytes - plain.touched_bytes == 4 * entries - 16 * of_key
    assert parse_case("b2h4s1d64-fp16-sk4096-var5-page256hnd-seed0").all_pairs == 2 * 4096


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("b2h4s1d64-fp16-page16-seed0", "a call with pages has the lengths of its sequences; add -var5 for equal ones"),
        ("b2h4s1d64-e4m3-var1-page16-seed0", "pages of e4m3 are not judged; drop -page"),
        ("b2h4s1d64-fp16-var1-page17-seed0", "is malformed"),
    ],
)
def test_impossible_cases_are_refused(case: str, message: str) -> None:
    """Each has one message with what to write."""
    with pytest.raises(UsageProblem, match=message):
        parse_case(case)


@pytest.mark.parametrize(
    ("supports", "message"),
    [
        ("pages: [17]", "supports.pages is ['17']; allowed are true, false, or a list of none, 1, 1hnd, 16, 16hnd"),
        ("ragged: false, pages: [16]", "supports.ragged has no lengths of keys; add `ragged: [keys]`"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(variant_of: VariantOf, supports: str, message: str) -> None:
    """Unknown sizes, and pages without lengths."""
    with pytest.raises(ManifestError) as problem:
        variant_of(supports=supports)
    assert message in str(problem.value)


@pytest.mark.parametrize(
    ("parameters", "call", "words"),
    [
        ("q, k_cache, v_cache, block_table, cache_seqlens=None, softmax_scale=None, causal=False", "paged", True),
        ("q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, softmax_scale=None, causal=False", "", False),
    ],
)
def test_the_line_of_the_failure_makes_the_function_callable(
    write_variant: WriteVariant, tmp_path: Path, parameters: str, call: str, *, words: bool
) -> None:
    """What a function of a cache fails with is the manifest that calls it, with pages or without."""
    body = "paged(q, k_cache, v_cache, block_table, cache_seqlens, softmax_scale, causal)"
    whole = "torch.nn.functional.softmax(q, -1) if k is None else None"
    source = f"{KERNEL}\n\ndef forward({parameters}):\n    return {body if call else whole}\n"
    manifest = f'{MANIFEST}entry: {{target: "entry:forward"}}\n'
    folder = write_variant("mine", manifest=manifest, **{"entry.py": source})
    with pytest.raises(FaError) as caught:
        load_forward(read_manifest(folder / "variant.yaml", tmp_path)[0], None)
    line, *more = str(caught.value).split("`")[1::2]
    supports = f"{CLAIMS}, ragged: [keys], pages: [64]" if words else "device: [cpu]"
    assert more == (["ragged: [keys], pages: [64]", "supports"] if words else [])
    (folder / "variant.yaml").write_text(f"{MANIFEST}{line}\nsupports: {{{supports}}}\n", encoding="utf-8")
    variant = read_manifest(folder / "variant.yaml", tmp_path)[0]
    if words:
        assert judged(variant, "b4h4s3d64-fp16-kv2-sk150-var1-page64-seed0").outcome == "ok"
    else:
        assert variant.entry.call is not None
        assert (variant.entry.call.layout, variant.entry.call.arguments) == ("bshd", ("q", "k", "v"))

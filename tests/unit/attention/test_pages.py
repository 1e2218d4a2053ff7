"""Pages: caches that calls get, the places in them that hold NaN, claims, manifests, calls of libraries, and bytes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_fa.attention.pages import SPARE, TAILS, one_cache
from pytest_fa.candidate.module import load_forward
from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.claims import claim_cases
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.properties import applies, case_of_property, properties_of
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import FaError, ManifestError, UnsupportedCase, UsageProblem
from pytest_fa.gpu.inputs import Inputs, bits_of, clone, make_inputs
from pytest_fa.gpu.packed import memories_of
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
    assert tail or k_cache.is_contiguous()
    return attend(q, k_cache, v_cache, block_table, cache_seqlens, scale, causal, tail)


def attend(q, k_cache, v_cache, block_table, cache_seqlens, scale, causal=False, tail=False):
    page, group, outs = k_cache.shape[1], q.shape[2] // k_cache.shape[2], []
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


def whole_pages(q, k_cache, v_cache, block_table, cache_seqlens, scale, is_hidden=True):
    outs = []
    for rows, table, count in zip(q, block_table.long(), cache_seqlens.tolist()):
        k, v = (gathered(x, table[: -(-count // k_cache.shape[1])], None).float() for x in (k_cache, v_cache))
        scores = rows.transpose(0, 1).float() @ k.transpose(1, 2) * scale
        if is_hidden:
            scores[:, :, count:] = -torch.inf
        outs.append((torch.softmax(scores, -1) @ v).transpose(0, 1).to(q.dtype))
    return torch.stack(outs)


def hnd(q, k_cache, v_cache, block_table, cache_seqlens, scale):  # caches [pages, heads, page_size, dim]
    caches = (cache.transpose(1, 2).contiguous() for cache in (k_cache, v_cache))
    assert k_cache.is_contiguous()
    return paged(q, *caches, block_table, cache_seqlens, scale)


def together(q, kv_cache, block_table, cache_seqlens, scale):  # [pages, 2, page_size, heads, dim]
    assert kv_cache.is_contiguous()
    return attend(q, *kv_cache.unbind(1), block_table, cache_seqlens, scale)


def together_hnd(q, kv_cache, block_table, cache_seqlens, scale):  # [pages, 2, heads, page_size, dim]
    assert kv_cache.is_contiguous()
    return attend(q, *kv_cache.transpose(2, 3).unbind(1), block_table, cache_seqlens, scale)


def exchanged(q, kv_cache, block_table, cache_seqlens, scale):
    return together(q, kv_cache.flip(1), block_table, cache_seqlens, scale)


def writes_past(q, kv_cache, block_table, cache_seqlens, scale):
    kv_cache.as_strided((1,), (1,), kv_cache.storage_offset() + kv_cache.numel())[0] = 1
    return together(q, kv_cache, block_table, cache_seqlens, scale)


def writes_v(q, kv_cache, block_table, cache_seqlens, scale):
    out = together(q, kv_cache, block_table, cache_seqlens, scale)
    kv_cache[block_table[0, 0], 1] += 1
    return out
"""
CALL = "{arguments: [q, k, v, block_table, seqlens_k, scale%s], layout: bshd}"
CALL_OF_ONE = CALL.replace("k, v,", "kv_cache,")
TOGETHER = "conventions: {kv_cache: together}\n"
CLAIMS = "device: [cpu], dtype: [fp16, bf16], grouped_heads: true"
VariantOf = Callable[..., Variant]


@pytest.fixture
def variant_of(write_variant: WriteVariant, tmp_path: Path) -> VariantOf:
    """`variant_of(target, more, supports)`: the variant of one function of `KERNEL`."""

    def make(target: str = "paged", more: str = "", supports: str = "pages: [16]", manifest: str = "") -> Variant:
        call = (CALL_OF_ONE if manifest == TOGETHER else CALL) % more
        entry = f'{{target: "entry:{target}", call: {call}}}'
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
    ("target", "more", "supports", "manifest"),
    [
        ("paged", ", causal", "causal: [none, bottom_right], pages: [1, 16, 64, 128, 256]", ""),
        ("hnd", "", "pages: [16hnd, 64hnd]", ""),
        ("together", "", "pages: [1, 16, 128]", TOGETHER),
        ("together_hnd", "", "pages: [16hnd, 64hnd]", TOGETHER),
    ],
)
def test_a_right_kernel_is_right_in_all_that_it_claims(
    variant_of: VariantOf, target: str, more: str, supports: str, manifest: str
) -> None:
    """Also without entries that can be read behind the last page, and with all its properties."""
    variant = variant_of(target, more, supports, manifest)
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


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("exchanged", "K and V are exchanged"),
        ("writes_v", "the kernel changed its input v"),
        ("writes_past", "the kernel wrote out of bounds of kv_cache: 2 bytes past its end, the nearest 0 bytes"),
    ],
)
def test_a_wrong_kernel_of_one_cache_is_caught(variant_of: VariantOf, target: str, message: str) -> None:
    """K and V in the other order are named; a write into the cache or past it is found."""
    result = judged(variant_of(target, manifest=TOGETHER), "b4h4s3d64-fp16-kv2-sk256-var5-page16-seed0")
    assert (result.outcome, message in f"{result.message} {result.diagnosis}") == ("wrong", True)


@pytest.mark.parametrize(
    ("more", "manifest", "message"),
    [
        ("", "", "or declare `conventions: {padding: finite}`"),
        ("", "conventions: {padding: finite}", ""),
        (", false", "conventions: {padding: finite}", "max error"),
    ],
)
def test_a_kernel_may_need_finite_numbers_in_whole_pages(
    variant_of: VariantOf, more: str, manifest: str, message: str
) -> None:
    """It is right if it declares that, and only if these numbers have no weight."""
    result = judged(variant_of("whole_pages", more, manifest=manifest), "b4h4s3d64-fp16-sk150-var4-page16-seed0")
    assert (result.outcome == "ok", message in f"{result.message} {result.diagnosis}") == (not message, True)


@pytest.mark.parametrize("pages", ["", "-page16"])
@pytest.mark.parametrize("by", ["t", "h"])
def test_finite_numbers_without_a_key_do_not_change_scales(pages: str, by: str) -> None:
    """They are not larger than the keys, which would be few different numbers."""
    case = parse_case(f"b4h4s1d8-fp16-kv2-sk150-var1{pages}-kv_int8_{by}-seed0")
    plain, finite = (make_inputs(case, CPU, each).placed() for each in ({}, {"padding": "finite"}))
    assert all(torch.equal(plain.extra[word], finite.extra[word]) for word in ("k_scale", "v_scale"))
    assert [int(tensor.abs().max()) for tensor in finite[1:3]] == [127, 127]


@pytest.mark.parametrize("more", ["", "-kv_e4m3_h", "-kv_int8_th"])
@pytest.mark.parametrize("order", ["", "hnd"])
def test_one_cache_has_k_and_v_of_each_page(order: str, more: str) -> None:
    """It means what two caches mean, also in a copy, and a call in pages stays where it is."""
    case = parse_case(f"b3h4s5d8-fp16-kv2-sk40-var4-page16{order}{more}-seed1")
    apart, placed = (make_inputs(case, CPU, conventions).placed() for conventions in ({}, {"kv_cache": "together"}))
    assert all(torch.equal(bits_of(own), bits_of(other)) for own, other in zip(placed[:3], apart[:3], strict=True))
    assert [name for name in memories_of(placed) if name not in placed.extra] == ["kv_cache", "q"]
    for each in (placed, clone(placed)):
        cache = memories_of(each)["kv_cache"]
        shape = (3 * 3 + SPARE, 2, *((2, 16) if order else (16, 2)), 8)
        in_memory = cache if order else cache.transpose(2, 3)
        assert (in_memory.shape, in_memory.is_contiguous(), each.placed() is each) == (shape, True, True)


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


@pytest.mark.parametrize("conventions", [{}, {"kv_cache": "together"}])
def test_timed_calls_read_their_caches(conventions: dict[str, str]) -> None:
    """What a timed call read is the judge's own k and v, of one head, through the table; one cache moves as a whole."""
    case = parse_case("b3h2s4d8-fp16-sk50-var4-page16-seed0")

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, out: Any, **words: Any) -> torch.Tensor:
        assert (one_cache(k, v) is not None) == bool(conventions)
        pages = words["block_table"].clamp(0, len(k) - 1).long()
        keys = (k + v)[pages].transpose(1, 2).flatten(2, 3)  # [batch, heads, keys, dim]
        seen = torch.arange(keys.shape[2])[:, None] < words["seqlens_k"][:, None, None, None]
        written: torch.Tensor = out.copy_(q + (keys * seen).sum(2, keepdim=True))
        return written

    function: Callable[..., torch.Tensor] = forward
    candidate = Candidate.of_function(function, "cpu")
    data = FreshData(candidate, case, make_inputs(case, CPU, conventions), None)
    outs = data.own_outputs(4)
    series = data.series(4, outs)
    candidate.prepare("calls", series)
    candidate.timed(Run("calls", 4))
    data.require_untouched()
    for _ in range(6):
        place = data.any_place(series, 4, outs)
        read = data.inputs_of(series, 4, outs, place)
        keys = (read.k + read.v)[:, :, : int(read.extra["seqlens_k"])]
        head = place.part_of(outs[place.slot]).out
        torch.testing.assert_close(read.q + keys.sum(2, keepdim=True), head, atol=0.1, rtol=0.01)


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
    ("call", "supports", "manifest", "message"),
    [
        ("kv_cache", "pages: [16]", "", "k and v are apart; add `conventions: {kv_cache: together}`"),
        ("kv_cache", "pages: [none, 16]", TOGETHER, "supports.pages is none, 16; list sizes of a page alone"),
        ("kv_cache", "ragged: false", "", "supports.pages is none; list sizes of a page alone"),
        ("k, v", "ragged: false", TOGETHER, "supports.pages is not claimed; claim it, or drop kv_cache"),
        ("k, kv_cache", "pages: [16]", TOGETHER, ""),
        ("k", "pages: [16]", TOGETHER, "entry.call does not pass 'v'"),
    ],
)
def test_a_manifest_of_one_cache_says_so(
    write_variant: WriteVariant, tmp_path: Path, call: str, supports: str, manifest: str, message: str
) -> None:
    """The function gets it if all its calls have pages, and the manifest declares how they lie."""
    entry = f'{{target: "entry:together", call: {CALL.replace("k, v", call) % ""}}}'
    lengths = "" if "ragged" in supports else ", ragged: [keys]"
    text = f"{MANIFEST}entry: {entry}\nsupports: {{{CLAIMS}, {supports}{lengths}}}\n{manifest}"
    folder = write_variant("mine", manifest=text, **{"entry.py": KERNEL})
    with pytest.raises(ManifestError, match=re.escape(message)) if message else contextlib.nullcontext():
        read_manifest(folder / "variant.yaml", tmp_path)


def test_one_cache_has_one_head_dim(variant_of: VariantOf) -> None:
    """Cases with another head_dim of V are refused, and callers with two caches."""
    variant = variant_of("together", supports="pages: [16], head_dim_v: [equal, 32]", manifest=TOGETHER)
    assert variant.refuses(parse_case("b4h4s3d64-fp16-kv2-sk150-var1-page16-dv32-seed0"))
    case = parse_case("b4h4s3d64-fp16-kv2-sk150-var1-page16-seed0")
    assert not variant.refuses(case)
    inputs = make_inputs(case, CPU).placed()
    with pytest.raises(UnsupportedCase, match="kv_cache is passed, but k and v are no views of one cache"):
        load_forward(variant, None)(*inputs[:3], **inputs.keywords)


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
        ("q, paged_kv_cache, block_table, cache_seqlens, sm_scale", "together", True),
        ("q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, softmax_scale=None, causal=False", "", False),
    ],
)
def test_the_line_of_the_failure_makes_the_function_callable(
    write_variant: WriteVariant, tmp_path: Path, parameters: str, call: str, *, words: bool
) -> None:
    """What a function of a cache fails with is the manifest that calls it, with pages or without."""
    bodies = {
        "paged": "paged(q, k_cache, v_cache, block_table, cache_seqlens, softmax_scale, causal)",
        "together": "together(q, paged_kv_cache, block_table, cache_seqlens, sm_scale)",
    }
    whole = "torch.nn.functional.softmax(q, -1) if k is None else None"
    source = f"{KERNEL}\n\ndef forward({parameters}):\n    return {bodies.get(call, whole)}\n"
    manifest = f'{MANIFEST}entry: {{target: "entry:forward"}}\n'
    folder = write_variant("mine", manifest=manifest, **{"entry.py": source})
    with pytest.raises(FaError) as caught:
        load_forward(read_manifest(folder / "variant.yaml", tmp_path)[0], None)
    line, *more = str(caught.value).split("`")[1::2]
    conventions = more.pop() if call == "together" else ""
    supports = f"{CLAIMS}, ragged: [keys], pages: [64]" if words else "device: [cpu]"
    assert more == (["ragged: [keys], pages: [64]", "supports"] if words else [])
    text = f"{MANIFEST}{line}\nsupports: {{{supports}}}\n{conventions}\n"
    (folder / "variant.yaml").write_text(text, encoding="utf-8")
    variant = read_manifest(folder / "variant.yaml", tmp_path)[0]
    assert conventions in ("", TOGETHER.strip())
    if words:
        assert judged(variant, "b4h4s3d64-fp16-kv2-sk150-var1-page64-seed0").outcome == "ok"
    else:
        assert variant.entry.call is not None
        assert (variant.entry.call.layout, variant.entry.call.arguments) == ("bshd", ("q", "k", "v"))

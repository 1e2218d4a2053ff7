"""Appended keys: what a call gets, and leaves of its caches, claims, manifests, conventions, timed calls, and bytes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_fa.attention import parts
from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.claims import claim_cases
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.properties import applies, case_of_property, properties_of
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import ManifestError, UsageProblem, WrongResult
from pytest_fa.gpu.inputs import bits_of, make_inputs
from pytest_fa.judge.candidate import Candidate
from pytest_fa.judge.clocks.fresh_data import FreshData
from pytest_fa.judge.clocks.timed_series import TimedSeries
from pytest_fa.judge.pipeline import run_case
from pytest_fa.judge.truth import make_truth
from pytest_fa.wire.jobs import CaseResult
from tests.factories import MANIFEST, WriteVariant, cpu_job

CPU = torch.device("cpu")
CASES = [
    f"b4h4s{rest}"
    for rest in (
        "3d16-fp16-kv2-sk150-var1-append",
        "1d16-bf16-sk64-var5-append-bshd",
        "5d16-fp16-kv2-sk150-var4-page16-append-dv8",
        "8d16-fp32-kv2-sk40-var4-page64hnd-append",
    )
]
WITHOUT = {"appended_lengths": "without"}
# A function like FlashAttention's: [batch, seq, heads, dim], and lengths before the append.
KERNEL = """\
import torch


def with_cache(q, k_cache, v_cache, k, v, cache_seqlens, softmax_scale, block_table=None):
    group, outs = q.shape[2] // k_cache.shape[2], []
    for row, old in enumerate(cache_seqlens.tolist()):
        places = torch.arange(old if k is None else old + k.shape[1])
        blocks = torch.full_like(places, row)
        if block_table is not None:
            blocks, places = block_table[row, places // k_cache.shape[1]], places % k_cache.shape[1]
        if k is not None:
            k_cache[blocks[old:], places[old:]], v_cache[blocks[old:], places[old:]] = k[row], v[row]
        read = (cache[blocks, places].float().transpose(0, 1) for cache in (k_cache, v_cache))
        keys, values = (each.repeat_interleave(group, 0) for each in read)
        scores = q[row].float().transpose(0, 1) @ keys.transpose(1, 2) * softmax_scale
        outs.append((torch.softmax(scores, -1) @ values).transpose(0, 1).to(q.dtype))
    return torch.stack(outs)
"""
CALL = "{arguments: [q, k, v, k_new, v_new, seqlens_k, scale%s], layout: bshd}"
CLAIMS = "device: [cpu], dtype: [fp16, bf16], grouped_heads: true, layout: [bhsd, bshd]"
BEFORE = "conventions: {appended_lengths: without}\n"
CASE = "b4h4s3d64-fp16-kv2-sk150-var1-append-seed0"
VariantOf = Callable[..., Variant]


@pytest.fixture
def variant_of(write_variant: WriteVariant, tmp_path: Path) -> VariantOf:
    """`variant_of(supports, more, manifest, kernel)`: the variant of a function like that of `KERNEL`."""

    def make(
        supports: str = "ragged: [keys], append: true",
        more: str = "",
        manifest: str = BEFORE,
        kernel: str = KERNEL,
    ) -> Variant:
        entry = f'{{target: "entry:with_cache", call: {CALL % more}}}'
        text = f"{MANIFEST}entry: {entry}\nsupports: {{{CLAIMS}, {supports}}}\n{manifest}"
        folder = write_variant("mine", manifest=text, **{"entry.py": kernel})
        return read_manifest(folder / "variant.yaml", tmp_path)[0]

    return make


def judged(variant: Variant, case: str = CASE, property_name: str | None = None) -> CaseResult:
    """The result of one case on the CPU, or of a property."""
    return run_case(cpu_job(variant, case, repeats=2, property_name=property_name))


# -- the call ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("conventions", [{}, WITHOUT])
@pytest.mark.parametrize("case_id", CASES)
def test_slots_of_new_keys_are_nan_until_they_are_written(case_id: str, conventions: dict[str, str]) -> None:
    """A call has its new keys apart; what it leaves has them in their slots, and nothing else changes."""
    case = parse_case(f"{case_id}-seed0")
    inputs = make_inputs(case, CPU, conventions)
    placed = inputs.placed()
    after = parts.after(placed)
    assert placed.placed() is placed
    for name, word in (("k", "k_new"), ("v", "v_new")):
        own, new, given = getattr(inputs, name), placed.extra[word], getattr(placed, name)
        for row, each in enumerate(case.sequences):
            assert torch.equal(new[row], own[row, :, each.seq_k - case.seq_q : each.seq_k])
        assert not bool(new.isnan().any())
        changed = bits_of(given) != bits_of(getattr(after, name))
        assert int(changed.sum()) == new.numel()
        assert bool(given[changed].isnan().all())
        assert getattr(placed.dense(), name).shape == own.shape
    lengths = [each.seq_k - (case.seq_q if conventions else 0) for each in case.sequences]
    assert placed.extra["seqlens_k"].flatten().tolist() == lengths
    assert placed.extra["k_new"].transpose(1, 2).is_contiguous() == (case.layout == "bshd" or case.heads == 1)
    assert torch.equal(make_truth(placed).out, make_truth(inputs).out)
    parts.renew(after)
    assert torch.equal(bits_of(after.k), bits_of(placed.k))


def test_new_keys_are_in_no_shared_page() -> None:
    """Sequences share their first page only if its keys are old."""
    for keys, is_shared in ((64, False), (66, False), (67, True)):
        inputs = make_inputs(parse_case(f"b2h2s3d8-fp16-sk{keys}-var5-page64-append-seed0"), CPU)
        first, second = inputs.extra["block_table"][:, 0, 0, 0].tolist()
        assert (first == second) == is_shared


@pytest.mark.parametrize("step", [1, 2])
def test_strides_stay(step: int) -> None:
    """A cache with gaps between its rows keeps them, and its offset."""
    inputs = make_inputs(parse_case("b2h2s1d8-fp16-sk6-var5-append-seed0"), CPU)
    storage = torch.zeros(3 + inputs.k.numel() * step, dtype=inputs.k.dtype)
    k = storage[3:].view(*inputs.k.shape[:3], 8 * step)[..., :8].copy_(inputs.k)
    placed = inputs._replace(k=k).placed()
    assert (placed.k.stride(), placed.k.storage_offset()) == (k.stride(), 3)
    assert not bool(storage.isnan().any())


# -- right and wrong kernels ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("supports", "more"),
    [("ragged: [keys], append: true", ""), ("ragged: [keys], append: [true], pages: [16, 64]", ", block_table")],
)
def test_a_right_function_of_a_library_is_right_in_all_that_it_claims(
    variant_of: VariantOf, supports: str, more: str
) -> None:
    """Also in its properties, with lengths before the append."""
    variant = variant_of(supports, more)
    cases = [case for case in claim_cases(variant, ()) if case.value_of("append")]
    results = {case.id: judged(variant, case.id) for case in cases}
    assert {case: found.message for case, found in results.items() if found.outcome != "ok"} == {}
    assert {case.seq_q for case in cases} == {1, 3, 8}
    for name in properties_of(variant):
        case = case_of_property(variant, name)
        if applies(name, variant, "cpu") and case.value_of("append"):
            found = judged(variant, case.id, name)
            assert (name, found.outcome) in ((name, "ok"), (name, "unsupported")), found.message


COUNTS_NEW = KERNEL.replace("cache_seqlens.tolist()", "(cache_seqlens - (0 if k is None else k.shape[1])).tolist()")
WRITES = "k_cache[blocks[old:], places[old:]], v_cache[blocks[old:], places[old:]] = k[row], v[row]"
ADVICE = (
    "seqlens_k counts the new keys, but the manifest declares `conventions: {appended_lengths: without}`: "
    "drop `appended_lengths`"
)
ONCE = """\
            CALLS.append(1)
            if len(CALLS) > len(q):
                k_cache, v_cache = k_cache.clone(), v_cache.clone()
"""
WRONG = {
    "counts": (
        COUNTS_NEW,
        f"in k, the kernel wrote k_new 3 slots too early: {ADVICE}",
    ),
    "once": (
        KERNEL.replace(f"            {WRITES}", f"{ONCE}            {WRITES}").replace(
            "torch\n", "torch\nCALLS = []\n", 1
        ),
        "the kernel did not write k_new into k: look at the slots of the new keys",
    ),
    "part": (
        KERNEL.replace(WRITES, f"{WRITES}; v_cache[blocks[old:], places[old:], 1, 3] += 1"),
        "12 elements that the kernel wrote into v are not those of v_new",
    ),
    "outside": (
        KERNEL.replace(WRITES, f"{WRITES}; k_cache[0, 0, 0, 0] += 1"),
        "the kernel changed its input k outside the slots of the new keys",
    ),
    "lengths": (
        KERNEL.replace(WRITES, f"{WRITES}; cache_seqlens[row] += 1"),
        "the kernel changed its input seqlens_k",
    ),
}


@pytest.mark.parametrize(("kernel", "message"), WRONG.values(), ids=WRONG)
def test_each_wrong_change_of_a_cache_has_one_sentence(variant_of: VariantOf, kernel: str, message: str) -> None:
    """Also of a kernel that writes in its first call only."""
    found = judged(variant_of(kernel=kernel))
    assert (found.outcome, found.caught_by, found.message) == ("wrong", ("inputs",), message)


def test_properties_begin_with_slots_of_nan(variant_of: VariantOf) -> None:
    """A kernel that does not write again what it wrote is found in calls on the same memory, too."""
    variant = variant_of(kernel=WRONG["once"][0])
    found = judged(variant, case_of_property(variant, "new_lengths").id, "new_lengths")
    assert found.message == "the kernel did not write k_new into k: look at the slots of the new keys"


@pytest.mark.parametrize(("conventions", "step"), [({}, 2), (WITHOUT, -2)])
def test_a_length_that_is_counted_otherwise_means_other_keys(conventions: dict[str, str], step: int) -> None:
    """The new keys then stand in other slots."""
    inputs = make_inputs(parse_case("b2h2s2d8-fp16-sk10-var4-append-seed0"), CPU, conventions).meant()
    (other,) = (each for each in parts.other_conventions(inputs) if "new keys" in each.words)
    assert other.change is not None
    changed = other.change(inputs)
    assert changed.extra["seqlens_k"].flatten().tolist() == [10 + step, 5 + step]
    assert torch.equal(changed.k[1, :, 3 + step : 5 + step], inputs.k[1, :, 3:5])


# -- timed calls ------------------------------------------------------------------------------------------------------


def timed(forward: Callable[..., torch.Tensor], case_id: str) -> tuple[FreshData, TimedSeries]:
    """Four timed calls of a function on the CPU."""
    case = parse_case(case_id)
    data = FreshData(Candidate.of_function(forward, "cpu"), case, make_inputs(case, CPU), None)
    series = TimedSeries(data, "calls", 4, data.own_outputs(4), graph=False)
    series.time()
    return data, series


def appending(step: int = 0, *, writes: bool = True) -> Callable[..., torch.Tensor]:
    """A function of calls without pages whose output is q and the sum of each sequence's keys and values."""

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, out: torch.Tensor, **words: Any) -> torch.Tensor:
        k, v = (k, v) if writes else (k.clone(), v.clone())
        count = q.shape[2]
        for row, length in enumerate(words["seqlens_k"].tolist()):
            for cache, new in ((k, words["k_new"]), (v, words["v_new"])):
                cache[row, :, length - count + step : length + step] = new[row]
            out[row] = q[row] + (k + v)[row, :, :length].sum(1, keepdim=True)
        return out

    return forward


TIMED = "b3h2s4d8-fp32-sk50-var4-append-seed0"


def test_timed_calls_append_to_one_cache() -> None:
    """Each call has new keys of its own; its output is judged with these, and the caches with those of the last one."""
    data, series = timed(appending(), TIMED)
    data.require_untouched()
    assert {shift[1:3] for shift in series.series.shifts} == {(0, 0)}
    assert len({shift[3:] for shift in series.series.shifts}) > 1
    for _ in range(6):
        for written in (series.written_head(), *series.written_heads()):
            keys = (written.inputs.k + written.inputs.v)[:, :, : int(written.inputs.extra["seqlens_k"])]
            torch.testing.assert_close(written.inputs.q + keys.sum(2, keepdim=True), written.output.out)


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (appending(writes=False), "the kernel did not write k_new into k: look at the slots of the new keys"),
        (appending(-1), "in k, the kernel wrote k_new 1 slot too early: look at the slots of the new keys"),
    ],
)
def test_timed_calls_write_their_caches(forward: Callable[..., torch.Tensor], message: str) -> None:
    """A kernel that saves the write while it is timed is found."""
    data, _ = timed(forward, TIMED)
    with pytest.raises(WrongResult, match=re.escape(f"{message} while it was timed")):
        data.require_untouched()


# -- claims, manifests, bytes -----------------------------------------------------------------------------------------


def test_bytes_are_those_of_the_cache_and_the_new_keys() -> None:
    """The new keys are read, and written into the cache, whose other keys are read."""
    plain = parse_case("b4h32s2d128-fp16-kv8-sk4096-var4-seed0")
    case = parse_case("b4h32s2d128-fp16-kv8-sk4096-var4-append-seed0")
    assert case.touched_bytes - plain.touched_bytes == 2 * 4 * 8 * 2 * (128 + 128)
    assert case.bytes_per_call - plain.bytes_per_call == 2 * 4 * 8 * 2 * (128 + 128)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("b2h4s1d64-fp16-append", "a call that appends has lengths of keys alone; add -var4, or -var5 for equal ones"),
        ("b2h4s8d64-fp16-var2-append", "a call that appends has lengths of keys alone"),
        ("b9h4s1d64-fp16-sk64-var1-append", "a sequence has 0 keys, of which 1 are new; write a larger -sk"),
        ("b2h4s8d64-fp16-var4-append", "a sequence has 4 keys, of which 8 are new; write a larger -sk"),
        ("b2h4s1d64-e4m3-sk64-var4-append", "appending to a quantised cache is not judged; drop -append"),
        ("b2h4s1d64-fp16-sk64-var4-kv_int8_h-append", "appending to a quantised cache is not judged; drop -append"),
        ("b2h4s8d64-fp16-var5-append-packed", "one tensor of q, k and v is no cache; drop -append"),
    ],
)
def test_impossible_cases_are_refused(case: str, message: str) -> None:
    """Each has one message with what to write."""
    with pytest.raises(UsageProblem, match=re.escape(message)):
        parse_case(f"{case}-seed0")


@pytest.mark.parametrize(
    ("supports", "manifest", "message"),
    [
        ("append: true", "", "supports.ragged has no lengths of keys alone; add `ragged: [keys]`"),
        ("ragged: [keys]", BEFORE, "supports.append is not claimed; claim it, or drop appended_lengths"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(
    variant_of: VariantOf, supports: str, manifest: str, message: str
) -> None:
    """New keys without lengths of keys, and a convention of what is not claimed."""
    with pytest.raises(ManifestError) as problem:
        variant_of(supports=supports, manifest=manifest)
    assert message in str(problem.value)

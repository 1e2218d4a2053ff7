"""Rows in other company: kernels that keep their promise of the same bits or break it, and merged outputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from pytest_fa.attention.pages import shared_and_apart, shares_page
from pytest_fa.candidate.module import load_forward
from pytest_fa.catalog.case import Case, parse_case
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.properties import INVARIANCES, case_of_property, properties_of
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import FaError, ManifestError
from pytest_fa.gpu.inputs import make_inputs
from pytest_fa.judge.pipeline import run_case
from pytest_fa.wire.jobs import CaseJob, CaseResult
from tests.factories import MANIFEST, WriteVariant

# One row after the other, whose keys are summed in `splits` ranges, so that a row's bits depend on nothing else.
SOURCE = """\
import math
import torch


def forward(
    q, k, v, *, scale, causal="none", out=None, lse=None, num_splits=0, seqlens_k=None, block_table=None
):
    batches, heads, seq_q, _ = q.shape
    shares = block_table is not None and bool(block_table[0, 0] == block_table[1, 0])
    if block_table is not None:
        pages = block_table.clamp(0, len(k) - 1).long()
        k, v = (x[pages].transpose(1, 2).flatten(2, 3) for x in (k, v))
    group = heads // k.shape[1]
    for batch in range(batches):
        seq_k = k.shape[2] if seqlens_k is None else int(seqlens_k[batch])
        for head in range(heads):
            for query in range(seq_q):
                end = seq_k
                if causal == "top_left":
                    end = min(seq_k, query + 1)
                if causal == "bottom_right":
                    end = max(0, min(seq_k, query + 1 + seq_k - seq_q))
                splits = 1
                keys, values = (x[batch, head // group, :end].float() for x in (k, v))
                scores = keys @ q[batch, head, query].float() * scale
                m = scores.max() if end else torch.tensor(-math.inf)
                p = torch.exp(scores - m)
                ranges = [slice(i * end // splits, (i + 1) * end // splits) for i in range(splits)]
                l = sum(p[r].sum() for r in ranges)
                o = sum(p[r] @ values[r] for r in ranges)
                out[batch, head, query] = o / l if end else 0
                if lse is not None:
                    lse[batch, head, query] = m + torch.log(l) if end else -math.inf
    return out
"""
SUPPORTS = "{device: [cpu], causal: [none, top_left, bottom_right], grouped_heads: true, layout: [bhsd, bshd]"
SUPPORTS += ", ragged: [none, keys], pages: [none, 16]}"
INVARIANT = "invariant: [batch, position, chunk, prefix, split]\nreturns: [out, lse]\n"
ENTRY = 'entry: {target: "entry:forward"}\n'
ALL = [*INVARIANCES.values(), "split_and_merge"]
VariantOf = Callable[..., Variant]


@pytest.fixture
def variant_of(write_variant: WriteVariant, tmp_path: Path) -> VariantOf:
    """`variant_of(source, more, supports, entry)`: a variant; `more` is appended to its manifest."""

    def make(source: str = SOURCE, more: str = INVARIANT, supports: str = SUPPORTS, entry: str = ENTRY) -> Variant:
        manifest = f"{MANIFEST}{entry}supports: {supports}\n{more}"
        folder = write_variant("rows", manifest=manifest, **{"entry.py": source, "kernel.cu": ""})
        (variant,) = read_manifest(folder / "variant.yaml", tmp_path / "kernels")
        return variant

    return make


def hold(variant: Variant, name: str, case: Case | None = None) -> CaseResult:
    """The result of a property, on its own case unless another is given."""
    case = case or case_of_property(variant, name)
    job = CaseJob(variant, case, None, "cpu", "same_precision", checks_output=True, time=False)
    return run_case(msgspec.structs.replace(job, property_name=name or None))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_a_kernel_of_independent_rows_holds(variant_of: VariantOf, name: str, layout: str) -> None:
    """Each row has the same bits in any company, and two ranges of keys are merged by their log-sum-exps."""
    variant = variant_of(supports=SUPPORTS.replace("[bhsd, bshd]", f"[{layout}]"))
    assert name in properties_of(variant)
    result = hold(variant, name)
    assert (result.outcome, result.message) == ("ok", "")


@pytest.mark.parametrize(
    ("name", "splits", "what", "also"),
    [
        ("batch_invariance", "1 + (batches == 1)", "batch 0 alone", ()),
        ("position_invariance", "1 + batch", "the batches in reverse order", ("batch_invariance",)),
        ("chunk_invariance", "1 + (seq_q < 100)", "queries 1 to 64 alone", ()),
        ("prefix_invariance", "1 + shares", "two sequences share a page", ()),
        ("split_invariance", "max(1, num_splits)", "num_splits = 2", ()),
    ],
)
def test_splits_that_depend_on_the_company_are_caught(
    variant_of: VariantOf, name: str, splits: str, what: str, also: tuple[str, ...]
) -> None:
    """A kernel that divides the keys by how much else there is to do is right, and its bits differ."""
    variant = variant_of(SOURCE.replace("splits = 1", f"splits = {splits}"))
    result = hold(variant, name)
    assert (result.outcome, result.caught_by) == ("wrong", (name,))
    assert result.message.startswith(f"{name}: ")
    assert f" elements have other bits: {what}" in result.message
    for other in {*ALL} - {name}:
        assert hold(variant, other).outcome == ("wrong" if other in also else "ok"), other


def test_a_wrong_log_sum_exp_of_few_keys_is_caught_by_merging(variant_of: VariantOf) -> None:
    """Each range has a correct output, and the merged one is wrong if their weights are."""
    variant = variant_of(SOURCE.replace("m + torch.log(l)", "m + torch.log(l) + 0.01 * (seq_k < 60)"))
    result = hold(variant, "split_and_merge")
    assert (result.outcome, result.caught_by) == ("wrong", ("split_and_merge",))
    assert "(keys before and from 50, merged)" in result.message


def test_only_what_a_manifest_promises_is_judged(variant_of: VariantOf) -> None:
    """Without `invariant`, bits may differ; without a log-sum-exp, nothing can be merged."""
    assert {*ALL} & {*properties_of(variant_of(more=""))} == set()
    assert {*ALL} & {*properties_of(variant_of(more="invariant: [chunk]\n"))} == {"chunk_invariance"}
    masked = SUPPORTS.replace("[none, top_left, bottom_right]", "[top_left]")
    assert {*ALL} & {*properties_of(variant_of(more="returns: [out, lse]\n", supports=masked))} == set()


@pytest.mark.parametrize(
    ("more", "supports", "message"),
    [
        ("invariant: [batch]\ndeterministic: false\n", SUPPORTS, "invariant is batch, but deterministic is false"),
        ("invariant: [chunk]\n", SUPPORTS[:-1] + ", self_attention_only: true}", "a chunk has fewer queries than keys"),
        ("invariant: [chunks]\n", SUPPORTS, "chunks"),
        ("invariant: [prefix]\n", "{device: [cpu]}", "but supports.pages is not claimed; claim it, or drop 'prefix'"),
    ],
)
def test_a_promise_that_cannot_hold_is_refused(variant_of: VariantOf, more: str, supports: str, message: str) -> None:
    """A manifest contradicts itself in one clear way."""
    with pytest.raises(ManifestError) as raised:
        variant_of(more=more, supports=supports)
    assert message in str(raised.value)


@pytest.mark.parametrize("lengths", ["[none, keys]", "[both]", "true"])
@pytest.mark.parametrize("pages", ["[none, 1]", "[16, none]", "[none, 256hnd]", "true"])
def test_the_case_of_prefix_shares_a_page(variant_of: VariantOf, pages: str, lengths: str) -> None:
    """For each size of a page and each kind of lengths, two sequences share a page in one call and not in the other.

    What the calls mean is the same.
    """
    variant = variant_of(supports=f"{{device: [cpu], dtype: [fp16, e4m3], ragged: {lengths}, pages: {pages}}}")
    case = case_of_property(variant, "prefix_invariance", ("e4m3",))
    shared, apart = shared_and_apart(make_inputs(case, torch.device("cpu")))
    assert (shares_page(shared), shares_page(apart)) == (True, False)
    of_shared, of_apart = (each.placed().dense() for each in (shared, apart))
    assert torch.equal(of_shared.k, of_apart.k)
    assert torch.equal(of_shared.v, of_apart.v)


def test_a_case_that_shares_no_page_shows_nothing(variant_of: VariantOf) -> None:
    """The property does not pass then."""
    for case in ("b2h2s40d64-fp16-seed0", "b4h2s8d64-fp16-var5-page16-seed0"):
        result = hold(variant_of(), "prefix_invariance", parse_case(case))
        assert (result.outcome, "share no page" in result.message) == ("failed", True)


@pytest.mark.parametrize(("splits", "outcome"), [("1", "ok"), ("max(1, num_splits)", "wrong")])
def test_the_number_of_splits_is_a_word_of_a_call(variant_of: VariantOf, splits: str, outcome: str) -> None:
    """A function that takes it by another name gets 0 in each call but those of the property."""
    wrapper = """

def other(q, k, v, causal, scale, out, num_kv_splits):
    assert num_kv_splits == 0 or q.shape[1] == 3
    return forward(q, k, v, scale=scale, causal="top_left" if causal else "none", out=out, num_splits=num_kv_splits)
"""
    keywords = "{causal: causal, scale: scale, out: out, num_kv_splits: num_splits}"
    call = f"call: {{arguments: [q, k, v], keywords: {keywords}}}"
    entry = f'entry: {{target: "entry:other", {call}}}\n'
    more = "invariant: [split]\n"
    variant = variant_of(SOURCE.replace("splits = 1", f"splits = {splits}") + wrapper, more, "{device: [cpu]}", entry)
    assert hold(variant, "split_invariance").outcome == outcome
    assert hold(variant, "", parse_case("b1h2s40d64-fp16-seed0")).outcome == "ok"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            'entry: {target: "entry:forward", call: {keywords: {scale: scale}}}\n',
            "entry.call does not pass 'num_splits'",
        ),
        ("", "the C interface has no 'num_splits'; call the kernel from a function of Python (entry.target), or drop"),
        ('entry: {target: "entry:short"}\n', "num_splits"),
    ],
)
def test_a_promise_about_splits_needs_the_word(variant_of: VariantOf, entry: str, message: str) -> None:
    """A call that cannot ask for a number of splits, and a function that does not take one."""
    short = '\n\ndef short(q, k, v, *, scale, causal="none", out=None):\n    return out\n'
    with pytest.raises(FaError) as raised:
        load_forward(variant_of(SOURCE + short, "invariant: [split]\n", "{device: [cpu]}", entry), None)
    assert message in str(raised.value)

"""Rows in other company: kernels that keep their promise of the same bits or break it, and merged outputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.properties import INVARIANCES, case_of_property, properties_of
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import ManifestError
from pytest_fa.judge.pipeline import run_case
from pytest_fa.wire.jobs import CaseJob, CaseResult
from tests.factories import MANIFEST, WriteVariant

# One row after the other, whose keys are summed in `splits` ranges, so that a row's bits depend on nothing else.
SOURCE = """\
import math
import torch


def forward(q, k, v, *, scale, causal="none", out=None, lse=None):
    batches, heads, seq_q, _ = q.shape
    group, seq_k = heads // k.shape[1], k.shape[2]
    for batch in range(batches):
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
SUPPORTS = "{device: [cpu], causal: [none, top_left, bottom_right], grouped_heads: true, layout: [bhsd, bshd]}"
INVARIANT = "invariant: [batch, position, chunk]\nreturns: [out, lse]\n"
ALL = [*INVARIANCES.values(), "split_and_merge"]
VariantOf = Callable[..., Variant]


@pytest.fixture
def variant_of(write_variant: WriteVariant, tmp_path: Path) -> VariantOf:
    """`variant_of(source, more, supports)`: a variant; `more` is appended to its manifest."""

    def make(source: str = SOURCE, more: str = INVARIANT, supports: str = SUPPORTS) -> Variant:
        manifest = f'{MANIFEST}entry: {{target: "entry:forward"}}\nsupports: {supports}\n{more}'
        folder = write_variant("rows", manifest=manifest, **{"entry.py": source})
        (variant,) = read_manifest(folder / "variant.yaml", tmp_path / "kernels")
        return variant

    return make


def hold(variant: Variant, name: str) -> CaseResult:
    """The result of a property on its own case."""
    case = case_of_property(variant, name)
    job = CaseJob(variant, case, None, "cpu", "same_precision", checks_output=True, time=False, property_name=name)
    return run_case(job)


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
        ("batch_invariance", "3 - batches", "batch 0 alone", ()),
        ("position_invariance", "1 + batch", "the batches in reverse order", ("batch_invariance",)),
        ("chunk_invariance", "1 + (seq_q < 100)", "queries 1 to 64 alone", ()),
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
    ],
)
def test_a_promise_that_cannot_hold_is_refused(variant_of: VariantOf, more: str, supports: str, message: str) -> None:
    """A manifest contradicts itself in one clear way."""
    with pytest.raises(ManifestError) as raised:
        variant_of(more=more, supports=supports)
    assert message in str(raised.value)

"""Probes in a manifest: shapes of their own, another thing computed, and what does not go together."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_fa.catalog.case import Computes, parse_case
from pytest_fa.catalog.discover import discover
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.properties import OF_ATTENTION, PROPERTIES, properties_of, property_case
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import ManifestError
from tests.factories import MANIFEST, WriteVariant

SCORES = "role: probe\ncomputes: scores\n"
CASES = "cases: [b1h1s32d64-fp16-sk64]\n"


def read(write_variant: WriteVariant, more: str) -> Variant:
    """The variant of a manifest with these lines."""
    folder = write_variant("thing", manifest=MANIFEST + more, **{"kernel.cu": ""})
    (variant,) = read_manifest(folder / "variant.yaml", folder.parent)
    return variant


def test_a_probe_brings_its_shapes(write_variant: WriteVariant) -> None:
    """Shapes are read as cases of what is computed, seed 0."""
    variant = read(write_variant, SCORES + "cases: [b1h1s32d64-fp16-sk64, b1h1s64d64-fp16]\n")
    assert [case.id for case in variant.cases] == [
        "b1h1s32d64-fp16-sk64-scores-seed0",
        "b1h1s64d64-fp16-scores-seed0",
    ]
    assert (variant.is_judged, variant.may_be_gated) == (True, False)


def test_a_probe_may_compute_attention(write_variant: WriteVariant) -> None:
    """A probe of attention is one by its shapes; it is never gated either."""
    variant = read(write_variant, "role: probe\n" + CASES)
    assert ([case.id for case in variant.cases], variant.computes) == (["b1h1s32d64-fp16-sk64-seed0"], "attention")
    assert not variant.may_be_gated


def test_members_may_have_shapes_of_their_own(write_variant: WriteVariant) -> None:
    """What a member says takes the place of the folder's."""
    text = MANIFEST + SCORES + CASES + "variants: {one: {}, two: {cases: [b1h1s8d64-fp16], role: wrong}}\n"
    folder = write_variant("thing", manifest=text, **{"kernel.cu": ""})
    found = read_manifest(folder / "variant.yaml", folder.parent)
    assert [[case.shape_id for case in each.cases] for each in found] == [
        ["b1h1s32d64-fp16-sk64-scores"],
        ["b1h1s8d64-fp16-scores"],
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (SCORES, "cases is missing, and computes is 'scores'; it names its own shapes, such as [b1h1s32d64-fp16-sk64]"),
        (
            "role: probe\n",
            "cases is missing, and role is 'probe'; it names its own shapes, such as [b1h1s32d64-fp16-sk64]",
        ),
        (
            "computes: scores\n" + CASES,
            "computes is 'scores', role is 'candidate'; what computes no attention has role 'probe' or 'wrong'",
        ),
        (CASES, "cases is for role 'probe' or 'wrong', this one is 'candidate': it is judged on a suite's shapes"),
        (
            SCORES + "cases: [b1h1s32d128-fp16]\n",
            "cases: thing does not support b1h1s32d128-fp16-scores: head_dim is 128, supports 64",
        ),
        (
            SCORES + "cases: [b1h1s33d64-fp16]\nsupports: {seq_q_multiple_of: 32}\n",
            "cases: thing does not support b1h1s33d64-fp16-scores: seq_q is 33, supports multiples of 32",
        ),
        (
            SCORES + "cases: [b1h1s4-fp16]\n",
            "cases: case 'b1h1s4-fp16' is malformed; the form is ",
        ),
        (
            "role: probe\ncases: [b1h1s4d64-fp16-scores]\n",
            "cases has 'b1h1s4d64-fp16-scores', and computes is 'attention'; say computes: scores",
        ),
        (
            SCORES + "cases: [b1h1s4d64-fp16-seed3]\n",
            "cases has 'b1h1s4d64-fp16-seed3'; it names shapes, such as [b1h1s32d64-fp16-sk64], and seeds are",
        ),
        (
            SCORES + CASES + "supports: {causal: [none, top_left]}\n",
            "supports.causal is [none, top_left], and",
        ),
        (SCORES + CASES + "rounds: [q]\n", "rounds is [q], and computes is 'scores', whose rounds is []"),
        (
            SCORES + CASES + "tolerance: fp8\n",
            "tolerance is fp8, and computes is 'scores', whose",
        ),
        (SCORES + CASES + "supports: {seq_k_min: 0}\n", "supports.seq_k_min is 0, and computes is 'scores'"),
        ("computes: score\n", "computes is 'score'; allowed: attention, scores"),
    ],
)
def test_what_does_not_go_together_is_said_once(write_variant: WriteVariant, text: str, problem: str) -> None:
    """One line names the file, the key, the value found and what is allowed."""
    with pytest.raises(ManifestError) as caught:
        read(write_variant, text)
    assert str(caught.value).partition(": ")[2].startswith(problem)
    assert "\n" not in str(caught.value)


def test_a_call_need_not_pass_what_is_not_read(write_variant: WriteVariant) -> None:
    """Scores read no v, so a function that is not ours is not asked to take it."""
    entry = 'entry: {kind: python, target: "m:f", call: {arguments: [q, k, out, scale]}}\n'
    assert read(write_variant, SCORES + CASES + entry).computes == "scores"


def test_scores_are_held_to_what_is_true_of_them(write_variant: WriteVariant) -> None:
    """Every property but those of weights and values, on a case that asks for scores."""
    variant = read(write_variant, SCORES + CASES + "supports: {seq_q_multiple_of: 32, seq_k_multiple_of: 64}\n")
    assert property_case(variant).id == "b2h3s160d64-fp16-sk192-scores-seed0"
    assert [name for name in PROPERTIES if name not in OF_ATTENTION] == list(properties_of(variant))
    assert list(OF_ATTENTION) == ["hard_data"]


@pytest.mark.parametrize("computes", ["attention", "scores"])
def test_the_floor_takes_rows_of_any_length(computes: Computes) -> None:
    """It reads none: whatever a probe's head_dim is, what a call costs stands beside it."""
    noop = discover((Path(__file__).parents[3] / "pytest_fa" / "builtin",)).variants["noop"]
    assert noop.refuses(parse_case("b1h1s32d16-fp16-sk64-seed0").computing(computes)) is None

"""Probes in a manifest: their own shapes, `computes: scores`, and the combinations that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_fa.attention.scores import Computes
from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.discover import discover
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.properties import (
    ATTENTION_ONLY,
    GRADIENTS_ONLY,
    PROMISED,
    PROPERTIES,
    properties_of,
    property_case,
)
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import ManifestError
from pytest_fa.features.gate.opponents import may_be_gated
from tests.factories import MANIFEST, WriteVariant

SCORES = "role: probe\ncomputes: scores\n"
CASES = "cases: [b1h1s32d64-fp16-sk64]\n"


def read(write_variant: WriteVariant, more: str) -> Variant:
    """Return the variant of a manifest with these lines."""
    folder = write_variant("thing", manifest=MANIFEST + more, **{"kernel.cu": ""})
    (variant,) = read_manifest(folder / "variant.yaml", folder.parent)
    return variant


def test_a_probe_has_its_own_shapes(write_variant: WriteVariant) -> None:
    """Shapes are read as cases of what the probe computes, with seed 0."""
    variant = read(write_variant, SCORES + "cases: [b1h1s32d64-fp16-sk64, b1h1s64d64-fp16]\n")
    assert [case.id for case in variant.cases] == [
        "b1h1s32d64-fp16-sk64-scores-seed0",
        "b1h1s64d64-fp16-scores-seed0",
    ]
    assert (variant.is_judged, may_be_gated(variant)) == (True, False)


def test_a_probe_may_compute_attention(write_variant: WriteVariant) -> None:
    """A probe may compute attention on its own shapes; it is not gated either."""
    variant = read(write_variant, "role: probe\n" + CASES)
    assert ([case.id for case in variant.cases], variant.computes) == (["b1h1s32d64-fp16-sk64-seed0"], "attention")
    assert not may_be_gated(variant)


def test_members_may_have_shapes_of_their_own(write_variant: WriteVariant) -> None:
    """The cases of a member replace those of the folder."""
    text = MANIFEST + SCORES + CASES + "variants: {one: {}, two: {cases: [b1h1s8d64-fp16], role: wrong}}\n"
    folder = write_variant("thing", manifest=text, **{"kernel.cu": ""})
    members = read_manifest(folder / "variant.yaml", folder.parent)
    assert [[case.shape_id for case in member.cases] for member in members] == [
        ["b1h1s32d64-fp16-sk64-scores"],
        ["b1h1s8d64-fp16-scores"],
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (SCORES, "cases is missing, but computes is 'scores'; list the shapes to run, such as [b1h1s32d64-fp16-sk64]"),
        (
            "role: probe\n",
            "cases is missing, but role is 'probe'; list the shapes to run, such as [b1h1s32d64-fp16-sk64]",
        ),
        (
            "computes: scores\n" + CASES,
            "computes is 'scores', but role is 'candidate'; it needs role 'probe' or 'wrong'",
        ),
        (
            CASES,
            "cases is only for role 'probe' or 'wrong'; role is 'candidate', which runs on the shapes of a suite",
        ),
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
            "cases has 'b1h1s4d64-fp16-scores', but computes is 'attention'; write computes: scores",
        ),
        (
            SCORES + "cases: [b1h1s4d64-fp16-seed3]\n",
            "cases has 'b1h1s4d64-fp16-seed3'; write shapes without a seed, such as [b1h1s32d64-fp16-sk64]",
        ),
        (
            SCORES + CASES + "supports: {causal: [none, top_left]}\n",
            "supports.causal is [none, top_left], but computes is 'scores'; supports.causal must be [none]",
        ),
        (SCORES + CASES + "rounds: [q]\n", "rounds is [q], but computes is 'scores'; rounds must be []"),
        (
            SCORES + CASES + "tolerance: fp8\n",
            "tolerance is fp8, but computes is 'scores'; tolerance must be same_precision",
        ),
        (
            SCORES + CASES + "supports: {seq_k_min: 0}\n",
            "supports.seq_k_min is 0, but computes is 'scores'; it must be at least 1",
        ),
        ("computes: score\n", "computes is 'score'; allowed: attention, scores"),
    ],
)
def test_inconsistent_keys_are_refused_in_one_line(write_variant: WriteVariant, text: str, problem: str) -> None:
    """The message is one line with the file, the key, the value found and what is allowed."""
    with pytest.raises(ManifestError) as caught:
        read(write_variant, text)
    assert str(caught.value).partition(": ")[2].startswith(problem)
    assert "\n" not in str(caught.value)


def test_a_call_of_scores_need_not_pass_v(write_variant: WriteVariant) -> None:
    """`entry.call` of a probe of scores need not pass v, which scores do not read."""
    entry = 'entry: {kind: python, target: "m:f", call: {arguments: [q, k, out, scale]}}\n'
    assert read(write_variant, SCORES + CASES + entry).computes == "scores"


def test_scores_have_all_properties_but_those_of_attention(write_variant: WriteVariant) -> None:
    """A probe of scores has all properties except those of softmax weights and values, on a case of scores."""
    variant = read(write_variant, SCORES + CASES + "supports: {seq_q_multiple_of: 32, seq_k_multiple_of: 64}\n")
    assert property_case(variant).id == "b2h3s160d64-fp16-sk192-scores-seed0"
    left_out = ATTENTION_ONLY | GRADIENTS_ONLY | PROMISED
    assert [name for name in PROPERTIES if name not in left_out] == list(properties_of(variant))
    assert list(ATTENTION_ONLY) == ["hard_data"]


@pytest.mark.parametrize("computes", ["attention", "scores"])
def test_the_launch_overhead_supports_any_head_dim(computes: Computes) -> None:
    """The launch-overhead variant reads no tensor, so it runs with a probe of any head_dim."""
    noop = discover((Path(__file__).parents[3] / "pytest_fa" / "builtin",)).variants["noop"]
    assert noop.refuses(parse_case("b1h1s32d16-fp16-sk64-seed0").computing(computes)) is None

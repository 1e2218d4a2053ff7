"""Case ids are parsed, written and refused as documented, and the work of a case is counted correctly."""

from __future__ import annotations

import itertools
import json
import math

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.catalog.case import LARGEST, Case, parse_case
from pytest_fa.errors import UsageProblem

# Fields in Case's order: batch, heads, seq_q, head_dim, dtype, causal, kv_heads, seq_k, layout, seed.
IDS = {
    "b1h8s512d64-fp16-seed0": Case(1, 8, 512, 64, "fp16", "none", 8, 512, "bhsd", 0),
    "b2h3s31d128-bf16-seed99": Case(2, 3, 31, 128, "bf16", "none", 3, 31, "bhsd", 99),
    "b1h2s64d64-fp16-causal-seed1": Case(1, 2, 64, 64, "fp16", "top_left", 2, 64, "bhsd", 1),
    "b1h2s64d64-fp16-causal_br-seed1": Case(1, 2, 64, 64, "fp16", "bottom_right", 2, 64, "bhsd", 1),
    "b1h8s77d64-fp16-kv2-seed0": Case(1, 8, 77, 64, "fp16", "none", 2, 77, "bhsd", 0),
    "b1h2s64d64-fp16-sk0-seed0": Case(1, 2, 64, 64, "fp16", "none", 2, 0, "bhsd", 0),
    "b1h2s64d64-fp16-bshd-seed0": Case(1, 2, 64, 64, "fp16", "none", 2, 64, "bshd", 0),
    "b4h8s77d96-bf16-causal_br-kv4-sk1023-bshd-seed12": Case(4, 8, 77, 96, "bf16", "bottom_right", 4, 1023, "bshd", 12),
}


@pytest.mark.parametrize("text", IDS)
def test_an_id_sets_every_field(text: str) -> None:
    """Each part of an id sets its field, and an absent part gives the default."""
    assert IDS[text] == parse_case(text)


@pytest.mark.parametrize("text", IDS)
def test_the_id_of_a_parsed_case_is_the_parsed_text(text: str) -> None:
    """Parsing an id and taking the id of the case gives the same text."""
    assert text == parse_case(text).id


@pytest.mark.parametrize(
    "text",
    [
        "",
        "b1h8s512d64-fp16",
        "b1h8s512-fp16-seed0",
        "h8s512d64-fp16-seed0",
        "b1h8s512d64-seed0",
        "b1h8s512d64-fp16-seed",
        "b1h8s512d64-fp16-seed-1",
        "b1h8s512d64-fp16-causal_tl-seed0",
        "b1h8s512d64-fp16-sk64-kv2-seed0",
        "b1h8s512d64-fp16-bshd-causal-seed0",
        "B1H8S512D64-fp16-seed0",
        " b1h8s512d64-fp16-seed0",
        "b1h8s512d64-fp16-seed0\n",
        "b-1h8s512d64-fp16-seed0",
        "b1h8s512d64-fp16-*",
    ],
)
def test_a_malformed_id_is_refused_with_the_grammar(text: str, snapshot: SnapshotAssertion) -> None:
    """A malformed id is refused with a message that quotes the id and the grammar."""
    with pytest.raises(UsageProblem) as problem:
        parse_case(text)
    assert snapshot == str(problem.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("b1h8s512d64-fp8-seed0", ": no dtype 'fp8'; allowed: fp16, bf16, fp32, e4m3"),
        ("b0h8s512d64-fp16-seed0", ": batch is 0; it must be at least 1"),
        ("b1h0s512d64-fp16-seed0", ": heads is 0; it must be at least 1"),
        ("b1h8s0d64-fp16-seed0", ": seq_q is 0; it must be at least 1"),
        ("b1h8s512d0-fp16-seed0", ": head_dim is 0; it must be at least 1"),
        ("b1h8s512d64-fp16-kv0-seed0", ": kv_heads is 0; it must be at least 1"),
        ("b1h8s512d64-fp16-kv3-seed0", ": 8 heads cannot share 3 key/value heads evenly"),
        ("b1h2s512d64-fp16-kv4-seed0", ": 2 heads cannot share 4 key/value heads evenly"),
    ],
)
def test_an_impossible_case_is_refused_with_its_reason(text: str, reason: str) -> None:
    """An id with impossible values is refused with a message that names the field and the value."""
    with pytest.raises(UsageProblem) as problem:
        parse_case(text)
    assert f"case {text!r}{reason}" == str(problem.value)


@pytest.mark.parametrize(
    ("text", "shortest"),
    [
        ("b1h8s512d64-fp16-kv8-seed0", "b1h8s512d64-fp16-seed0"),
        ("b1h8s512d64-fp16-sk512-seed0", "b1h8s512d64-fp16-seed0"),
        ("b01h8s512d64-fp16-seed0", "b1h8s512d64-fp16-seed0"),
        ("b1h8s512d64-fp16-seed00", "b1h8s512d64-fp16-seed0"),
        ("b1h8s512d64-fp16-seed\N{ARABIC-INDIC DIGIT THREE}", "b1h8s512d64-fp16-seed3"),
    ],
)
def test_a_case_has_only_one_id(text: str, shortest: str) -> None:
    """A longer spelling of an id is refused, and the message gives the shortest one."""
    with pytest.raises(UsageProblem) as problem:
        parse_case(text)
    assert f"case {text!r} is not in its shortest form; write {shortest!r}" == str(problem.value)


def test_the_shape_id_is_the_id_without_its_seed() -> None:
    """Cases that differ only in their seed have the same shape id."""
    shape = "b1h8s77d64-fp16-causal-kv2-sk203"
    assert [shape, shape] == [parse_case(f"{shape}-seed{seed}").shape_id for seed in (0, 4)]


@pytest.mark.parametrize("part", ["", "-causal", "-causal_br"])
@pytest.mark.parametrize(("seq_q", "seq_k"), [*itertools.product((1, 5, 8), (0, 1, 3, 5, 8))])
def test_visible_pairs_are_those_that_the_mask_does_not_hide(part: str, seq_q: int, seq_k: int) -> None:
    """The number of visible pairs equals the number of visible elements of the mask."""
    keys = f"-sk{seq_k}" if seq_k != seq_q else ""
    case = parse_case(f"b1h1s{seq_q}d64-fp16{part}{keys}-seed0")
    shift = {"": seq_k, "-causal": 0, "-causal_br": seq_k - seq_q}[part]
    positions = itertools.product(range(seq_q), range(seq_k))
    assert sum(key <= query + shift for query, key in positions) == case.visible_pairs


@pytest.mark.parametrize("part", ["-causal", "-causal_br"])
def test_the_pairs_of_the_longest_sequence_are_counted_at_once(part: str) -> None:
    """The number of visible pairs is computed without a loop over the rows, so a file cannot make it take minutes."""
    case = parse_case(f"b1h1s{LARGEST}d64-fp16{part}-seed0")
    assert case.visible_pairs == LARGEST * (LARGEST + 1) // 2


@pytest.mark.parametrize("field", ["batch", "heads", "seq_q", "head_dim", "kv_heads", "seq_k", "seed"])
@pytest.mark.parametrize("value", [-1, LARGEST + 1, 10**30])
def test_a_decoded_case_has_possible_sizes(field: str, value: int) -> None:
    """A negative size or seed, and one beyond 2^31 - 1, is refused when a case is decoded."""
    content = {**msgspec.to_builtins(parse_case("b1h8s512d64-fp16-seed0")), field: value}
    with pytest.raises(msgspec.ValidationError, match=rf"\$\.{field}"):
        msgspec.json.decode(json.dumps(content), type=Case)


@pytest.mark.parametrize(
    ("text", "flops", "moved"),
    [
        ("b1h8s512d64-fp16-seed0", 4 * 8 * 512 * 512 * 64, 2 * 4 * 8 * 512 * 64),
        ("b2h8s4d64-bf16-kv2-sk16-seed0", 4 * 2 * 8 * 4 * 16 * 64, 2 * (2 * 2 * 8 * 4 * 64 + 2 * 2 * 2 * 16 * 64)),
        ("b1h2s4d64-fp16-causal-seed0", 4 * 2 * (1 + 2 + 3 + 4) * 64, 2 * 4 * 2 * 4 * 64),
        ("b1h2s64d64-fp16-sk0-seed0", 0, 2 * 2 * 2 * 64 * 64),
        ("b1h8s512d64-fp32-seed0", 4 * 8 * 512 * 512 * 64, 4 * 4 * 8 * 512 * 64),
        ("b1h1s4d4-fp16-scores-seed0", 2 * 4 * 4 * 4, 2 * (16 + 16 + 16)),
        ("b2h4s32d64-fp16-kv2-sk96-scores-seed0", 2 * 8 * 32 * 96 * 64, 2 * (8 * 32 * 64 + 4 * 96 * 64 + 8 * 32 * 96)),
    ],
)
def test_work_is_counted_per_call(text: str, flops: int, moved: int) -> None:
    """Attention has two products over the visible pairs, scores one; each used tensor is counted once, in bytes."""
    case = parse_case(text)
    assert (flops, moved) == (case.flops_per_call, case.bytes_per_call)


@pytest.mark.parametrize(
    ("text", "flops", "moved"),
    [
        # 2 heads, 64 x 64 pairs; q, k, v, out and their gradients, and the log-sum-exp.
        ("b1h2s64d64-fp16-seed0", 2 * 2 * 64 * 64 * 5 * 64, 8 * 2 * 64 * 64 * 2 + 4 * 2 * 64),
        ("b3h2s64d64-fp16-seed0", 3 * 2 * 2 * 64 * 64 * 5 * 64, 3 * (8 * 2 * 64 * 64 * 2 + 4 * 2 * 64)),
        ("b1h2s64d64-fp16-causal-seed0", 2 * 2 * 65 * 32 * 5 * 64, 8 * 2 * 64 * 64 * 2 + 4 * 2 * 64),
        # One head of k and v, whose values have 32 elements.
        (
            "b1h4s10d64-bf16-kv1-sk20-dv32-seed0",
            2 * 4 * 10 * 20 * (3 * 64 + 2 * 32),
            2 * 2 * (4 * 10 * (64 + 32) + 20 * (64 + 32)) + 4 * 4 * 10,
        ),
        # The first 10 keys are all that the queries see; a sink for each head.
        ("b1h2s10d64-fp16-causal-sk64-sink-seed0", 2 * 2 * 55 * 5 * 64, 8 * 2 * 10 * 64 * 2 + 4 * 2 * 10 + 4 * 2),
        # Keys of 64 and 32 tokens.
        (
            "b2h1s1d64-fp16-sk64-var4-seed0",
            2 * (64 + 32) * 5 * 64,
            2 * 2 * (2 * 2 * 64 + 2 * (64 + 32) * 64) + 4 * 2,
        ),
    ],
)
def test_the_work_of_a_backward_call(text: str, flops: int, moved: int) -> None:
    """Five matrix products; each tensor and gradient of the keys and queries that count, once."""
    case = parse_case(text).computing("gradients")
    assert (flops, moved) == (case.flops_per_call, case.touched_bytes)


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_the_scale_is_that_of_sdpa(head_dim: int) -> None:
    """The softmax scale is 1/sqrt(head_dim)."""
    assert math.isclose(head_dim**-0.5, parse_case(f"b1h1s1d{head_dim}-fp16-seed0").scale)


def test_only_the_seed_or_the_dtype_changes() -> None:
    """`with_seed` and `with_dtype` change no other field."""
    case = parse_case("b1h8s77d64-fp16-causal-kv2-sk203-bshd-seed4")
    expected = parse_case("b1h8s77d64-bf16-causal-kv2-sk203-bshd-seed7")
    assert expected == case.with_seed(7).with_dtype("bf16")


def test_scores_are_another_case_of_the_same_shape() -> None:
    """The id of a case of scores has `-scores` before the seed, and its output has seq_k columns."""
    attention = parse_case("b1h2s32d64-bf16-sk96-seed5")
    scores = attention.computing("scores")
    assert (scores.id, scores.out_shape) == ("b1h2s32d64-bf16-sk96-scores-seed5", (1, 2, 32, 96))
    assert (parse_case(scores.id), scores.computing("attention")) == (scores, attention)
    assert attention.out_shape == (1, 2, 32, 64)


def test_scores_have_no_mask(snapshot: SnapshotAssertion) -> None:
    """A case of scores with a mask is refused, because there is no softmax."""
    with pytest.raises(UsageProblem) as problem:
        parse_case("b1h1s4d4-fp16-causal-scores-seed0")
    assert snapshot == str(problem.value)


def test_texts_of_other_versions_are_dropped_by_changes() -> None:
    """A case of a record may have texts of parts that this version lacks; another field can still be changed."""
    case = msgspec.structs.replace(
        parse_case("b2h4s64d64-fp16-scale0p2-cap2-seed0"), modifiers=("scale0p2", "cap2", "zzz5")
    )
    assert case.id == "b2h4s64d64-fp16-scale0p2-cap2-zzz5-seed0"
    assert case.with_fields({"head_dim": 128}).id == "b2h4s64d128-fp16-scale0p2-cap2-seed0"

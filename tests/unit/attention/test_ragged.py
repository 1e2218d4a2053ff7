"""Ragged batches: truth, what is counted, and what must become of padding."""

from __future__ import annotations

import pytest
import torch

from pytest_fa.attention.ragged import PART, with_lengths
from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.suites import SUITES
from pytest_fa.errors import UsageProblem
from pytest_fa.gpu.inputs import make_inputs, poisoned_output
from pytest_fa.judge.output_check import check_output
from pytest_fa.judge.truth import make_truth

CPU = torch.device("cpu")
SHAPES = (
    "b4h4s150d64-fp16-kv2-var1",
    "b9h2s140d64-fp16-causal_br-var2",
    "b4h2s150d64-bf16-win37_0-sk200-var3-alibi",
    "b4h2s70d64-fp16-causal-sk200-var2-bshd",
    "b5h2s1d64-fp16-sk300-var4-sink",
)


@pytest.mark.parametrize("shape", SHAPES)
def test_truth_is_that_of_each_sequence_alone(shape: str) -> None:
    """Masks are aligned to the last key of each sequence, and padding changes nothing, though it is NaN."""
    case = parse_case(f"{shape}-seed0")
    inputs = make_inputs(case, CPU)
    truth = make_truth(inputs)
    assert bool(inputs.k.isnan().any())
    for batch, alone in enumerate(case.sequences):
        rows, keys = slice(0, alone.seq_q), slice(0, alone.seq_k)
        extra = {name: tensor for name, tensor in inputs.extra.items() if name not in PART.words}
        one = slice(batch, batch + 1)
        cut = inputs._replace(q=inputs.q[one, :, rows], k=inputs.k[one, :, keys], v=inputs.v[one, :, keys], extra=extra)
        if alone.seq_q:
            assert torch.allclose(truth.out[one, :, rows], make_truth(cut).out, rtol=0, atol=1e-13)
        assert not bool(truth.out[batch, :, alone.seq_q :].any())


@pytest.mark.parametrize("shape", SHAPES)
def test_pairs_and_bytes_are_those_of_the_sequences(shape: str) -> None:
    """FLOP and bytes leave out padding; each int32 length is read once."""
    case = parse_case(f"{shape}-seed0")
    assert case.all_pairs == sum(each.visible_pairs for each in case.sequences)
    rows = sum(each.seq_q for each in case.sequences) * case.heads * case.head_dim * 2
    keys = sum(each.seq_k for each in case.sequences) * case.kv_heads * case.head_dim * 2
    of_lengths = 4 * case.batch * (1 if case.value_of("ragged") in (1, 4) else 2)
    of_heads = 4 * case.heads if "alibi" in shape or "sink" in shape else 0
    assert case.bytes_per_call == 2 * rows + 2 * keys + of_lengths + of_heads
    assert case.touched_bytes <= case.bytes_per_call


def test_the_least_bytes_of_a_window_are_those_of_its_keys() -> None:
    """A kernel that reads no other keys is not faster than possible."""
    case = parse_case("b16h64s1d64-bf16-win127_0-kv8-sk8192-var4-seed0")
    assert case.touched_bytes == 16 * (2 * 8 * 128 + 2 * 64) * 64 * 2


@pytest.mark.parametrize(
    ("rule", "value", "passes"),
    [
        ("untouched", None, True),
        ("untouched", 0.0, False),
        ("zero", 0.0, True),
        ("zero", 1.0, False),
        ("any", 1.0, True),
    ],
)
def test_padding_must_be_as_it_is_declared(rule: str, value: float | None, *, passes: bool) -> None:
    """The other rows are judged as ever."""
    case = parse_case("b2h4s64d8-fp16-sk80-var3-seed0")
    declared = {} if rule == "untouched" else {"rows_past": rule}
    inputs = make_inputs(case, CPU, declared)
    truth = make_truth(inputs)
    out = poisoned_output(inputs)
    for batch, alone in enumerate(case.sequences):
        out[batch, :, : alone.seq_q] = truth.out[batch, :, : alone.seq_q].half()
        if value is not None:
            out[batch, :, alone.seq_q :] = value
    check = check_output(out, truth, "same_precision")
    (bound,) = (bound for bound in check.bounds if bound.name == "rows past")
    assert (check.passed, bound.value, check.nonfinite_count) == (passes, 0 if passes else 4 * 63 * 8, 0)


def test_other_lengths_get_nan_behind_them() -> None:
    """What was padding before is 0, so that it can be read."""
    inputs = make_inputs(parse_case("b4h2s8d8-fp16-sk130-var1-seed0"), CPU)
    changed = with_lengths(inputs, {"seqlens_k": inputs.extra["seqlens_k"].flip(0)})
    lengths = changed.extra["seqlens_k"].flatten().tolist()
    assert lengths == [63, 129, 64, 130]
    for batch, length in enumerate(lengths):
        assert not bool(changed.k[batch, :, :length].isnan().any())
        assert bool(changed.k[batch, :, length:].isnan().all())


@pytest.mark.parametrize("text", ["b1h2s8d8-fp16-var1", "b2h2s8d8-fp16-var1-scores"])
def test_an_impossible_case_is_refused(text: str) -> None:
    """One sequence is not ragged, and scores have no lengths."""
    with pytest.raises(UsageProblem, match=r"ragged batch has two|scores have no lengths"):
        parse_case(f"{text}-seed0")


def test_the_suite_has_each_edge_on_both_sides() -> None:
    """Lengths of 0, 1, 63 to 65, 127 to 129 and the longest, of queries and of keys."""
    edges = {0, 1, 63, 64, 65, 127, 128, 129}
    whole = [case for case in SUITES["ragged"] if case.batch > len(edges)]
    assert edges <= {each.seq_q for case in whole for each in case.sequences}
    assert edges <= {each.seq_k for case in whole for each in case.sequences}

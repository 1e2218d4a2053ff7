"""The diagnosis of a wrong output: the error map, the likely cause, and the conclusion from the cross-checks."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

from pytest_fa.catalog.case import parse_case
from pytest_fa.gpu.inputs import Inputs, is_poison, make_inputs, poison
from pytest_fa.judge.diagnosis import conclusion, diagnose
from pytest_fa.judge.output_check import check_output
from pytest_fa.judge.truth import make_truth
from pytest_fa.records.checks import CrossCheck, Diagnosis, Repeats

CPU = torch.device("cpu")
Wrong = Callable[[Inputs], torch.Tensor]


def diagnosis(wrong: Wrong, case: str = "b2h4s100d64-fp16-seed0", repeats: Repeats | None = None) -> Diagnosis:
    """The diagnosis of the output that `wrong` computes."""
    inputs = make_inputs(parse_case(case), CPU)
    truth = make_truth(inputs)
    out = wrong(inputs).to(inputs.q.dtype)
    return diagnose(out, truth, inputs, check_output(out, truth, "same_precision"), repeats, ())


def exact(inputs: Inputs, **changes: object) -> torch.Tensor:
    """Exact attention on inputs in which some fields are replaced."""
    return make_truth(inputs._replace(**changes)).out


def one_key_wider(inputs: Inputs) -> torch.Tensor:
    """Causal attention in which each query sees one key too many."""
    return exact(inputs, q=torch.cat([inputs.q[:, :, :1], inputs.q], 2))[:, :, 1:]


def with_nan(inputs: Inputs, where: tuple[slice | int, ...], value: float = float("nan")) -> torch.Tensor:
    """The right output with `value` at the index `where`."""
    out = exact(inputs).half()
    out[where] = value
    return out


def unwritten(inputs: Inputs, *places: tuple[slice | int, ...]) -> torch.Tensor:
    """The right output with the poison at some places."""
    out = exact(inputs).half()
    for place in places:
        out[place] = poison(out[place].clone())
    return out


def overflowing(inputs: Inputs, dtype: torch.dtype) -> torch.Tensor:
    """Attention without the row maximum, in which exp(S) is stored in `dtype`."""
    p = torch.exp((inputs.q.double() * inputs.scale @ inputs.k.double().transpose(2, 3)).float()).to(dtype).float()
    return p @ inputs.v.float() / p.sum(-1, keepdim=True)


def unscaled(inputs: Inputs, factor: float) -> Inputs:
    """The inputs with a scale so large that exp(S) overflows in some rows."""
    return inputs._replace(scale=inputs.scale * factor)


GROUPED = "b1h4s60d64-fp16-kv2-seed0"
CAUSAL = "b1h2s60d64-fp16-causal-seed0"
MODULO = [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("case", "wrong", "cause"),
    [
        ("", lambda i: exact(i, scale=i.scale * 1.01), "the softmax scale is 1 % too large"),
        ("", lambda i: exact(i, scale=1.0), "the softmax scale is not applied"),
        ("", lambda i: exact(i, scale=i.scale * 1.442695), "the softmax scale is multiplied by log2 e once too often"),
        ("", lambda i: exact(i, k=i.k[:, :, :-1], v=i.v[:, :, :-1]), "the last key is missing"),
        ("", lambda i: exact(i, k=i.k[:, :, :96], v=i.v[:, :, :96]), "the last 4 keys are missing"),
        ("", lambda i: exact(i, k=i.k[:, :, :64], v=i.v[:, :, :64]), "the last 36 keys are missing"),
        ("", lambda i: exact(i, causal="top_left"), "the causal mask is top left where it should be none"),
        (CAUSAL, lambda i: exact(i, causal="none"), "the causal mask is none where it should be top left"),
        (CAUSAL, one_key_wider, "the causal mask is one key too wide"),
        ("b1h2s64d64-fp16-sk90-seed0", lambda i: i.v[:, :, 26:], "only the last 1 keys up to the query are seen from"),
        (GROUPED, lambda i: exact(i, k=i.k[:, MODULO], v=i.v[:, MODULO]), "query heads are mapped to key heads modulo"),
        ("", lambda i: exact(i) * 1.25, "the whole output is 1.25 times what it should be"),
        ("", lambda i: unwritten(i, (1, 2, slice(80, 100))), "the kernel never wrote batch 1 of 2, head 2 of 4, query"),
        ("", lambda i: unwritten(i, (0,)) + 1, "the kernel computed NaN or Inf in batch 0 of 2: look for 0/0"),
        ("", lambda i: unwritten(i, (0,)).copy_(unwritten(i, (0,))), "the kernel never wrote batch 0 of 2: the"),
        ("", lambda i: with_nan(i, (1, 2, slice(80, 100))), "the kernel computed NaN or Inf in batch 1 of 2, head 2"),
        ("", lambda i: with_nan(i, (0, 1, 5, 2), float("inf")), "the kernel computed NaN or Inf in batch 0 of 2, head"),
        ("", lambda i: exact(i).roll(1, 1), "the heads are in another order: batch 0 head 0 holds batch 0 head 3"),
        ("", lambda i: exact(i)[:, [0, 2, 1, 3]], "the heads are in another order: batch 0 head 1 holds batch"),
        ("", lambda i: exact(i)[:1].expand_as(i.q), "some heads are copies of others: batch 1 head 0 holds"),
        ("", lambda i: exact(i).roll(8, 3), "all columns are shifted: dim 8 holds dim 0"),
        ("", lambda i: exact(i) * 0, "the output is all zeros: the kernel writes zeros, or the result is never"),
        ("", lambda i: exact(i) * -1, "the whole output is -1 times what it should be: a wrong sign, or"),
        ("", lambda i: exact(i) * (1 + torch.arange(100) % 3)[:, None], "each row is a multiple of the right row"),
        ("", lambda i: exact(i) + 0.5 * (torch.arange(64) % 2), "wrong in every 2nd dim from 1; no known mistake"),
        ("", lambda i: exact(i) + 0.5 * (torch.arange(100) % 2)[:, None], "wrong in every 2nd query from 1"),
    ],
)  # fmt: skip
def test_the_cause_is_named(case: str, wrong: Wrong, cause: str) -> None:
    """A common mistake is recognised from the output; for any other, the cause says where the output is wrong."""
    assert diagnosis(wrong, case or "b2h4s100d64-fp16-seed0").cause.startswith(cause)


def test_a_change_between_calls_is_the_cause(snapshot: SnapshotAssertion) -> None:
    """If repeats differ, the cause is a race or unwritten memory, and no other mistake is considered."""
    cause = diagnosis(lambda i: exact(i) * 2, repeats=Repeats(100, 3, 9, (0, 0, 0, 0), None)).cause
    assert snapshot == cause


@pytest.mark.parametrize(
    ("dtype", "factor", "name"), [(torch.float32, 25.0, "fp32"), (torch.float16, 4.0, "fp16")], ids=["fp32", "fp16"]
)
def test_an_overflow_of_exp_is_named(dtype: torch.dtype, factor: float, name: str) -> None:
    """If the rows with NaN or Inf are those whose exp(S) overflows without the row maximum, the maximum is missing."""
    inputs = unscaled(make_inputs(parse_case("b1h2s100d64-bf16-seed0"), CPU), factor)
    truth, out = make_truth(inputs), overflowing(inputs, dtype).bfloat16()
    assert 0 < int(out.isnan().any(-1).sum()) < 200
    cause = diagnose(out, truth, inputs, check_output(out, truth, "same_precision"), None, ()).cause
    assert cause == f"NaN or Inf exactly where exp(S) overflows {name}: subtract the row maximum before exp"


def test_unwritten_and_computed_nan_are_told_apart() -> None:
    """If some elements were never written and others are a computed NaN, the cause says where each of them is."""

    def wrong(inputs: Inputs) -> torch.Tensor:
        out = unwritten(inputs, (0, 1, slice(90, 100)))
        out[1, 2, 5] = float("nan")
        return out

    never, computed = diagnosis(wrong).cause.split("; ")
    assert never.startswith("the kernel never wrote batch 0 of 2, head 1 of 4, query 90 to 99 of 100")
    assert computed.startswith("the kernel computed NaN or Inf in batch 1 of 2, head 2 of 4, query 5 of 100: look for")


def test_an_output_that_is_wrong_as_a_whole(snapshot: SnapshotAssertion) -> None:
    """If every element is within its bound, the cause names the bounds that the whole output breaks."""
    inputs = make_inputs(parse_case("b1h1s64d64-fp16-seed0"), CPU)
    truth, out = make_truth(inputs, with_spread=True), (exact(inputs) * (1 + 0.02 * (torch.arange(64) % 3 > 0))).half()
    cause = diagnose(out, truth, inputs, check_output(out, truth, "fp8"), None, ()).cause
    assert snapshot == cause


def test_fp32_is_located_by_the_bound_of_each_element(snapshot: SnapshotAssertion) -> None:
    """Where the bounds of elements differ, the cause and the map show the wrong elements and no right ones."""
    inputs = make_inputs(parse_case("b1h2s64d64-fp32-causal-seed0"), CPU)
    truth, out = make_truth(inputs), exact(inputs).float()
    out[0, 1, 40:48] += 0.01
    diagnosed = diagnose(out, truth, inputs, check_output(out, truth, "same_precision"), None, ())
    assert snapshot == diagnosed.cause
    assert [row.split("  ")[-1] for row in diagnosed.error_map[1:]] == ["....", "..9."]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_no_arithmetic_keeps_the_poison(dtype: torch.dtype) -> None:
    """The poison is NaN, a copy keeps its bits, and any arithmetic on it gives another NaN."""
    out = poison(torch.empty(3, 40, dtype=dtype))
    assert bool(out.isnan().all())
    assert bool(is_poison(out.clone()).all())
    computed = (out + 1, out * 1, out.float() * 2, torch.full_like(out, math.inf) - math.inf, out.new_tensor([0.0]) / 0)
    assert [int(is_poison(result.to(dtype)).sum()) for result in computed] == [0] * 5


@pytest.mark.nightly
def test_a_long_case_is_compared_in_part() -> None:
    """For a long case, the diagnosis compares some queries and heads, and says which fraction."""
    cause = diagnosis(lambda i: exact(i, scale=i.scale * 1.01), "b1h8s1500d64-fp16-kv1-seed0").cause
    name, part = cause.split(" (")
    assert name == "the softmax scale is 1 % too large"
    assert re.fullmatch(r"compared on \d+ of 1500 queries in 4 of 8 heads\)", part)


def test_the_map_shows_where() -> None:
    """The map has one line per head and one character per tile of queries: a dot if right, N if not finite."""

    def wrong(inputs: Inputs) -> torch.Tensor:
        out = exact(inputs).half()
        out[1, 2, 33] = float("nan")
        out[0, 3, 99] += 1.0
        return out

    head, *rows = diagnosis(wrong).error_map
    assert "16 queries" in head
    assert [row.split("  ")[-1] for row in rows] == [
        *["......."] * 3,
        "......9",
        *["......."] * 2,
        "..N....",
        ".......",
    ]
    assert [re.sub(r"\s+", " ", row)[:14] for row in rows[:2]] == ["batch 0 head 0", "batch 0 head 1"]


@pytest.mark.nightly
def test_a_long_map_is_cut() -> None:
    """The map shows at most 16 heads, then the number of the others; it has at most 48 columns."""
    error_map = diagnosis(lambda i: exact(i) * 2, "b1h20s1000d64-fp16-seed0").error_map
    assert (len(error_map), error_map[-1]) == (18, "and 4 more heads")
    assert {len(row.split("  ")[-1].strip()) for row in error_map[1:17]} == {48}


RIGHT, WRONG = (CrossCheck("sdpa_math", verdict, 0.1, None) for verdict in (True, False))
ABSENT = CrossCheck("sdpa_flash", None, None, "refuses")


@pytest.mark.parametrize(
    ("cross_checks", "sentence"),
    [
        ((), "no SDPA backend takes this case, so there is no cross-check"),
        ((ABSENT,), "no SDPA backend takes this case, so there is no cross-check"),
        ((RIGHT, ABSENT), "only the candidate is wrong; passed under the same policy: sdpa_math"),
        ((WRONG,), "the candidate is wrong, and under the same policy also: sdpa_math"),
        ((RIGHT, WRONG), "the candidate is wrong, and under the same policy also: sdpa_math; but passed: sdpa_math"),
    ],
)
def test_the_conclusion_compares_with_the_backends(cross_checks: tuple[CrossCheck, ...], sentence: str) -> None:
    """The conclusion says whether SDPA's backends are right where the candidate is wrong."""
    assert conclusion(cross_checks) == sentence

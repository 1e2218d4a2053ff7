"""The diagnosis of a wrong output: the error map, the likely cause, and the conclusion from the cross-checks."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from pytest_fa.catalog.case import parse_case
from pytest_fa.judge.check import judge
from pytest_fa.judge.diagnosis import conclusion, diagnose
from pytest_fa.judge.truth import make_truth
from pytest_fa.records.judged import CrossCheck, Diagnosis, Repeats
from pytest_fa.run.inputs import Inputs, make_inputs

CPU = torch.device("cpu")
Wrong = Callable[[Inputs], torch.Tensor]


def diagnosis(wrong: Wrong, case: str = "b2h4s100d64-fp16-seed0", repeats: Repeats | None = None) -> Diagnosis:
    """The diagnosis of the output that `wrong` computes."""
    inputs = make_inputs(parse_case(case), CPU)
    truth = make_truth(inputs)
    out = wrong(inputs).to(inputs.q.dtype)
    return diagnose(out, truth, inputs, judge(out, truth, "same_precision"), repeats, ())


def exact(inputs: Inputs, **changes: object) -> torch.Tensor:
    """Exact attention on inputs in which some fields are replaced."""
    return make_truth(inputs._replace(**changes)).out  # type: ignore[arg-type]  # a test names its fields


def one_key_wider(inputs: Inputs) -> torch.Tensor:
    """Causal attention in which each query sees one key too many."""
    return exact(inputs, q=torch.cat([inputs.q[:, :, :1], inputs.q], 2))[:, :, 1:]


def with_nan(inputs: Inputs, where: tuple[slice | int, ...], value: float = float("nan")) -> torch.Tensor:
    """The right output with `value` at the index `where`."""
    out = exact(inputs).half()
    out[where] = value
    return out


GROUPED = "b1h4s60d64-fp16-kv2-seed0"
CAUSAL = "b1h2s60d64-fp16-causal-seed0"
MODULO = [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("case", "wrong", "cause"),
    [
        ("", lambda i: exact(i, scale=i.scale * 1.01), "the softmax scale is 1 % too large"),
        ("", lambda i: exact(i, scale=1.0), "the softmax scale is not applied"),
        ("", lambda i: exact(i, scale=i.scale * 1.442695), "the softmax scale is multiplied by log2 e once too often"),
        ("", lambda i: exact(i, k=i.k[:, :, :-1], v=i.v[:, :, :-1]), "the last 1 keys are missing"),
        ("", lambda i: exact(i, k=i.k[:, :, :96], v=i.v[:, :, :96]), "the last 4 keys are missing"),
        ("", lambda i: exact(i, k=i.k[:, :, :64], v=i.v[:, :, :64]), "the last 36 keys are missing"),
        ("", lambda i: exact(i, causal="top_left"), "the mask is top left where it should be none"),
        (CAUSAL, lambda i: exact(i, causal="none"), "the mask is none where it should be top left"),
        (CAUSAL, one_key_wider, "the causal mask is one key too wide"),
        (GROUPED, lambda i: exact(i, k=i.k[:, MODULO], v=i.v[:, MODULO]), "query heads are mapped to key heads modulo"),
        ("", lambda i: exact(i) * 1.25, "the whole output is 1.25 times what it should be"),
        ("", lambda i: with_nan(i, (1, 2, slice(80, 100))), "the kernel never wrote batch 1 of 2, head 2 of 4, query"),
        ("", lambda i: with_nan(i, (0, 1, 5, 2), float("inf")), "not finite in batch 0 of 2, head 1 of 4, query 5 of"),
        ("", lambda i: exact(i).roll(1, 1), "wrong in every batch, head, query and dim"),
        ("", lambda i: exact(i) + 0.5 * (torch.arange(100) % 2)[:, None], "wrong in every 2th query from 1"),
    ],
)  # fmt: skip
def test_the_cause_is_named(case: str, wrong: Wrong, cause: str) -> None:
    """A common mistake is recognised from the output; for any other, the cause says where the output is wrong."""
    assert diagnosis(wrong, case or "b2h4s100d64-fp16-seed0").cause.startswith(cause)


def test_a_change_between_calls_is_the_cause() -> None:
    """If repeats differ, the cause is a race or unwritten memory, and no other mistake is considered."""
    cause = diagnosis(lambda i: exact(i) * 2, repeats=Repeats(100, 3, 9, (0, 0, 0, 0), None)).cause
    assert cause == "the output changes from call to call: a race, or a read of memory that the kernel never wrote"


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
        ((RIGHT, ABSENT), "only the candidate is wrong; right under the same policy: sdpa_math"),
        ((WRONG,), "the candidate is wrong, and under the same policy also: sdpa_math"),
        ((RIGHT, WRONG), "the candidate is wrong, and under the same policy also: sdpa_math; but right: sdpa_math"),
    ],
)
def test_the_conclusion_compares_with_the_backends(cross_checks: tuple[CrossCheck, ...], sentence: str) -> None:
    """The conclusion says whether SDPA's backends are right where the candidate is wrong."""
    assert conclusion(cross_checks) == sentence

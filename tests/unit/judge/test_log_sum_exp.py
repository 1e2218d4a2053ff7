"""The bound of the log-sum-exp: right kernels stay within it, and each known mistake breaks it and is named."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

from pytest_fa.attention.lse import PART
from pytest_fa.attention.rows import RowTruth
from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.variant import Rounding
from pytest_fa.gpu.inputs import Inputs, make_inputs, poisoned_more
from pytest_fa.judge.row_outputs import check_rows, explain_rows, make_row_truth
from pytest_fa.judge.truth import hidden_keys, repeated_heads
from tests.tiers import nightly_after
from tests.unit.judge.fp8_kernels import Fp8Kernel, simulate_fp8_with_lse

CASES = (
    "b1h2s150d64-fp16-seed0",
    "b1h4s77d128-bf16-causal_br-kv2-sk150-seed1",
    "b1h2s150d64-bf16-causal_br-sk77-seed2",
    "b2h2s129d64-fp32-causal-seed3",
    "b1h1s64d64-fp16-sk1023-seed4",
    "b1h1s5d64-fp16-sk0-seed5",
)
CPU = torch.device("cpu")
make_lse_truth, explain_lse = partial(make_row_truth, PART), partial(explain_rows, PART)
check_lse = partial(check_rows, "lse")


def inputs_of(case: str, factor: float = 1.0) -> Inputs:
    """Return the values of the inputs of a case, with Q multiplied by `factor`."""
    inputs = make_inputs(parse_case(case), CPU).exact()
    return inputs._replace(q=inputs.q * factor)


def scores_of(inputs: Inputs) -> torch.Tensor:
    """Return the masked scores in float32, [batch, heads, seq_q, seq_k]."""
    scores = inputs.q.float() @ repeated_heads(inputs.k, inputs.q).float().transpose(2, 3) * inputs.scale
    hidden = hidden_keys(inputs, slice(0, inputs.q.shape[2]))
    return scores if hidden is None else scores.masked_fill(hidden, -math.inf)


def tiled(inputs: Inputs, tile: int, *, rounded: bool) -> torch.Tensor:
    """Return the log-sum-exp of an online softmax in base 2 and float32; `rounded` sums P as it is stored."""
    scores = scores_of(inputs) * (1 / math.log(2))
    m = torch.full(scores.shape[:3], -math.inf)
    total = torch.zeros_like(m)
    for start in range(0, scores.shape[-1], tile):
        part = scores[..., start : start + tile]
        new = torch.maximum(m, part.amax(-1))
        finite = new.masked_fill(new == -math.inf, 0.0)
        p = torch.exp2(part - finite[..., None])
        total = total * torch.exp2(m - finite) + (p.to(inputs.q.dtype).float() if rounded else p).sum(-1)
        m = new
    return (m + torch.log2(total)) * math.log(2)


@pytest.mark.parametrize("factor", [1.0, 30.0], ids=["", "large scores"])
@pytest.mark.parametrize("rounded", [False, True], ids=["P exact", "P rounded"])
@pytest.mark.parametrize("tile", [16, 64, 100])
@pytest.mark.parametrize("case", CASES)
def test_a_right_kernel(case: str, tile: int, rounded: bool, factor: float) -> None:  # noqa: FBT001  # a parameter
    """Any tiles, with P summed as float32 or as it is stored, stay within the bound; rows without keys are -inf."""
    inputs = inputs_of(case, factor)
    bound, check = check_lse(tiled(inputs, tile, rounded=rounded), make_lse_truth(inputs))
    assert (bound.holds, check.bad_count) == (True, 0), bound
    assert bound.used is not None
    assert bound.used < 0.9


MISTAKES: dict[str, Callable[[torch.Tensor, Inputs], torch.Tensor]] = {
    "the log-sum-exp is in base 2": lambda scores, _: torch.logsumexp(scores, -1) / math.log(2),
    "the scale is missing": lambda scores, inputs: torch.logsumexp(scores / inputs.scale, -1),
    "the row max is left out": lambda scores, _: torch.logsumexp(scores, -1) - scores.amax(-1),
    "the last tile of 64 keys": lambda scores, _: torch.logsumexp(scores[..., :64], -1),
    "only the row max": lambda scores, _: scores.amax(-1),
    "no known mistake": lambda scores, _: torch.logsumexp(scores.flip(2), -1),
}


MISTAKE_CASES = (
    "b1h2s120d64-fp16-seed0",
    "b1h4s120d128-bf16-kv2-seed1",
    "b1h2s120d64-fp32-seed2",
    "b1h2s120d64-e4m3-seed0",
    "b1h4s120d128-e4m3-kv2-seed1",
    "b1h4s120d64-e4m3-outlier-seed2",
    "b1h2s120d128-e4m3-out_bf16-tiny-seed3",
)


@pytest.mark.parametrize("case", MISTAKE_CASES)
@pytest.mark.parametrize("cause", MISTAKES)
def test_a_mistake_is_caught_and_named(cause: str, case: str) -> None:
    """log2 in place of ln, no scale, no row max, no last tile, and another row's value break the bound many times."""
    inputs = inputs_of(case)
    policy = "fp8" if "e4m3" in case else "same_precision"
    lse, truth = MISTAKES[cause](scores_of(inputs), inputs).float(), make_lse_truth(inputs, policy=policy)
    bound, check = check_lse(lse, truth)
    assert (bound.holds, bound.name) == (False, "lse")
    assert bound.used is not None
    assert bound.used > 5
    assert check.bad_count > 0.9 * check.row_count
    assert cause in explain_lse(lse, truth, inputs)


def lse_with_truth(case: str) -> tuple[torch.Tensor, RowTruth, Inputs]:
    """Return the right log-sum-exp of a case, its truth and the inputs."""
    inputs = inputs_of(case)
    truth = make_lse_truth(inputs)
    return truth.exact.float(), truth, inputs


@pytest.mark.parametrize("wrong_by", [0.003, 0.5])
def test_a_mistake_that_changes_nothing_is_not_named(wrong_by: float) -> None:
    """Where a mistake gives the true values, or nearly, it does not explain why a few rows are wrong."""
    lse, truth, inputs = lse_with_truth("b1h2s120d64-fp16-cap1000-seed0")
    lse[0, 1, 7] += wrong_by
    assert not check_lse(lse, truth)[0].holds
    assert explain_lse(lse, truth, inputs).endswith("no known mistake gives this log-sum-exp")


def test_a_mistake_in_a_part_of_the_rows_only_is_not_named() -> None:
    """A mistake that changes all rows does not explain an output that is right in half of them."""
    lse, truth, inputs = lse_with_truth("b1h2s120d64-fp16-cap2-seed0")
    uncapped = scores_of(inputs).logsumexp(-1)
    assert explain_lse(uncapped, truth, inputs) == "the soft cap is left out of the log-sum-exp"
    lse[:, 0] = uncapped[:, 0]
    assert explain_lse(lse, truth, inputs).endswith("no known mistake gives this log-sum-exp")


EMPTY_ROWS = "b1h2s150d64-fp16-causal_br-sk77-sink-seed0"  # the first queries see no key; the sinks are 3 and none
NOT_IN_MAXIMUM = "the row maximum leaves out the sink: exp(sink - max) overflows in the log-sum-exp"
NOT_IN_EMPTY_ROWS = "the log-sum-exp of rows that see no key leaves out the sink: it must be the sink, not -inf"


@pytest.mark.parametrize(
    ("written", "conventions", "cause"),
    [
        (math.inf, {}, NOT_IN_MAXIMUM),
        (-math.inf, {}, NOT_IN_EMPTY_ROWS),
        (math.inf, {"lse_empty": "+inf"}, f"{NOT_IN_MAXIMUM}; or {NOT_IN_EMPTY_ROWS}"),
    ],
)
def test_infinite_rows_beside_a_sink(written: float, conventions: dict[str, str], cause: str) -> None:
    """Rows that see no key, and have not their sink, are named; both mistakes are where they give the same."""
    inputs = make_inputs(parse_case(EMPTY_ROWS), CPU, conventions)
    truth = make_lse_truth(inputs)
    lse = truth.exact.float()
    lse[0, 0, :73] = written
    lse[0, 1, :73] = math.inf if conventions else -math.inf
    assert explain_lse(lse, truth, inputs) == cause


# The first gives all keys of a row similar weights, and the others give a few keys nearly all the weight.
E4M3_DATA: dict[str, Callable[[Inputs], Inputs]] = {
    "": lambda values: values,
    "scores 4 times as large": lambda values: values._replace(q=values.q * 4),
    "scores 30 times as large": lambda values: values._replace(q=values.q * 30),
    "scores -30 times as large": lambda values: values._replace(q=values.q * -30),
    "keys shifted by 4": lambda values: values._replace(k=values.k + 4),
}
E4M3_CASES = (
    "b2h4s77d64-e4m3-causal-kv2-outlier-seed0",
    "b1h4s150d128-e4m3-outlier-seed0",
    "b1h4s300d64-e4m3-seed0",
    "b1h2s300d128-e4m3-tiny-seed1",
    "b1h4s150d64-e4m3-sk5-seed2",
    "b1h4s150d128-e4m3-sk1-seed3",
    "b1h1s64d64-e4m3-sk4096-seed4",
)
IN_13_BITS = Fp8Kernel(tile=128, s_in_13_bits=True)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("data", nightly_after(12, E4M3_DATA))
@pytest.mark.parametrize("case", E4M3_CASES)
def test_scores_in_13_bits(case: str, data: str) -> None:
    """Scores that Hopper's matrix units add in 13 bits use at most 0.6 of the bound, with P exact or rounded."""
    inputs = E4M3_DATA[data](inputs_of(case)).quantised()
    truth = make_lse_truth(inputs, policy="fp8")
    for kernel in (IN_13_BITS, IN_13_BITS._replace(accumulates=128, sum_accumulates=128)):
        output = simulate_fp8_with_lse(inputs, kernel)
        bound, check = check_lse(output.more["lse"], truth)
        assert (bound.holds, check.bad_count) == (True, 0)
        assert bound.used is not None
        assert bound.used < 0.6


@pytest.mark.usefixtures("one_thread")
def test_scores_in_13_bits_need_their_part_of_the_bound() -> None:
    """Where one product outweighs the others, the error of a right kernel exceeds the other parts of the bound."""
    inputs = make_inputs(parse_case(E4M3_CASES[0]), CPU)
    lse = [simulate_fp8_with_lse(inputs, Fp8Kernel(tile=128, s_in_13_bits=cut)).more["lse"] for cut in (False, True)]
    truth = make_lse_truth(inputs, policy="fp8")
    errors = [float((value - truth.exact).abs().max()) for value in lse]
    assert errors[0] < 1e-3
    assert errors[1] > 0.12 + 2.0**-9


@pytest.mark.parametrize(("case", "least_used"), [("b1h2s64d64-fp16-sk1023-seed0", 3), ("b1h2s64d64-bf16-seed0", 3)])
def test_one_lost_key(case: str, least_used: float) -> None:
    """One lost key of 1023 in fp16, or of 64 in bf16, breaks the bound."""
    inputs = inputs_of(case)
    bound, _ = check_lse(torch.logsumexp(scores_of(inputs)[..., :-1], -1), make_lse_truth(inputs))
    assert bound.used is not None
    assert bound.used > least_used


def test_rows_without_keys(snapshot: SnapshotAssertion) -> None:
    """Where no key is seen, only -inf is right; where one is, -inf is wrong."""
    inputs = inputs_of("b1h2s150d64-fp16-causal_br-sk77-seed0")
    truth, right = make_lse_truth(inputs), tiled(inputs, 64, rounded=False)
    zeros = right.masked_fill(right == -math.inf, 0.0)
    assert check_lse(right, truth)[0].holds
    assert not check_lse(zeros, truth)[0].holds
    assert snapshot == explain_lse(zeros, truth, inputs)
    right[0, 1, 149] = -math.inf
    bound, check = check_lse(right, truth)
    assert (bound.holds, bound.value, check.bad_count, check.worst, check.worst_got) == (
        False,
        None,
        1,
        (0, 1, 149),
        "-inf",
    )


def test_nan(snapshot: SnapshotAssertion) -> None:
    """A row whose truth is NaN must be NaN, and no other row may be; an unwritten row is named."""
    inputs = inputs_of("b1h2s64d64-fp16-seed0")
    inputs.q[0, 1, 7] = float("nan")
    truth, right = make_lse_truth(inputs), torch.logsumexp(scores_of(inputs), -1)
    assert check_lse(right, truth)[0].holds
    assert not check_lse(right.nan_to_num(0.0), truth)[0].holds
    unwritten = poisoned_more("lse", inputs)
    bound, check = check_lse(unwritten, truth)
    assert (bound.holds, bound.value, check.bad_count) == (False, None, 127)
    assert snapshot == explain_lse(unwritten, truth, inputs)


@pytest.mark.parametrize(
    ("rounds", "policy", "case"),
    [(("s",), "same_precision", "b1h2s64d64-fp16-seed0"), ((), "fp8", "b1h2s64d64-fp16-seed0")],
    ids=["rounded scores", "P in e4m3"],
)
def test_declared_roundings(rounds: tuple[Rounding, ...], policy: str, case: str) -> None:
    """Scores that are rounded to fp16, or P in e4m3, are within the bound only where this is declared."""
    inputs = inputs_of(case, 4.0)
    scores = scores_of(inputs)
    if rounds:
        lse = torch.logsumexp(scores.half().float(), -1)
    else:
        row_max = scores.amax(-1, keepdim=True)
        lse = row_max[..., 0] + torch.exp(scores - row_max).to(torch.float8_e4m3fn).float().sum(-1).log()
    assert check_lse(lse, make_lse_truth(inputs, rounds, policy))[0].holds
    assert not check_lse(lse, make_lse_truth(inputs))[0].holds


def test_a_mistake_in_e4m3_is_named() -> None:
    """In e4m3, a mistake is recognised by the values that the numbers and their descales stand for."""
    inputs = make_inputs(parse_case(E4M3_CASES[0]), CPU)
    row_max = scores_of(inputs.exact()).amax(-1)
    cause = explain_lse(row_max, make_lse_truth(inputs, policy="fp8"), inputs)
    assert cause == "the log-sum-exp is only the row max: log(l) is missing"

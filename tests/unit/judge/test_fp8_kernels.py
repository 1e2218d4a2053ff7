"""Simulated e4m3 kernels under the policy `fp8`: right ones pass with a margin, wrong ones fail where they must."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from pytest_fa.catalog.case import parse_case
from pytest_fa.gpu.inputs import make_inputs
from pytest_fa.judge.output_check import check_output
from pytest_fa.judge.truth import make_truth
from tests.tiers import nightly_after
from tests.unit.judge.fp8_kernels import (
    MUST_SHOW,
    RIGHT,
    TABLE_CASES,
    WRONG,
    Fp8Kernel,
    simulate_fp8,
    with_v_of_ones,
)
from tests.unit.judge.fp8_tables import begin_of, check_of, costs_table, judged_table, most_used

MAX_USED = 0.98
pytestmark = pytest.mark.usefixtures("one_thread")
PAGE = Path(__file__).parents[3] / "docs" / "explanation" / "fp8.md"
# Tails, masks, grouped heads, few queries, few keys and none, special heads, and the output in bf16.
SMALL = (
    "b1h2s1d64-e4m3",
    "b1h2s17d64-e4m3",
    "b1h2s65d64-e4m3-causal",
    "b1h2s113d64-e4m3-causal-sk203",
    "b1h2s203d64-e4m3-causal_br-sk113",
    "b1h2s64d64-e4m3-sk0",
    "b1h2s64d64-e4m3-sk1",
    "b1h2s1d64-e4m3-sk1023",
    "b1h8s77d64-e4m3-kv2",
    "b2h4s77d64-e4m3-causal-kv1-outlier",
    "b2h4s150d64-e4m3-zero_head",
    "b2h4s150d128-e4m3-causal-tiny",
    "b2h4s150d64-e4m3-out_bf16",
    "b1h2s1023d64-e4m3-causal",
)


@pytest.mark.parametrize("case", nightly_after(1, TABLE_CASES))
@pytest.mark.parametrize("name", RIGHT)
def test_right_kernels_pass(name: str, case: str) -> None:
    """A right kernel, with any tiling, order, scale of P or accumulator, uses at most 0.98 of its tightest bound."""
    check = check_of(RIGHT[name], case)
    has_no_error = "ones" in case and RIGHT[name].sum_accumulates  # each row of P is divided by its own sum

    assert (check.passed, check.bad_count) == (True, 0)
    assert (0.01 if has_no_error else 0.2) < most_used(check) < MAX_USED


@pytest.mark.parametrize("v", ["random V", "V full of ones"])
@pytest.mark.parametrize("shape", nightly_after(4, SMALL))
def test_right_kernels_pass_on_small_cases(shape: str, v: str) -> None:
    """Right kernels pass on tails, masks, special heads and rows without keys, also if V is full of ones."""
    inputs = make_inputs(parse_case(f"{shape}-seed0"), torch.device("cpu"))
    inputs = with_v_of_ones(inputs) if v == "V full of ones" else inputs
    truth = make_truth(inputs, with_spread=True)

    used = {name: most_used(check_output(simulate_fp8(inputs, kernel), truth, "fp8")) for name, kernel in RIGHT.items()}

    assert {name: share for name, share in used.items() if not share < MAX_USED} == {}


# Hundreds of heads, because a bound that one head of a thousand breaks is broken in every tenth run.
FEW_QUERIES = (
    "b1h512s1d64-e4m3-sk17",
    "b1h256s1d64-e4m3-sk113",
    "b1h64s1d64-e4m3-sk1023",
    "b1h256s2d128-e4m3-sk5",
    "b1h256s4d128-e4m3-sk17",
    "b1h128s17d64-e4m3-causal",
)


@pytest.mark.parametrize("shape", FEW_QUERIES)
def test_right_kernels_pass_with_few_queries(shape: str) -> None:
    """In every head, right kernels pass where few rows, or one, decide; also if they seldom raise the maximum."""
    inputs = make_inputs(parse_case(f"{shape}-seed0"), torch.device("cpu"))
    truth = make_truth(inputs, with_spread=True)
    kernels = {name: RIGHT[name] for name in ("tiles of 64", "keys split in 4", "P times 448", "maximum raised lazily")}
    kernels["maximum raised lazily, tiles of 8"] = Fp8Kernel(tile=8, p_scale=16.0, lazy_log2=4.0)

    used = {
        name: most_used(check_output(simulate_fp8(inputs, kernel), truth, "fp8")) for name, kernel in kernels.items()
    }

    assert {name: share for name, share in used.items() if not 0.2 < share < MAX_USED} == {}


@pytest.mark.parametrize("shape", ["b1h8s1d64-e4m3-sk1023", "b1h8s1d128-e4m3-sk17", "b1h8s4d64-e4m3-sk113"])
@pytest.mark.parametrize(
    "name", ["descales of another head", "descale of K missing", "two keys of 16 swapped", "V transposed wrongly"]
)
def test_wrong_kernels_are_rejected_with_few_queries(name: str, shape: str) -> None:
    """The wider bounds of few rows still reject what a kernel with a single query can do wrong."""
    inputs = make_inputs(parse_case(f"{shape}-seed0"), torch.device("cpu"))

    check = check_output(simulate_fp8(inputs, WRONG[name]), make_truth(inputs, with_spread=True), "fp8")

    assert most_used(check) > 5


@pytest.mark.parametrize(
    ("rows", "factor"),
    [(slice(64), 1.03), (slice(64), 0.97), (slice(128), 1.02), (slice(256), 1.01), (slice(-64, None), 1.03)],
)
def test_a_tile_of_queries_with_a_wrong_factor_is_rejected(rows: slice, factor: float) -> None:
    """Under a causal mask, the first rows have large errors.  They have little weight in a head, but not in a tile."""
    inputs = make_inputs(parse_case("b1h4s512d64-e4m3-causal-seed0"), torch.device("cpu"))
    truth, right = make_truth(inputs, with_spread=True), simulate_fp8(inputs, Fp8Kernel())
    wrong = right.float()
    wrong[:, :, rows] *= factor

    check = check_output(wrong.half(), truth, "fp8")

    assert most_used(check_output(right, truth, "fp8")) < MAX_USED
    assert [bound.name for bound in check.bounds if bound.enforced and not bound.holds] == ["gain"]
    assert most_used(check) > 1.2


def test_a_scale_of_p_that_e4m3_does_not_have_is_a_bias() -> None:
    """272 lies between 256 and 288.  The largest P of every row is then 5.9 % too small, and the gain shows it."""
    inputs = make_inputs(parse_case("b1h8s203d64-e4m3-causal-seed0"), torch.device("cpu"))
    truth = make_truth(inputs, with_spread=True)

    broken = {}
    for scale in (256.0, 272.0, 288.0):
        check = check_output(simulate_fp8(inputs, Fp8Kernel(p_scale=scale)), truth, "fp8")
        broken[scale] = [bound.name for bound in check.bounds if bound.enforced and not bound.holds]

    assert broken[256.0] == broken[288.0] == []
    assert "gain" in broken[272.0]


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in MUST_SHOW.items() for case in cases])
def test_wrong_kernels_are_rejected(name: str, case: str) -> None:
    """Each mistake is rejected at every case that `MUST_SHOW` lists, by more than 1.1 times a bound or by a NaN."""
    check = check_of(WRONG[name], case)

    assert not check.passed
    assert check.nonfinite_count > 0 or most_used(check) > 1.1


def test_every_mistake_is_rejected_somewhere() -> None:
    """`MUST_SHOW` has every wrong kernel, each with at least one case of the table."""
    assert (list(MUST_SHOW), [name for name, cases in MUST_SHOW.items() if not cases]) == (list(WRONG), [])
    assert {case for cases in MUST_SHOW.values() for case in cases} == set(TABLE_CASES)


def test_sums_of_13_bits_are_too_small_only_if_v_has_one_sign() -> None:
    """Long sums of 13 bits are too small if V is full of ones, at 600 keys by up to 1.4 % as on an H200; else right."""
    inputs = make_inputs(parse_case("b1h1s128d64-e4m3-sk600-seed0"), torch.device("cpu"))
    of_ones = simulate_fp8(with_v_of_ones(inputs), WRONG["13 bits for all keys"])

    assert 1 - float(of_ones.double().min()) == pytest.approx(0.014, abs=0.001)
    for name in ("13 bits, every 512 keys", "13 bits for all keys", "13 bits for all keys, row sum every 512"):
        assert check_of(WRONG[name], "4096 keys").passed
        check = check_of(WRONG[name], "4096 keys, V full of ones")
        assert "gain" in [bound.name for bound in check.bounds if bound.enforced and not bound.holds]


def test_the_descales_are_what_makes_the_policy_see_another_head() -> None:
    """With equal descales in all heads, reading another head's descale changes nothing."""
    inputs = make_inputs(parse_case("b1h4s113d64-e4m3-seed0"), torch.device("cpu"))
    assert inputs.descales is not None
    equal = inputs._replace(descales=inputs.descales.map(torch.ones_like))

    right, shifted = (simulate_fp8(equal, kernel) for kernel in (Fp8Kernel(), Fp8Kernel(descale_shift=1)))

    assert torch.equal(right, shifted)
    assert not torch.equal(simulate_fp8(inputs, Fp8Kernel()), simulate_fp8(inputs, Fp8Kernel(descale_shift=1)))


def test_the_older_thresholds_are_shown_and_not_judged() -> None:
    """A right kernel breaks the older `rel_err` at any length; the bound is in the check and not enforced."""
    check = check_of(RIGHT["tiles of 64"], "512 keys")

    shown = {bound.name: bound.holds for bound in check.bounds if not bound.enforced}
    assert (check.passed, shown) == (True, {"max_err": True, "rel_err": False})


# -- the page ---------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "table"), [("kernels", judged_table), ("costs", costs_table)])
def test_the_tables_of_the_page_are_simulated(name: str, table: object) -> None:
    """The figures of the page are those of the simulation, to 10 %; their words are the same."""
    assert callable(table)
    text = PAGE.read_text(encoding="utf-8")
    written = text.partition(begin_of(name))[2].partition("\n\n<!--")[0].strip()
    simulated = table().strip()

    number = r"\d+\.\d+|\b\d+\b"
    assert re.sub(number, "#", written) == re.sub(number, "#", simulated)
    pairs = zip(re.findall(number, written), re.findall(number, simulated), strict=True)
    assert [pair for pair in pairs if float(pair[0]) != pytest.approx(float(pair[1]), rel=0.1, abs=0.02)] == []

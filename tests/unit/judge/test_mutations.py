"""Simulated kernels under the tolerance policies: right ones pass with a margin, wrong ones fail where they must."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import pytest
import torch

from pytest_fa.attention.dtypes import Dtype
from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.variant import Tolerance
from pytest_fa.gpu.inputs import Inputs, make_inputs
from pytest_fa.judge.output_check import check_output
from pytest_fa.judge.policies import POLICIES, READS_SPREAD
from pytest_fa.judge.truth import Truth, make_truth
from pytest_fa.records.checks import Check
from tests.unit.judge.mutations import (
    E4M3,
    LENGTHS,
    MUST_SHOW,
    MUTATIONS,
    Kernel,
    Size,
    dequantised,
    problem,
    simulate,
)

MAX_USED = 0.98
JUDGED: tuple[tuple[Tolerance, Dtype], ...] = (
    ("same_precision", "fp16"),
    ("same_precision", "bf16"),
    ("fp8", "fp16"),
    ("fp8", "bf16"),
)
SIZES = [Size(seq_k, causal) for seq_k in LENGTHS for causal in (False, True)]
SHORT = [size for size in SIZES if size.seq_k < 4096]
LONG = [size for size in SIZES if size.seq_k >= 4096]
# Every test at the lengths up to 1023, and in the nightly run at the longer ones.
EACH_LENGTH = pytest.mark.parametrize(
    "sizes", [pytest.param(SHORT, id="short"), pytest.param(LONG, id="long", marks=pytest.mark.nightly)]
)
EACH_POLICY = pytest.mark.parametrize(("policy", "dtype"), JUDGED)
CPU = torch.device("cpu")


class Solved(NamedTuple):
    """Inputs with their truth."""

    inputs: Inputs
    truth: Truth


@functools.lru_cache(maxsize=16)
def solved(size: Size, dtype: Dtype, policy: Tolerance, factor: float = 1.0) -> Solved:
    """The problem of a size, with the scale multiplied by `factor`; its truth is computed once."""
    inputs = problem(size, dtype, policy)
    inputs = inputs._replace(scale=inputs.scale * factor)
    return Solved(inputs, make_truth(inputs, with_spread=policy in READS_SPREAD))


def check_of(kernel: Kernel, inputs: Inputs, truth: Truth, policy: Tolerance) -> Check:
    """The verdict on a simulated kernel, which rounds P to e4m3 if the policy is `fp8`."""
    return check_output(simulate(inputs, kernel._replace(p_dtype=E4M3 if policy == "fp8" else None)), truth, policy)


def most_used(check: Check) -> float:
    """The largest fraction that is used of any judged bound."""
    return max(bound.used or 0.0 for bound in check.bounds if bound.enforced)


# -- right kernels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [Kernel(tile=64), Kernel(tile=128), Kernel(splits=4)], ids=["64", "128", "split"])
@EACH_POLICY
@EACH_LENGTH
def test_right_kernel_passes(sizes: list[Size], policy: Tolerance, dtype: Dtype, kernel: Kernel) -> None:
    """A right kernel, with any tiling, uses between 0.2 and 0.98 of its tightest bound."""
    for size in sizes:
        check = check_of(kernel, *solved(size, dtype, policy), policy)

        assert (check.passed, check.bad_count) == (True, 0), size
        assert 0.2 < most_used(check) < MAX_USED, size


@EACH_POLICY
@EACH_LENGTH
def test_right_kernel_passes_with_large_logits(sizes: list[Size], policy: Tolerance, dtype: Dtype) -> None:
    """A right kernel passes if logits are 30 times as large, so that one key has nearly all the weight."""
    for size in (size for size in sizes if not size.causal or size.seq_k < 4096):
        check = check_of(Kernel(), *solved(size, dtype, policy, 30.0), policy)

        assert (check.passed, check.bad_count) == (True, 0), size
        assert most_used(check) < MAX_USED, size


SHAPES = ("b1h2s33d64-{}{}-sk64", "b1h4s100d64-{}{}-kv2-sk512", "b2h2s300d128-{}{}-sk77")


@EACH_POLICY
def test_right_kernel_passes_with_other_queries_than_keys(policy: Tolerance, dtype: Dtype) -> None:
    """A right kernel passes with more or fewer queries than keys, shared key heads and rows that see no key."""
    for shape, mask in itertools.product(SHAPES, ("", "-causal", "-causal_br")):
        inputs = make_inputs(parse_case(f"{shape.format(dtype, mask)}-seed0"), CPU)
        inputs = dequantised(inputs) if policy == "fp8" else inputs
        truth = make_truth(inputs, with_spread=policy in READS_SPREAD)

        for kernel in (Kernel(tile=64), Kernel(splits=4)):
            check = check_of(kernel, inputs, truth, policy)

            assert (check.passed, check.bad_count) == (True, 0), (shape, mask, kernel)
            assert most_used(check) < MAX_USED, (shape, mask, kernel)


SPECIAL = [
    (*judged, data)
    for judged in JUDGED
    for data in ("alike", "first keys", "last keys", "shifted")
    if judged[0] != "fp8" or data != "last keys"  # the docstring of `fp8` gives the reason
]


@pytest.mark.parametrize(("policy", "dtype", "data"), SPECIAL)
def test_right_kernel_passes_on_special_values(policy: Tolerance, dtype: Dtype, data: str) -> None:
    """A right kernel passes if V has equal columns, is zero except for three keys, or has a mean far from zero."""
    for size in SHORT:
        inputs = problem(size, dtype, policy)
        v = inputs.v.clone()
        if data == "alike":
            v[:] = v[..., :1].clone()
        elif data == "shifted":
            v += 4
        else:
            v[:, :, slice(3, None) if data == "first keys" else slice(-3)] = 0
        inputs = inputs._replace(v=v)
        truth = make_truth(inputs, with_spread=policy in READS_SPREAD)

        for kernel in (Kernel(tile=64), Kernel(splits=4)):
            check = check_of(kernel, inputs, truth, policy)

            assert (check.passed, check.bad_count) == (True, 0), (size, kernel)
            assert most_used(check) < MAX_USED, (size, kernel)


def test_fp8_reports_the_old_thresholds() -> None:
    """A right fp8 kernel breaks the older threshold `rel_err` at 64 keys and passes, because it is not judged."""
    check = check_of(Kernel(), *solved(Size(64, causal=False), "fp16", "fp8"), "fp8")

    reported = {bound.name: bound.holds for bound in check.bounds if not bound.enforced}
    assert (check.passed, reported) == (True, {"max_err": True, "rel_err": False})


# -- wrong kernels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize(("policy", "dtype"), MUST_SHOW)
@EACH_LENGTH
def test_mutation_is_rejected(sizes: list[Size], policy: Tolerance, dtype: Dtype, mutation: str) -> None:
    """Each mistake is rejected at every size that `MUST_SHOW` lists, by a finite error above a bound."""
    for size in (size for size in sizes if size in MUST_SHOW[policy, dtype][mutation]):
        check = check_of(MUTATIONS[mutation], *solved(size, dtype, policy), policy)

        assert (check.passed, check.nonfinite_count) == (False, 0), size
        assert most_used(check) > 1.1, size


def test_the_table_is_complete() -> None:
    """`MUST_SHOW` has every policy with every mutation, each with at least one size."""
    assert {policy for policy, _ in MUST_SHOW} == set(POLICIES)
    assert all(list(shows) == list(MUTATIONS) for shows in MUST_SHOW.values())
    assert [sizes for shows in MUST_SHOW.values() for sizes in shows.values() if not sizes] == []
    assert {size for shows in MUST_SHOW.values() for sizes in shows.values() for size in sizes} == set(SIZES)


def test_mistakes_that_need_two_tiles_change_nothing_in_one() -> None:
    """With a single tile, a missing rescale, swapped tiles of V and an unused mask give the right output."""
    inputs = problem(Size(64, causal=False), "fp16", "same_precision")
    right = simulate(inputs, Kernel())

    same = {name for name, kernel in MUTATIONS.items() if torch.equal(simulate(inputs, kernel), right)}

    assert same == {"rescale forgotten", "V tiles swapped", "mask off by one"}


def test_wrong_row_is_one_row() -> None:
    """The mutation `one row wrong` changes exactly one row."""
    inputs = problem(Size(512, causal=False), "bf16", "same_precision")

    differs = simulate(inputs, MUTATIONS["one row wrong"]) != simulate(inputs, Kernel())

    assert differs.any(-1).nonzero().tolist() == [[0, 0, 256]]

"""On hard data, right backward kernels use less than each bound, and the data are what their names say."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from pytest_fa.attention import parts
from pytest_fa.attention.data import LEVEL
from pytest_fa.catalog.variant import Rounding
from pytest_fa.judge.gradients import check_gradients, make_gradients
from pytest_fa.judge.properties.gradient_data import PROFILES
from pytest_fa.judge.row_outputs import make_row_truth
from pytest_fa.judge.truth import make_truth
from tests.tiers import nightly_after
from tests.unit.judge.backward_kernels import RIGHT, Call, Step, Variant
from tests.unit.judge.test_gradients import MAX_USED, Solved, inputs_of, upstream_of

pytestmark = pytest.mark.usefixtures("one_thread")

HARD_SHAPES = (
    "b1h2s64d64-{}",
    "b1h4s100d64-{}-causal-kv2",
    "b1h2s77d64-{}-causal_br-sk150",
    "b1h4s7d64-{}-causal",  # few rows
    "b2h6s7d64-{}-kv2-biash-sink",
    "b1h2s150d64-{}",  # of a kernel without a causal mask
)
EACH_DTYPE = pytest.mark.parametrize("dtype", ["fp16", "bf16"])


@functools.lru_cache(maxsize=64)
def solved_on(profile: str, shape: str, seed: int = 0, rounds: tuple[Rounding, ...] = ()) -> Solved:
    """A problem with hard data; the gradient of the log-sum-exp is zero if the seed is odd."""
    inputs = inputs_of(shape, seed)
    upstream = upstream_of(inputs, has_dlse=seed % 2 == 0)
    inputs, dout = PROFILES[profile](inputs, upstream.dout)
    upstream = upstream._replace(out=make_truth(inputs).out.to(inputs.q.dtype), dout=dout)
    lse = make_row_truth(parts.outputs()["lse"], inputs).exact
    return Solved(inputs, upstream, lse, make_gradients(inputs, upstream, rounds))


def used_on(problem: Solved, variant: Variant) -> float:
    """The largest share of a bound that a simulated kernel uses; infinite for NaN."""
    written = Call(problem.inputs, problem.upstream, problem.lse, variant).gradients
    checks = check_gradients(written, problem.truths).values()
    return max(math.inf if bound.used is None else bound.used for check in checks for bound in check.bounds)


def require_room(profile: str, dtype: str, seed: int) -> None:
    """Each right kernel uses less than each bound on each shape."""
    for shape in HARD_SHAPES:
        for name, variant in RIGHT.items():
            problem = solved_on(profile, shape.format(dtype), seed, variant.rounds)
            assert used_on(problem, variant) < MAX_USED, (shape, name)


@pytest.mark.parametrize("dtype", nightly_after(1, ["fp16", "bf16"]))
@pytest.mark.parametrize("profile", PROFILES)
def test_right_kernel_passes_on_hard_data(profile: str, dtype: str) -> None:
    """With any tiles, roundings and formulas that are right."""
    require_room(profile, dtype, seed=0)


@pytest.mark.nightly
@EACH_DTYPE
@pytest.mark.parametrize("profile", PROFILES)
def test_right_kernel_passes_on_hard_data_of_more_seeds(profile: str, dtype: str) -> None:
    """The same with two more seeds, one of which is without a gradient of the log-sum-exp."""
    for seed in (1, 2):
        require_room(profile, dtype, seed)


@EACH_DTYPE
def test_far_rows_reveal_exp_without_the_log_sum_exp(dtype: str) -> None:
    """exp(S) / exp(L) is right on random data; it overflows far from 0."""
    step: Step = lambda c: (c.scores.exp() / c.lse.exp()).masked_fill(c.hidden, 0.0)  # noqa: E731  # a step is short
    variant = Variant({"p": step})
    shape = f"b1h2s64d64-{dtype}"
    plain, far = solved_on("values near 8", shape), solved_on("log-sum-exp of 100 and -100", shape)
    assert (used_on(plain, variant) < 1, used_on(far, variant)) == (True, math.inf)


@EACH_DTYPE
def test_hard_data_are_what_they_are_called(dtype: str) -> None:
    """The log-sum-exp, weights and delta of each profile."""
    shape = f"b1h2s64d64-{dtype}"
    problems = {name: solved_on(name, shape) for name in PROFILES}
    far = problems["log-sum-exp of 100 and -100"].lse
    assert bool(((far[:, :, ::2] - LEVEL).abs() < 20).all())
    assert bool(((far[:, :, 1::2] + LEVEL).abs() < 20).all())
    v, one_hot = problems["one-hot rows"].inputs.v, problems["one-hot rows"].upstream.out
    assert bool((one_hot[:, :, :, None] == v[:, :, None]).all(-1).any(-1).all())
    two_keys = problems["two scores in each row"].inputs.k
    assert torch.equal(two_keys[:, :, 2:], two_keys[:, :, :-2])
    orthogonal, plain = (problems[name].upstream for name in ("dO orthogonal to the output", "one-hot rows"))
    deltas = [(each.out.double() * each.dout.double()).sum(-1).square().mean().sqrt() for each in (orthogonal, plain)]
    assert float(deltas[0]) < 0.02 * float(deltas[1])
    large = problems["dO 100 times as large"].upstream.dout
    assert 90 < float(large.double().square().mean().sqrt()) < 110

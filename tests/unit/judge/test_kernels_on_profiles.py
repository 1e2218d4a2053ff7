"""Right kernels, which are right on the data of each profile."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from pytest_fa.attention import parts
from pytest_fa.attention.data import PROFILES
from pytest_fa.attention.lse import PART as LOG_SUM_EXP
from pytest_fa.catalog.case import parse_case
from pytest_fa.gpu.inputs import Inputs, make_inputs
from pytest_fa.judge.gradients import check_gradients, make_gradients
from pytest_fa.judge.output_check import check_output
from pytest_fa.judge.row_outputs import check_rows, make_row_truth
from pytest_fa.judge.truth import make_truth, repeated_heads
from tests.tiers import nightly_after
from tests.unit.judge import backward_kernels, float32_kernels
from tests.unit.judge.mutations import Kernel, simulate
from tests.unit.judge.test_gradients import upstream_of
from tests.unit.judge.test_log_sum_exp import tiled

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
MAX_USED = 0.95  # of a bound
EACH_PROFILE = pytest.mark.parametrize("profile", PROFILES)
SHAPES = (
    "b1h1s1d64-{}",
    "b1h2s3d64-{}",
    "b1h2s1d64-{}-sk113",
    "b1h2s64d64-{}",
    "b1h4s70d128-{}-causal-kv2",
    "b1h2s100d64-{}-causal_br-sk77",  # the first queries see no key
)
LARGE_SHAPES = ("b1h2s300d128-{}", "b1h1s1024d64-{}-causal", "b1h1s64d64-{}-sk1024")
# Of backward kernels, which are tried in all variants of their roundings.
BACKWARD_SHAPES = ("b1h2s64d64-{}", "b1h4s100d64-{}-causal-kv2", "b1h2s1d64-{}-sk7")
MORE_BACKWARD_SHAPES = ("b1h2s150d64-{}", "b1h2s77d64-{}-causal_br-sk150", "b1h2s64d128-{}", "b1h2s100d64-{}-cap2")
KERNELS = (Kernel(), Kernel(16), Kernel(16, splits=4), Kernel(lazy=8.0), Kernel(16, splits=8, lazy=8.0))
FLOAT32_KERNELS = [kernel for kernel in float32_kernels.RIGHT.values() if kernel.tile > 1]


def inputs_of(shape: str, profile: str, seed: int = 0) -> Inputs:
    """The inputs of a case with a profile."""
    return make_inputs(parse_case(f"{shape}-data_{profile}-seed{seed}"), CPU)


def used_of_bounds(inputs: Inputs) -> Iterator[float | None]:
    """What right kernels use of each bound of the output and of the log-sum-exp; None for NaN."""
    truth, rows = make_truth(inputs), make_row_truth(LOG_SUM_EXP, inputs)
    if inputs.q.dtype == torch.float32:
        k, v = (repeated_heads(tensor, inputs.q).float() for tensor in (inputs.k, inputs.v))
        whole = inputs._replace(k=k, v=v)
        outputs = [float32_kernels.compute(whole, kernel) for kernel in FLOAT32_KERNELS]
    else:
        outputs = [simulate(inputs, kernel) for kernel in KERNELS]
    for out in outputs:
        yield from (bound.used for bound in check_output(out, truth, "same_precision").bounds)
    for tile, rounded in ((16, True), (64, False)):
        yield check_rows("lse", tiled(inputs, tile, rounded=rounded), rows)[0].used


def require_right(profile: str, shape: str, seed: int = 0) -> None:
    """Each right kernel uses less than each bound on the data of a case."""
    for dtype in ("fp16", "bf16", "fp32"):
        used = used_of_bounds(inputs_of(shape.format(dtype), profile, seed))
        assert max(math.inf if share is None else share for share in used) < MAX_USED, dtype


@EACH_PROFILE
@pytest.mark.parametrize("shape", SHAPES)
def test_a_right_kernel_is_right(profile: str, shape: str) -> None:
    """With any tiles and splits, and with O rescaled lazily, in each dtype."""
    require_right(profile, shape)


@pytest.mark.nightly
@EACH_PROFILE
@pytest.mark.parametrize(
    ("shape", "seed"), [*((shape, 0) for shape in LARGE_SHAPES), *((shape, 1) for shape in SHAPES)]
)
def test_a_right_kernel_is_right_on_large_shapes_and_other_seeds(profile: str, shape: str, seed: int) -> None:
    """The same at up to 1024 queries and keys."""
    require_right(profile, shape, seed)


@EACH_PROFILE
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_torchs_kernel_is_right(profile: str, dtype: str) -> None:
    """SDPA on the CPU rounds in other places than simulated kernels; rows that were all alike broke its gain bound."""
    for mask in ("", "-causal"):
        inputs = inputs_of(f"b1h2s200d64-{dtype}{mask}", profile)
        out = torch.nn.functional.scaled_dot_product_attention(*inputs[:3], is_causal=bool(mask), scale=inputs.scale)
        bounds = check_output(out, make_truth(inputs), "same_precision").bounds
        assert max(math.inf if bound.used is None else bound.used for bound in bounds) < MAX_USED, mask


def require_right_gradients(profile: str, shape: str, names: tuple[str, ...]) -> None:
    """Each right backward kernel uses less than each bound of dq, dk and dv."""
    inputs = inputs_of(f"{shape}-bwd", profile)
    upstream, lse = upstream_of(inputs), make_row_truth(parts.outputs()["lse"], inputs).exact
    for name in names:
        variant = backward_kernels.RIGHT[name]
        truths = make_gradients(inputs, upstream, variant.rounds)
        gradients = backward_kernels.Call(inputs, upstream, lse, variant).gradients
        for check in check_gradients(gradients, truths).values():
            assert max(math.inf if bound.used is None else bound.used for bound in check.bounds) < MAX_USED, name


@EACH_PROFILE
@pytest.mark.parametrize("dtype", nightly_after(1, ["fp16", "bf16"]))
@pytest.mark.parametrize("shape", BACKWARD_SHAPES)
def test_a_right_backward_kernel_is_right(profile: str, dtype: str, shape: str) -> None:
    """Also one that rounds P before it makes dS of it, and one that scales dS before it rounds it."""
    names = ("as the reference", "dS from rounded P", "dS scaled before it is rounded")
    require_right_gradients(profile, shape.format(dtype), names)


@pytest.mark.nightly
@EACH_PROFILE
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("shape", [*BACKWARD_SHAPES, *MORE_BACKWARD_SHAPES])
def test_every_right_backward_kernel_is_right(profile: str, dtype: str, shape: str) -> None:
    """The same with all of them, where the case can have the profile."""
    if "cap" in shape and profile in ("low_lse", "high_lse", "one_hot"):
        return
    require_right_gradients(profile, shape.format(dtype), tuple(backward_kernels.RIGHT))

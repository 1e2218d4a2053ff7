"""The rungs in e4m3 on tensor cores: their code paths, the sum of 13 bits, and the deliberately wrong kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pytest_fa.gpu.quantised import quantise
from pytest_fa.host.client import Workers
from pytest_fa.wire.jobs import CaseResult
from tests.device.conftest import Built, is_found_out, judged

RUNGS = (
    "fp8_wgmma",
    "fp8_overlap",
    "fp8_sum",
    "fp8_tiles",
    "fp8_max",
    "fp8_transpose",
    "fp8_shapes",
    "fp8_causal",
    "fp8_split",
    "fp8_four",
    "fp8_stages",
    "fp8_four@ONLY_SHAPE=3",  # four warpgroups for all work at D = 64
    "fp8_stages@ONLY_SHAPE=3",
    "fp8_mma",
)
SHAPES = (
    "b1h2s1d64-e4m3-sk127",  # one query, one key tile
    "b1h2s65d64-e4m3-sk129",  # two key tiles
    "b1h2s300d64-e4m3-causal-sk1100-out_bf16",
    "b1h2s1100d64-e4m3-causal_br-sk600",  # the first queries see no key
    "b3h17s640d64-e4m3-causal_br-sk900",  # more work tiles than SMs, of different lengths
    "b2h16s1023d64-e4m3-kv4-sk1537",  # a second level of the sum in O
    "b2h3s129d128-e4m3-bshd",
    "b1h2s513d128-e4m3-causal-out_bf16",
    "b3h17s640d128-e4m3-causal_br-sk900",
    "b1h1s2048d64-e4m3-sk4096",  # a long row sum
    "b1h1s256d128-e4m3-sk16384",
    "b2h16s4096d64-e4m3",  # fp8_split divides the last round
)
PROPERTIES = ("hard_data", "negative_scale", "zero_scale", "contained_nan", "head_independence")
# Where each mistake must show; the other cases may accept it.
WRONG = {
    "wrong_fp8_keys_in_order": "b1h8s512d64-e4m3",
    "wrong_fp8_p_not_scaled": "b1h8s512d64-e4m3-outlier",
    "wrong_fp8_p_past_448": "b1h8s512d64-e4m3",
    "wrong_fp8_next_v_descale": "b1h8s512d64-e4m3",
}
BARRIERS = ("q_full", "k_full", "v_full", "q_empty", "k_empty", "v_empty", "o_written")
RACES = (*(f"race_fp8_wgmma_{barrier}" for barrier in BARRIERS), "race_fp8_transpose_v_written", "race_fp8_part_stored")
# Many key tiles, and more work tiles than SMs, so that buffers are used again.
RACE_SHAPES = ("b4h16s512d64-e4m3", "b1h8s4096d64-e4m3", "b2h16s4096d64-e4m3-causal", "b2h16s4096d64-e4m3")
FEW_KEYS, MANY_KEYS = "b1h8s512d64-e4m3", "b1h1s2048d64-e4m3-sk4096"


def run(built: Built, shape: str, property_name: str | None = None) -> CaseResult:
    """The result of one judged case, or of one property, with the bounds of e4m3."""
    return judged(built, shape, "fp8", property_name)


def test_a_gpu_quantises_as_the_cpu_does() -> None:
    """Numbers and descales are the same bit by bit, so that a head that was not changed has the same inputs."""
    values = torch.randn(20, 40, 7, 8, dtype=torch.float64) * 10 ** torch.rand(20, 40, 1, 1)
    own, theirs = quantise(values.cuda()), quantise(values)
    assert torch.equal(own[0].cpu().float(), theirs[0].float())
    assert torch.equal(own[1].cpu(), theirs[1])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rung", RUNGS)
def test_every_path_is_right(build_rung: Callable[[str], Built], rung: str, shape: str) -> None:
    """Results are right at the shapes that select each of the kernel's code paths."""
    result = run(build_rung(rung), shape)
    assert (result.outcome, result.message) == ("ok", "")


@pytest.mark.parametrize("property_name", PROPERTIES)
@pytest.mark.parametrize("rung", RUNGS)
def test_properties_hold(build_rung: Callable[[str], Built], rung: str, property_name: str) -> None:
    """Numerical properties hold with a tail, a mask and more queries than keys."""
    result = run(build_rung(rung), "b1h2s1100d64-e4m3-causal_br-sk600", property_name)
    assert (result.outcome, result.message) == ("ok", "")


@pytest.mark.parametrize("name", WRONG)
def test_each_mistake_is_found(build_rung: Callable[[str], Built], name: str) -> None:
    """A kernel with a mistake of kernels in e4m3 is rejected."""
    assert run(build_rung(name), WRONG[name]).outcome == "wrong"


def test_one_accumulator_is_right_if_v_has_both_signs(build_rung: Callable[[str], Built]) -> None:
    """The tensor cores cut each product off, and not each sum, so that the losses of products of both signs cancel."""
    few, many = (run(build_rung("fp8_one_accumulator"), shape) for shape in (FEW_KEYS, MANY_KEYS))
    assert (few.outcome, many.outcome) == ("ok", "ok")


def test_one_accumulator_is_wrong_if_v_has_one_sign(build_rung: Callable[[str], Built]) -> None:
    """With V full of ones, the losses of all products add up."""
    result = run(build_rung("fp8_one_accumulator"), MANY_KEYS, "hard_data")
    assert (result.outcome, "(V full of ones)" in result.message) == ("wrong", True)


@pytest.mark.parametrize("name", RACES)
def test_each_barrier_is_needed(workers: Workers, build_rung: Callable[[str], Built], name: str) -> None:
    """Without the barrier, a result is wrong or the device fails, on at least one shape."""
    assert is_found_out(workers, build_rung(name), RACE_SHAPES, policy="fp8"), "no shape shows it"

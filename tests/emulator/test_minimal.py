"""The smallest kernel, emulated on the CPU, with each part of attention that it claims."""

from __future__ import annotations

import pytest
import torch

from pytest_fa.attention.data import PROFILES
from pytest_fa.attention.softcap import LARGE_CAP, LARGE_SCALE
from pytest_fa.catalog.case import Case, parse_case
from pytest_fa.catalog.claims import claim_cases
from pytest_fa.catalog.suites import SUITES
from pytest_fa.gpu.inputs import make_inputs
from tests.emulator.conftest import Build, broken_bounds, complaints
from tests.emulator.emulated import Emulated, Schedule

pytestmark = pytest.mark.needs_nvcc  # for the headers of CUDA

SHAPES = (
    "b2h4s70d64-fp16-kv2",
    "b1h2s70d64-fp16-causal-sk100",
    "b1h2s70d64-fp16-causal_br-sk30",  # the first queries see no key
    "b1h2s70d64-fp16-win0_0",  # a side of 0 is not an open one
    "b1h2s70d64-fp16-win37_0-sk100",
    "b2h4s70d64-fp16-win9_21-kv2-sk100-bshd",
    "b1h2s70d64-fp16-win9_21-sk30",
    "b1h2s70d64-fp16-wino_5-sk100",
    "b1h2s70d64-fp16-win20_o-sk100",
    "b1h2s70d64-fp16-winm8_57-sk100",  # the last queries see no key
    "b1h2s70d64-fp16-win60_m3-sk30",
    "b1h2s70d64-fp16-win5_5-sk0",
    "b1h2s70d64-fp16-cap2",
    f"b1h2s70d64-fp16-causal-scale{LARGE_SCALE:g}-cap{LARGE_CAP:g}",
    "b2h4s70d64-fp16-win9_21-kv2-sk100-cap2p5",
    "b1h2s70d64-fp16-win37_0-scalem0p7-cap2",
    "b2h4s70d64-fp16-causal_br-kv2-sk30-sink",  # the first queries see nothing but the sink, which one head lacks
    "b1h2s70d64-fp16-sk0-sink",
    "b9h2s140d64-fp16-var1",
    "b4h4s70d64-fp16-causal_br-kv2-sk150-var2",
    "b4h2s150d64-fp16-win37_0-sk70-var3-alibi",
    "b2h4s70d64-fp16-kv2-sk100-kv_e4m3_t",
    "b2h6s70d64-fp16-causal_br-kv3-sk100-kv_int8_h-bshd",
    "b4h4s5d64-fp16-kv2-sk150-var2-kv_e4m3_th",
    "b4h4s3d64-fp16-kv2-sk150-var1-page16hnd-kv_int8_th-dv200",
    "b4h4s3d64-fp16-kv2-sk150-var1-append",
    "b4h4s5d64-fp16-causal_br-kv1-sk150-var4-page16-append-dv200-sink",
    "b4h2s1d64-fp16-win37_0-sk70-var4-page64hnd-append-bshd",
    "b2h2s70d64-fp16-sk100-dv200-mask-bshd",  # the last two blocks of columns overlap
)
DTYPES = {"minimal": ("fp16", "bf16"), "minimal_fp32": ("fp32",)}


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_right(build: Build, shape: str) -> None:
    """Output and log-sum-exp are right, also in rows without keys."""
    assert complaints(build("minimal"), shape, Schedule()) == []


@pytest.mark.parametrize("profile", PROFILES)
def test_it_is_right_on_the_data_of_each_profile(build: Build, profile: str) -> None:
    """Such as values near the ends of the range of fp16."""
    assert complaints(build("minimal"), f"b1h2s70d64-fp16-causal-data_{profile}", Schedule()) == []


@pytest.mark.parametrize("name", DTYPES)
def test_combinations_are_right(build: Build, name: str) -> None:
    """The cases of the suite `modifiers` that a variant claims have all parts together."""
    kernel = build(name, dtypes=DTYPES[name])
    check(kernel, [case for case in SUITES["modifiers"] if not kernel.variant.refuses(case)])


@pytest.mark.nightly
@pytest.mark.parametrize("name", DTYPES)
def test_each_claim_is_right(build: Build, name: str) -> None:
    """So are those of a default run, which have any two of the claims."""
    kernel = build(name, dtypes=DTYPES[name])
    check(kernel, claim_cases(kernel.variant, ()))


@pytest.mark.parametrize("pages", ["page16", "page16hnd-kv_int8_th"])
def test_keys_and_values_may_be_of_one_cache(build: Build, pages: str) -> None:
    """Then the strides of their pages are those of the cache."""
    case = parse_case(f"b4h4s3d64-fp16-kv2-sk150-var1-{pages}-seed0")
    inputs = make_inputs(case, torch.device("cpu"), {"kv_cache": "together"})
    assert inputs.placed().k.stride(0) == 2 * 2 * 16 * 64
    assert broken_bounds(inputs, *build("minimal")(case, inputs, Schedule())) == []


def check(kernel: Emulated, cases: list[Case]) -> None:
    """Whether there are cases, and the kernel is right in each."""
    assert cases
    found = {case.id: complaints(kernel, case.shape_id, Schedule()) for case in cases}
    assert found == {case.id: [] for case in cases}

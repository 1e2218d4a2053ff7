"""The smallest kernel, emulated on the CPU, with windows and soft caps."""

from __future__ import annotations

import pytest

from pytest_fa.attention.softcap import LARGE_CAP, LARGE_SCALE
from tests.emulator.conftest import Build, complaints
from tests.emulator.emulated import Schedule

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
)


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_right(build: Build, shape: str) -> None:
    """Output and log-sum-exp are right, also in rows without keys."""
    assert complaints(build("minimal"), shape, Schedule()) == []

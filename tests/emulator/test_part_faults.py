"""The self-test's wrong kernels in windows, soft caps and caches, emulated on the CPU: each is caught by its check."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pytest_fa.attention import parts
from pytest_fa.features.selftest.faults import FAULTS, cases_of
from tests.emulator.conftest import Build, complaints
from tests.emulator.emulated import Emulated, Schedule
from tests.tiers import nightly_but

pytestmark = pytest.mark.needs_nvcc  # for the headers of CUDA

TWIN = "cuda_twin_window_cap"
WRONG = [name for part in parts.PARTS for name in part.faults if name.startswith("cuda_")]


def rejecting(kernel: Emulated) -> Iterator[str]:
    """The checks that reject a kernel, one case of the self-test after the other."""
    for case in cases_of(kernel.variant.name):
        if not kernel.variant.refuses(case):
            yield from complaints(kernel, case.id.removesuffix("-seed0"), Schedule())


def test_the_twin_is_right(build: Build) -> None:
    """The source has no mistake but those that are planted."""
    assert list(rejecting(build(TWIN))) == []


@pytest.mark.parametrize(
    "name", nightly_but(WRONG, "cuda_window_zero_is_open", "cuda_cap_after_mask", "cuda_cache_scale_of_next_head")
)
def test_each_mistake_is_caught(build: Build, name: str) -> None:
    """The check that must reject a kernel does."""
    assert FAULTS[name].caught_by in rejecting(build(name))

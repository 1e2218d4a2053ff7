"""Each data profile reveals a planted fault that no other profile reveals."""

from __future__ import annotations

import pytest

from pytest_fa.attention.data import FAULTS, PROFILES
from pytest_fa.features.selftest.faults import FAULTS as EXPECTED
from pytest_fa.judge.pipeline import run_case
from tests.factories import cpu_job
from tests.features.selftest.wrong_results import variants_in, wrong_results
from tests.tiers import nightly_after

VARIANTS = variants_in("python_data_faults")
TWIN = "twin_right_data"


def test_each_profile_has_a_fault() -> None:
    """Random data are a profile, too."""
    assert ["normal", *PROFILES] == [*FAULTS]
    assert {*VARIANTS} == {TWIN, *FAULTS.values()}


def test_the_twin_is_right() -> None:
    """It is right on all profiles, so that the source has no mistake but those that are planted."""
    assert [result.message for result in wrong_results(VARIANTS[TWIN])] == []


@pytest.mark.parametrize("mask", nightly_after(1, ["", "-causal"]))
@pytest.mark.parametrize("fault", FAULTS.values())
def test_a_fault_shows_on_its_own_profile_alone(fault: str, mask: str) -> None:
    """The check that must reject the kernel does; on all other data, the kernel is right."""
    for profile in FAULTS:
        data = "" if profile == "normal" else f"-data_{profile}"
        result = run_case(cpu_job(VARIANTS[fault], f"b1h2s113d64-fp16{mask}{data}-seed0", repeats=0))
        is_caught = FAULTS[profile] == fault
        assert (EXPECTED[fault].caught_by in result.caught_by) == is_caught, (profile, result.message)
        assert (result.outcome != "ok") == is_caught, (profile, result.message)

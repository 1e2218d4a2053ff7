"""What a measured time proves about the candidate's own clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
import torch

from pytest_fa.errors import Tampering
from pytest_fa.judge.clocks import measure as measure_module
from pytest_fa.judge.clocks.fresh_data import FreshData, Written
from pytest_fa.judge.clocks.measure import require_honest_clock
from pytest_fa.records.agreement import check_agreement
from pytest_fa.records.timing import OutsideTime, Timing
from tests.factories import speed

OUTSIDE = OutsideTime(median_us=140.0, precision=0.001, whole_us=140.0, calls=3000, proof_us=140.0)
CONTRADICTED = msgspec.structs.replace(speed(100.0), outside=OUTSIDE)


def test_clocks_that_contradict_each_other_are_proof_on_a_gpu_of_ones_own() -> None:
    """If nothing else runs on the GPU, a clock that is 29 % too short was tampered with."""
    with pytest.raises(Tampering, match="by the clock of its own process"):
        require_honest_clock(CONTRADICTED, shares_gpu=False)


def test_the_same_clocks_prove_nothing_on_a_shared_gpu() -> None:
    """Other processes' kernels may delay a sample, so the time is then not confirmed instead."""
    require_honest_clock(CONTRADICTED, shares_gpu=True)
    agreement = check_agreement("mine", "candidate", CONTRADICTED)
    assert agreement.valid is False
    assert agreement.reason.startswith("the judge's clock shows 140.00 us and the candidate's own clock 100.00 us")


@pytest.mark.parametrize(
    ("device", "times_us", "chosen_us", "left"),
    [
        ("cuda", (100.0, 1.0), 100.0, 1),
        ("cuda", (99.9, 100.1, 1.0), 100.1, 1),
        ("cuda", (99.0, 98.0, 99.5, 1.0), 99.5, 1),
        ("cpu", (99.0, 1.0), 99.0, 1),
    ],
)
def test_a_call_that_seems_shorter_than_its_period_is_timed_again(
    monkeypatch: pytest.MonkeyPatch, device: str, times_us: tuple[float, ...], chosen_us: float, left: int
) -> None:
    """Up to three times in all; the longest time counts.  On the CPU both times are of the same kind."""
    times = iter(times_us)

    def timed(_: FreshData) -> tuple[Timing, list[Written]]:
        us = next(times)
        return Timing("simulated", (us,), us, 1), []

    monkeypatch.setattr(measure_module, "call_time", timed)
    data = cast("FreshData", SimpleNamespace(candidate=SimpleNamespace(device=torch.device(device))))
    per_call, _ = measure_module._call_time(data, 100.0)
    assert (per_call.median_us, len(list(times))) == (chosen_us, left)

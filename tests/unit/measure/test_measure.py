"""What a measured time proves about the candidate's own clock."""

from __future__ import annotations

import msgspec
import pytest

from pytest_fa.errors import Tampering
from pytest_fa.measure.measure import require_honest_clock
from pytest_fa.records.agreement import check_agreement
from pytest_fa.records.timing import OutsideTime
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

"""Every way in which Nsight Compute fails is known by its own words."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from pytest_fa.profile.ncu_status import SENTENCES, last_error, read_status, unknown_metrics
from pytest_fa.records.tool_results import NsightStatus
from tests.factories import RECORDED

LOGS = sorted((RECORDED / "ncu").glob("*.log"))


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_a_recorded_log_has_its_status(path: Path) -> None:
    """What ncu wrote names the status, with the return code that ncu left with: 0 even where it profiled nothing."""
    return_code = 0 if path.stem in ("ok", "no-kernels") else 1
    assert path.stem == read_status(path.read_text(encoding="utf-8"), return_code)


@pytest.mark.parametrize("status", [each for each in get_args(NsightStatus) if each != "ok"])
def test_every_failure_has_a_sentence(status: NsightStatus) -> None:
    """No status leaves a user without words."""
    assert len(SENTENCES[status]) > 10


def test_the_counters_that_a_chip_lacks_are_named() -> None:
    """The error line names one of those asked for; the others stay."""
    log = (RECORDED / "ncu" / "bad-metric.log").read_text(encoding="utf-8")
    hmma = "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active"
    asked = ("sm__pipe_tensor_op_hmma_cycles_active_x.sum", hmma, "gpu__time_duration.sum")
    assert (hmma,) == unknown_metrics(log, asked)


def test_an_unknown_failure_is_quoted() -> None:
    """The error line without its mark; else the last line."""
    log = (RECORDED / "ncu" / "failed.log").read_text(encoding="utf-8")
    assert ("Unknown Error on device 0.", "odd", "it said nothing") == (
        last_error(log),
        last_error("one\nodd\n"),
        last_error(""),
    )

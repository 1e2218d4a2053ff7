"""Every kind of failure of Nsight Compute is recognised from its output."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from pytest_fa.features.ncu.ncu_status import SENTENCES, last_error, read_status, unknown_metrics
from pytest_fa.features.ncu.nsight_report import NsightStatus
from tests.factories import RECORDED

LOGS = sorted((RECORDED / "ncu").glob("*.log"))


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_a_recorded_log_has_its_status(path: Path) -> None:
    """Each recorded log gives its status.  The return code is 0 even if ncu profiled no kernel."""
    return_code = 0 if path.stem in ("ok", "no-kernels") else 1
    assert path.stem == read_status(path.read_text(encoding="utf-8"), return_code)


@pytest.mark.parametrize("status", [each for each in get_args(NsightStatus) if each != "ok"])
def test_every_failure_has_a_sentence(status: NsightStatus) -> None:
    """Every status has a sentence for the user."""
    assert len(SENTENCES[status]) > 10


def test_the_counters_that_a_chip_lacks_are_named() -> None:
    """Only the requested counter that ncu's error line names is unknown; counters with similar names are not."""
    log = (RECORDED / "ncu" / "bad-metric.log").read_text(encoding="utf-8")
    hmma = "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active"
    requested = ("sm__pipe_tensor_op_hmma_cycles_active_x.sum", hmma, "gpu__time_duration.sum")
    assert (hmma,) == unknown_metrics(log, requested)


def test_an_unknown_failure_is_quoted() -> None:
    """The message of an unknown failure is ncu's error line without its mark, else its last line."""
    log = (RECORDED / "ncu" / "failed.log").read_text(encoding="utf-8")
    assert ("Unknown Error on device 0.", "odd", "it printed nothing") == (
        last_error(log),
        last_error("one\nodd\n"),
        last_error(""),
    )

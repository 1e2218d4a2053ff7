"""When judge and variant share a process, because two processes cannot share memory."""

from __future__ import annotations

from typing import Any

from pytest_fa.host.client import Workers
from pytest_fa.records.outcome import Outcome
from pytest_fa.wire.jobs import CaseResult, PairedJob
from tests.factories import PYTHON_SOURCE
from tests.worker_jobs import JobOfSource


class LateSharing(Workers):
    """Workers whose jobs end one after the other as prepared."""

    def __init__(self, *results: CaseResult) -> None:
        super().__init__()
        self.results = list(results)

    def _run_in_worker(self, *_: object) -> Any:
        return self.results.pop(0)


def test_a_late_reason_is_not_accepted(job_of_source: JobOfSource) -> None:
    """Once a variant has run, missing shared memory fails the case: the variant could have caused it."""
    lacks = CaseResult(Outcome.FAILED, "no memory", (), lacks_sharing=True)
    right = CaseResult(Outcome.OK, "", ())
    job = job_of_source(PYTHON_SOURCE)
    late = LateSharing(right, lacks)
    assert (late.run(job), late.run(job), late.unprotected) == (right, lacks, "")
    early = LateSharing(lacks, right, right)
    results = [early.run(job), early.run(job)]
    assert [(result.outcome, result.unprotected) for result in results] == [("ok", "no memory")] * 2
    assert early.run_paired(PairedJob((), "cpu", "same_precision", 0)).message == "unprotected: no memory"

"""`python -m pytest_fa noise` with simulated processes."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from pytest_fa.features.gate import measure_noise
from pytest_fa.host.client import Workers
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.paired import SamplePlan
from pytest_fa.wire.jobs import PairBlocks, PairedJob, PairedResult


def test_processes_are_those_of_a_gate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first process plans the samples of all pairs, and each later one gets the plans of the one before."""
    jobs: list[PairedJob] = []

    class SimulatedProcesses(Workers):
        def run_paired(self, job: PairedJob) -> PairedResult:
            jobs.append(job)
            plan = SamplePlan((len(jobs), 5, 6), is_captured=True)
            pair = PairBlocks((0.01,) * 6, (0.0,) * 6, 0, 9.0, 10.0, "simulated", plan=plan)
            return PairedResult(Outcome.OK, "", (pair,) * len(job.arm_pairs))

    monkeypatch.setattr(measure_noise, "find_gpu", object)
    monkeypatch.setattr(measure_noise, "timing_lock", nullcontext)
    monkeypatch.setattr(measure_noise, "Workers", SimulatedProcesses)
    noise = measure_noise.measure_noise(tmp_path, 12, lambda _: None)
    assert noise.processes == len(jobs) == 12
    pairs = len(measure_noise.PAIRS)
    expected = [(SamplePlan((number, 5, 6), is_captured=True),) * pairs for number in range(1, 12)]
    assert [job.plans for job in jobs] == [(), *expected]

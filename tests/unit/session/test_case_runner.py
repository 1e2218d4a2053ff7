"""Which job a case becomes."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.variant import Device, Variant
from pytest_fa.records.environment import Gpu
from pytest_fa.session.builds import Builds
from pytest_fa.session.case_runner import CaseRunner
from pytest_fa.session.record_factory import RecordFactory
from pytest_fa.session.run_plan import RunPlan
from pytest_fa.worker.client import Workers
from pytest_fa.worker.jobs import CaseJob, CaseResult
from pytest_fa.worker.profiler_workers import ProfilerWorkers
from tests.factories import PYTHON_MANIFEST, PYTHON_SOURCE, WriteVariant, options
from tests.fake_nvml import pretend

pytestmark = pytest.mark.usefixtures("fresh_gpu")

CASE = parse_case("b1h2s64d64-fp16-seed0")
H200 = Gpu("NVIDIA H200", "GPU-aaaa", (9, 0), "580.1", "13.1")


class KeepsJobs(Workers):
    """Keeps the jobs and runs none."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: list[CaseJob] = []

    def run(self, job: CaseJob) -> CaseResult:
        """Keep the job."""
        self.jobs.append(job)
        return CaseResult("ok", "", ())


@pytest.fixture
def variant(write_variant: WriteVariant, tmp_path: Path) -> Variant:
    """A variant in Python."""
    folder = write_variant("mine", manifest=PYTHON_MANIFEST, **{"entry.py": PYTHON_SOURCE})
    (variant,) = read_manifest(folder / "variant.yaml", tmp_path / "kernels")
    return variant


@pytest.mark.parametrize(
    ("gpus", "others", "selftest", "expected"),
    [
        ([H200], ("4711 train.py",), False, ("cuda", True)),
        ([H200], (), False, ("cuda", False)),
        ([], ("4711 train.py",), False, ("cpu", False)),
        ([H200], ("4711 train.py",), True, ("cuda", False)),
    ],
    ids=["shared", "not shared", "on the CPU", "in the self-test"],
)
def test_a_job_says_whether_others_use_the_gpu(  # a parameter for each of its causes
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variant: Variant,
    gpus: list[Gpu],
    others: tuple[str, ...],
    expected: tuple[Device, bool],
    *,
    selftest: bool,
) -> None:
    """Clocks that contradict each other then prove nothing, except in the self-test, whose exploits must be blamed."""
    pretend(monkeypatch, *gpus)
    run_options = options(tmp_path, selftest=selftest)
    workers = KeepsJobs()
    builds = Builds(run_options, RunPlan(run_options))
    runner = CaseRunner(run_options, builds, RecordFactory(run_options), workers, ProfilerWorkers())
    runner.other_gpu_processes = others
    runner.run(variant, CASE, "correct")
    (job,) = workers.jobs
    assert (job.device, job.shares_gpu) == expected

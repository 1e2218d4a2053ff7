"""Which job a case becomes."""

from __future__ import annotations

import fcntl
from pathlib import Path

import msgspec
import pytest

from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.variant import Device, Role, Variant
from pytest_fa.features.selftest.plugin import SelftestOptions
from pytest_fa.host import timing_lock
from pytest_fa.host.client import Workers
from pytest_fa.host.profiler_workers import ProfilerWorkers
from pytest_fa.records.environment import Gpu
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import RecordKind
from pytest_fa.session.builds import Builds
from pytest_fa.session.case_runner import CaseRunner
from pytest_fa.session.record_factory import RecordFactory
from pytest_fa.session.run_plan import RunPlan
from pytest_fa.wire.jobs import CaseJob, CaseResult
from tests.factories import PYTHON_MANIFEST, PYTHON_SOURCE, WriteVariant, options
from tests.fake_nvml import pretend

pytestmark = pytest.mark.usefixtures("fresh_gpu")

CASE = parse_case("b1h2s64d64-fp16-seed0")
H200 = Gpu("NVIDIA H200", "GPU-aaaa", (9, 0), "580.1", "13.1")


class KeepsJobs(Workers):
    """Keeps the jobs and runs none."""

    def __init__(self, *results: CaseResult) -> None:
        super().__init__()
        self.jobs: list[CaseJob] = []
        self.locks: list[str] = []  # how the GPU's lock is held meanwhile
        self.starts: list[str] = []
        self.ends = 0
        self._results = list(results)

    def run(self, job: CaseJob) -> CaseResult:
        """Keep the job, and return the next result."""
        self.jobs.append(job)
        self.locks.append(state_of(timing_lock.SHARED_FOLDERS[0]))
        return self._results.pop(0) if self._results else CaseResult(Outcome.OK, "", ())

    def start_processes(self, job: CaseJob) -> None:
        """Keep how the GPU's lock is held meanwhile."""
        assert job.time
        self.starts.append(state_of(timing_lock.SHARED_FOLDERS[0]))

    def end_worker(self) -> None:
        """Count how often the process of the candidate is ended."""
        self.ends += 1


def state_of(folder: Path) -> str:
    """How the lock of the GPU is held: alone, shared, or not at all."""
    for path in folder.glob(f"pytest-fa-*-{H200.uuid}.sharing"):
        with path.open("rb") as stream:
            for state, operation in (("alone", fcntl.LOCK_SH), ("shared", fcntl.LOCK_EX)):
                try:
                    fcntl.flock(stream, operation | fcntl.LOCK_NB)
                except BlockingIOError:
                    return state
    return "free"


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
    monkeypatch.setattr("pytest_fa.host.timing_lock.SHARED_FOLDERS", (tmp_path,))  # where locks are
    run_options = options(tmp_path, parts=(SelftestOptions(),) if selftest else ())
    workers = KeepsJobs()
    builds = Builds(run_options, RunPlan(run_options))
    runner = CaseRunner(run_options, builds, RecordFactory(run_options), workers, ProfilerWorkers())
    runner.other_gpu_processes = others
    runner.run(variant, CASE, "correct")
    (job,) = workers.jobs
    assert (job.device, job.shares_gpu) == expected


@pytest.mark.parametrize(
    ("gpus", "kind", "selftest", "is_checked_first", "expected"),
    [
        ([H200], "correct", False, False, ["shared"]),
        ([H200], "speed", False, False, ["alone"]),
        ([H200], "speed", True, False, ["alone"]),
        ([H200], "speed", True, True, ["shared", "alone"]),
        ([H200], "correct", True, True, ["shared"]),
        ([], "correct", False, False, ["free"]),
        ([], "speed", True, True, ["free"]),
    ],
)
def test_a_timed_job_has_the_gpu_to_itself(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variant: Variant,
    gpus: list[Gpu],
    kind: RecordKind,
    expected: list[str],
    *,
    selftest: bool,
    is_checked_first: bool,
) -> None:
    """Other workers of pytest-xdist on the same GPU check side by side, but not while one of them times.

    A variant may be checked before it has the GPU to itself.
    """
    pretend(monkeypatch, *gpus)
    monkeypatch.setattr("pytest_fa.host.timing_lock.SHARED_FOLDERS", (tmp_path,))
    run_options = options(tmp_path, parts=(SelftestOptions(),) if selftest else ())
    workers, profiler = KeepsJobs(), ProfilerWorkers()
    monkeypatch.setattr(profiler, "wait_until_prepared", lambda: None)
    runner = CaseRunner(
        run_options, Builds(run_options, RunPlan(run_options)), RecordFactory(run_options), workers, profiler
    )
    runner.run(variant, CASE, kind, is_checked_first=is_checked_first)
    assert workers.locks == expected
    assert workers.starts == ["free"] * expected.count("alone")  # the processes of a timed job start before it
    assert [job.time for job in workers.jobs] == [*[False] * (len(expected) - 1), kind == "speed"]
    assert not workers.jobs[-1].without_attention or len(expected) == 1  # the earlier check looked for delegation


def test_a_wrong_variant_that_is_checked_first_never_has_the_gpu_to_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variant: Variant
) -> None:
    """Its check decides, so that no other check waits for its times."""
    pretend(monkeypatch, H200)
    monkeypatch.setattr("pytest_fa.host.timing_lock.SHARED_FOLDERS", (tmp_path,))
    run_options = options(tmp_path, parts=(SelftestOptions(),))
    workers = KeepsJobs(CaseResult(Outcome.WRONG, "max error", (), ("max",)))
    builds = Builds(run_options, RunPlan(run_options))
    runner = CaseRunner(run_options, builds, RecordFactory(run_options), workers, ProfilerWorkers())

    record = runner.run(variant, CASE, "speed", is_checked_first=True)

    assert (record.outcome, record.caught_by, workers.locks) == ("wrong", ("max",), ["shared"])


@pytest.mark.parametrize(
    ("role", "device", "expected"), [("wrong", "cuda", 15.0), ("candidate", "cuda", 30.0), ("wrong", "cpu", 30.0)]
)
def test_a_wrong_kernel_that_hangs_is_ended_sooner(
    tmp_path: Path, variant: Variant, role: Role, device: Device, expected: float
) -> None:
    """Others wait for its end on a GPU; a right kernel of the self-test may compile."""
    run_options = options(tmp_path, parts=(SelftestOptions(),))
    builds = Builds(run_options, RunPlan(run_options))
    runner = CaseRunner(run_options, builds, RecordFactory(run_options), KeepsJobs(), ProfilerWorkers())
    assert runner.watchdog_seconds(msgspec.structs.replace(variant, role=role), device) == expected


def lacking(outcome: Outcome = Outcome.FAILED) -> CaseResult:
    """A result for which the GPU had too little memory."""
    return CaseResult(outcome, "CUDA out of memory", (), lacks_memory=True)


@pytest.mark.parametrize(
    ("kind", "worker", "others", "expected"),
    [
        ("correct", "gw0", (), ["shared", "alone"]),
        ("property", "gw0", (), ["shared", "alone"]),
        ("correct", None, ("4711 train.py",), ["shared", "alone"]),
        ("correct", None, (), ["shared"]),
        ("speed", "gw0", (), ["alone"]),
    ],
    ids=["a worker of many", "a property", "others on the GPU", "no others", "timed"],
)
def test_a_check_without_memory_is_repeated_alone(  # a parameter for each of its causes
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variant: Variant,
    kind: RecordKind,
    worker: str | None,
    others: tuple[str, ...],
    expected: list[str],
) -> None:
    """If others may have used the GPU's memory, only a second result counts, from a new process, without other checks.

    A timed job already has the GPU to itself, and without others, the variant itself used up the memory.
    """
    pretend(monkeypatch, H200)
    monkeypatch.setattr("pytest_fa.host.timing_lock.SHARED_FOLDERS", (tmp_path,))
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    if worker:
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
    run_options = options(tmp_path)
    workers, profiler = KeepsJobs(lacking()), ProfilerWorkers()
    monkeypatch.setattr(profiler, "wait_until_prepared", lambda: None)
    builds = Builds(run_options, RunPlan(run_options))
    runner = CaseRunner(run_options, builds, RecordFactory(run_options), workers, profiler)
    runner.other_gpu_processes = others

    record = runner.run(variant, CASE, kind)

    is_repeated = len(expected) > 1
    assert (record.outcome, workers.locks, workers.ends) == ("ok" if is_repeated else "failed", expected, is_repeated)
    assert state_of(tmp_path) == "free"


def test_a_check_is_repeated_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variant: Variant) -> None:
    """If the memory does not suffice for the check alone, either, that is the result."""
    pretend(monkeypatch, H200)
    monkeypatch.setattr("pytest_fa.host.timing_lock.SHARED_FOLDERS", (tmp_path,))
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    run_options = options(tmp_path)
    workers = KeepsJobs(lacking(), lacking(Outcome.DEVICE_ERROR))
    builds = Builds(run_options, RunPlan(run_options))
    runner = CaseRunner(run_options, builds, RecordFactory(run_options), workers, ProfilerWorkers())

    record = runner.run(variant, CASE, "correct")

    assert (record.outcome, len(workers.jobs)) == ("device_error", 2)

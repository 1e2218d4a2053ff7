"""The bench of a real sweep: what is built is compared first, and a time that is not clean is none."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.catalog.case import Case, parse_case
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.properties import properties_of
from pytest_fa.catalog.variant import Variant
from pytest_fa.features.sweep import kernel_bench
from pytest_fa.features.sweep.kernel_bench import KernelBench
from pytest_fa.features.sweep.search import BuiltPoint
from pytest_fa.features.sweep.sweep_space import Point, Sweep
from pytest_fa.features.sweep.trial_result import TrialOutcome, TrialResult
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record
from pytest_fa.session.refusals import CannotRun
from pytest_fa.session.session import Session
from pytest_fa.wire.jobs import Arm, PairBlocks, PairedJob, PairedResult
from tests.factories import CUDA_SOURCE, SHAPE, options, record, variant

CASE = parse_case(f"{SHAPE}-seed0")
OTHER = parse_case("b1h1s64d64-fp16-seed0")


class Builds:
    """Builds that exist; `added` are the names of those that were made sure of."""

    def __init__(self) -> None:
        self.added: list[str] = []
        self.say = lambda _: None

    def add(self, each: Variant) -> None:
        """Make sure of one."""
        self.added.append(each.name)

    def arm(self, each: Variant) -> Arm:
        """An arm, whose configuration must have been added."""
        assert each.name in ("tuned", *self.added)
        return Arm(each, "library.so")


@pytest.mark.nightly
@pytest.mark.needs_nvcc
def test_a_build_decides_before_any_run(tmp_path: Path) -> None:
    """A configuration is compared with the parent's machine code and with the limits; a compile error is its end."""
    parent = built_parent(tmp_path)
    session = Session(options(tmp_path, cache=tmp_path / "cache"))
    session.builds.needed = {parent.name: parent}
    bench = KernelBench(session, parent, (CASE,), (), lambda _: None)
    assert bench.build({"BLOCK": 64, "UNUSED": 0}) == TrialResult(TrialOutcome.SAME_CODE, "it is the parent itself")
    same, other = bench.build({"BLOCK": 64, "UNUSED": 1}), bench.build({"BLOCK": 32, "UNUSED": 0})
    assert isinstance(same, BuiltPoint)
    assert isinstance(other, BuiltPoint)
    assert (bench.parent_code, True) == (same.code, other.code != same.code)
    assert other.counters["registers_per_thread"] > 0
    broken = bench.build({"BLOCK": "nothing", "UNUSED": 0})
    assert isinstance(broken, TrialResult)
    assert "not_built" == broken.outcome
    strict = msgspec.structs.replace(parent, limits=msgspec.structs.replace(parent.limits, registers_per_thread=1))
    refused = KernelBench(session, strict, (CASE,), (), lambda _: None).build({"BLOCK": 32, "UNUSED": 0})
    assert isinstance(refused, TrialResult)
    assert ("over_limit", True) == (refused.outcome, "registers_per_thread is" in refused.reason)


@pytest.mark.nightly
@pytest.mark.needs_nvcc
def test_a_build_of_another_process_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may time a finalist whose trial another one ran: it takes the build from the cache."""
    parent = built_parent(tmp_path)
    cache = tmp_path / "cache"
    sessions = [Session(options(tmp_path, cache=cache)) for _ in range(2)]
    for session in sessions:
        session.builds.needed = {parent.name: parent}
    point: Point = {"BLOCK": 32, "UNUSED": 0}
    built = KernelBench(sessions[0], parent, (CASE,), (), lambda _: None).build(point)
    assert isinstance(built, BuiltPoint)
    workers = Workers(PairedResult(Outcome.OK, "", (blocks(outside_us=None),)))
    monkeypatch.setattr(kernel_bench, "device_of", lambda _: "cuda")
    monkeypatch.setattr(kernel_bench, "timing_lock", lambda _: nullcontext())  # which another run may hold
    monkeypatch.setattr(sessions[1].runner, "workers", workers)
    timed = KernelBench(sessions[1], parent, (CASE,), (), lambda _: None).measure(point)
    ((pair,),) = [job.arm_pairs for job in workers.jobs]
    assert ("right", f"{parent.name}@BLOCK=32@UNUSED=0") == (timed.outcome, pair.candidate.variant.name)
    assert Path(pair.candidate.library or "").is_file()
    assert pair.candidate.library != pair.baseline.library


def built_parent(folder: Path) -> Variant:
    """A CUDA variant with two defines, one of which changes its machine code."""
    home = folder / "kernels" / "zero"
    home.mkdir(parents=True)
    (home / "kernel.cu").write_text(CUDA_SOURCE)
    (home / "variant.yaml").write_text("defines: {BLOCK: 64, UNUSED: 0}\narch: [sm_90a]\n")
    (parent,) = read_manifest(home / "variant.yaml", folder / "kernels")
    assert isinstance(parent, Variant)
    return parent


class Workers:
    """Returns one result for each process, and keeps its job."""

    def __init__(self, result: PairedResult) -> None:
        self.result, self.jobs = result, list[PairedJob]()

    def run_paired(self, job: PairedJob) -> PairedResult:
        """The next result."""
        self.jobs.append(job)
        return self.result


def blocks(**changes: Any) -> PairBlocks:
    """What one process measured: the configuration takes 0.9 times the parent's time."""
    ratio = math.log(0.9)
    plain = PairBlocks((ratio, ratio), (0.0, 0.0), 0, 9.0, 10.0, "graphs", None, (9.0, 10.0))
    return msgspec.structs.replace(plain, **changes)


def bench_with(
    monkeypatch: pytest.MonkeyPatch,
    workers: Workers,
    unsearched: tuple[Case, ...] = (),
    require_unchanged: Callable[[], object] = lambda: None,
) -> KernelBench:
    """A bench on a GPU, whose processes are these workers."""
    monkeypatch.setattr(kernel_bench, "device_of", lambda _: "cuda")
    monkeypatch.setattr(kernel_bench, "timing_lock", lambda _: nullcontext())  # which another run may hold
    parent = msgspec.structs.replace(variant("tuned"), defines={"M": 1}, feature_keys={"sweep": Sweep({"M": (1, 2)})})
    runner = SimpleNamespace(
        workers=workers,
        watchdog_seconds=lambda *_: 10.0,
        tolerance_of=lambda _: "same_precision",
        shares_gpu=lambda _: True,
    )
    session = cast("Session", SimpleNamespace(runner=runner, builds=Builds()))
    return KernelBench(session, parent, (CASE,), unsearched, lambda _: None, require_unchanged)


def measured(monkeypatch: pytest.MonkeyPatch, result: PairedResult) -> tuple[TrialResult, PairedJob]:
    """What the bench makes of one process, and its job."""
    workers = Workers(result)
    return bench_with(monkeypatch, workers).measure({"M": 2}), workers.jobs[0]


def test_a_time_is_a_ratio_of_paired_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configuration and parent are timed in one job, and the result is the mean log-ratio of its blocks."""
    result, job = measured(monkeypatch, PairedResult(Outcome.OK, "", (blocks(),)))
    (pair,) = job.arm_pairs
    assert ("tuned@M=2", "tuned") == (pair.candidate.variant.name, pair.baseline.variant.name)
    assert job.shares_gpu
    assert "right" == result.outcome
    assert math.log(0.9) == pytest.approx(result.log_ratio)
    assert (9.0, 10.0) == (result.shapes[SHAPE].candidate_us, result.shapes[SHAPE].parent_us)


@pytest.mark.parametrize(
    ("result", "outcome", "reason"),
    [
        (PairedResult(Outcome.WRONG, "max error in timed calls", ()), Outcome.WRONG, "max error"),
        (PairedResult(Outcome.CHEAT, "functions were replaced", ()), Outcome.WRONG, "functions"),
        (PairedResult(Outcome.HUNG, "no answer", ()), Outcome.HUNG, "no answer"),
        (PairedResult(Outcome.DEVICE_ERROR, "context lost", ()), "crashed", "context lost"),
        (PairedResult(Outcome.INCONCLUSIVE, "cannot capture", ()), "not_timed", "cannot capture"),
        (PairedResult(Outcome.OK, "", (blocks(dropped=1),)), "not_timed", "1 of 3 blocks were dropped"),
        (PairedResult(Outcome.OK, "", (blocks(blocks=(), dropped=4),)), "not_timed", "4 of 4 blocks were dropped"),
        (PairedResult(Outcome.OK, "", (blocks(outside_us=(10.0, 10.0)),)), "not_timed", "another ratio, by +11.1 %"),
    ],
)
def test_what_is_not_clean_has_no_time(
    monkeypatch: pytest.MonkeyPatch, result: PairedResult, outcome: str, reason: str
) -> None:
    """A process that failed, was slowed down, or whose clocks disagree gives an outcome and a reason, and no ratio."""
    trial, _ = measured(monkeypatch, result)
    assert (outcome, None, True) == (trial.outcome, trial.log_ratio, reason in trial.reason)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"unprotected": "CUDA IPC is missing"}, "CUDA IPC"),
        ({"outcome": "build_changed", "message": "changed"}, "changed"),
    ],
)
def test_a_judged_case_that_says_nothing_ends_the_trial(changes: dict[str, Any], complaint: str) -> None:
    """A run that is not protected, or whose files changed, is neither right nor wrong."""
    parent = msgspec.structs.replace(variant("tuned"), defines={"M": 1})
    judged, builds = msgspec.structs.replace(record("tuned"), **changes), Builds()
    session = cast("Session", SimpleNamespace(runner=SimpleNamespace(run=lambda *_: judged), builds=builds))
    with pytest.raises(CannotRun, match=complaint):
        KernelBench(session, parent, (CASE,), (), lambda _: None).check_searched({"M": 2})
    assert builds.added == ["tuned@M=2"]


def test_a_changed_file_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a file changed during a job, the trial is given up, because nothing was learned about the configuration."""
    with pytest.raises(CannotRun, match="changed"):
        measured(monkeypatch, PairedResult(Outcome.BUILD_CHANGED, "kernel.cu changed", ()))


def test_a_gate_has_the_build_of_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate makes sure of the build before it asks for an arm, and its record says how to ask again."""
    bench = bench_with(monkeypatch, Workers(PairedResult(Outcome.OK, "", (blocks(),))))
    seen: list[str] = []

    def decide(_: object, each: Variant, *__: object) -> Record:
        seen.append(bench._builds.arm(each).variant.name)
        return msgspec.structs.replace(record("tuned"), outcome=Outcome.INCONCLUSIVE, message="the machine is noisy")

    monkeypatch.setattr(kernel_bench, "decide_gate", decide)
    monkeypatch.setattr(kernel_bench, "rerun_command", lambda *_: "pytest")
    bench._session = cast("Session", SimpleNamespace(options=None))
    answer = bench.gate({"M": 2})
    assert (["tuned@M=2"], "inconclusive", "the machine is noisy") == (seen, answer.verdict, answer.reason)
    assert bench.gate_record is not None
    assert bench.gate_record.rerun_command.startswith("pytest --fa-gate=1 --fa-gate-baseline=tuned ")


def test_an_edit_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that was saved before a finalist is timed ends that, and nothing is built of it."""

    def require_unchanged() -> None:
        raise CannotRun("changed during the sweep")

    bench = bench_with(monkeypatch, Workers(PairedResult(Outcome.OK, "", (blocks(),))), (OTHER,), require_unchanged)
    for step in (bench.check_searched, bench.measure, bench.check_unsearched, bench.measure_unsearched, bench.gate):
        with pytest.raises(CannotRun, match="changed during the sweep"):
            step({"M": 2})
    assert not cast("Builds", bench._builds).added


def test_an_edit_while_it_is_timed_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that is saved while a process times it gives no time, and no process begins after it."""
    workers = Workers(PairedResult(Outcome.OK, "", (blocks(),)))

    def require_unchanged() -> None:
        if workers.jobs:
            raise CannotRun("changed during the sweep")

    bench = bench_with(monkeypatch, workers, (), require_unchanged)
    for _ in range(2):
        with pytest.raises(CannotRun, match="changed during the sweep"):
            bench.measure({"M": 2})
    assert 1 == len(workers.jobs)


@pytest.mark.parametrize(
    ("outcome", "expected"), [(Outcome.WRONG, "wrong"), (Outcome.CHEAT, "wrong"), (Outcome.HUNG, "hung")]
)
def test_a_problem_where_it_was_not_searched_is_returned(
    monkeypatch: pytest.MonkeyPatch, outcome: Outcome, expected: str, snapshot: SnapshotAssertion
) -> None:
    """What the timed calls at unsearched shapes did wrong is a problem of the configuration."""
    bench = bench_with(monkeypatch, Workers(PairedResult(outcome, "in timed calls", ())), (OTHER,))
    problem = bench.measure_unsearched({"M": 2})
    assert isinstance(problem, TrialResult)
    assert expected == problem.outcome
    assert snapshot == problem.reason


def test_times_where_it_was_not_searched_are_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without a problem gives the ratio of each unsearched shape; a changed file gives none."""
    bench = bench_with(monkeypatch, Workers(PairedResult(Outcome.OK, "", (blocks(),))), (OTHER,))
    ratios = bench.measure_unsearched({"M": 2})
    assert isinstance(ratios, dict)
    assert {OTHER.shape_id: pytest.approx(math.log(0.9))} == ratios
    bench = bench_with(monkeypatch, Workers(PairedResult(Outcome.BUILD_CHANGED, "kernel.cu changed", ())), (OTHER,))
    with pytest.raises(CannotRun, match=r"kernel\.cu changed"):
        bench.measure_unsearched({"M": 2})


def test_a_configuration_is_judged_in_every_property() -> None:
    """What is wrong only in a property is found, also if the run names its cases and so has no tests of properties."""
    parent = msgspec.structs.replace(variant("tuned"), defines={"M": 1})
    names, builds = properties_of(parent), Builds()

    def check(each: Variant, name: str) -> Record:
        assert each.name in builds.added
        outcome: Outcome = Outcome.WRONG if name == names[-1] else Outcome.OK
        return msgspec.structs.replace(record("tuned"), outcome=outcome, message="max error", case=None, id=name)

    run_plan = SimpleNamespace(plan=SimpleNamespace(properties=[]))
    runner = SimpleNamespace(check_property=check)
    session = cast("Session", SimpleNamespace(runner=runner, builds=builds, run_plan=run_plan))
    checked, problem = KernelBench(session, parent, (CASE,), (), lambda _: None).check_unsearched({"M": 2})
    assert problem is not None
    assert (len(names) - 1, "wrong", True) == (checked, problem.outcome, problem.reason.startswith(names[-1]))

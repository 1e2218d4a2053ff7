"""`run_paired` on the CPU: one process of a gate, its blocks, and the order of the arms in its result."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
import torch

from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.discover import BUILTIN_ROOT
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.errors import Tampering, WrongResult
from pytest_fa.gpu.graphs import CannotCapture
from pytest_fa.gpu.inputs import make_inputs
from pytest_fa.judge import paired_process as gate_process
from pytest_fa.judge.candidate import Candidate
from pytest_fa.judge.clocks.arm_timer import ArmTimer
from pytest_fa.judge.clocks.paired_timing import prepare_arms
from pytest_fa.judge.paired_process import DISTURBED, run_paired
from pytest_fa.judge.truth_store import TruthStore
from pytest_fa.records.arm_orders import recorded_order, setup_order
from pytest_fa.records.paired import PARTS, SamplePlan
from pytest_fa.wire.jobs import Arm, ArmPair, PairedJob, PairedResult, decode_answer, encode
from tests.factories import PYTHON_MANIFEST, PYTHON_SOURCE, WriteVariant

SEED = 1234
CASE = parse_case("b1h2s64d64-fp16-seed0")
ALLOCATED: list[str] = []


class RecordingTimer(ArmTimer):
    """An arm that takes 2 us, or 3 us in the role of the candidate, and notes when its buffers were allocated."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.letter = "ABC"[setup_order(3, SEED)[len(ALLOCATED)]]
        ALLOCATED.append(self.letter)

    def sample_us(self) -> float:
        """Call the kernel on every set of buffers, and return the prepared time."""
        super().sample_us()
        self.samples_us[-1] = 3.0 if self.letter == "A" else 2.0
        return self.samples_us[-1]


@pytest.fixture
def job(write_variant: WriteVariant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PairedJob:
    """One process whose candidate and baseline are the same variant; its samples are short."""
    ALLOCATED.clear()
    folder = write_variant("mine", manifest=PYTHON_MANIFEST, **{"entry.py": PYTHON_SOURCE})
    (variant,) = read_manifest(folder / "variant.yaml", tmp_path / "kernels")
    monkeypatch.setattr(gate_process, "ArmTimer", RecordingTimer)
    monkeypatch.setattr("pytest_fa.judge.clocks.arm_timer.CPU_SAMPLE_US", 200.0)
    arm = Arm(variant, None)
    return PairedJob((ArmPair(CASE, arm, arm),), "cpu", "same_precision", SEED)


@pytest.fixture
def result(job: PairedJob) -> PairedResult:
    """The result of that process."""
    return run_paired(job)


@pytest.mark.parametrize("changed", ["candidate", "baseline"])
def test_a_changed_library_ends_the_process(write_variant: WriteVariant, tmp_path: Path, changed: str) -> None:
    """If the library of one arm is not the one of its build, nothing is measured, and the outcome says so."""
    folder = write_variant("mine", manifest=PYTHON_MANIFEST, **{"entry.py": PYTHON_SOURCE})
    (variant,) = read_manifest(folder / "variant.yaml", tmp_path / "kernels")
    library = tmp_path / "kernel.so"
    library.write_bytes(b"a library")
    arms = {name: Arm(variant, None) for name in ("candidate", "baseline")}
    arms[changed] = Arm(variant, str(library), {"kernel.so": "0" * 64})
    result = run_paired(PairedJob((ArmPair(CASE, **arms),), "cpu", "same_precision", SEED))
    assert (result.outcome, result.arm_pairs) == ("build_changed", ())
    assert result.message.startswith(f"{library} has changed since it was built")


@pytest.mark.parametrize("name", ["paired_process.make_inputs", "truth_store.truth_of"])
def test_a_full_gpu_ends_no_gate_that_the_store_filled(
    write_variant: WriteVariant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Inputs and truth of a gate get the memory that the truths of earlier jobs have filled."""
    folder = write_variant("mine", manifest=PYTHON_MANIFEST, **{"entry.py": PYTHON_SOURCE})
    (variant,) = read_manifest(folder / "variant.yaml", tmp_path / "kernels")
    store, real = TruthStore(), pkgutil.resolve_name(f"pytest_fa.judge.{name}")
    store.truth_of("attention", make_inputs(CASE, torch.device("cpu")), (), "same_precision")

    def needs_memory(*arguments: object) -> object:
        if store._kept:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*arguments)

    monkeypatch.setattr(f"pytest_fa.judge.{name}", needs_memory)
    monkeypatch.setattr("pytest_fa.judge.clocks.arm_timer.CPU_SAMPLE_US", 200.0)
    arm = Arm(variant, None)
    result = run_paired(PairedJob((ArmPair(CASE, arm, arm),), "cpu", "same_precision", SEED), truths=store)
    assert (result.outcome, len(store._kept)) == ("ok", 0), result.message


@pytest.mark.parametrize(
    ("problem", "shares_gpu", "outcome"),
    [
        (Tampering("clocks", "3 us and 4 us"), False, "cheat"),
        (Tampering("clocks", "3 us and 4 us"), True, "inconclusive"),
        (WrongResult("clocks", "3 us and 4 us"), False, "wrong"),
        (WrongResult("clocks", "3 us and 4 us"), True, "inconclusive"),
        (WrongResult("proof sample", "3 us and 4 us"), True, "wrong"),
        (WrongResult(("timed outputs", "clocks"), "a wrong output"), True, "wrong"),
        (Tampering("functions", "a replaced clock"), True, "cheat"),
    ],
)
def test_other_processes_on_the_gpu_may_delay_one_clock(
    job: PairedJob, monkeypatch: pytest.MonkeyPatch, problem: WrongResult, outcome: str, *, shares_gpu: bool
) -> None:
    """Then clocks that contradict each other give no verdict.  Everything else has the outcome that it always has."""

    def require_one_time(_: ArmTimer) -> None:
        raise problem

    monkeypatch.setattr(RecordingTimer, "require_one_time", require_one_time)
    result = run_paired(msgspec.structs.replace(job, shares_gpu=shares_gpu))
    advice = DISTURBED if outcome == "inconclusive" else ""
    assert (result.outcome, result.message) == (outcome, f"{problem}{advice}")


def test_the_result_has_the_order_that_was_used(result: PairedResult) -> None:
    """Buffers are allocated in the recorded order; the orders are those of the job's seed, and survive as JSON."""
    (pair,) = result.arm_pairs
    assert pair.order is not None
    assert pair.order == recorded_order(3, SEED)
    assert pair.order.setup == "".join(ALLOCATED)
    assert decode_answer(encode(result)) == result


def test_each_block_has_one_value(result: PairedResult) -> None:
    """Six blocks have the log-ratio of the prepared times, and the A/A control has 0."""
    (pair,) = result.arm_pairs
    assert pair.blocks == pytest.approx([0.405465] * 6, abs=1e-6)
    assert pair.control == pytest.approx([0.0] * 6, abs=1e-12)
    assert (pair.candidate_us, pair.baseline_us, pair.dropped) == (3.0, 2.0, 0)


def test_the_parts_are_timed(result: PairedResult) -> None:
    """A process says how long each of its parts took; the start of the processes is the client's to time."""
    assert set(result.seconds) == set(PARTS) - {"processes"}
    assert all(seconds >= 0 for seconds in result.seconds.values())
    assert result.seconds["samples"] > 0


def test_a_later_process_follows_the_plan(
    job: PairedJob, result: PairedResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the plan of an earlier process, no time is estimated, and samples have the same number of calls."""
    plan = SamplePlan((90, 100, 110), is_captured=False)  # of 2 us, where 200 us are intended
    assert result.arm_pairs[0].plan is not None
    monkeypatch.setattr(ArmTimer, "estimate_us", None)  # it cannot be called
    ALLOCATED.clear()
    later = run_paired(msgspec.structs.replace(job, plans=(plan,), seed=SEED + 6))  # the same order of set-up
    assert (later.outcome, later.arm_pairs[0].plan) == ("ok", plan), later.message
    assert later.arm_pairs[0].method.startswith("wall clock of 90 calls")
    assert len(later.arm_pairs[0].blocks) == 6


def test_the_plan_of_a_disturbed_process_is_made_anew(job: PairedJob) -> None:
    """If samples of an earlier process's plan are far too short, this process plans its own."""
    plan = SamplePlan((3, 4, 5), is_captured=False)
    result = run_paired(msgspec.structs.replace(job, plans=(plan,), seed=SEED + 6))
    assert result.outcome == "ok", result.message
    (pair,) = result.arm_pairs
    assert pair.plan is not None
    assert len(set(pair.plan.calls)) == 1  # on the CPU, a new plan gives all arms the same number of calls
    assert len(pair.blocks) == 6


class PlannedArm:
    """An arm on a GPU whose calls take 2 ms and of which only the first process could capture a graph."""

    is_cpu = False

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.plan = (0, False)

    def follow(self, calls: int, *, graph: bool) -> None:
        """Refuse a graph."""
        self.steps.append(f"follow {calls} {graph}")
        raise CannotCapture("it waits")

    def estimate_us(self) -> float:
        """A call takes 2 ms."""
        self.steps.append("estimate")
        return 2000.0

    def capture(self, _: float) -> None:
        """Refuse a graph."""
        raise CannotCapture("it waits")

    def plan_eager(self, estimate_us: float) -> None:
        """Plan samples without a graph."""
        self.plan = (round(10_000 / estimate_us), False)

    def settle(self) -> float:
        """A call takes 2 ms."""
        return 2000.0


def test_a_plan_that_cannot_be_followed_is_made_anew() -> None:
    """If a graph of the earlier process cannot be captured again, all arms are planned by their time."""
    arms = (PlannedArm(), PlannedArm(), PlannedArm())
    plan = prepare_arms(cast("tuple[ArmTimer, ArmTimer, ArmTimer]", arms), 0, SamplePlan((7, 8, 9), is_captured=True))
    assert plan == SamplePlan((5, 5, 5), is_captured=False)
    assert [arm.steps for arm in arms] == [["follow 7 True", "estimate"], ["estimate"], ["estimate"]]


class SettledArm(ArmTimer):
    """An arm on a GPU whose calls take `call_us`, and which counts how often it is planned."""

    def __init__(self, call_us: float) -> None:
        self.is_cpu, self._graph, self.call_us, self.planned = False, True, call_us, 0

    def follow(self, calls: int, *, graph: bool) -> None:
        """Follow a plan."""
        self._calls, self._graph = calls, graph

    def estimate_us(self) -> float:
        """The time of a call."""
        return self.call_us

    def capture(self, estimate_us: float) -> None:
        """Plan anew."""
        self.planned += 1
        self._calls = self._calls_of_sample(estimate_us)

    def settle(self) -> float:
        """The time of a call."""
        return self.call_us


@pytest.mark.parametrize(
    ("call_us", "calls", "expected"),
    [
        (10.0, 500, 500),
        (10.0, 499, 1000),
        (10.0, 2000, 2000),
        (10.0, 2001, 1000),
        (0.5, 6000, 6000),  # 3 ms, and no more calls are allowed
        (30_000.0, 1, 1),  # 30 ms, and no fewer calls are possible
    ],
)
def test_a_sample_of_the_wrong_length_is_planned_anew(call_us: float, calls: int, expected: int) -> None:
    """Outside of 5 to 20 ms, a later process plans all arms anew, unless another plan would be the same."""
    others = SettledArm(100.0), SettledArm(100.0)
    arm = SettledArm(call_us)
    plan = prepare_arms((arm, *others), 0, SamplePlan((calls, 100, 100), is_captured=True))
    assert plan == SamplePlan((expected, 100, 100), is_captured=True)
    assert [each.planned for each in (arm, *others)] == [int(expected != calls)] * 3


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("root", "is_first", "expected"),
    [(str(BUILTIN_ROOT), True, "ABC"), (str(BUILTIN_ROOT), False, "A"), ("kernels", False, "ABC")],
    ids=["first process", "SDPA later", "a user's variant later"],
)
def test_built_in_baselines_are_proven_once(
    job: PairedJob, monkeypatch: pytest.MonkeyPatch, root: str, *, is_first: bool, expected: str
) -> None:
    """Only the first process of a gate proves baselines of this package; candidates are proven in every process."""
    proven: list[str] = []
    monkeypatch.setattr(RecordingTimer, "prove", lambda timer: proven.append(timer.letter))
    arm = job.arm_pairs[0].baseline
    baseline = msgspec.structs.replace(arm, variant=msgspec.structs.replace(arm.variant, root=root))
    pair = msgspec.structs.replace(job.arm_pairs[0], baseline=baseline)
    plans = () if is_first else (SamplePlan((100, 100, 100), is_captured=False),)
    result = run_paired(msgspec.structs.replace(job, arm_pairs=(pair,), plans=plans))
    assert (result.outcome, "".join(sorted(proven))) == ("ok", expected), result.message


def test_all_variants_are_loaded_at_the_same_time(job: PairedJob) -> None:
    """The second and the third process are told to open before the first one is waited for; none compiles tools."""
    steps: list[str] = []

    def opening(name: str) -> Callable[..., None]:
        def open_one(*_: object, tools: bool, meanwhile: Callable[[], object]) -> None:
            steps.append(f"{name} sent {tools}")
            meanwhile()
            steps.append(f"{name} ready")

        return open_one

    candidates = [cast("Candidate", SimpleNamespace(open=opening(name))) for name in "ABC"]
    arm = job.arm_pairs[0].candidate
    gate_process._open_together([(each, arm) for each in candidates], job, CASE)
    assert steps == ["A sent False", "B sent False", "C sent False", "C ready", "B ready", "A ready"]


@pytest.mark.parametrize(("failing", "raised"), [("B", "B"), ("C", "C"), ("AB", "A"), ("BC", "B")])
def test_a_failing_arm_lets_the_others_finish_loading(job: PairedJob, failing: str, raised: str) -> None:
    """Every process that was told to open has answered before the failure of the first arm that failed is raised."""
    ready: list[str] = []

    def opening(name: str) -> Callable[..., None]:
        def open_one(*_: object, meanwhile: Callable[[], object], **__: object) -> None:
            meanwhile()
            ready.append(name)
            if name in failing:
                raise ValueError(f"{name} cannot be loaded")

        return open_one

    candidates = [cast("Candidate", SimpleNamespace(open=opening(name))) for name in "ABC"]
    arm = job.arm_pairs[0].candidate
    with pytest.raises(ValueError, match=f"{raised} cannot be loaded"):
        gate_process._open_together([(each, arm) for each in candidates], job, CASE)
    assert ready == ["C", "B", "A"]

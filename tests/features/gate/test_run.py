"""The flow of a gate with simulated processes: unconfirmed times, failing processes, dropped blocks."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.variant import Variant
from pytest_fa.features.bundle.recompute import contradictions
from pytest_fa.features.gate.gate import GateQuestion, decide_gate, gate_question
from pytest_fa.features.gate.gated import Gate
from pytest_fa.features.gate.intervals import PROCESS_SD
from pytest_fa.features.gate.pilot import BaselineTime, slower_than_pilot
from pytest_fa.host.client import Workers
from pytest_fa.host.profiler_workers import ProfilerWorkers
from pytest_fa.records.costs import Costs
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.paired import SamplePlan
from pytest_fa.records.read import read_record
from pytest_fa.records.record import Record, to_json
from pytest_fa.records.timing import Agreement
from pytest_fa.session.builds import Builds
from pytest_fa.session.case_runner import CaseRunner
from pytest_fa.session.record_factory import RecordFactory
from pytest_fa.session.refusals import CannotRun
from pytest_fa.session.run_plan import RunPlan
from pytest_fa.wire.jobs import PairBlocks, PairedJob, PairedResult
from tests.factories import PYTHON_MANIFEST, WriteVariant, options, record, speed

CASE = parse_case("b1h8s512d64-fp16-seed0")


CONFIRMED = msgspec.structs.replace(speed(9.0), agreement=Agreement(valid=True, reason="", least_us=9.0))


class SimulatedWorkers(Workers):
    """Workers in which every process of a gate gives the same result."""

    def __init__(self, result: PairedResult) -> None:
        super().__init__()
        self.result = result
        self.jobs: list[PairedJob] = []

    def run_paired(self, job: PairedJob) -> PairedResult:
        """Keep the job and return the result."""
        self.jobs.append(job)
        return self.result


class SimulatedRunner(CaseRunner):
    """A case runner that returns prepared records to the pilot."""

    def __init__(self, folder: Path, records: dict[str, Record], result: PairedResult) -> None:
        run_options = options(folder)
        workers = SimulatedWorkers(result)
        builds = Builds(run_options, RunPlan(run_options))
        super().__init__(run_options, builds, RecordFactory(run_options), workers, ProfilerWorkers())
        self.pilot_records, self.jobs = records, workers.jobs
        self.pilot_names: list[str] = []

    def run(self, variant: Variant, *_: object, **__: object) -> Record:
        """The prepared record; without one the variant cannot run."""
        self.pilot_names.append(variant.name)
        if variant.name not in self.pilot_records:
            raise CannotRun(f"{variant.name} does not run on this GPU")
        return self.pilot_records[variant.name]

    def watchdog_seconds(self, variant: Variant, _: object) -> float:
        """A larger limit for the baseline than for the candidate."""
        return 7.0 if variant.name == "candidate" else 70.0

    def shares_gpu(self, _: object) -> bool:
        """As if another process used the GPU."""
        return True


def blocks(*log_ratios: float, dropped: int = 0) -> PairedResult:
    """The result of one process with one pair."""
    control = tuple(0.0001 * index for index in range(len(log_ratios)))
    return PairedResult(Outcome.OK, "", (PairBlocks(log_ratios, control, dropped, 9.0, 10.0, "simulated"),))


@pytest.fixture
def variants(write_variant: WriteVariant, tmp_path: Path) -> tuple[Variant, Variant]:
    """A candidate and its baseline."""
    variants = []
    for name in ("candidate", "fast"):
        folder = write_variant(name, manifest=PYTHON_MANIFEST, **{"entry.py": ""})
        variants += read_manifest(folder / "variant.yaml", tmp_path / "kernels")
    return variants[0], variants[1]


def gate(
    variants: tuple[Variant, Variant], tmp_path: Path, result: PairedResult, **doubts: object
) -> tuple[Record, int]:
    """The record of a gate and its number of processes; `doubts` are fields of the candidate's speed."""
    candidate, baseline = variants
    pilot_records = {
        "candidate": record("candidate", kind="speed", speed=msgspec.structs.replace(speed(9.0), **doubts)),
        "fast": record("fast", kind="speed", speed=speed(10.0)),
    }
    runner = SimulatedRunner(tmp_path, pilot_records, result)
    gated = decide_gate(runner, candidate, GateQuestion(0.95, (CASE,), (baseline,)), lambda _: None)
    assert all(job.watchdog_seconds == 70.0 for job in runner.jobs)
    return gated, len(runner.jobs)


def test_later_processes_follow_the_first(variants: tuple[Variant, Variant], tmp_path: Path) -> None:
    """The first process plans the samples, and the other five take them in the same way."""
    candidate, baseline = variants
    plan = SamplePlan((7, 5, 6), is_captured=True)
    pair = msgspec.structs.replace(blocks(*[-0.105] * 8).arm_pairs[0], plan=plan)
    records = {each.name: record(each.name, kind="speed", speed=CONFIRMED) for each in variants}
    runner = SimulatedRunner(tmp_path, records, PairedResult(Outcome.OK, "", (pair,)))
    decide_gate(runner, candidate, GateQuestion(0.95, (CASE,), (baseline,)), lambda _: None)
    assert [job.plans for job in runner.jobs] == [(), *[(plan,)] * 5]
    assert len({job.seed for job in runner.jobs}) == 6
    assert all(job.shares_gpu for job in runner.jobs)


def test_the_announced_time_is_that_of_the_last_gate(
    variants: tuple[Variant, Variant], tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    """The first gate of a machine announces a usual time and corrects it; the second announces what that one took."""
    candidate, baseline = variants
    result = msgspec.structs.replace(blocks(*[-0.105] * 8), seconds={"processes": 0.5, "samples": 7.0})
    records = {each.name: record(each.name, kind="speed", speed=CONFIRMED) for each in variants}
    runner = SimulatedRunner(tmp_path, records, result)
    said: list[str] = []
    for _ in range(2):
        gated = decide_gate(runner, candidate, GateQuestion(0.95, (CASE,), (baseline,)), said.append)
    decided = Gate.of(gated)
    assert decided is not None
    assert (decided.part_seconds, decided.seconds >= decided.pilot_seconds) == (result.seconds, True)
    first, corrected, second = said
    assert "6 processes (about 18 s), or 12 (about 36 s)" in first
    assert snapshot == corrected
    assert "6 processes (about 45 s), or 12 (about 90 s)" in second


def test_the_record_says_what_its_pilot_shared_and_cost(variants: tuple[Variant, Variant], tmp_path: Path) -> None:
    """The first gate of a run timed everything itself; the second has the age of a shared time, and costs less."""
    candidate, fast = variants
    slow = msgspec.structs.replace(fast, name="slow")
    slow_speed = msgspec.structs.replace(CONFIRMED, device=speed(20.0).device)
    records = {name: record(name, speed=CONFIRMED, costs=Costs(0.0, 1.0, 2.0)) for name in ("candidate", "fast")}
    records["slow"] = record("slow", speed=slow_speed, costs=Costs(0.0, 1.0, 2.0))
    runner = SimulatedRunner(tmp_path, records, blocks(*[-0.105] * 8))
    question = GateQuestion(0.95, (CASE,), (fast, slow))
    first, second = (decide_gate(runner, candidate, question, lambda _: None) for _ in range(2))
    earlier, later = Gate.of(first), Gate.of(second)
    assert earlier is not None
    assert later is not None
    assert (earlier.pilot_age_seconds, earlier.pilot_costs) == ({}, Costs(0.0, 3.0, 6.0))
    assert later.pilot_age_seconds[CASE.shape_id].keys() == {"slow"}
    assert later.pilot_costs == Costs(0.0, 2.0, 4.0)
    assert read_record(to_json(second)) == second


def test_a_clear_difference_passes(variants: tuple[Variant, Variant], tmp_path: Path) -> None:
    """A candidate that is 10 % faster in every process passes after six processes."""
    gated, count = gate(variants, tmp_path, blocks(*[-0.105] * 8))
    assert (gated.outcome, count) == ("ok", 6)


@pytest.mark.parametrize(
    ("doubts", "reason"),
    [
        ({"agreement": Agreement(valid=False, reason="impossible")}, "is not confirmed: impossible"),
        ({"order": "programmatic"}, "such a period (`period_pdl`) is never gated"),
    ],
)
def test_an_unconfirmed_time_is_not_gated(
    variants: tuple[Variant, Variant], tmp_path: Path, doubts: dict[str, object], reason: str
) -> None:
    """If the candidate's time in the pilot is not confirmed, no process is started and there is no verdict."""
    gated, count = gate(variants, tmp_path, blocks(*[-0.105] * 8), **doubts)
    assert (gated.outcome, count, reason in gated.message) == ("inconclusive", 0, True)


def test_a_baseline_that_cannot_run_is_no_skip(variants: tuple[Variant, Variant], tmp_path: Path) -> None:
    """If the baseline cannot run on this machine, the gate is INCONCLUSIVE and the test is not skipped."""
    candidate, baseline = variants
    runner = SimulatedRunner(tmp_path, {"candidate": record("candidate", speed=speed(9.0))}, blocks(0.0))
    gated = decide_gate(runner, candidate, GateQuestion(0.95, (CASE,), (baseline,)), lambda _: None)
    assert (gated.outcome, gated.message) == ("inconclusive", "fast does not run on this GPU")


@pytest.mark.parametrize(
    ("agreement", "order", "ending"),
    [
        (Agreement(valid=False, reason="the clocks disagree", least_us=12.0), "chain", ("ok", 6)),
        (Agreement(valid=False, reason="the clocks disagree", least_us=10.2), "chain", ("inconclusive", 0)),
        (Agreement(valid=False, reason="the clocks disagree", least_us=math.nan), "chain", ("inconclusive", 0)),
        (Agreement(valid=False, reason="throttled"), "chain", ("inconclusive", 0)),
        (Agreement(valid=True, reason="", least_us=12.0), "programmatic", ("inconclusive", 0)),
    ],
    ids=["far", "near", "nan", "throttled", "programmatic"],
)
def test_an_unconfirmed_slow_baseline_does_not_matter(
    variants: tuple[Variant, Variant], tmp_path: Path, agreement: Agreement, order: str, ending: tuple[str, int]
) -> None:
    """A baseline that is too slow by both clocks is left out by name; any other unconfirmed time ends the gate."""
    candidate, baseline = variants
    slow = msgspec.structs.replace(baseline, name="slow", role="baseline")
    fast = msgspec.structs.replace(baseline, role="baseline")
    confirmed = msgspec.structs.replace(speed(10.0), agreement=Agreement(valid=True, reason="", least_us=10.0))
    unconfirmed = msgspec.structs.replace(speed(13.0), agreement=agreement, order=order)
    speeds = {"candidate": speed(9.0), "fast": confirmed, "slow": unconfirmed}
    records = {name: record(name, kind="speed", speed=each) for name, each in speeds.items()}
    runner = SimulatedRunner(tmp_path, records, blocks(*[-0.105] * 8))
    announcements: list[str] = []
    gated = decide_gate(runner, candidate, GateQuestion(0.95, (CASE,), (slow, fast)), announcements.append)
    assert (gated.outcome, len(runner.jobs)) == ending
    assert all(job.arm_pairs[0].baseline.variant.name == "fast" for job in runner.jobs)
    if decided := Gate.of(gated):
        (left_out,) = decided.left_out
        assert left_out.startswith("slow at b1h8s512d64-fp16: the clocks disagree")
        assert left_out in announcements[0]


def test_the_detectable_difference_is_announced_on_a_gpu(
    variants: tuple[Variant, Variant], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU whose noise was not measured, the announcement has the difference for an H200's noise, and says so."""
    candidate, baseline = variants
    records = {each.name: record(each.name, kind="speed", speed=speed(10.0)) for each in variants}
    runner = SimulatedRunner(tmp_path, records, blocks(*[-0.105] * 6))
    environment = msgspec.structs.replace(runner.records.environment, gpu="NVIDIA A GPU")
    monkeypatch.setitem(vars(runner.records), "environment", environment)
    announcements: list[str] = []
    decide_gate(runner, candidate, GateQuestion(0.95, (CASE,), (baseline,)), announcements.append)
    source = "not measured on this GPU, taken from an NVIDIA H200"
    assert f"detects differences of 1.0 % (standard deviation of process means: {source})" in announcements[0]


def gate_with_baseline(
    variants: tuple[Variant, Variant], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, baseline_us: float
) -> tuple[Record, int]:
    """The record of a gate on a GPU whose baseline took 10 us in the pilot, and its number of processes."""
    candidate, baseline = variants
    times_us = {"candidate": 9.0, "fast": 10.0}
    records = {name: record(name, kind="speed", speed=speed(time_us)) for name, time_us in times_us.items()}
    pair = msgspec.structs.replace(blocks(*[-0.105] * 6).arm_pairs[0], baseline_us=baseline_us)
    runner = SimulatedRunner(tmp_path, records, PairedResult(Outcome.OK, "", (pair,)))
    environment = msgspec.structs.replace(runner.records.environment, gpu="NVIDIA A GPU")
    monkeypatch.setitem(vars(runner.records), "environment", environment)
    gated = decide_gate(runner, candidate, GateQuestion(0.95, (CASE,), (baseline,)), lambda _: None)
    return gated, len(runner.jobs)


@pytest.mark.parametrize(("baseline_us", "outcome"), [(10.0, "ok"), (10.45, "ok"), (10.47, "inconclusive")])
def test_a_baseline_is_held_to_its_pilot(
    variants: tuple[Variant, Variant],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    baseline_us: float,
    outcome: str,
) -> None:
    """A baseline that is slower than in the pilot by more than 3 % and twice the spread may have caused the PASS."""
    gated, count = gate_with_baseline(variants, tmp_path, monkeypatch, baseline_us)
    assert (gated.outcome, count) == (outcome, 6)
    if outcome != "ok":
        said = "fast at b1h8s512d64-fp16 took 10.47 us and in the pilot 10.00 us; with that added, "
        said += "the ratio may be 0.9537; allowed: 4.6 % more"
        assert gated.message == f"INCONCLUSIVE: the baseline was slower than in the pilot: {said}"


@pytest.mark.parametrize(
    ("gate_us", "high", "is_undecided"),
    [
        (10.45, 0.94, False),  # within the spread
        (10.47, 0.94, True),
        (10.47, 0.80, False),  # 0.80 x 1.047 is a PASS, too
        (11.8, 0.80, False),
        (11.9, 0.80, True),
        (200.0, 0.06, True),
        (math.nan, 0.5, True),
    ],
)
def test_a_slower_baseline_is_worth_its_share(gate_us: float, high: float, *, is_undecided: bool) -> None:
    """The difference to the pilot is added to the upper limit of the ratio, which must still be below the gate's."""
    times = [BaselineTime("shape", "fast", gate_us)]
    said = slower_than_pilot({"shape": {"fast": 10.0}}, times, PROCESS_SD, [math.log(high)], 0.95)
    assert bool(said) is is_undecided


@pytest.mark.parametrize("baseline_us", [10.0, 10.47])
def test_the_pilot_counts_when_a_gate_is_verified(
    variants: tuple[Variant, Variant], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, baseline_us: float
) -> None:
    """An honest gate on a GPU contradicts nothing; turned into another verdict, it does."""
    gated, _ = gate_with_baseline(variants, tmp_path, monkeypatch, baseline_us)
    decided = Gate.of(gated)
    assert decided is not None
    assert [line for line in contradictions(gated, None, PROCESS_SD) if "verdict" in line] == []
    other = "INCONCLUSIVE" if decided.verdict == "PASS" else "PASS"
    outcome = {"PASS": Outcome.OK, "INCONCLUSIVE": Outcome.INCONCLUSIVE}[other]
    forged = msgspec.structs.replace(decided, verdict=other).to(msgspec.structs.replace(gated, outcome=outcome))
    assert any(f"the verdict is {other}, its samples give" in line for line in contradictions(forged, None, PROCESS_SD))


def test_a_slow_candidate_fails_whatever_its_baseline_took(
    variants: tuple[Variant, Variant], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A candidate that is far slower ends with FAIL after six processes, also if the baseline was slower, too."""
    candidate, baseline = variants
    records = {each.name: record(each.name, kind="speed", speed=speed(10.0)) for each in variants}
    pair = msgspec.structs.replace(blocks(*[0.7] * 6).arm_pairs[0], baseline_us=20.0)
    runner = SimulatedRunner(tmp_path, records, PairedResult(Outcome.OK, "", (pair,)))
    environment = msgspec.structs.replace(runner.records.environment, gpu="NVIDIA A GPU")
    monkeypatch.setitem(vars(runner.records), "environment", environment)
    gated = decide_gate(runner, candidate, GateQuestion(0.95, (CASE,), (baseline,)), lambda _: None)
    assert (gated.outcome, len(runner.jobs)) == ("gate_failed", 6)


def test_dropped_blocks_give_a_readable_record(variants: tuple[Variant, Variant], tmp_path: Path) -> None:
    """Processes that lost too many blocks end the gate without a verdict, and its record can be read back."""
    gated, count = gate(variants, tmp_path, blocks(*[-0.105] * 5, dropped=3))
    reason = "6 processes lost more than 20 % of the blocks"
    assert (gated.outcome, count, reason in gated.message) == ("inconclusive", 6, True)
    decided = Gate.of(gated)
    assert decided is not None
    assert (decided.process_sd, decided.pairs[0].low) == (None, None)
    assert read_record(to_json(gated)) == gated


def test_a_process_that_fails_ends_the_gate(variants: tuple[Variant, Variant], tmp_path: Path) -> None:
    """The outcome of a process that fails becomes the outcome of the gate, and no further process starts."""
    gated, count = gate(variants, tmp_path, PairedResult(Outcome.INCONCLUSIVE, "cannot be captured: it waits", ()))
    assert (gated.outcome, count, gated.message) == ("inconclusive", 1, "cannot be captured: it waits")


def test_a_failed_pilot_is_run_again_as_a_gate(variants: tuple[Variant, Variant], tmp_path: Path) -> None:
    """The rerun command of a gate whose candidate is wrong in the pilot runs `test_gate`, not `test_speed`."""
    candidate, baseline = variants
    wrong = record("candidate", kind="speed", outcome=Outcome.WRONG, rerun_command="pytest -k test_speed")
    runner = SimulatedRunner(tmp_path, {"candidate": wrong}, blocks(0.0))
    gated = decide_gate(runner, candidate, GateQuestion(0.95, (CASE,), (baseline,)), lambda _: None)
    expected = f"pytest --fa-variant=candidate -k test_gate --fa-case={CASE.id} --fa-gate=0.95"
    assert (gated.kind, gated.outcome, gated.rerun_command) == ("gate", "wrong", expected)


ON_GPU = [
    *("sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_math"),
    *("sdpa_cudnn_mask", "sdpa_efficient_mask", "sdpa_math_mask"),
    *("sdpa_cudnn_gathered", "sdpa_efficient_gathered", "torch_varlen"),
]


@pytest.mark.parametrize(
    ("devices", "gpu", "expected"),
    [
        (("cpu",), None, ["sdpa_flash", "sdpa_flash_cpu", "sdpa_math", "sdpa_math_mask", "sdpa_math_gathered"]),
        (("cpu",), object(), ["sdpa_flash_cpu", "sdpa_math_gathered"]),
        (("cuda",), None, ["sdpa_flash_cpu", *ON_GPU, "sdpa_math_gathered"]),
        (("cuda", "cpu"), object(), ON_GPU),
    ],
)
def test_the_baselines_run_on_the_candidates_device(
    variants: tuple[Variant, Variant],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    devices: tuple[str, ...],
    gpu: object,
    expected: list[str],
) -> None:
    """A candidate is compared with the SDPA backends on its own device; with all of them if it cannot run here."""
    monkeypatch.setattr("pytest_fa.features.gate.gate.find_gpu", lambda: gpu)
    supports = msgspec.structs.replace(variants[0].supports, device=devices)
    candidate = msgspec.structs.replace(variants[0], supports=supports)
    question = gate_question(RunPlan(options(tmp_path, cases=(CASE.id,))), candidate, 0.95)
    assert sorted(expected) == sorted(each.name for each in question.baselines)


def test_without_a_baseline_the_gate_says_what_to_type(variants: tuple[Variant, Variant], tmp_path: Path) -> None:
    """If no SDPA backend fits the candidate's device, there is no verdict, and the message names the option."""
    runner = SimulatedRunner(tmp_path, {"candidate": record("candidate", kind="speed", speed=speed(9.0))}, blocks(0.0))
    gated = decide_gate(runner, variants[0], GateQuestion(0.95, (CASE,)), lambda _: None)
    reason = "no baseline supports b1h8s512d64-fp16, so candidate cannot be gated on it"
    message = f"{reason}; name one that does: --fa-gate-baseline=NAME"
    assert (gated.outcome, gated.message, len(runner.jobs)) == ("inconclusive", message, 0)

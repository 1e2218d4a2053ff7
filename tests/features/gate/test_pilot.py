"""The pilot of a gate: which timings of baselines the gates of one run share, and what the record says of them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pytest_fa.catalog.case import Case, parse_case
from pytest_fa.catalog.variant import Variant
from pytest_fa.features.gate.memory import GateMemory
from pytest_fa.features.gate.pilot import OTHER_NODES, NoVerdict, Pilot, other_nodes_than_pilot, run_pilot
from pytest_fa.host.client import Workers
from pytest_fa.host.profiler_workers import ProfilerWorkers
from pytest_fa.records.costs import Costs
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record
from pytest_fa.records.timing import Agreement, CallNodes, LaunchedKernel
from pytest_fa.session.builds import Builds
from pytest_fa.session.case_runner import CaseRunner
from pytest_fa.session.record_factory import RecordFactory
from pytest_fa.session.run_plan import RunPlan
from pytest_fa.wire.jobs import Arm, ArmPair, PairBlocks, PairedResult
from tests.factories import options, record, speed, variant

CASE, LARGE = parse_case("b1h8s512d64-fp16-seed0"), parse_case("b1h8s1024d64-fp16-seed0")
CANDIDATE = variant("candidate")
BASELINES = tuple(variant(name, "baseline") for name in ("fast", "second", "slow"))


class TimedRunner(CaseRunner):
    """A case runner whose variants take the times of `us`; those in `doubted` are not confirmed."""

    def __init__(self, folder: Path) -> None:
        run_options = options(folder)
        builds = Builds(run_options, RunPlan(run_options))
        super().__init__(run_options, builds, RecordFactory(run_options), Workers(), ProfilerWorkers())
        self.us = {"candidate": 9.0, "fast": 10.0, "second": 10.2, "slow": 13.0}
        self.doubted: set[str] = set()
        self.ran: list[str] = []

    def run(self, variant: Variant, case: Case, *_: object, **__: object) -> Record:
        """The record of a timing."""
        self.ran.append(variant.name)
        us, is_valid = self.us[variant.name], variant.name not in self.doubted
        agreement = Agreement(valid=is_valid, reason="" if is_valid else "throttled", least_us=us)
        timed = msgspec.structs.replace(speed(us, launched=("attend",)), agreement=agreement)
        return record(variant.name, case.id, kind="speed", speed=timed, costs=Costs(0.5, 1.0, 2.0))

    def pilot(self, *cases: Case) -> tuple[Pilot, list[str]]:
        """The pilot of one gate, and the names that it timed, in this order."""
        self.ran.clear()
        pilot = run_pilot(self, CANDIDATE, cases or (CASE,), BASELINES)
        assert isinstance(pilot, Pilot)
        return pilot, list(self.ran)

    def age(self, seconds: float) -> None:
        """Let all shared times become older."""
        rows = GateMemory.of(self).baseline_rows
        rows.update({key: (at - seconds, row) for key, (at, row) in rows.items()})


@pytest.fixture
def runner(tmp_path: Path) -> TimedRunner:
    """A runner after the first gate of a run."""
    timed = TimedRunner(tmp_path)
    pilot, ran = timed.pilot()
    assert (ran, pilot.ages) == (["candidate", "fast", "second", "slow"], {})
    return timed


def test_a_later_gate_times_the_near_baselines_anew(runner: TimedRunner) -> None:
    """Only the time of a slow baseline is shared, and its age is said; the gate is held to new times."""
    runner.age(200.0)
    runner.us |= {"fast": 9.9, "second": 10.1, "slow": 99.0}
    pilot, ran = runner.pilot()
    assert ran == ["candidate", "fast", "second"]
    assert pilot.times == {CASE.shape_id: {"candidate": 9.0, "fast": 9.9, "second": 10.1, "slow": 13.0}}
    assert pilot.ages == {CASE.shape_id: {"slow": pytest.approx(200.0, abs=5.0)}}


@pytest.mark.parametrize(("age_seconds", "is_shared"), [(299.0, True), (301.0, False)])
def test_all_baselines_expire_together(runner: TimedRunner, age_seconds: float, *, is_shared: bool) -> None:
    """After 300 s, all baselines of a shape are timed anew."""
    runner.age(age_seconds)
    pilot, ran = runner.pilot()
    assert (("slow" in ran), bool(pilot.ages)) == (not is_shared, is_shared)


@pytest.mark.parametrize(
    "changed", [{"fast": 12.7, "second": 12.7}, {"second": 10.4}], ids=["slow is near", "second is no longer near"]
)
def test_new_times_that_change_who_is_near_renew_all(runner: TimedRunner, changed: dict[str, float]) -> None:
    """A selection that the new times contradict is made by new times of all baselines, each timed once."""
    runner.us |= changed
    pilot, ran = runner.pilot()
    assert (ran, pilot.ages) == (["candidate", "fast", "second", "slow"], {})
    assert pilot.times == {CASE.shape_id: runner.us}
    ((_, kept),) = GateMemory.of(runner).baseline_rows.values()
    assert [each.speed.device.median_us for each in kept if each.speed] == list(runner.us.values())[1:]


def test_other_baselines_share_nothing(runner: TimedRunner) -> None:
    """A gate with other baselines, or at another shape, times all of them."""
    assert runner.pilot(LARGE)[1] == ["candidate", "fast", "second", "slow"]
    runner.ran.clear()
    run_pilot(runner, CANDIDATE, (CASE,), BASELINES[1:])
    assert runner.ran == ["candidate", "second", "slow"]


def test_an_unconfirmed_baseline_lets_none_be_kept(tmp_path: Path) -> None:
    """If the time of one baseline is not confirmed, no time of this shape is shared with later gates."""
    runner = TimedRunner(tmp_path)
    runner.doubted = {"slow"}
    with pytest.raises(NoVerdict, match=r"slow.*is not confirmed: throttled"):
        runner.pilot()
    runner.doubted = set()
    assert runner.pilot()[1] == ["candidate", "fast", "second", "slow"]


def test_an_unconfirmed_new_time_ends_the_gate(runner: TimedRunner) -> None:
    """A near baseline that cannot be confirmed anew permits no verdict, although an earlier time of it is known."""
    runner.doubted = {"fast"}
    with pytest.raises(NoVerdict, match=r"fast.*is not confirmed: throttled"):
        runner.pilot()


def test_the_candidate_comes_first_on_all_cases(tmp_path: Path) -> None:
    """The candidate runs on every case before any baseline does, so that its processes are kept."""
    _, ran = TimedRunner(tmp_path).pilot(CASE, LARGE)
    assert ran == ["candidate", "candidate", *["fast", "second", "slow"] * 2]


def test_the_costs_are_those_of_the_timings_of_this_gate(tmp_path: Path) -> None:
    """The costs of the candidate and of all baselines are added; those of shared times belong to the earlier gate."""
    runner = TimedRunner(tmp_path)
    assert runner.pilot()[0].costs == Costs(2.0, 4.0, 8.0)
    assert runner.pilot()[0].costs == Costs(1.5, 3.0, 6.0)


def nodes(name: str) -> CallNodes:
    """A call of one kernel."""
    return CallNodes((LaunchedKernel(name, (8, 1, 1), (128, 1, 1), 0),))


@pytest.mark.parametrize(
    ("candidate", "baseline", "odd"),
    [
        (nodes("attend"), nodes("flash"), ""),
        (nodes("nothing"), nodes("flash"), "candidate"),
        (nodes("attend"), nodes("slower"), "fast"),
        (None, None, ""),  # arms that are timed without a graph
    ],
)
def test_every_process_launches_what_the_record_names(
    candidate: CallNodes | None, baseline: CallNodes | None, odd: str
) -> None:
    """The second process launches something else in the timed calls of one arm; the sentence names it."""
    shape = CASE.shape_id
    pilot = Pilot({}, (), {}, None, {(shape, "candidate"): nodes("attend"), (shape, "fast"): nodes("flash")})
    pair = ArmPair(CASE, Arm(CANDIDATE, None), Arm(BASELINES[0], None))

    def process(*of_arms: CallNodes | None) -> PairedResult:
        blocks = PairBlocks((0.0,), (0.0,), 0, 9.0, 10.0, "simulated", nodes=(of_arms[0], of_arms[1]))
        return PairedResult(Outcome.OK, "", (blocks,))

    said = other_nodes_than_pilot(
        pilot, (pair,), (process(nodes("attend"), nodes("flash")), process(candidate, baseline))
    )
    assert said.startswith(f"{OTHER_NODES}: {odd} at {shape}: 1 x " if odd else "")
    assert bool(said) == bool(odd)


def test_the_pilot_knows_the_kernels_of_its_records(runner: TimedRunner) -> None:
    """Those of the candidate and of every baseline."""
    pilot, _ = runner.pilot()
    assert {name for _, name in pilot.nodes} == {"candidate", "fast", "second", "slow"}

"""`run_case`: the whole flow for one variant on one case, left to right."""

from __future__ import annotations

import dataclasses
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import torch

from pytest_fa.catalog.case import Computes
from pytest_fa.catalog.variant import Tolerance
from pytest_fa.errors import DeviceLost, FaError, LaunchError, UnsupportedCase, WrongResult
from pytest_fa.jobs import (
    Arm,
    BusyJob,
    BusyResult,
    CaseJob,
    CaseResult,
    ContestBlocks,
    GateJob,
    GateResult,
    Job,
    Progress,
)
from pytest_fa.judge.check import judge, require_output
from pytest_fa.judge.diagnosis import diagnose
from pytest_fa.judge.oracle import truth_of
from pytest_fa.judge.own_work import require_own_work
from pytest_fa.judge.properties import PROPERTIES
from pytest_fa.judge.repeats import repeat, require_identical
from pytest_fa.judge.subject import Subject
from pytest_fa.judge.truth import Truth
from pytest_fa.judge.witnesses import hear
from pytest_fa.measure.attached import require_no_tool
from pytest_fa.measure.contest import Blocks, Opened, Runner, contest
from pytest_fa.measure.device_time import CannotCapture
from pytest_fa.measure.measure import l2_bytes, measure, profile_busy
from pytest_fa.report.environment import clock_watch
from pytest_fa.report.record import Check, Diagnosis, Outcome, Repeats, Speed, Stage, StageName
from pytest_fa.run.checked import CheckedLaunch
from pytest_fa.run.device import is_alive, open_device
from pytest_fa.run.guards import Workspaces
from pytest_fa.run.inputs import Inputs, make_inputs
from pytest_fa.run.module import load_forward, open_forward

# What found a kernel that gave nothing to judge.
ENDINGS: dict[str, tuple[str, ...]] = {
    "failed": ("exception",),
    "launch_failed": ("launch",),
    "device_error": ("device error",),
}

Tell = Callable[[Progress], object]

PATIENCE_SECONDS = 300.0  # for what is not a launch: starting CUDA, loading, truth in float64


def run_case(job: CaseJob, tell: Tell = lambda _: None) -> CaseResult:
    """Load, launch, judge and time one variant on one case; `tell` hears that it goes on.

    The candidate runs before truth is computed, so stale memory cannot hold the answer.  A stage that fails ends the
    run, and a failed check carries no timing.  Never raises for what a kernel does.
    """
    stages, found, scope = Stages(job, tell), Findings(), ExitStack()
    try:
        with stages("launch"):
            device = open_device(job.device)
            workspaces = Workspaces()
            forward = scope.enter_context(open_forward(job.variant, job.library, workspaces, job.case.computes))
            launch = CheckedLaunch(forward, make_inputs(job.case, device), workspaces, job.case.computes)
            for _ in range(job.warm_ups):
                stages.watch()
                launch.once(f"warm_up-{job.slug}")
            stages.watch()
            found.out = launch.once(job.slug)
        if job.property_name:
            with stages("correct"):
                PROPERTIES[job.property_name](Subject(job, forward, device, stages.watch))
        elif job.judge:
            with stages("sanity"):
                found.out = require_output(found.out, launch.given).clone()  # the next call writes over it
                launch.require_untouched()
                _repeat(job, launch, found, stages)
                stages.wait()
                found.truth = truth_of(job.case.computes, launch.untouched, job.variant.rounds, job.policy)
                found.check = judge(found.out, found.truth, job.policy)
                _require_finite(found.check)
            with stages("correct"):
                _require_passed(found.check, "")
                _require_repeats(job, found)
        if job.time:
            with stages("speed"):
                measured, outputs = measure(forward, job.case, launch.inputs, job.slug, stages.watch)
                launch.require_untouched()
                if job.judge:
                    _judge_timed(outputs, found, job.policy)
                found.speed = measured
        return found.result("ok", "", stages)
    except Exception as problem:  # noqa: BLE001  # a kernel may raise anything; each becomes a named outcome
        alive = job.device == "cpu" or (not isinstance(problem, DeviceLost) and is_alive(device))
        outcome = _outcome(problem) if alive else "device_error"
        found.caught_by = ENDINGS.get(outcome, ())
        if isinstance(problem, WrongResult) and alive:
            found.caught_by = problem.caught_by
            if found.check and found.truth:
                stages.wait(found.result(outcome, _message(problem), stages, context_lost=True))
                found.diagnosis = _diagnose(job, found, launch)
                alive = job.device == "cpu" or is_alive(device)
        return found.result(outcome, _message(problem), stages, context_lost=not alive)
    finally:
        scope.close()


def run_gate(job: GateJob, tell: Tell = lambda _: None) -> GateResult:
    """One process of a gate: every contest measured, and what its timed calls gave judged.

    Never raises for what a kernel does.
    """
    device, found = torch.device(job.device), []
    stages = Stages(job, tell)
    try:
        stages.wait()
        require_no_tool()
        open_device(job.device)
        with clock_watch(job.device) as clocks:
            for index, each in enumerate(job.contests):
                inputs = make_inputs(each.case, device)
                l2 = l2_bytes(device)
                sides = (each.candidate, each.baseline, each.baseline)
                arms = [Runner(_opener(arm), each.case, inputs, l2, stages.watch) for arm in sides]
                blocks = contest((arms[0], arms[1], arms[2]), job.seed + index, clocks.is_slowed)
                stages.wait()
                _judge_arms(arms, sides, each.case.computes, inputs, job.policy)
                found.append(_contest_blocks(blocks, arms))
        return GateResult("ok", "", tuple(found))
    except Exception as problem:  # noqa: BLE001  # a kernel may raise anything; each becomes a named outcome
        alive = job.device == "cpu" or (not isinstance(problem, DeviceLost) and is_alive(device))
        outcome: Outcome = "inconclusive" if isinstance(problem, CannotCapture) else _outcome(problem)
        return GateResult(outcome if alive else "device_error", _message(problem), (), context_lost=not alive)


def _contest_blocks(blocks: Blocks, arms: list[Runner]) -> ContestBlocks:
    candidate, baseline, _ = (statistics.median(each.taken_us) for each in arms)
    rows = (tuple(blocks.blocks), tuple(blocks.same))
    return ContestBlocks(*rows, blocks.dropped, candidate, baseline, arms[0].method)


def run_busy(job: BusyJob, tell: Tell = lambda _: None) -> BusyResult:
    """One call under the profiler.  Never raises for what a kernel does."""
    device, stages = torch.device("cuda"), Stages(job, tell)
    try:
        stages.wait()
        open_device("cuda")
        with open_forward(job.variant, job.library, computes=job.case.computes) as forward:
            busy, missing = profile_busy(forward, job.case, make_inputs(job.case, device), stages.watch)
        return BusyResult(busy, missing)
    except Exception as problem:  # noqa: BLE001  # what it does wrong is another job's to say
        lost = isinstance(problem, DeviceLost) or not is_alive(device)
        return BusyResult(None, _message(problem), context_lost=lost)


def _opener(arm: Arm) -> Opened:
    """The arm's callable in its context, anew for every time that it is entered; a library is loaded once."""
    if arm.variant.entry.context:
        return lambda: open_forward(arm.variant, arm.library)
    forward = load_forward(arm.variant, arm.library)
    return lambda: nullcontext(forward)


def _judge_arms(
    arms: list[Runner], sides: tuple[Arm, ...], computes: Computes, inputs: Inputs, policy: Tolerance
) -> None:
    """Every output that a timed call left is right: what computes nothing is fast."""
    for arm, side in zip(arms, sides, strict=True):
        each_policy = policy if side is sides[0] else side.variant.tolerance
        truth = truth_of(computes, inputs, side.variant.rounds, each_policy)
        for out in arm.rotation.outputs:
            check = judge(require_output(out, arm.rotation.given[0]), truth, each_policy)
            if not check.passed:
                raise WrongResult("timed outputs", f"{side.variant.name}: {check.complaint} in an output of the gate")
        arm.rotation.require_untouched()


@dataclasses.dataclass
class Findings:
    """What a run knows so far: filled from left to right, never read by an earlier stage."""

    out: torch.Tensor | None = None
    truth: Truth | None = None
    check: Check | None = None
    repeats: Repeats | None = None
    farthest: torch.Tensor | None = None
    diagnosis: Diagnosis | None = None
    speed: Speed | None = None
    caught_by: tuple[str, ...] = ()

    def result(self, outcome: Outcome, message: str, stages: Stages, *, context_lost: bool = False) -> CaseResult:
        """The figures of it, without a tensor."""
        return CaseResult(
            outcome=outcome,
            message=message,
            stages=stages.all(),
            caught_by=self.caught_by,
            check=self.check,
            repeats=self.repeats,
            diagnosis=self.diagnosis,
            speed=self.speed,
            context_lost=context_lost,
        )


class Stages:
    """How far a run came, what each stage took, and the signs of life that its watcher hears."""

    def __init__(self, job: Job, tell: Tell) -> None:
        self._stages = {name: Stage(name, "not reached") for name in job.wanted_stages}
        self._now = job.wanted_stages[0]
        self._tell = tell
        self._watchdog_seconds = job.watchdog_seconds

    @contextmanager
    def __call__(self, name: StageName) -> Iterator[None]:
        """Time one stage; an exception marks it failed and goes on."""
        start = time.perf_counter()
        self._now = name
        self.wait()
        try:
            yield
        except BaseException:
            self._stages[name] = Stage(name, "failed", time.perf_counter() - start)
            raise
        self._stages[name] = Stage(name, "ok", time.perf_counter() - start)

    def watch(self) -> None:
        """A launch comes next: it is back within the watchdog's time, or it hangs."""
        self._tell(Progress(self._now, self._watchdog_seconds))

    def wait(self, result: CaseResult | None = None) -> None:
        """Work of our own comes next; `result` stands should nothing more be heard."""
        self._tell(Progress(self._now, max(PATIENCE_SECONDS, self._watchdog_seconds), result))

    def all(self) -> tuple[Stage, ...]:
        """Every wanted stage, reached or not."""
        return tuple(self._stages.values())


def _repeat(job: CaseJob, launch: CheckedLaunch, found: Findings, stages: Stages) -> None:
    """More calls: from the same dirt, disturbed in several ways, and one in which nobody else's attention may run."""
    assert found.out is not None  # noqa: S101  # it was launched
    if job.repeats != 0:
        found.repeats, found.farthest = repeat(
            lambda: require_output(launch.again(), launch.given),
            found.out,
            job.repeats,
            launch.dirt_missing,
            stages.watch,
            keep_farthest=not job.variant.deterministic,
        )
        launch.require_untouched()
    if job.variant.entry.kind != "cuda" and job.variant.role != "baseline":
        require_own_work(launch)


def _require_repeats(job: CaseJob, found: Findings) -> None:
    """Repeats are equal bit by bit; of a variant that may differ, the one farthest from the first output is right."""
    assert found.truth is not None  # noqa: S101  # the first output was judged
    if found.repeats and found.repeats.differing:
        require_identical(found.repeats, deterministic=job.variant.deterministic)
        if found.farthest is not None:
            _judge_again(found.farthest, found, job.policy, " in a repeat", "repeats")


def _judge_again(out: torch.Tensor, found: Findings, policy: str, where: str, caught_by: str) -> None:
    """Judge a later output; what is said of a failure is then said of this one."""
    assert found.truth is not None  # noqa: S101  # the first output was judged
    found.out, found.check = out, judge(out, found.truth, policy)
    _require_passed(found.check, where, caught_by)


def _judge_timed(outputs: Iterable[torch.Tensor], found: Findings, policy: str) -> None:
    """Judge what the timed calls left; one that is the judged output bit by bit needs no second look."""
    assert found.out is not None  # noqa: S101  # a judged job has it
    bits = found.out.view(torch.int16)
    for each in outputs:
        out = require_output(each, found.out)
        if not torch.equal(out.view(torch.int16), bits):
            _judge_again(out, found, policy, " in an output of the timed calls", "timed outputs")


def _diagnose(job: CaseJob, found: Findings, launch: CheckedLaunch) -> Diagnosis | None:
    """Say more about a wrong output; a failure to do so never hides the failure itself."""
    assert found.out is not None and found.truth and found.check  # noqa: S101, PT018  # the caller looked
    try:
        witnesses = hear(job.witnesses, launch.untouched, found.truth, job.policy)
        known = found.out, found.truth, launch.untouched, found.check, found.repeats, witnesses
        return diagnose(*known, job.case.computes)
    except Exception as problem:  # noqa: BLE001
        return Diagnosis((), f"not diagnosed: {problem}", (), "")


def _require_finite(check: Check) -> None:
    if check.nonfinite_count:
        found, of = check.nonfinite_count, check.element_count
        message = f"{found} of {of} elements are NaN or Inf (the output was full of NaN before the call)"
        raise WrongResult("finite", message)


def _require_passed(check: Check, where: str, caught_by: str = "") -> None:
    if not check.passed:
        broken = tuple(each.name for each in check.bounds if each.judged and not each.holds)
        raise WrongResult(caught_by or broken, f"{check.complaint}{where}")


def _outcome(problem: Exception) -> Outcome:
    outcomes: dict[type[Exception], Outcome] = {
        UnsupportedCase: "unsupported",
        LaunchError: "launch_failed",
        DeviceLost: "device_error",
        WrongResult: "wrong",
    }
    return next((name for kind, name in outcomes.items() if isinstance(problem, kind)), "failed")


def _message(problem: Exception) -> str:
    """Our own errors say what happened; another's comes with where it was raised."""
    if isinstance(problem, FaError):
        return str(problem)
    frames = traceback.extract_tb(problem.__traceback__)[-1:]
    where = "".join(f" ({Path(frame.filename).name}:{frame.lineno})" for frame in frames)
    first = next(iter(str(problem).splitlines()), "")
    return f"{type(problem).__name__}: {first}{where}"

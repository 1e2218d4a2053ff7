"""`run_case`: the whole flow for one variant on one case, left to right."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from pytest_fa.errors import DeviceLost, FaError, LaunchError, UnsupportedCase, WrongResult
from pytest_fa.jobs import CaseJob, CaseResult
from pytest_fa.judge.check import judge
from pytest_fa.judge.policies import READS_SPREAD
from pytest_fa.judge.repeats import repeat, require_identical
from pytest_fa.judge.truth import make_truth
from pytest_fa.measure.measure import measure
from pytest_fa.report.record import Check, Outcome, Repeats, Speed, Stage, StageName
from pytest_fa.run.checked import CheckedLaunch
from pytest_fa.run.device import is_alive, open_device
from pytest_fa.run.guards import Workspaces
from pytest_fa.run.inputs import Inputs, make_inputs
from pytest_fa.run.module import open_forward


def run_case(job: CaseJob) -> CaseResult:
    """Load, launch, judge and time one variant on one case.

    The candidate runs before truth is computed, so stale memory cannot hold the answer.  A stage that fails ends the
    run, and a failed check carries no timing.  Never raises for what a kernel does.
    """
    stages = Stages(job)
    check: Check | None = None
    repeats: Repeats | None = None
    speed: Speed | None = None
    scope = ExitStack()
    try:
        with stages("launch"):
            device = open_device(job.device)
            workspaces = Workspaces()
            forward = scope.enter_context(open_forward(job.variant, job.library, workspaces))
            launch = CheckedLaunch(forward, make_inputs(job.case, device), workspaces)
            out = launch.once(job.id)
        if job.judge:
            with stages("sanity"):
                out = _require_tensor(out, launch.inputs).clone()  # the next call writes over it
                launch.require_untouched()
                if job.repeats != 0:
                    repeats = repeat(launch, out, job.repeats, launch.dirtier_missing)
                    launch.require_untouched()
                with_spread = job.policy in READS_SPREAD
                truth = make_truth(launch.untouched, job.variant.rounds, with_spread=with_spread)
                check = judge(out, truth, job.policy)
                _require_finite(check)
            with stages("correct"):
                _require_passed(check, "")
                if repeats:
                    require_identical(repeats, deterministic=job.variant.deterministic)
        if job.time:
            with stages("speed"):
                measured, outputs = measure(forward, job.case, launch.inputs, job.id)
                launch.require_untouched()
                for each in _distinct(outputs, out) if job.judge else ():
                    check = judge(_require_tensor(each, launch.inputs), truth, job.policy)
                    _require_passed(check, " in an output of the timed calls")
                speed = measured
        return CaseResult("ok", "", stages.all(), check, speed, repeats)
    except Exception as problem:  # noqa: BLE001  # a kernel may raise anything; each becomes a named outcome
        alive = job.device == "cpu" or (not isinstance(problem, DeviceLost) and is_alive(device))
        found = (_outcome(problem), _message(problem), stages.all(), check, None, repeats)
        return CaseResult(*found, context_lost=not alive)
    finally:
        scope.close()


class Stages:
    """How far a run came and what each stage took."""

    def __init__(self, job: CaseJob) -> None:
        self._stages = {name: Stage(name, "not reached") for name in job.wanted_stages}

    @contextmanager
    def __call__(self, name: StageName) -> Iterator[None]:
        """Time one stage; an exception marks it failed and goes on."""
        start = time.perf_counter()
        try:
            yield
        except BaseException:
            self._stages[name] = Stage(name, "failed", time.perf_counter() - start)
            raise
        self._stages[name] = Stage(name, "ok", time.perf_counter() - start)

    def all(self) -> tuple[Stage, ...]:
        """Every wanted stage, reached or not."""
        return tuple(self._stages.values())


def _require_tensor(out: object, inputs: Inputs) -> torch.Tensor:
    """The output, a tensor of the inputs' dtype in q's shape."""
    q = inputs.q
    if not isinstance(out, torch.Tensor) or (out.shape, out.dtype) != (q.shape, q.dtype):
        found = f"{out.dtype} {list(out.shape)}" if isinstance(out, torch.Tensor) else repr(out)
        raise WrongResult(f"the output is {found}, it must be {q.dtype} {list(q.shape)}")
    return out


def _distinct(outputs: Iterable[torch.Tensor], judged: torch.Tensor) -> Iterator[torch.Tensor]:
    """The outputs that are not, bit by bit, the one that was judged already: timed calls get the same data."""
    for each in outputs:
        is_alike = each.shape == judged.shape and each.dtype == judged.dtype
        if not (is_alike and torch.equal(each.view(torch.int16), judged.view(torch.int16))):
            yield each


def _require_finite(check: Check) -> None:
    if check.nonfinite_count:
        found, of = check.nonfinite_count, check.element_count
        raise WrongResult(f"{found} of {of} elements are NaN or Inf (the output was full of NaN before the call)")


def _require_passed(check: Check, where: str) -> None:
    if not check.passed:
        bound = check.tightest
        value = "not finite" if bound.value is None else f"{bound.value:.3g}"
        raise WrongResult(f"{bound.name} error is {value}, allowed is {bound.allowed:.3g}{where}")


def _outcome(problem: Exception) -> Outcome:
    outcomes: dict[type[Exception], Outcome] = {
        UnsupportedCase: "unsupported",
        LaunchError: "launch_failed",
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

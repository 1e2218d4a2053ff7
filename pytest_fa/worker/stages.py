"""How far a job came, what each stage took, and what an exception says about it."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pytest_fa.errors import DeviceLost, FaError, LaunchError, UnsupportedCase, WrongResult
from pytest_fa.records.record import Outcome, Stage, StageName
from pytest_fa.worker.jobs import CaseResult, Job, Progress

Tell = Callable[[Progress], object]

PATIENCE_SECONDS = 300.0  # for what is not a launch: starting CUDA, loading, truth in float64


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


def outcome_of(problem: Exception) -> Outcome:
    """The outcome that an exception stands for; `failed` for one that is not of this package."""
    outcomes: dict[type[Exception], Outcome] = {
        UnsupportedCase: "unsupported",
        LaunchError: "launch_failed",
        DeviceLost: "device_error",
        WrongResult: "wrong",
    }
    return next((name for kind, name in outcomes.items() if isinstance(problem, kind)), "failed")


def message_of(problem: Exception) -> str:
    """Our own errors say what happened; another's comes with where it was raised."""
    if isinstance(problem, FaError):
        return str(problem)
    frames = traceback.extract_tb(problem.__traceback__)[-1:]
    where = "".join(f" ({Path(frame.filename).name}:{frame.lineno})" for frame in frames)
    first = next(iter(str(problem).splitlines()), "")
    return f"{type(problem).__name__}: {first}{where}"

"""The types of a sweep: one trial, what came of it, and how the sweep ended.  They are stored in the study as JSON."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

from pytest_fa.features.sweep.sweep_space import Point
from pytest_fa.records.outcome import Defect, Outcome


class TrialOutcome(StrEnum):
    """What came of a trial: its defect, or that it has none, could not be timed, or was none."""

    RIGHT = "right"
    REPEATED = "repeated"
    SAME_CODE = "same_code"
    NOT_BUILT = Defect.NOT_BUILT
    OVER_LIMIT = Defect.OVER_LIMIT
    REFUSED = Defect.REFUSED
    WRONG = Defect.WRONG
    HUNG = Defect.HUNG
    CRASHED = Defect.CRASHED
    NOT_TIMED = "not_timed"


UNCOUNTED = (TrialOutcome.REPEATED, TrialOutcome.SAME_CODE)  # nothing ran, so they are no trials
TrialState = Literal["waiting", "running", "ended", "released"]
ROUNDS = 6  # new processes for each finalist that may win


def trial_outcome(outcome: Outcome) -> TrialOutcome:
    """What a check or timing that did not pass makes of a trial.  A cheat counts as wrong."""
    if not outcome.is_verdict:
        return TrialOutcome.NOT_TIMED
    return TrialOutcome.WRONG if outcome.defect in (None, Defect.CHEAT) else TrialOutcome(outcome.defect)


class PairedTime(msgspec.Struct, frozen=True):
    """The times of one shape in one process, in microseconds per call: of a configuration, and of the parent."""

    candidate_us: float
    parent_us: float
    log_ratio: float


class TrialResult(msgspec.Struct, frozen=True):
    """What came of one trial.

    `log_ratio` is the mean over the shapes of log(time / time of the parent), if the outcome is `right`.  `same_as` is
    the trial with the same point or machine code, or None if the parent has it.  `counters` are those of the build.
    """

    outcome: TrialOutcome
    reason: str = ""
    log_ratio: float | None = None
    shapes: dict[str, PairedTime] = {}
    counters: dict[str, int] = {}
    code: str = ""
    same_as: int | None = None
    build_seconds: float = 0.0
    seconds: float = 0.0


class Owner(msgspec.Struct, frozen=True):
    """The process that runs a trial: a hash of its machine's boot and process namespace, and its id and start there."""

    machine: str
    pid: int
    started: int


class SweepTrial(msgspec.Struct, frozen=True):
    """One trial of a study.  `begun` is the time since the epoch; `code` the machine code, as soon as it is known."""

    number: int
    state: TrialState
    point: Point
    owner: Owner | None = None
    code: str = ""
    result: TrialResult | None = None
    begun: float = 0.0

    @property
    def is_counted(self) -> bool:
        """Whether the trial is one of `--fa-trials`: it runs, or it ended and was no repetition."""
        if self.state == "running":
            return True
        return self.state == "ended" and self.result is not None and self.result.outcome not in UNCOUNTED

    @property
    def is_right(self) -> bool:
        """Whether the configuration was judged to be right and was timed."""
        return self.state == "ended" and self.result is not None and self.result.log_ratio is not None


class Finalist(msgspec.Struct, frozen=True):
    """One of the best configurations, timed again: log(time / time of the parent) of each new process.

    `problem` says why it can no longer win.
    """

    number: int
    point: Point
    searched: float
    again: tuple[float, ...] = ()
    problem: str = ""


class ConfirmedRatio(msgspec.Struct, frozen=True):
    """The gate's ratio of winner and parent on one shape, and both ends of its interval."""

    shape_id: str
    ratio: float
    low: float
    high: float


class SweepEnd(msgspec.Struct, frozen=True):
    """How a sweep ended.  `winner` is set only if the gate passed.

    `timed` counts the configurations that were timed.  `noise_sd` is the standard deviation between processes of one
    configuration, and `luck` the log-ratio by which the best of `timed` equal ones is expected to look faster.
    `unsearched` are log-ratios of the gated configuration at shapes that were not searched.  `ended` is the time since
    the epoch.
    """

    reason: str
    timed: int
    winner: Point | None = None
    gated: Point | None = None
    gate_verdict: str = ""
    ratios: tuple[ConfirmedRatio, ...] = ()
    noise_sd: float | None = None
    luck: float | None = None
    finalists: tuple[Finalist, ...] = ()
    unsearched: dict[str, float] = {}
    checked: int = 0
    ended: float = 0.0

"""Jobs and results: what goes to a worker process and what comes back, both as JSON."""

from __future__ import annotations

import re

import msgspec

from pytest_fa.catalog.case import Case
from pytest_fa.catalog.variant import Device, Tolerance, Variant
from pytest_fa.records.judged import Check, Diagnosis, Repeats
from pytest_fa.records.record import Outcome, Stage, StageName
from pytest_fa.records.timing import ProfilerTime, Speed

WATCHDOG_SECONDS = 10.0


class CaseJob(msgspec.Struct, frozen=True, tag="case"):
    """One variant on one case, and how far to go: judge it, time it, or both.

    A judged call is repeated `repeats` times; None leaves the number to the time it takes.  With `property_name` the
    variant is held to that property in place of being judged on the case alone.  `cross_checks` are judged beside it when
    it is wrong.  `library` is the build's shared library for a `cuda` entry.  A launch that has not come back after
    `watchdog_seconds` is a hang.  `warm_ups` calls come before the first that counts, outside its NVTX range.
    """

    variant: Variant
    case: Case
    library: str | None
    device: Device
    policy: Tolerance
    judge: bool
    time: bool
    repeats: int | None = 0
    property_name: str | None = None
    cross_checks: tuple[Variant, ...] = ()
    watchdog_seconds: float = WATCHDOG_SECONDS
    warm_ups: int = 0

    @property
    def id(self) -> str:
        """Variant and case, or variant and property: `ws_p2-b1h8s512d64-fp16-seed0`, `ws_p2-streams`."""
        return f"{self.variant.name}-{self.property_name or self.case.id}"

    @property
    def slug(self) -> str:
        """The id as an NVTX range and a file name: profilers give `@` and other marks a meaning of their own."""
        return re.sub(r"[^A-Za-z0-9._-]", "-", self.id)

    @property
    def wanted_stages(self) -> tuple[StageName, ...]:
        """The stages that this job is to reach, in their order."""
        if self.property_name:
            return ("launch", "correct")
        judged: tuple[StageName, ...] = ("sanity", "correct") if self.judge else ()
        timed: tuple[StageName, ...] = ("speed",) if self.time else ()
        return ("launch", *judged, *timed)


class Arm(msgspec.Struct, frozen=True):
    """One side of a contest: a variant, and its build's library where it is built."""

    variant: Variant
    library: str | None


class ArmPair(msgspec.Struct, frozen=True):
    """A candidate against a baseline on one shape."""

    case: Case
    candidate: Arm
    baseline: Arm


class GateJob(msgspec.Struct, frozen=True, tag="gate"):
    """One process of a gate: every contest in blocks of ABBA and BAAB, and its baseline against itself.

    `seed` decides which arm is captured and which begins.
    """

    arm_pairs: tuple[ArmPair, ...]
    device: Device
    policy: Tolerance
    seed: int
    watchdog_seconds: float = WATCHDOG_SECONDS

    @property
    def wanted_stages(self) -> tuple[StageName, ...]:
        """All of it is timing."""
        return ("speed",)


class ProfilerJob(msgspec.Struct, frozen=True, tag="profiler"):
    """One variant on one case under the profiler, in a process that times nothing."""

    variant: Variant
    case: Case
    library: str | None
    watchdog_seconds: float = WATCHDOG_SECONDS

    @property
    def wanted_stages(self) -> tuple[StageName, ...]:
        """All of it is timing."""
        return ("speed",)


class ProfilerResult(msgspec.Struct, frozen=True, tag="profiler_result"):
    """What the profiler said, or why it said nothing."""

    profiler: ProfilerTime | None
    missing: str | None
    context_lost: bool = False


class PairBlocks(msgspec.Struct, frozen=True):
    """log(candidate / baseline) of every block of one contest, and the same of the baseline against itself.

    `dropped` blocks were taken while the GPU was slowed down, and are not among them.  The medians of both arms'
    samples, in microseconds, decide nothing; `method` says how a sample was taken.
    """

    blocks: tuple[float, ...]
    control: tuple[float, ...]
    dropped: int
    candidate_us: float
    baseline_us: float
    method: str


class GateResult(msgspec.Struct, frozen=True, tag="gate_result"):
    """What one process of a gate measured, in the order of the contests, or why it did not."""

    outcome: Outcome
    message: str
    arm_pairs: tuple[PairBlocks, ...]
    context_lost: bool = False


class CaseResult(msgspec.Struct, frozen=True, tag="result"):
    """What came of a job: the outcome, how far it got, and the figures; no tensor, no live object.

    `caught_by` names the checks that found it wrong.  `context_lost` says that the worker's device context is of no
    more use.
    """

    outcome: Outcome
    message: str
    stages: tuple[Stage, ...]
    caught_by: tuple[str, ...] = ()
    check: Check | None = None
    repeats: Repeats | None = None
    diagnosis: Diagnosis | None = None
    speed: Speed | None = None
    context_lost: bool = False


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """A sign of life: the stage that a job is in, and how many seconds the next sign may take.

    `result` is what the job has come to if nothing more is heard.
    """

    stage: StageName
    seconds: float
    result: CaseResult | None = None


Job = CaseJob | GateJob | ProfilerJob
Result = CaseResult | GateResult | ProfilerResult


def encode(value: Job | Progress | Result) -> bytes:
    """A job, a sign of life or a result as JSON."""
    return msgspec.json.encode(value)


def decode_job(data: bytes) -> Job:
    """A job from JSON.  Raises `msgspec.ValidationError`."""
    job: Job = msgspec.json.decode(data, type=Job)
    return job


def decode_answer(data: bytes) -> Progress | Result:
    """What a worker sends, from JSON.  Raises `msgspec.ValidationError`."""
    return msgspec.json.decode(data, type=Progress | Result)

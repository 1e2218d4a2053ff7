"""Jobs, progress messages and results, which the pytest process and its workers exchange as JSON."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from pytest_fa.catalog.case import Case
from pytest_fa.catalog.discover import BUILTIN_ROOT
from pytest_fa.catalog.own_truth import OwnTruth
from pytest_fa.catalog.variant import Device, Tolerance, Variant
from pytest_fa.records.checks import Check, Diagnosis, Fingerprints, Repeats
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.paired import ArmOrder, SamplePlan
from pytest_fa.records.record import Stage, StageName
from pytest_fa.records.timing import CallNodes, ProfilerTime, Speed

WATCHDOG_SECONDS = 10.0
PREPARE_SECONDS = 60.0  # to open the GPU and to load the profiler


class CaseJob(msgspec.Struct, frozen=True, tag="case"):
    """One variant on one case, to be judged, timed, or both.

    `library` is the path of the variant's built library; None if the variant is not compiled.  `file_hashes` has the
    sha256 of the library and of each file beside it; a process that loads the library requires them.  A judged call is
    repeated `repeats` times; None means the default.  With `is_further_seed`, this shape was repeated with other data
    before, and the default is at most a tenth as many.  With `property_name`, that property is checked instead of the
    output.  `cross_checks` are the SDPA backends that are judged on the same inputs if the output is wrong.  A launch
    that has not returned after `watchdog_seconds` counts as hung.  `warm_ups` calls precede the judged call, outside
    its NVTX range.  With `without_attention`, one call is also judged in a process in which torch's own attention
    computes something else.  `shares_gpu`: processes that this run did not start used the GPU when it began.
    """

    variant: Variant
    case: Case
    library: str | None
    device: Device
    policy: Tolerance
    checks_output: bool
    time: bool
    repeats: int | None = 0
    property_name: str | None = None
    cross_checks: tuple[Variant, ...] = ()
    watchdog_seconds: float = WATCHDOG_SECONDS
    warm_ups: int = 0
    file_hashes: dict[str, str] = {}
    without_attention: bool = False
    is_further_seed: bool = False
    shares_gpu: bool = False

    @property
    def id(self) -> str:
        """Variant and case, or variant and property: `ws_p2-b1h8s512d64-fp16-seed0` or `ws_p2-streams`."""
        return f"{self.variant.name}-{self.property_name or self.case.id}"

    @property
    def slug(self) -> str:
        """The id as it is used in NVTX ranges and file names: without `@` and `=`, which profilers interpret."""
        return re.sub(r"[^A-Za-z0-9._-]", "-", self.id)

    @property
    def wanted_stages(self) -> tuple[StageName, ...]:
        """The stages of this job, in their order."""
        if self.property_name:
            return ("launch", "correct")
        judged: tuple[StageName, ...] = ("sanity", "correct") if self.checks_output else ()
        timed: tuple[StageName, ...] = ("speed",) if self.time else ()
        return ("launch", *judged, *timed)


class Arm(msgspec.Struct, frozen=True):
    """One side of a paired timing: a variant, and if it is compiled its library, with the hashes of a `CaseJob`."""

    variant: Variant
    library: str | None
    file_hashes: dict[str, str] = {}


class ArmPair(msgspec.Struct, frozen=True):
    """A candidate and the baseline that it is timed against, on one case."""

    case: Case
    candidate: Arm
    baseline: Arm


class PairedJob(msgspec.Struct, frozen=True, tag="paired"):
    """One process of paired timing: every arm pair, with the A/A control.

    `seed` determines the order in which the arms are allocated, captured and sampled.  The processes of one question
    have consecutive seeds.  `plans` are those of an earlier process, one for each pair; the first process has none.
    `shares_gpu` is that of `CaseJob`.
    """

    arm_pairs: tuple[ArmPair, ...]
    device: Device
    policy: Tolerance
    seed: int
    watchdog_seconds: float = WATCHDOG_SECONDS
    plans: tuple[SamplePlan, ...] = ()
    shares_gpu: bool = False

    @property
    def wanted_stages(self) -> tuple[StageName, ...]:
        """The only stage, `speed`."""
        return ("speed",)


class ProfilerJob(msgspec.Struct, frozen=True, tag="profiler"):
    """One variant on one case under torch's profiler, in a process in which nothing is timed.

    With `checks_output`, what the profiled calls write is judged by `policy`.  A call takes about `device_us`
    microseconds.
    """

    variant: Variant
    case: Case
    library: str | None
    policy: Tolerance
    checks_output: bool
    device_us: float
    watchdog_seconds: float = WATCHDOG_SECONDS
    file_hashes: dict[str, str] = {}

    @property
    def wanted_stages(self) -> tuple[StageName, ...]:
        """The only stage, `speed`."""
        return ("speed",)


class PrepareProfiler(msgspec.Struct, frozen=True, tag="prepare_profiler"):
    """A candidate's process is to open the GPU and to load the profiler, before the first `ProfilerJob`."""

    watchdog_seconds: float = PREPARE_SECONDS

    @property
    def wanted_stages(self) -> tuple[StageName, ...]:
        """The only stage, `speed`."""
        return ("speed",)


class ProfilerResult(msgspec.Struct, frozen=True, tag="profiler_result"):
    """The profiler's times, or the reason why there are none.

    `lacks_sharing` means that judge and candidate cannot share memory on this machine; nothing was profiled then.
    """

    profiler: ProfilerTime | None
    missing: str | None
    context_lost: bool = False
    lacks_sharing: bool = False


class PairBlocks(msgspec.Struct, frozen=True):
    """log(candidate time / baseline time) of every block of one arm pair; `control` is the same for the A/A control.

    `dropped` counts the blocks that were measured while heat or the hardware slowed the GPU down; they are not in
    `blocks`.  `candidate_us` and `baseline_us` are the medians of the samples, in microseconds, for information only.
    `method` says how a sample was taken, `order` in which order.  `outside_us` are the medians of both by the judge's
    clock, `plan` is how the samples of all arms were taken.  `nodes` are those of a call in the timed graphs of both.
    """

    blocks: tuple[float, ...]
    control: tuple[float, ...]
    dropped: int
    candidate_us: float
    baseline_us: float
    method: str
    order: ArmOrder | None = None
    outside_us: tuple[float, float] | None = None
    plan: SamplePlan | None = None
    nodes: tuple[CallNodes | None, CallNodes | None] = (None, None)


class PairedResult(msgspec.Struct, frozen=True, tag="paired_result"):
    """The measurements of one process of paired timing, in the order of the job's arm pairs.

    There are none unless the outcome is `ok`; `message` then gives the reason.  `seconds` are those of its parts.
    """

    outcome: Outcome
    message: str
    arm_pairs: tuple[PairBlocks, ...]
    context_lost: bool = False
    seconds: dict[str, float] = {}

    @property
    def plans(self) -> tuple[SamplePlan, ...]:
        """How the samples of all pairs were taken, for a later process; empty if that is not known of all."""
        plans = tuple(pair.plan for pair in self.arm_pairs if pair.plan)
        return plans if len(plans) == len(self.arm_pairs) else ()


class CaseResult(msgspec.Struct, frozen=True, tag="result"):
    """The result of a `CaseJob`: its outcome, the state of its stages, and its figures.

    `caught_by` names the checks that failed.  `context_lost` means that the worker's CUDA context can no longer be
    used.  `lacks_sharing` means that judge and candidate cannot share memory on this machine; nothing was judged then.
    `lacks_memory` means that the memory of the GPU was used up, maybe by other processes.
    `unprotected` says why judge and variant shared a process; it is empty if they did not.
    `compile_seconds` is how long calls took that may have compiled; they are in no stage's seconds.  `workspace_bytes`
    and `peak_bytes` are those of `Record`.  `during` says in which call the variant's process was lost, if that is
    known.
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
    fingerprints: Fingerprints | None = None
    lacks_sharing: bool = False
    lacks_memory: bool = False
    unprotected: str = ""
    compile_seconds: float = 0.0
    workspace_bytes: int | None = None
    peak_bytes: int | None = None
    during: str = ""


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """A progress message: the stage that a job is in, and the time limit until its next message, in seconds.

    `result` is the job's result if the worker ends before its next message.
    """

    stage: StageName
    seconds: float
    result: CaseResult | None = None


class Connect(msgspec.Struct, frozen=True, tag="connect"):
    """A new candidate process for the next jobs; its connection comes beside this message.

    `place` is 0 for the candidate, and 1 for one without torch's attention.  In paired timing, 1 is the baseline, and 2
    is the baseline once more.
    """

    pid: int
    place: int = 0


class ConnectTruth(msgspec.Struct, frozen=True, tag="connect_truth"):
    """A new process of the user's functions for the next jobs; its connection comes beside this message."""

    pid: int


class PrepareJudge(msgspec.Struct, frozen=True, tag="prepare_judge"):
    """A judge is to open the GPU and to load what it needs there, unless a job comes first.  It sends no answer."""


def own_truth_of(job: Job) -> OwnTruth | None:
    """The user's functions with which a variant of the job is compared, if there are some."""
    match job:
        case PairedJob():
            variants = [arm.variant for pair in job.arm_pairs for arm in (pair.candidate, pair.baseline)]
        case CaseJob() | ProfilerJob():
            variants = [job.variant]
        case _:
            variants = []
    return next((variant.own_truth for variant in variants if variant.own_truth), None)


Job = CaseJob | PairedJob | ProfilerJob | PrepareProfiler
JudgeRequest = Job | Connect | ConnectTruth | PrepareJudge  # to a judge
Result = CaseResult | PairedResult | ProfilerResult


def encode(value: JudgeRequest | Progress | Result) -> bytes:
    """A request to a judge, a progress message or a result as JSON."""
    return msgspec.json.encode(value)


def decode_job(data: bytes) -> Job:
    """A job from JSON.  Raises `msgspec.ValidationError`."""
    job: Job = msgspec.json.decode(data, type=Job)
    return job


def decode_request(data: bytes) -> JudgeRequest:
    """A request to a judge from JSON.  Raises `msgspec.ValidationError`."""
    request: JudgeRequest = msgspec.json.decode(data, type=JudgeRequest)
    return request


def read_job(path: Path) -> Job:
    """A job from a file.  Raises `OSError` and `msgspec.MsgspecError`."""
    job: Job = msgspec.json.decode(path.read_bytes(), type=Job)
    return job


def decode_answer(data: bytes) -> Progress | Result:
    """A progress message or a result from JSON.  Raises `msgspec.ValidationError`."""
    return msgspec.json.decode(data, type=Progress | Result)


def owner_of(variant: Variant) -> str:
    """The group of variants that share a worker: those of one folder, or all that are shipped with this package.

    Each variant of a PyTorch extension has a separate worker: two of them may register the same operator names.
    """
    if variant.entry.kind == "torch":
        return f"{variant.folder}:{variant.name}"
    return variant.root if is_built_in(variant) else variant.folder


def is_built_in(variant: Variant) -> bool:
    """Whether a variant is shipped with this package, as SDPA's backends are."""
    return Path(variant.root) == BUILTIN_ROOT

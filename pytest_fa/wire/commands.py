"""What the judge asks of a candidate, and what the candidate answers.  Both survive a JSON round trip.

Tensors never travel: they lie in memory that both sides see, and a message names them by `View`.  An answer is what a
stranger's process says: it may end a job, but it is never evidence that a result is right or a call is fast.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

import msgspec

from pytest_fa.attention.scores import Computes
from pytest_fa.catalog.variant import Device, Variant
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.ranges import Natural
from pytest_fa.records.timing import LaunchedKernel, NodeTime, Order

ViewDtype = Literal["float16", "bfloat16", "float32", "uint8", "float8_e4m3fn", "bool", "int32", "int8"]
Comes = Literal["as_viewed", "absent", "elsewhere"]  # a tensor itself, None, or a tensor on another device
Disturbance = Literal["poison_smem", "occupy", "clean_l2"]  # methods of `DeviceTools`, run before a call


class View(msgspec.Struct, frozen=True, array_like=True):
    """A tensor in shared memory.  `offset` and `strides` are in elements."""

    memory: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: ViewDtype


class CallViews(msgspec.Struct, frozen=True, array_like=True):
    """The arguments of one call.  `workspace`, [bytes] uint8, is for a kernel that asked for one.

    `words` are those of the parts of attention, each with its value, and `tensors` their further inputs.  `outputs` are
    the outputs that the call is asked for besides `out`.
    """

    q: View
    k: View
    v: View
    out: View
    scale: float
    words: dict[str, str | int | float | bool]
    workspace: View | None = None
    tensors: dict[str, View] = {}
    outputs: dict[str, View] = {}

    @property
    def written(self) -> tuple[View, ...]:
        """All outputs."""
        return (self.out, *self.outputs.values())

    def writing(self, out: View, *others: View) -> CallViews:
        """The same call with other outputs, as many as it has."""
        outputs = dict(zip(self.outputs, others, strict=True))
        return msgspec.structs.replace(self, out=out, outputs=outputs)


class Series(msgspec.Struct, frozen=True):
    """Calls of one shape that differ in where their tensors begin.

    `first` has every tensor at its lowest offset.  Call i reads q, k, v and the tensors named in `moved` `shifts[i]`
    elements further on, and writes `outs[out_of[i]]` and, by name, `more_outs[name][out_of[i]]`.
    """

    first: CallViews
    outs: tuple[View, ...]
    shifts: tuple[tuple[int, ...], ...]
    out_of: tuple[int, ...]
    moved: tuple[str, ...] = ()
    more_outs: dict[str, tuple[View, ...]] = {}


# -- commands ---------------------------------------------------------------------------------------------------------


class Open(msgspec.Struct, frozen=True, tag="open"):
    """Open the device and load the variant, whose built library is `library`.

    There is no variant where a function of this process is used as it is.  Without `tools`, the kernels of
    `DeviceTools` are not compiled, and commands that need them cannot be carried out.
    """

    variant: Variant | None
    library: str | None
    device: Device
    computes: Computes
    tools: bool = True


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """Map a piece of shared memory.  `handle` is CUDA's, in hexadecimal; on the CPU a descriptor comes beside it."""

    memory: int
    size_bytes: int
    handle: str = ""
    device_index: int = 0


class Detach(msgspec.Struct, frozen=True, tag="detach"):
    """Unmap pieces of shared memory."""

    memories: tuple[int, ...]


class WorkspaceBytes(msgspec.Struct, frozen=True, tag="workspace_bytes"):
    """Say how large a workspace a call needs."""

    call: CallViews


class MakeCall(msgspec.Struct, frozen=True, tag="call"):
    """Make one call and wait for it.  `before` runs first, and the NVTX range holds the variant's launches alone."""

    call: CallViews
    before: tuple[Disturbance, ...] = ()
    range_name: str | None = None


class MakeMalformedCall(msgspec.Struct, frozen=True, tag="malformed_call"):
    """Make one call whose arguments do not fit together, and wait for it.

    `argument` names the tensor that is malformed, and `comes` says what comes in its place.
    """

    call: CallViews
    argument: str
    comes: Comes = "as_viewed"


class Repeat(msgspec.Struct, frozen=True, tag="repeat"):
    """Make `count` calls.  Call i writes the output that begins `i * step` elements after that of `call`.

    Its further outputs begin `i * steps[name]` elements after those of `call`.

    `before[i % len(before)]` runs before call i.
    """

    call: CallViews
    count: int
    step: int
    before: tuple[tuple[Disturbance, ...], ...]
    steps: dict[str, int] = {}


class Sleep(msgspec.Struct, frozen=True, tag="sleep"):
    """A step of a script: keep the stream busy for this many clock cycles."""

    cycles: int


class Copy(msgspec.Struct, frozen=True, tag="copy"):
    """A step of a script: copy a tensor."""

    target: View
    source: View


class Launch(msgspec.Struct, frozen=True, tag="launch"):
    """A step of a script: make one call without waiting for it."""

    call: CallViews


ScriptStep = Sleep | Copy | Launch


class Script(msgspec.Struct, frozen=True, tag="script"):
    """Queue steps on streams: one thread and one side stream for each tuple of steps; then wait for all of them."""

    threads: tuple[tuple[ScriptStep, ...], ...]


class CaptureCall(msgspec.Struct, frozen=True, tag="capture_call"):
    """Capture one call as a CUDA graph; with `fresh`, as the first call of a new copy of the library."""

    call: CallViews
    is_first_call: bool = False


class ReplayCall(msgspec.Struct, frozen=True, tag="replay_call"):
    """Replay the graph of `CaptureCall` and wait for it."""


class Delegates(msgspec.Struct, frozen=True, tag="delegates"):
    """Make one call and list the operators that run in it, in every thread."""

    call: CallViews


class PeakBytes(msgspec.Struct, frozen=True, tag="peak_bytes"):
    """Make one call on a GPU, and say how much memory it took from torch's caching allocator at most."""

    call: CallViews


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """Make the arguments of a series of calls, under a name.  On the CPU, with torch's number of threads."""

    name: str
    series: Series
    cpu_threads: int | None = None


class Run(msgspec.Struct, frozen=True, tag="run"):
    """Make the first `count` calls of a prepared series back to back and wait for them."""

    name: str
    count: int


class Capture(msgspec.Struct, frozen=True, tag="capture"):
    """Capture the calls of a prepared series as a CUDA graph, after one call outside it, and read all its nodes."""

    name: str


class ReplaySeries(msgspec.Struct, frozen=True, tag="replay"):
    """Replay the graph of a prepared series once and wait for it."""

    name: str


class Cold(msgspec.Struct, frozen=True, tag="cold"):
    """Time each call of a prepared series once, after the L2 cache was read full of other data."""

    name: str


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Replay the graph of a prepared series so many times without a pause, and wait for them."""

    name: str
    replays: int


class Profile(msgspec.Struct, frozen=True, tag="profile"):
    """Replay the graph of a prepared series once under torch's profiler."""

    name: str


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    """Forget all prepared series and their graphs."""


class EndJob(msgspec.Struct, frozen=True, tag="end_job"):
    """Forget what the job left behind, and write out what the variant printed."""


Command = (
    Open
    | Attach
    | Detach
    | WorkspaceBytes
    | MakeCall
    | MakeMalformedCall
    | Repeat
    | Script
    | CaptureCall
    | ReplayCall
    | Delegates
    | PeakBytes
    | Prepare
    | Run
    | Capture
    | ReplaySeries
    | Cold
    | Load
    | Profile
    | Forget
    | EndJob
)

# -- answers ----------------------------------------------------------------------------------------------------------


class Allocated(msgspec.Struct, frozen=True):
    """An output that a call allocated instead of writing `out`: CUDA's handle of its memory, and its place there."""

    handle: str
    size_bytes: int
    offset_bytes: int
    strides: tuple[int, ...]


class ProfilerReport(msgspec.Struct, frozen=True):
    """What the profiler reports for one replay: the nodes of one call on average, and the number of all records."""

    nodes: tuple[NodeTime, ...]
    records: Natural


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The command is carried out.  Which fields are set depends on the command.

    `inside_us` is the candidate's own clock.  `allocated` has one entry for each tensor of each output of a series:
    None where the kernel wrote the output that it was given.  `compiles` is whether the variant has loaded a package
    that compiles at the first call.  `is_reached` is whether a malformed call reached the variant's own function.
    """

    size_bytes: int = 0
    names: tuple[str, ...] = ()
    inside_us: tuple[float, ...] = ()
    why_no_tools: str | None = None
    launches: tuple[LaunchedKernel, ...] = ()
    launches_missing: str | None = None
    other_nodes: dict[str, int] = {}
    order: Order | None = None
    allocated: tuple[Allocated | None, ...] = ()
    compiles: bool = False
    is_reached: bool = True
    profiled: ProfilerReport | None = None
    peak_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**52)] = 0  # with a workspace, still a `Natural`


Ending = Literal[Outcome.CRASHED, Outcome.HUNG, Outcome.FAILED]  # how a process was lost


class ProblemKind(StrEnum):
    """Which exception ended a command: that of an outcome, or one that has none."""

    UNSUPPORTED = Outcome.UNSUPPORTED
    LAUNCH_FAILED = Outcome.LAUNCH_FAILED
    DEVICE_ERROR = Outcome.DEVICE_ERROR
    WRONG = Outcome.WRONG
    CHEAT = Outcome.CHEAT
    FAILED = Outcome.FAILED
    CANNOT_CAPTURE = "cannot_capture"


class CallProblem(msgspec.Struct, frozen=True, tag="problem"):
    """An exception ended the command; `explanation` is for the author, `caught_by` names the check that noticed."""

    kind: ProblemKind
    message: str
    explanation: str
    caught_by: tuple[str, ...] = ()
    is_wrong_call: bool = False


CandidateAnswer = Done | CallProblem
MAX_ANSWER_CHARACTERS = 20_000
NUMBER_BYTES = 8  # of the secret number that precedes a command and its answer


def encode_command(command: Command) -> bytes:
    """A command as JSON."""
    return msgspec.json.encode(command)


def decode_command(data: bytes) -> Command:
    """A command from JSON.  Raises `msgspec.ValidationError`."""
    command: Command = msgspec.json.decode(data, type=Command)
    return command


def encode_answer(answer: CandidateAnswer) -> bytes:
    """An answer as JSON."""
    return msgspec.json.encode(answer)


def decode_candidate_answer(data: bytes) -> CandidateAnswer:
    """An answer from JSON.  Raises `msgspec.ValidationError`."""
    answer: CandidateAnswer = msgspec.json.decode(data, type=CandidateAnswer)
    return answer

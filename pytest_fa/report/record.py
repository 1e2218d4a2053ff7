"""The record types: everything that is written down, in the order of the run that makes it.

A record is one JSON line per case.  A number that was not measured is None, and a `*_missing` text says why.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from pytest_fa.catalog.case import Case
from pytest_fa.catalog.variant import Target
from pytest_fa.gate.verdict import PairSamples, Verdict
from pytest_fa.report.profiled import Profile, Sanitized

SCHEMA = 3

Outcome = Literal[
    "ok",
    "failed",
    "wrong",
    "unsupported",
    "launch_failed",
    "device_error",
    "crashed",
    "hung",
    "not_built",
    "over_limit",
    "gate_failed",
    "inconclusive",
    "not_measured",
    "hazard",
]
StageName = Literal["build", "launch", "sanity", "correct", "speed"]
STAGES: tuple[StageName, ...] = ("build", "launch", "sanity", "correct", "speed")
StageState = Literal["ok", "failed", "not reached"]
Kind = Literal["build", "correct", "property", "speed", "selftest", "gate", "profile", "sanitize"]


class Kernel(msgspec.Struct, frozen=True):
    """One `__global__` function of a leaf: what ptxas and the disassembler say of it."""

    name: str
    mangled: str
    registers_per_thread: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    smem_bytes_per_block: int
    instructions: dict[str, int] = {}
    sass_bytes: int | None = None
    max_threads_per_block: int | None = None

    @property
    def spill_bytes(self) -> int:
        """Spilled bytes, stores and loads together."""
        return self.spill_store_bytes + self.spill_load_bytes


class Advisory(msgspec.Struct, frozen=True):
    """A remark of ptxas, such as C7508 (setmaxnreg ignored) or C7511 (wgmma serialised)."""

    code: str
    text: str


class Leaf(msgspec.Struct, frozen=True):
    """One compiled variant for one architecture, as it lies in the cache."""

    variant: str
    arch: Target
    key: str
    library: str
    code_identity: str | None
    code_identity_missing: str | None
    kernels: tuple[Kernel, ...]
    advisories: tuple[Advisory, ...]
    command: tuple[str, ...]
    compiler: str
    built_on: str
    built_at: str
    build_seconds: float


class LaunchedKernel(msgspec.Struct, frozen=True):
    """One kernel of a captured call, and how many nodes launch it alike."""

    mangled: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    dynamic_smem_bytes: int
    count: int = 1
    static_smem_bytes: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)


class Stage(msgspec.Struct, frozen=True):
    """How far a run came: ok, failed, or not reached, and the seconds it took."""

    name: StageName
    state: StageState
    seconds: float = 0.0


class Bound(msgspec.Struct, frozen=True):
    """One bound of a tolerance policy: the value found beside the value allowed.  A value of None is not finite."""

    name: str
    value: float | None
    allowed: float
    holds: bool
    judged: bool = True

    @property
    def used(self) -> float | None:
        """The used fraction of the bound: 1.0 is the edge."""
        if self.value is None:
            return None
        if self.allowed:
            return self.value / self.allowed
        return 0.0 if self.holds else float("inf")


ON_CPU = "runs on the CPU"  # why a figure of a device is missing

Index = tuple[int, int, int, int]


class Check(msgspec.Struct, frozen=True):
    """The verdict on one output.  Indices are (batch, head, query, dim), of scores (batch, head, query, key)."""

    policy: str
    passed: bool
    bounds: tuple[Bound, ...]
    max_abs_error: float | None
    rms_error: float | None
    yardstick_max_error: float
    yardstick_rms_error: float
    nonfinite_count: int
    bad_count: int
    element_count: int
    first_bad: Index | None
    worst: Index | None
    worst_got: float | None
    worst_want: float | None

    @property
    def tightest(self) -> Bound:
        """The bound that broke, else the one that is nearest to breaking."""
        judged = [bound for bound in self.bounds if bound.judged] or list(self.bounds)
        return next((b for b in judged if not b.holds), max(judged, key=lambda b: b.used or 0.0))

    @property
    def complaint(self) -> str:
        """The tightest bound in a few words: what was found, what is allowed."""
        bound = self.tightest
        value = "not finite" if bound.value is None else f"{bound.value:.3g}"
        return f"{bound.name} error is {value}, allowed is {bound.allowed:.3g}"


class Repeats(msgspec.Struct, frozen=True):
    """The same call repeated: how many outputs differed bitwise from the first, in how many elements, where first.

    `dirt_missing` says why shared memory was not dirtied before each call; None where it was.
    """

    count: int
    differing: int
    element_count: int
    first: Index | None
    dirt_missing: str | None


class Witness(msgspec.Struct, frozen=True):
    """An SDPA backend on the same inputs, judged by the same rule; `absent` says why there is no verdict."""

    name: str
    passed: bool | None
    max_abs_error: float | None
    absent: str | None


class Diagnosis(msgspec.Struct, frozen=True):
    """What a failure says beyond its bounds: where the error is, its likely cause, and who is off."""

    error_map: tuple[str, ...]
    cause: str
    witnesses: tuple[Witness, ...]
    who_is_off: str


class Clocks(msgspec.Struct, frozen=True):
    """What NVML says of the GPU at one moment."""

    sm_mhz: int
    memory_mhz: int
    power_watts: float
    temperature_c: int
    throttle_reasons: int


class Timing(msgspec.Struct, frozen=True):
    """Raw samples of one way to measure, in microseconds per call.

    `precision` is the half-width of the mean's 95 % interval, as a share of it; `dropped` samples were taken while heat
    or the hardware slowed the GPU down, `is_throttled` says that these were too many for the rest to be trusted.
    """

    method: str
    samples_us: tuple[float, ...]
    median_us: float
    calls_per_sample: int
    precision: float | None = None
    dropped: int = 0
    is_throttled: bool = False


# How a call's nodes hang together: one after the other; side by side; or one beginning before its forerunner ends.
Order = Literal["chain", "branches", "programmatic"]


class NodeTime(msgspec.Struct, frozen=True):
    """One kernel, memset or copy of a call, by the profiler: its mean duration and how often a call has it."""

    name: str
    mean_us: float
    count: int


class Busy(msgspec.Struct, frozen=True):
    """What one call does on the device, by the profiler's clock, in a process of its own.

    `overhead_us` is what kernels of the same geometry that only wait take beyond that by the period's clock: the two
    clocks do not begin and end at the same instants.
    """

    busy_us: float
    overhead_us: float
    nodes: tuple[NodeTime, ...]
    missing_count: int


class Agreement(msgspec.Struct, frozen=True):
    """Whether two clocks and the kernels' names confirm a time; None where there is nothing to compare.

    `least_us` is the shorter of what both clocks say, where there are two.
    """

    valid: bool | None
    reason: str
    least_us: float | None = None


class Speed(msgspec.Struct, frozen=True):
    """What one variant costs on one shape.

    `device_us` is the period of back-to-back calls on the device (CPU variants: wall clock of one call), `call_us` what
    a Python caller waits per call, `cold` one call after L2 was cleaned, `floor_us` the period of empty kernels of the
    same grid, block, cluster and shared memory.  `other_nodes` counts memsets and copies of a captured call, `order`
    says how its nodes hang together: a programmatic one is a period of its own kind.  `neighbours` are other processes
    that were on the GPU.  `buffers` sets of inputs and outputs take turns; `exceeds_l2` says that one set
    alone is over a quarter of L2.
    """

    device: Timing
    call: Timing
    buffers: int
    exceeds_l2: bool
    launches: tuple[LaunchedKernel, ...]
    launches_missing: str | None
    clocks_before: Clocks | None
    clocks_after: Clocks | None
    clocks_during: Clocks | None = None
    cold: Timing | None = None
    cold_missing: str | None = None
    floor_us: float | None = None
    order: Order | None = None
    other_nodes: dict[str, int] = {}
    busy: Busy | None = None
    busy_missing: str | None = None
    agreement: Agreement | None = None
    neighbours: tuple[str, ...] = ()


class GatePair(msgspec.Struct, frozen=True):
    """One shape against one baseline: the raw blocks, and the ratio candidate / baseline with its intervals.

    An end that is not finite is None.
    """

    samples: PairSamples
    ratio: float | None
    low: float | None
    high: float | None
    bootstrap_low: float | None
    bootstrap_high: float | None
    method: str = ""


class Gate(msgspec.Struct, frozen=True):
    """What a gate asked and found.

    `ratio` is the gate, `seed` draws orders, `dropped_blocks` were taken while the GPU was slowed down, `process_sd` is
    the largest standard deviation of process means among the pairs; `left_out` names what was not gated, and why.
    """

    ratio: float
    verdict: Verdict
    reason: str
    processes: int
    seed: int
    dropped_blocks: int
    detectable: float
    process_sd: float | None
    seconds: float
    pilot_us: dict[str, dict[str, float]]
    pairs: tuple[GatePair, ...]
    left_out: tuple[str, ...] = ()


class Environment(msgspec.Struct, frozen=True):
    """Where a record was made."""

    gpu: str | None
    compute_capability: str | None
    driver: str | None
    cuda: str | None
    torch: str | None
    python: str
    host: str
    cpu: str
    pytest_fa: str


class Source(msgspec.Struct, frozen=True):
    """The commit the source was at, and whether it had changes; from git, or from the file written before a copy."""

    commit: str | None
    dirty: bool | None
    origin: str


class Ablation(msgspec.Struct, frozen=True):
    """What a variant that computes no attention leaves out, and of whom."""

    stage: str
    parent: str


class Record(msgspec.Struct, frozen=True):
    """One line: one variant on one case (or its build alone).

    `leaves` holds the leaf that ran, or for a build every architecture's.
    """

    schema: int
    id: str
    kind: Kind
    variant: str
    role: str
    case: Case | None
    outcome: Outcome
    message: str
    caught_by: tuple[str, ...]
    stages: tuple[Stage, ...]
    leaves: tuple[Leaf, ...]
    check: Check | None
    repeats: Repeats | None
    diagnosis: Diagnosis | None
    speed: Speed | None
    gate: Gate | None
    environment: Environment
    source: Source
    measured_at: str
    repeat: str
    profile: Profile | None = None
    sanitized: Sanitized | None = None
    ablation: Ablation | None = None


def to_json(value: msgspec.Struct) -> bytes:
    """One line of JSON without its newline."""
    return msgspec.json.encode(value)


def to_builtins(value: msgspec.Struct) -> Any:  # noqa: ANN401  # JSON-able
    """Dicts, lists and numbers, for the test report that xdist sends along."""
    return msgspec.to_builtins(value)


def read_record(data: bytes | str | dict[str, Any]) -> Record:
    """A record from its line or its builtins.  Raises `msgspec.ValidationError`."""
    return msgspec.convert(data, Record) if isinstance(data, dict) else msgspec.json.decode(data, type=Record)

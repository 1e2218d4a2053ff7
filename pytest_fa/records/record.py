"""The type `Record`: one JSON line with everything that was measured or checked for one variant on one case.

A number that was not measured is None, and a field `*_missing` says why.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from pytest_fa.catalog.case import Case
from pytest_fa.records.built import Build
from pytest_fa.records.checks import Check, Diagnosis, Fingerprints, Repeats
from pytest_fa.records.costs import Costs
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.ranges import Name, Natural, Rate, Real, Seconds
from pytest_fa.records.timing import Speed

SCHEMA = 6

StageName = Literal["build", "launch", "sanity", "correct", "speed"]
STAGES: tuple[StageName, ...] = ("build", "launch", "sanity", "correct", "speed")
StageState = Literal["ok", "failed", "not reached"]  # of one stage, which is no outcome: a wrong output fails a stage
RecordKind = Literal["build", "correct", "property", "speed", "selftest", "gate", "profile", "sanitize", "hunt"]
JUDGED_KINDS: tuple[RecordKind, ...] = ("correct", "speed", "property")  # whose calls write an output that is judged


class Stage(msgspec.Struct, frozen=True):
    """One stage of a run: its state, and the seconds it took."""

    name: StageName
    state: StageState
    seconds: Seconds = 0.0


class Environment(msgspec.Struct, frozen=True):
    """The GPU, the host and the software versions that a record was made with."""

    gpu: str | None
    compute_capability: str | None
    driver: str | None
    cuda: str | None
    torch: str | None
    python: str
    host: str
    cpu: str
    pytest_fa: str


class MachineIdentity(msgspec.Struct, frozen=True):
    """Which machine and which GPU made a record, and the settings of that GPU; what NVML cannot read is None.

    `host_hash` and `gpu_hash` are salted hashes of the host's name and of the GPU's UUID: they tell machines and GPUs
    apart and do not name them.  `mig` is True for a slice of a GPU.
    """

    host_hash: str
    gpu_hash: str | None = None
    mig: bool | None = None
    ecc: bool | None = None
    power_limit_watts: Rate | None = None


class Source(msgspec.Struct, frozen=True):
    """The commit of the source, and whether the source differed from it.

    `origin` says where this was read: `git`, or the stamp file that is written before a tree is copied.
    """

    commit: str | None
    dirty: bool | None
    origin: str


class Ablation(msgspec.Struct, frozen=True):
    """The phase that an ablation omits, and the variant that it is an ablation of."""

    phase: str
    parent: str


class Reference(msgspec.Struct, frozen=True):
    """The user's functions with which outputs were compared in place of attention, and the sha256 of their file.

    `max_error` is the largest error that the user allowed; None if the second function said how large an error may be.
    """

    functions: str
    sha256: str
    max_error: Real | None = None


class Record(msgspec.Struct, frozen=True):
    """The record of one variant on one case, or of its builds if `kind` is `build`.

    `builds` holds the build that ran; for kind `build`, those of all architectures.  `output` is the end
    of what the worker printed, if the test failed.  `is_claim` marks a case that was added for what the manifest claims
    to support.  `unprotected` says why judge and variant shared a process; it is empty if they did not.
    `compile_seconds` is how long the first calls took of a variant that compiles when it is called; no
    stage's seconds contain them.  `costs` is None for a record that no job made, and for older records.
    `sources` has the sha256 of each module, library and manifest of a Python variant, by its path from the root folder;
    it is empty for other variants, for those of this package, and for older records.  `own_tolerance` says how the
    variant's own manifest makes the checks less strict, such as `tolerance: absolute`; it is empty if it does not, or
    if the run has a policy of its own.  `reference` is None if outputs were compared with attention.

    `workspace_bytes` is what the kernel asked for through `fa_workspace_bytes`; 0 without it.  `peak_bytes` is the most
    device memory that a call after the first had beyond its tensors: its workspace, and what its process took from
    torch's caching allocator.  The process reports that itself: it is a figure and no evidence.  The judge cannot see
    it: cudaMemGetInfo has no peak, counts other processes, and does not change where torch reuses memory.  Both are
    None in older records and where no output of the case was judged, and `peak_bytes` is None on the CPU.
    """

    schema: int
    id: Name
    kind: RecordKind
    variant: Name
    role: str
    case: Case | None
    outcome: Outcome
    message: str
    caught_by: tuple[str, ...]
    stages: tuple[Stage, ...]
    builds: tuple[Build, ...]
    check: Check | None
    repeats: Repeats | None
    diagnosis: Diagnosis | None
    speed: Speed | None
    environment: Environment
    source: Source
    measured_at: str
    rerun_command: str
    added: dict[str, Any] = {}  # by the name of the feature that added it; `added.py` has the types
    ablation: Ablation | None = None
    other_plugins: tuple[str, ...] = ()  # which could have changed this run, besides pytest's and this package
    fingerprints: Fingerprints | None = None
    machine: MachineIdentity | None = None
    output: str = ""
    is_claim: bool = False
    costs: Costs | None = None
    unprotected: str = ""
    compile_seconds: Seconds = 0.0
    sources: dict[str, str] = {}
    own_tolerance: str = ""
    reference: Reference | None = None
    workspace_bytes: Natural | None = None
    peak_bytes: Natural | None = None


def to_json(value: msgspec.Struct) -> bytes:
    """Return one line of JSON, without a newline."""
    return msgspec.json.encode(value)


def to_builtins(value: msgspec.Struct) -> Any:  # noqa: ANN401  # JSON-able
    """Return dicts, lists and numbers, which pytest-xdist can serialise as part of a test report.

    They are those of the value's JSON, so that a number that is not finite is None here as well.
    """
    return msgspec.json.decode(msgspec.json.encode(value))

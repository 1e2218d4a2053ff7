"""Records, manifests, sources and options for tests."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.variant import Arch, Entry, EntryKind, Limits, Role, Supports, Variant
from pytest_fa.options.options import Options
from pytest_fa.records.built import Advisory, Build, Kernel
from pytest_fa.records.ceilings import Ceilings
from pytest_fa.records.checks import Bound, Check, Repeats
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import SCHEMA, STAGES, Environment, Record, RecordKind, Source, Stage
from pytest_fa.records.timing import Agreement, Clocks, LaunchedKernel, OutsideTime, Speed, Timing
from pytest_fa.wire.jobs import CaseJob

if TYPE_CHECKING:
    from hypothesis import settings

RECORDED = Path(__file__).parent / "recorded"
FAKES = Path(__file__).parent / "fakes"

# -- manifests and sources --------------------------------------------------------------------------------------------

WriteVariant = Callable[..., Path]

MANIFEST = """\
step: a test's variant
because: a test needs one
expect: what the test asserts
"""

# A straightforward float32 attention, which tests change to insert errors.
PYTHON_SOURCE = """\
import torch


def forward(q, k, v, *, scale, causal="none", out=None):
    scores = q.float() @ k.float().transpose(2, 3) * scale
    if causal == "top_left":
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    result = (torch.softmax(scores, -1) @ v.float()).to(q.dtype)
    return result if out is None else out.copy_(result)
"""

PYTHON_MANIFEST = (
    MANIFEST
    + 'entry: {kind: python, target: "entry:forward"}\nsupports: {device: [cpu, cuda], causal: [none, top_left]}\n'
)

# Straightforward float32 scores, and the manifest of a probe that computes only scores.
SCORES_SOURCE = """\
import torch


def forward(q, k, v, *, scale, causal="none", out=None):
    result = (q.float() @ k.float().transpose(2, 3) * scale).to(q.dtype)
    return result if out is None else out.copy_(result)
"""

SCORES_MANIFEST = (
    MANIFEST
    + "role: probe\ncomputes: scores\ncases: [b1h1s4d4-fp16, b1h1s32d64-fp16-sk64]\n"
    + 'entry: {kind: python, target: "entry:forward"}\nsupports: {device: [cpu, cuda], head_dim: [64, 4]}\n'
)

# Compiles in one second and writes zeros, which is enough to test the builder.
CUDA_SOURCE = """\
#include "fa_forward.h"

#ifndef BLOCK
#define BLOCK 64
#endif

__global__ void zero_kernel(float* out) { out[threadIdx.x + blockIdx.x * BLOCK] = 0.0f; }

FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t stream) {
  zero_kernel<<<1, BLOCK, 0, stream>>>(static_cast<float*>(args->out));
  return static_cast<int>(cudaPeekAtLastError());
}
"""

# A kernel that takes a while to compile: thousands of instantiations of a recursive template.
SLOW_SOURCE = CUDA_SOURCE.replace(
    "FA_EXPORT",
    "template <int N> __device__ float deep(float x) { return deep<N - 1>(x * N + 1.0f) + deep<N - 2>(x); }\n"
    "template <> __device__ float deep<0>(float x) { return x; }\n"
    "template <> __device__ float deep<1>(float x) { return x + 1.0f; }\n"
    "__global__ void slow_kernel(float* out) { *out = deep<26>(*out); }\n\nFA_EXPORT",
    1,
)


def variant(name: str, role: Role = "candidate", kind: EntryKind = "cuda") -> Variant:
    """Return a variant with this name, role and kind of entry."""
    return Variant(
        name=name,
        folder=f"kernels/{name}",
        root="kernels",
        role=role,
        entry=Entry(kind=kind),
        arch=(),
        supports=Supports(),
        instantiations=(("fp16", 64),),
        defines={},
        flags=(),
        rounds=(),
        limits=Limits(),
        tolerance="same_precision",
        step="",
        parent=None,
        because="",
        expect="",
    )


def options(folder: Path, **changes: Any) -> Options:
    """Return the default options of a run in `folder`; `changes` are other fields."""
    plain = Options(
        rootdir=folder,
        variants=(),
        kernels=(folder / "kernels",),
        suites=("history",),
        cases=(),
        seeds=None,
        dtypes=(),
        defines=(),
        allowed_flags=(),
        arches=(),
        tolerance=None,
        soak=None,
        watchdog_seconds=None,
        baselines="needed",
        static=False,
        cache=folder / "cache",
        artifacts=folder / "artifacts",
        records_folder=folder / "profiles",
        clean=False,
        no_build=False,
        require_gpu=False,
        save=False,
        timing=True,
        reuses_times=True,
        rerun=("pytest",),
        is_given=True,
    )
    return dataclasses.replace(plain, **changes)


# -- one full record --------------------------------------------------------------------------------------------------

KERNEL = Kernel("kernel<fp16, 64>", "_Z6kernel", 168, 4, 8, 16, 49152, {"HGMMA": 12, "LDL": 0}, 4096)
BUILD = Build(
    variant="ws_p2@BLOCK_M=64",
    arch="sm_90a",
    key="0123abcd",
    library="builds/ws_p2/kernel.so",
    code_identity=None,
    code_identity_missing="no disassembler",
    kernels=(KERNEL,),
    advisories=(Advisory("C7508", "setmaxnreg ignored"),),
    command=("nvcc", "-shared", "kernel.cu"),
    compiler="13.0",
    built_on="a host",
    built_at="2026-01-01T00:00:00+00:00",
    build_seconds=1.5,
)
CHECK = Check(
    policy="same_precision",
    passed=False,
    bounds=(Bound("finite", 0.0, 0.0, True), Bound("max", 0.02, 0.01, False), Bound("gain", 0.5, 0.1, False, False)),
    max_abs_error=0.02,
    rms_error=0.001,
    same_precision_max_error=0.005,
    same_precision_rms_error=0.0005,
    nonfinite_count=0,
    bad_count=3,
    element_count=262144,
    first_bad=(0, 1, 2, 3),
    worst=(0, 7, 511, 63),
    worst_got=0.25,
    worst_want=0.27,
)
SPEED = Speed(
    device=Timing("graph replay", (10.25, 10.5, 10.125), 10.25, 20),
    call=Timing("wall clock", (14.0, 15.0), 14.5, 1),
    buffers=3,
    exceeds_l2=False,
    launches=(LaunchedKernel("_Z6kernel", (8, 8, 1), (384, 1, 1), 49152, 2),),
    launches_missing=None,
    clocks_before=Clocks(1980, 2619, 700.5, 40, 0),
    clocks_after=None,
    agreement=Agreement(valid=None, reason="not profiled"),
)
RECORD = Record(
    schema=SCHEMA,
    id="ws_p2@BLOCK_M=64-b1h8s512d64-fp16-causal-seed3",
    kind="speed",
    variant="ws_p2@BLOCK_M=64",
    role="candidate",
    case=parse_case("b1h8s512d64-fp16-causal-seed3"),
    outcome=Outcome.WRONG,
    message='max error is 0.02, allowed is 0.01\na second line, "quoted" and \N{GREEK SMALL LETTER MU}',
    caught_by=(),
    stages=(Stage("build", "ok", 1.5), Stage("launch", "failed", 0.25), Stage("sanity", "not reached")),
    builds=(BUILD,),
    check=CHECK,
    repeats=Repeats(100, 3, 17, (0, 7, 64, 0), "cuda.bindings is not installed"),
    diagnosis=None,
    speed=SPEED,
    environment=Environment("NVIDIA H200", "9.0", "580.1", "13.0", "2.11", "3.12.1", "Linux 6", "a CPU", "0.1.0"),
    source=Source("0123abcd", True, "git"),
    measured_at="2026-01-01T00:00:00+00:00",
    rerun_command="pytest --fa-variant=ws_p2",
)
BARE = msgspec.structs.replace(
    RECORD,
    kind="build",
    case=None,
    outcome=Outcome.OK,
    message="",
    stages=(),
    builds=(),
    check=None,
    repeats=None,
    speed=None,
    environment=Environment(None, None, None, None, None, "3.12.1", "Linux 6", "a CPU", "0.1.0"),
    source=Source(None, None, "no git"),
)

# -- a GPU ------------------------------------------------------------------------------------------------------------

ENVIRONMENT = Environment("NVIDIA H200", "9.0", "580", "13.0", "2.11", "3.12.1", "Linux 6", "a CPU", "0.1.0")
CEILINGS = Ceilings(
    copy_gb_per_s=4000.0,
    matmul_tflops={"fp16": 800.0},
    empty_launch_us=0.6,
    timings={"copy": Timing("graph of 10 calls", (1.0, 1.1), 1.05, 10)},
    clocks_during=None,
    environment=ENVIRONMENT,
    source=Source(None, None, "no git"),
    measured_at="2026-01-01T00:00:00+00:00",
)


# -- a job ------------------------------------------------------------------------------------------------------------


def cpu_job(variant: Variant, case: str, **fields: Any) -> CaseJob:
    """A job that judges a variant on the CPU, with other values of these fields."""
    job = CaseJob(variant, parse_case(case), None, "cpu", "same_precision", checks_output=True, time=False)
    return msgspec.structs.replace(job, **fields)


# -- minimal records --------------------------------------------------------------------------------------------------

SHAPE = "b1h8s512d64-fp16"
SMALL_SHAPE = "b1h2s64d64-fp16"
FLOPS = 4 * 8 * 512 * 512 * 64  # operations per call at SHAPE


def record(variant: str = "mine", case: str = f"{SHAPE}-seed0", kind: RecordKind = "correct", **changes: Any) -> Record:
    """Return a record with only a variant, a case and a kind; `changes` are other fields."""
    plain = Record(
        schema=SCHEMA,
        id=f"{variant}-{case}",
        kind=kind,
        variant=variant,
        role="candidate",
        case=parse_case(case) if kind != "build" else None,
        outcome=Outcome.OK,
        message="",
        caught_by=(),
        stages=(),
        builds=(),
        check=None,
        repeats=None,
        diagnosis=None,
        speed=None,
        environment=Environment(None, None, None, None, None, "3.12.1", "Linux 6", "a CPU", "0.1.0"),
        source=Source(None, None, "no git"),
        measured_at="2026-01-01T00:00:00+00:00",
        rerun_command="pytest",
    )
    return msgspec.structs.replace(plain, **changes)


def right_record(variant: str = "mine", case: str = f"{SHAPE}-seed0", **changes: Any) -> Record:
    """Return the record of a right case in fp16 with all its evidence: stages, check and repeats."""
    values = {"finite": (0.0, 0.0), "max": (0.001, 0.002 + 2**-11), "rms": (0.0001, 0.00015 + 2**-13)}
    values |= {"row rms": (0.1, 0.2), "gain": (0.1, 0.2)}
    bounds = (Bound(name, value, allowed, True) for name, (value, allowed) in values.items())
    elements = math.prod(parse_case(case).out_shape)
    judged = msgspec.structs.replace(check(*bounds), max_abs_error=0.001, rms_error=0.0001, element_count=elements)
    stages = (*(Stage(name, "ok") for name in STAGES[:-1]), Stage(STAGES[-1], "not reached"))
    return record(variant, case, stages=stages, check=judged, repeats=Repeats(100, 0, 0, None, None), **changes)


def check(*bounds: Bound) -> Check:
    """Return a check with these bounds."""
    passed = all(bound.holds for bound in bounds)
    return Check("same_precision", passed, bounds, None, None, 0.001, 0.0001, 0, 0, 64, None, None, None, None)


def speed(device_us: float, call_us: float = 20.0, launched: tuple[str, ...] = ()) -> Speed:
    """Return a speed with these medians, whose call launches these kernels."""
    return Speed(
        device=Timing("graph replay", (device_us,), device_us, 1),
        call=Timing("wall clock", (call_us,), call_us, 1),
        buffers=1,
        exceeds_l2=False,
        launches=tuple(LaunchedKernel(name, (1, 1, 1), (128, 1, 1), 0) for name in launched),
        launches_missing=None if launched else "not read",
        clocks_before=None,
        clocks_after=None,
        agreement=Agreement(valid=None, reason="not profiled"),
        outside=OutsideTime(device_us, 0.001, device_us, 3000, device_us, 1000),
    )


def build(arch: Arch, **kernels: tuple[int, int, int]) -> Build:
    """Return a build; each kernel is given as (registers, spill store bytes, spill load bytes)."""
    listed = tuple(Kernel(name, name, *figures, 0, 0) for name, figures in kernels.items())
    return Build("mine", arch, "key", "kernel.so", "code", None, listed, (), (), "13.0", "a host", "today", 1.0)


# -- fuzz tests -------------------------------------------------------------------------------------------------------

FUZZ_EXAMPLES = "FA_FUZZ_EXAMPLES"  # the environment variable with the number of examples of each fuzz test


def fuzz_settings(examples: int = 100, *, slowness: int = 1) -> settings:
    """Return Hypothesis's settings of a fuzz test, as its decorator.

    The test runs `examples` examples, the same in every run.  If FA_FUZZ_EXAMPLES is set, it runs that number of random
    examples, divided by `slowness`.  An example that takes more than 20 s counts as a hang, and fails.
    """
    from hypothesis import HealthCheck, settings

    given = os.environ.get(FUZZ_EXAMPLES)
    return settings(
        max_examples=max(1, int(given) // slowness) if given else examples,
        derandomize=given is None,
        database=None,
        deadline=timedelta(seconds=20),
        suppress_health_check=list(HealthCheck),
    )


# -- checks -----------------------------------------------------------------------------------------------------------

OK = check(Bound("max", 0.001, 0.004, True))
WRONG = check(Bound("max", 0.008, 0.004, False))


def wait_until(is_true: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether something is true within these seconds."""
    end = time.monotonic() + seconds
    while not is_true() and time.monotonic() < end:
        time.sleep(0.005)
    return is_true()

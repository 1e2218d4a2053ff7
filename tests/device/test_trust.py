"""Variants on a GPU that cheat while they are timed, and honest ones that look similar.

Each runs as users run it.  A cheat is either wrong, or its time is not confirmed: then it is marked and never gated.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.gpu.shared_memory import require_sharing
from pytest_fa.host.client import Workers
from pytest_fa.records.agreement import SHARED_OUTPUT, check_agreement
from pytest_fa.wire.jobs import CaseJob, CaseResult
from tests.device.conftest import BuildSource, Built
from tests.device.test_two_processes import ATTENTION, KEEPS
from tests.device.test_two_processes import MANIFEST as CUDA_MANIFEST
from tests.factories import MANIFEST, SCORES_MANIFEST, WriteVariant
from tests.honest_cases import FORWARD, RIGHT, judge_honest

TimedPython = Callable[..., tuple[CaseJob, CaseResult]]
TimedBuild = Callable[[str, str, str], tuple[CaseJob, CaseResult]]
TARGET_SHAPE = "b1h8s512d64-fp16-seed0"
PYTHON_MANIFEST = MANIFEST + 'entry: {kind: python, target: "entry:forward"}\nsupports: {device: [cuda]}\n'


@pytest.fixture
def timed_python(workers: Workers, write_variant: WriteVariant, tmp_path: Path) -> TimedPython:
    """Return a function that judges and times a Python source on the GPU: its job and its result."""

    def run(source: str, case: str = TARGET_SHAPE, manifest: str = PYTHON_MANIFEST) -> tuple[CaseJob, CaseResult]:
        folder = write_variant("mine", manifest=manifest, **{"entry.py": source})
        (variant,) = read_manifest(folder / "variant.yaml", tmp_path / "kernels")
        job = CaseJob(variant, parse_case(case), None, "cuda", "same_precision", checks_output=True, time=True)
        return job, workers.run(job)

    return run


@pytest.fixture
def timed_build(workers: Workers, build_source: BuildSource) -> TimedBuild:
    """Return a function that builds, judges and times a CUDA source: its job and its result."""

    def run(name: str, source: str, case: str) -> tuple[CaseJob, CaseResult]:
        variant, library = build_source(name, source, CUDA_MANIFEST)
        job = CaseJob(variant, parse_case(case), library, "cuda", "same_precision", checks_output=True, time=True)
        return job, workers.run(job)

    return run


def verdict_of(ran: tuple[CaseJob, CaseResult]) -> tuple[str, bool | None, str]:
    """The outcome, whether the clocks confirm the time (without the profiler's), and the first line of the reason."""
    job, result = ran
    if result.speed is None:
        return result.outcome, None, result.message.partition("\n")[0]
    agreement = check_agreement(job.variant.name, job.variant.role, result.speed)
    print(f"{result.speed.device.median_us:.2f} us by its own clock, {result.speed.outside}: {agreement.reason}")  # noqa: T201
    return result.outcome, agreement.valid, agreement.reason


# -- cheats in Python -------------------------------------------------------------------------------------------------

HALF_EVENTS = """\
elapsed_time = torch.cuda.Event.elapsed_time
torch.cuda.Event.elapsed_time = lambda self, other: 0.5 * elapsed_time(self, other)
"""
ANSWERS_EARLY = """\
from pytest_fa.wire import commands
from pytest_fa.candidate import series

def answer(self):
    self._graph.replay()
    return commands.Done(inside_us=(10.0 * len(self._calls),))
series.PreparedSeries.replay = answer
"""
EMPTY_GRAPH = """\
from pytest_fa.wire import commands
from pytest_fa.candidate import series
capture = series.PreparedSeries.capture

def keep_one_call(self, **keywords):
    self._calls, calls = self._calls[-1:] * 2, self._calls
    done = capture(self, **keywords)
    self._calls = calls
    return done
series.PreparedSeries.capture = keep_one_call
"""
IN_PLACE = RIGHT + FORWARD + "    return out.copy_(right(q, k, v, scale, causal))\n"
CHEATS = {
    "its events show half of the time": HALF_EVENTS,
    "it answers before its graph is finished": ANSWERS_EARLY,
    "its graph has two calls": EMPTY_GRAPH,
}


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_in_its_own_process_gets_no_time(timed_python: TimedPython, name: str) -> None:
    """What a candidate replaces in its own process makes it wrong, or its time is not confirmed."""
    source = IN_PLACE.replace("import torch\n", "import torch\n" + CHEATS[name], 1)
    outcome, confirmed, reason = verdict_of(timed_python(source))
    assert outcome in ("cheat", "wrong", "failed") or (outcome, confirmed) == ("ok", False), (
        outcome,
        confirmed,
        reason,
    )


def test_honest_attention_in_torch_is_confirmed(timed_python: TimedPython) -> None:
    """The same variant without a cheat is right, and the judge's clock confirms its time."""
    outcome, confirmed, reason = verdict_of(timed_python(IN_PLACE))
    assert (outcome, confirmed) == ("ok", None), reason  # None: not profiled here


def test_an_allocated_output_is_confirmed(timed_python: TimedPython) -> None:
    """A variant that returns a new tensor in each call is right, and its time is confirmed."""
    source = RIGHT + FORWARD + "    return right(q, k, v, scale, causal)\n"
    outcome, confirmed, reason = verdict_of(timed_python(source))
    assert (outcome, confirmed) == ("ok", None), reason


def test_one_buffer_for_all_calls_is_right_and_not_confirmed(timed_python: TimedPython) -> None:
    """A variant that returns the same buffer in each call is right; its time is not confirmed, with what to write."""
    source = RIGHT + "kept = []\n" + FORWARD + "    kept.append(torch.empty_like(q)) if not kept else None\n"
    source += "    return kept[0].copy_(right(q, k, v, scale, causal))\n"
    outcome, confirmed, reason = verdict_of(timed_python(source))
    assert (outcome, confirmed, reason) == ("ok", False, SHARED_OUTPUT)


LARGE_SCORES = """\
import torch

def forward(q, k, v, *, scale, causal="none", out=None):
    return torch.matmul(q * scale, k.transpose(2, 3), out=out)
"""


def test_large_scores_are_confirmed(timed_python: TimedPython) -> None:
    """A probe whose outputs are large, 16 MiB each, does not exceed the limit of the proof sample."""
    manifest = SCORES_MANIFEST.replace("cases: [b1h1s4d4-fp16, b1h1s32d64-fp16-sk64]", "cases: [b1h8s1024d64-fp16]")
    ran = timed_python(LARGE_SCORES, "b1h8s1024d64-fp16-scores-seed0", manifest)
    outcome, confirmed, reason = verdict_of(ran)
    assert (outcome, confirmed) == ("ok", None), reason


# -- cheats in CUDA ---------------------------------------------------------------------------------------------------

# While it is captured, the host code leaves out every second launch.
SKIPS_CAPTURED = (
    ATTENTION
    + """
__global__ void attend_kernel(const FaForwardArgs args) {
  const int64_t row = blockIdx.x * 32 + threadIdx.x;
  if (row < args.batch * args.heads * args.seq_q) {
    attend(args, row, args.seq_k, static_cast<__half*>(args.out) + row * HEAD_DIM);
  }
}
FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t stream) {
  static int captured = 0;
  cudaStreamCaptureStatus status;
  cudaStreamIsCapturing(stream, &status);
  if (status == cudaStreamCaptureStatusActive && ++captured % 2) return 0;
  attend_kernel<<<blocks_of(args), 32, 0, stream>>>(*args);
  return static_cast<int>(cudaPeekAtLastError());
}
"""
)
# After 500 calls, which judged calls without repeats never reach, it reads half of the keys.
HALF_LATER = (
    ATTENTION
    + """
__device__ unsigned calls;
__global__ void count_call() { ++calls; }
__global__ void attend_kernel(const FaForwardArgs args) {
  const int64_t row = blockIdx.x * 32 + threadIdx.x;
  const int64_t seen_keys = calls > 500 ? args.seq_k / 2 : args.seq_k;
  if (row < args.batch * args.heads * args.seq_q) {
    attend(args, row, seen_keys, static_cast<__half*>(args.out) + row * HEAD_DIM);
  }
}
FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t stream) {
  count_call<<<1, 1, 0, stream>>>();
  attend_kernel<<<blocks_of(args), 32, 0, stream>>>(*args);
  return static_cast<int>(cudaPeekAtLastError());
}
"""
)
CUDA_CHEATS = {"skips_captured": SKIPS_CAPTURED, "half_after_500_calls": HALF_LATER}


@pytest.mark.parametrize("name", CUDA_CHEATS)
def test_a_kernel_that_skips_work_while_timed_is_wrong(timed_build: TimedBuild, name: str) -> None:
    """Outputs of timed calls show that work was left out."""
    ran = timed_build(name, CUDA_CHEATS[name], "b1h2s64d64-fp16-seed0")
    outcome, confirmed, reason = verdict_of(ran)
    assert (outcome, confirmed) == ("wrong", None), reason
    assert "timed calls" in reason


def test_a_kept_result_gains_nothing_at_the_size_of_the_exploit(timed_build: TimedBuild) -> None:
    """The kernel that keeps 64 results by 128 sampled elements, at b1h16s1024d64: no call finds its data again."""
    source = KEEPS.replace("MAX_ELEMENTS = 2 * 64 * HEAD_DIM", "MAX_ELEMENTS = 16 * 1024 * HEAD_DIM")
    always = source.replace("hit = match, slot = target;", "hit = -1, slot = target;")
    case = "b1h16s1024d64-fp16-seed0"
    times_us = []
    for name, text in (("keeps_128", source), ("computes_always", always)):
        job, result = timed_build(name, text, case)
        outcome, _, reason = verdict_of((job, result))
        if name == "keeps_128" and outcome == "wrong":
            return  # a kept result was returned for other data
        assert outcome == "ok", reason
        assert result.speed is not None
        times_us.append(result.speed.device.median_us)
    assert times_us[0] > 0.95 * times_us[1], times_us


# -- honest variants --------------------------------------------------------------------------------------------------


def test_two_processes_share_memory() -> None:
    """A GPU in the default compute mode protects the judge: asking for it raises nothing."""
    require_sharing(torch.device("cuda"))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", ["minimal", "swizzle_async", "cluster_split"])
def test_a_call_on_the_other_gpu_is_right(workers: Workers, build_rung: Callable[[str], Built], name: str) -> None:
    """Judge and candidate share memory of a GPU that is not the current one."""
    variant, library = build_rung(name)
    case = parse_case("b1h2s64d64-fp16-seed0")
    job = CaseJob(variant, case, library, "cuda", "same_precision", checks_output=True, time=False)
    other = msgspec.structs.replace(job, property_name="other_device")
    results = [workers.run(each) for each in (other, job, other)]
    assert [(result.outcome, result.message) for result in results] == [("ok", "")] * 3


def test_right_variants_are_not_blamed() -> None:
    """Of 30 correct variants, each timed on a case of the suites with another seed, none is blamed."""
    tally = judge_honest(seconds=600.0, most_cases=30)
    print(tally.table())  # noqa: T201
    assert tally.alarms == []
    assert sum(tally.judged.values()) == 30

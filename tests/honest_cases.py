"""Judge right variants on many cases, and list every false alarm.

python -m tests.honest_cases --seconds 180 [--cases 300] [--timed-every 10] [--only NAME,...] [--suites NAME,...]

The variants are the candidates of `kernels/`, the baselines that are shipped, and small variants that do unusual but
honest things: they allocate their output, return one buffer for all calls, choose an algorithm in their first call, or
are compiled by torch or Triton.  Variants take turns; each job has a case of the suites with a seed of its own, and one
job in ten is timed, on a GPU also under the profiler.  The exit status is 1 if there is an alarm.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from pytest_fa.build.builder import ensure
from pytest_fa.build.outcomes import BuildFailure
from pytest_fa.build.target import native_arch
from pytest_fa.catalog.case import Case
from pytest_fa.catalog.discover import discover
from pytest_fa.catalog.suites import SUITES
from pytest_fa.catalog.variant import Device, Variant
from pytest_fa.errors import suggestion
from pytest_fa.host.client import Workers
from pytest_fa.host.profiler_workers import ProfilerWorkers
from pytest_fa.options.options import default_cache
from pytest_fa.records.agreement import SHARED_OUTPUT, check_agreement
from pytest_fa.records.built import Build
from pytest_fa.records.environment import find_gpu
from pytest_fa.wire.jobs import CaseJob, CaseResult, ProfilerJob
from tests.factories import MANIFEST

KERNELS = Path(__file__).parents[1] / "kernels"
TEMPLATES = KERNELS.parent / "pytest_fa" / "template"
SUITES_USED = ("smoke", "history", "edge", "modifiers")
TIMED_EVERY = 10
REPEATS: dict[Device, int] = {"cpu": 5, "cuda": 300}
WATCHDOG_SECONDS = 120.0  # compiled variants compile for each shape
# Right variants whose time may be unconfirmed, and for which reason alone: all calls return one buffer; torch.compile
# compiles anew within a graph.
WITHOUT_TIME = {"one_buffer": SHARED_OUTPUT, "compiled": "do not launch the same kernels"}
ABSENT = ("No module named", "cannot be imported", "is not installed")  # a baseline whose package is missing

RIGHT = """\
import torch

def right(q, k, v, scale, causal):
    group = q.shape[1] // k.shape[1]
    k, v = (tensor.repeat_interleave(group, dim=1).float() for tensor in (k, v))
    scores = q.float() @ k.transpose(2, 3) * scale
    if causal == "top_left":
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return (torch.softmax(scores, -1) @ v).to(q.dtype)

"""
FORWARD = "def forward(q, k, v, *, scale, causal='none', out=None):\n"
HONEST = {
    "allocates": RIGHT + FORWARD + "    return right(q, k, v, scale, causal)\n",
    "one_buffer": RIGHT
    + "kept = {}\n"
    + FORWARD
    + "    buffer = kept.setdefault((q.shape, q.stride(), q.dtype), torch.empty_like(q))\n"
    + "    return buffer.copy_(right(q, k, v, scale, causal))\n",
    "chooses": RIGHT
    + "import time\nchosen = {}\n"
    + "def again(*arguments):\n    return right(*arguments)\n\n"
    + FORWARD
    + "    if q.shape not in chosen and not (q.is_cuda and torch.cuda.is_current_stream_capturing()):\n"
    + "        times = {}\n"
    + "        for way in (right, again):\n"
    + "            start = time.perf_counter()\n"
    + "            way(q, k, v, scale, causal)\n"
    + "            times[way] = time.perf_counter() - start\n"
    + "        chosen[q.shape] = min(times, key=times.get)\n"
    + "    return out.copy_(chosen.get(q.shape, right)(q, k, v, scale, causal))\n",
    "compiled": RIGHT
    + "compiled = torch.compile(right, dynamic=True)\n"
    + FORWARD
    + "    return out.copy_(compiled(q, k, v, scale, causal))\n",
}
FLEX = """\
import torch
from torch.nn.attention.flex_attention import flex_attention

compiled = torch.compile(flex_attention, dynamic=False)

def forward(q, k, v, *, scale, causal="none", out=None):
    return compiled(q, k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
"""
ENTRY = 'entry: {kind: python, target: "entry:forward"}\n'
SUPPORTS = "supports: {device: [cpu, cuda], dtype: [fp16, bf16], grouped_heads: true, causal: [none, top_left]}\n"


class Alarm(NamedTuple):
    """A right variant that was blamed, or whose time was not confirmed."""

    job: str
    kind: str  # the outcome, or `time`
    message: str


class Tally:
    """What was judged so far, by variant."""

    def __init__(self) -> None:
        self.judged: dict[str, int] = {}
        self.timed: dict[str, int] = {}
        self.absent: dict[str, str] = {}
        self.alarms: list[Alarm] = []
        self.beyond_percent: list[float] = []  # by which the judge's slope was longer than the period

    def add(self, job: CaseJob, result: CaseResult) -> None:
        """Count a result."""
        name = job.variant.name
        if job.variant.role == "baseline" and (why := _why_absent(result)):
            self.absent[name] = why
            return
        if result.outcome != "ok":
            self.alarms.append(Alarm(job.id, result.outcome, result.message))
        self.judged[name] = self.judged.get(name, 0) + 1
        if result.speed is not None:
            self.timed[name] = self.timed.get(name, 0) + 1
            if (outside := result.speed.outside) and outside.proof_us is not None:
                self.beyond_percent.append(100 * (outside.median_us / result.speed.device.median_us - 1))
            agreement = check_agreement(name, job.variant.role, result.speed) if job.device == "cuda" else None
            has_no_figure = result.speed.profiler_missing and not result.speed.launches_missing
            doubted = agreement and (agreement.valid is False or has_no_figure)
            if agreement and doubted and not (name in WITHOUT_TIME and WITHOUT_TIME[name] in agreement.reason):
                self.alarms.append(Alarm(job.id, "time", agreement.reason))

    def table(self) -> str:
        """A row for each variant, and every alarm below."""
        alarmed = [alarm.job for alarm in self.alarms]
        rows = [
            f"{name:24} {self.judged[name]:6} {self.timed.get(name, 0):6} "
            f"{sum(job.startswith(name + '-') for job in alarmed):6}"
            for name in self.judged
        ]
        total = f"{'all':24} {sum(self.judged.values()):6} {sum(self.timed.values()):6} {len(self.alarms):6}"
        absent = [f"{name}: absent: {why}" for name, why in self.absent.items() if name not in self.judged]
        alarms = [f"ALARM {alarm.job}: {alarm.kind}: {alarm.message.partition(chr(10))[0]}" for alarm in self.alarms]
        return "\n".join([f"{'variant':24} judged  timed alarms", *rows, total, *self._clocks(), *absent, *alarms])

    def _clocks(self) -> list[str]:
        """How far the judge's clock is from the candidate's own, on a GPU."""
        if not self.beyond_percent:
            return []
        least, middle, most = (f(self.beyond_percent) for f in (min, statistics.median, max))
        return [f"the judge's clock is {middle:+.2f} % from the candidate's own, from {least:+.2f} to {most:+.2f} %"]


def _why_absent(result: CaseResult) -> str:
    """Why a baseline did not run: it may refuse a case, and its package may be missing."""
    line = result.message.partition("\n")[0]
    return line if result.outcome == "unsupported" or any(text in line for text in ABSENT) else ""


def honest_variants(folder: Path, device: Device) -> list[Variant]:
    """The candidates of the repository, the shipped baselines, and the variants above, that run on a device.

    Raises `SystemExit` if a manifest cannot be read: its variant would not be judged.
    """
    sources = {name: (ENTRY + SUPPORTS, source) for name, source in HONEST.items()}
    if device == "cuda":
        sources["flex"] = (ENTRY + "supports: {dtype: [fp16, bf16], grouped_heads: true}\n", FLEX)
        manifest, source = ((TEMPLATES / "triton" / name).read_text("utf-8") for name in ("variant.yaml", "entry.py"))
        sources["triton_tiles"] = (manifest, source)
    for name, (manifest, source) in sources.items():
        (folder / name).mkdir()
        (folder / name / "variant.yaml").write_text(MANIFEST + manifest, encoding="utf-8")
        (folder / name / "entry.py").write_text(source, encoding="utf-8")
    catalog = discover((KERNELS, folder))
    if broken := next(iter(catalog.broken.values()), None):
        raise SystemExit(f"{broken.name} cannot be judged: {broken.problem}")
    chosen = [
        each
        for each in catalog.variants.values()
        if each.role in ("candidate", "baseline") and each.computes == "attention"
    ]
    return [each for each in chosen if each.device_for(gpu=find_gpu() is not None) == device and each.is_judged]


def builds_of(variants: list[Variant], cache: Path) -> dict[str, Build]:
    """The builds of those variants that are compiled, as far as they can be compiled here."""
    built = [(variant, native_arch(variant)) for variant in variants if variant.is_built]
    report = ensure(built, cache)
    outcomes = {variant.name: report.outcomes.get((variant.name, arch)) for variant, arch in built}
    for name, outcome in outcomes.items():
        if isinstance(outcome, BuildFailure):
            sys.stderr.write(f"{name} is not built: {outcome.message}\n")
    return {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Build)}


def jobs_of(
    variants: list[Variant], device: Device, cache: Path, seed: int, timed_every: int, suites: tuple[str, ...]
) -> Iterator[CaseJob]:
    """Jobs without end: variants take turns, each on a random case of the suites that it supports."""
    builds, draw = builds_of(variants, cache), random.Random(seed)  # noqa: S311  # not for cryptography
    cases: list[Case] = [case for suite in suites for case in SUITES[suite] if case.seq_k <= 2048]
    for number in itertools.count():
        variant = variants[number % len(variants)]
        supported = [case for case in cases if not variant.refuses(case)]
        if not supported or (variant.is_built and variant.name not in builds):
            continue
        build = builds.get(variant.name)
        yield CaseJob(
            variant=variant,
            case=draw.choice(supported).with_seed(draw.randrange(10**6)),
            library=str(cache / build.library) if build else None,
            device=device,
            policy=variant.tolerance,
            checks_output=True,
            time=(number // len(variants)) % timed_every == 0,
            repeats=REPEATS[device],
            watchdog_seconds=WATCHDOG_SECONDS,
            file_hashes=build.files if build else {},
            without_attention=number < len(variants) and variant.entry.kind != "cuda" and variant.role != "baseline",
        )


def _with_profiler(job: CaseJob, result: CaseResult, profiler: ProfilerWorkers) -> CaseResult:
    """The result with the profiler's time of a call on a GPU, or the reason why there is none.

    Calls that cannot be captured are left out: their period may be that of their launches, which the profiler's
    durations do not contain.
    """
    if result.speed is None or result.speed.outside is None or result.speed.outside.proof_us is None:
        return result
    of_job = (job.variant, job.case, job.library, job.policy, job.checks_output, result.speed.device.median_us)
    profiled = profiler.run_profiler(ProfilerJob(*of_job, WATCHDOG_SECONDS, job.file_hashes))
    speed = msgspec.structs.replace(result.speed, profiler=profiled.profiler, profiler_missing=profiled.missing)
    return msgspec.structs.replace(result, speed=speed)


def judge_honest(
    seconds: float,
    most_cases: int,
    only: tuple[str, ...] = (),
    seed: int = 0,
    timed_every: int = TIMED_EVERY,
    suites: tuple[str, ...] = SUITES_USED,
) -> Tally:
    """Judge right variants until the time is over, as many cases are judged, or an interrupt (Ctrl-C) comes."""
    device: Device = "cuda" if find_gpu() else "cpu"
    tally = Tally()
    with tempfile.TemporaryDirectory() as name, Workers() as workers, ProfilerWorkers() as profiler:
        workers.start()
        variants = honest_variants(Path(name), device)
        known = [each.name for each in variants]
        if unknown := [word for word in only if word not in known]:
            raise SystemExit(f"--only: no variant {unknown[0]!r} here for {device}{suggestion(unknown[0], known)}")
        variants = [each for each in variants if not only or each.name in only]
        jobs = jobs_of(variants, device, default_cache(), seed, timed_every, suites)
        first = next(jobs)  # builds what is missing
        deadline = time.monotonic() + seconds
        with contextlib.suppress(KeyboardInterrupt):
            for job in itertools.chain([first], jobs):
                if time.monotonic() > deadline or sum(tally.judged.values()) >= most_cases:
                    break
                if not tally.absent.get(job.variant.name, "").startswith(ABSENT):
                    tally.add(job, _with_profiler(job, workers.run(job), profiler))
    return tally


def main() -> int:
    """Judge, print the table, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--cases", type=int, default=10**9)
    parser.add_argument("--timed-every", type=int, default=TIMED_EVERY)
    parser.add_argument("--only", default="")
    parser.add_argument("--suites", default=",".join(SUITES_USED))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path)
    given = parser.parse_args()
    start = time.monotonic()
    only = tuple(filter(None, given.only.split(",")))
    suites = tuple(given.suites.split(","))
    tally = judge_honest(given.seconds, given.cases, only, given.seed, given.timed_every, suites)
    text = f"{tally.table()}\n{time.monotonic() - start:.0f} s\n"
    sys.stdout.write(text)
    if given.log:
        given.log.write_text(text + "\n".join(f"{each}" for each in tally.alarms), encoding="utf-8")
    return 1 if tally.alarms else 0


if __name__ == "__main__":
    sys.exit(main())

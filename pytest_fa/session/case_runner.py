"""The case runner: runs one variant on one case in a worker process and makes a record of the result."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import msgspec

from pytest_fa.build.outcomes import BuildFailure
from pytest_fa.catalog.case import Case
from pytest_fa.catalog.properties import MAY_REFUSE, applies, case_of_property, declared_against
from pytest_fa.catalog.variant import Device, Tolerance, Variant, tolerance_for
from pytest_fa.host.awaited import ShowWait
from pytest_fa.host.client import Workers
from pytest_fa.host.job_output import Live
from pytest_fa.host.profiler_workers import ProfilerWorkers
from pytest_fa.host.stop_signal import require_unset
from pytest_fa.host.timing_lock import checking_lock, timing_lock
from pytest_fa.options.options import Options
from pytest_fa.records.agreement import check_agreement
from pytest_fa.records.built import Build
from pytest_fa.records.ceilings import Ceilings, read_ceilings
from pytest_fa.records.costs import Costs
from pytest_fa.records.environment import find_gpu
from pytest_fa.records.files import try_to_read
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record, RecordKind, Stage
from pytest_fa.records.timing import ON_CPU, Speed
from pytest_fa.session.builds import Builds, device_of
from pytest_fa.session.record_factory import RecordFactory
from pytest_fa.session.refusals import Refused
from pytest_fa.wire.jobs import WATCHDOG_SECONDS, CaseJob, CaseResult, ProfilerJob

LONG_WATCHDOG_SECONDS = 300.0  # a Python entry may compile at its first call, and a CPU is slow
GPU_BASELINE_REPEATS = 20  # a baseline is what variants are compared with; its races are not looked for


class Stopwatch:
    """The seconds of a job: waiting for the GPU, the job itself, and the profiler."""

    def __init__(self) -> None:
        self._seconds = {"waited": 0.0, "job": 0.0, "profiler": 0.0}
        self.restart()

    def restart(self) -> None:
        """Begin a lap now."""
        self._last = time.perf_counter()

    def lap(self, part: Literal["waited", "job", "profiler"]) -> None:
        """Add the seconds since the last lap to a part."""
        self._seconds[part] += time.perf_counter() - self._last
        self.restart()

    @property
    def costs(self) -> Costs:
        """The seconds so far."""
        return Costs(self._seconds["waited"], self._seconds["job"], self._seconds["profiler"])


class CaseRunner:
    """Runs cases, and keeps results that later tests of the run use.

    `passed` holds (variant name, case id) of every case with outcome `ok`.  `device_us` maps (shape id, variant name)
    to microseconds.  `other_gpu_processes` are the processes that used the GPU before this run started its own.
    """

    def __init__(
        self,
        options: Options,
        builds: Builds,
        records: RecordFactory,
        workers: Workers,
        profiler_workers: ProfilerWorkers,
    ) -> None:
        self.options, self.builds, self.records = options, builds, records
        self.workers, self.profiler_workers = workers, profiler_workers
        self.rules = options.case_rules
        self.confirms_times = self.rules.confirms_times  # by the profiler
        self.other_gpu_processes: tuple[str, ...] = ()
        self.has_timings = False  # whether tests of this run time variants
        self.passed: set[tuple[str, str]] = set()
        self._own_work_seen: set[str] = set()
        self._first_seeds: dict[tuple[str, str], str] = {}  # (variant, shape id) -> the case that was repeated first
        self.device_us: dict[tuple[str, str], float] = {}
        self.of_features: dict[type, Any] = {}  # what a feature remembers of this run, by its type

    def run(
        self,
        variant: Variant,
        case: Case,
        kind: RecordKind,
        property_name: str | None = None,
        *,
        is_checked_first: bool = False,
        is_thorough: bool = False,
        is_claimed: bool = True,
    ) -> Record:
        """Run one job in a worker and return the record of `test_correct`, `test_property` or `test_speed`.

        With `is_checked_first`, a variant that is to be timed on a GPU is first checked while other checks run.  It has
        the GPU to itself only if it is right.  With `is_thorough`, a judged call is repeated as often as in a suite,
        whatever the run's rules are.  Without `is_claimed`, the case need not be what the manifest claims.
        Raises `Refused` if the variant does not support the case, `CannotRun` if this machine cannot run the variant.
        """
        own_truth = variant.own_truth
        refusal = variant.refuses(case) if is_claimed else None
        if reason := refusal or (own_truth and own_truth.refuses(case, property_name)):
            raise Refused(reason)
        if self._fails_to_build_without_device(variant):
            return self.records.make(kind, variant, case, failed_build(_see_test_build(variant)))
        device, build = device_of(variant), self.builds.build_for_this_machine(variant)
        if isinstance(build, BuildFailure):
            return self.records.make(kind, variant, case, failed_build(_see_test_build(variant)))
        jobs = self._jobs(variant, case, kind, device, build, property_name, is_checked_first=is_checked_first)
        if is_thorough:
            cross_checks = self._cross_checks(variant, case, device)
            jobs = tuple(msgspec.structs.replace(job, repeats=None, cross_checks=cross_checks) for job in jobs)
        for job in jobs:
            stopwatch = Stopwatch()
            with self._reserved(job, stopwatch):
                result = self.workers.run(job)
                stopwatch.lap("job")
                result = self._confirmed(job, result)
                stopwatch.lap("profiler")
            if result.lacks_memory and not job.time and self._others_may_use_memory(job.device):
                result = self._result_alone(job, stopwatch)
            self._remember(job, result)
            if result.outcome != Outcome.OK:
                break
        self._raise_refusal(job, result)
        builds = (build,) if build else ()
        return self.records.make(kind, variant, case, result, builds, property_name, stopwatch.costs)

    def check_property(self, variant: Variant, name: str) -> Record:
        """Check one property in a worker and return the record of `test_property`.

        Raises `Refused` if the property does not apply to the variant, if the kernel refuses it and may do so, or if a
        baseline lacks it.
        """
        device = variant.device_for(gpu=find_gpu() is not None)
        if device and not applies(name, variant, device):
            raise Refused(f"property {name} does not apply to {variant.name} on {device}")
        if declared := declared_against(name, variant):
            raise Refused(f"{variant.name}: {name} is not judged: the manifest declares {declared}")
        case = self.case_of_property(variant, name)
        if self.policy_of(variant, case) == "absolute" and case.dtype != "fp16":
            raise Refused(
                f"{variant.name}: policy 'absolute' judges fp16 only, and property {name} would run in {case.dtype}"
            )
        return self.run(variant, case, "property", name)

    def case_of_property(self, variant: Variant, name: str) -> Case:
        """The case of a property, in a dtype of `--fa-dtype`; in fp16 if the policy judges no other dtype."""
        dtypes = ("fp16",) if self.tolerance_of(variant) == "absolute" else self.options.dtypes
        return case_of_property(variant, name, dtypes)

    def tolerance_of(self, variant: Variant) -> Tolerance:
        """The tolerance policy of a run's cases: that of `--fa-tolerance`, else the manifest's."""
        return self.options.tolerance or variant.tolerance  # type: ignore[return-value]  # checked with the options

    def policy_of(self, variant: Variant, case: Case) -> Tolerance:
        """The tolerance policy of one case: that of `--fa-tolerance`, else the manifest's for this dtype."""
        tolerance = self.tolerance_of(variant)
        return tolerance if self.options.tolerance else tolerance_for(tolerance, case.dtype)

    def watchdog_seconds(self, variant: Variant, device: Device) -> float:
        """The time limit of one launch."""
        if self.options.watchdog_seconds:
            return self.options.watchdog_seconds
        if self.rules.watchdog_seconds and (ruled := self.rules.watchdog_seconds(variant, device)) is not None:
            return ruled
        return WATCHDOG_SECONDS if variant.is_built and device == "cuda" else LONG_WATCHDOG_SECONDS

    def shares_gpu(self, device: Device) -> bool:
        """Whether processes that this run did not start used the GPU when it began."""
        return device == "cuda" and bool(self.other_gpu_processes)

    def show_live(self, show: Live | None) -> None:
        """Pass what workers print to `show` while they run; None stops that."""
        self.workers.show_live = self.profiler_workers.show_live = show

    def show_wait(self, show: ShowWait | None) -> None:
        """Tell `show` every second what a job waits for; None stops that."""
        self.workers.show_wait = self.profiler_workers.show_wait = show

    def output(self) -> str:
        """Return what workers printed since `take_output`, printable and bounded; the profiler's output comes last."""
        output, under_profiler = self.workers.output, self.profiler_workers.output
        return f"{output}(under torch's profiler:)\n{under_profiler}" if under_profiler else output

    def take_output(self) -> str:
        """Return the output and forget it."""
        output = self.output()
        self.workers.take_output()
        self.profiler_workers.take_output()
        return output

    def end_workers(self) -> None:
        """End the current workers, so that this run holds no memory and no context on the GPU."""
        self.workers.end_worker()
        self.profiler_workers.end_worker()

    def prepare_candidate(self, variants: Iterable[Variant]) -> None:
        """Start a candidate's process for the first of these variants that runs on a GPU, and let it open the GPU."""
        on_gpu = (each for each in variants if each.device_for(gpu=find_gpu() is not None) == "cuda")
        if variant := next(on_gpu, None):
            self.workers.prepare_candidate(variant)

    def _fails_to_build_without_device(self, variant: Variant) -> bool:
        """Whether there is no device for the variant and its build failed: then the build failure is reported."""
        return variant.device_for(gpu=find_gpu() is not None) is None and self.builds.fails_to_compile(variant)

    def _jobs(
        self,
        variant: Variant,
        case: Case,
        kind: RecordKind,
        device: Device,
        build: Build | None,
        property_name: str | None,
        *,
        is_checked_first: bool,
    ) -> tuple[CaseJob, ...]:
        """The job of a test.  For a timing on a GPU that `is_checked_first`, the check alone, then both."""
        job = CaseJob(
            variant=variant,
            case=case,
            library=self.builds.library_of(build),
            file_hashes=build.files if build else {},
            device=device,
            policy=self.policy_of(variant, case),
            checks_output=variant.is_judged,
            time=kind == "speed" and self.options.timing,
            repeats=self._repeats(kind, is_gpu_baseline=variant.role == "baseline" and device == "cuda"),
            property_name=property_name,
            cross_checks=self._cross_checks(variant, case, device) if self.rules.cross_checks else (),
            watchdog_seconds=self.watchdog_seconds(variant, device),
            without_attention=self._needs_own_work(variant, kind),
            is_further_seed=self._is_further_seed(variant, case, kind),
            shares_gpu=self.shares_gpu(device) and self.rules.excuses_neighbours,
        )
        if not is_checked_first or not job.time or device == "cpu":
            return (job,)
        check, timing = {"time": False}, {"without_attention": False}
        return msgspec.structs.replace(job, **check), msgspec.structs.replace(job, **timing)

    @contextmanager
    def _reserved(self, job: CaseJob, stopwatch: Stopwatch) -> Iterator[None]:
        """Hold the lock of a job.  Before that, start its processes, and the profiler's, if it is timed."""
        if job.time and job.device == "cuda":
            self.workers.start_processes(job)  # while others use the GPU
        stopwatch.lap("job")
        if job.time and self.confirms_times:
            self.profiler_workers.wait_until_prepared()  # nothing else may run on the GPU from here on
        stopwatch.lap("profiler")
        with self._lock_for(job):
            stopwatch.lap("waited")
            yield

    def _remember(self, job: CaseJob, result: CaseResult) -> None:
        """Keep what later tests of the run use, and prepare the profiler if they time."""
        self._prepare_profiler(job)
        if result.repeats:
            self._first_seeds.setdefault((job.variant.name, job.case.shape_id), job.case.id)
        if result.outcome == Outcome.OK and not job.property_name:
            self.passed.add((job.variant.name, job.case.id))
            if result.speed:
                self.device_us[(job.case.shape_id, job.variant.name)] = result.speed.device.median_us

    def _others_may_use_memory(self, device: Device) -> bool:
        """Whether other workers of pytest-xdist, or processes that this run did not start, may use the GPU's memory."""
        return "PYTEST_XDIST_WORKER" in os.environ or self.shares_gpu(device)

    def _result_alone(self, job: CaseJob, stopwatch: Stopwatch) -> CaseResult:
        """Repeat a check for which the GPU had too little memory, in a new process, while no other check runs.

        Other checks may have used the memory.
        """
        self.workers.end_worker()
        stopwatch.restart()
        with timing_lock(self.builds.say, check=lambda: require_unset(self.workers.stop)):
            stopwatch.lap("waited")
            result = self.workers.run(job)
            stopwatch.lap("job")
        return result

    def _lock_for(self, job: CaseJob) -> AbstractContextManager[None]:
        """The lock with which a job runs: a timed job has the GPU to itself, and other jobs share it."""
        stop = self.workers.stop
        if job.time and (job.device == "cuda" or self.rules.locks_cpu):
            return timing_lock(self.builds.say, check=lambda: require_unset(stop))
        if job.device == "cuda":
            return checking_lock(self.builds.say, check=lambda: require_unset(stop))
        return nullcontext()

    def _prepare_profiler(self, job: CaseJob) -> None:
        """After a check on a GPU, prepare the profiler's process if timings follow.

        It is a second process on the GPU.  A GPU that allows one process only has none to spare.
        """
        is_check = job.device == "cuda" and not job.time
        if is_check and self.has_timings and self.rules.confirms_times and not self.workers.unprotected:
            self.profiler_workers.prepare()

    def _raise_refusal(self, job: CaseJob, result: CaseResult) -> None:
        """Raise `Refused` if the kernel refused the case and is allowed to.  Any other refusal is a failure.

        A property that a baseline lacks is reported as a refusal: a baseline must be correct on the cases on which it
        is compared with candidates, and no more.
        """
        variant, name = job.variant, job.property_name
        reason = result.message.partition("\n")[0]  # without a traceback
        if variant.role == "baseline" and name in result.caught_by:
            raise Refused(f"{variant.name}: {reason} (a baseline may lack a property)")
        if result.outcome != Outcome.UNSUPPORTED:
            return
        # A variant whose manifest has `cases` must support only those, and a property runs on another case.
        if name in MAY_REFUSE or (name is not None and variant.cases):
            raise Refused(f"{variant.name}: {name}: {reason}")
        if variant.role == "baseline":
            raise Refused(f"{variant.name} does not support {job.case.shape_id}: {reason}")

    def _confirmed(self, job: CaseJob, result: CaseResult) -> CaseResult:
        """The result; if it has a time, with the profiler's time of a separate process, and whether the two agree."""
        if result.speed is None or not self.confirms_times:
            return result
        if job.device == "cpu":
            speed = msgspec.structs.replace(result.speed, profiler_missing=ON_CPU)
            agreement = check_agreement(job.variant.name, job.variant.role, speed)
            return msgspec.structs.replace(result, speed=msgspec.structs.replace(speed, agreement=agreement))
        confirmed = self._with_agreement(job, self._with_profiler_time(job, result.speed))
        if confirmed.agreement and confirmed.agreement.valid is False:  # profile once more before rejecting the time
            confirmed = self._with_agreement(job, self._with_profiler_time(job, result.speed))
        return msgspec.structs.replace(result, speed=confirmed)

    def _with_profiler_time(self, job: CaseJob, speed: Speed) -> Speed:
        result = self.profiler_workers.run_profiler(
            ProfilerJob(
                job.variant,
                job.case,
                job.library,
                job.policy,
                job.checks_output,
                speed.device.median_us,
                job.watchdog_seconds,
                job.file_hashes,
            )
        )
        return msgspec.structs.replace(
            speed,
            profiler=result.profiler,
            profiler_missing=result.missing,
            other_gpu_processes=self.other_gpu_processes,
        )

    def _with_agreement(self, job: CaseJob, speed: Speed) -> Speed:
        """The speed with its agreement: all clocks, the kernels' names, and the least time the device can need."""
        ceilings = self._ceilings if job.variant.role != "overhead" else None
        floor = ceilings.floor(job.case, speed.l2_bytes, speed.highest_sm_mhz) if ceilings else None
        return msgspec.structs.replace(
            speed, agreement=check_agreement(job.variant.name, job.variant.role, speed, floor)
        )

    @functools.cached_property
    def _ceilings(self) -> Ceilings | None:
        """The GPU's saved ceilings; None also for a file that cannot be read, which the end of the run names."""
        return try_to_read(lambda: read_ceilings(self.options.records_folder, self.records.environment.gpu))[0]

    def _needs_own_work(self, variant: Variant, kind: RecordKind) -> bool:
        """Whether a call is judged without torch's attention: once for each variant that can reach it.

        A `cuda` entry contains no torch code, and a baseline may be SDPA itself.
        """
        can_reach = variant.entry.kind != "cuda" and variant.role != "baseline" and variant.is_judged
        is_first = variant.name not in self._own_work_seen and (kind == "correct" or self.rules.always_own_work)
        if not can_reach or not is_first:
            return False
        self._own_work_seen.add(variant.name)
        return True

    def _repeats(self, kind: RecordKind, *, is_gpu_baseline: bool) -> int | None:
        """The number of repeats of a judged call; None means the default."""
        if kind != "correct":
            return 0
        return self.options.soak or self.rules.repeats or (GPU_BASELINE_REPEATS if is_gpu_baseline else None)

    def _is_further_seed(self, variant: Variant, case: Case, kind: RecordKind) -> bool:
        """Whether the variant was repeated at this shape before, with other data.  Most races do not depend on data."""
        return kind == "correct" and self._first_seeds.get((variant.name, case.shape_id), case.id) != case.id

    def _cross_checks(self, variant: Variant, case: Case, device: Device) -> tuple[Variant, ...]:
        """The SDPA backends that support the case on this device; none for a baseline, or with an own truth."""
        if variant.role == "baseline" or variant.own_truth:
            return ()
        return tuple(
            baseline
            for baseline in self.builds.run_plan.sdpa_baselines
            if device in baseline.supports.device and not baseline.is_built and not baseline.refuses(case)
        )


def failed_build(message: str) -> CaseResult:
    """The result for a variant whose build failed."""
    return CaseResult(Outcome.NOT_BUILT, message, (Stage("build", "failed"),))


def _see_test_build(variant: Variant) -> str:
    return f"build of {variant.name} failed (see test_build[{variant.name}])"

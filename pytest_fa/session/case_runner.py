"""The case runner: one variant on one case through a worker process, to a record."""

from __future__ import annotations

import functools
from contextlib import nullcontext

import msgspec

from pytest_fa.build.builder import BuildFailure
from pytest_fa.catalog.case import Case
from pytest_fa.catalog.faults import REPEATS as SELFTEST_REPEATS
from pytest_fa.catalog.properties import MAY_REFUSE, applies, property_case
from pytest_fa.catalog.variant import Device, Tolerance, Variant
from pytest_fa.measure.timing_lock import timing_lock
from pytest_fa.options import Options
from pytest_fa.records.agreement import agree
from pytest_fa.records.ceilings import Ceilings, read_ceilings
from pytest_fa.records.environment import find_gpu
from pytest_fa.records.record import Ablation, Record, RecordKind, Stage
from pytest_fa.records.timing import ON_CPU, Speed
from pytest_fa.session.builds import Builds, device_of
from pytest_fa.session.record_factory import RecordFactory
from pytest_fa.session.refusals import Refused
from pytest_fa.worker.client import Workers
from pytest_fa.worker.jobs import WATCHDOG_SECONDS, CaseJob, CaseResult, ProfilerJob

PATIENT_WATCHDOG_SECONDS = 300.0  # a Python entry may compile itself first; a CPU is slow
SELFTEST_WATCHDOG_SECONDS = 30.0  # the self-test's Python kernels compile nothing


class CaseRunner:
    """Runs cases.  It remembers which were right (`right`) and how fast (`device_us`), for later items of the run.

    `right` holds (variant name, case id), `device_us` maps (shape id, variant name) to microseconds.
    `other_gpu_processes` were on the GPU before this run started any of its own.
    """

    def __init__(
        self,
        options: Options,
        builds: Builds,
        records: RecordFactory,
        workers: Workers,
        profiler_workers: Workers,
    ) -> None:
        self.options, self.builds, self.records = options, builds, records
        self.workers, self.profiler_workers = workers, profiler_workers
        self.other_gpu_processes: tuple[str, ...] = ()
        self.right: set[tuple[str, str]] = set()
        self.device_us: dict[tuple[str, str], float] = {}

    def run(self, variant: Variant, case: Case, kind: RecordKind, property_name: str | None = None) -> Record:
        """The record of `test_correct`, `test_property` or `test_speed`: one job, through a worker.

        Raises `Refused` where the variant does not take the case, `CannotRun` where this machine cannot run it.
        """
        if reason := variant.refuses(case):
            raise Refused(reason)
        if self._is_known_not_to_build(variant):
            return self.records.make(kind, variant, case, failed_build(_see_test_build(variant)))
        device, build = device_of(variant), self.builds.runnable(variant)
        if isinstance(build, BuildFailure):
            return self.records.make(kind, variant, case, failed_build(_see_test_build(variant)))
        job = CaseJob(
            variant=variant,
            case=case,
            library=self.builds.library_of(build),
            device=device,
            policy=self.policy_of(variant),
            judge=variant.is_judged,
            time=kind == "speed" and self.options.timing,
            repeats=self._repeats(kind),
            property_name=property_name,
            cross_checks=self._cross_checks(variant, case, device),
            watchdog_seconds=self.watchdog_seconds(variant, device),
        )
        result = self._result_of(job)
        self._raise_refusal(job, result)
        record = self.records.make(kind, variant, case, result, (build,) if build else (), property_name)
        if variant.omits and variant.parent:
            record = msgspec.structs.replace(record, ablation=Ablation(variant.omits, variant.parent))
        return record

    def hold_to_property(self, variant: Variant, name: str) -> Record:
        """The record of `test_property`: one job, through a worker.

        Raises `Refused` where the property has no meaning for the variant, or where the kernel may refuse and does.
        """
        device = variant.device_for(gpu=find_gpu() is not None)
        if device and not applies(name, variant, device):
            raise Refused(f"{name} has no meaning for {variant.name} on {device}")
        case = property_case(variant)
        if self.policy_of(variant) == "absolute" and case.dtype != "fp16":
            raise Refused(f"{variant.name}: policy 'absolute' judges fp16 only, {name} would be {case.dtype}")
        return self.run(variant, case, "property", name)

    def policy_of(self, variant: Variant) -> Tolerance:
        """The tolerance policy: the option's, else the manifest's."""
        return self.options.tolerance or variant.tolerance  # type: ignore[return-value]  # options.py checked it

    def watchdog_seconds(self, variant: Variant, device: Device) -> float:
        """How long one launch may take."""
        if self.options.watchdog_seconds:
            return self.options.watchdog_seconds
        if self.options.selftest and not variant.is_built:
            return SELFTEST_WATCHDOG_SECONDS
        return WATCHDOG_SECONDS if variant.is_built and device == "cuda" else PATIENT_WATCHDOG_SECONDS

    def rest(self) -> None:
        """End the present workers, so that this run holds no memory and no context on the GPU."""
        self.workers.rest()
        self.profiler_workers.rest()

    def _is_known_not_to_build(self, variant: Variant) -> bool:
        """Whether a variant that has no device here did not compile either: the compiler's words come first."""
        return variant.device_for(gpu=find_gpu() is not None) is None and self.builds.fails_to_compile(variant)

    def _result_of(self, job: CaseJob) -> CaseResult:
        """The worker's result, with the time confirmed by the profiler."""
        is_timed = job.time and not self.options.selftest
        with timing_lock() if is_timed else nullcontext():
            result = self.workers.run(job)
            if result.speed and not self.options.selftest:
                result = msgspec.structs.replace(result, speed=self._confirmed(job, result.speed))
        if result.outcome == "ok" and not job.property_name:
            self.right.add((job.variant.name, job.case.id))
            if result.speed:
                self.device_us[(job.case.shape_id, job.variant.name)] = result.speed.device.median_us
        return result

    def _raise_refusal(self, job: CaseJob, result: CaseResult) -> None:
        """Raise `Refused` where the kernel refused the case and may; anywhere else a refusal is a failure."""
        variant, name = job.variant, job.property_name
        if result.outcome != "unsupported":
            return
        # A variant with cases of its own promises those alone, and a property is tried on another case.
        if name in MAY_REFUSE or (name is not None and variant.cases):
            raise Refused(f"{variant.name}: {name}: {result.message}")
        if variant.role == "baseline":
            raise Refused(f"{variant.name} does not support {job.case.shape_id}: {result.message}")

    def _confirmed(self, job: CaseJob, speed: Speed) -> Speed:
        """The speed with what the profiler says in a process of its own, and whether the two agree."""
        if job.device == "cpu":
            speed = msgspec.structs.replace(speed, profiler_missing=ON_CPU)
            return msgspec.structs.replace(speed, agreement=agree(job.variant.name, job.variant.role, speed))
        confirmed = self._compared(job, self._profiled(job, speed))
        if (
            confirmed.agreement and confirmed.agreement.valid is False
        ):  # ask the profiler again before a time is doubted
            confirmed = self._compared(job, self._profiled(job, speed))
        return confirmed

    def _profiled(self, job: CaseJob, speed: Speed) -> Speed:
        result = self.profiler_workers.profile(ProfilerJob(job.variant, job.case, job.library, job.watchdog_seconds))
        return msgspec.structs.replace(
            speed,
            profiler=result.profiler,
            profiler_missing=result.missing,
            other_gpu_processes=self.other_gpu_processes,
        )

    def _compared(self, job: CaseJob, speed: Speed) -> Speed:
        """The speed with its agreement: two clocks, the kernels' names, and the least time that the device needs."""
        has_products = self._ceilings is not None and job.variant.role != "overhead"
        least_us = self._ceilings.least_us(job.case) if self._ceilings and has_products else 0.0
        return msgspec.structs.replace(speed, agreement=agree(job.variant.name, job.variant.role, speed, least_us))

    @functools.cached_property
    def _ceilings(self) -> Ceilings | None:
        return read_ceilings(self.options.records_folder, self.records.environment.gpu)

    def _repeats(self, kind: RecordKind) -> int | None:
        """How often a judged call is repeated; None means as often as half a second holds."""
        if kind != "correct":
            return 0
        return self.options.soak or (SELFTEST_REPEATS if self.options.selftest else None)

    def _cross_checks(self, variant: Variant, case: Case, device: Device) -> tuple[Variant, ...]:
        """The SDPA backends that take the case on this device; a baseline is compared with none."""
        if variant.role == "baseline":
            return ()
        return tuple(
            baseline
            for baseline in self.builds.asked.sdpa_baselines
            if device in baseline.supports.device and not baseline.is_built and not baseline.refuses(case)
        )


def failed_build(message: str) -> CaseResult:
    """The result of a job whose variant was not built."""
    return CaseResult("not_built", message, (Stage("build", "failed"),))


def _see_test_build(variant: Variant) -> str:
    return f"build of {variant.name} failed (see test_build[{variant.name}])"

"""`--ncu`: profiles a variant that passed its check on one shape, and compares it with the fastest SDPA backend."""

from __future__ import annotations

import functools

import msgspec

from pytest_fa.build.outcomes import BuildFailure
from pytest_fa.build.units import Say
from pytest_fa.catalog.case import Case
from pytest_fa.catalog.variant import COMPANION_ROLES, Variant
from pytest_fa.features.ncu.counter_differences import differences
from pytest_fa.features.ncu.index import add_entry
from pytest_fa.features.ncu.nsight import Nsight
from pytest_fa.features.ncu.nsight_report import NsightReport, longest
from pytest_fa.features.ncu.plugin import NcuOptions
from pytest_fa.host.timing_lock import timing_lock
from pytest_fa.records.built import Build
from pytest_fa.records.environment import find_gpu
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record
from pytest_fa.records.saved import SavedRecords
from pytest_fa.session.builds import device_of
from pytest_fa.session.case_runner import CaseRunner
from pytest_fa.session.refusals import CannotRun, Refused
from pytest_fa.wire.jobs import CaseJob, CaseResult


class CaseProfiler:
    """Nsight Compute for the cases of one run.

    The profile of each variant and case is kept, because several variants are compared with the same SDPA backend.
    """

    def __init__(self, runner: CaseRunner) -> None:
        self._runner = runner
        self._profiles: dict[tuple[str, str], NsightReport] = {}

    def profile(self, variant: Variant, case: Case, say: Say) -> Record:
        """Profile one call in a separate process and return the record of `test_profile`.

        The variant is judged on the case first, unless this run has done so.  If it is wrong, it is not profiled and
        the record is that of the check.  Raises `CannotRun` if the variant has no GPU to run on, `Refused` if it does
        not support the case.
        """
        if reason := variant.refuses(case):
            raise Refused(reason)
        if device_of(variant) == "cpu":
            raise CannotRun(f"{variant.name} runs on the CPU here, and Nsight Compute profiles only GPU kernels")
        if variant.is_judged and (variant.name, case.id) not in self._runner.passed:
            check_record = self._runner.run(variant, case, "correct")
            if check_record.outcome != Outcome.OK:
                return self._runner.records.of_kind("profile", check_record)
        self._announce(say)
        profile = self._with_baseline(variant, case, self._profile_call(variant, case))
        record = self._record(variant, case, profile)
        options = self._runner.options
        add_entry(self._nsight.folder, options.rootdir, f"{variant.name}-{case.id}", profile, record.measured_at)
        return record

    def _record(self, variant: Variant, case: Case, profile: NsightReport) -> Record:
        outcome = Outcome.OK if profile.status == "ok" else Outcome.NOT_MEASURED
        message = "" if outcome == Outcome.OK else f"not measured: {profile.message}"
        build = self._build_of(variant)
        result = CaseResult(outcome, message, ())
        builds = (build,) if build else ()
        return self._runner.records.make("profile", variant, case, result, builds, tool=profile.preset, added=profile)

    @functools.cached_property
    def _nsight(self) -> Nsight:
        """Nsight Compute for the GPU of this machine.  Raises `CannotRun` if there is none."""
        gpu, options = find_gpu(), self._runner.options
        asked = options.part(NcuOptions) or NcuOptions()
        if gpu is None:
            raise CannotRun("profiling needs a GPU, and this machine has none")
        return Nsight(
            options.artifacts / "ncu",
            options.rootdir,
            gpu.compute_capability,
            sudo=asked.sudo,
            cache=options.cache,
        )

    @functools.cached_property
    def _saved(self) -> SavedRecords:
        """The saved records of the SDPA backends."""
        names = [baseline.name for baseline in self._runner.builds.run_plan.sdpa_baselines]
        return SavedRecords(self._runner.options.records_folder, names)

    def _announce(self, say: Say) -> None:
        """Report once per run whether Nsight Compute can read counters, and which records cannot be read."""
        if "trial" in vars(self._nsight):
            return
        self._runner.end_workers()  # contexts and memory of the workers would affect the counters
        with timing_lock():
            trial = self._nsight.trial
        if trial.status == "ok":
            say(f"{trial.tool} can read the counters of this GPU (tried on an empty kernel in {trial.seconds:.1f} s)")
        else:
            say(f"no counters will be collected: {trial.message}")
        for file in self._saved.incomplete:
            say(f"{file.path}: {file.complaint}")

    def _profile_call(self, variant: Variant, case: Case) -> NsightReport:
        """Profile one call in a separate process, while no process of this user times anything on this GPU."""
        earlier = self._profiles.get((variant.name, case.id))
        if earlier is not None:
            return earlier
        arm = self._runner.builds.arm(variant)
        job = CaseJob(
            variant=variant,
            case=case,
            library=arm.library,
            file_hashes=arm.file_hashes,
            device="cuda",
            policy=self._runner.policy_of(variant, case),
            checks_output=False,
            time=False,
            watchdog_seconds=self._runner.watchdog_seconds(variant, "cuda"),
            warm_ups=1,
        )
        self._runner.end_workers()
        with timing_lock():
            # Only a `cuda` entry is certain to launch no kernels but those of its own library.
            build = self._build_of(variant) if variant.entry.kind == "cuda" else None
            profile = self._nsight.run(job, (self._runner.options.part(NcuOptions) or NcuOptions()).preset, build)
        self._profiles[(variant.name, case.id)] = msgspec.structs.replace(profile, expect=variant.expect)
        return self._profiles[(variant.name, case.id)]

    def _build_of(self, variant: Variant) -> Build | None:
        build = self._runner.builds.build_for_this_machine(variant)
        return None if isinstance(build, BuildFailure) else build

    def _with_baseline(self, variant: Variant, case: Case, profile: NsightReport) -> NsightReport:
        """The profile with the counters of the fastest SDPA backend at the same shape; unchanged for a baseline."""
        kernel = profile.longest
        if kernel is None or variant.role in COMPANION_ROLES:
            return profile
        baseline = fastest_baseline(self._runner, case, self._saved)
        if baseline is None:
            return msgspec.structs.replace(profile, baseline_missing="no SDPA backend supports this case")
        baseline_profile = self._profile_call(baseline, case)
        baseline_kernel = longest(baseline_profile.kernels)
        if baseline_profile.status != "ok" or baseline_kernel is None:
            return msgspec.structs.replace(profile, baseline=baseline.name, baseline_missing=baseline_profile.message)
        return msgspec.structs.replace(
            profile,
            baseline=baseline.name,
            baseline_kernels=baseline_profile.kernels,
            differences=differences(kernel, baseline_kernel),
        )


def fastest_baseline(runner: CaseRunner, case: Case, saved: SavedRecords) -> Variant | None:
    """The fastest SDPA backend at this shape: by this run, else by the saved records, else the first one."""
    supporting = [
        baseline
        for baseline in runner.builds.run_plan.sdpa_baselines
        if "cuda" in baseline.supports.device and not baseline.refuses(case)
    ]
    times = {each.name: us for each in supporting if (us := runner.device_us.get((case.shape_id, each.name)))}
    times = times or {each.name: us for each in supporting if (us := _saved_us(runner, each, case, saved))}
    return min(supporting, key=lambda baseline: times.get(baseline.name, float("inf")), default=None)


def _saved_us(runner: CaseRunner, variant: Variant, case: Case, saved: SavedRecords) -> float | None:
    records = saved.of(variant.name, runner.records.environment.gpu)
    speeds = (record.speed for record in records if record.case and record.case.shape_id == case.shape_id)
    return next((speed.device.median_us for speed in speeds if speed), None)

"""`--ncu`: one variant on one shape under Nsight Compute, once it was judged right, beside the fastest SDPA."""

from __future__ import annotations

import functools

import msgspec

from pytest_fa.build.builder import BuildFailure, Say
from pytest_fa.catalog.case import Case
from pytest_fa.catalog.variant import COMPANION_ROLES, Variant
from pytest_fa.measure.timing_lock import timing_lock
from pytest_fa.profile.counter_differences import differences
from pytest_fa.profile.index import add_entry
from pytest_fa.profile.nsight import Nsight
from pytest_fa.records.built import Build
from pytest_fa.records.environment import find_gpu, gpu_folder
from pytest_fa.records.log import read_records
from pytest_fa.records.record import Outcome, Record
from pytest_fa.records.tool_results import NsightReport, longest
from pytest_fa.session.builds import device_of
from pytest_fa.session.case_runner import CaseRunner
from pytest_fa.session.refusals import CannotRun, Refused
from pytest_fa.worker.jobs import CaseJob, CaseResult


class CaseProfiler:
    """Nsight Compute for the cases of one run.

    It is tried once on an empty kernel; what it counted of a case is kept, since several variants stand beside the same
    SDPA backend.
    """

    def __init__(self, runner: CaseRunner) -> None:
        self._runner = runner
        self._profiles: dict[tuple[str, str], NsightReport] = {}

    def profile(self, variant: Variant, case: Case, say: Say) -> Record:
        """The record of `test_profile`: a call that was judged right, counted in a child process of its own.

        A call that is judged wrong gives the record of that check.  Raises `CannotRun` where the variant has no GPU to
        run on, `Refused` where it does not take the case.
        """
        if reason := variant.refuses(case):
            raise Refused(reason)
        if device_of(variant) == "cpu":
            raise CannotRun(f"{variant.name} runs on the CPU here: there is nothing to count")
        if variant.is_judged and (variant.name, case.id) not in self._runner.right:
            judged = self._runner.run(variant, case, "correct")
            if judged.outcome != "ok":
                return msgspec.structs.replace(judged, kind="profile")
        self._announce(say)
        profile = self._with_baseline(variant, case, self._count(variant, case))
        record = self._record(variant, case, profile)
        options = self._runner.options
        add_entry(self._nsight.folder, options.rootdir, f"{variant.name}-{case.id}", profile, record.measured_at)
        return record

    def _record(self, variant: Variant, case: Case, profile: NsightReport) -> Record:
        outcome: Outcome = "ok" if profile.status == "ok" else "not_measured"
        message = "" if outcome == "ok" else f"not measured: {profile.message}"
        build = self._build_of(variant)
        result = CaseResult(outcome, message, ())
        record = self._runner.records.make("profile", variant, case, result, (build,) if build else ())
        return msgspec.structs.replace(record, id=f"{record.id}-{profile.preset}", nsight=profile)

    @functools.cached_property
    def _nsight(self) -> Nsight:
        """Raises `CannotRun` without a GPU."""
        gpu, options = find_gpu(), self._runner.options
        if gpu is None:
            raise CannotRun("profiling needs a GPU, and this machine has none")
        return Nsight(
            options.artifacts / "ncu",
            options.rootdir,
            gpu.compute_capability,
            sudo=options.ncu_sudo,
            cache=options.cache,
        )

    def _announce(self, say: Say) -> None:
        """Say once in a run whether a counter could be read back."""
        if "trial" in vars(self._nsight):
            return
        self._runner.rest()  # memory and contexts of the workers would show up in the counters
        with timing_lock():
            trial = self._nsight.trial
        if trial.status == "ok":
            say(f"{trial.tool} reads counters of this GPU (tried on an empty kernel, {trial.seconds:.1f} s)")
        else:
            say(f"nothing will be counted: {trial.message}")

    def _count(self, variant: Variant, case: Case) -> NsightReport:
        """One child process, while no process of this user times anything on this GPU."""
        known = self._profiles.get((variant.name, case.id))
        if known is not None:
            return known
        job = CaseJob(
            variant=variant,
            case=case,
            library=self._runner.builds.arm(variant).library,
            device="cuda",
            policy=self._runner.policy_of(variant),
            judge=False,
            time=False,
            watchdog_seconds=self._runner.watchdog_seconds(variant, "cuda"),
            warm_ups=1,
        )
        self._runner.rest()
        with timing_lock():
            # Only a `cuda` entry is known to launch the kernels of its own library alone.
            build = self._build_of(variant) if variant.entry.kind == "cuda" else None
            profile = self._nsight.run(job, self._runner.options.ncu_set, build)
        self._profiles[(variant.name, case.id)] = msgspec.structs.replace(profile, expect=variant.expect)
        return self._profiles[(variant.name, case.id)]

    def _build_of(self, variant: Variant) -> Build | None:
        build = self._runner.builds.runnable(variant)
        return None if isinstance(build, BuildFailure) else build

    def _with_baseline(self, variant: Variant, case: Case, profile: NsightReport) -> NsightReport:
        """The profile with the SDPA backend's counters at the same shape; a baseline is compared with none."""
        ours = profile.longest
        if ours is None or variant.role in COMPANION_ROLES:
            return profile
        baseline = fastest_baseline(self._runner, case)
        if baseline is None:
            return msgspec.structs.replace(profile, baseline_missing="no SDPA backend takes this case")
        theirs = self._count(baseline, case)
        kernel = longest(theirs.kernels)
        if theirs.status != "ok" or kernel is None:
            return msgspec.structs.replace(profile, baseline=baseline.name, baseline_missing=theirs.message)
        return msgspec.structs.replace(
            profile, baseline=baseline.name, baseline_kernels=theirs.kernels, differences=differences(ours, kernel)
        )


def fastest_baseline(runner: CaseRunner, case: Case) -> Variant | None:
    """The SDPA backend that was fastest at this shape: in this run, else in the saved records, else the first."""
    taking = [
        baseline
        for baseline in runner.builds.asked.sdpa_baselines
        if "cuda" in baseline.supports.device and not baseline.refuses(case)
    ]
    times = {each.name: us for each in taking if (us := runner.device_us.get((case.shape_id, each.name)))}
    times = times or {each.name: us for each in taking if (us := _saved_us(runner, each, case))}
    return min(taking, key=lambda baseline: times.get(baseline.name, float("inf")), default=None)


def _saved_us(runner: CaseRunner, variant: Variant, case: Case) -> float | None:
    path = runner.options.records_folder / gpu_folder(runner.records.environment.gpu) / f"{variant.name}.jsonl"
    timed = (record.speed for record in read_records(path) if record.case and record.case.shape_id == case.shape_id)
    return next((speed.device.median_us for speed in timed if speed), None)

"""`--ncu`: one variant on one shape under Nsight Compute, once it was right, beside the fastest SDPA backend."""

from __future__ import annotations

import msgspec

from pytest_fa.build.builder import BuildFailure
from pytest_fa.catalog.case import Case
from pytest_fa.catalog.variant import COMPANION_ROLES, Variant
from pytest_fa.jobs import CaseJob, CaseResult
from pytest_fa.measure.timing_lock import timing_lock
from pytest_fa.profile.difference import differences
from pytest_fa.profile.index import add_entry
from pytest_fa.report.log import gpu_folder, read_records
from pytest_fa.report.profiled import Profile, longest
from pytest_fa.report.record import Leaf, Record
from pytest_fa.session import CannotRun, Refused, Say, Session


def profile_case(session: Session, variant: Variant, case: Case, say: Say) -> Record:
    """The record of `test_profile`: a call that was judged right, counted in a child of its own.

    The record of a call that is wrong takes its place.  Raises `CannotRun` where the variant has no GPU to run on,
    `Refused` where it does not take the case.
    """
    if reason := variant.refuses(case):
        raise Refused(reason)
    if session.device_of(variant) == "cpu":
        raise CannotRun(f"{variant.name} runs on the CPU here: there is nothing to count")
    if variant.is_judged and (variant.name, case.id) not in session.right:
        judged = session.run_case(variant, case, "correct")
        if judged.outcome != "ok":
            return msgspec.structs.replace(judged, kind="profile")
    _announce(session, say)
    found = _profile(session, variant, case)
    found = _with_baseline(session, variant, case, found)
    leaf = _leaf(session, variant)
    outcome, message = ("ok", "") if found.status == "ok" else ("not_measured", f"not measured: {found.message}")
    result = CaseResult(outcome, message, ())  # type: ignore[arg-type]  # both are outcomes
    record = session.record("profile", variant.name, variant.role, case, result, (leaf,) if leaf else ())
    record = msgspec.structs.replace(record, id=f"{record.id}-{found.preset}", profile=found)
    add_entry(session.profiler.folder, session.options.rootdir, f"{variant.name}-{case.id}", found, record.measured_at)
    return record


def _announce(session: Session, say: Say) -> None:
    """Once in a run: whether a counter could be read back."""
    if "probe" in vars(session.profiler):
        return
    session.workers.rest()  # what it holds on the GPU would stand beside what is counted
    session.profilers.rest()
    with timing_lock():
        probe = session.profiler.probe
    if probe.status == "ok":
        say(f"{probe.tool} reads counters of this GPU (tried on an empty kernel, {probe.seconds:.1f} s)")
    else:
        say(f"nothing will be counted: {probe.message}")


def _profile(session: Session, variant: Variant, case: Case) -> Profile:
    """One child, while nobody times anything on this GPU."""
    known = session.profiles.get((variant.name, case.id))
    if known is None:
        arm = session.arm(variant)
        job = CaseJob(
            variant=variant,
            case=case,
            library=arm.library,
            device="cuda",
            policy=session.policy_of(variant),
            judge=False,
            time=False,
            watchdog_seconds=session.watchdog_seconds(variant, "cuda"),
            warm_ups=1,
        )
        session.workers.rest()
        session.profilers.rest()
        with timing_lock():
            own = _leaf(session, variant) if variant.entry.kind == "cuda" else None  # others may launch torch's
            known = session.profiler.run(job, session.options.ncu_set, own)
        known = msgspec.structs.replace(known, expect=variant.expect)
        session.profiles[(variant.name, case.id)] = known
    return known


def _leaf(session: Session, variant: Variant) -> Leaf | None:
    leaf = session.runnable_leaf(variant) if variant.is_built else None
    return None if isinstance(leaf, BuildFailure) else leaf


def _with_baseline(session: Session, variant: Variant, case: Case, found: Profile) -> Profile:
    """The profile with the SDPA backend's counters at the same shape beside it; a companion stands alone."""
    ours = found.longest
    if ours is None or variant.role in COMPANION_ROLES:
        return found
    baseline = fastest_baseline(session, case)
    if baseline is None:
        return msgspec.structs.replace(found, beside_missing="no SDPA backend takes this case")
    theirs = _profile(session, baseline, case)
    kernel = longest(theirs.kernels)
    if theirs.status != "ok" or kernel is None:
        return msgspec.structs.replace(found, beside=baseline.name, beside_missing=theirs.message)
    return msgspec.structs.replace(
        found, beside=baseline.name, beside_kernels=theirs.kernels, differences=differences(ours, kernel)
    )


def fastest_baseline(session: Session, case: Case) -> Variant | None:
    """The SDPA backend that was fastest at this shape: in this run, else in the saved records, else the first."""
    taking = [
        each
        for each in session.catalog.variants.values()
        if each.role == "baseline" and "cuda" in each.supports.device and not each.refuses(case)
    ]
    times = {each.name: us for each in taking if (us := session.device_us.get((case.shape_id, each.name)))}
    times = times or {each.name: us for each in taking if (us := _saved_us(session, each, case))}
    return min(taking, key=lambda each: times.get(each.name, float("inf")), default=None)


def _saved_us(session: Session, variant: Variant, case: Case) -> float | None:
    path = session.options.profiles / gpu_folder(session.environment.gpu) / f"{variant.name}.jsonl"
    timed = (each.speed for each in read_records(path) if each.case and each.case.shape_id == case.shape_id)
    return next((speed.device.median_us for speed in timed if speed), None)

"""`--fa-selftest`: runs every check on kernels with one mistake each, and on correct kernels, and runs the exploits."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_fa.catalog.properties import PROPERTIES
from pytest_fa.catalog.variant import Variant
from pytest_fa.features.gate.gate import GateQuestion, decide_gate
from pytest_fa.features.selftest.exploits import (
    EXPLOITS,
    SHARE_OF_TWIN,
    Exploit,
    Verdict,
    exploit_case,
    exploit_problem,
)
from pytest_fa.features.selftest.faults import FAULTS, cases_of, detection_problem
from pytest_fa.records.agreement import check_agreement
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record, Stage
from pytest_fa.records.timing import PROFILED_OUTPUTS
from pytest_fa.session.case_runner import CaseRunner
from pytest_fa.session.refusals import Refused
from pytest_fa.session.run_plan import RunPlan
from pytest_fa.wire.jobs import CaseResult

# After these, further runs of the same kernel would end in the same way.
FINAL_OUTCOMES = (Outcome.CRASHED, Outcome.HUNG, Outcome.DEVICE_ERROR)


def run_selftest_kernel(run_plan: RunPlan, runner: CaseRunner, variant: Variant) -> Record:
    """Run every check on one kernel and return the record: which checks caught it, and whether that is as expected.

    If it is not, the message has the first line of each check that caught it.
    """
    if variant.name in EXPLOITS:
        return _run_exploit(run_plan, runner, variant)
    caught: dict[str, str] = {}  # check -> what it first said
    fault, tried = FAULTS.get(variant.name), 0
    for record in _runs(run_plan, runner, variant):
        tried += 1
        failure = () if record.outcome == Outcome.OK else (record.outcome,)  # listed if a failure names no check
        said, _, _ = record.message.partition("\n")
        for check in record.caught_by or failure:
            caught.setdefault(check, f"{check} of {record.id}: {said}")
        if record.outcome in FINAL_OUTCOMES or (fault and fault.is_settled_by(caught)):
            break
    problem = detection_problem(variant.name, list(caught)) or ("" if tried else "no check ran on this kernel")
    if problem:
        problem = "\n  ".join((problem, *caught.values()))
    return _record(runner, variant, problem, tuple(caught))


def _runs(run_plan: RunPlan, runner: CaseRunner, variant: Variant) -> Iterator[Record]:
    """The records of every case, of one timed case, of every property, and of a gate if the gate must catch it.

    A mistake that shows in the cases of its part has no other records.
    """
    fault = FAULTS.get(variant.name)
    needed_check = fault.caught_by if fault else None
    if needed_check == "timed outputs" and not runner.options.timing:
        raise Refused(
            f"only timed calls show the mistake of {variant.name}, and --benchmark-disable switches timing off"
        )
    supported = [case for case in cases_of(variant.name) if not variant.refuses(case)]
    for case in supported:
        yield runner.run(variant, case, "correct")
    if fault and fault.shows_in_shapes:
        return
    if supported and variant.is_judged:
        yield runner.run(variant, supported[0], "speed", is_checked_first=True)
    for name in PROPERTIES:
        try:
            yield runner.check_property(variant, name)
        except Refused:
            if name == needed_check:  # this machine cannot run the check that must catch the kernel
                raise
    if needed_check == "gate":
        twin = run_plan.catalog.variants[FAULTS[variant.name].twin]
        yield decide_gate(runner, variant, GateQuestion(1.0, (supported[0],), (twin,)), lambda _: None)


def _record(runner: CaseRunner, variant: Variant, problem: str, caught_by: tuple[str, ...]) -> Record:
    stage = Stage("correct", "failed" if problem else "ok")
    return runner.records.make(
        "selftest", variant, None, CaseResult(Outcome.WRONG if problem else Outcome.OK, problem, (stage,), caught_by)
    )


# -- exploits ---------------------------------------------------------------------------------------------------------


def _run_exploit(run_plan: RunPlan, runner: CaseRunner, variant: Variant) -> Record:
    """Run an exploit in processes of its own until a check catches it, and return the record."""
    exploit = EXPLOITS[variant.name]
    if exploit.needs_timing and not runner.options.timing:
        raise Refused(f"only timed calls show {variant.name}, and --benchmark-disable switches timing off")
    least_us = (exploit.least_us, exploit.least_us)
    if exploit.twin:
        twin = run_plan.catalog.variants[exploit.twin]
        times_us = _times_us(runner.run(twin, exploit_case(twin), "speed", is_checked_first=True))
        if times_us is None:
            return _record(runner, variant, f"{exploit.twin}, whose time it is compared with, has no time", ())
        least_us = (SHARE_OF_TWIN * times_us[0],) * 2  # a call from Python takes what its work takes on the device
    runner.end_workers()  # what an exploit changes in its process must not affect others
    runner.confirms_times = exploit.profiled
    try:
        verdict = _tried(_exploit_runs(runner, variant, exploit), least_us)
    finally:
        runner.confirms_times = False
        runner.end_workers()
    return _record(runner, variant, exploit_problem(variant.name, verdict), verdict.caught_by)


def _tried(runs: Iterator[Record], least_us: tuple[float, float]) -> Verdict:
    """The verdict on an exploit: that of the first run that caught it, else whether its times are too short."""
    verdict = Verdict(Outcome.OK, ())
    for record in runs:
        verdict = _verdict(record)
        if verdict.caught_by:
            break
        verdict = verdict._replace(gain=_gain(_times_us(record), least_us))
    return verdict


def _gain(times_us: tuple[float, float] | None, least_us: tuple[float, float]) -> str:
    """The times that are too short for the work of the calls; empty if there are none."""
    if times_us is None:
        return "no time was measured"
    times = zip(("device_us", "call_us"), times_us, least_us, strict=True)
    return "; ".join(f"{name} is {us:.1f}, must be at least {least:.1f}" for name, us, least in times if us < least)


def _exploit_runs(runner: CaseRunner, variant: Variant, exploit: Exploit) -> Iterator[Record]:
    """The record of the property that must catch it, and of one case that is judged and timed.

    If only timed calls show it, it is judged and timed in one job: an earlier check could catch it by other means.
    """
    if exploit.property_name:
        yield runner.check_property(variant, exploit.property_name)
    yield runner.run(variant, exploit_case(variant), "speed", is_checked_first=not exploit.needs_timing)


def _verdict(record: Record) -> Verdict:
    """The outcome of a run, and what caught the exploit.

    That is `clocks` if another clock contradicts its time, and `profiled outputs` if its profiled calls are wrong.
    """
    if record.outcome != Outcome.OK:
        return Verdict(record.outcome, record.caught_by or (record.outcome,))
    if record.speed and PROFILED_OUTPUTS in (record.speed.profiler_missing or ""):
        return Verdict(Outcome.OK, ("profiled outputs",))
    contradicted = record.speed and check_agreement(record.variant, record.role, record.speed).valid is False
    return Verdict(Outcome.OK, ("clocks",) if contradicted else ())


def _times_us(record: Record) -> tuple[float, float] | None:
    """The two times of a record by which kernels are compared; None if it was not timed."""
    return (record.speed.device.median_us, record.speed.call.median_us) if record.speed else None

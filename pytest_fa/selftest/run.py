"""`--fa-selftest`: runs every check on kernels with exactly one mistake each, and on correct kernels."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_fa.catalog.faults import FAULTS, cases, detection_problem
from pytest_fa.catalog.properties import PROPERTIES
from pytest_fa.catalog.variant import Variant
from pytest_fa.gates.run import GateQuestion, decide_gate
from pytest_fa.records.record import Record, Stage
from pytest_fa.session.case_runner import CaseRunner
from pytest_fa.session.refusals import Refused
from pytest_fa.session.run_plan import RunPlan
from pytest_fa.worker.jobs import CaseResult

FINAL_OUTCOMES = ("crashed", "hung", "device_error")  # further runs of the same kernel would end in the same way


def run_selftest_kernel(run_plan: RunPlan, runner: CaseRunner, variant: Variant) -> Record:
    """Run every check on one kernel and return the record: which checks caught it, and whether that is as expected."""
    caught: dict[str, None] = {}
    tried = 0
    for record in _runs(run_plan, runner, variant):
        tried += 1
        failure = () if record.outcome == "ok" else (record.outcome,)  # listed if a failure names no check
        caught.update(dict.fromkeys(record.caught_by or failure))
        if record.outcome in FINAL_OUTCOMES:
            break
    problem = detection_problem(variant.name, list(caught)) or ("" if tried else "no check ran on this kernel")
    stage = Stage("correct", "failed" if problem else "ok")
    result = CaseResult("wrong" if problem else "ok", problem, (stage,), tuple(caught))
    return runner.records.make("selftest", variant, None, result)


def _runs(run_plan: RunPlan, runner: CaseRunner, variant: Variant) -> Iterator[Record]:
    """The records of every case, of one timed case, of every property, and of a gate if the gate must catch it."""
    needed_check = FAULTS[variant.name].caught_by if variant.name in FAULTS else None
    if needed_check == "timed outputs" and not runner.options.timing:
        raise Refused(
            f"only timed calls show the mistake of {variant.name}, and --benchmark-disable switches timing off"
        )
    supported = [case for case in cases() if not variant.refuses(case)]
    for case in supported:
        yield runner.run(variant, case, "correct")
    if supported and variant.is_judged:
        yield runner.run(variant, supported[0], "speed")
    for name in PROPERTIES:
        try:
            yield runner.check_property(variant, name)
        except Refused:
            if name == needed_check:  # this machine cannot run the check that must catch the kernel
                raise
    if needed_check == "gate":
        twin = run_plan.catalog.variants[FAULTS[variant.name].twin]
        yield decide_gate(runner, variant, GateQuestion(1.0, (supported[0],), (twin,)), lambda _: None)

"""`--fa-selftest`: the judge, judged on kernels with one mistake each, and on right ones."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_fa.catalog.faults import FAULTS, cases, disappointment
from pytest_fa.catalog.properties import PROPERTIES
from pytest_fa.catalog.variant import Variant
from pytest_fa.gate.run import Question, hold_gate
from pytest_fa.records.record import Record, Stage
from pytest_fa.session.case_runner import CaseRunner
from pytest_fa.session.refusals import Refused
from pytest_fa.session.run_plan import RunPlan
from pytest_fa.worker.jobs import CaseResult

HOPELESS = ("crashed", "hung", "device_error")  # as it will again, and again


def judge_the_judge(asked: RunPlan, runner: CaseRunner, variant: Variant) -> Record:
    """The record of one kernel of the self-test: by which checks it was found, and whether that is right."""
    caught: dict[str, None] = {}
    tried = 0
    for record in _runs(asked, runner, variant):
        tried += 1
        ending = () if record.outcome == "ok" else (record.outcome,)  # a twin that does not even run is no right one
        caught.update(dict.fromkeys(record.caught_by or ending))
        if record.outcome in HOPELESS:
            break
    problem = disappointment(variant.name, list(caught)) or ("" if tried else "nothing was tried on it")
    stage = Stage("correct", "failed" if problem else "ok")
    result = CaseResult("wrong" if problem else "ok", problem, (stage,), tuple(caught))
    return runner.records.make("selftest", variant, None, result)


def _runs(asked: RunPlan, runner: CaseRunner, variant: Variant) -> Iterator[Record]:
    """Every case, one of them timed, every property, and the gate where that must find it."""
    taken = [case for case in cases() if not variant.refuses(case)]
    for case in taken:
        yield runner.run(variant, case, "correct")
    if taken and variant.is_judged:
        yield runner.run(variant, taken[0], "speed")
    needed = FAULTS[variant.name].caught_by if variant.name in FAULTS else None
    for name in PROPERTIES:
        try:
            yield runner.hold_to_property(variant, name)
        except Refused:
            if name == needed:  # this machine lacks what would find it
                raise
    if needed == "gate":
        twin = asked.catalog.variants[FAULTS[variant.name].twin]
        yield hold_gate(runner, variant, Question(1.0, (taken[0],), (twin,)), lambda _: None)

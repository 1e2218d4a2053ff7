"""`--fa-selftest`: the judge, judged on kernels with one mistake each, and on right ones."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_fa.catalog.faults import FAULTS, cases, disappointment
from pytest_fa.catalog.properties import PROPERTIES
from pytest_fa.catalog.variant import Variant
from pytest_fa.gating import Question, hold_gate
from pytest_fa.jobs import CaseResult
from pytest_fa.report.record import Record, Stage
from pytest_fa.session import Refused, Session

HOPELESS = ("crashed", "hung", "device_error")  # as it will again, and again


def judge_the_judge(session: Session, variant: Variant) -> Record:
    """The record of one kernel of the self-test: by which checks it was found, and whether that is right."""
    caught: dict[str, None] = {}
    tried = 0
    for record in _runs(session, variant):
        tried += 1
        ending = () if record.outcome == "ok" else (record.outcome,)  # a twin that does not even run is no right one
        caught.update(dict.fromkeys(record.caught_by or ending))
        if record.outcome in HOPELESS:
            break
    problem = disappointment(variant.name, list(caught)) or ("" if tried else "nothing was tried on it")
    stage = Stage("correct", "failed" if problem else "ok")
    result = CaseResult("wrong" if problem else "ok", problem, (stage,), tuple(caught))
    return session.record("selftest", variant.name, variant.role, None, result, ())


def _runs(session: Session, variant: Variant) -> Iterator[Record]:
    """Every case, one of them timed, every property, and the gate where that must find it."""
    taken = [case for case in cases() if not variant.refuses(case)]
    for case in taken:
        yield session.run_case(variant, case, "correct")
    if taken and variant.is_judged:
        yield session.run_case(variant, taken[0], "speed")
    needed = FAULTS[variant.name].caught_by if variant.name in FAULTS else None
    for name in PROPERTIES:
        try:
            yield session.hold_to_property(variant, name)
        except Refused:
            if name == needed:  # this machine lacks what would find it
                raise
    if needed == "gate":
        question = Question(1.0, session.catalog.variants[FAULTS[variant.name].twin], (taken[0],))
        yield hold_gate(session, variant, question, lambda _: None)

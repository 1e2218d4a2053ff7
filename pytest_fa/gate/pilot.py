"""The pilot of a gate: everyone timed and judged once, to choose who is gated against, and for nothing else."""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from pytest_fa.catalog.case import Case
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import FaError
from pytest_fa.records.record import Record
from pytest_fa.records.timing import Speed
from pytest_fa.session.case_runner import CaseRunner
from pytest_fa.session.refusals import CannotRun, Refused

NEAR = 1.03  # baselines within 3 % of the fastest in the pilot are all gated against


class NoVerdict(FaError):
    """What stands between the question and an answer, found before the first process."""


class Pilot(NamedTuple):
    """Shape id to variant to microseconds; and which baselines are left out at which shape, and why."""

    times: dict[str, dict[str, float]]
    left_out: tuple[str, ...]


def run_pilot(
    runner: CaseRunner, variant: Variant, cases: tuple[Case, ...], baselines: tuple[Variant, ...]
) -> Pilot | Record:
    """Time and judge the candidate and what it may be gated against.

    The record of a candidate that is not right takes the place of all that.  Raises `NoVerdict` for a time that is
    not to be believed and matters, and for a baseline that failed: the others would be an easier question.
    """
    times: dict[str, dict[str, float]] = {}
    left_out: list[str] = []
    for case in cases:
        record = runner.run(variant, case, "speed")
        if record.outcome != "ok":
            return msgspec.structs.replace(record, kind="gate")
        mine_us = _believed_us(record)
        others: list[Record] = []
        for each in baselines:
            try:
                other = runner.run(each, case, "speed")
            except Refused:
                continue
            except CannotRun as reason:
                raise NoVerdict(str(reason)) from None
            if other.outcome != "ok":
                raise NoVerdict(f"{each.name} at {case.shape_id}: {other.outcome}: {other.message}")
            others.append(other)
        far = _far_in_doubt(others)
        left_out += [
            f"{each.variant} at {case.shape_id}: {_doubt(each)}; far from the fastest either way" for each in far
        ]
        believed = {each.variant: _believed_us(each) for each in others if each not in far}
        times[case.shape_id] = {variant.name: mine_us, **believed}
    return Pilot(times, tuple(left_out))


def _far_in_doubt(baselines: list[Record]) -> list[Record]:
    """Those whose clocks disagree, while even the shorter of both times is not near the fastest that is confirmed."""
    agreed = [each.speed for each in baselines if each.speed and each.speed.agreement and each.speed.agreement.valid]
    least_us = min((speed.device.median_us for speed in agreed), default=math.inf)
    return [each for each in baselines if each.speed and _shorter_us(each.speed) > NEAR * least_us]


def _shorter_us(speed: Speed) -> float:
    """The shorter time of clocks that disagree about one chain of kernels; 0 for any other doubt, and without one."""
    agreement = speed.agreement
    if agreement is None or agreement.valid is not False or speed.order != "chain":
        return 0.0
    return agreement.least_us or 0.0


def _doubt(record: Record) -> str:
    return record.speed.agreement.reason if record.speed and record.speed.agreement else ""


def _believed_us(record: Record) -> float:
    """A time that nothing speaks against.  Raises `NoVerdict`."""
    speed, name = record.speed, record.id
    if speed is None:
        raise NoVerdict("a gate needs timings, and --benchmark-disable leaves them out")
    if speed.agreement is not None and speed.agreement.valid is False:
        raise NoVerdict(f"the time of {name} is not confirmed: {speed.agreement.reason}")
    if speed.order == "programmatic":
        raise NoVerdict(f"{name}: its kernels begin before their predecessor end, a period that is never gated")
    return speed.device.median_us

"""The pilot of a gate: judges and times the candidate and every baseline once, to select the baselines of the gate."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pytest_fa.catalog.case import Case
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import FaError
from pytest_fa.features.gate.memory import GateMemory
from pytest_fa.records.agreement import is_unconfirmed, why_unconfirmed
from pytest_fa.records.costs import Costs
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record
from pytest_fa.records.timing import CallNodes, Speed
from pytest_fa.session.case_runner import CaseRunner
from pytest_fa.session.refusals import CannotRun, Refused
from pytest_fa.wire.jobs import ArmPair, PairedResult

NEAR = 1.03  # the gate compares with the fastest baseline of the pilot and with those up to 3 % slower

MAX_PILOT_AGE_SECONDS = 300.0  # within which a gate may select its baselines by times of an earlier gate

PILOT_SHARE = 0.03  # how much longer a baseline may take in the gate than in the pilot, besides twice the known spread


SLOWER_THAN_PILOT = "the baseline was slower than in the pilot"
OTHER_NODES = "a timed call launched other kernels than the call of its record"


class NoVerdict(FaError):
    """The gate cannot have a verdict.  This is known before its first process starts."""


class Pilot(NamedTuple):
    """The times of the pilot, and the baselines that it excluded.

    `times` maps shape id and variant name to microseconds.  `ages` does so for times that an earlier gate of this run
    measured: how many seconds old they were when they were compared.  `left_out` has one line for each excluded
    baseline and shape, with the reason.  `costs` are the sums over the timings of this pilot, if these are known.
    `nodes` has those of a call, by shape id and variant name, if they were read.
    """

    times: dict[str, dict[str, float]]
    left_out: tuple[str, ...]
    ages: dict[str, dict[str, float]]
    costs: Costs | None = None
    nodes: dict[tuple[str, str], CallNodes] = {}  # noqa: RUF012  # never modified


class BaselineRow(NamedTuple):
    """The records of all baselines at one shape; `ages` has the seconds since an earlier gate made some of them."""

    records: list[Record]
    ages: dict[str, float]


class BaselineTime(NamedTuple):
    """The median time of a baseline in a gate."""

    shape_id: str
    name: str
    us: float


def run_pilot(
    runner: CaseRunner, variant: Variant, cases: tuple[Case, ...], baselines: tuple[Variant, ...]
) -> Pilot | Record:
    """Judge and time the candidate and every baseline on every case.

    The candidate comes first, on all cases, because its processes end when another variant runs.  If it fails, its
    record is returned instead of a `Pilot`.  Raises `NoVerdict` for a baseline that fails, because the other baselines
    may be easier to beat, and for a time that is not confirmed, unless it belongs to a baseline that is certainly too
    slow to matter.
    """
    pilot = Pilot({}, (), {})
    left_out: list[str] = []
    timed: list[Record] = []
    nodes: dict[tuple[str, str], CallNodes] = {}
    for case in cases:
        record = runner.run(variant, case, "speed")
        if record.outcome != Outcome.OK:
            return record
        pilot.times[case.shape_id] = {variant.name: _confirmed_us(record)}
        timed.append(record)
        nodes |= _nodes_of([record], case)
    for case in cases:
        row = _baseline_row(runner, baselines, case)
        nodes |= _nodes_of(row.records, case)
        too_slow = _unconfirmed_but_too_slow(row.records)
        left_out += [
            f"{each.variant} at {case.shape_id}: {_reason(each)}; by both clocks it is more than "
            f"{100 * (NEAR - 1):.0f} % slower than the fastest baseline"
            for each in too_slow
        ]
        pilot.times[case.shape_id] |= {
            each.variant: _confirmed_us(each) for each in row.records if each not in too_slow
        }
        if row.ages:
            pilot.ages[case.shape_id] = row.ages
        timed += [each for each in row.records if each.variant not in row.ages]
    return pilot._replace(left_out=tuple(left_out), costs=_costs_of(timed), nodes=nodes)


def _nodes_of(records: Sequence[Record], case: Case) -> dict[tuple[str, str], CallNodes]:
    """The nodes of a call of each record that has them."""
    return {
        (case.shape_id, each.variant): each.speed.nodes
        for each in records
        if each.speed and not each.speed.launches_missing
    }


def _costs_of(records: list[Record]) -> Costs | None:
    """The sums of the costs that records have; None if none has any."""
    costs = [each.costs for each in records if each.costs]
    seconds = [(each.waited_seconds, each.job_seconds, each.profiler_seconds) for each in costs]
    return Costs(*map(sum, zip(*seconds, strict=True))) if seconds else None


def near(times_us: Mapping[str, float]) -> list[str]:
    """The names of the fastest baseline and of those up to 3 % slower."""
    return [name for name, us in times_us.items() if us <= NEAR * min(times_us.values())]


def _baseline_row(runner: CaseRunner, baselines: tuple[Variant, ...], case: Case) -> BaselineRow:
    """The records of all baselines at a shape.

    An earlier gate of this run may have timed all of them not long ago.  Then only the near ones are timed anew,
    because the gate holds them to these times.  If other baselines are near by the new times, all are timed anew.
    """
    key, start = (case.id, tuple(each.name for each in baselines)), time.monotonic()
    measured_at, shared = GateMemory.of(runner).baseline_rows.get(key, (-math.inf, ()))
    records: dict[str, Record] = {}
    if start - measured_at <= MAX_PILOT_AGE_SECONDS:
        nearest = _near_of(shared)
        records = _timed(runner, [each for each in baselines if each.name in nearest], case)
        row = [records.get(each.variant, each) for each in shared]
        if len(records) == len(nearest) and _near_of(row) == nearest:
            age = time.monotonic() - measured_at
            return BaselineRow(row, {each.variant: age for each in row if each.variant not in records})
    records |= _timed(runner, [each for each in baselines if each.name not in records], case)
    row = [records[each.name] for each in baselines if each.name in records]
    if not any(map(_why_no_time, row)):
        GateMemory.of(runner).baseline_rows[key] = start, tuple(row)
    return BaselineRow(row, {})


def _timed(runner: CaseRunner, baselines: list[Variant], case: Case) -> dict[str, Record]:
    """New records of baselines, without those that refuse the case.  Raises `NoVerdict` for one that fails."""
    records: dict[str, Record] = {}
    for baseline in baselines:
        try:
            record = runner.run(baseline, case, "speed")
        except Refused:
            continue
        except CannotRun as reason:
            raise NoVerdict(str(reason)) from None
        if record.outcome != Outcome.OK:
            first_line = record.message.partition("\n")[0]  # without a traceback
            raise NoVerdict(f"{baseline.name} at {case.shape_id}: {record.outcome}: {first_line}")
        records[baseline.name] = record
    return records


def _near_of(records: Sequence[Record]) -> list[str]:
    """The names of the near baselines among those whose times are confirmed."""
    return near(
        {each.variant: each.speed.device.median_us for each in records if each.speed and not _why_no_time(each)}
    )


def baselines_us(arm_pairs: Sequence[ArmPair], results: Sequence[PairedResult]) -> list[BaselineTime]:
    """The median time of each pair's baseline in the processes of a gate."""
    return [
        BaselineTime(
            pair.case.shape_id,
            pair.baseline.variant.name,
            statistics.median(result.arm_pairs[index].baseline_us for result in results),
        )
        for index, pair in enumerate(arm_pairs)
    ]


def slower_than_pilot(
    pilot_us: Mapping[str, Mapping[str, float]],
    baselines: Sequence[BaselineTime],
    process_sd: float,
    highs: Sequence[float],
    ratio: float,
) -> str:
    """Which baselines were so much slower in the gate than in the pilot that a PASS may be due to it; empty if none.

    A candidate could disturb its baseline.  The A/A control does not show it if both arms of it are disturbed.  The
    disturbance is worth at most its share of the time: with that added, the upper confidence limit of the ratio, whose
    logarithms are `highs`, must still be below `ratio`.  A time within the known spread counts as undisturbed.
    """
    allowed, slower = 1 + PILOT_SHARE + 2 * process_sd, []
    for (shape_id, name, gate_us), high in zip(baselines, highs, strict=True):
        earlier_us = pilot_us.get(shape_id, {}).get(name)
        if earlier_us is None or gate_us <= allowed * earlier_us:
            continue
        worst = math.exp(high) * gate_us / earlier_us
        if not worst < ratio:
            slower.append(
                f"{name} at {shape_id} took {gate_us:.2f} us and in the pilot {earlier_us:.2f} us; with that added, "
                f"the ratio may be {worst:.4f}"
            )
    if not slower:
        return ""
    return f"{SLOWER_THAN_PILOT}: {'; '.join(slower)}; allowed: {100 * (allowed - 1):.1f} % more"


def other_nodes_than_pilot(pilot: Pilot, arm_pairs: Sequence[ArmPair], results: Sequence[PairedResult]) -> str:
    """Which arm launched other nodes per call than in the pilot, whose record names them, as a sentence; else empty."""
    for index, pair in enumerate(arm_pairs):
        for side, arm in enumerate((pair.candidate, pair.baseline)):
            recorded = pilot.nodes.get((pair.case.shape_id, arm.variant.name))
            for result in results:
                timed = result.arm_pairs[index].nodes[side]
                if recorded and timed and not timed.has_same(recorded):
                    where = f"{arm.variant.name} at {pair.case.shape_id}"
                    return f"{OTHER_NODES}: {where}: {timed.text}, and in its record {recorded.text}"
    return ""


def _unconfirmed_but_too_slow(baselines: list[Record]) -> list[Record]:
    """The baselines whose two clocks disagree, but which by either clock are not near the fastest confirmed one."""
    confirmed = [each.speed for each in baselines if each.speed and each.speed.agreement and each.speed.agreement.valid]
    least_us = min((speed.device.median_us for speed in confirmed), default=math.inf)
    return [each for each in baselines if each.speed and _shorter_us(each.speed) > NEAR * least_us]


def _shorter_us(speed: Speed) -> float:
    """The shorter of two times that disagree, for a call that is a single chain of kernels; 0.0 in every other case."""
    agreement = speed.agreement
    if agreement is None or agreement.valid is not False or speed.order != "chain":
        return 0.0
    return agreement.least_us or 0.0


def _reason(record: Record) -> str:
    return why_unconfirmed(record.speed) if record.speed else ""


def _confirmed_us(record: Record) -> float:
    """The `device_us` of a record.  Raises `NoVerdict` if there is none, or if it is not confirmed."""
    reason = _why_no_time(record)
    if reason or record.speed is None:
        raise NoVerdict(reason)
    return record.speed.device.median_us


def _why_no_time(record: Record) -> str:
    """Why a record has no time that a gate may use; empty if it has one."""
    speed, name = record.speed, record.id
    if speed is None:
        return "a gate needs timings; drop --benchmark-disable"
    if record.unprotected:
        return f"the time of {name} was measured unprotected, and is never gated: {record.unprotected}"
    if is_unconfirmed(speed):
        return f"the time of {name} is not confirmed: {why_unconfirmed(speed)}"
    if speed.order == "programmatic":
        return (
            f"{name}: programmatic dependent launch overlaps its kernels; such a period (`period_pdl`) is never gated"
        )
    return ""

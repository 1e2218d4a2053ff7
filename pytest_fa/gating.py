"""`--fa-gate`: is a candidate's `device_us` below a ratio of its baselines', on every shape of the run.

Processes are the samples: each look forks fresh workers, each of which measures every pair.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from pathlib import Path

import msgspec

from pytest_fa.build.cache import find_by_key
from pytest_fa.catalog.case import Case
from pytest_fa.catalog.variant import ARCHES, Variant
from pytest_fa.errors import UsageProblem
from pytest_fa.gate.statistics import PROCESS_SD, bootstrap_interval, detectable_effect
from pytest_fa.gate.verdict import CONFIDENCE, LOOKS, MOST_DROPPED, Look, PairSamples, look
from pytest_fa.jobs import Arm, CaseResult, Contest, GateJob, GateResult
from pytest_fa.measure.timing_lock import timing_lock
from pytest_fa.report.log import read_records
from pytest_fa.report.record import Gate, GatePair, Leaf, Outcome, Record, Stage
from pytest_fa.session import CannotRun, Refused, Say, Session

NEAR = 1.03  # baselines within 3 % of the fastest in the pilot are all gated against
BOOTSTRAP_CONFIDENCE = 0.95
PROCESS_SECONDS = 2.0  # starting one, beside what it measures
PAIR_SECONDS = 0.6

OUTCOMES: dict[str, Outcome] = {"PASS": "ok", "FAIL": "gate_failed", "INCONCLUSIVE": "inconclusive"}


class NotGated(CannotRun):
    """Something that stands between the question and an answer: no right baseline, a wrong candidate."""


def hold_gate(session: Session, variant: Variant, say: Say) -> Record:
    """The record of `test_gate`: pilot, announcement, processes, looks, verdict.

    Raises `CannotRun` where nothing can be gated here.
    """
    ratio = session.options.gate
    assert ratio is not None  # noqa: S101  # test_gate has items only under --fa-gate
    start, seed = time.monotonic(), random.SystemRandom().randrange(2**31)
    shapes = _shapes(session, variant)
    pilot = _pilot(session, variant, shapes)
    if isinstance(pilot, Record):
        return pilot
    contests = _contests(session, variant, shapes, pilot)
    sd, source = _known_sd(session, variant)
    effect = detectable_effect(sd, LOOKS[-1], CONFIDENCE)
    say(_announcement(variant, ratio, contests, effect, source))
    device = session.device_of(variant)
    results: list[GateResult] = []
    verdict = Look("INCONCLUSIVE", "", ())
    with timing_lock():
        for count in LOOKS:
            while len(results) < count:
                job = GateJob(contests, device, session.policy_of(variant), seed + len(results))
                result = session.workers.run_afresh(job)
                if result.outcome != "ok":
                    return _record(session, variant, CaseResult(result.outcome, result.message, _stages("failed")))
                results.append(result)
            verdict = look(_samples(contests, results), ratio, is_last=count == LOOKS[-1], process_sd=sd)
            if verdict.verdict:
                break
    gate = _gate(ratio, seed, contests, results, verdict, pilot, effect, time.monotonic() - start)
    outcome = OUTCOMES[gate.verdict]
    message = "" if outcome == "ok" else f"{gate.verdict}: {gate.reason}"
    stages = _stages("ok" if outcome == "ok" else "failed")
    return msgspec.structs.replace(_record(session, variant, CaseResult(outcome, message, stages)), gate=gate)


Pilot = dict[str, dict[str, float]]  # shape id to variant to microseconds


def _shapes(session: Session, variant: Variant) -> list[Case]:
    """The first seed of every shape of the run that the variant takes."""
    first: dict[str, Case] = {}
    for case in session.plan.cases:
        if not variant.refuses(case):
            first.setdefault(case.shape_id, case)
    if not first:
        raise Refused(f"{variant.name} takes none of this run's cases")
    return list(first.values())


def _pilot(session: Session, variant: Variant, shapes: list[Case]) -> Pilot | Record:
    """Time and judge the candidate and what it may be gated against; its samples decide who, and nothing else.

    The record of a candidate that is not right takes the place of all that.
    """
    found: Pilot = {}
    for case in shapes:
        record = session.run_case(variant, case, "speed")
        if record.speed is None:
            if record.outcome == "ok":
                raise NotGated("--benchmark-disable: a gate needs timings")
            return msgspec.structs.replace(record, kind="gate")
        found[case.shape_id] = {variant.name: record.speed.device.median_us}
        for each in _named_baselines(session):
            try:
                other = session.run_case(each, case, "speed")
            except Refused:
                continue
            if other.outcome == "ok" and other.speed:
                found[case.shape_id][each.name] = other.speed.device.median_us
    return found


def _named_baselines(session: Session) -> list[Variant]:
    """Every baseline of the catalog, or the one variant that was named; none for a build key."""
    named = session.options.gate_baseline
    if named is None:
        return [each for each in session.plan.companions if each.role == "baseline"]
    return [session.gate_baseline] if session.gate_baseline else []


def _contests(session: Session, variant: Variant, shapes: list[Case], pilot: Pilot) -> tuple[Contest, ...]:
    """Each shape against its fastest right baseline and those within 3 % of it."""
    mine, contests = session.arm(variant), []
    named = {each.name: each for each in _named_baselines(session)}
    for case in shapes:
        if session.options.gate_baseline and session.options.gate_baseline.startswith("key:"):
            contests.append(Contest(case, mine, _old_build(session, variant)))
            continue
        times = {name: us for name, us in pilot[case.shape_id].items() if name in named}
        if not times:
            raise NotGated(f"no baseline is right at {case.shape_id}: there is nothing to gate {variant.name} against")
        near = [name for name, us in times.items() if us <= NEAR * min(times.values())]
        contests += [Contest(case, mine, session.arm(named[name])) for name in near]
    return tuple(contests)


def _old_build(session: Session, variant: Variant) -> Arm:
    """The build that `key:` names: one that is still in the cache, for this machine's GPU."""
    key = str(session.options.gate_baseline).removeprefix("key:")
    found = find_by_key(session.options.cache, key)
    mine = session.arm(variant)
    usable = sorted((leaf for leaf in found if leaf.arch in variant.arch), key=lambda leaf: ARCHES.index(leaf.arch))
    if mine.library is None or len({leaf.key for leaf in usable}) != 1:
        names = ", ".join(f"{leaf.key} ({leaf.variant}, {leaf.built_at})" for leaf in usable) or "none"
        raise UsageProblem(f"--fa-gate-baseline: key {key!r} must name one build in the cache; it names: {names}")
    older = msgspec.structs.replace(variant, name=f"{usable[-1].variant}@key:{usable[-1].key}")
    return Arm(older, str(session.options.cache / usable[-1].library))


def _samples(contests: tuple[Contest, ...], results: list[GateResult]) -> list[PairSamples]:
    """Rows of blocks by pair; a process that lost too many blocks to a slowed GPU gives an empty row, which is NaN."""
    pairs = []
    for index, each in enumerate(contests):
        mine = [result.contests[index] for result in results]
        kept = [one if one.dropped <= MOST_DROPPED * (one.dropped + len(one.blocks)) else None for one in mine]
        pairs.append(
            PairSamples(
                each.case.shape_id,
                each.baseline.variant.name,
                tuple(one.blocks if one else () for one in kept),
                tuple(one.same if one else () for one in kept),
            )
        )
    return pairs


def _gate(
    ratio: float,
    seed: int,
    contests: tuple[Contest, ...],
    results: list[GateResult],
    found: Look,
    pilot: Pilot,
    effect: float,
    seconds: float,
) -> Gate:
    """Everything that the gate saw, as a value."""
    samples = _samples(contests, results)
    pairs = []
    for pair, interval in zip(samples, found.intervals, strict=True):
        boot = bootstrap_interval(pair.blocks, BOOTSTRAP_CONFIDENCE, seed)
        ends = (interval.mean, interval.low, interval.high, boot.low, boot.high)
        pairs.append(GatePair(pair, *(_exp(end) for end in ends)))
    return Gate(
        ratio=ratio,
        verdict=found.verdict or "INCONCLUSIVE",
        reason=found.reason,
        processes=len(results),
        seed=seed,
        dropped_blocks=sum(one.dropped for result in results for one in result.contests),
        detectable=effect,
        process_sd=max((statistics.stdev(pair.means) for pair in samples), default=math.nan),
        seconds=seconds,
        pilot_us=pilot,
        pairs=tuple(pairs),
    )


def _known_sd(session: Session, variant: Variant) -> tuple[float, str]:
    """The standard deviation of process means in this variant's last saved gate, else the one of our own records."""
    for path in sorted(Path(session.options.profiles).glob(f"*/{variant.name}.jsonl")):
        for record in reversed(read_records(path)):
            if record.gate and record.environment.gpu == session.environment.gpu and record.gate.process_sd > 0:
                return record.gate.process_sd, f"saved gate of {record.measured_at[:10]}"
    return PROCESS_SD, "an NVIDIA H200's"


def _announcement(variant: Variant, ratio: float, contests: tuple[Contest, ...], effect: float, source: str) -> str:
    names = ", ".join(dict.fromkeys(each.baseline.variant.name for each in contests))
    seconds = [round(count * (PROCESS_SECONDS + PAIR_SECONDS * len(contests))) for count in LOOKS]
    return (
        f"gate {variant.name} < {ratio:g} x {names}: {LOOKS[0]} or {LOOKS[1]} processes, about {seconds[0]} or "
        f"{seconds[1]} s; decides differences of {100 * effect:.1f} % (spread of processes: {source})"
    )


def _record(session: Session, variant: Variant, result: CaseResult) -> Record:
    leaf = () if not variant.is_built else tuple(each for each in session.leaves(variant) if isinstance(each, Leaf))
    return session.record("gate", variant.name, variant.role, None, result, leaf)


def _stages(state: str) -> tuple[Stage, ...]:
    return (Stage("speed", "ok" if state == "ok" else "failed"),)


def _exp(value: float) -> float:
    return math.exp(value) if math.isfinite(value) else (0.0 if value < 0 else math.inf)

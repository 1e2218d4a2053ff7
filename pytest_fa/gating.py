"""`--fa-gate`: is a candidate's `device_us` below a ratio of its baselines', on every shape of the run.

Processes are the samples: each look forks fresh workers, each of which measures every pair.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from pytest_fa.build.cache import find_by_key
from pytest_fa.catalog.case import Case
from pytest_fa.catalog.variant import Variant
from pytest_fa.gate.statistics import PROCESS_SD, bootstrap_interval, detectable_effect
from pytest_fa.gate.verdict import CONFIDENCE, LOOKS, MOST_DROPPED, Look, PairSamples, look
from pytest_fa.jobs import Arm, CaseResult, Contest, GateJob, GateResult
from pytest_fa.measure.timing_lock import timing_lock
from pytest_fa.report.log import read_records
from pytest_fa.report.noise import read_noise
from pytest_fa.report.record import Gate, GatePair, Leaf, Outcome, Record, Stage
from pytest_fa.session import CannotRun, Refused, Say, Session

NEAR = 1.03  # baselines within 3 % of the fastest in the pilot are all gated against
BOOTSTRAP_CONFIDENCE = 0.95
PROCESS_SECONDS = 2.0  # starting one, beside what it measures
PAIR_SECONDS = 0.6

OUTCOMES: dict[str, Outcome] = {"PASS": "ok", "FAIL": "gate_failed", "INCONCLUSIVE": "inconclusive"}


class Question(NamedTuple):
    """Is the variant below `ratio` times `baseline` on these cases.

    Without a baseline: below the fastest of the SDPA backends, those within 3 % of it included.
    """

    ratio: float
    baseline: Variant | Arm | None
    cases: tuple[Case, ...]


class NotGated(CannotRun):
    """Something that stands between the question and an answer: no right baseline, a wrong candidate."""


def question_of(session: Session, variant: Variant, ratio: float) -> Question:
    """What a gate at `ratio` asks, against whom `--fa-gate-baseline` names, on every shape of the run.

    Raises `CannotRun` where the variant takes none of the cases.
    """
    named = session.options.gate_baseline
    first: dict[str, Case] = {}
    for case in session.plan.cases:
        if not variant.refuses(case):
            first.setdefault(case.shape_id, case)
    if not first:
        raise Refused(f"{variant.name} takes none of this run's cases")
    baseline = _old_build(session, variant, named) if named and named.startswith("key:") else session.gate_baseline
    return Question(ratio, baseline, tuple(first.values()))


def hold_gate(session: Session, variant: Variant, question: Question, say: Say) -> Record:
    """The record of `test_gate`: pilot, announcement, processes, looks, verdict.

    Raises `CannotRun` where nothing can be gated here.
    """
    start, seed = time.monotonic(), random.SystemRandom().randrange(2**31)
    pilot = _pilot(session, variant, question)
    if isinstance(pilot, Record):
        return pilot
    contests = _contests(session, variant, question, pilot)
    sd, source = _known_sd(session, variant)
    effect = detectable_effect(sd, LOOKS[-1], CONFIDENCE)
    say(_announcement(variant, question.ratio, contests, effect, source))
    device = session.device_of(variant)
    results: list[GateResult] = []
    found = Look("INCONCLUSIVE", "", ())
    with timing_lock():
        for count in LOOKS:
            while len(results) < count:
                job = GateJob(contests, device, session.policy_of(variant), seed + len(results))
                result = session.workers.run_afresh(job)
                if result.outcome != "ok":
                    return _record(session, variant, CaseResult(result.outcome, result.message, _stages("failed")))
                results.append(result)
            samples = _samples(contests, results)
            found = look(samples, question.ratio, is_last=count == LOOKS[-1], process_sd=sd)
            if found.verdict:
                break
    gate = _gate(question.ratio, seed, contests, results, found, pilot, effect, time.monotonic() - start)
    outcome = OUTCOMES[gate.verdict]
    message, caught = ("", ()) if outcome == "ok" else (f"{gate.verdict}: {gate.reason}", ("gate",))
    result_of_all = CaseResult(outcome, message, _stages(outcome), caught)
    return msgspec.structs.replace(_record(session, variant, result_of_all), gate=gate)


Pilot = dict[str, dict[str, float]]  # shape id to variant to microseconds


def _pilot(session: Session, variant: Variant, question: Question) -> Pilot | Record:
    """Time and judge the candidate and what it may be gated against; its samples decide who, and nothing else.

    The record of a candidate that is not right takes the place of all that.
    """
    found: Pilot = {}
    for case in question.cases:
        record = session.run_case(variant, case, "speed")
        if record.speed is None:
            if record.outcome == "ok":
                raise NotGated("--benchmark-disable: a gate needs timings")
            return msgspec.structs.replace(record, kind="gate")
        found[case.shape_id] = {variant.name: record.speed.device.median_us}
        for each in _baselines(session, question):
            try:
                other = session.run_case(each, case, "speed")
            except Refused:
                continue
            if other.outcome == "ok" and other.speed:
                found[case.shape_id][each.name] = other.speed.device.median_us
    return found


def _baselines(session: Session, question: Question) -> list[Variant]:
    """What is timed in the pilot: the one variant that was named, else all of SDPA; an old build needs none."""
    if question.baseline is None:
        return [each for each in session.plan.companions if each.role == "baseline"]
    return [question.baseline] if isinstance(question.baseline, Variant) else []


def _contests(session: Session, variant: Variant, question: Question, pilot: Pilot) -> tuple[Contest, ...]:
    """Each shape against its fastest right baseline and those within 3 % of it."""
    mine, contests = session.arm(variant), []
    named = {each.name: each for each in _baselines(session, question)}
    for case in question.cases:
        if isinstance(question.baseline, Arm):
            contests.append(Contest(case, mine, question.baseline))
            continue
        times = {name: us for name, us in pilot[case.shape_id].items() if name in named}
        if not times:
            raise NotGated(f"no baseline is right at {case.shape_id}: there is nothing to gate {variant.name} against")
        near = [name for name, us in times.items() if us <= NEAR * min(times.values())]
        contests += [Contest(case, mine, session.arm(named[name])) for name in near]
    return tuple(contests)


def _old_build(session: Session, variant: Variant, named: str) -> Arm:
    """The build that `key:` names: one that is still in the cache, for an architecture of the variant's."""
    key = named.removeprefix("key:")
    usable = [leaf for leaf in find_by_key(session.options.cache, key) if leaf.arch in variant.arch]
    if len({leaf.key for leaf in usable}) != 1:
        names = ", ".join(f"{leaf.key} ({leaf.variant}, {leaf.built_at})" for leaf in usable) or "none"
        raise NotGated(f"--fa-gate-baseline: key {key!r} must name one build in the cache; it names: {names}")
    older = msgspec.structs.replace(variant, name=f"{usable[0].variant}@key:{usable[0].key}")
    return Arm(older, str(session.options.cache / usable[0].library))


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
    """The standard deviation of process means: as measured for this GPU, else in a saved gate, else an H200's."""
    noise = read_noise(session.options.profiles, session.environment.gpu)
    if noise is not None:
        return noise.process_sd, f"measured on {noise.measured_at[:10]}"
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


def _stages(outcome: str) -> tuple[Stage, ...]:
    return (Stage("speed", "ok" if outcome == "ok" else "failed"),)


def _exp(value: float) -> float:
    return math.exp(value) if math.isfinite(value) else (0.0 if value < 0 else math.inf)

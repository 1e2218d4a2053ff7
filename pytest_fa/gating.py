"""`--fa-gate`: is a candidate's `device_us` below a ratio of its baselines', on every shape of the run.

Processes are the samples: each look forks fresh workers, each of which measures every pair.
"""

from __future__ import annotations

import math
import random
import shlex
import statistics
import time
from typing import NamedTuple

import msgspec

from pytest_fa.catalog.case import Case
from pytest_fa.catalog.variant import Variant
from pytest_fa.gate.statistics import PROCESS_SD, bootstrap_interval, detectable_effect
from pytest_fa.gate.verdict import CONFIDENCE, LOOKS, MOST_DROPPED, Look, PairSamples, look
from pytest_fa.jobs import Arm, CaseResult, Contest, GateJob, GateResult
from pytest_fa.measure.timing_lock import timing_lock
from pytest_fa.pilot import NEAR, NoVerdict, Pilot, run_pilot
from pytest_fa.report.noise import read_noise
from pytest_fa.report.record import Gate, GatePair, Leaf, Outcome, Record, Stage
from pytest_fa.session import Refused, Say, Session

BOOTSTRAP_CONFIDENCE = 0.95
PROCESS_SECONDS = 2.0  # starting one, beside what it measures
PAIR_SECONDS = 0.6

OUTCOMES: dict[str, Outcome] = {"PASS": "ok", "FAIL": "gate_failed", "INCONCLUSIVE": "inconclusive"}


class Question(NamedTuple):
    """Is the variant below `ratio` times `baseline` on these cases.

    Without a baseline: below the fastest of the SDPA backends, those within 3 % of it included.  `left_out` says which
    shapes of the run are not asked about, and why.
    """

    ratio: float
    baseline: Variant | Arm | None
    cases: tuple[Case, ...]
    left_out: tuple[str, ...] = ()


def question_of(session: Session, variant: Variant, ratio: float) -> Question:
    """What a gate at `ratio` asks, against whom `--fa-gate-baseline` names, on every shape of the run.

    Raises `CannotRun` where the variant takes none of the cases, or is a probe, which has no baseline.
    """
    if not variant.may_be_gated:
        raise Refused(f"{variant.name} is never gated: role {variant.role}, computes {variant.computes}")
    first: dict[str, Case] = {}
    refused: dict[str, str] = {}
    for case in session.plan.cases_of(variant):
        if reason := variant.refuses(case):
            refused[case.shape_id] = reason
        else:
            first.setdefault(case.shape_id, case)
    if not first:
        raise Refused(f"{variant.name} takes none of this run's cases")
    baseline: Variant | Arm | None = session.gate_baseline
    if old := session.old_build:
        older = msgspec.structs.replace(variant, name=f"{old.variant}@key:{old.key}")
        baseline = Arm(older, str(session.options.cache / old.library))
    return Question(ratio, baseline, tuple(first.values()), tuple(refused.values()))


def hold_gate(session: Session, variant: Variant, question: Question, say: Say) -> Record:
    """The record of `test_gate`: pilot, announcement, processes, looks, verdict.

    Raises `CannotRun` where the variant cannot run here at all.
    """
    start, seed = time.monotonic(), random.SystemRandom().randrange(2**31)
    session.device_of(variant)
    try:
        pilot = run_pilot(session, variant, question.cases, _baselines(session, question))
        if isinstance(pilot, Record):
            return pilot
        contests = _contests(session, variant, question, pilot)
    except NoVerdict as reason:
        return _ended(session, variant, question, "inconclusive", str(reason))
    sd, source = _known_sd(session)
    effect = detectable_effect(sd, LOOKS[-1], CONFIDENCE)
    say(_announcement(variant, question, pilot, contests, effect, source))
    results: list[GateResult] = []
    found = Look("INCONCLUSIVE", "", ())
    with timing_lock():
        for count in LOOKS:
            while len(results) < count:
                result = session.workers.run_afresh(_job(session, variant, contests, seed + len(results)))
                if result.outcome != "ok":
                    return _ended(session, variant, question, result.outcome, result.message)
                results.append(result)
            samples = _samples(contests, results)
            found = look(samples, question.ratio, is_last=count == LOOKS[-1], process_sd=sd)
            if found.verdict:
                break
    gate = _gate(question, seed, contests, results, found, pilot, effect, time.monotonic() - start)
    outcome = OUTCOMES[gate.verdict]
    record = _ended(session, variant, question, outcome, "" if outcome == "ok" else f"{gate.verdict}: {gate.reason}")
    return msgspec.structs.replace(record, gate=gate)


def _job(session: Session, variant: Variant, contests: tuple[Contest, ...], seed: int) -> GateJob:
    """One process; a launch may take as long as the most patient of its arms is given."""
    device = session.device_of(variant)
    arms = {arm.variant.name: arm.variant for each in contests for arm in (each.candidate, each.baseline)}
    patience = max(session.watchdog_seconds(each, device) for each in arms.values())
    return GateJob(contests, device, session.policy_of(variant), seed, patience)


def _baselines(session: Session, question: Question) -> list[Variant]:
    """What is timed in the pilot: the one variant that was named, else all of SDPA; an old build needs none."""
    if question.baseline is None:
        return [each for each in session.plan.companions if each.role == "baseline"]
    return [question.baseline] if isinstance(question.baseline, Variant) else []


def _contests(session: Session, variant: Variant, question: Question, pilot: Pilot) -> tuple[Contest, ...]:
    """Each shape against its fastest baseline and those within 3 % of it.  Raises `NoVerdict` without any."""
    mine, contests = session.arm(variant), []
    named = {each.name: each for each in _baselines(session, question)}
    for case in question.cases:
        if isinstance(question.baseline, Arm):
            contests.append(Contest(case, mine, question.baseline))
            continue
        times = {name: us for name, us in pilot.times[case.shape_id].items() if name in named}
        if not times:
            raise NoVerdict(f"no baseline takes {case.shape_id}: there is nothing to gate {variant.name} against")
        near = [name for name, us in times.items() if us <= NEAR * min(times.values())]
        contests += [Contest(case, mine, session.arm(named[name])) for name in near]
    return tuple(contests)


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
    question: Question,
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
    for index, (pair, interval) in enumerate(zip(samples, found.intervals, strict=True)):
        boot = bootstrap_interval(pair.blocks, BOOTSTRAP_CONFIDENCE, seed)
        pairs.append(
            GatePair(
                samples=pair,
                ratio=_exp(interval.mean),
                low=_exp(interval.low),
                high=_exp(interval.high),
                bootstrap_low=_exp(boot.low),
                bootstrap_high=_exp(boot.high),
                method=results[0].contests[index].method,
            )
        )
    means = [[mean for mean in pair.means if math.isfinite(mean)] for pair in samples]
    return Gate(
        ratio=question.ratio,
        verdict=found.verdict or "INCONCLUSIVE",
        reason=found.reason,
        processes=len(results),
        seed=seed,
        dropped_blocks=sum(one.dropped for result in results for one in result.contests),
        detectable=effect,
        process_sd=max((statistics.stdev(each) for each in means if len(each) > 1), default=None),
        seconds=seconds,
        pilot_us=pilot.times,
        pairs=tuple(pairs),
        left_out=(*question.left_out, *pilot.left_out),
    )


def _known_sd(session: Session) -> tuple[float, str]:
    """The standard deviation of process means: as measured for this GPU, else an H200's."""
    noise = read_noise(session.options.profiles, session.environment.gpu)
    if noise is not None:
        return noise.process_sd, f"measured on {noise.measured_at[:10]}"
    return PROCESS_SD, "an NVIDIA H200's"


def _announcement(
    variant: Variant, question: Question, pilot: Pilot, contests: tuple[Contest, ...], effect: float, source: str
) -> str:
    names = ", ".join(dict.fromkeys(each.baseline.variant.name for each in contests))
    seconds = [round(count * (PROCESS_SECONDS + PAIR_SECONDS * len(contests))) for count in LOOKS]
    without = f"; left out: {len(question.left_out)} shapes that {variant.name} refuses" if question.left_out else ""
    without += "".join(f"; left out: {each}" for each in pilot.left_out)
    return (
        f"gate {variant.name} < {question.ratio:g} x {names}: {LOOKS[0]} or {LOOKS[1]} processes, "
        f"about {seconds[0]} or {seconds[1]} s; "
        f"decides differences of {100 * effect:.1f} % (spread of processes: {source}){without}"
    )


def _ended(session: Session, variant: Variant, question: Question, outcome: Outcome, message: str) -> Record:
    """The record of a gate that ended so; its repeat line names every case."""
    leaves = tuple(each for each in session.leaves(variant) if isinstance(each, Leaf)) if variant.is_built else ()
    stage = Stage("speed", "ok" if outcome == "ok" else "failed")
    result = CaseResult(outcome, message, (stage,), () if outcome == "ok" else ("gate",))
    record = session.record("gate", variant.name, variant.role, None, result, leaves)
    asked = [f"--fa-case={','.join(case.id for case in question.cases)}", f"--fa-gate={question.ratio:g}"]
    if session.options.gate_baseline:
        asked.append(f"--fa-gate-baseline={session.options.gate_baseline}")
    asked = [each for each in asked if each not in shlex.split(record.repeat)]
    return msgspec.structs.replace(record, repeat=f"{record.repeat} {shlex.join(asked)}")


def _exp(value: float) -> float | None:
    return math.exp(value) if math.isfinite(value) else None

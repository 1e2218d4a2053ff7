"""`--fa-gate`: is a candidate's `device_us` below a ratio of its baselines', on every shape of the run.

pilot -> pairs of candidate and baseline -> 6 fresh processes -> interim analysis -> 6 more -> verdict

The samples are processes: each fresh process measures every pair and gives one mean log-ratio for each.
"""

from __future__ import annotations

import math
import random
import shlex
import statistics
import time
from typing import NamedTuple

import msgspec

from pytest_fa.build.builder import Say
from pytest_fa.catalog.case import Case
from pytest_fa.catalog.variant import Variant
from pytest_fa.gate.decision import ANALYSES, CONFIDENCE, MOST_DROPPED, Analysis, analyse
from pytest_fa.gate.intervals import PROCESS_SD, bootstrap_interval, detectable_effect
from pytest_fa.gate.pilot import NEAR, NoVerdict, Pilot, run_pilot
from pytest_fa.measure.timing_lock import timing_lock
from pytest_fa.records.built import Build
from pytest_fa.records.gated import Gate, GatePair, PairSamples
from pytest_fa.records.noise import read_noise
from pytest_fa.records.record import Outcome, Record, Stage
from pytest_fa.session.builds import device_of
from pytest_fa.session.case_runner import CaseRunner
from pytest_fa.session.refusals import Refused
from pytest_fa.session.run_plan import RunPlan
from pytest_fa.worker.jobs import Arm, ArmPair, CaseResult, GateJob, GateResult

BOOTSTRAP_CONFIDENCE = 0.95
PROCESS_SECONDS = 2.0  # to start one process, beside what it measures
PAIR_SECONDS = 0.6

OUTCOMES: dict[str, Outcome] = {"PASS": "ok", "FAIL": "gate_failed", "INCONCLUSIVE": "inconclusive"}


class Question(NamedTuple):
    """Whether the candidate is below `ratio` times its baseline on each of `cases`.

    The baseline of a shape is the fastest of `baselines` there, and those within 3 % of it; with an `older_build` it is
    that build alone.  `left_out` names the shapes of the run that are not asked about, with the reason.
    """

    ratio: float
    cases: tuple[Case, ...]
    baselines: tuple[Variant, ...] = ()
    older_build: Arm | None = None
    left_out: tuple[str, ...] = ()


def question_of(asked: RunPlan, variant: Variant, ratio: float) -> Question:
    """The question of a gate at `ratio`: against what `--fa-gate-baseline` names, on every shape of the run.

    Raises `Refused` where the variant takes none of the cases, or is a probe: a probe has no baseline.
    """
    if not variant.may_be_gated:
        raise Refused(f"{variant.name} is never gated: role {variant.role}, computes {variant.computes}")
    first: dict[str, Case] = {}
    refused: dict[str, str] = {}
    for case in asked.plan.cases_of(variant):
        if reason := variant.refuses(case):
            refused[case.shape_id] = reason
        else:
            first.setdefault(case.shape_id, case)
    if not first:
        raise Refused(f"{variant.name} takes none of this run's cases")
    cases, left_out = tuple(first.values()), tuple(refused.values())
    if cached := asked.cached_build:
        older = msgspec.structs.replace(variant, name=f"{cached.variant}@key:{cached.key}")
        return Question(ratio, cases, (), Arm(older, str(asked.options.cache / cached.library)), left_out)
    baselines = (asked.gate_baseline,) if asked.gate_baseline else asked.sdpa_baselines
    return Question(ratio, cases, baselines, None, left_out)


def hold_gate(runner: CaseRunner, variant: Variant, question: Question, say: Say) -> Record:
    """The record of `test_gate`: pilot, announcement, processes, analyses, verdict.

    Raises `CannotRun` where the variant cannot run here at all.
    """
    start, seed = time.monotonic(), random.SystemRandom().randrange(2**31)
    device_of(variant)
    try:
        pilot = run_pilot(runner, variant, question.cases, question.baselines)
        if isinstance(pilot, Record):
            return pilot
        arm_pairs = _arm_pairs(runner, variant, question, pilot)
    except NoVerdict as reason:
        return _ended(runner, variant, question, "inconclusive", str(reason))
    process_sd, source = _known_sd(runner)
    effect = detectable_effect(process_sd, ANALYSES[-1], CONFIDENCE)
    say(_announcement(variant, question, pilot, arm_pairs, effect, source))
    results: list[GateResult] = []
    analysis = Analysis("INCONCLUSIVE", "", ())
    with timing_lock():
        for count in ANALYSES:
            while len(results) < count:
                result = runner.workers.run_afresh(_job(runner, variant, arm_pairs, seed + len(results)))
                if result.outcome != "ok":
                    return _ended(runner, variant, question, result.outcome, result.message)
                results.append(result)
            samples = _samples(arm_pairs, results)
            analysis = analyse(samples, question.ratio, is_last=count == ANALYSES[-1], process_sd=process_sd)
            if analysis.verdict:
                break
    gate = _gate(question, seed, arm_pairs, results, analysis, pilot, effect, time.monotonic() - start)
    outcome = OUTCOMES[gate.verdict]
    record = _ended(runner, variant, question, outcome, "" if outcome == "ok" else f"{gate.verdict}: {gate.reason}")
    return msgspec.structs.replace(record, gate=gate)


def _job(runner: CaseRunner, variant: Variant, arm_pairs: tuple[ArmPair, ...], seed: int) -> GateJob:
    """One process.  A launch may take as long as the slowest of its arms is allowed."""
    device = device_of(variant)
    arms = {arm.variant.name: arm.variant for pair in arm_pairs for arm in (pair.candidate, pair.baseline)}
    watchdog_seconds = max(runner.watchdog_seconds(arm, device) for arm in arms.values())
    return GateJob(arm_pairs, device, runner.policy_of(variant), seed, watchdog_seconds)


def _arm_pairs(runner: CaseRunner, variant: Variant, question: Question, pilot: Pilot) -> tuple[ArmPair, ...]:
    """Each shape against its fastest baseline and those within 3 % of it.  Raises `NoVerdict` without any."""
    candidate, arm_pairs = runner.builds.arm(variant), []
    baselines = {baseline.name: baseline for baseline in question.baselines}
    for case in question.cases:
        if question.older_build:
            arm_pairs.append(ArmPair(case, candidate, question.older_build))
            continue
        times = {name: us for name, us in pilot.times[case.shape_id].items() if name in baselines}
        if not times:
            raise NoVerdict(f"no baseline takes {case.shape_id}: there is nothing to gate {variant.name} against")
        near = [name for name, us in times.items() if us <= NEAR * min(times.values())]
        arm_pairs += [ArmPair(case, candidate, runner.builds.arm(baselines[name])) for name in near]
    return tuple(arm_pairs)


def _samples(arm_pairs: tuple[ArmPair, ...], results: list[GateResult]) -> list[PairSamples]:
    """Rows of blocks by pair; a process that lost too many blocks to a slowed GPU gives an empty row, which is NaN."""
    samples = []
    for index, paired_timing in enumerate(arm_pairs):
        processes = [result.arm_pairs[index] for result in results]
        kept = [
            each if each.dropped <= MOST_DROPPED * (each.dropped + len(each.blocks)) else None for each in processes
        ]
        samples.append(
            PairSamples(
                paired_timing.case.shape_id,
                paired_timing.baseline.variant.name,
                tuple(each.blocks if each else () for each in kept),
                tuple(each.control if each else () for each in kept),
            )
        )
    return samples


def _gate(
    question: Question,
    seed: int,
    arm_pairs: tuple[ArmPair, ...],
    results: list[GateResult],
    analysis: Analysis,
    pilot: Pilot,
    effect: float,
    seconds: float,
) -> Gate:
    """All that the gate measured and decided, as a value."""
    samples = _samples(arm_pairs, results)
    means = [[mean for mean in pair.means if math.isfinite(mean)] for pair in samples]
    return Gate(
        ratio=question.ratio,
        verdict=analysis.verdict or "INCONCLUSIVE",
        reason=analysis.reason,
        processes=len(results),
        seed=seed,
        dropped_blocks=sum(pair.dropped for result in results for pair in result.arm_pairs),
        detectable=effect,
        process_sd=max((statistics.stdev(row) for row in means if len(row) > 1), default=None),
        seconds=seconds,
        pilot_us=pilot.times,
        pairs=_pairs(samples, results, analysis, seed),
        left_out=(*question.left_out, *pilot.left_out),
    )


def _pairs(
    samples: list[PairSamples], results: list[GateResult], analysis: Analysis, seed: int
) -> tuple[GatePair, ...]:
    """Each pair's ratio with the interval that decides and the bootstrap interval."""
    pairs = []
    for index, (pair, interval) in enumerate(zip(samples, analysis.intervals, strict=True)):
        bootstrap = bootstrap_interval(pair.blocks, BOOTSTRAP_CONFIDENCE, seed)
        pairs.append(
            GatePair(
                samples=pair,
                ratio=_exp(interval.mean),
                low=_exp(interval.low),
                high=_exp(interval.high),
                bootstrap_low=_exp(bootstrap.low),
                bootstrap_high=_exp(bootstrap.high),
                method=results[0].arm_pairs[index].method,
            )
        )
    return tuple(pairs)


def _known_sd(runner: CaseRunner) -> tuple[float, str]:
    """The standard deviation of process means, and its source: as measured for this GPU, else an H200's."""
    noise = read_noise(runner.options.records_folder, runner.records.environment.gpu)
    if noise is not None:
        return noise.process_sd, f"measured on {noise.measured_at[:10]}"
    return PROCESS_SD, "an NVIDIA H200's"


def _announcement(
    variant: Variant, question: Question, pilot: Pilot, arm_pairs: tuple[ArmPair, ...], effect: float, source: str
) -> str:
    names = ", ".join(dict.fromkeys(pair.baseline.variant.name for pair in arm_pairs))
    seconds = [round(count * (PROCESS_SECONDS + PAIR_SECONDS * len(arm_pairs))) for count in ANALYSES]
    without = f"; left out: {len(question.left_out)} shapes that {variant.name} refuses" if question.left_out else ""
    without += "".join(f"; left out: {each}" for each in pilot.left_out)
    return (
        f"gate {variant.name} < {question.ratio:g} x {names}: {ANALYSES[0]} or {ANALYSES[1]} processes, "
        f"about {seconds[0]} or {seconds[1]} s; "
        f"decides differences of {100 * effect:.1f} % (spread of processes: {source}){without}"
    )


def _ended(runner: CaseRunner, variant: Variant, question: Question, outcome: Outcome, message: str) -> Record:
    """The record of a gate that ended with this outcome; its rerun command names every case."""
    builds = tuple(each for each in runner.builds.of(variant) if isinstance(each, Build)) if variant.is_built else ()
    stage = Stage("speed", "ok" if outcome == "ok" else "failed")
    result = CaseResult(outcome, message, (stage,), () if outcome == "ok" else ("gate",))
    record = runner.records.make("gate", variant, None, result, builds)
    words = [f"--fa-case={','.join(case.id for case in question.cases)}", f"--fa-gate={question.ratio:g}"]
    if runner.options.gate_baseline:
        words.append(f"--fa-gate-baseline={runner.options.gate_baseline}")
    words = [word for word in words if word not in shlex.split(record.rerun_command)]
    return msgspec.structs.replace(record, rerun_command=f"{record.rerun_command} {shlex.join(words)}")


def _exp(value: float) -> float | None:
    return math.exp(value) if math.isfinite(value) else None

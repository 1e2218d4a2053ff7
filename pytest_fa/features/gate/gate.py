"""`--fa-gate=RATIO`: tests whether a candidate takes less than RATIO times its baselines' time on every shape.

pilot -> pairs of candidate and baseline -> 6 fresh processes -> interim analysis -> 6 more -> verdict

Each process measures every pair.  Its mean log-ratio of a pair is one sample.  On several GPUs (`--fa-gate-gpus`), each
GPU has 6 or 12 processes, and the mean of a GPU is one sample.
"""

from __future__ import annotations

import math
import random
import shlex
import statistics
import time
from typing import NamedTuple

import msgspec

from pytest_fa.build.units import Say
from pytest_fa.catalog.case import Case
from pytest_fa.catalog.variant import Variant
from pytest_fa.features.gate.decision import ANALYSES, CONFIDENCE, MAX_DROPPED, MIN_SD_SHARE, Analysis, analyse
from pytest_fa.features.gate.gated import (
    OLDER_BUILD,
    Gate,
    GatedRevision,
    GatePair,
    GateVerdict,
    verdict_of_same_code,
)
from pytest_fa.features.gate.gpu_effect import detectable_on, gpu_ratios, gpu_sd, largest_process_sd
from pytest_fa.features.gate.gpu_workers import gate_processes, gpu_hashes
from pytest_fa.features.gate.intervals import BOOTSTRAP_CONFIDENCE, PROCESS_SD, bootstrap_interval
from pytest_fa.features.gate.memory import GateMemory
from pytest_fa.features.gate.noise import read_noise
from pytest_fa.features.gate.opponents import Opponents, may_be_gated, options_of
from pytest_fa.features.gate.pilot import (
    BaselineTime,
    NoVerdict,
    Pilot,
    baselines_us,
    near,
    other_nodes_than_pilot,
    run_pilot,
    slower_than_pilot,
)
from pytest_fa.features.gate.process_cost import ProcessCost, correction, expected_cost, part_seconds
from pytest_fa.features.gate.revision import GIT, VariantAtRevision, compared
from pytest_fa.records.built import Build
from pytest_fa.records.environment import Gpu, find_gpu
from pytest_fa.records.files import try_to_read
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.paired import PairSamples
from pytest_fa.records.record import Record, Stage
from pytest_fa.session.builds import device_of
from pytest_fa.session.case_runner import CaseRunner
from pytest_fa.session.refusals import Refused
from pytest_fa.session.rerun import rerun_command
from pytest_fa.session.run_plan import RunPlan
from pytest_fa.wire.jobs import Arm, ArmPair, CaseResult, PairedJob, PairedResult

# Where the spread of a CPU is not known, a baseline may be a quarter slower than in the pilot: 3 % and twice this.
UNKNOWN_SD = 0.11
OUTCOMES: dict[GateVerdict, Outcome] = {
    "PASS": Outcome.OK,
    "FAIL": Outcome.GATE_FAILED,
    "INCONCLUSIVE": Outcome.INCONCLUSIVE,
}


class GateQuestion(NamedTuple):
    """What a gate decides: whether the candidate takes less than `ratio` times its baselines' time on all `cases`.

    On each shape, the candidate is compared with the fastest of `baselines` and with those up to 3 % slower.  With an
    `older_build`, it is compared with that build only.  `left_out` has one line for each shape of the run that the
    candidate refuses.  `gpus` are those of a gate on several GPUs.  `revision` is the only baseline, if it is the
    candidate at another commit.
    """

    ratio: float
    cases: tuple[Case, ...]
    baselines: tuple[Variant, ...] = ()
    older_build: Arm | None = None
    left_out: tuple[str, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    revision: VariantAtRevision | None = None


def gate_question(run_plan: RunPlan, variant: Variant, ratio: float) -> GateQuestion:
    """The question of a gate at `ratio`: the first seed of every shape, against the SDPA backends of the same device.

    `--fa-gate-baseline` replaces the SDPA backends.  Raises `Refused` if the variant supports none of the cases, or if
    it is a probe, for which there is no baseline.
    """
    if not may_be_gated(variant):
        raise Refused(f"{variant.name} is never gated: role {variant.role}, computes {variant.computes}")
    first_seeds: dict[str, Case] = {}
    refused: dict[str, str] = {}
    for case in run_plan.plan.cases_of(variant):
        if reason := variant.refuses(case):
            refused[case.shape_id] = reason
        else:
            first_seeds.setdefault(case.shape_id, case)
    if not first_seeds:
        raise Refused(f"{variant.name} supports none of the cases of this run")
    baseline, cached, gpus, revisions = Opponents.of(run_plan)
    if gpus and variant.device_for(gpu=True) != "cuda":
        raise Refused(f"--fa-gate-gpus: {variant.name} runs on the CPU; drop it")
    cases, left_out = tuple(first_seeds.values()), tuple(refused.values())
    if cached:
        older = msgspec.structs.replace(variant, name=f"{cached.variant}{OLDER_BUILD}{cached.key}")
        arm = Arm(older, str(run_plan.options.cache / cached.library), cached.files)
        return GateQuestion(ratio, cases, (), arm, left_out, gpus)
    if revision := revisions.get(variant.name):
        return GateQuestion(ratio, cases, (revision.variant,), None, left_out, gpus, revision)
    has_gpu = find_gpu() is not None
    device = variant.device_for(gpu=has_gpu)
    alike = (each for each in run_plan.sdpa_baselines if each.computes == variant.computes)
    sdpa = tuple(each for each in alike if device in (None, each.device_for(gpu=has_gpu)))
    return GateQuestion(ratio, cases, (baseline,) if baseline else sdpa, None, left_out, gpus)


def decide_gate(runner: CaseRunner, variant: Variant, question: GateQuestion, say: Say) -> Record:
    """Run the gate and return the record of `test_gate`: pilot, announcement, processes, analyses, verdict.

    Raises `CannotRun` if this machine cannot run the variant.
    """
    start, seed = time.monotonic(), random.SystemRandom().randrange(2**31)
    revision: GatedRevision | None = None
    try:
        if question.revision:
            revision = compared(variant, question.revision, runner.builds, runner.options.cache)
            if revision.code:
                return _same_code(runner, variant, question, revision, start)
        device_of(variant)
        pilot = run_pilot(runner, variant, question.cases, question.baselines)
        if isinstance(pilot, Record):
            return runner.records.of_kind("gate", pilot, _rerun_command(runner, variant, question))
        arm_pairs = _arm_pairs(runner, variant, question, pilot)
    except NoVerdict as reason:
        return _ended(runner, variant, question, Outcome.INCONCLUSIVE, str(reason))
    pilot_seconds = time.monotonic() - start
    process_sd, source = _known_sd(runner)
    gpus = gpu_hashes(question.gpus, runner.options.cache)
    effect = detectable_on(process_sd, ANALYSES[-1], len(gpus), CONFIDENCE)
    cost = expected_cost(GateMemory.of(runner).gates, runner.options, runner.records.environment)
    say(_announcement(variant, question, pilot, arm_pairs, effect, source, cost))
    results: list[PairedResult] = []
    analysis = Analysis("INCONCLUSIVE", "", ())
    with gate_processes(runner.workers, question.gpus, runner.options.cache) as run_processes:
        for count in ANALYSES:
            while len(results) < count * max(len(gpus), 1):
                results += run_processes(_jobs(runner, variant, arm_pairs, seed, results, max(len(gpus), 1)))
                if failed := next((result for result in results if result.outcome != Outcome.OK), None):
                    return _ended(runner, variant, question, failed.outcome, failed.message)
                if line := correction(variant.name, cost, results, len(arm_pairs), max(len(gpus), 1)):
                    say(line)
            samples = _samples(arm_pairs, results, gpus)
            analysis = analyse(samples, question.ratio, is_last=count == ANALYSES[-1], process_sd=process_sd)
            baselines = baselines_us(arm_pairs, results[:: max(len(gpus), 1)])  # on the GPU of the pilot
            other_nodes = other_nodes_than_pilot(pilot, arm_pairs, results)
            analysis = _held_to_pilot(
                analysis, pilot, baselines, process_sd if source else UNKNOWN_SD, question.ratio, other_nodes
            )
            if analysis.verdict:
                break
    gate = _gate(question, seed, samples, results, analysis, pilot, effect, (time.monotonic() - start, pilot_seconds))
    gate = msgspec.structs.replace(gate, revision=revision)
    GateMemory.of(runner).gates.append(gate)
    outcome = OUTCOMES[gate.verdict]
    message = "" if outcome == Outcome.OK else f"{gate.verdict}: {gate.reason}"
    return _ended(runner, variant, question, outcome, message, gate)


def _same_code(
    runner: CaseRunner, variant: Variant, question: GateQuestion, revision: GatedRevision, start: float
) -> Record:
    """The record of a gate on two equal kernels: the candidate is judged where it can run, and nothing is timed."""
    reason = f"the same {revision.code.same if revision.code else ''} as {revision.baseline(variant.name)}"
    has_device = variant.device_for(gpu=find_gpu() is not None) is not None
    for case in question.cases if has_device else ():
        if (variant.name, case.id) not in runner.passed:
            record = runner.run(variant, case, "correct")
            if record.outcome != Outcome.OK:
                return runner.records.of_kind("gate", record, _rerun_command(runner, variant, question))
    verdict = verdict_of_same_code(question.ratio)
    reason += ", so nothing was timed" if has_device else ", so nothing was timed; without a GPU nothing was judged"
    if verdict == "INCONCLUSIVE":
        reason += "; their ratio is 1, and 1 is neither below nor above it; --fa-gate=1.01 asks whether it is slower"
    gate = Gate(
        ratio=question.ratio,
        verdict=verdict,
        reason=reason,
        processes=0,
        seed=0,
        dropped_blocks=0,
        detectable=0.0,
        process_sd=None,
        seconds=time.monotonic() - start,
        pilot_us={},
        pairs=(),
        left_out=question.left_out,
        least_sd_share=MIN_SD_SHARE,
        revision=revision,
    )
    message = "" if verdict == "PASS" else f"{verdict}: {reason}"
    return _ended(runner, variant, question, OUTCOMES[verdict], message, gate)


def _held_to_pilot(
    analysis: Analysis,
    pilot: Pilot,
    baselines: list[BaselineTime],
    process_sd: float,
    ratio: float,
    other_nodes: str = "",
) -> Analysis:
    """No PASS if an arm launched other nodes than in the pilot, or if it may be due to a baseline slower than there.

    By `process_sd`, the known spread of the machine, a baseline may be slower.
    """
    if analysis.verdict != "PASS":
        return analysis
    highs = [interval.high for interval in analysis.intervals]
    reason = other_nodes or slower_than_pilot(pilot.times, baselines, process_sd, highs, ratio)
    return msgspec.structs.replace(analysis, verdict="INCONCLUSIVE", reason=reason) if reason else analysis


def _jobs(
    runner: CaseRunner,
    variant: Variant,
    arm_pairs: tuple[ArmPair, ...],
    seed: int,
    results: list[PairedResult],
    gpus: int,
) -> list[PairedJob]:
    """The jobs of the next processes, one on each GPU; from the second on, they follow the plans of the one before.

    Their watchdog allows each launch the longest time that any of the arms is allowed.
    """
    device = device_of(variant)
    arms = {arm.variant.name: arm.variant for pair in arm_pairs for arm in (pair.candidate, pair.baseline)}
    watchdog_seconds = max(runner.watchdog_seconds(arm, device) for arm in arms.values())
    policy, first = runner.tolerance_of(variant), seed + len(results)
    plans = [result.plans for result in results[-gpus:]] or [()] * gpus
    shares_gpu = runner.shares_gpu(device)
    return [
        PairedJob(arm_pairs, device, policy, first + number, watchdog_seconds, plans[number], shares_gpu)
        for number in range(gpus)
    ]


def _arm_pairs(runner: CaseRunner, variant: Variant, question: GateQuestion, pilot: Pilot) -> tuple[ArmPair, ...]:
    """The candidate paired with the baselines of each shape: the fastest one and those up to 3 % slower.

    Raises `NoVerdict` if no baseline supports a shape.
    """
    candidate, arm_pairs = runner.builds.arm(variant), []
    baselines = {baseline.name: baseline for baseline in question.baselines}
    for case in question.cases:
        if question.older_build:
            arm_pairs.append(ArmPair(case, candidate, question.older_build))
            continue
        times = {name: us for name, us in pilot.times[case.shape_id].items() if name in baselines}
        if not times:
            reason = f"no baseline supports {case.shape_id}, so {variant.name} cannot be gated on it"
            raise NoVerdict(f"{reason}; name one that does: --fa-gate-baseline=NAME")
        arm_pairs += [ArmPair(case, candidate, runner.builds.arm(baselines[name])) for name in near(times)]
    return tuple(arm_pairs)


def _samples(
    arm_pairs: tuple[ArmPair, ...], results: list[PairedResult], gpus: tuple[str, ...] = ()
) -> list[PairSamples]:
    """The blocks of every pair, one row for each process, whose GPUs take turns.

    A process that lost more than 20 % of its blocks to a slowed GPU gives an empty row, whose mean is NaN.
    """
    samples = []
    for index, arm_pair in enumerate(arm_pairs):
        processes = [result.arm_pairs[index] for result in results]
        used = [each if each.dropped <= MAX_DROPPED * (each.dropped + len(each.blocks)) else None for each in processes]
        samples.append(
            PairSamples(
                arm_pair.case.shape_id,
                arm_pair.baseline.variant.name,
                tuple(process.blocks if process else () for process in used),
                tuple(process.control if process else () for process in used),
                tuple(process.order for process in processes if process.order),
                tuple(math.log(each.outside_us[0] / each.outside_us[1]) for each in processes if each.outside_us),
                tuple(gpus[number % len(gpus)] for number in range(len(results))) if gpus else (),
            )
        )
    return samples


def _gate(
    question: GateQuestion,
    seed: int,
    samples: list[PairSamples],
    results: list[PairedResult],
    analysis: Analysis,
    pilot: Pilot,
    effect: float,
    seconds: tuple[float, float],  # of the whole gate, and of its pilot
) -> Gate:
    """The gate's part of the record: what it measured and decided."""
    return Gate(
        ratio=question.ratio,
        verdict=analysis.verdict or "INCONCLUSIVE",
        reason=analysis.reason,
        processes=len(results),
        seed=seed,
        dropped_blocks=sum(pair.dropped for result in results for pair in result.arm_pairs),
        detectable=effect,
        process_sd=largest_process_sd(samples),
        seconds=seconds[0],
        pilot_us=pilot.times,
        pairs=_pairs(samples, results, analysis, seed),
        left_out=(*question.left_out, *pilot.left_out),
        least_sd_share=MIN_SD_SHARE,
        pilot_seconds=seconds[1],
        pilot_age_seconds=pilot.ages,
        pilot_costs=pilot.costs,
        part_seconds=part_seconds(results),
    )


def _pairs(
    samples: list[PairSamples], results: list[PairedResult], analysis: Analysis, seed: int
) -> tuple[GatePair, ...]:
    """The ratio of each pair, with the t interval, which decides, and the bootstrap interval, which does not."""
    pairs = []
    for index, (pair, interval) in enumerate(zip(samples, analysis.intervals, strict=True)):
        bootstrap = bootstrap_interval(pair.blocks, BOOTSTRAP_CONFIDENCE, seed)
        on_pilot_gpu = results[:: max(len(set(pair.gpus)), 1)]
        pairs.append(
            GatePair(
                samples=pair,
                ratio=_exp(interval.mean),
                low=_exp(interval.low),
                high=_exp(interval.high),
                bootstrap_low=_exp(bootstrap.low),
                bootstrap_high=_exp(bootstrap.high),
                method=results[0].arm_pairs[index].method,
                baseline_us=statistics.median(each.arm_pairs[index].baseline_us for each in on_pilot_gpu),
                gpu_ratios=gpu_ratios(pair.means, pair.gpus),
                gpu_sd=gpu_sd(pair.means, pair.gpus),
            )
        )
    return tuple(pairs)


def _known_sd(runner: CaseRunner) -> tuple[float, str]:
    """The standard deviation of process means and its source: measured on this GPU if it was, else on an H200.

    The source is empty if that of a CPU is not known: then the value says nothing about this machine.
    """
    folder, gpu = runner.options.records_folder, runner.records.environment.gpu
    noise, problem = try_to_read(lambda: read_noise(folder, gpu))
    if noise is not None:
        return noise.process_sd, f"measured on this {'GPU' if gpu else 'machine'} on {noise.measured_at[:10]}"
    if gpu is None:
        return PROCESS_SD, ""
    reason = "noise.json cannot be read" if problem else "not measured on this GPU"
    return PROCESS_SD, f"{reason}, taken from an NVIDIA H200"


def _announcement(
    variant: Variant,
    question: GateQuestion,
    pilot: Pilot,
    arm_pairs: tuple[ArmPair, ...],
    effect: float,
    source: str,
    cost: ProcessCost,
) -> str:
    names = ", ".join(dict.fromkeys(pair.baseline.variant.name for pair in arm_pairs))
    seconds = [round(cost.seconds(len(arm_pairs), count)) for count in ANALYSES]
    left_out = f"; left out: {len(question.left_out)} shapes that {variant.name} refuses" if question.left_out else ""
    left_out += "".join(f"; left out: {line}" for line in pilot.left_out)
    detects = "the noise of this CPU is not known, so no detectable difference is announced"
    if source:
        unless = " if the GPUs do not differ" if question.gpus else ""
        detects = f"detects differences of {100 * effect:.1f} %{unless} (standard deviation of process means: {source})"
    where = f" on each of {len(question.gpus)} GPUs" if question.gpus else ""
    return (
        f"gate {variant.name} < {question.ratio:g} x {names}: {ANALYSES[0]} processes{where} (about {seconds[0]} s), "
        f"or {ANALYSES[1]} (about {seconds[1]} s) if the interim analysis is undecided; "
        f"{detects}{left_out}"
    )


def _ended(
    runner: CaseRunner,
    variant: Variant,
    question: GateQuestion,
    outcome: Outcome,
    message: str,
    gate: Gate | None = None,
) -> Record:
    """The record of a gate with this outcome."""
    builds = tuple(each for each in runner.builds.of(variant) if isinstance(each, Build)) if variant.is_built else ()
    stage = Stage("speed", "ok" if outcome == Outcome.OK else "failed")
    result = CaseResult(outcome, message, (stage,), () if outcome == Outcome.OK else ("gate",))
    command = _rerun_command(runner, variant, question)
    return runner.records.make("gate", variant, None, result, builds, rerun=command, added=gate)


def _rerun_command(runner: CaseRunner, variant: Variant, question: GateQuestion) -> str:
    """The command that runs the gate again.  It names every case, the ratio and the baseline; a revision by its id."""
    command = rerun_command(runner.options, "gate", variant.name, None)
    words = [f"--fa-case={','.join(case.id for case in question.cases)}", f"--fa-gate={question.ratio:g}"]
    if baseline := options_of(runner.options).baseline:
        typed = f"--fa-gate-baseline={baseline}"
        words.append(f"--fa-gate-baseline={GIT}{question.revision.revision.commit}" if question.revision else typed)
        command = shlex.join(word for word in shlex.split(command) if word != typed or typed in words)
    return f"{command} {shlex.join(word for word in words if word not in shlex.split(command))}"


def _exp(value: float) -> float | None:
    return math.exp(value) if math.isfinite(value) else None

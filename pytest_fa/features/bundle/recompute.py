"""Compute every verdict of a record again from its raw numbers, and name each one that does not follow from them.

Raw numbers are samples, measured values and allowed values.  Medians, ratios, intervals, `holds`, `passed`, agreements
and gate verdicts follow from them.  A record that was changed consistently, raw numbers included, is not detected: only
a signature or a new measurement shows that.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator

from pytest_fa.features.bundle.check_rules import missing_evidence, wrong_bounds
from pytest_fa.features.gate.decision import ANALYSES, CONFIDENCE, EARLIER_SD_SHARES, MIN_SD_SHARE, Analysis, analyse
from pytest_fa.features.gate.gate import OUTCOMES
from pytest_fa.features.gate.gated import CodeOfRevision, Gate, GatePair, verdict_of_same_code
from pytest_fa.features.gate.gpu_effect import detectable_on, gpu_ratios, gpu_sd, largest_process_sd
from pytest_fa.features.gate.intervals import BOOTSTRAP_CONFIDENCE, Interval, bootstrap_interval
from pytest_fa.features.gate.pilot import OTHER_NODES, SLOWER_THAN_PILOT, BaselineTime, slower_than_pilot
from pytest_fa.records.added import added_kinds
from pytest_fa.records.agreement import check_agreement
from pytest_fa.records.arm_orders import recorded_order
from pytest_fa.records.ceilings import Ceilings
from pytest_fa.records.checks import Bound, Check
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.paired import PairSamples
from pytest_fa.records.record import Record
from pytest_fa.records.sampling import MAX_DROPPED, precision
from pytest_fa.records.timing import Agreement, Speed, Timing

ARMS = 3  # of a gate: the candidate, the baseline, and the baseline once more
CLOSE = 1e-6  # relative difference that another version of a library may cause
# Bounds whose measured value is also a field of the check, for the policy that names them so.
SAME_FIGURE = {"max": "max_abs_error", "rms": "rms_error"}


def contradictions(record: Record, ceilings: Ceilings | None, known_sd: float) -> list[str]:
    """Return one sentence for each value of a record that does not follow from its other values.

    `ceilings` are those of the record's GPU.  `known_sd` is the standard deviation of process means that its gates
    assumed, as a log-ratio.
    """
    problems = [*_of_identity(record), *_of_outcome(record), *missing_evidence(record)]
    if record.check is not None:
        dtype = record.case.dtype if record.case is not None else ""
        problems += wrong_bounds(record.check, record.case, has_own_shape=record.kind == "property")
        problems += _of_check(record.check, has_own_limits=dtype == "fp32")
    if record.speed is not None:
        problems += _of_speed(record, record.speed, ceilings)
    if gate := Gate.of(record):
        code = gate.revision.code if gate.revision else None
        problems += _of_same_code(record, gate, code) if code else _of_gate(record, gate, known_sd)
    return problems


# -- identity and outcome ---------------------------------------------------------------------------------------------


def _of_identity(record: Record) -> Iterator[str]:
    expected = f"{record.variant}-{record.case.id}" if record.case else record.variant
    if record.kind == "property":
        expected = f"{record.variant}-"  # and the property's name
    is_whole = record.kind not in ("property", *added_kinds(spans_cases=False))  # those add a name at the end
    if not (record.id == expected or (not is_whole and record.id.startswith(expected))):
        yield f"its id is {record.id!r}, variant and case give {expected!r}"


def _of_outcome(record: Record) -> Iterator[str]:
    failed = [stage.name for stage in record.stages if stage.state == "failed"]
    if record.outcome == Outcome.OK and failed:
        yield f"the outcome is ok, stage {failed[0]} failed"
    if record.outcome == Outcome.OK and record.check is not None and not record.check.passed:
        yield "the outcome is ok, its check did not pass"
    if record.outcome == Outcome.OK and record.kind != "selftest" and record.caught_by:
        yield f"the outcome is ok, but it was caught by {', '.join(record.caught_by)}"
    if record.outcome != Outcome.OK and record.speed is not None:
        yield f"the outcome is {record.outcome}, but it has a time"


# -- checks -----------------------------------------------------------------------------------------------------------


def _of_check(check: Check, *, has_own_limits: bool) -> Iterator[str]:
    """Yield what a check's bounds contradict.

    With `has_own_limits`, as in fp32, each element has a limit of its own: bound `max` then has the element that uses
    most of its limit, which need not be the one with the largest error.
    """
    for bound in check.bounds:
        if bound.holds != _holds(bound):
            stated = "holds" if bound.holds else "does not hold"
            yield f"bound {bound.name!r}: {bound.value} with {bound.allowed} allowed, it says that it {stated}"
        if check.policy == "same_precision" and (field := SAME_FIGURE.get(bound.name)):
            value = getattr(check, field)
            if not (_is_close(value, bound.value) or (has_own_limits and _is_below(bound.value, value))):
                yield f"{field} is {value}, bound {bound.name!r} has {bound.value}"
        if bound.name == "finite" and bound.value != check.nonfinite_count:
            yield f"nonfinite_count is {check.nonfinite_count}, bound 'finite' has {bound.value}"
    passed = all(_holds(bound) for bound in check.bounds if bound.enforced)
    if check.passed != passed:
        yield f"passed is {check.passed}, its bounds give {passed}"
    if max(check.bad_count, check.nonfinite_count) > check.element_count:
        yield f"{check.bad_count} bad and {check.nonfinite_count} non-finite of {check.element_count} elements"


def _holds(bound: Bound) -> bool:
    """Whether a bound holds; policy `absolute` requires less than the allowed value, which equality never reaches."""
    return bound.value is not None and bound.value <= bound.allowed


# -- times ------------------------------------------------------------------------------------------------------------


def _of_speed(record: Record, speed: Speed, ceilings: Ceilings | None) -> Iterator[str]:
    timings = {"device": speed.device, "call": speed.call, **({"cold": speed.cold} if speed.cold else {})}
    for name, timing in timings.items():
        yield from _of_timing(name, timing)
    if speed.agreement is not None:
        yield from _of_agreement(record, speed, speed.agreement, ceilings)
    if speed.profiler is not None:
        total_us = sum(node.mean_us * node.count for node in speed.profiler.nodes)
        if not math.isclose(total_us, speed.profiler.profiler_us, rel_tol=1e-3, abs_tol=1e-3):
            yield f"profiler_us is {speed.profiler.profiler_us}, its nodes sum to {total_us:.3f}"


def _of_agreement(record: Record, speed: Speed, stated: Agreement, ceilings: Ceilings | None) -> Iterator[str]:
    """A stated agreement must follow from the times."""
    floor = None
    if ceilings is not None and record.role != "overhead" and record.case is not None:
        floor = ceilings.floor(record.case, speed.l2_bytes, speed.highest_sm_mhz)
    expected = check_agreement(record.variant, record.role, speed, floor)
    is_close = stated.least_us is None or _is_close(stated.least_us, expected.least_us)  # None in older records
    if stated.valid != expected.valid or not is_close:
        yield f"the agreement says valid = {stated.valid}, the times give {expected.valid}: {expected.reason}"


def _of_timing(name: str, timing: Timing) -> Iterator[str]:
    if not timing.samples_us:
        yield f"{name}: there are no samples"
        return
    median_us = statistics.median(timing.samples_us)
    if not _is_close(timing.median_us, median_us):
        yield f"{name}: median_us is {timing.median_us}, the samples give {median_us}"
    reached = precision(list(timing.samples_us))
    if timing.precision is not None and not _is_close(timing.precision, reached):
        yield f"{name}: precision is {timing.precision}, the samples give {reached}"
    count = len(timing.samples_us)
    if not timing.is_throttled and timing.dropped > MAX_DROPPED * (timing.dropped + count):
        yield f"{name}: {timing.dropped} samples were dropped and {count} kept; such a time is throttled"


# -- gates ------------------------------------------------------------------------------------------------------------


def _of_gate(record: Record, gate: Gate, known_sd: float) -> Iterator[str]:
    samples = [pair.samples for pair in gate.pairs]
    if problem := _shape_problem(gate, samples):
        yield problem
        return
    shares = (MIN_SD_SHARE, *EARLIER_SD_SHARES)
    if gate.least_sd_share not in shares:
        yield f"least_sd_share is {gate.least_sd_share}; a gate has {' or '.join(map(str, shares))}"
        return
    gpus = len(set(samples[0].gpus)) if samples else 0
    processes = gate.processes // max(gpus, 1)
    is_last = processes >= ANALYSES[-1]
    analysis = analyse(samples, gate.ratio, is_last=is_last, process_sd=known_sd, least_sd_share=gate.least_sd_share)
    verdict = analysis.verdict or "INCONCLUSIVE"
    if verdict == "PASS" and (_slower_than_pilot(record, gate, known_sd, analysis) or OTHER_NODES in gate.reason):
        verdict = "INCONCLUSIVE"
    if gate.verdict != verdict:
        yield f"the verdict is {gate.verdict}, its samples give {verdict}: {analysis.reason}"
    if record.outcome != OUTCOMES[gate.verdict]:
        yield f"the outcome is {record.outcome}, the verdict {gate.verdict}"
    for index, (pair, interval) in enumerate(zip(gate.pairs, analysis.intervals, strict=True)):
        yield from _of_pair(pair, interval, gate.seed)
        yield from _of_gpus(pair)
        yield from _of_orders(pair, gate.seed + index)
    if processes not in ANALYSES:
        yield f"it has {processes} processes on a GPU; a gate has {' or '.join(map(str, ANALYSES))}"
    if not _is_close(gate.process_sd, spread := largest_process_sd(samples)):
        yield f"process_sd is {gate.process_sd}, its samples give {spread}"
    effect = detectable_on(known_sd, ANALYSES[-1], gpus, CONFIDENCE)
    if not math.isclose(gate.detectable, effect, rel_tol=0.5):
        yield f"detectable is {gate.detectable}, a spread of {100 * known_sd:.2f} % gives {effect:.4f}"


def _of_same_code(record: Record, gate: Gate, code: CodeOfRevision) -> Iterator[str]:
    """Yield what contradicts that both sides of a gate are the same code, so that nothing was timed."""
    if gate.pairs or gate.processes or gate.pilot_us:
        yield f"both sides are the same {code.same}, and it has times"
    if gate.verdict != (verdict := verdict_of_same_code(gate.ratio)):
        yield f"the verdict is {gate.verdict}, the same code gives {verdict} at {gate.ratio:g}"
    if record.outcome != OUTCOMES[gate.verdict]:
        yield f"the outcome is {record.outcome}, the verdict {gate.verdict}"
    identities = {build.code_identity for build in record.builds}
    if code.same == "machine code" and code.identity not in identities:
        yield f"the same machine code is {code.identity}, its build has {', '.join(map(str, identities)) or 'none'}"
    if code.same == "sources" and (record.builds or not record.sources):
        yield "the same sources are those of a variant in Python; it has a build, or no sources"


def _slower_than_pilot(record: Record, gate: Gate, known_sd: float, analysis: Analysis) -> bool:
    """Whether a baseline was so much slower than in the pilot that there is no PASS.

    A gate that says so has no PASS: earlier versions took a smaller difference for a reason.  For a record without the
    baselines' times, and for a CPU, whose spread may not have been known, only that counts.
    """
    if gate.verdict == "INCONCLUSIVE" and gate.reason.startswith(SLOWER_THAN_PILOT):
        return True
    times = [
        BaselineTime(pair.samples.shape_id, pair.samples.baseline, pair.baseline_us)
        for pair in gate.pairs
        if pair.baseline_us is not None
    ]
    if record.environment.gpu is None or len(times) < len(gate.pairs):
        return False
    highs = [interval.high for interval in analysis.intervals]
    return bool(slower_than_pilot(gate.pilot_us, times, known_sd, highs, gate.ratio))


def _shape_problem(gate: Gate, samples: list[PairSamples]) -> str:
    """Why the samples are not those of `gate.processes` processes, equally many on each GPU; empty if they are."""
    rows = {len(row) for pair in samples for row in (pair.blocks, pair.control)}
    if rows - {gate.processes}:
        return f"it has {gate.processes} processes, its samples have {', '.join(map(str, sorted(rows)))}"
    if {len(row) for pair in samples for row in (pair.outside, pair.gpus)} - {0, gate.processes}:
        return f"it has {gate.processes} processes, and another number of times by the judge's clock or of GPUs"
    if len({pair.gpus for pair in samples}) > 1 or any(len(set(Counter(pair.gpus).values())) > 1 for pair in samples):
        return "its pairs do not have the same number of processes on the same GPUs"
    return ""


def _of_pair(pair: GatePair, interval: Interval, seed: int) -> Iterator[str]:
    name = f"{pair.samples.baseline} at {pair.samples.shape_id}"
    bootstrap = bootstrap_interval(pair.samples.blocks, BOOTSTRAP_CONFIDENCE, seed)
    expected = {
        "ratio": interval.mean,
        "low": interval.low,
        "high": interval.high,
        "bootstrap_low": bootstrap.low,
        "bootstrap_high": bootstrap.high,
    }
    for field, log_ratio in expected.items():
        value = math.exp(log_ratio) if math.isfinite(log_ratio) else None
        stated = getattr(pair, field)
        if not _is_close(stated, value):
            yield f"{field} of {name} is {stated}, its samples give {value}"


def _of_gpus(pair: GatePair) -> Iterator[str]:
    """Yield what does not follow from the samples of each GPU, for a gate on several."""
    name, samples = f"{pair.samples.baseline} at {pair.samples.shape_id}", pair.samples
    stated = {each.gpu_hash: each.ratio for each in pair.gpu_ratios}
    expected = {each.gpu_hash: each.ratio for each in gpu_ratios(samples.means, samples.gpus)}
    if stated.keys() != expected.keys() or not all(_is_close(stated[gpu], ratio) for gpu, ratio in expected.items()):
        yield f"the ratios of the GPUs of {name} do not follow from its samples"
    if not _is_close(pair.gpu_sd, sd := gpu_sd(samples.means, samples.gpus)):
        yield f"gpu_sd of {name} is {pair.gpu_sd}, its samples give {sd}"


def _of_orders(pair: GatePair, seed: int) -> Iterator[str]:
    """Yield the processes whose arms were not in the order of the seed.  Older records have no orders."""
    for process, order in enumerate(pair.samples.orders):
        if order != recorded_order(ARMS, seed + process):
            name = f"{pair.samples.baseline} at {pair.samples.shape_id}"
            yield f"the order of the arms in process {process} of {name} is not that of the seed"


def _is_below(a: float | None, b: float | None) -> bool:
    return a is not None and b is not None and a <= b


def _is_close(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is b
    return math.isclose(a, b, rel_tol=CLOSE, abs_tol=1e-12)

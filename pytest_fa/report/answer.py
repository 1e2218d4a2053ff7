"""The last lines of a run: the answer, and what to type next.

ws_p2: right in 16 of 16; 1.405 x the time of sdpa_cudnn at b1h8s512d64-fp16
why: pytest --fa-variant=ws_p2 --ncu

After a failure, the cause of the first one stands between them.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence

from pytest_fa.catalog.variant import COMPANION_ROLES
from pytest_fa.records.record import Record
from pytest_fa.records.spread import is_clear_ratio
from pytest_fa.records.timing import Speed
from pytest_fa.report.failure import failure_text
from pytest_fa.report.layout import Style, TextLine
from pytest_fa.report.table import NOT_ATTENTION, best_baseline, ratio_text
from pytest_fa.report.timing_notes import is_unconfirmed

NO_FAILURE = ("ok", "not_measured", "inconclusive")
JUDGED_KINDS = ("correct", "speed", "property")

Times = dict[str, dict[str, Speed]]  # by variant, then by shape id


def answer_lines(records: list[Record], why_not_run: str, rerun: Sequence[str]) -> list[TextLine]:
    """The answer and the next command.  No lines for a run of the self-test, or without records.

    `why_not_run` is the most frequent reason why a test with a case did not run; empty if all of them ran.  `rerun` has
    the first words of a command that runs variants of this run.
    """
    subjects = [record for record in records if record.role not in COMPANION_ROLES] or records
    if not subjects or any(record.kind == "selftest" for record in records):
        return []
    by_variant: dict[str, list[Record]] = {}
    for record in subjects:
        by_variant.setdefault(record.variant, []).append(record)
    times = _times(by_variant)
    if len(by_variant) == 1:
        text = _about_one(subjects, records, times, why_not_run)
    else:
        text = _about_many(by_variant, records, times, why_not_run)
    is_failed = any(_is_failure(record) or record.outcome == "gate_failed" for record in records)
    style: Style = "red" if is_failed else "green"
    failed = next((record for record in (*subjects, *records) if _is_failure(record)), None)
    cause = f"{failed.id}: {failure_text(failed).splitlines()[0]}" if failed and failed.message else ""
    command = _next_command(subjects, records, times, tuple(rerun))
    return [TextLine(text, style), *(TextLine(line) for line in (cause, command) if line)]


def _about_one(group: list[Record], records: list[Record], times: Times, why_not_run: str) -> str:
    name = group[0].variant
    failed = [record for record in group if _is_failure(record)]
    judged = [record for record in group if _is_judged(record)]
    built = [
        build.arch for record in group if record.kind == "build" and record.outcome == "ok" for build in record.builds
    ]
    parts = []
    if failed:
        count = f" in {len(failed)} of {len(judged)}" if failed[0] in judged else ""
        parts.append(f"{failed[0].outcome.replace('_', ' ')}{count}")
    elif judged:
        parts.append(f"right in {len(judged)} of {len(judged)}")
    elif built:
        parts.append(f"built for {', '.join(built)}")
    parts += _tool_parts(group)
    if times.get(name):
        parts.append(_versus_baseline(name, records, times))
    elif not failed and not any(record.kind in ("gate", "profile", "sanitize") for record in group):
        parts.append(_not_timed(name, judged, why_not_run))
    return f"{name}: {'; '.join([*parts, *_failed_companions(records)])}"


def _about_many(by_variant: dict[str, list[Record]], records: list[Record], times: Times, why_not_run: str) -> str:
    """How many variants are right, wrong or only built, and the fastest right one."""
    states = Counter(_state(group) for group in by_variant.values())
    counts = [f"{states[state]} {state}" for state in ("right", "wrong", "only built", "not judged") if states[state]]
    parts = [f"{len(by_variant)} variants: {', '.join(counts)}"]
    if any(group[0].gate for group in by_variant.values()):
        verdicts = Counter(record.gate.verdict for group in by_variant.values() for record in group if record.gate)
        parts.append("gates: " + ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()))
    fastest = _fastest(times)
    if fastest:
        parts.append(_about_fastest(fastest, records, times))
    elif why_not_run and states["only built"]:
        first = next(name for name, group in by_variant.items() if _state(group) == "only built")
        parts.append(_not_timed(first, [], why_not_run))
    return "; ".join([*parts, *_failed_companions(records)])


def _state(group: list[Record]) -> str:
    if any(_is_failure(record) for record in group):
        return "wrong"
    if any(_is_judged(record) for record in group):
        return "right"
    return "only built" if all(record.kind == "build" for record in group) else "not judged"


def _is_failure(record: Record) -> bool:
    return record.outcome not in NO_FAILURE and not record.gate


def _is_judged(record: Record) -> bool:
    has_verdict = record.check is not None or record.kind == "property" or _is_failure(record)
    return record.kind in JUDGED_KINDS and has_verdict


def _tool_parts(group: list[Record]) -> list[str]:
    """What the gates and the sanitizers say."""
    parts = [f"gate {record.gate.verdict} (< {record.gate.ratio:g} x baseline)" for record in group if record.gate]
    clean = [record.sanitized.tool for record in group if record.sanitized and record.outcome == "ok"]
    return [*parts, *([f"clean under {', '.join(dict.fromkeys(clean))}"] if clean else [])]


def _failed_companions(records: list[Record]) -> list[str]:
    failed = (record.variant for record in records if record.role in COMPANION_ROLES and _is_failure(record))
    return [f"{name} failed" for name in dict.fromkeys(failed)]


def _not_timed(name: str, judged: list[Record], why_not_run: str) -> str:
    if why_not_run and not judged:
        return f"not run: {why_not_run.removeprefix(f'{name} ').removeprefix(f'{name}: ')}"
    return "not timed"


# -- times ------------------------------------------------------------------------------------------------------------


def _times(by_variant: dict[str, list[Record]]) -> Times:
    """The confirmed times of each variant without a failure that computes attention."""
    return {
        name: {
            record.case.shape_id: record.speed
            for record in group
            if record.case and record.speed and not is_unconfirmed(record.speed)
        }
        for name, group in by_variant.items()
        if group[0].role not in NOT_ATTENTION and not any(_is_failure(record) for record in group)
    }


def _fastest(times: Times) -> str | None:
    """The variant with the least geometric mean of its times, among those that were timed on the most shapes."""
    most = max((len(speeds) for speeds in times.values()), default=0)
    complete = {name: speeds for name, speeds in times.items() if most and len(speeds) == most}
    return min(complete, key=lambda name: _mean_log(complete[name].values()), default=None)


def _mean_log(speeds: Iterable[Speed]) -> float:
    logs = [math.log(speed.device.median_us) for speed in speeds]
    return sum(logs) / len(logs)


def _about_fastest(fastest: str, records: list[Record], times: Times) -> str:
    """The fastest variant, and how many others the noise does not separate from it on any shape."""
    own, timed = times[fastest], [name for name in times if times[name] and name != fastest]
    ties = [name for name in timed if not any(_differs(own[at], times[name][at]) for at in own.keys() & times[name])]
    if ties and len(ties) == len(timed):
        return "the times are too noisy to say which is the fastest"
    noise = f" (too noisy to tell from {len(ties)} other{'s' * (len(ties) != 1)})" if ties else ""
    return f"fastest right: {fastest}{noise}, {_versus_baseline(fastest, records, times)}"


def _differs(speed: Speed, other: Speed) -> bool:
    return speed.device.median_us != other.device.median_us and is_clear_ratio(speed, other)


def _versus_baseline(name: str, records: list[Record], times: Times) -> str:
    """The ratio to the fastest baseline; for several shapes, the least and the largest ratio with their shapes."""
    ratios = []
    for shape, speed in times[name].items():
        baseline = best_baseline(_of_shape(records, shape))
        if baseline and baseline.speed and baseline.variant != name:
            ratio = speed.device.median_us / baseline.speed.device.median_us
            ratios.append((ratio, ratio_text(speed, baseline.speed), baseline.variant, shape))
    clear = sorted(entry for entry in ratios if entry[1] != "noisy")
    if not ratios:
        shape, speed = next(iter(times[name].items()))
        return f"{speed.device.median_us:.2f} us at {shape}, without a baseline"
    if not clear:
        return "too noisy for a ratio to the baseline"
    (_, least, baseline_name, shape), (_, most, _, last_shape) = clear[0], clear[-1]
    if len(clear) == 1:
        return f"{least} x the time of {baseline_name} at {shape}"
    return f"{least} x (at {shape}) to {most} x (at {last_shape}) the time of the fastest baseline"


def _of_shape(records: list[Record], shape: str) -> list[Record]:
    return [record for record in records if record.case and record.case.shape_id == shape]


# -- what to type next ------------------------------------------------------------------------------------------------


def _next_command(subjects: list[Record], records: list[Record], times: Times, rerun: tuple[str, ...]) -> str:
    failed = [record for record in (*subjects, *records) if _is_failure(record)]
    undecided = [record for record in subjects if record.outcome == "inconclusive"]
    if failed or undecided:
        return f"rerun: {(failed or undecided)[0].rerun_command}"
    bottlenecks = [record.nsight.longest.bottleneck for record in subjects if record.nsight and record.nsight.longest]
    if bottlenecks and bottlenecks[0]:
        return f"why: {bottlenecks[0].sentence}"
    name = _fastest(times)
    if name is None:
        return _next_without_times(subjects, rerun)
    if any(speed.is_on_cpu for speed in times[name].values()):
        return f"next: {_command(rerun, name, '--benchmark-save=before')}, and --benchmark-compare after a change"
    gates = [record.gate.verdict for record in subjects if record.gate]
    if not gates and _is_faster(name, records, times):
        return f"next: {_command(rerun, name, '--fa-gate=1.0')}"
    return "" if gates == ["PASS"] else f"why: {_command(rerun, name, '--ncu')}"


def _next_without_times(subjects: list[Record], rerun: tuple[str, ...]) -> str:
    """The command after a run that timed nothing."""
    name, kinds = subjects[0].variant, {record.kind for record in subjects}
    if kinds == {"build"} and subjects[0].builds:
        return f"next: {_command(rerun, name, '--fa-static')}, which reads the machine code"
    return f"next: {_command(rerun, name, '-k', 'test_speed')}" if kinds & {"correct", "property"} else ""


def _is_faster(name: str, records: list[Record], times: Times) -> bool:
    """Whether a variant takes less time than the fastest baseline on every shape."""
    baselines = [(speed, best_baseline(_of_shape(records, shape))) for shape, speed in times[name].items()]
    return all(
        baseline is not None and baseline.speed and speed.device.median_us < baseline.speed.device.median_us
        for speed, baseline in baselines
    )


def _command(rerun: tuple[str, ...], name: str, *words: str) -> str:
    own = [word for word in rerun if not word.startswith("--fa-gate")]
    return shlex.join([*own, f"--fa-variant={name}", *words])

"""The lines of a sweep: what was searched, its history, which defines matter, and how it ended."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from pytest_fa.features.sweep.read_study import StoredStudy
from pytest_fa.features.sweep.sweep_space import point_text
from pytest_fa.features.sweep.trial_result import ROUNDS, Finalist, SweepEnd, SweepTrial

MAX_SHOWN = 10  # of the best configurations, and of the values of a define


class DefineEffect(NamedTuple):
    """How the times depend on one define: the median ratio of each of its values, and the share that it explains.

    The share is that of the variance of the log-ratios which lies between the values; None if each value has one trial.
    """

    name: str
    medians: dict[int | str, float]
    share: float | None


def show_lines(study: StoredStudy) -> list[str]:
    """All lines about a study."""
    parts = (study_lines(study.facts, study.trials), history_lines(study.trials))
    lines = [study.name, *(line for part in parts for line in part)]
    return [*lines, *end_lines(study.end), *takeover_lines(study.end, study.facts)]


def study_lines(facts: Mapping[str, Any], trials: Sequence[SweepTrial]) -> list[str]:
    """The space, and the numbers of trials by their outcome."""
    counts = Counter(trial.result.outcome for trial in trials if trial.state == "ended" and trial.result)
    states = Counter(trial.state for trial in trials if trial.state in ("running", "released"))
    listed = ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in [*counts.items(), *states.items()])
    counted = sum(trial.is_counted for trial in trials)
    cases = ", ".join(str(each).rpartition("-seed")[0] for each in facts.get("cases", ()))
    number = f"{counted} trial{'s' * (counted != 1)}"
    return [
        f"{facts.get('feasible', '?')} feasible configurations; {number} ({listed or 'none'})",
        f"searched at {cases} on {facts.get('gpu') or 'the CPU'}; the search finds the luckiest: only the gate counts",
    ]


def history_lines(trials: Sequence[SweepTrial]) -> list[str]:
    """Each trial that was the best so far, the best ones of all, and the effect of each define."""
    timed = [(trial, trial.result.log_ratio) for trial in trials if trial.result and trial.result.log_ratio is not None]
    if not timed:
        return []
    lines, best = ["  trial  x parent  best so far"], math.inf
    for trial, ratio in timed:
        if ratio < best:
            best = ratio
            lines.append(f"  {_number(trial.number):>5}  {math.exp(ratio):8.4f}  {point_text(trial.point)}")
    lines.append(f"  the {min(MAX_SHOWN, len(timed))} best of {len(timed)} that were timed")
    for trial, ratio in sorted(timed, key=lambda pair: pair[1])[:MAX_SHOWN]:
        lines.append(
            f"  {_number(trial.number):>5}  {math.exp(ratio):8.4f}  {point_text(trial.point)}{_counters(trial)}"
        )
    effects = define_effects(trials)
    lines.append("  define: median ratio of each value (share of the variance between the values)")
    return [*lines, *(f"  {effect.name}: {_medians(effect)}{_share(effect)}" for effect in effects)]


def _medians(effect: DefineEffect) -> str:
    """The median ratio of each value; of many values, the smallest and the largest one."""
    medians = effect.medians
    if len(medians) <= MAX_SHOWN:
        return ", ".join(f"{value}: {median:.3f}" for value, median in medians.items())
    fastest, slowest = min(medians, key=medians.__getitem__), max(medians, key=medians.__getitem__)
    return f"{len(medians)} values, from {fastest}: {medians[fastest]:.3f} to {slowest}: {medians[slowest]:.3f}"


def _share(effect: DefineEffect) -> str:
    return "" if effect.share is None else f" ({100 * effect.share:.0f} %)"


def define_effects(trials: Sequence[SweepTrial]) -> list[DefineEffect]:
    """The effect of each define over the timed trials, the largest share first."""
    timed = [(trial.point, trial.result.log_ratio) for trial in trials if trial.result and trial.is_right]
    ratios = [ratio for _, ratio in timed if ratio is not None]
    total = sum((ratio - statistics.fmean(ratios)) ** 2 for ratio in ratios) if ratios else 0.0
    effects = []
    for name in timed[0][0] if timed else ():
        groups: dict[int | str, list[float]] = {}
        for point, ratio in timed:
            groups.setdefault(point[name], []).append(ratio or 0.0)
        mean = statistics.fmean(ratios)
        between = sum(len(group) * (statistics.fmean(group) - mean) ** 2 for group in groups.values())
        medians = {value: math.exp(statistics.median(groups[value])) for value in sorted(groups, key=_order)}
        share = None if len(groups) == len(ratios) else between / total if total else 0.0
        effects.append(DefineEffect(name, medians, share))
    return sorted(effects, key=lambda effect: -(effect.share or 0.0))


def end_lines(end: SweepEnd | None, run_began: float | None = None) -> list[str]:
    """How the sweep ended, with the luck that a search of this size is expected to have.

    A run that began after the end shows that the end is not its own.
    """
    if end is None:
        return ["the sweep has not ended"]
    lines = []
    if end.luck is not None and end.noise_sd is not None:
        lines.append(
            f"best of {end.timed}: expected luck at this noise {100 * math.expm1(end.luck):.1f} % "
            f"(standard deviation between processes {100 * end.noise_sd:.2f} %)"
        )
    for finalist in end.finalists:
        again = f"{math.exp(statistics.fmean(finalist.again)):.4f}{_processes(finalist)}" if finalist.again else "-"
        problem = f"; {finalist.problem}" if finalist.problem else ""
        lines.append(
            f"  {_number(finalist.number):>5}  search {math.exp(finalist.searched):.4f}, again {again}  "
            f"{point_text(finalist.point)}{problem}"
        )
    lines += [
        f"  gate, {each.shape_id}: {each.ratio:.4f} x parent, interval {each.low:.4f} to {each.high:.4f}"
        for each in end.ratios
    ]
    lines += [f"  not searched, {shape}: {math.exp(ratio):.4f} x parent" for shape, ratio in end.unsearched.items()]
    return [*lines, *_earlier_end(end, run_began), end.reason]


def takeover_lines(end: SweepEnd | None, facts: Mapping[str, Any]) -> list[str]:
    """The lines for the manifest, only of a winner that the gate confirmed: every define, also those not swept."""
    if end is None or end.winner is None:
        return []
    every = {**facts.get("defines", {}), **end.winner}
    defines = ", ".join(f"{name}: {json.dumps(value)}" for name, value in every.items())
    lines = [f"for variant.yaml: defines: {{{defines}}}"]
    slower = [shape for shape, ratio in end.unsearched.items() if ratio > 3 * (end.noise_sd or 0.0)]
    if slower:
        lines.append(f"it passed {end.checked} checks that were not searched, but was slower at {', '.join(slower)}")
    else:
        lines.append(f"it passed {end.checked} checks that were not searched")
    return lines


def _earlier_end(end: SweepEnd, run_began: float | None) -> list[str]:
    if run_began is None or end.ended >= run_began:
        return []
    date = datetime.fromtimestamp(end.ended, UTC)
    return [f"ended on {date:%Y-%m-%d %H:%M} UTC by an earlier run; nothing was timed now"]


def _number(number: int) -> str:
    return f"#{number}"


def _processes(finalist: Finalist) -> str:
    """The number of its new processes, if they are fewer than six."""
    count = len(finalist.again)
    return f" ({count} process{'es' * (count != 1)})" if count < ROUNDS else ""


def _counters(trial: SweepTrial) -> str:
    counters = trial.result.counters if trial.result else {}
    shown = {"registers_per_thread": "registers", "instructions": "instructions"}
    listed = ", ".join(f"{counters[name]} {word}" for name, word in shown.items() if counters.get(name))
    return f"  {listed}" if listed else ""


def _order(value: int | str) -> tuple[bool, int | str]:
    return isinstance(value, str), value

"""Name what cannot be true in a record although its values agree with each other.

No rule here needs a threshold that was tuned: each follows from how the value is measured, with a margin.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from pytest_fa.features.gate.gated import OLDER_BUILD, Gate, GatedRevision
from pytest_fa.features.gate.pilot import near
from pytest_fa.records.agreement import MIN_CALL_SHARE
from pytest_fa.records.paired import CPU_METHOD
from pytest_fa.records.record import Record
from pytest_fa.records.timing import ON_CPU, Speed

MIN_CLOCK_SHARE = 0.5  # of the highest SM clock, below which no power cap explains it; H200s had 0.69 or more
PILOT_MARGIN = 1.25  # a gate's ratio and that of its pilot differ by less than this factor


def implausible(record: Record) -> list[str]:
    """Return one sentence for each value that contradicts how it is measured."""
    problems: list[str] = []
    if record.speed is not None:
        problems += _of_speed(record, record.speed)
    if gate := Gate.of(record):
        problems += [*_of_gate(record.variant, gate), *_of_question(record, gate)]
    return problems


def _of_speed(record: Record, speed: Speed) -> Iterator[str]:
    device_us = speed.device.median_us
    on_gpu = speed.profiler_missing != ON_CPU  # on a loaded CPU, any two times of one call may differ a hundredfold
    if on_gpu and speed.call.median_us < MIN_CALL_SHARE * device_us:
        yield f"call_us is {speed.call.median_us:.2f}, less than device_us, {device_us:.2f}: a caller waits for the GPU"
    if speed.cold is not None and speed.cold.median_us < MIN_CALL_SHARE * _clock_share(speed) * device_us:
        yield f"cold_us is {speed.cold.median_us:.2f}, less than device_us, {device_us:.2f}"
    sampled = (speed.device, speed.call)
    needed = sum(sum(timing.samples_us) * timing.calls_per_sample for timing in sampled) / 1e6
    took = next((stage.seconds for stage in record.stages if stage.name == "speed"), 0.0)
    if needed > took:
        yield f"its samples take {needed:.3f} s, the stage took {took:.3f} s"
    of_profiler = speed.profiler.clocks if speed.profiler else None
    clocks = (speed.clocks_before, speed.clocks_during, speed.clocks_after, of_profiler)
    if record.environment.gpu is None and any(clocks):
        yield "it has a GPU's clocks, but no GPU"


def _clock_share(speed: Speed) -> float:
    """The share of the highest SM clock that calls in a row had: a single cold call may take this share of their time.

    A power cap lowers the clock while calls follow each other.  After a pause, the clock is high again.
    """
    under_load_mhz = [clocks.sm_mhz for clocks in (speed.clocks_during, speed.clocks_after) if clocks and clocks.sm_mhz]
    if not speed.judge_saw_power_cap or not under_load_mhz or not speed.highest_sm_mhz:
        return 1.0
    return max(MIN_CLOCK_SHARE, min(under_load_mhz) / speed.highest_sm_mhz)


def _of_gate(variant: str, gate: Gate) -> Iterator[str]:
    for pair in gate.pairs:
        if pair.method.startswith(CPU_METHOD):  # as above: on a loaded CPU, two times of one call may differ widely
            continue
        pilot_us = gate.pilot_us.get(pair.samples.shape_id, {})
        candidate_us, baseline_us = pilot_us.get(variant), pilot_us.get(pair.samples.baseline)
        if candidate_us and baseline_us and pair.ratio:
            pilot = candidate_us / baseline_us
            if not 1 / PILOT_MARGIN < pair.ratio / pilot < PILOT_MARGIN:
                shape = pair.samples.shape_id
                yield f"at {shape} the ratio is {pair.ratio:.3f}, the pilot's times give {pilot:.3f}"


def _of_question(record: Record, gate: Gate) -> Iterator[str]:
    """Yield how a gate differs from its command, its pilot and its machine."""
    if f"--fa-gate={gate.ratio:g}" not in record.rerun_command.split():
        yield f"its ratio is {gate.ratio:g}, its command is {record.rerun_command!r}"
    if record.unprotected and gate.verdict == "PASS":
        yield "it has a PASS, although it ran unprotected"
    if gate.pilot_seconds > gate.seconds:
        yield f"its pilot took {gate.pilot_seconds:.1f} s, the whole gate {gate.seconds:.1f} s"
    for pair in gate.pairs:
        is_on_gpu = record.environment.gpu and not pair.method.startswith(CPU_METHOD)
        if is_on_gpu and not pair.samples.outside:
            yield f"{pair.samples.baseline} at {pair.samples.shape_id} has no times by the judge's clock"
    if gate.revision:
        yield from _of_revision(record, gate, gate.revision)
    yield from _of_selection(record, gate)


def _of_revision(record: Record, gate: Gate, revision: GatedRevision) -> Iterator[str]:
    """Yield how a gate against a commit differs from its command, and from the name of its baseline."""
    if not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", revision.commit):
        yield f"its baseline is of commit {revision.commit!r}, which is no id"
    if f"--fa-gate-baseline=git:{revision.commit}" not in record.rerun_command.split():
        yield f"its baseline is of commit {revision.commit}, its command is {record.rerun_command!r}"
    name = revision.baseline(record.variant)
    if others := {pair.samples.baseline for pair in gate.pairs} - {name}:
        yield f"its baseline is {name}, it compares with {_names(others)}"


def _of_selection(record: Record, gate: Gate) -> Iterator[str]:
    """Yield where a gate does not compare with the baselines that its pilot selects, by times of this gate."""
    gated: dict[str, set[str]] = {}
    for pair in gate.pairs:
        gated.setdefault(pair.samples.shape_id, set()).add(pair.samples.baseline)
    for shape_id in sorted(gated.keys() | gate.pilot_us.keys() | gate.pilot_age_seconds.keys()):
        stated, times = gated.get(shape_id, set()), dict(gate.pilot_us.get(shape_id, {}))
        ages = gate.pilot_age_seconds.get(shape_id, {}).keys()
        if wrong := (ages - times.keys()) | (ages & stated):
            yield f"at {shape_id} the pilot's times of {_names(wrong)} have an age; those that count have none"
        times.pop(record.variant, None)
        selected = set(near(times))
        older_builds = {name for name in stated if OLDER_BUILD in name}
        if older_builds and "--fa-gate-baseline=key:" in record.rerun_command:
            selected = older_builds  # no pilot times them
        if stated != selected:
            yield f"at {shape_id} it compares with {_names(stated)}, its pilot selects {_names(selected)}"


def _names(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"

"""Name what cannot be true in a record although its values agree with each other.

No rule here needs a threshold that was tuned: each follows from how the value is measured, with a margin.
"""

from __future__ import annotations

from collections.abc import Iterator

from pytest_fa.records.agreement import LEAST_CALL_SHARE
from pytest_fa.records.gated import Gate
from pytest_fa.records.record import Record
from pytest_fa.records.timing import ON_CPU, Speed

PILOT_MARGIN = 1.25  # a gate's ratio and that of its pilot differ by less than this factor


def implausible(record: Record) -> list[str]:
    """Return one sentence for each value that contradicts how it is measured."""
    problems: list[str] = []
    if record.speed is not None:
        problems += _of_speed(record, record.speed)
    if record.gate is not None:
        problems += _of_gate(record.variant, record.gate)
    return problems


def _of_speed(record: Record, speed: Speed) -> Iterator[str]:
    device_us = speed.device.median_us
    on_gpu = speed.profiler_missing != ON_CPU  # on a loaded CPU, any two times of one call may differ a hundredfold
    if on_gpu and speed.call.median_us < LEAST_CALL_SHARE * device_us:
        yield f"call_us is {speed.call.median_us:.2f}, less than device_us, {device_us:.2f}: a caller waits for the GPU"
    if speed.cold is not None and speed.cold.median_us < LEAST_CALL_SHARE * device_us:
        yield f"cold_us is {speed.cold.median_us:.2f}, less than device_us, {device_us:.2f}"
    sampled = (speed.device, speed.call)
    needed = sum(sum(timing.samples_us) * timing.calls_per_sample for timing in sampled) / 1e6
    took = next((stage.seconds for stage in record.stages if stage.name == "speed"), 0.0)
    if needed > took:
        yield f"its samples take {needed:.3f} s, the stage took {took:.3f} s"
    clocks = (speed.clocks_before, speed.clocks_during, speed.clocks_after)
    if record.environment.gpu is None and any(clocks):
        yield "it has a GPU's clocks, but no GPU"


def _of_gate(variant: str, gate: Gate) -> Iterator[str]:
    for pair in gate.pairs:
        pilot_us = gate.pilot_us.get(pair.samples.shape_id, {})
        candidate_us, baseline_us = pilot_us.get(variant), pilot_us.get(pair.samples.baseline)
        if candidate_us and baseline_us and pair.ratio:
            pilot = candidate_us / baseline_us
            if not 1 / PILOT_MARGIN < pair.ratio / pilot < PILOT_MARGIN:
                shape = pair.samples.shape_id
                yield f"at {shape} the ratio is {pair.ratio:.3f}, the pilot's times give {pilot:.3f}"

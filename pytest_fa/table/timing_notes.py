"""The notes below a table of times: unconfirmed times, other GPU processes, compilations, and the kernels of SDPA."""

from __future__ import annotations

from pytest_fa.records.agreement import is_unconfirmed, why_unconfirmed
from pytest_fa.records.record import Record

MIN_COMPILE_SECONDS = 0.05  # of a variant; less is not listed
NAMED_REPEATS = 3  # fewer are no sign of a disturbance
MAX_NODES = 3  # the kernels of a backend that ran more than this are not listed


def timing_notes(records: list[Record]) -> list[str]:
    """The notes below the table, one line each."""
    timed = [(f"{each.variant} at {each.case.shape_id}", each.speed) for each in records if each.speed and each.case]
    lines = [f"time not confirmed: {name}: {why_unconfirmed(speed)}" for name, speed in timed if is_unconfirmed(speed)]
    lines += [
        f"period_pdl: {name}: programmatic dependent launch overlaps its kernels; device_us is the period of "
        f"overlapping calls and is never gated"
        for name, speed in timed
        if speed.order == "programmatic"
    ]
    lines += [
        f"timed anew: {name}: {speed.repeated_runs} runs, in which the judge was stopped or lost its processor"
        for name, speed in timed
        if speed.repeated_runs >= NAMED_REPEATS
    ]
    other_processes = dict.fromkeys(process for _, speed in timed for process in speed.other_gpu_processes)
    lines += [f"another process was using the GPU: {process}" for process in other_processes]
    return [*lines, *_compilations(records), *_backend_kernels(records)]


def _compilations(records: list[Record]) -> list[str]:
    """How long each variant compiled that does so when it is called; one line for all of them."""
    seconds: dict[str, float] = {}
    for record in records:
        seconds[record.variant] = seconds.get(record.variant, 0.0) + record.compile_seconds
    listed = [f"{name} {total:.1f} s" for name, total in seconds.items() if total >= MIN_COMPILE_SECONDS]
    return [f"first calls, which compile and count in no test's seconds: {', '.join(listed)}"] if listed else []


def _backend_kernels(records: list[Record]) -> list[str]:
    """The kernels that each backend ran in one call; different sets of kernels are joined by `or`."""
    kernel_sets: dict[str, dict[tuple[str, ...], None]] = {}
    for record in records:
        if record.role == "baseline" and record.speed and record.speed.profiler:
            names = tuple(sorted(node.name for node in record.speed.profiler.nodes))
            kernel_sets.setdefault(record.variant, {})[names] = None
    lines = []
    for variant, sets in kernel_sets.items():
        listed = " or ".join(" + ".join(names) for names in sets if len(names) <= MAX_NODES)
        lines += [f"{variant} ran {listed}"] if listed else []
    return lines

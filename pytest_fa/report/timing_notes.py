"""What stands below a table of times: which are not confirmed, who else was there, which kernels SDPA ran."""

from __future__ import annotations

from pytest_fa.records.record import Record
from pytest_fa.records.timing import Speed

MOST_NODES = 3  # of a backend whose kernels are named


def is_doubtful(speed: Speed) -> bool:
    """Whether another clock or the kernels' names speak against a time."""
    return speed.agreement is not None and speed.agreement.valid is False


def timing_notes(records: list[Record]) -> list[str]:
    """One line for each thing that the figures do not say."""
    timed = [(f"{each.variant} at {each.case.shape_id}", each.speed) for each in records if each.speed and each.case]
    lines = [f"not confirmed: {name}: {_reason(speed)}" for name, speed in timed if is_doubtful(speed)]
    lines += [
        f"period_pdl: {name}: its kernels begin before their predecessor end; device_us is a period of that kind"
        for name, speed in timed
        if speed.order == "programmatic"
    ]
    others = dict.fromkeys(each for _, speed in timed for each in speed.other_gpu_processes)
    lines += [f"another process was on the GPU: {each}" for each in others]
    return [*lines, *_backend_kernels(records)]


def _reason(speed: Speed) -> str:
    return speed.agreement.reason if speed.agreement else ""


def _backend_kernels(records: list[Record]) -> list[str]:
    """Which kernel each backend ran, where it ran the same few at every shape."""
    found: dict[str, dict[tuple[str, ...], None]] = {}
    for each in records:
        if each.role == "baseline" and each.speed and each.speed.profiler:
            names = tuple(sorted(node.name for node in each.speed.profiler.nodes))
            found.setdefault(each.variant, {})[names] = None
    lines = []
    for variant, kinds in found.items():
        ran = " or ".join(" + ".join(names) for names in kinds if len(names) <= MOST_NODES)
        lines += [f"{variant} ran {ran}"] if ran else []
    return lines

"""What bounds a kernel: one sentence, derived from the kernel's counters, that quotes the decisive ones."""

from __future__ import annotations

from pytest_fa.features.ncu import presets
from pytest_fa.features.ncu.nsight_report import Bottleneck, BoundBy, CountedKernel

Counters = dict[str, float]

MIN_ACTIVE = 0.5  # share of the duration in which an SM is active; below it, launch and exit take most of the time
BUSY_PERCENT = 60.0  # of a unit's peak; Nsight's own rules call a kernel bound by a unit from this value on

_TENSOR_NAMES = (presets.TENSOR, presets.TENSOR_HMMA, presets.TENSOR_BLACKWELL)

# Stall reason -> what a warp waits for; it continues the words "warps wait".
_WAITS = {
    "barrier": "for other warps at a barrier",
    "branch_resolving": "for a branch to resolve",
    "dispatch_stall": "for the dispatcher",
    "drain": "for stores to drain before they exit",
    "gmma": "for wgmma",
    "imc_miss": "for constants",
    "lg_throttle": "because the queue for global and local memory is full",
    "long_scoreboard": "for data from L2 or DRAM",
    "math_pipe_throttle": "for a math pipe",
    "membar": "at a memory fence",
    "mio_throttle": "because the queue for shared memory is full",
    "misc": "for a reason that Nsight Compute does not name",
    "no_instruction": "for instructions to be fetched",
    "not_selected": "while another warp issues",
    "short_scoreboard": "for shared memory or the exponential unit",
    "sleeping": "in a sleep instruction",
    "tex_throttle": "because the texture queue is full",
    "wait": "for the fixed latency of their last instruction",
}


_RATIOS = {presets.stall(reason): reason for reason in _WAITS}
_SAMPLES = {presets.stall_samples(reason): reason for reason in _WAITS}


def bottleneck_of(kernel: CountedKernel) -> Bottleneck | None:
    """What bounds one kernel; None if a required counter is missing."""
    counters = kernel.counters
    active, elapsed = counters.get(presets.ACTIVE_MAX), counters.get(presets.ELAPSED_MAX)
    busiest = _busiest(counters)
    if active is None or not elapsed or busiest is None:
        return None
    if active / elapsed < MIN_ACTIVE:
        return _launch_bound(counters, active, elapsed)
    if busiest[2] >= BUSY_PERCENT:
        return _unit_bound(counters, *busiest)
    return _latency_bound(counters, *busiest)


def tensor_percent(counters: Counters) -> tuple[str, float] | None:
    """The tensor pipe's counter and value.  Its name depends on the chip; if two were counted, the larger one."""
    counted = [(counters[name], name) for name in _TENSOR_NAMES if name in counters]
    return (max(counted)[1], max(counted)[0]) if counted else None


def top_stall(counters: Counters) -> tuple[str, float] | None:
    """The counter of the most frequent stall reason, and its value; `selected`, which is not a stall, is excluded.

    The value is in warps per issued instruction if those were counted, else in samples.
    """
    for names in (_RATIOS, _SAMPLES):
        counted = [(counters[name], name) for name in names if name in counters]
        if counted:
            return max(counted)[1], max(counted)[0]
    return None


def _busiest(counters: Counters) -> tuple[BoundBy, str, float] | None:
    """The unit that is closest to its peak, its counter and value; None if a unit was not counted."""
    tensor = tensor_percent(counters)
    units: list[tuple[BoundBy, str]] = [("memory", presets.MEMORY), ("exp", presets.XU), ("fma", presets.FMA)]
    if tensor is None or any(name not in counters for _, name in units):
        return None
    rates: list[tuple[BoundBy, str, float]] = [(limit, name, counters[name]) for limit, name in units]
    return max([("tensor", *tensor), *rates], key=lambda rate: rate[2])


def _launch_bound(counters: Counters, active: float, elapsed: float) -> Bottleneck:
    sentence = (
        f"launch-bound: the SM with the most work is active for {active:,.0f} of {elapsed:,.0f} cycles "
        f"({active / elapsed:.0%}); the start and the end of the kernel take the rest"
    )
    return _bottleneck("launch", sentence, counters, presets.ACTIVE_MAX, presets.ELAPSED_MAX)


_UNITS: dict[BoundBy, str] = {
    "memory": "the memory system",
    "tensor": "the tensor pipe",
    "exp": "the exponential unit (XU pipe)",
    "fma": "the FMA pipe",
}


def _unit_bound(counters: Counters, limit: BoundBy, name: str, percent: float) -> Bottleneck:
    """A kernel bound by one unit.  A second unit is quoted for comparison.

    It is DRAM for memory, the whole SM for the tensor pipe, and the tensor pipe for the exponential unit and FMA.
    """
    tensor = tensor_percent(counters)
    second, second_unit = (
        (presets.DRAM, "DRAM alone") if limit == "memory" else (presets.SM, "all units of the SM together")
    )
    if limit in ("exp", "fma") and tensor is not None:
        second, second_unit = tensor[0], "the tensor pipe"
    value = counters.get(second)
    comparison = "" if value is None else f"; {second_unit} at {value:.0f} %"
    sentence = f"{limit}-bound: {_UNITS[limit]} runs at {percent:.0f} % of its peak{comparison}"
    return _bottleneck(limit, sentence, counters, name, second)


def _latency_bound(counters: Counters, limit: BoundBy, name: str, percent: float) -> Bottleneck:
    """A kernel in which no unit is near its peak, because it has too few blocks or because its warps wait."""
    grid, multiprocessors = counters.get(presets.GRID), counters.get(presets.SMS)
    start = f"latency-bound: no unit is near its peak ({_UNITS[limit]} is the busiest, at {percent:.0f} %)"
    stall = top_stall(counters)
    if grid is not None and multiprocessors and grid <= multiprocessors / 2:
        sentence = f"{start}; {grid:.0f} blocks leave {multiprocessors - grid:.0f} of {multiprocessors:.0f} SMs empty"
        return _bottleneck("latency", sentence + _waiting(counters, stall), counters, name, presets.GRID)
    return _bottleneck(
        "latency", start + _waiting(counters, stall), counters, name, stall[0] if stall else presets.ISSUE
    )


def _waiting(counters: Counters, stall: tuple[str, float] | None) -> str:
    """What most warps wait for, as the end of the sentence; empty if stalls were not counted or are zero."""
    if stall is None or not stall[1]:
        return ""
    name, value = stall
    if name in _RATIOS:
        total = sum(counters.get(each, 0.0) for each in (*_RATIOS, presets.stall("selected")))
        return f"; per issued instruction, {value:.1f} of {total:.1f} warps in flight wait {_WAITS[_RATIOS[name]]}"
    total = sum(counters.get(each, 0.0) for each in (*_SAMPLES, presets.stall_samples("selected")))
    return f"; in {value:.0f} of {total:.0f} samples a warp waits {_WAITS[_SAMPLES[name]]}"


def _bottleneck(limit: BoundBy, sentence: str, counters: Counters, *names: str) -> Bottleneck:
    return Bottleneck(limit, sentence, {name: counters[name] for name in names if name in counters})

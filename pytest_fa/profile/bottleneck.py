"""What bounds a kernel, in words: a pure function of its counters that quotes those which decided."""

from __future__ import annotations

from pytest_fa.profile import presets
from pytest_fa.records.tool_results import Bottleneck, BoundBy, CountedKernel

Counters = dict[str, float]

LEAST_ACTIVE = 0.5  # of a kernel's duration; below, what surrounds the work is longer than the work
BUSY_PERCENT = 60.0  # of a unit's peak; Nsight's own rules speak of a bound from there on

_TENSOR_NAMES = (presets.TENSOR, presets.TENSOR_HMMA, presets.TENSOR_BLACKWELL)

# What waits for what, as the stall reasons have it.
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
    "misc": "for reasons that have no name",
    "no_instruction": "for instructions to be fetched",
    "not_selected": "while another warp issues",
    "short_scoreboard": "for shared memory or the exponential unit",
    "sleeping": "asleep",
    "tex_throttle": "because the texture queue is full",
    "wait": "for the fixed latency of their last instruction",
}


_RATIOS = {presets.stall(reason): reason for reason in _WAITS}
_SAMPLES = {presets.stall_samples(reason): reason for reason in _WAITS}


def bottleneck_of(kernel: CountedKernel) -> Bottleneck | None:
    """The verdict on one kernel; None where a counter that it takes is missing."""
    counters = kernel.counters
    active, elapsed = counters.get(presets.ACTIVE_MAX), counters.get(presets.ELAPSED_MAX)
    busiest = _busiest(counters)
    if active is None or not elapsed or busiest is None:
        return None
    if active / elapsed < LEAST_ACTIVE:
        return _launch_bound(counters, active, elapsed)
    if busiest[2] >= BUSY_PERCENT:
        return _unit_bound(counters, *busiest)
    return _latency_bound(counters, *busiest)


def tensor_percent(counters: Counters) -> tuple[str, float] | None:
    """The tensor pipe's counter and value, whatever this chip calls it; the larger where it has two."""
    found = [(counters[name], name) for name in _TENSOR_NAMES if name in counters]
    return (max(found)[1], max(found)[0]) if found else None


def top_stall(counters: Counters) -> tuple[str, float] | None:
    """The counter of the reason for which most warps wait, and its value; `selected` (issuing) left out.

    Warps per issued instruction where these were counted, else samples.
    """
    for names in (_RATIOS, _SAMPLES):
        found = [(counters[name], name) for name in names if name in counters]
        if found:
            return max(found)[1], max(found)[0]
    return None


def _busiest(counters: Counters) -> tuple[BoundBy, str, float] | None:
    """The unit nearest to its peak; None where one of them was not counted."""
    tensor = tensor_percent(counters)
    units: list[tuple[BoundBy, str]] = [("memory", presets.MEMORY), ("exp", presets.XU), ("fma", presets.FMA)]
    if tensor is None or any(name not in counters for _, name in units):
        return None
    rates: list[tuple[BoundBy, str, float]] = [(limit, name, counters[name]) for limit, name in units]
    return max([("tensor", *tensor), *rates], key=lambda each: each[2])


def _launch_bound(counters: Counters, active: float, elapsed: float) -> Bottleneck:
    sentence = (
        f"launch-bound: the multiprocessor that works longest is active for {active:,.0f} of {elapsed:,.0f} cycles "
        f"({active / elapsed:.0%}); starting and ending take the rest"
    )
    return _bottleneck("launch", sentence, counters, presets.ACTIVE_MAX, presets.ELAPSED_MAX)


_UNITS: dict[BoundBy, str] = {
    "memory": "the memory system",
    "tensor": "the tensor pipe",
    "exp": "the exponential unit (XU pipe)",
    "fma": "the FMA pipe",
}


def _unit_bound(counters: Counters, limit: BoundBy, name: str, percent: float) -> Bottleneck:
    """The unit, and beside it whichever shows what else could be: DRAM for memory, the tensor pipe for the others."""
    tensor = tensor_percent(counters)
    beside, words = (
        (presets.DRAM, "DRAM alone") if limit == "memory" else (presets.SM, "all of the SM's units together")
    )
    if limit in ("exp", "fma") and tensor is not None:
        beside, words = tensor[0], "the tensor pipe"
    value = counters.get(beside)
    rest = "" if value is None else f"; {words} at {value:.0f} %"
    return _bottleneck(
        limit, f"{limit}-bound: {_UNITS[limit]} runs at {percent:.0f} % of its peak{rest}", counters, name, beside
    )


def _latency_bound(counters: Counters, limit: BoundBy, name: str, percent: float) -> Bottleneck:
    """No unit is near its peak: too few blocks for the chip, or warps that wait; says for what."""
    grid, multiprocessors = counters.get(presets.GRID), counters.get(presets.SMS)
    start = f"latency-bound: no unit is busy ({_UNITS[limit]} most, at {percent:.0f} %)"
    stall = top_stall(counters)
    if grid is not None and multiprocessors and grid <= multiprocessors / 2:
        sentence = f"{start}; {grid:.0f} blocks leave {multiprocessors - grid:.0f} of {multiprocessors:.0f} SMs empty"
        return _bottleneck("latency", sentence + _waiting(counters, stall), counters, name, presets.GRID)
    return _bottleneck(
        "latency", start + _waiting(counters, stall), counters, name, stall[0] if stall else presets.ISSUE
    )


def _waiting(counters: Counters, stall: tuple[str, float] | None) -> str:
    """What most warps wait for; empty where nobody counted, or nobody waits."""
    if stall is None or not stall[1]:
        return ""
    name, value = stall
    if name in _RATIOS:
        of = sum(counters.get(each, 0.0) for each in (*_RATIOS, presets.stall("selected")))
        return f"; of {of:.1f} warps in flight per issued instruction {value:.1f} wait {_WAITS[_RATIOS[name]]}"
    of = sum(counters.get(each, 0.0) for each in (*_SAMPLES, presets.stall_samples("selected")))
    return f"; in {value:.0f} of {of:.0f} samples a warp waits {_WAITS[_SAMPLES[name]]}"


def _bottleneck(limit: BoundBy, sentence: str, counters: Counters, *names: str) -> Bottleneck:
    return Bottleneck(limit, sentence, {name: counters[name] for name in names if name in counters})

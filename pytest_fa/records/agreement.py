"""Decide whether a measured time is valid: by other clocks, the launched kernels, and the GPU's peak rates.

Three clocks time the same kernel on a GPU.  The period, `device_us`, is by the candidate's own clock: CUDA events in
the process that runs the kernel.  The judge's clock is outside that process.  The profiler has a process of its own.
"""

from __future__ import annotations

from pytest_fa.records.ceilings import BYTES_MARGIN, CEILING_MARGIN, Floor
from pytest_fa.records.timing import ON_CPU, PROFILED_OUTPUTS, Agreement, OutsideTime, ProfilerTime, Speed

LONG_NODE_US = 30.0  # mean duration from which a kernel counts as long
SHARE = 0.05  # allowed difference between period and profiler, as a share of the period
# By how much the profiler may be longer under a power cap: its load has no pauses.  Of 304 such times on H200s,
# 298 are longer by up to 10 %, and all by up to 12 %, FlashAttention-3's among them.
CAPPED_SHARE = 0.15
SHORT_US = 0.5  # allowed difference per short kernel, in microseconds; 0.44 was seen on an H100

SLOPE_SHARE = 0.02  # allowed difference between the judge's slope and the period, as a share of the period
# The same under a power cap that the judge has read: the two clocks have windows of their own, and between these the SM
# clock moves.  On an H200, a baseline's clocks differed by 2.02 %.
CAPPED_SLOPE_SHARE = 0.05
CLOCK_US = 0.1  # allowed difference between times by the judge's clock and others, in microseconds
WHOLE_SHARE = 1.05  # how much longer a whole run may be than the period, besides its message
PROVEN_SHARE = 0.25  # how much shorter the candidate's clock must be than a whole run to prove tampering
# How much longer calls may take that write an output of their own, besides the time to write it to memory.  In 253
# records of an NVIDIA H200, 1.00 was enough for each; on an H100, `sdpa_math`, which has 14 kernels, needed 1.04.
PROOF_SHARE = 1.05
RUN_SHARE = 1.25  # how much more of what a run contains besides calls the proof sample may contain than a longer run
RUN_US = 100.0  # and this much more
MIN_CALL_SHARE = 0.9  # of `device_us`, that a call from Python takes: the two are measured one after the other

WITHOUT_JUDGE = "the time has no figure by the judge's clock"
SHARED_OUTPUT = (
    "all calls return the same buffer, so it cannot be seen that each timed call computes; "
    "write the result into `out`, or return a new tensor"
)

# Substrings of kernel names: of the kernel of each SDPA backend, and of all attention kernels that torch ships.
BACKEND_KERNELS = {"sdpa_flash": "flash", "sdpa_cudnn": "cudnn", "sdpa_efficient": "fmha"}
TORCH_ATTENTION = ("pytorch_flash", "cudnn_generated", "fmha_cutlass")


def check_agreement(
    variant: str,
    role: str,
    speed: Speed,
    floor: Floor | None = None,
) -> Agreement:
    """Return whether a period agrees with the other clocks, the launched kernels and the GPU's peak rates.

    `floor` has the least times of a call on this GPU, if its rates are known.
    """
    problem = _below_floor(speed.device.median_us, floor or Floor())
    if problem := problem or _throttled_or_branched(speed) or _wrong_kernels(variant, role, speed):
        return Agreement(valid=False, reason=problem)
    if problem := _against_judge(speed, role):
        return Agreement(valid=False, reason=problem, least_us=_least_us(speed))
    if PROFILED_OUTPUTS in (speed.profiler_missing or ""):
        return Agreement(valid=False, reason=speed.profiler_missing or "", least_us=_least_us(speed))
    if speed.profiler is None:
        return Agreement(valid=None, reason=speed.profiler_missing or "not profiled")
    share = CAPPED_SHARE if speed.is_power_capped else SHARE
    return _compare(speed.device.median_us, speed.profiler, share)


def slope_limit_us(period_us: float, *, is_capped: bool = False, precision: float | None = None) -> float:
    """The allowed difference between the judge's slope and a period, in microseconds per call.

    `is_capped` says that the judge has read a power cap.  `precision` is that of the judge's slope.  A busy
    machine makes it worse; so could a candidate, and therefore no more is allowed than under a power cap.
    """
    share = CAPPED_SLOPE_SHARE if is_capped else min(CAPPED_SLOPE_SHARE, SLOPE_SHARE + (precision or 0.0))
    return max(share * period_us, CLOCK_US)


def is_unconfirmed(speed: Speed) -> bool:
    """Whether a time does not count: another clock contradicts it, or it was compared with none."""
    return speed.agreement is None or speed.agreement.valid is False


def confirmed_by(speed: Speed) -> str:
    """Which clocks confirm a time: `yes` only if the judge's clock and the profiler both do."""
    valid = speed.agreement.valid if speed.agreement else None
    if speed.is_on_cpu or not valid:
        return {True: "yes", False: "NO", None: "-"}[valid]
    return "yes" if speed.outside else "by the profiler only"


def why_unconfirmed(speed: Speed) -> str:
    """The reason of `is_unconfirmed`."""
    return speed.agreement.reason if speed.agreement else "it was compared with no other clock"


def is_call_too_short(speed: Speed) -> bool:
    """Whether a call from Python seems to take less time than its period on the device, so that `call_us` is wrong."""
    return speed.call.median_us < MIN_CALL_SHARE * speed.device.median_us - CLOCK_US


def _below_floor(period_us: float, floor: Floor) -> str:
    """Return why a period is impossible on this GPU."""
    if period_us * CEILING_MARGIN < floor.matrices_us:
        limit = f"the matrix products alone take {floor.matrices_us:.2f} us"
    elif period_us * BYTES_MARGIN < floor.bytes_us:
        limit = f"a copy of as many bytes takes {floor.bytes_us:.2f} us"
    else:
        return ""
    return f"impossible on this GPU: the period is {period_us:.2f} us, {limit}"


# -- the judge's clock ------------------------------------------------------------------------------------------------


def _against_judge(speed: Speed, role: str) -> str:
    """Return what the judge's clock contradicts; nothing on the CPU, where it is the only clock."""
    if ON_CPU in (speed.cold_missing, speed.profiler_missing):
        return ""
    if speed.outside is None:
        return WITHOUT_JUDGE
    return _against_outside(speed.device.median_us, speed.outside, role, is_capped=speed.judge_saw_power_cap)


def _against_outside(period_us: float, outside: OutsideTime, role: str, *, is_capped: bool) -> str:
    """Return which of the judge's three figures contradicts a period.

    The slope alone is not enough: a candidate could slow down the shorter graph.  Then a whole run takes longer.  The
    proof sample takes longer if the candidate skips work in calls whose output another call overwrites; an empty kernel
    has no work to skip.
    """
    if outside.shares_outputs:
        return SHARED_OUTPUT
    allowed_us = slope_limit_us(period_us, is_capped=is_capped, precision=outside.precision)
    if outside.proof_us is not None and not abs(outside.median_us - period_us) <= allowed_us:
        return (
            f"the judge's clock shows {outside.median_us:.2f} us and the candidate's own clock {period_us:.2f} us"
            f"{_shorter_by(period_us, outside.median_us)}: allowed difference {allowed_us:.2f} us"
        )
    allowed_us = WHOLE_SHARE * period_us + CLOCK_US + outside.message_us / max(1, outside.calls)
    if not outside.whole_us <= allowed_us:
        return (
            f"by the judge's clock, a run of {outside.calls} calls takes {outside.whole_us:.2f} us per call, by the "
            f"candidate's own clock {period_us:.2f} us{_shorter_by(period_us, outside.whole_us)}: "
            f"allowed {allowed_us:.2f} us"
        )
    if outside.proof_us is None or role == "overhead":
        return ""
    calls = outside.proof_calls or 1
    allowed_us = proof_limit_of(outside, outside.fill_us or 0.0, calls)
    if not outside.proof_us <= allowed_us:
        return (
            f"where each of {calls} calls writes an output of its own, a call takes {outside.proof_us:.2f} us, "
            f"otherwise {outside.median_us:.2f} us: allowed {allowed_us:.2f} us; "
            f"it seems to skip work whose result is overwritten"
        )
    return ""


def _least_us(speed: Speed) -> float | None:
    """The shortest time by all clocks, of which two contradict each other.

    None if the calls shared their output, or if the judge's slope is no time.
    """
    if speed.outside is None or speed.outside.shares_outputs or not speed.outside.median_us > 0:
        return None
    times_us = [speed.device.median_us, speed.outside.median_us, speed.outside.whole_us]
    if speed.profiler is not None:
        offset_us = speed.profiler.clock_offset_us
        times_us.append(max(0.0, speed.profiler.profiler_us + min(0.0, offset_us)))
    return min(times_us)


def tampering_of(period_us: float, outside: OutsideTime) -> str:
    """Return how the two clocks prove that the candidate's own clock was tampered with; empty if they do not.

    The slope cancels what is constant, so 5 % beyond its own uncertainty are proof.  A whole run contains its message,
    which a busy machine delays, so that only 25 % are.
    """
    least_us = outside.median_us * (1 - 2 * (1 if outside.precision is None else outside.precision))
    by_slope = outside.proof_us is not None and period_us < (1 - SHARE) * (least_us - CLOCK_US)
    by_run = period_us < (1 - PROVEN_SHARE) * (outside.whole_us - CLOCK_US - outside.message_us / max(1, outside.calls))
    if not (by_slope or by_run):
        return ""
    judged_us = outside.median_us if by_slope else outside.whole_us
    return (
        f"a call takes {period_us:.2f} us by the clock of its own process and {judged_us:.2f} us by the judge's clock"
        f"{_shorter_by(period_us, judged_us)}"
    )


def proof_limit_of(outside: OutsideTime, fill_us: float, proof_calls: int) -> float:
    """The longest time per call that is allowed in the proof sample of a measurement."""
    run_us = outside.calls * (outside.whole_us - outside.median_us)
    return proof_limit_us(outside.median_us, fill_us, proof_calls, run_us, outside.message_us)


def proof_limit_us(call_us: float, fill_us: float, calls: int, run_us: float, most_run_us: float) -> float:
    """The longest time per call that is allowed where each of `calls` calls writes an output of its own.

    A call takes `call_us` where outputs are written again and again.  Outputs of their own do not stay in L2: to write
    one to memory takes the judge `fill_us`.  A run contains `run_us` besides its calls: messages and copies.  A
    candidate could make them seem longer, so that they count as `most_run_us` at most.
    """
    besides_us = min(most_run_us, RUN_SHARE * max(0.0, run_us) + RUN_US)
    return PROOF_SHARE * call_us + fill_us + CLOCK_US + besides_us / calls


def _shorter_by(inside_us: float, outside_us: float) -> str:
    """Say by how much the candidate's own clock is too short, if that is more than 5 %."""
    if not 0 < inside_us < (1 - SHARE) * outside_us:
        return ""
    return f", which is {100 * (1 - inside_us / outside_us):.0f} % shorter"


# -- the profiler's clock ---------------------------------------------------------------------------------------------


def _compare(period_us: float, profiler: ProfilerTime, share: float) -> Agreement:
    """Compare the period with the profiler's durations.

    For long nodes (30 us or more on average), the sum of durations must be within 5 % of the period.  For short nodes,
    `clock_offset_us`, which was measured on as many kernels of the same launch geometry, is added first.  The
    difference may then be `SHORT_US` per node, or 5 % if that is more.

    The profiler may be longer by the `share`.  Under a power cap, this is more than 5 %.  The profiler reads after half
    a second of load without a pause, and between the samples of a period there are pauses.  Therefore, the profiler's
    calls run at lower clocks.
    """
    count = sum(node.count for node in profiler.nodes)
    if profiler.missing_count or not count:
        return Agreement(valid=False, reason=f"the profiler lost {profiler.missing_count} records")
    if profiler.profiler_us / count >= LONG_NODE_US:
        profiled_us, least_allowed_us = profiler.profiler_us, 0.0
        profiled = f"profiler {profiler.profiler_us:.1f} us"
    else:
        profiled_us, least_allowed_us = profiler.profiler_us + profiler.clock_offset_us, SHORT_US * count
        profiled = f"profiler {profiler.profiler_us:.2f} us, clock offset {profiler.clock_offset_us:+.2f} us"
    difference = period_us - profiled_us
    allowed = max(least_allowed_us, (share if difference < 0 else SHARE) * period_us)
    return Agreement(
        valid=abs(difference) <= allowed,
        reason=f"period {period_us:.2f} us, {profiled}: difference {difference:+.2f} us, allowed {allowed:.2f} us",
        least_us=min(period_us, profiled_us),
    )


def _throttled_or_branched(speed: Speed) -> str:
    """Return why the period does not count: a throttled GPU, kernels that are not one chain, or other timed kernels."""
    if speed.device.is_throttled:
        return f"throttled: {speed.device.dropped} samples were dropped"
    if speed.order == "branches":
        return "the kernels of the captured call are not one chain"
    return speed.graphs_differ


def _wrong_kernels(variant: str, role: str, speed: Speed) -> str:
    """Return what is wrong with the launched kernels: another backend's kernel, or torch's kernel in a candidate."""
    names = [launch.mangled for launch in speed.launches]
    names += [node.name for node in speed.profiler.nodes] if speed.profiler else []
    expected = BACKEND_KERNELS.get(variant)
    if names and expected and not any(expected in name for name in names):
        return f"{variant} launched {', '.join(names)}; no name contains {expected!r}"
    delegated = [name for name in names if any(part in name for part in TORCH_ATTENTION)]
    if role != "baseline" and delegated:
        return f"it launches torch's attention kernel {delegated[0]}"
    return ""

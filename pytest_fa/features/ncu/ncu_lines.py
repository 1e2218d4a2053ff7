"""The lines of profiles in the terminal."""

from __future__ import annotations

import re

from pytest_fa.features.ncu.nsight_report import DURATION, CountedKernel, CounterDifference, NsightReport
from pytest_fa.records.record import Record
from pytest_fa.table.tool_lines import short_name

TITLE = "Nsight Compute profiles, with warm caches and unlocked clocks (the durations are not benchmark times)"
MAX_DIFFERENCES = 5
MAX_LINES = 3

# The counters of the headline: label, alternative names, of which the first counted one is shown, and format.
HEADLINE: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("SM", ("sm__throughput.avg.pct_of_peak_sustained_elapsed",), "{:.0f} %"),
    (
        "tensor",
        (
            "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
            "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
            "sm__pipe_tensor_subpipe_hmma_cycles_active.avg.pct_of_peak_sustained_active",
        ),
        "{:.0f} %",
    ),
    ("exp", ("sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",), "{:.0f} %"),
    ("memory", ("gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",), "{:.0f} %"),
    ("DRAM", ("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",), "{:.0f} %"),
    ("L2 hits", ("lts__t_sector_hit_rate.pct",), "{:.0f} %"),
    ("occupancy", ("sm__warps_active.avg.pct_of_peak_sustained_active",), "{:.0f} %"),
    ("regs", ("launch__registers_per_thread",), "{:.0f}"),
    ("conflicts", ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",), "{:,.0f}"),
)
_STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")


def profile_lines(records: list[Record]) -> list[str]:
    """A headline for each profile with its details below."""
    lines = [line for each in records if (report := NsightReport.of(each)) for line in _profile(each, report)]
    return [TITLE, *lines] if lines else []


def profile_properties(record: Record) -> list[tuple[str, str]]:
    """The JUnit properties of a profile: names and texts."""
    report = NsightReport.of(record)
    if not report:
        return []
    longest = report.longest
    bottleneck = longest.bottleneck.sentence if longest and longest.bottleneck else None
    properties = (("status", report.status), ("report", report.report), ("verdict", bottleneck))
    return [(f"fa.ncu.{name}", text) for name, text in properties if text]


def headline_of(kernel: CountedKernel) -> str:
    """The most important counters, as far as they were counted, and the most frequent stall reason."""
    parts = []
    for label, names, form in HEADLINE:
        value = next((kernel.counters[name] for name in names if name in kernel.counters), None)
        if value is not None:
            parts.append(f"{label} {form.format(value)}")
    stalls = {match[1]: value for name, value in kernel.counters.items() if (match := _STALL.fullmatch(name))}
    stalls.pop("selected", None)
    top = max(stalls, key=lambda reason: stalls[reason], default=None)
    return ", ".join([*parts, *([f"top stall {top} {stalls[top]:.1f}"] if top else [])])


def _profile(record: Record, profile: NsightReport) -> list[str]:
    if profile.status != "ok":
        return [f"{record.id}: not measured ({profile.status}): {profile.message}"]
    longest = profile.longest
    assert longest is not None  # noqa: S101  # a profile with status ok has kernels
    count = len(profile.kernels)
    in_kernels = f" in {count} kernels" if count > 1 else ""
    us = sum(each.counters.get(DURATION, 0.0) for each in profile.kernels) / 1000
    lines = [f"{record.id.removesuffix(f'-{profile.preset}')}: {us:.2f} us{in_kernels}; {headline_of(longest)}"]
    lines += [f"  {short_name(each.name)}: {each.bottleneck.sentence}" for each in profile.kernels if each.bottleneck]
    lines += [f"  {_phases(each)}" for each in profile.kernels if each.phases]
    lines += [f"  expected: {' '.join(profile.expect.split())}"] if profile.expect else []
    if profile.baseline and profile.differences:
        shown = "; ".join(map(_difference, profile.differences[:MAX_DIFFERENCES]))
        lines.append(f"  compared with {profile.baseline} (this kernel / {profile.baseline}): {shown}")
    elif profile.baseline_missing:
        lines.append(f"  not compared with {profile.baseline or 'SDPA'}: {profile.baseline_missing}")
    lines.append(f"  report: {profile.report} ({profile.preset}, {profile.seconds:.1f} s)")
    return [*lines, *([f"  counters not available: {', '.join(profile.dropped)}"] if profile.dropped else [])]


def _phases(kernel: CountedKernel) -> str:
    """The share of stall samples in each phase, and the lines with the most samples."""
    total = sum(kernel.phases.values())
    shares = ", ".join(f"{phase} {100 * count / total:.0f} %" for phase, count in kernel.phases.items())
    lines = ", ".join(
        f"{each.file}:{each.line} {100 * each.samples / total:.0f} %" for each in kernel.lines[:MAX_LINES]
    )
    return f"stall samples by phase ({total} samples, an estimate and no times): {shares}; most at {lines}"


def _difference(difference: CounterDifference) -> str:
    return f"{difference.label} {figure_text(difference.ours)} / {figure_text(difference.theirs)}"


def figure_text(value: float) -> str:
    """A counter with three digits, or as a whole number from 100 on."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"  # noqa: PLR2004  # three digits

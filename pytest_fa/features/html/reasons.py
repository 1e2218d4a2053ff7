"""Why a kernel takes its time: the bottleneck that Nsight's counters show, SDPA's counters, and phases by ablation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pytest_fa.features.ncu.ncu_lines import figure_text, headline_of
from pytest_fa.features.ncu.nsight_report import NsightReport
from pytest_fa.records.record import Record
from pytest_fa.table.tool_lines import short_name

PHASE_BAR_WIDTH = 200  # pixels
MAX_COUNTERS = 12
MAX_PROFILES = 200


class CounterRow(NamedTuple):
    """One counter of a kernel and of SDPA's."""

    label: str
    ours: str
    theirs: str


class PhaseBar(NamedTuple):
    """One phase: its name, the length of its bar in pixels, and its figure."""

    name: str
    bar: int
    text: str


class ProfilePart(NamedTuple):
    """What Nsight Compute says about one variant at one shape."""

    title: str
    sentences: tuple[str, ...]
    baseline: str
    counters: tuple[CounterRow, ...]
    stalls: tuple[PhaseBar, ...]


class AblationPart(NamedTuple):
    """How much faster a variant is at one shape without each of its phases."""

    title: str
    phases: tuple[PhaseBar, ...]


def profile_parts(records: Iterable[Record]) -> tuple[ProfilePart, ...]:
    """One part for each Nsight report; candidates first."""
    profiled = [(record, report) for record in records if (report := NsightReport.of(record))]
    profiled.sort(key=lambda pair: pair[0].role != "candidate")
    return tuple(_profile_part(record, report) for record, report in profiled[:MAX_PROFILES])


def ablation_parts(records: Iterable[Record]) -> tuple[AblationPart, ...]:
    """One part for each variant and shape with ablations."""
    times: dict[tuple[str, str], float] = {}
    phases: dict[tuple[str, str], dict[str, float]] = {}
    for record in records:
        if record.case and record.speed:
            times[(record.variant, record.case.shape_id)] = record.speed.device.median_us
            if record.ablation:
                key = (record.ablation.parent, record.case.shape_id)
                phases.setdefault(key, {})[record.ablation.phase] = record.speed.device.median_us
    return tuple(_ablation_part(key, times[key], ablated) for key, ablated in phases.items() if key in times)


def _ablation_part(key: tuple[str, str], whole_us: float, ablated_us: dict[str, float]) -> AblationPart:
    saved = sorted(((whole_us - us, phase) for phase, us in ablated_us.items()), reverse=True)
    bars = [
        PhaseBar(
            f"without {phase}",
            max(0, round(PHASE_BAR_WIDTH * us / whole_us)),
            f"{-us:+.2f} us, {-100 * us / whole_us:+.0f} %",
        )
        for us, phase in saved
    ]
    return AblationPart(f"{key[0]} at {key[1]}: {whole_us:.2f} us", tuple(bars))


def _profile_part(record: Record, report: NsightReport) -> ProfilePart:
    shape = record.case.shape_id if record.case else record.id
    title = f"{record.variant} at {shape} ({report.preset})"
    if report.longest is None:
        return ProfilePart(title, (f"not measured ({report.status}): {report.message}",), "", (), ())
    kernels = [(short_name(each.name), each.bottleneck) for each in report.kernels]
    sentences = [f"{name}: {bottleneck.sentence}" for name, bottleneck in kernels if bottleneck]
    sentences.append(headline_of(report.longest))
    if report.expect:
        sentences.append(f"the manifest expects: {' '.join(report.expect.split())}")
    return ProfilePart(title, tuple(filter(None, sentences)), report.baseline or "", _counters(report), _stalls(report))


def _counters(report: NsightReport) -> tuple[CounterRow, ...]:
    """The counters that differ most from the baseline's."""
    return tuple(
        CounterRow(each.label, figure_text(each.ours), figure_text(each.theirs))
        for each in report.differences[:MAX_COUNTERS]
    )


def _stalls(report: NsightReport) -> tuple[PhaseBar, ...]:
    """The share of stall samples in each phase of the longest kernel."""
    phases = report.longest.phases if report.longest else {}
    total = sum(phases.values())
    return tuple(
        PhaseBar(phase, round(PHASE_BAR_WIDTH * count / total), f"{100 * count / total:.0f} %")
        for phase, count in phases.items()
        if total
    )

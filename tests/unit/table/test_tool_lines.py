"""The lines of profiles, sanitizers and ablations."""

from __future__ import annotations

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.features.github.step_summary import summary_markdown
from pytest_fa.features.ncu.ncu_lines import profile_lines, profile_properties
from pytest_fa.features.ncu.nsight_report import (
    DURATION,
    Bottleneck,
    CountedKernel,
    CounterDifference,
    NsightReport,
    SourceLine,
)
from pytest_fa.features.sanitize.sanitize_lines import sanitizer_lines, sanitizer_properties
from pytest_fa.features.sanitize.sanitized import Sanitized
from pytest_fa.records.record import Ablation, Record
from pytest_fa.table.tool_lines import ablation_lines
from tests.factories import RECORD

KERNEL = CountedKernel(
    "void ns::a_kernel<int>(int)",
    {DURATION: 9056.0, "sm__throughput.avg.pct_of_peak_sustained_elapsed": 7.25},
    Bottleneck("latency", "latency-bound: no unit is near its peak", {}),
    (SourceLine("kernel.cu", 12, 30, ""),),
    {"softmax": 60, "P.V": 40},
)
PROFILE = NsightReport(
    "ok",
    "",
    "verdict",
    "ncu 1",
    6.25,
    (),
    (KERNEL,),
    report="artifacts/ncu/x.ncu-rep",
    expect="fast\n  enough",
    baseline="sdpa_cudnn",
    differences=(CounterDifference("blocks", 128.0, 32.0, 4.0), CounterDifference("L2 hits, %", 68.5, 46.6, 1.0)),
)
DENIED = msgspec.structs.replace(PROFILE, status="busy", message="taken", kernels=())


def record(profile: NsightReport | None = None, sanitized: Sanitized | None = None, **changes: object) -> Record:
    """A record of a profile or of a sanitizer run."""
    made = msgspec.structs.replace(RECORD, id="x", **changes)
    for added in (profile, sanitized):
        made = added.to(made) if added else made
    return made


def test_a_profile_is_a_headline_with_details(snapshot: SnapshotAssertion) -> None:
    """Below the headline are the bottleneck, the phases, the expectation, the comparison with SDPA, and the report."""
    assert snapshot == profile_lines([record(PROFILE)])[1:]


@pytest.mark.parametrize("profile", [PROFILE, DENIED], ids=["ok", "busy"])
def test_what_was_not_counted_has_no_number(profile: NsightReport) -> None:
    """A profile that failed gives its reason, and no time in the terminal, JUnit or the step summary."""
    profiled = record(profile)
    texts = ["\n".join(profile_lines([profiled])), str(profile_properties(profiled)), summary_markdown([profiled])]
    assert [("9.06" in text, "latency-bound" in text) for text in texts] == (
        [(True, True), (False, True), (True, True)] if profile.status == "ok" else [(False, False)] * 3
    )
    assert ("not measured (busy): taken" in texts[0]) == (profile.status == "busy")


def test_a_clean_run_and_a_finding(snapshot: SnapshotAssertion) -> None:
    """A sanitizer run has one line with its status, and its findings below it."""
    clean = Sanitized("memcheck", "clean", "", "1", 2.0, (), 0, (), "a.log")
    race = Sanitized("racecheck", "found", "1 error or hazard", "1", 2.0, (), 1, ("Race reported",), "b.log")
    assert snapshot == sanitizer_lines([record(sanitized=clean), record(sanitized=race)])


def test_a_phase_is_measured_by_ablation() -> None:
    """An ablation's line has the difference to its parent's time; without the parent's time there is no line."""
    assert RECORD.speed is not None
    ablated_time = msgspec.structs.replace(RECORD.speed.device, median_us=8.2)
    ablated = record(
        variant="no_softmax",
        speed=msgspec.structs.replace(RECORD.speed, device=ablated_time),
        ablation=Ablation("softmax", RECORD.variant),
    )
    line, note = ablation_lines([RECORD, ablated])
    assert f"{RECORD.variant} 10.25 us, without softmax 8.20 us (no_softmax): +2.05 us, 20 %, measured" in line
    assert "need not add up" in note
    assert ablation_lines([ablated]) == []


def test_without_tools_there_are_no_lines() -> None:
    """A run without profiles and sanitizers has no lines and no properties."""
    assert [*profile_lines([RECORD]), *sanitizer_lines([RECORD])] == []
    assert [*profile_properties(RECORD), *sanitizer_properties(RECORD)] == []

"""The lines of profiles, sanitizers and ablations."""

from __future__ import annotations

import msgspec
import pytest

from pytest_fa.records.record import Ablation, Record
from pytest_fa.records.tool_results import (
    DURATION,
    Bottleneck,
    CountedKernel,
    CounterDifference,
    NsightReport,
    Sanitized,
    SourceLine,
)
from pytest_fa.report.tool_lines import ablation_lines, profile_lines, summary_markdown, tool_properties
from tests.factories import RECORD

KERNEL = CountedKernel(
    "void ns::a_kernel<int>(int)",
    {DURATION: 9056.0, "sm__throughput.avg.pct_of_peak_sustained_elapsed": 7.25},
    Bottleneck("latency", "latency-bound: no unit is busy", {}),
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
    """A record of a tool."""
    return msgspec.structs.replace(RECORD, id="x", nsight=profile, sanitized=sanitized, **changes)


def test_a_profile_is_one_line_and_what_it_means() -> None:
    """Headline and report; verdict, stages as an estimate, expectation, and SDPA beside."""
    assert profile_lines([record(PROFILE)])[1:] == [
        "x: 9.06 us; SM 7 %",
        "  a_kernel: latency-bound: no unit is busy",
        "  where warps stood, estimated from 100 samples (no times): softmax 60 %, P.V 40 %; most on kernel.cu:12 30 %",
        "  expected: fast enough",
        "  beside sdpa_cudnn: blocks 128 / 32; L2 hits, % 68.5 / 46.6",
        "  report: artifacts/ncu/x.ncu-rep (verdict, 6.2 s)",
    ]


@pytest.mark.parametrize("profile", [PROFILE, DENIED], ids=["ok", "busy"])
def test_what_was_not_counted_has_no_number(profile: NsightReport) -> None:
    """A profile that failed says why, and shows no time in the terminal, JUnit or the summary."""
    found = record(profile)
    texts = ["\n".join(profile_lines([found])), str(tool_properties(found)), summary_markdown([found])]
    assert [("9.06" in text, "latency-bound" in text) for text in texts] == (
        [(True, True), (False, True), (True, True)] if profile.status == "ok" else [(False, False)] * 3
    )
    assert ("not measured (busy): taken" in texts[0]) == (profile.status == "busy")


def test_a_clean_run_and_a_finding() -> None:
    """Clean is a word; findings stand below it."""
    clean = Sanitized("memcheck", "clean", "", "1", 2.0, (), 0, (), "a.log")
    found = Sanitized("racecheck", "found", "1 error or hazard", "1", 2.0, (), 1, ("Race reported",), "b.log")
    assert profile_lines([record(sanitized=clean), record(sanitized=found)]) == [
        "compute-sanitizer",
        "x: clean (2.0 s; a.log)",
        "x: found 1 error or hazard (2.0 s; b.log)",
        "  Race reported",
    ]


def test_a_stage_is_measured_by_leaving_it_out() -> None:
    """The difference of two measured times; nothing where the whole was not timed."""
    assert RECORD.speed is not None
    part = msgspec.structs.replace(RECORD.speed.device, median_us=8.2)
    left = record(
        variant="no_softmax",
        speed=msgspec.structs.replace(RECORD.speed, device=part),
        ablation=Ablation("softmax", RECORD.variant),
    )
    line, note = ablation_lines([RECORD, left])
    assert f"{RECORD.variant} 10.25 us, without softmax 8.20 us (no_softmax): +2.05 us, 20 %, measured" in line
    assert "need not add up" in note
    assert ablation_lines([left]) == []


def test_no_tool_no_lines() -> None:
    """A plain run has none of this."""
    assert (profile_lines([RECORD]), summary_markdown([RECORD]), tool_properties(RECORD)) == ([], "", [])

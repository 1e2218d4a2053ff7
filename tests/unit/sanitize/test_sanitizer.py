"""compute-sanitizer: clean only with a summary that says so, and never green where nothing was looked at."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from pytest_fa.catalog.discover import discover
from pytest_fa.catalog.properties import sanitizer_case
from pytest_fa.catalog.select import select_variants
from pytest_fa.catalog.variant import Suppression, Variant
from pytest_fa.records.tool_results import Sanitized
from pytest_fa.sanitize import sanitizer
from pytest_fa.sanitize.run import suppressed
from pytest_fa.sanitize.sanitizer import SanitizedChild, find_sanitizer, findings, not_covered, sanitize, summary_count
from tests.factories import BUILD, KERNEL, RECORDED

KERNELS = Path(__file__).parents[3] / "kernels"


def run(fakes: Path, tmp_path: Path, tool: str, happening: str | None = None) -> Sanitized:
    """One tool under the program that plays it."""
    find_sanitizer.cache_clear()
    environment = {"FAKE_SANITIZER": happening} if happening else {}
    found = sanitize(
        tool, SanitizedChild(("-m", "pytest_fa.sanitize.plain_call", "job.json"), environment, tmp_path / "log")
    )
    find_sanitizer.cache_clear()
    assert not found.command or found.command[0] == str(fakes / "compute-sanitizer")
    return found


@pytest.mark.parametrize(
    ("tool", "happening", "status", "count"),
    [
        ("memcheck", None, "clean", 0),
        ("racecheck", None, "clean", 0),
        ("memcheck", "memcheck-found", "found", 2),
        ("racecheck", "racecheck-found", "found", 12),
        ("synccheck", "cut-off", "incomplete", None),
        ("initcheck", "writes no log", "incomplete", None),
        ("memcheck", "refused", "not measured", None),
    ],
)
def test_each_ending(
    fakes: Path, tmp_path: Path, tool: str, happening: str | None, status: str, count: int | None
) -> None:
    """A summary of zero is clean, one of more is found, none is a failure, a refusal is no measurement."""
    found = run(fakes, tmp_path, tool, happening)
    assert (status, count) == (found.status, found.count)
    assert bool(found.message) == (status != "clean")


def test_time_is_limited(fakes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not end is killed, and is not clean."""
    monkeypatch.setattr(sanitizer, "LIMIT_SECONDS", 0.5)
    found = run(fakes, tmp_path, "memcheck", "hangs")
    assert (found.status, found.seconds < 5) == ("incomplete", True)


def test_without_the_program_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the sentence says what to install."""
    monkeypatch.setattr(sanitizer, "find_sanitizer", lambda: None)
    found = sanitize("memcheck", SanitizedChild((), dict(os.environ), tmp_path / "log"))
    assert (found.status, "pip install" in found.message) == ("not measured", True)


def test_errors_leave_with_a_status_of_their_own(fakes: Path, tmp_path: Path) -> None:
    """By default the tool leaves with 0 whatever it found."""
    command = run(fakes, tmp_path, "memcheck").command
    assert command[command.index("--error-exitcode") + 1] == "86"


def test_findings_say_what_and_where() -> None:
    """The head of each report with the line below it, once."""
    text = (RECORDED / "sanitizer" / "memcheck-found.log").read_text(encoding="utf-8")
    first, second = findings(text + text)
    assert "Invalid __global__ read of size 2 bytes at void minimal_kernel<" in first
    assert "kernel.cu:61" in first
    assert second.startswith("Program hit CUDA_ERROR_LAUNCH_FAILED")


def test_no_summary_is_not_zero() -> None:
    """None where there is none; several are added up."""
    both = "ERROR SUMMARY: 1 error\nRACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)"
    assert [None, 0, 3] == [summary_count(text) for text in ("=", "ERROR SUMMARY: 0 errors", both)]


def test_tma_is_not_covered_by_racecheck() -> None:
    """Its silence about such code means nothing; other tools and other code are covered."""
    tma = msgspec.structs.replace(BUILD, kernels=(msgspec.structs.replace(KERNEL, instructions={"UTMALDG": 2}),))
    assert "UTMALDG" in (not_covered("racecheck", tma) or "")
    assert [None] * 3 == [not_covered("memcheck", tma), not_covered("racecheck", BUILD), not_covered("racecheck", None)]


def test_suppressed_findings_are_listed_and_counted() -> None:
    """As many as the manifest explains are none; one more is, and a variant that is meant to be wrong explains none."""
    (variant,) = select_variants(discover((KERNELS,)), ("ws_p2",))
    assert isinstance(variant, Variant)
    two = Sanitized("racecheck", "found", "2 errors", "1", 1.0, (), 2, ("Race reported",))
    told = msgspec.structs.replace(
        variant, suppressions={"racecheck": Suppression(2, "the tool does not know mbarriers")}
    )
    strict = msgspec.structs.replace(variant, suppressions={"racecheck": Suppression(1, "as before")})
    wrong = msgspec.structs.replace(told, role="wrong")
    statuses = [suppressed(two, each).status for each in (told, strict, wrong, variant)]
    assert ["suppressed", "found", "found", "found"] == statuses
    assert "does not know mbarriers" in suppressed(two, told).message
    assert suppressed(two, told).findings == two.findings


@pytest.mark.parametrize(("name", "sequence"), [("ws_p2", 193), ("minimal", 193), ("noop", 193)])
def test_the_case_has_three_tiles_and_a_tail(name: str, sequence: int) -> None:
    """Small, with a tile that follows another in the same buffer and one that is not full."""
    (variant,) = select_variants(discover((KERNELS,)), (name,))
    assert isinstance(variant, Variant)
    case = sanitizer_case(variant)
    assert (case.seq_k, case.batch, variant.refuses(case)) == (sequence, 1, None)

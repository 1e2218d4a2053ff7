"""compute-sanitizer: `clean` requires a summary that says zero, and a tool that did not run never passes."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from pytest_fa.catalog.discover import discover
from pytest_fa.catalog.select import select_variants
from pytest_fa.catalog.variant import Suppression, Variant
from pytest_fa.features.sanitize import sanitizer
from pytest_fa.features.sanitize.sanitize import suppressed
from pytest_fa.features.sanitize.sanitized import Sanitized
from pytest_fa.features.sanitize.sanitized_cases import sanitizer_case
from pytest_fa.features.sanitize.sanitizer import (
    SanitizedChild,
    find_sanitizer,
    findings,
    not_covered,
    sanitize,
    summary_count,
)
from tests.factories import BUILD, KERNEL, RECORDED

KERNELS = Path(__file__).parents[3] / "kernels"


def run(fakes: Path, tmp_path: Path, tool: str, happening: str | None = None) -> Sanitized:
    """Run one tool with the fake compute-sanitizer, which replays recorded output."""
    find_sanitizer.cache_clear()
    environment = {"FAKE_SANITIZER": happening} if happening else {}
    sanitized = sanitize(
        tool,
        SanitizedChild(("-m", "pytest_fa.features.sanitize.plain_call", "job.json"), environment, tmp_path / "log"),
    )
    find_sanitizer.cache_clear()
    assert not sanitized.command or sanitized.command[0] == str(fakes / "compute-sanitizer")
    return sanitized


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
    """The status follows from the summary: zero is clean, more is found, no summary is incomplete or not measured."""
    sanitized = run(fakes, tmp_path, tool, happening)
    assert (status, count) == (sanitized.status, sanitized.count)
    assert bool(sanitized.message) == (status != "clean")


def test_time_is_limited(fakes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that does not end is killed at the time limit and is not clean."""
    monkeypatch.setattr(sanitizer, "LIMIT_SECONDS", 0.5)
    sanitized = run(fakes, tmp_path, "memcheck", "hangs")
    assert (sanitized.status, sanitized.seconds < 30) == ("incomplete", True)


def test_without_the_program_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without compute-sanitizer the status is `not measured`, and the message says what to install."""
    monkeypatch.setattr(sanitizer, "find_sanitizer", lambda: None)
    sanitized = sanitize("memcheck", SanitizedChild((), dict(os.environ), tmp_path / "log"))
    assert (sanitized.status, "pip install" in sanitized.message) == ("not measured", True)


def test_findings_have_an_exit_status(fakes: Path, tmp_path: Path) -> None:
    """The command gives findings the exit status 86; by default the tool would exit with 0."""
    command = run(fakes, tmp_path, "memcheck").command
    assert command[command.index("--error-exitcode") + 1] == "86"


def test_findings_say_what_and_where() -> None:
    """Each distinct finding is listed once, as its first line with the line below it."""
    text = (RECORDED / "sanitizer" / "memcheck-found.log").read_text(encoding="utf-8")
    first, second = findings(text + text)
    assert "Invalid __global__ read of size 2 bytes at void minimal_kernel<" in first
    assert "kernel.cu:61" in first
    assert second.startswith("Program hit CUDA_ERROR_LAUNCH_FAILED")


def test_no_summary_is_not_zero() -> None:
    """Without a summary the count is None; the counts of several summaries are added."""
    both = "ERROR SUMMARY: 1 error\nRACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)"
    assert [None, 0, 3] == [summary_count(text) for text in ("=", "ERROR SUMMARY: 0 errors", both)]


def test_tma_and_clusters_are_not_covered() -> None:
    """Neither racecheck nor initcheck covers TMA copies, and racecheck no clusters; other code is covered."""
    tma, cluster = (
        msgspec.structs.replace(BUILD, kernels=(msgspec.structs.replace(KERNEL, instructions={opcode: 2}),))
        for opcode in ("UTMASTG", "STAS")
    )
    for tool in ("racecheck", "initcheck"):
        assert "(UTMASTG in the machine code)" in (not_covered(tool, tma) or "")
        assert (not_covered(tool, BUILD), not_covered(tool, None)) == (None, None)
    assert "STAS" in (not_covered("racecheck", cluster) or "")
    assert (not_covered("initcheck", cluster), not_covered("memcheck", tma)) == (None, None)


def test_suppressed_findings_are_listed_and_counted() -> None:
    """Findings up to the manifest's count are suppressed but still listed, except for a variant of role `wrong`."""
    (variant,) = select_variants(discover((KERNELS,)), ("ws_p2",))
    assert isinstance(variant, Variant)
    two_errors = Sanitized("racecheck", "found", "2 errors", "1", 1.0, (), 2, ("Race reported",))
    allows_two = msgspec.structs.replace(
        variant, suppressions={"racecheck": Suppression(2, "the tool does not know mbarriers")}
    )
    allows_one = msgspec.structs.replace(variant, suppressions={"racecheck": Suppression(1, "as before")})
    wrong = msgspec.structs.replace(allows_two, role="wrong")
    statuses = [suppressed(two_errors, each).status for each in (allows_two, allows_one, wrong, variant)]
    assert ["suppressed", "found", "found", "found"] == statuses
    assert "does not know mbarriers" in suppressed(two_errors, allows_two).message
    assert suppressed(two_errors, allows_two).findings == two_errors.findings


@pytest.mark.parametrize(("name", "sequence"), [("ws_p2", 193), ("minimal", 193), ("noop", 193)])
def test_the_case_has_three_tiles_and_a_tail(name: str, sequence: int) -> None:
    """The case for sanitizers is small, reuses a tile's buffer, and has a last tile that is not full."""
    (variant,) = select_variants(discover((KERNELS,)), (name,))
    assert isinstance(variant, Variant)
    case = sanitizer_case(variant)
    assert (case.seq_k, case.batch, variant.refuses(case)) == (sequence, 1, None)

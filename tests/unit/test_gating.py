"""The gate's flow with processes that are pretended: what is not believed, not captured, or dropped."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.variant import Variant
from pytest_fa.gating import Question, hold_gate
from pytest_fa.jobs import Arm, ContestBlocks, GateJob, GateResult
from pytest_fa.report.record import Agreement, Record, read_record, to_json
from pytest_fa.session import CannotRun
from tests.conftest import PYTHON_MANIFEST, WriteVariant
from tests.unit.report.test_table import record, speed

CASE = parse_case("b1h8s512d64-fp16-seed0")


class PretendedSession:
    """As much of a session as a gate asks: records of a pilot, and processes that give what they are told."""

    def __init__(self, folder: Path, records: dict[str, Record], result: GateResult) -> None:
        self.options: Any = type("Options", (), {"profiles": folder, "gate_baseline": "other"})
        self.environment: Any = type("Here", (), {"gpu": None})
        self.workers = self
        self.plan: Any = None
        self.records, self.result = records, result
        self.jobs: list[GateJob] = []

    def run_case(self, variant: Variant, *_: object) -> Record:
        """The pilot's record; without one the variant cannot run."""
        if variant.name not in self.records:
            raise CannotRun(f"{variant.name} does not run on this GPU")
        return self.records[variant.name]

    def run_afresh(self, job: GateJob) -> GateResult:
        """One process."""
        self.jobs.append(job)
        return self.result

    def device_of(self, _: Variant) -> str:
        """A CPU."""
        return "cpu"

    def policy_of(self, _: Variant) -> str:
        """The default."""
        return "measured"

    def watchdog_seconds(self, variant: Variant, _: str) -> float:
        """More for one than for the other."""
        return 7.0 if variant.name == "mine" else 70.0

    def arm(self, variant: Variant) -> Arm:
        """A Python variant needs no library."""
        return Arm(variant, None)

    def record(self, kind: Any, variant: str, role: str, _: object, result: Any, leaves: Any) -> Record:
        """A record with the result's words."""
        changes = {"kind": kind, "role": role, "leaves": leaves, "outcome": result.outcome, "message": result.message}
        return msgspec.structs.replace(record(variant), **changes)


def blocks(*rows: float, dropped: int = 0) -> GateResult:
    """A process of one contest."""
    same = tuple(0.0001 * index for index in range(len(rows)))
    return GateResult("ok", "", (ContestBlocks(rows, same, dropped, 9.0, 10.0, "pretended"),))


@pytest.fixture
def variants(write_variant: WriteVariant, tmp_path: Path) -> tuple[Variant, Variant]:
    """A candidate and what it is gated against."""
    found = []
    for name in ("mine", "other"):
        folder = write_variant(name, manifest=PYTHON_MANIFEST, **{"entry.py": ""})
        found += read_manifest(folder / "variant.yaml", tmp_path / "kernels")
    return found[0], found[1]


def hold(variants: tuple[Variant, Variant], tmp_path: Path, result: GateResult, **doubts: object) -> tuple[Record, int]:
    """The gate's record, and how many processes it took; `doubts` are the candidate's."""
    mine, other = variants
    times = {
        "mine": record("mine", kind="speed", speed=msgspec.structs.replace(speed(9.0), **doubts)),
        "other": record("other", kind="speed", speed=speed(10.0)),
    }
    session = PretendedSession(tmp_path, times, result)
    found = hold_gate(session, mine, Question(0.95, other, (CASE,)), lambda _: None)  # type: ignore[arg-type]
    assert all(job.watchdog_seconds == 70.0 for job in session.jobs)
    return found, len(session.jobs)


def test_a_clear_difference_passes(variants: tuple[Variant, Variant], tmp_path: Path) -> None:
    """Ten percent faster in every process: PASS after six."""
    found, count = hold(variants, tmp_path, blocks(*[-0.105] * 8))
    assert (found.outcome, count) == ("ok", 6)


@pytest.mark.parametrize(
    ("doubts", "reason"),
    [
        ({"agreement": Agreement(valid=False, reason="impossible")}, "is not confirmed: impossible"),
        ({"order": "programmatic"}, "a period that is never gated"),
    ],
)
def test_a_time_that_is_doubted_is_not_gated(
    variants: tuple[Variant, Variant], tmp_path: Path, doubts: dict[str, object], reason: str
) -> None:
    """No process is started for a time that the tool itself does not believe."""
    found, count = hold(variants, tmp_path, blocks(*[-0.105] * 8), **doubts)
    assert (found.outcome, count, reason in found.message) == ("inconclusive", 0, True)


def test_a_baseline_that_cannot_run_is_no_skip(variants: tuple[Variant, Variant], tmp_path: Path) -> None:
    """What was to be gated against does not run here: no verdict, and not a test that was left out."""
    mine, other = variants
    session = PretendedSession(tmp_path, {"mine": record("mine", speed=speed(9.0))}, blocks(0.0))
    found = hold_gate(session, mine, Question(0.95, other, (CASE,)), lambda _: None)  # type: ignore[arg-type]
    assert (found.outcome, found.message) == ("inconclusive", "other does not run on this GPU")


@pytest.mark.parametrize(
    ("agreement", "order", "ending"),
    [
        (Agreement(valid=False, reason="the clocks disagree", least_us=12.0), "chain", ("ok", 6)),
        (Agreement(valid=False, reason="the clocks disagree", least_us=10.2), "chain", ("inconclusive", 0)),
        (Agreement(valid=False, reason="the clocks disagree", least_us=math.nan), "chain", ("inconclusive", 0)),
        (Agreement(valid=False, reason="throttled"), "chain", ("inconclusive", 0)),
        (Agreement(valid=True, reason="", least_us=12.0), "programmatic", ("inconclusive", 0)),
    ],
    ids=["far", "near", "nan", "throttled", "programmatic"],
)
def test_a_doubt_about_a_slow_baseline_does_not_matter(
    variants: tuple[Variant, Variant], tmp_path: Path, agreement: Agreement, order: str, ending: tuple[str, int]
) -> None:
    """Where both of its clocks say that it is not near the fastest, it is left out by name; any other doubt matters."""
    mine, other = variants
    slow = msgspec.structs.replace(other, name="slow", role="baseline")
    other = msgspec.structs.replace(other, role="baseline")
    agreed = msgspec.structs.replace(speed(10.0), agreement=Agreement(valid=True, reason="", least_us=10.0))
    doubted = msgspec.structs.replace(speed(13.0), agreement=agreement, order=order)
    times = {"mine": speed(9.0), "other": agreed, "slow": doubted}
    records = {name: record(name, kind="speed", speed=each) for name, each in times.items()}
    session = PretendedSession(tmp_path, records, blocks(*[-0.105] * 8))
    session.plan = type("Plan", (), {"companions": (slow, other)})
    said: list[str] = []
    found = hold_gate(session, mine, Question(0.95, None, (CASE,)), said.append)  # type: ignore[arg-type]
    assert (found.outcome, len(session.jobs)) == ending
    assert all(job.contests[0].baseline.variant.name == "other" for job in session.jobs)
    if found.gate:
        (left_out,) = found.gate.left_out
        assert left_out.startswith("slow at b1h8s512d64-fp16: the clocks disagree")
        assert left_out in said[0]


def test_dropped_blocks_leave_a_record(variants: tuple[Variant, Variant], tmp_path: Path) -> None:
    """Processes that lost too many blocks end the gate without a verdict, and its record can be read again."""
    found, count = hold(variants, tmp_path, blocks(*[-0.105] * 5, dropped=3))
    assert (found.outcome, count, "slowed down in 6 processes" in found.message) == ("inconclusive", 6, True)
    assert found.gate is not None
    assert (found.gate.process_sd, found.gate.pairs[0].low) == (None, None)
    assert read_record(to_json(found)) == found


def test_a_process_that_fails_ends_the_gate(variants: tuple[Variant, Variant], tmp_path: Path) -> None:
    """What one process says is the gate's outcome."""
    found, count = hold(variants, tmp_path, GateResult("inconclusive", "cannot be captured: it waits", ()))
    assert (found.outcome, count, found.message) == ("inconclusive", 1, "cannot be captured: it waits")

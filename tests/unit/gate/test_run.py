"""The gate's flow with processes that are pretended: what is not believed, not captured, or dropped."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.variant import Variant
from pytest_fa.gate.run import Question, hold_gate
from pytest_fa.records.read import read_record
from pytest_fa.records.record import Record, to_json
from pytest_fa.records.timing import Agreement
from pytest_fa.session.builds import Builds
from pytest_fa.session.case_runner import CaseRunner
from pytest_fa.session.record_factory import RecordFactory
from pytest_fa.session.refusals import CannotRun
from pytest_fa.session.run_plan import RunPlan
from pytest_fa.worker.client import Workers
from pytest_fa.worker.jobs import GateJob, GateResult, PairBlocks
from tests.factories import PYTHON_MANIFEST, WriteVariant, options, record, speed

CASE = parse_case("b1h8s512d64-fp16-seed0")


class PretendedWorkers(Workers):
    """Every process of a gate gives the same result."""

    def __init__(self, result: GateResult) -> None:
        super().__init__()
        self.result = result
        self.jobs: list[GateJob] = []

    def run_afresh(self, job: GateJob) -> GateResult:
        """One process."""
        self.jobs.append(job)
        return self.result


class PretendedRunner(CaseRunner):
    """A case runner whose records are given, for the pilot."""

    def __init__(self, folder: Path, records: dict[str, Record], result: GateResult) -> None:
        asked = options(folder)
        workers = PretendedWorkers(result)
        super().__init__(asked, Builds(asked, RunPlan(asked)), RecordFactory(asked), workers, Workers())
        self.pilot_records, self.jobs = records, workers.jobs

    def run(self, variant: Variant, *_: object) -> Record:
        """The pilot's record; without one the variant cannot run."""
        if variant.name not in self.pilot_records:
            raise CannotRun(f"{variant.name} does not run on this GPU")
        return self.pilot_records[variant.name]

    def watchdog_seconds(self, variant: Variant, _: object) -> float:
        """More for one variant than for the other."""
        return 7.0 if variant.name == "mine" else 70.0


def blocks(*rows: float, dropped: int = 0) -> GateResult:
    """A process of one contest."""
    control = tuple(0.0001 * index for index in range(len(rows)))
    return GateResult("ok", "", (PairBlocks(rows, control, dropped, 9.0, 10.0, "pretended"),))


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
    runner = PretendedRunner(tmp_path, times, result)
    found = hold_gate(runner, mine, Question(0.95, (CASE,), (other,)), lambda _: None)
    assert all(job.watchdog_seconds == 70.0 for job in runner.jobs)
    return found, len(runner.jobs)


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
    runner = PretendedRunner(tmp_path, {"mine": record("mine", speed=speed(9.0))}, blocks(0.0))
    found = hold_gate(runner, mine, Question(0.95, (CASE,), (other,)), lambda _: None)
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
    runner = PretendedRunner(tmp_path, records, blocks(*[-0.105] * 8))
    said: list[str] = []
    found = hold_gate(runner, mine, Question(0.95, (CASE,), (slow, other)), said.append)
    assert (found.outcome, len(runner.jobs)) == ending
    assert all(job.arm_pairs[0].baseline.variant.name == "other" for job in runner.jobs)
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

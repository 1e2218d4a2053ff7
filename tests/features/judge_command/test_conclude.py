"""The verdict from records alone: it fails closed, and the first proof of a cheat counts more than other failures."""

from __future__ import annotations

import math
from collections import Counter

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.features.gate.gate import OUTCOMES
from pytest_fa.features.gate.gated import Gate, GatePair, GateVerdict
from pytest_fa.features.judge_command.conclude import (
    RunResult,
    bottlenecks_of,
    checks_of,
    conclude,
    failure_of,
    largest,
    next_steps,
    ratios_of,
    times_of,
)
from pytest_fa.features.judge_command.document import Status
from pytest_fa.features.judge_command.question import Question
from pytest_fa.features.ncu.nsight_report import Bottleneck, CountedKernel, CounterDifference, NsightReport
from pytest_fa.records.checks import Diagnosis
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.paired import PairSamples
from pytest_fa.records.record import Record
from tests.factories import CHECK, OK, SHAPE, SMALL_SHAPE, WRONG, record, variant

MINE = variant("mine")
RIGHT = record(check=OK)


def gate_record(verdict: GateVerdict) -> Record:
    """A decided gate with a pair at each of two shapes."""
    pairs = tuple(
        GatePair(PairSamples(shape, "sdpa", (), ()), ratio, ratio - 0.01, ratio + 0.01, None, None)
        for shape, ratio in ((SHAPE, 0.8), (SMALL_SHAPE, 0.9))
    )
    pilot_us = {SHAPE: {"mine": 8.0, "sdpa": 10.0}, SMALL_SHAPE: {"mine": 9.0, "sdpa": 10.0}}
    gate = Gate(1.0, verdict, "by a lot", 6, 1, 0, 0.01, None, 12.0, pilot_us, pairs)
    return record(kind="gate", outcome=OUTCOMES[verdict], added={"gate": gate})


@pytest.mark.parametrize(("verdict", "status"), [("PASS", "faster"), ("FAIL", "slower"), ("INCONCLUSIVE", "undecided")])
def test_a_gate_decides(verdict: GateVerdict, status: str) -> None:
    """Beside a case that was judged to be right, the gate's verdict is the status."""
    assert conclude(MINE, RunResult((RIGHT, gate_record(verdict)))) == (status, "mine < 1 x baseline: by a lot")


def noisy_gate(low: float, control: float, verdict: GateVerdict = "INCONCLUSIVE") -> Record:
    """A gate whose lowest possible ratio is `low`, and whose A/A control deviates by up to `control` (log-ratio)."""
    controls = tuple((control * sign,) for sign in (1.0, 1.01, 0.99, 1.0, 1.01, 0.99))
    pair = GatePair(PairSamples(SHAPE, "sdpa", (), controls), low + 0.1, low, low + 0.2, None, None)
    gate = Gate(1.0, verdict, "noisy machine", 6, 1, 0, 0.01, None, 12.0, {}, (pair,))
    return record(kind="gate", outcome=Outcome.INCONCLUSIVE, added={"gate": gate})


@pytest.mark.parametrize(
    ("gate", "status"),
    [
        (noisy_gate(2.0, 0.3), "slower"),
        (noisy_gate(1.3, 0.3), "undecided"),
        (noisy_gate(0.9, 0.01), "undecided"),
        (noisy_gate(2.0, math.nan), "undecided"),
        (noisy_gate(2.0, 0.3, "PASS"), "faster"),
    ],
    ids=["far slower", "within the noise", "not slower", "an unknown noise", "a verdict stays"],
)
def test_noise_hides_no_variant_that_is_far_slower(gate: Record, status: str) -> None:
    """Without a verdict because of noise, a variant is slower if even all of that noise would not make it faster."""
    assert conclude(MINE, RunResult((RIGHT, gate)))[0] == status


FAILURES = {outcome for outcome in Outcome if outcome.is_failure} - {Outcome.GATE_FAILED}


@pytest.mark.parametrize("outcome", sorted(FAILURES))
def test_no_failure_is_faster(outcome: Outcome) -> None:
    """A failure counts more than a gate that passed."""
    status, _ = conclude(MINE, RunResult((RIGHT, record(outcome=outcome, message="m"), gate_record("PASS"))))
    assert status not in ("faster", "slower", "undecided", "machine")


def test_a_cheat_counts_more_than_an_earlier_failure() -> None:
    """The proof of a cheat decides, also behind a wrong output."""
    run = RunResult(
        (record(outcome=Outcome.WRONG, message="m"), record(outcome=Outcome.CHEAT, message="it lied", kind="speed"))
    )
    assert conclude(MINE, run) == ("cheat", f"mine-{SHAPE}-seed0: cheat: it lied")


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (RunResult(()), ("machine", "mine was not judged: no test of it ran")),
        (RunResult((), Counter(["no GPU", "no GPU", "other"])), ("machine", "mine was not judged: no GPU")),
        (RunResult((gate_record("PASS"),)), ("machine", "mine was not judged: no test of it ran")),
        (RunResult((RIGHT,), Counter(["not gated"])), ("machine", "mine was not judged: not gated")),
        (RunResult((RIGHT, gate_record("PASS")), problem="disk full"), ("machine", "disk full")),
        (
            RunResult((RIGHT, record(kind="gate", outcome=Outcome.INCONCLUSIVE, message="no baseline"))),
            ("undecided", f"mine-{SHAPE}-seed0: no verdict: no baseline"),
        ),
    ],
    ids=["nothing ran", "not run", "a gate alone", "no gate", "a problem of the run", "a gate without a pilot"],
)
def test_without_a_verdict_nothing_is_faster(run: RunResult, expected: tuple[str, str]) -> None:
    """Where a right case or a decided gate is missing, the status says that there is no verdict."""
    assert conclude(MINE, run) == expected


def test_the_largest_ratio_decides() -> None:
    """`ratio` is the largest one of all shapes; one that is not finite counts as larger."""
    ratios = ratios_of(Gate.of(gate_record("PASS")))
    assert [(each.shape, each.value, each.confidence) for each in ratios] == [
        (SHAPE, 0.8, 0.995),
        (SMALL_SHAPE, 0.9, 0.995),
    ]
    assert largest(ratios) == ratios[1]
    unknown = msgspec.structs.replace(ratios[0], value=None)
    assert (largest((unknown, ratios[1])), largest(())) == (unknown, None)


def test_the_document_has_the_times_of_the_pilot() -> None:
    """The times are those of the variant and of the baselines, before the gate."""
    assert [
        (each.shape, each.candidate_us, each.baselines_us) for each in times_of(MINE, Gate.of(gate_record("PASS")))
    ] == [
        (SHAPE, 8.0, {"sdpa": 10.0}),
        (SMALL_SHAPE, 9.0, {"sdpa": 10.0}),
    ]


def test_checks_count_cases_and_properties() -> None:
    """Cases and properties are counted; builds and gates are not."""
    records = (record(kind="build"), RIGHT, record(kind="property"), record(outcome=Outcome.WRONG), gate_record("PASS"))
    checks = checks_of(RunResult(records, Counter(["x", "x"])))
    assert (checks.passed, checks.failed, checks.not_run) == (2, 1, {"x": 2})


def test_a_failure_has_its_place_and_cause() -> None:
    """A wrong output has the bounds, the place and the likely cause; a failed build has none of them."""
    diagnosis = Diagnosis(("map",), "scale missing", (), "")
    wrong = record(outcome=Outcome.WRONG, message="m", caught_by=("max",), check=CHECK, diagnosis=diagnosis)
    failure = failure_of(wrong)
    assert failure is not None
    assert failure.place is not None
    assert (failure.checks, failure.cause, failure.place.first_bad) == (("max",), "scale missing", CHECK.first_bad)
    assert (failure.place.error_map, failure.bounds, failure.case) == (("map",), CHECK.bounds, f"{SHAPE}-seed0")
    build = failure_of(record(kind="build", outcome=Outcome.NOT_BUILT, message="m"))
    assert build is not None
    assert (build.place, build.bounds, build.case, failure_of(None)) == (None, (), None, None)
    right_but_late = failure_of(record(outcome=Outcome.WRONG, message="guard bands", check=OK))
    assert right_but_late is not None
    assert right_but_late.place is None


def test_a_profile_says_what_decides_the_time() -> None:
    """The counters of the longest kernel stand beside those of the baseline's."""
    decided = Bottleneck("memory", "bound by memory: 80 %", {"dram": 80.0})
    report = NsightReport(
        "ok",
        "",
        "verdict",
        "ncu",
        1.0,
        (),
        kernels=(CountedKernel("kernel", {"dram": 80.0}, decided),),
        baseline="sdpa_cudnn",
        differences=(CounterDifference("DRAM", 80.0, 40.0, 1.0),),
    )
    (part,) = bottlenecks_of(RunResult((record(kind="profile", added={"ncu": report}), record(kind="profile"))))
    assert (part.shape, part.bound_by, part.baseline) == (SHAPE, "memory", "sdpa_cudnn")
    assert [(each.label, each.candidate, each.baseline) for each in part.beside] == [("DRAM", 80.0, 40.0)]


def test_next_steps_name_a_command(snapshot: SnapshotAssertion) -> None:
    """A slower variant on a GPU is to be profiled; a wrong one is to be repeated alone."""
    question = Question("mine", ("mine",))
    slower = next_steps(question, Status.SLOWER, RunResult((RIGHT, gate_record("FAIL"))), on_gpu=True)
    assert snapshot == slower
    wrong = RunResult((record(outcome=Outcome.WRONG, message="m", check=WRONG, rerun_command="pytest -k this"),))
    assert next_steps(question, Status.WRONG, wrong, on_gpu=True) == ("one test alone: pytest -k this",)

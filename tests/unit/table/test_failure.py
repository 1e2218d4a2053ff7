"""The text of a failed test: the verdict, the stages, every bound, the places, and the rerun command."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.catalog.case import parse_case
from pytest_fa.records.checks import Bound, Check, Diagnosis, LseCheck, Repeats
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import SCHEMA, Environment, Record, Source, Stage
from pytest_fa.table.failure import check_lines, failure_text

CHECK = Check(
    policy="same_precision",
    passed=False,
    bounds=(
        Bound("finite", 0.0, 0.0, True),
        Bound("max", 0.02, 0.01, False),
        Bound("rms", 0.001, 0.004, True),
        Bound("gain", 0.5, 0.1, False, enforced=False),
    ),
    max_abs_error=0.02,
    rms_error=0.001,
    same_precision_max_error=0.005,
    same_precision_rms_error=0.0005,
    nonfinite_count=0,
    bad_count=3,
    element_count=262144,
    first_bad=(0, 1, 2, 3),
    worst=(0, 7, 511, 63),
    worst_got=0.25,
    worst_want=0.27,
)
RECORD = Record(
    schema=SCHEMA,
    id="ws_p2-b1h8s512d64-fp16-seed3",
    kind="correct",
    variant="ws_p2",
    role="candidate",
    case=parse_case("b1h8s512d64-fp16-seed3"),
    outcome=Outcome.WRONG,
    message="max error 2.0e-02, allowed 1.0e-02",
    caught_by=(),
    stages=(Stage("build", "ok", 1.5), Stage("launch", "ok", 0.25), Stage("correct", "failed", 0.1)),
    builds=(),
    check=CHECK,
    repeats=None,
    diagnosis=None,
    speed=None,
    environment=Environment(None, None, None, None, None, "3.12.1", "Linux 6", "a CPU", "0.1.0"),
    source=Source(None, None, "no git"),
    measured_at="2026-01-01T00:00:00+00:00",
    rerun_command="pytest --fa-variant=ws_p2 --fa-case=b1h8s512d64-fp16-seed3 -k test_correct",
)


def test_a_wrong_result_says_everything(snapshot: SnapshotAssertion) -> None:
    """The text has the verdict, the stages, every bound, the same-precision reference, the places and the command."""
    assert snapshot == failure_text(RECORD)


def test_a_wrong_lse_has_its_rows(snapshot: SnapshotAssertion) -> None:
    """A wrong log-sum-exp is shown with the number of rows, and the worst row; so are repeats in which it differs."""
    lse = LseCheck(bad_count=7, row_count=4096, worst=(0, 7, 511), worst_got="0", worst_want="-inf")
    wrong = check_lines(msgspec.structs.replace(CHECK, lse=lse))
    assert snapshot == wrong[-2:]
    repeats = Repeats(100, 0, 0, None, None, lse_differing=3)
    text = failure_text(msgspec.structs.replace(RECORD, repeats=repeats))
    line = "  repeats: 100 with NaN-filled shared memory, the log-sum-exp of 3 differs from the first call: a race"
    assert line in text.splitlines()


@pytest.mark.parametrize(
    "repeats",
    [
        Repeats(100, 0, 0, None, None),
        Repeats(10_000, 0, 0, None, None),
        Repeats(100, 37, 5, (0, 1, 64, 0), None),
        Repeats(7, 0, 0, None, "no cuda.bindings"),
        Repeats(100, 99, 5, (0, 1, 64, 0), None, later_agree=True),
    ],
    ids=["equal", "in part", "a race", "without NaN-filled memory", "state"],
)
def test_repeats_are_one_line(repeats: Repeats, snapshot: SnapshotAssertion) -> None:
    """One line has the number of repeats, the state of shared memory, and how many repeats differ and where."""
    assert snapshot == failure_text(msgspec.structs.replace(RECORD, repeats=repeats)).splitlines()[-2]


def test_a_failure_without_a_check_makes_up_none(snapshot: SnapshotAssertion) -> None:
    """A failure before the check shows only its reason, its stages and the rerun command."""
    record = msgspec.structs.replace(
        RECORD,
        outcome=Outcome.HUNG,
        message="hung: no progress for 300 s in stage launch",
        stages=(Stage("launch", "failed", 300.0), Stage("sanity", "not reached")),
        check=None,
    )
    assert snapshot == failure_text(record)


@pytest.mark.parametrize("outcome", [outcome for outcome in Outcome if outcome != Outcome.OK])
def test_every_bad_outcome_has_words(outcome: Outcome) -> None:
    """Every outcome except `ok` has a headline, and the text begins with it and the message."""
    record = msgspec.structs.replace(RECORD, outcome=outcome)
    assert f"{outcome.headline}{RECORD.message}" == failure_text(record).splitlines()[0]


def test_the_first_line_has_the_likely_cause() -> None:
    """The first line of a wrong result ends with the likely cause, without repeating the word `wrong`."""
    causes = {
        "the softmax scale is not applied": "the softmax scale is not applied",
        "wrong in head 3 of 8": "in head 3 of 8",
    }
    for cause, words in causes.items():
        record = msgspec.structs.replace(RECORD, diagnosis=Diagnosis((), cause, (), ""))
        assert f"wrong: {RECORD.message}: {words}" == failure_text(record).splitlines()[0]


def test_a_traceback_follows_the_cause(snapshot: SnapshotAssertion) -> None:
    """The other lines of a message stand between the first line and the stages."""
    record = msgspec.structs.replace(RECORD, outcome=Outcome.FAILED, message="ValueError: no\n  line 7", check=None)
    assert snapshot == failure_text(record).splitlines()[:3]


def test_an_output_that_is_not_finite_says_so(snapshot: SnapshotAssertion) -> None:
    """For a value that is not finite, the text says so in place of the number."""
    check = msgspec.structs.replace(
        CHECK, bounds=(Bound("max", None, 0.01, False),), nonfinite_count=262144, bad_count=262144, worst_got=None
    )
    assert snapshot == check_lines(check)


@pytest.mark.parametrize(
    ("missing", "word"),
    [({"first_bad": None}, "first bad"), ({"worst": None}, "worst"), ({"worst_want": None}, "worst")],
)
def test_a_place_that_is_not_known_has_no_line(missing: dict[str, Any], word: str) -> None:
    """A check without a place prints no line for it."""
    lines = check_lines(msgspec.structs.replace(CHECK, **missing))
    assert [line for line in check_lines(CHECK) if not line.startswith(f"  {word}:")] == lines
    assert len(lines) == len(check_lines(CHECK)) - 1


def test_scores_have_keys_where_attention_has_dims() -> None:
    """A place in an output of scores is given by batch, head, query and key."""
    case = parse_case("b1h8s512d64-fp16-scores-seed3")
    text = failure_text(msgspec.structs.replace(RECORD, case=case))
    assert "first bad: batch 0, head 1, query 2, key 3" in text
    assert "worst: batch 0, head 7, query 511, key 63: got 0.25, want 0.27" in text

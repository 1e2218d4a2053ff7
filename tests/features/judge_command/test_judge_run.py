"""The run of the judge command: in which order tests run, what ends it, and which problems are its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from pytest_fa.errors import FaError, LockProblem
from pytest_fa.features.judge_command import judge_run
from pytest_fa.features.judge_command.conclude import RunResult
from pytest_fa.features.judge_command.judge_run import JudgedTest, run_variant
from pytest_fa.host.fork_server import WorkerError
from pytest_fa.options.options import Options
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record
from pytest_fa.records.written import read_written_or_none
from pytest_fa.session.refusals import AlreadyReported, CannotRun, NotJudged
from tests.factories import options, record, right_record, variant

NAME = "test_attention.py::test_correct[mine-x]"


class FakeSession:
    """A session in which nothing runs."""

    def __init__(self) -> None:
        self.runner = self
        self.has_timings = self.makes_records_for_tests = False

    def asked_by(self) -> None:
        """Keep that records are made for tests, so that those of failures have what the worker printed."""
        self.makes_records_for_tests = True

    def take_output(self) -> str:
        """What the worker printed."""
        return ""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[RunResult, int | None]]]:
    """Run these works as the tests of a variant: returns the result, and the exit status beside the records."""
    finders = list(sys.meta_path)

    def run(*works: Callable[[], Record]) -> tuple[RunResult, int | None]:
        session = FakeSession()

        @contextmanager
        def open_session(_: Options) -> Iterator[FakeSession]:
            yield session

        monkeypatch.setattr(judge_run, "open_session", open_session)
        monkeypatch.setattr(judge_run, "start", lambda *_: None)
        monkeypatch.setattr(judge_run, "prepare_opponents", lambda *_: None)
        tests = [JudgedTest("test_correct[mine-x]", work) for work in works]
        monkeypatch.setattr(judge_run, "_tests", lambda *_: iter(tests))
        result, kept = run_variant(options(tmp_path, artifacts=tmp_path), variant("mine"), 1.0)
        written = read_written_or_none(kept.path) if kept.path else None
        assert session.makes_records_for_tests
        return result, written.exit_status if written else None

    yield run
    sys.meta_path[:] = finders


def raising(problem: BaseException) -> Callable[[], NoReturn]:
    """A test that raises."""

    def work() -> NoReturn:
        raise problem

    return work


def test_the_first_failure_ends_the_run(run: Any) -> None:
    """Tests run until one fails, and the records are kept as they were made."""
    wrong = record(outcome=Outcome.WRONG)
    result, status = run(right_record, lambda: wrong, raising(AssertionError("it went on")))
    assert ["ok", "wrong"] == [each.outcome for each in result.records]
    assert (result.problem, status, len(result.not_run)) == ("", 1, 0)


@pytest.mark.parametrize(
    ("outcome", "status"),
    [(Outcome.INCONCLUSIVE, 10), (Outcome.GATE_FAILED, 1), (Outcome.OK, 0), (Outcome.NOT_MEASURED, 0)],
)
def test_the_status_beside_the_records_is_that_of_pytest(run: Any, outcome: Outcome, status: int) -> None:
    """A bundle can be made of these records: the exit status is the one that plain pytest has for them."""
    _, written = run(right_record, lambda: record(kind="gate", outcome=outcome))
    assert status == written


def test_what_cannot_run_is_counted(run: Any) -> None:
    """A test that this machine cannot run, or that repeats a fault, does not end the run; the reasons are counted."""
    result, status = run(raising(CannotRun("no GPU")), raising(CannotRun("no GPU")), raising(AlreadyReported("twice")))
    assert (dict(result.not_run), result.records, result.problem, status) == ({"no GPU": 2, "twice": 1}, (), "", None)


@pytest.mark.parametrize(
    ("problem", "sentence"),
    [
        (LockProblem("the lock is held"), f"{NAME}: the lock is held"),
        (NotJudged("the disk is full"), f"{NAME}: the disk is full"),
        (WorkerError("the server does not start:\nImportError: x"), f"{NAME}: the server does not start (ImportError"),
        (FaError("a sentence"), "a sentence"),
        (RuntimeError("a defect"), "RuntimeError: a defect"),
        (KeyboardInterrupt(), "it was interrupted"),
    ],
)
def test_a_problem_of_the_run_is_its_own(run: Any, problem: BaseException, sentence: str) -> None:
    """What says nothing about the variant ends the run with a sentence, and with no record of a failure."""
    result, status = run(right_record, raising(problem), raising(AssertionError("it went on")))
    assert result.problem.startswith(sentence)
    assert ([each.outcome for each in result.records], status) == (["ok"], 1)


def test_a_full_machine_is_no_failure_of_the_kernel(run: Any) -> None:
    """A failure that a full disk explains has no record."""
    failed = record(outcome=Outcome.FAILED, message="OSError: No space left on device")
    result, _ = run(lambda: failed)
    assert ((), True) == (result.records, "a disk is full" in result.problem)


def test_a_reported_fault_has_its_record(run: Any) -> None:
    """A test that another test's fault keeps from running has the record that says so."""
    result, _ = run(raising(AlreadyReported("not built", record(outcome=Outcome.NOT_BUILT))))
    assert ["not_built"] == [each.outcome for each in result.records]


def test_progress_goes_to_standard_error(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Each test has a line on standard error; standard output is left to the document."""
    run(
        right_record, raising(CannotRun("no GPU")), lambda: record(outcome=Outcome.WRONG, message="the output is wrong")
    )
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert ("", "fa: test_correct[mine-x]: ok") == (out, lines[0])
    assert "fa: test_correct[mine-x]: not run: no GPU" == lines[1]
    assert "fa: test_correct[mine-x]: wrong: the output is wrong" == lines[2]

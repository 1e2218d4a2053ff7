"""The end of a sweep in one process: it says what it waits for, and an interrupted gate is not repeated."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.features.sweep import sweep as run_module
from pytest_fa.features.sweep.closed import closed_line
from pytest_fa.features.sweep.plugin import SweepOptions
from pytest_fa.features.sweep.search import GateAnswer, run_trial
from pytest_fa.features.sweep.study_facts import study_facts
from pytest_fa.features.sweep.sweep import SweepRun
from pytest_fa.features.sweep.sweep_space import Point
from pytest_fa.features.sweep.sweeping import START_KEY, SWEEP_KEY, SweepStart, skip_reason, write_sweep
from pytest_fa.features.sweep.trial_result import SweepEnd, SweepTrial, TrialOutcome, TrialResult
from pytest_fa.plugin.keys import OPTIONS_KEY
from pytest_fa.plugin.state import SESSION_KEY
from pytest_fa.records.record import Record
from pytest_fa.session.session import Session
from tests.factories import options
from tests.features.sweep.simulated import RecordedBench, ending_of

pytest.importorskip("optuna")

MANIFEST = """\
entry: {target: "entry:forward"}
supports: {device: [cpu]}
defines: {M: 0}
sweep: {values: {M: [1, 2, 3, 4]}}
"""


class Interrupted(RecordedBench):
    """Its first gate ends with ctrl-C; the other ones pass."""

    gate_record = None
    gates = 0

    def require_parent(self) -> None:
        """It runs."""

    def variant_of(self, point: Point) -> object:
        """Not needed."""
        raise NotImplementedError(point)

    def gate(self, point: Point) -> GateAnswer:
        """The gate of the fastest one."""
        self.gates += 1
        if self.gates == 1:
            raise KeyboardInterrupt(point)
        return GateAnswer("PASS", "", ())


def sweep_run(folder: Path, lines: list[str]) -> SweepRun:
    """A process of a sweep whose configurations are all much faster than the variant."""
    home = folder / "kernels" / "tuned"
    home.mkdir(parents=True, exist_ok=True)
    (home / "entry.py").write_text("def forward(q, k, v, *, scale, causal, out, M): ...\n")
    (home / "variant.yaml").write_text(MANIFEST)
    (parent,) = read_manifest(home / "variant.yaml", folder / "kernels")
    chosen = options(
        folder,
        variants=("tuned",),
        artifacts=folder / "artifacts",
        cache=folder / "cache",
        parts=(SweepOptions("tuned", trials=10),),
    )
    session = Session(chosen)
    return SweepRun(session, parent, study_facts(session, parent), lines.append)


def test_an_interrupted_gate_is_not_repeated(tmp_path: Path) -> None:
    """After ctrl-C in the gate, the same command stores that no configuration is better, and gates nothing."""
    bench = Interrupted(lambda _: -0.2, 1)
    first = sweep_run(tmp_path, [])
    first.bench = bench  # type: ignore[assignment]  # recorded times
    with pytest.raises(KeyboardInterrupt):
        first.end()
    assert first.study.end is None
    second = sweep_run(tmp_path, [])
    second.bench = bench  # type: ignore[assignment]
    gated = first.study.gate_begun
    assert gated is not None
    assert second.next_trial() is None
    with pytest.raises(NotImplementedError):  # the record of the gated configuration, which recorded times lack
        second.end()
    end = second.study.end
    assert end is not None
    expected = f"no configuration is better than the parent: the one gate, of M={gated['M']}, was interrupted"
    assert (expected, None, 4, 1) == (end.reason, end.winner, end.timed, bench.gates)


def test_a_wait_is_said_while_it_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line that names the trial of another process is said once, before that trial has ended."""
    lines: list[str] = []
    waiting = sweep_run(tmp_path, lines)
    waiting.bench = Interrupted(lambda _: 0.2, 1)  # type: ignore[assignment]
    other = waiting.study.claim(waiting.suggester, 1)
    assert other is not None
    has_ended = threading.Event()
    monkeypatch.setattr(run_module, "running_elsewhere", lambda _: iter(() if has_ended.is_set() else (other,)))
    thread = threading.Thread(target=waiting._wait_for_others)
    thread.start()
    deadline = time.monotonic() + 20
    while not lines and time.monotonic() < deadline:
        time.sleep(0.01)
    said_meanwhile = list(lines)
    time.sleep(3 * run_module.POLL_SECONDS)
    has_ended.set()
    thread.join(20)
    line = f"sweep: waiting for trial #{other.number}, which another process runs"
    assert ([line], [line]) == (said_meanwhile, lines)


def test_a_late_process_says_so_and_ends_with_the_others(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """A process with a larger --fa-trials, which comes during the finals, adds no trial and reports their end."""
    lines: list[str] = []
    late = sweep_run(tmp_path, lines)
    late.bench = Interrupted(lambda _: 0.2, 1)  # type: ignore[assignment]  # recorded times
    assert run_trial(late.study, late.suggester, late.bench, 1) is not None  # by the other process, before its finals
    late.study._study.set_user_attr("ending", ending_of(os.getppid()))
    closed = (
        "the finals of this study began with 1 trial, so --fa-trials=10 adds none; "
        "for another search, name another file with --fa-study"
    )
    assert skip_reason(late.next_trial(), late.closed) == closed
    records: list[Record] = []
    thread = threading.Thread(target=lambda: records.append(late.end()))
    thread.start()
    deadline = time.monotonic() + 20
    while not lines and time.monotonic() < deadline:
        time.sleep(0.01)
    study = sweep_run(tmp_path, []).study
    study.store_end(SweepEnd("no configuration is better than the parent", 1), None)
    thread.join(20)
    assert snapshot == lines
    assert snapshot == [(record.outcome, record.message) for record in records]
    assert len(study.trials()) == 1


def test_finals_wait_for_a_trial_that_began_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial that another process began while this one was elected ends before the finalists are chosen."""
    run, steps = sweep_run(tmp_path, []), list[str]()
    run.bench = Interrupted(lambda _: 0.2, 1)  # type: ignore[assignment]
    monkeypatch.setattr(run, "_wait_for_others", lambda: steps.append("wait"))

    def is_elected(_: float) -> bool:
        steps.append("elected")
        return True

    def end_here() -> SweepEnd:
        steps.append("finals")
        return SweepEnd("no configuration is better than the parent", 4)

    monkeypatch.setattr(run.study, "is_elected", is_elected)
    monkeypatch.setattr(run, "_end_here", end_here)
    run.study._renew()
    run.end()
    assert steps == ["wait", "elected", "wait", "finals"]


@pytest.mark.parametrize(
    ("tried", "budget", "feasible", "is_told"), [(3, 10, 40, True), (10, 10, 40, False), (3, 10, 3, False)]
)
def test_only_a_run_that_would_add_trials_is_told(tried: int, budget: int, feasible: int, *, is_told: bool) -> None:
    """A run is not told if the study has all trials of its command, or every configuration."""
    trials = [
        SweepTrial(number, "ended", {"M": number}, result=TrialResult(TrialOutcome.RIGHT)) for number in range(tried)
    ]
    assert bool(closed_line(trials, budget, feasible)) is is_told


@pytest.mark.parametrize("has_run_trials", [True, False], ids=["this process", "its workers"])
def test_the_study_of_the_run_is_shown(tmp_path: Path, *, has_run_trials: bool, snapshot: SnapshotAssertion) -> None:
    """A file that is saved while the sweep runs changes what is shown in no process: the study of this run is shown."""
    run = sweep_run(tmp_path, [])
    bench = Interrupted(lambda _: 0.2, 1)
    run.bench = bench  # type: ignore[assignment]
    assert run.next_trial() is not None
    stash, lines = pytest.Stash(), list[str]()
    session = Session(run.options)
    stash[OPTIONS_KEY], stash[SESSION_KEY] = session.options, session
    stash[START_KEY] = SweepStart(study_facts(session, run.parent), time.time())
    if has_run_trials:
        stash[SWEEP_KEY] = run
    (tmp_path / "kernels" / "tuned" / "entry.py").write_text("# edited\n")
    config = SimpleNamespace(stash=stash, getoption=lambda _: False)
    terminal = SimpleNamespace(config=config, section=lambda _: None, write_line=lambda line, **_: lines.append(line))
    write_sweep(cast("pytest.TerminalReporter", terminal))
    assert snapshot == lines[0]

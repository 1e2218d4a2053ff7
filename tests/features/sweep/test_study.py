"""The shared study: several processes, a killed one and a dead machine lose no trial and run none twice."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.errors import UsageProblem
from pytest_fa.features.sweep.owners import STALE_SECONDS, is_stale, this_process
from pytest_fa.features.sweep.search import run_trial
from pytest_fa.features.sweep.shared_study import SharedStudy
from pytest_fa.features.sweep.storage import open_storage, study_names
from pytest_fa.features.sweep.study_url import without_password
from pytest_fa.features.sweep.suggest import Space, Suggester
from pytest_fa.features.sweep.sweep_space import Point, Sweep, point_text
from pytest_fa.features.sweep.trial_result import SweepEnd, SweepTrial, TrialResult
from tests.features.sweep.simulated import DEFINES, SIXTY, RecordedBench, ending_of, facts_of, in_memory

pytest.importorskip("optuna")

REPOSITORY = Path(__file__).parents[3]
NEVER = 10_000  # trials after which a process hangs
SECONDS = 120.0  # for processes on a busy machine


def start(folder: Path, hang_after: int = NEVER) -> subprocess.Popen[bytes]:
    """A process that runs trials of the journal in `folder`, and writes what it times to its log."""
    arguments = (str(folder / "study.journal"), str(folder / "timed.txt"), str(hang_after))
    return subprocess.Popen([sys.executable, "-m", "tests.features.sweep.simulated", *arguments], cwd=REPOSITORY)


def timed_in(folder: Path) -> list[str]:
    """The configurations whose time was begun, in order."""
    log = folder / "timed.txt"
    return log.read_text(encoding="utf-8").split() if log.is_file() else []


def study_in(folder: Path) -> SharedStudy:
    """The study of the journal in `folder`."""
    return SharedStudy(open_storage(str(folder / "study.journal")), "tuned", facts_of(SIXTY))


GONE = msgspec.structs.replace(this_process(), started=1)  # a process that has ended


def run_all(study: SharedStudy) -> int:
    """Run every trial that is left in this process; return their number."""
    suggester, bench, count = Suggester(Space(SIXTY, DEFINES), 100, "tpe", 1), RecordedBench(lambda _: 0.0, 1), 0
    while run_trial(study, suggester, bench, 100):
        count += 1
    return count


def right_points(study: SharedStudy) -> Counter[str]:
    """How often each configuration ended as right."""
    return Counter(point_text(each.point) for each in study.trials() if each.is_right)


ONCE = Counter(point_text(point) for point in Space(SIXTY, DEFINES).points)


@pytest.mark.nightly
def test_four_processes_lose_no_trial(tmp_path: Path) -> None:
    """Four processes share one journal: each of 60 configurations is timed once, by one of them."""
    processes = [start(tmp_path) for _ in range(4)]
    assert [0] * 4 == [process.wait(SECONDS) for process in processes]
    assert ONCE == right_points(study_in(tmp_path)) == Counter(timed_in(tmp_path))
    assert 0 == run_all(study_in(tmp_path))


@pytest.mark.nightly
def test_a_killed_run_resumes(tmp_path: Path) -> None:
    """After kill -9 in the middle of a trial, the next run finishes the sweep: only that trial is begun again."""
    process = start(tmp_path, hang_after=17)
    deadline = time.monotonic() + SECONDS
    while len(timed_in(tmp_path)) < 18 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    process.wait(SECONDS)
    assert 18 == len(timed_in(tmp_path))
    study = study_in(tmp_path)
    assert 60 - 17 == run_all(study)
    assert ONCE == right_points(study)
    (released,) = [each for each in study.trials() if each.state == "released"]
    assert point_text(released.point) == timed_in(tmp_path)[-1]


def test_a_result_that_was_stored_is_kept(tmp_path: Path) -> None:
    """A process that ended between storing a result and ending the trial has lost nothing."""
    study = study_in(tmp_path)
    trial = study.claim(Suggester(Space(SIXTY, DEFINES), 100, "tpe", 0), 100)
    assert trial is not None
    result = RecordedBench(lambda _: 0.0, 0).measure(trial.point)
    frozen = study._own[trial.number]
    frozen.set_user_attr("result", msgspec.to_builtins(result))
    gone = msgspec.structs.replace(this_process(), started=1)
    frozen.set_user_attr("owner", msgspec.to_builtins(gone))
    study.release_stale()
    assert [("ended", result)] == [(each.state, each.result) for each in study_in(tmp_path).trials()]


def trial_of(**changes: object) -> SweepTrial:
    """A running trial of this process that has just begun, with changes to its owner."""
    owner = msgspec.structs.replace(this_process(), **changes)
    return SweepTrial(0, "running", {}, owner, begun=1000.0)


@pytest.mark.parametrize(
    ("trial", "age", "expected"),
    [
        (trial_of(), 10 * STALE_SECONDS, False),
        (trial_of(started=1), 0.0, True),
        (trial_of(pid=2**22 + 1), 0.0, True),
        (trial_of(machine="another"), STALE_SECONDS - 1, False),
        (trial_of(machine="another"), STALE_SECONDS + 1, True),
        (SweepTrial(0, "running", {}, None, begun=1000.0), 5.0, False),
        (SweepTrial(0, "running", {}, None, begun=1000.0), 100.0, True),
    ],
    ids=["alive", "its id was given away", "gone", "elsewhere", "elsewhere for long", "has no name yet", "never named"],
)
def test_a_stale_trial_is_recognised(trial: SweepTrial, age: float, *, expected: bool) -> None:
    """On this machine the process decides, on another one the age."""
    assert expected is is_stale(trial, now=1000.0 + age)


def test_an_interrupted_trial_is_given_up() -> None:
    """A trial that ends with an exception, such as ctrl-C, is tried again."""

    class Interrupted(RecordedBench):
        def check_searched(self, point: Point) -> TrialResult | None:
            raise KeyboardInterrupt(point)

    study, suggester = in_memory(SIXTY), Suggester(Space(SIXTY, DEFINES), 100, "tpe", 1)
    with pytest.raises(KeyboardInterrupt):
        run_trial(study, suggester, Interrupted(lambda _: 0.0, 0), 100)
    assert ["released"] == [each.state for each in study.trials()]
    assert 60 == run_all(study)


def test_the_budget_is_kept() -> None:
    """No trial begins beyond `--fa-trials`, and a sampler tries no configuration twice."""
    study, suggester = in_memory(SIXTY), Suggester(Space(SIXTY, DEFINES), 15, "nsga2", 1)
    bench = RecordedBench(lambda _: 0.0, 1)
    while run_trial(study, suggester, bench, 15):
        pass
    points = [point_text(each.point) for each in study.trials()]
    assert (15, 15) == (len(points), len(set(points)))


def test_one_process_ends_a_sweep(tmp_path: Path) -> None:
    """A process is elected; another one is not while it lives, and replaces it after its end."""
    ours = study_in(tmp_path)
    assert ours.is_elected(0.0)
    code = (
        "from tests.features.sweep.test_study import *; import sys; from pathlib import Path;"
        "print(study_in(Path(sys.argv[1])).is_elected(0.0))"
    )

    def elected_elsewhere() -> str:
        return subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], cwd=REPOSITORY, check=True, capture_output=True, text=True
        ).stdout.strip()

    assert "False" == elected_elsewhere()
    ended = {"owner": msgspec.to_builtins(msgspec.structs.replace(this_process(), started=1)), "begun": time.time()}
    ours._study.set_user_attr("ending", ended)
    assert "True" == elected_elsewhere()


def suggester() -> Suggester:
    """What suggests any of the sixty configurations."""
    return Suggester(Space(SIXTY, DEFINES), 100, "tpe", 1)


def test_finals_close_a_study(tmp_path: Path) -> None:
    """While another process runs the finals, no trial begins, whatever the budget; if it ends too early, one may."""
    study = study_in(tmp_path)
    study._study.set_user_attr("ending", ending_of(os.getppid()))
    assert (study.is_closed, study.claim(suggester(), 100), study.trials()) == (True, None, [])
    study._study.set_user_attr("ending", {**ending_of(os.getppid()), "owner": msgspec.to_builtins(GONE)})
    assert not study.is_closed
    assert study.claim(suggester(), 100) is not None


def test_a_trial_that_begins_as_the_finals_do_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the study is closed between the look at it and the begin of a trial, the trial is released and not run."""
    study = study_in(tmp_path)
    begin = study._begin_waiting

    def begun_too_late() -> SweepTrial | None:
        study._study.set_user_attr("ending", ending_of(os.getppid()))
        return begin()

    monkeypatch.setattr(study, "_begin_waiting", begun_too_late)
    assert study.claim(suggester(), 100) is None
    assert [trial.state for trial in study_in(tmp_path).trials()] == ["released"]


def test_the_process_that_runs_the_finals_may_complete_the_trials(tmp_path: Path) -> None:
    """Its own study is not closed to it: it runs what a process that ended has left."""
    study = study_in(tmp_path)
    assert study.is_elected(0.0)
    assert study.claim(suggester(), 100) is not None


def test_the_end_is_stored(tmp_path: Path) -> None:
    """Every process reads the same end."""
    end = SweepEnd("no configuration is better", 3, noise_sd=0.01, luck=0.02)
    study_in(tmp_path).store_end(end, None)
    stored = study_in(tmp_path).end
    assert stored is not None
    assert time.time() - 60 < stored.ended <= time.time()
    assert end == msgspec.structs.replace(stored, ended=0.0)


def test_an_end_is_stored_once(tmp_path: Path) -> None:
    """A second end changes nothing: the first one stays, with its record."""
    study = study_in(tmp_path)
    first = study.store_end(SweepEnd("the first", 3), {"of": "the first"})
    assert first == study.store_end(SweepEnd("the second", 4), None)
    other = study_in(tmp_path)
    assert (first, "the first", {"of": "the first"}) == (other.end, first.reason, other.gate_record)


def test_a_gate_begins_once(tmp_path: Path) -> None:
    """Only the process that ends the sweep begins a gate, and only if none was begun."""
    study = study_in(tmp_path)
    point: Point = {"M": 16}
    assert study.is_elected(0.0)
    gone = {"owner": msgspec.to_builtins(msgspec.structs.replace(this_process(), started=1)), "begun": time.time()}
    study._study.set_user_attr("ending", gone)
    assert (False, None) == (study.begin_gate(point), study.gate_begun)
    assert study.is_elected(0.0)
    assert (True, point) == (study.begin_gate(point), study_in(tmp_path).gate_begun)
    assert not study.begin_gate({"M": 32})
    assert point == study.gate_begun


def test_the_process_that_ends_a_sweep_says_that_it_lives(tmp_path: Path) -> None:
    """While it works, its time is renewed, so that no other machine takes over; afterwards it is not."""
    study = study_in(tmp_path)
    assert study.is_elected(0.0)
    begun = study._study.user_attrs["ending"]["begun"]
    with study.while_elected(0.02):
        deadline = time.monotonic() + 20
        while study._study.user_attrs["ending"]["begun"] == begun and time.monotonic() < deadline:
            time.sleep(0.01)
    renewed = study._study.user_attrs["ending"]["begun"]
    assert renewed > begun
    time.sleep(0.1)
    assert renewed == study._study.user_attrs["ending"]["begun"]


def interrupt(_: float) -> None:
    """Ctrl-C."""
    raise KeyboardInterrupt


def test_a_resignation_is_not_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sign of life that is being written when the finals fail does not replace the resignation."""
    study, writes, begun = study_in(tmp_path), study_in(tmp_path)._renew, threading.Event()
    assert study.is_elected(0.0)

    def slow() -> None:
        begun.set()
        time.sleep(0.3)
        writes()

    monkeypatch.setattr(study, "_renew", slow)
    with pytest.raises(KeyboardInterrupt), study.while_elected(0.01):
        raise KeyboardInterrupt(begun.wait(SECONDS))
    assert begun.is_set()
    assert study_in(tmp_path)._study.user_attrs["ending"] is None


def test_a_process_that_fails_lets_another_one_end_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an exception in the finals, a process of another machine need not wait until this one counts as gone."""
    study, other = study_in(tmp_path), study_in(tmp_path)
    elsewhere = {"owner": {"machine": "another", "pid": 1, "started": 1}, "begun": time.time()}
    assert study.is_elected(0.0)
    with pytest.raises(KeyboardInterrupt), study.while_elected():
        raise KeyboardInterrupt
    assert study._study.user_attrs["ending"] is None
    assert not other.is_closed
    monkeypatch.setattr(time, "sleep", interrupt)  # during the election
    with pytest.raises(KeyboardInterrupt):
        study.is_elected(2.0)
    assert study._study.user_attrs["ending"] is None
    study._study.set_user_attr("ending", elsewhere)
    with pytest.raises(KeyboardInterrupt), study.while_elected():  # another process was elected meanwhile
        raise KeyboardInterrupt
    assert elsewhere == study._study.user_attrs["ending"]
    assert study.is_closed


@pytest.mark.nightly
def test_the_age_of_a_trial_is_that_of_its_machine_s_clock(tmp_path: Path) -> None:
    """A database keeps local times without a zone; the age of a trial is read from a time since the epoch."""
    url, code = (
        f"sqlite:///{tmp_path}/study.db",
        (
            "import sys; from tests.features.sweep.test_study import *;"
            "study = SharedStudy(open_storage(sys.argv[1]), 'tuned', facts_of(SIXTY));"
            "study.claim(Suggester(Space(SIXTY, DEFINES), 100, 'tpe', 1), 100)"
        ),
    )
    environment = {**os.environ, "TZ": "Asia/Tokyo" if time.timezone != -9 * 3600 else "UTC"}
    subprocess.run([sys.executable, "-c", code, url], cwd=REPOSITORY, check=True, env=environment)
    (trial,) = SharedStudy(open_storage(url), "tuned").trials()
    assert 0 <= time.time() - trial.begun < SECONDS


def test_a_database_is_a_study(tmp_path: Path) -> None:
    """A URL names a database; its trials are those of every process that opens it."""
    url, four = f"sqlite:///{tmp_path}/study.db", Sweep({"N": (1, 2, 3, 4)})
    study, bench = SharedStudy(open_storage(url), "tuned", facts_of(four)), RecordedBench(lambda _: 0.0, 1)
    while run_trial(study, Suggester(Space(four, DEFINES), 100, "tpe", 1), bench, 100):
        pass
    expected = Counter(f"N={value}" for value in (1, 2, 3, 4))
    assert expected == right_points(SharedStudy(open_storage(url), "tuned"))


def test_a_password_is_not_shown() -> None:
    """The URL of a database is shown and recorded without its password; other places are shown as they are."""
    urls = ["postgresql://me:secret@host:5432/sweeps", "postgresql://me@host/sweeps", "sqlite:///a.db", "a.journal"]
    assert ["postgresql://me:***@host:5432/sweeps", *urls[1:]] == [without_password(url) for url in urls]
    odd = {
        "postgresql://me:se/cret@host/sweeps": "postgresql://me:***@host/sweeps",
        "postgresql://me:se@cret@host/sweeps": "postgresql://...",
        "postgresql://host/sweeps?user=me&password=secret": "postgresql://host/sweeps?user=me",
        "postgresql://me:secret@host:port/sweeps": "postgresql://...",
    }
    assert list(odd.values()) == [without_password(url) for url in odd]


def test_a_complaint_has_no_password() -> None:
    """A database that cannot be opened is named without its password."""
    with pytest.raises(UsageProblem) as problem:
        open_storage("nosuch://me:secret@host:port/sweeps")
    assert ("nosuch://..." in str(problem.value), "secret" in str(problem.value)) == (True, False)


def test_a_missing_study_is_named(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """A file or a database that is not there, or has no study, is one sentence."""
    with pytest.raises(UsageProblem) as error:
        study_names("/nowhere")
    assert snapshot == str(error.value)
    open_storage(str(tmp_path / "empty"))
    (tmp_path / "empty").touch()
    with pytest.raises(UsageProblem, match="empty' has no study"):
        study_names(str(tmp_path / "empty"))
    with pytest.raises(UsageProblem) as error:
        open_storage("nosuch://x/y")
    assert snapshot == str(error.value)


def test_the_journal_s_lock_ends_with_its_holder(tmp_path: Path) -> None:
    """No lock file that a killed process leaves behind stops a later one."""
    journal = tmp_path / "study.journal"
    code = (
        "import os, sys; from pytest_fa.features.sweep.storage import _ReleasedWithProcess;"
        "_ReleasedWithProcess(sys.argv[1] + '.lock').acquire(); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code, str(journal)], cwd=REPOSITORY, check=True, env=os.environ)
    start_time = time.monotonic()
    study_in(tmp_path)
    assert time.monotonic() - start_time < 20  # Optuna's own lock would wait for 30 seconds

"""A study in PostgreSQL: processes share it, one is killed, and no trial is lost."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from pytest_fa.errors import UsageProblem
from pytest_fa.features.sweep.shared_study import SharedStudy
from pytest_fa.features.sweep.storage import open_storage, study_names
from pytest_fa.features.sweep.suggest import Space, Suggester
from pytest_fa.features.sweep.sweep_space import point_text
from pytest_fa.features.sweep.trial_result import TrialOutcome
from tests.features.sweep.simulated import DEFINES, SIXTY, facts_of
from tests.projects import SHAPE, NewProject

pytest.importorskip("optuna")

REPOSITORY = Path(__file__).parents[3]
SECONDS = 300.0  # for processes on a busy machine
PASSWORD = "s3cr:et/@pass"  # noqa: S105  # of a server that only these tests have
NOBODY = 65534


class Server:
    """A PostgreSQL of its own, which listens on a socket in its folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0

    def new_database(self, encoding: str = "UTF8") -> str:
        """The URL of a new, empty database."""
        psycopg = pytest.importorskip("psycopg")
        self._count += 1
        name = f"sweeps{self._count}"
        with psycopg.connect(host=str(self._folder), user="me", password=PASSWORD, dbname="postgres") as connection:
            connection.autocommit = True
            connection.execute(f"CREATE DATABASE {name} ENCODING '{encoding}' TEMPLATE template0")
        return self.url(name)

    def url(self, name: str, password: str = PASSWORD) -> str:
        """The URL of a database."""
        return f"postgresql+psycopg://me:{quote(password, safe='')}@/{name}?host={quote(str(self._folder), safe='')}"


def _binaries() -> Path | None:
    """The folder of PostgreSQL's programs: that in PATH, or the newest one of Debian's packages."""
    if on_path := shutil.which("initdb"):
        return Path(on_path).resolve().parent
    found = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    return max(found, key=lambda path: float(path.parent.name), default=None)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A running server.  PostgreSQL refuses to run as root, so another user runs it then."""
    pytest.importorskip("psycopg")
    binaries = _binaries()
    if binaries is None:
        pytest.skip("needs PostgreSQL's programs: initdb is neither in PATH nor in /usr/lib/postgresql")
    user = NOBODY if os.geteuid() == 0 else os.geteuid()
    folder = Path(tempfile.mkdtemp(prefix="fa-pg-"))  # the name of a socket is at most 107 bytes long
    try:
        with contextlib.ExitStack() as stack:
            _start(binaries, folder, user, stack)
            yield Server(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _start(binaries: Path, folder: Path, user: int, stack: contextlib.ExitStack) -> None:
    """Make a cluster of databases and start its server, which ends with this process."""
    (folder / "password").write_text(PASSWORD, encoding="utf-8")
    for path in (folder, folder / "password"):
        os.chown(path, user, -1)
    as_user = user if user != os.geteuid() else None
    make = [
        str(binaries / "initdb"),
        "-D",
        str(folder / "data"),
        "-U",
        "me",
        "-A",
        "scram-sha-256",
        "--no-sync",
        "--locale=C",
    ]
    make += [f"--pwfile={folder}/password"]
    try:
        made = subprocess.run(
            [*make, f"--pwfile={folder}/password"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            user=as_user,
        )
    except PermissionError as problem:
        pytest.skip(f"PostgreSQL does not run as root, and this process cannot become another user: {problem}")
    assert made.returncode == 0, made.stderr
    settings = ("listen_addresses=", f"unix_socket_directories={folder}", "fsync=off")
    command = [str(binaries / "postgres"), "-D", str(folder / "data")]
    command += [word for setting in settings for word in ("-c", setting)]
    ending = ["setpriv", "--pdeathsig", "QUIT"] if shutil.which("setpriv") else []  # if this process is killed
    log = stack.enter_context((folder / "log.txt").open("w"))
    process = subprocess.Popen([*ending, *command], cwd=folder, stdout=log, stderr=subprocess.STDOUT, user=as_user)
    stack.callback(process.wait, SECONDS)
    stack.callback(process.send_signal, signal.SIGQUIT)  # an immediate end
    _wait_until(lambda: "is ready to accept connections" in (folder / "log.txt").read_text(encoding="utf-8"))


def _wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def timed_in(log: Path) -> list[str]:
    """The configurations whose time was begun, in order."""
    return log.read_text(encoding="utf-8").split() if log.is_file() else []


@pytest.mark.nightly
def test_a_killed_process_loses_nothing(server: Server, tmp_path: Path) -> None:
    """Of two processes, one is killed in a trial: the other one ends every trial once, and that one again."""
    url, logs = server.new_database(), (tmp_path / "killed.txt", tmp_path / "other.txt")
    module = [sys.executable, "-m", "tests.features.sweep.simulated", url]
    killed, other = (
        subprocess.Popen([*module, str(log), str(hang_after)], cwd=REPOSITORY)
        for log, hang_after in zip(logs, (5, 10_000), strict=True)
    )
    _wait_until(lambda: len(timed_in(logs[0])) == 6 or killed.poll() is not None)
    killed.kill()
    assert (killed.wait(SECONDS), other.wait(SECONDS)) == (-signal.SIGKILL, 0)

    study = SharedStudy(open_storage(url), "tuned")
    trials = study.trials()
    every = Counter(point_text(point) for point in Space(SIXTY, DEFINES).points)
    assert Counter(point_text(trial.point) for trial in trials if trial.is_right) == every
    (released,) = [trial for trial in trials if trial.state == "released"]
    assert point_text(released.point) == timed_in(logs[0])[-1]
    kept = {
        point_text(trial.point) for trial in trials if trial.is_right and trial.owner and trial.owner.pid == killed.pid
    }
    assert kept == set(timed_in(logs[0])[:-1])
    assert study.claim(Suggester(Space(SIXTY, DEFINES), 100, "tpe", 1), 100) is None


# Each of its configurations is wrong, and a call takes a moment.
SOURCE = """\
import time
import torch


def forward(q, k, v, *, scale, causal="none", out=None, M):
    time.sleep(0.2)
    return torch.full_like(q, M) if out is None else out.fill_(M)
"""
MANIFEST = f"""\
entry: {{target: "entry:forward"}}
supports: {{device: [cpu, cuda]}}
defines: {{M: 0}}
sweep: {{values: {{M: [1, 2, 3, 4, 5, 6]}}, cases: [{SHAPE}]}}
"""
SWEEP = ("--fa-sweep=tuned", "--fa-case=b1h2s64d64-fp16-seed0", "--fa-suite=smoke", "--fa-trials=10")


@pytest.mark.nightly
def test_a_killed_run_is_continued_by_another(server: Server, new_project: NewProject) -> None:
    """Two pytest runs share a study, one is killed: the other one ends the sweep, and nothing has the password."""
    project, url = new_project("postgresql"), server.new_database()
    project.python_variant("tuned", SOURCE, MANIFEST)
    with project.started(*SWEEP, f"--fa-study={url}", "--fa-artifacts=killed") as killed:

        def runs_a_trial() -> bool:
            with contextlib.suppress(UsageProblem):
                study = SharedStudy(open_storage(url), study_names(url)[-1])
                return any(trial.state == "running" and trial.number >= 1 for trial in study.trials())
            return False

        _wait_until(runs_a_trial)
        killed.kill()
    run = project.suite(*SWEEP, f"--fa-study={url}")
    assert run.ret == 10, run.text
    study = SharedStudy(open_storage(url), study_names(url)[-1])
    ended = [trial for trial in study.trials() if trial.state == "ended"]
    assert sorted(trial.point["M"] for trial in ended) == [1, 2, 3, 4, 5, 6]
    assert {trial.result.outcome for trial in ended if trial.result} == {TrialOutcome.WRONG}
    assert len(study.trials()) - len(ended) in (0, 1)  # the trial that was killed
    assert study.end is not None

    show = [sys.executable, "-m", "pytest_fa", "sweep", "show", url]
    shown = subprocess.run(show, cwd=project.folder, capture_output=True, text=True, check=True).stdout
    assert "no configuration is better than the parent" in shown
    texts = [run.text, shown, *(path.read_text(errors="replace") for path in _files(project.folder))]
    assert [text for text in texts if PASSWORD in text or quote(PASSWORD, safe="") in text] == []
    assert f"study: {url.replace(quote(PASSWORD, safe=''), '***')}; " in run.text


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and "artifacts" in path.parts)


@pytest.mark.nightly
def test_a_database_of_another_encoding(server: Server) -> None:
    """A database that PostgreSQL makes where no language is set holds a study, too."""
    study = SharedStudy(open_storage(server.new_database("SQL_ASCII")), "tuned", facts_of(SIXTY))
    assert study.facts == facts_of(SIXTY)


@pytest.mark.nightly
def test_a_refused_password_is_not_shown(server: Server) -> None:
    """A server that refuses the password is named with its reason, and without the password."""
    url = server.url("postgres", "wr0ng-one")
    with pytest.raises(UsageProblem) as error:
        open_storage(url)
    assert 'password authentication failed for user "me"' in str(error.value)
    assert "wr0ng-one" not in str(error.value)


def test_a_server_that_does_not_answer_is_one_sentence() -> None:
    """Without a server, the reason is that of the driver."""
    pytest.importorskip("psycopg")
    with pytest.raises(UsageProblem) as error:
        open_storage("postgresql+psycopg://me:secret@127.0.0.1:1/sweeps")
    assert str(error.value).startswith("the study 'postgresql+psycopg://me:***@127.0.0.1:1/sweeps' cannot be opened: ")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(("driver", "package"), [("psycopg", "'psycopg[binary]'"), ("psycopg2", "psycopg2-binary")])
def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch, driver: str, package: str) -> None:
    """Without the driver, one sentence says what to install, at once."""

    class Refusing:
        """Finds no module of the driver."""

        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name.partition(".")[0] == driver:
                raise ModuleNotFoundError(f"No module named {driver!r}", name=driver)

    for name in [each for each in sys.modules if each.partition(".")[0] == driver]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Refusing(), *sys.meta_path])
    with pytest.raises(UsageProblem) as error:
        open_storage(f"postgresql+{driver}://me:secret@host/sweeps")
    assert str(error.value) == (
        f"the study 'postgresql+{driver}://me:***@host/sweeps' needs the package {driver}; type: pip install {package}"
    )


def test_an_odd_url_does_not_show_its_password() -> None:
    """Of a password with an @, no part is shown; the sentence says how to write it."""
    with pytest.raises(UsageProblem) as error:
        open_storage("postgresql+psycopg://me:se@cret@host/sweeps")
    assert "cret" not in str(error.value)
    assert "write special characters of the password in the form %40, which is @" in str(error.value)

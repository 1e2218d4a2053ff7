"""The resident server: it forks worker servers for runs that fit it, and ends when it is idle, stopped or outdated."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_fa.host import resident
from pytest_fa.host.client import Workers
from pytest_fa.host.fork_server import ForkServer, child_environment, servers_of_run
from pytest_fa.processes import MARK, marked_with
from tests.factories import wait_until
from tests.worker_jobs import JobOfSource

START_SECONDS = 120.0
PRINTS = """\
import os
print("folder", os.getcwd(), "variable", os.environ.get("FA_SEEN"), "nice", os.nice(0))
def forward(q, k, v, *, scale, causal, out):
    return (q.float() @ k.float().mT * scale).softmax(-1).matmul(v.float()).to(q.dtype)
"""


def serve(*words: str) -> subprocess.Popen[str]:
    """Start `python -m pytest_fa serve` with the environment of this process."""
    program = [sys.executable, "-m", "pytest_fa", "serve", *words]
    return subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A socket of the tests of this module; its folder is short, as the path of a socket must be."""
    folder = Path(tempfile.mkdtemp(prefix="fa-"))
    yield folder / "server.sock"
    shutil.rmtree(folder)


@pytest.fixture
def _uses_place(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(resident.PLACE, str(place))


@pytest.fixture
def server(place: Path, _uses_place: None) -> Iterator[subprocess.Popen[str]]:
    """A resident server that is ready."""
    process = serve()
    assert process.stdout is not None
    assert process.stdout.readline().startswith("serving runs of ")
    yield process
    resident.end_resident(place)
    process.communicate(timeout=30)


def test_a_run_uses_it(
    server: subprocess.Popen[str], job_of_source: JobOfSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker server and its processes have the run's folder, variables and priority, and end with the run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FA_SEEN", "yes")
    with Workers() as workers:
        result = workers.run(job_of_source(PRINTS))
        output = workers.take_output()
        assert workers._server is not None
        assert workers._judge is not None
        pids = [workers._server.pid, workers._judge.pid, *(each.pid for each in workers._candidates)]
        assert isinstance(workers._server._process, resident.ForkedServer)
        assert pids[2] in marked_with(workers._server._mark)

    assert (result.outcome, result.message) == ("ok", "")
    assert f"folder {tmp_path} variable yes nice {os.nice(0)}" in output
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 10)
    assert server.poll() is None


def test_a_run_outlives_it(server: subprocess.Popen[str], job_of_source: JobOfSource) -> None:
    """A run that has begun goes on if the resident server is killed."""
    with Workers() as workers:
        workers.start()
        server.kill()
        server.wait()
        assert workers.run(job_of_source(PRINTS)).outcome == "ok"


def test_under_xdist_all_of_its_processes_are_of_the_run(
    server: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It forks the worker servers of all workers of pytest-xdist.  In any other run, it may also serve another run."""
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    assert server.pid in servers_of_run()
    monkeypatch.delenv("PYTEST_XDIST_WORKER")
    assert server.pid not in servers_of_run()


def test_one_in_use_is_not_replaced(server: subprocess.Popen[str], place: Path) -> None:
    """Runs of two environments in turn do not end each other's server; a request without an identity ends it."""
    ForkServer().close()
    assert resident.end_resident(place, unless="another") == ""
    assert server.poll() is None
    assert resident.end_resident(place) == "30"


@pytest.mark.nightly
@pytest.mark.parametrize("change", ["OMP_NUM_THREADS", "PYTHONHASHSEED"])
def test_another_environment_does_not_fit(
    server: subprocess.Popen[str], change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run with another value of a variable starts a server of its own."""
    monkeypatch.setenv(change, "3")
    own = ForkServer()
    own.close()

    assert isinstance(own._process, subprocess.Popen)
    assert server.poll() is None  # a server that PYTEST_FA_SERVER names is not replaced


def test_there_is_one(server: subprocess.Popen[str], place: Path) -> None:
    """A second one ends with the command that ends the first; that command ends it."""
    second = serve()
    _, problem = second.communicate(timeout=60)
    first_stop, second_stop = (serve("--stop").communicate(timeout=60)[0] for _ in range(2))

    assert problem == (
        f"pytest_fa: serve: a server already runs at {place}; `python -m pytest_fa serve --stop` ends it\n"
    )
    assert second.returncode == 2
    assert (first_stop, second_stop) == ("the server has ended\n", "no server runs\n")
    assert server.wait(30) == 0


@pytest.mark.nightly
@pytest.mark.usefixtures("_uses_place")
def test_it_ends_when_idle(place: Path) -> None:
    """It ends by itself, and removes its socket."""
    process = serve("--idle-minutes", "0.02")
    output, problem = process.communicate(timeout=START_SECONDS)

    assert output == f"serving runs of {sys.executable} at {place}; ends after 0.02 idle minutes\n"
    assert (process.returncode, problem, place.exists()) == (0, "", False)


def test_what_it_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its identity changes with the environment and with the package's files, not with a terminal's variables."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "module.py").write_text("a = 1\n", encoding="utf-8")
    monkeypatch.setattr(resident, "PACKAGE", package)
    environment = child_environment()
    before = resident.identity(environment)

    assert resident.identity({**environment, "COLUMNS": "7", MARK: "x"}) == before
    assert resident.identity({**environment, "LD_LIBRARY_PATH": "/nowhere"}) != before
    (package / "module.py").write_text("a = 12\n", encoding="utf-8")
    assert resident.identity(environment) != before


@pytest.mark.nightly
def test_an_outdated_one_is_replaced(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a run with another environment, a server with that environment serves the next run."""
    monkeypatch.delenv(resident.PLACE)
    monkeypatch.setenv("TMPDIR", str(place.parent))
    monkeypatch.setattr(tempfile, "tempdir", str(place.parent))
    path = resident.resident_path()
    assert path is not None
    first = serve()
    assert wait_until(path.exists, START_SECONDS)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    ForkServer().close()
    first.communicate(timeout=30)
    assert wait_until(path.exists, START_SECONDS)

    next_server = ForkServer()
    next_server.close()

    assert isinstance(next_server._process, resident.ForkedServer)
    assert resident.end_resident(path) == "30"
    assert wait_until(lambda: not path.exists(), 10)


def test_a_shared_folder_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that others may use, or a link, is no place for the socket."""
    monkeypatch.delenv(resident.PLACE)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"pytest-fa-{os.getuid()}"

    assert resident.resident_path() == folder / "server.sock"
    folder.chmod(0o777)
    assert resident.resident_path() is None
    folder.rmdir()
    folder.symlink_to(tmp_path)
    assert resident.resident_path() is None

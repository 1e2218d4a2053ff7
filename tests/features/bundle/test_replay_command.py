"""The bundle of a run is made, verified and replayed, end to end."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.factories import PYTHON_SOURCE
from tests.projects import ONE_CASE, WRONG_SOURCE, NewProject, Project
from tests.written_runs import end_run

REPOSITORY = Path(__file__).parents[3]

# What a stranger could add to a bundle so that it is always reproduced.
EVIL_CONFTEST = "import os\nos._exit(0)\n"


@dataclasses.dataclass(frozen=True)
class Bundled:
    """A project and the bundle of its run."""

    project: Project
    archive: Path

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run `python -m pytest_fa bundle` in the project's folder."""
        return _command(self.project, *words)


def _command(project: Project, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest_fa", "bundle", *words],
        cwd=project.folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture(scope="module")
def bundled(new_project: NewProject) -> Bundled:
    """Judge a right and a wrong variant on one case, and bundle the run with an ini and a conftest that end pytest."""
    project = new_project("bundled")
    project.python_variant("good")
    project.python_variant("wrong", WRONG_SOURCE)
    run = project.suite(ONE_CASE, "-k", "test_correct and (good or wrong)")
    project.write("conftest.py", EVIL_CONFTEST)
    project.write("pytest.ini", "[pytest]\naddopts = --collect-only\n")
    (log,) = project.logs
    made = _command(project, "make", "--records", str(log), "--exit-status", str(run.ret))
    assert made.returncode == 0, made.stderr
    (archive,) = (project.folder / "artifacts").glob("repro_bundle_*.tar.gz")
    return Bundled(project, archive)


def test_it_is_verified(bundled: Bundled) -> None:
    """The bundle of a run with a wrong variant is verified: it says that the variant is wrong."""
    result = bundled.command("verify", str(bundled.archive))
    assert (result.returncode, result.stdout.splitlines()[-1]) == (
        0,
        f"VERIFIED {bundled.archive.name}: 2 records, 0 problems",
    )


@pytest.mark.nightly
def test_it_is_reproduced(bundled: Bundled, tmp_path: Path) -> None:
    """Both outcomes are reproduced from the bundle alone; its ini file and conftest.py do not take part."""
    folder = tmp_path / "replay"
    result = bundled.command("replay", str(bundled.archive), "--folder", str(folder))
    answer = f"REPRODUCED {bundled.archive.name} at level right: 2 REPRODUCED"
    assert (result.returncode, result.stdout.splitlines()) == (0, [answer]), result.stderr
    assert "1 failed, 1 passed" in (folder / "pytest-1.txt").read_text(encoding="utf-8")


def test_the_command_of_a_reviewer(bundled: Bundled, tmp_path: Path) -> None:
    """`./repro.sh replay FILE` verifies, replays every level of the bundle, and leaves its answers."""
    for name in ("repro.sh", "constraints.txt"):
        shutil.copy(REPOSITORY / name, tmp_path)
    words = [str(tmp_path / "repro.sh"), "--env=current", "replay", bundled.archive.name, "--variant=good"]
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run(
        words, cwd=bundled.archive.parent, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert f"VERIFIED {bundled.archive.name}: 2 records, 0 problems" in lines
    assert f"REPRODUCED {bundled.archive.name} at level all with --variant=good: 1 REPRODUCED" in lines
    (answers,) = (tmp_path / "artifacts").glob("replay_*.json")
    replay = json.loads(answers.read_text())
    assert (replay["file"], replay["answer"]) == (bundled.archive.name, "REPRODUCED")
    assert [(item["name"], item["answer"]) for item in replay["items"]] == [
        (f"good-{ONE_CASE.removeprefix('--fa-case=')}", "REPRODUCED")
    ]


@pytest.mark.nightly
def test_another_kernel_is_not_reproduced(bundled: Bundled, new_project: NewProject) -> None:
    """A source that is not the one that was judged is refused; if the maker forges its hash, the replay differs."""
    project = new_project("exchanged")
    project.python_variant("good", WRONG_SOURCE)
    project.python_variant("wrong", WRONG_SOURCE)
    log = project.folder / "artifacts/records/run.jsonl"
    log.parent.mkdir(parents=True)
    log.write_bytes(bundled.project.logs[0].read_bytes())
    words = ("make", "--records", str(end_run(log, 1)), "--exit-status", "1")
    refused = _command(project, *words)
    assert (refused.returncode, "kernels/good/entry.py: its sha256 is " in refused.stderr) == (2, True)
    right, wrong = (hashlib.sha256(source.encode()).hexdigest() for source in (PYTHON_SOURCE, WRONG_SOURCE))
    log.write_text(log.read_text(encoding="utf-8").replace(right, wrong), encoding="utf-8")
    end_run(log, 1)
    assert _command(project, *words).returncode == 0
    (archive,) = (project.folder / "artifacts").glob("repro_bundle_*.tar.gz")
    result = _command(project, "replay", str(archive))
    assert result.returncode == 1
    case = ONE_CASE.removeprefix("--fa-case=")
    assert result.stdout.splitlines() == [
        f"NOT REPRODUCED good-{case}: the outcome was ok, here it is wrong",
        f"NOT REPRODUCED {archive.name} at level right: 1 NOT REPRODUCED, 1 REPRODUCED",
    ]


@pytest.mark.nightly
@pytest.mark.needs_nvcc
def test_a_build_is_reproduced(new_project: NewProject) -> None:
    """The same compiler makes the same machine code from the packed source."""
    project = new_project("built")
    project.cuda_variant("zero")
    run = project.suite("--fa-static", "--fa-variant=zero", "--fa-arch=sm_90a")
    (log,) = project.logs
    assert _command(project, "make", "--records", str(log), "--exit-status", str(run.ret)).returncode == 0
    (archive,) = (project.folder / "artifacts").glob("repro_bundle_*.tar.gz")
    result = _command(project, "replay", str(archive), "--level=build")
    assert (result.returncode, result.stdout.splitlines()) == (
        0,
        [f"REPRODUCED {archive.name} at level build: 1 REPRODUCED"],
    )

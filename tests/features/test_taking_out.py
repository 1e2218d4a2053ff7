"""Each feature can be taken out, with those that require it, and the rest still works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pytest_fa
from pytest_fa.feature import FEATURES, features
from tests.projects import CASE, Project
from tests.tiers import nightly_but

PACKAGE = Path(pytest_fa.__file__).parent


def with_dependants(name: str) -> set[str]:
    """A feature and all that require it, directly or through others."""
    absent = {name}
    while more := {each.name for each in features() if absent & set(each.requires)} - absent:
        absent |= more
    return absent


def test_every_folder_is_listed() -> None:
    """The list of features has every folder of `features/`, each with a `plugin.py`."""
    folders = {path.parent.name for path in (PACKAGE / "features").glob("*/plugin.py")}
    others = {path.name for path in (PACKAGE / "features").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert (set(FEATURES), others) == (folders, folders)


def test_a_feature_says_what_it_requires() -> None:
    """A feature imports only features that it requires, directly or through others."""
    known = {feature.name: set(feature.requires) for feature in features()}
    wrong = []
    for name, requires in known.items():
        reachable = {name, *requires}
        while more := {each for required in reachable for each in known[required]} - reachable:
            reachable |= more
        for path in (PACKAGE / "features" / name).rglob("*.py"):
            if "python_" in str(path.relative_to(PACKAGE)):
                continue  # kernels of the self-test
            text = path.read_text(encoding="utf-8")
            wrong += [
                f"{path.name}: {other}" for other in set(known) - reachable if f"pytest_fa.features.{other}." in text
            ]
    assert wrong == []


@pytest.mark.parametrize("name", nightly_but(FEATURES, "gate", "html", "watch"))
def test_the_rest_works(project: Project, tmp_path: Path, name: str) -> None:
    """Without a feature and its dependants, help, collection and the check of a variant work as before."""
    absent = with_dependants(name)
    shutil.copytree(PACKAGE, tmp_path / "pytest_fa", ignore=shutil.ignore_patterns("__pycache__"))
    for each in absent:
        shutil.rmtree(tmp_path / "pytest_fa" / "features" / each)
    project.python_variant("mine")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", "PYTEST_FA_SERVER": "off"}

    def output(*words: str) -> str:
        command = [sys.executable, "-P", "-m", *words]
        done = subprocess.run(
            command, cwd=project.folder, env=environment, capture_output=True, text=True, check=False, timeout=100
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    flags = {row.flag for each in features() if each.name in absent for row in each.options}
    commands = {command.name for each in features() if each.name in absent for command in each.commands}
    shown = output("pytest", "--help")
    assert [flag for flag in flags if f"{flag}=" in shown or f"  {flag} " in shown] == []
    listed = output("pytest_fa", "--help").split("{", 1)[1].split("}", 1)[0].split(",")
    assert commands & set(listed) == set()
    run = output(
        "pytest", "--pyargs", "pytest_fa.suite", "--fa-variant=mine", f"--fa-case={CASE}", "--benchmark-disable"
    )
    assert "mine: 2/2 checks passed; not timed" in run

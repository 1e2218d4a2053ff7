"""Small projects with kernels of their own, and inner pytests that run in them as processes of their own.

Several tests look at one inner run, so projects are made for a module as well as for a test: pytester's live one test.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from pytest_fa.records.log import read_records
from pytest_fa.records.record import Record
from tests.factories import CUDA_SOURCE, MANIFEST, PYTHON_MANIFEST, PYTHON_SOURCE

SHAPE = "b1h2s64d64-fp16"
CASE = f"{SHAPE}-seed0"
ONE_CASE = f"--fa-case={CASE}"
COMPANIONS = ["noop", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_math"]
ZERO_MANIFEST = MANIFEST + "defines: {BLOCK: 64}\n"

# Scores scaled by 1.5, and one NaN: what a judge must catch.
WRONG_SOURCE = PYTHON_SOURCE.replace("* scale", "* scale * 1.5")
NAN_SOURCE = PYTHON_SOURCE.replace(
    "    return result if", '    result[0, 1, 5, 2] = float("nan")\n    return result if'
)

# For an inner conftest.py: what the process had imported when it ended, one file for every process.
WRITE_MODULES = """\
import os
import pathlib
import sys


def pytest_unconfigure(config):
    names = "\\n".join(sys.modules)
    pathlib.Path(__file__).with_name(f"modules-{os.getpid()}.txt").write_text(names)
"""

# For an inner conftest.py: a GPU of compute capability 9.0 as far as selecting and building go.
PRETEND_GPU = """\
import pytest_fa.build.builder
import pytest_fa.build.target
import pytest_fa.session.builds
import pytest_fa.session.case_runner
import pytest_fa.session.run_plan
import pytest_fa.session.session
from pytest_fa.records.environment import Gpu

GPU = Gpu("Pretended GPU", "GPU-0", (9, 0), "1.0", "13.0")
SESSION = pytest_fa.session
for module in (
    pytest_fa.build.builder,
    pytest_fa.build.target,
    SESSION.builds,
    SESSION.case_runner,
    SESSION.run_plan,
    SESSION.session,
):
    module.find_gpu = lambda: GPU
"""


@dataclasses.dataclass(frozen=True)
class Run:
    """What one inner pytest gave."""

    ret: int
    outlines: list[str]
    errlines: list[str]
    seconds: float
    junit: ET.Element

    @property
    def text(self) -> str:
        """Both streams."""
        return "\n".join((*self.outlines, *self.errlines))

    @property
    def said(self) -> list[str]:
        """Every line on both streams, without the empty ones."""
        return [line for line in (*self.outlines, *self.errlines) if line.strip()]

    @property
    def ids(self) -> list[str]:
        """The tests that `--collect-only -q` listed, without their file."""
        return [line.split("::", 1)[1] for line in self.outlines if "::" in line]

    @property
    def outcomes(self) -> dict[str, str]:
        """What became of each test, by its id: passed, failed, skipped or error."""
        return {str(case.get("name")): _outcome(case)[0] for case in self.junit.iter("testcase")}

    @property
    def reasons(self) -> dict[str, str]:
        """Why a test failed or was skipped, by its id."""
        return {str(case.get("name")): text for case in self.junit.iter("testcase") if (text := _outcome(case)[1])}

    def failure(self, test: str) -> list[str]:
        """The lines that the terminal shows for one failed test."""
        heads = [index for index, line in enumerate(self.outlines) if re.match(r"([_=-])\1+ .* \1+$", line)]
        for start, end in zip(heads, [*heads[1:], len(self.outlines)], strict=True):
            if self.outlines[start].strip("_ ") == test:
                return self.outlines[start + 1 : end]
        return []


@dataclasses.dataclass(frozen=True)
class Project:
    """A folder with an ini file and kernels of its own, on a machine without a GPU."""

    folder: Path
    cache: Path

    def write(self, name: str, text: str) -> None:
        """A file of the project."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def ini(self, *lines: str) -> None:
        """The ini file; every run leaves its outcomes in junit.xml."""
        self.write("pytest.ini", "\n".join(("[pytest]", "addopts = --junitxml=junit.xml", *lines, "")))

    def python_variant(
        self, name: str, source: str = PYTHON_SOURCE, manifest: str = PYTHON_MANIFEST, root: str = "kernels"
    ) -> None:
        """A variant that runs on the CPU."""
        self.write(f"{root}/{name}/variant.yaml", manifest)
        self.write(f"{root}/{name}/entry.py", source)

    def cuda_variant(self, name: str, source: str = CUDA_SOURCE, manifest: str = ZERO_MANIFEST) -> None:
        """A variant that needs a compiler and a GPU."""
        self.write(f"kernels/{name}/variant.yaml", manifest)
        self.write(f"kernels/{name}/kernel.cu", source)

    def run(self, *arguments: str, env: Mapping[str, str] | None = None) -> Run:
        """Run pytest here, in a process of its own; `env` adds to the environment."""
        outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        ours = {"XDG_CACHE_HOME": str(self.cache), "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "120", "PY_COLORS": "0"}
        junit = self.folder / "junit.xml"
        junit.unlink(missing_ok=True)
        start = time.perf_counter()
        run = subprocess.run(
            [sys.executable, "-m", "pytest", *arguments],
            cwd=self.folder,
            env={**outer, **ours, **(env or {})},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        seconds = time.perf_counter() - start
        tree = ET.parse(junit).getroot() if junit.is_file() else ET.Element("testsuites")  # noqa: S314  # our own file
        return Run(run.returncode, run.stdout.splitlines(), run.stderr.splitlines(), seconds, tree)

    def suite(self, *arguments: str, env: Mapping[str, str] | None = None) -> Run:
        """Run the shipped suite."""
        return self.run("--pyargs", "pytest_fa.suite", *arguments, env=env)

    def collect(self, *arguments: str) -> Run:
        """Collect the shipped suite."""
        return self.suite("--collect-only", "-q", *arguments)

    def ids(self, *arguments: str) -> list[str]:
        """The ids that the shipped suite selects, in order."""
        return self.collect(*arguments).ids

    @property
    def logs(self) -> list[Path]:
        """The record files of every run so far, oldest first."""
        found = (self.folder / "artifacts" / "records").glob("*.jsonl")
        return sorted(found, key=lambda path: path.stat().st_mtime_ns)

    @property
    def records(self) -> list[Record]:
        """The records of every run so far."""
        return [record for path in self.logs for record in read_records(path)]

    @property
    def modules(self) -> list[set[str]]:
        """What each inner process had imported, where its conftest.py was `WRITE_MODULES`."""
        return [set(path.read_text(encoding="utf-8").splitlines()) for path in self.folder.glob("modules-*.txt")]


NewProject = Callable[[str], Project]


@pytest.fixture(scope="session")
def new_project(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> NewProject:
    """`new_project("name")`: an empty project, for fixtures that several tests share."""

    def new(name: str) -> Project:
        project = Project(tmp_path_factory.mktemp(name), shared_cache)
        project.ini()
        return project

    return new


@pytest.fixture
def project(new_project: NewProject) -> Project:
    """An empty project for one test."""
    return new_project("project")


def variants_of(ids: list[str], test: str) -> list[str]:
    """The variants that `test` runs over, in order, each once."""
    found = [re.match(rf"{test}\[([^-\]]+)", each) for each in ids]
    return list(dict.fromkeys(match[1] for match in found if match))


def cases_of(ids: list[str], test: str) -> list[str]:
    """The cases that `test` runs over, in order, each once."""
    found = [re.match(rf"{test}\[[^-\]]+-(.*)\]", each) for each in ids]
    return list(dict.fromkeys(match[1] for match in found if match))


def _outcome(case: ET.Element) -> tuple[str, str]:
    for tag, outcome in (("error", "error"), ("failure", "failed"), ("skipped", "skipped")):
        if (found := case.find(tag)) is not None:
            return outcome, found.get("message", "") if tag == "skipped" else found.text or ""
    return "passed", ""

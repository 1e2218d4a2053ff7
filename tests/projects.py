"""Small projects with their own kernels, in which tests start pytest.

A run that executes kernels is a separate process.  One that only collects, lists or refuses its arguments happens in
the test's own process, which takes a twentieth of the time.

Several tests examine the same inner run, so projects are created per module or per test; pytester's only per test.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from _pytest.assertion.rewrite import AssertionRewritingHook

from pytest_fa.records.environment import find_gpu
from pytest_fa.records.log import read_records
from pytest_fa.records.record import Record
from tests.factories import CUDA_SOURCE, MANIFEST, PYTHON_MANIFEST, PYTHON_SOURCE

SHAPE = "b1h2s64d64-fp16"
CASE = f"{SHAPE}-seed0"
ONE_CASE = f"--fa-case={CASE}"
COMPANIONS = ["noop", "sdpa_flash", "sdpa_flash_cpu", "sdpa_cudnn", "sdpa_efficient", "sdpa_math"]
# Plugins that inner runs do not use.  Their imports take a second, half of it those of pytest-html and what it needs.
HYPOTHESIS, SYRUPY, *OTHER_PLUGINS = ("hypothesispytest", "syrupy", "html", "html_fixtures", "metadata", "platformdirs")
ZERO_MANIFEST = MANIFEST + "defines: {BLOCK: 64}\n"

# Two wrong kernels: one scales the scores by 1.5, the other writes one NaN.
WRONG_SOURCE = PYTHON_SOURCE.replace("* scale", "* scale * 1.5")
NAN_SOURCE = PYTHON_SOURCE.replace(
    "    return result if", '    result[0, 1, 5, 2] = float("nan")\n    return result if'
)

# For a command line of bash: `python` and `pytest` are those of this environment.  As functions, they leave PATH as it
# is, without which the resident server would serve no such command.
PROGRAMS = f'python() {{ {sys.executable} "$@"; }}; pytest() {{ python -m pytest "$@"; }}; '

# For an inner conftest.py: each process writes the modules that it has imported to a file when it ends.
WRITE_MODULES = """\
import os
import pathlib
import sys


def pytest_unconfigure(config):
    names = "\\n".join(sys.modules)
    pathlib.Path(__file__).with_name(f"modules-{os.getpid()}.txt").write_text(names)
"""

# For an inner conftest.py: pytest's process writes which modules of this package it imported after the first test began
# to run, and how many it had imported before.
WRITE_LATE_IMPORTS = """\
import json
import pathlib
import sys

import pytest


def imported():
    return {name for name in sys.modules if name.split(".")[0] == "pytest_fa"}


class Imports:
    early = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self):
        self.early = self.early or imported()

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self):
        late = sorted(imported() - self.early)
        pathlib.Path(__file__).with_name("imports.json").write_text(json.dumps([len(self.early), late]))


def pytest_configure(config):
    config.pluginmanager.register(Imports())
"""

# For an inner conftest.py: simulates a GPU of compute capability 9.0 for selection and building.
PRETEND_GPU = """\
import pytest_fa.build.compile_batch
import pytest_fa.build.target
import pytest_fa.session.builds
import pytest_fa.session.case_runner
import pytest_fa.session.run_plan
import pytest_fa.session.session
from pytest_fa.records.environment import Gpu

GPU = Gpu("Pretended GPU", "GPU-0", (9, 0), "1.0", "13.0")
SESSION = pytest_fa.session
for module in (
    pytest_fa.build.compile_batch,
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
    """The result of one inner pytest run."""

    ret: int
    outlines: list[str]
    errlines: list[str]
    seconds: float
    junit: ET.Element

    @property
    def text(self) -> str:
        """Standard output and standard error."""
        return "\n".join((*self.outlines, *self.errlines))

    @property
    def all_lines(self) -> list[str]:
        """Every non-empty line of standard output and standard error."""
        return [line for line in (*self.outlines, *self.errlines) if line.strip()]

    @property
    def ids(self) -> list[str]:
        """The ids of the tests that `--collect-only -q` listed, without their file."""
        return [line.split("::", 1)[1] for line in self.outlines if "::" in line]

    @property
    def outcomes(self) -> dict[str, str]:
        """The outcome of each test by its id: passed, failed, skipped or error."""
        return {str(case.get("name")): _outcome(case)[0] for case in self.junit.iter("testcase")}

    @property
    def reasons(self) -> dict[str, str]:
        """The reason why a test failed or was skipped, by its id."""
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
    """A folder with an ini file and its own kernels, on a machine that shows no GPU to the inner pytest.

    `server` is the socket of the resident server that its runs use, so that they need not import torch; or `off`.
    """

    folder: Path
    cache: Path
    server: str = "off"

    def write(self, name: str, text: str) -> None:
        """Write a file of the project."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def ini(self, *lines: str, has_html: bool = False) -> None:
        """Write the ini file: every run writes its outcomes to junit.xml, and loads no plugin that it does not use.

        With `has_html`, pytest-html is loaded, and so are the other plugins of this environment but the tests' own two.
        """
        left_out = (HYPOTHESIS, SYRUPY) if has_html else (HYPOTHESIS, SYRUPY, *OTHER_PLUGINS)
        addopts = " ".join(("addopts = --junitxml=junit.xml", *(f"-p no:{name}" for name in left_out)))
        self.write("pytest.ini", "\n".join(("[pytest]", addopts, *lines, "")))

    def python_variant(
        self, name: str, source: str = PYTHON_SOURCE, manifest: str = PYTHON_MANIFEST, root: str = "kernels"
    ) -> None:
        """Write a variant that runs on the CPU."""
        self.write(f"{root}/{name}/variant.yaml", manifest)
        self.write(f"{root}/{name}/entry.py", source)

    def cuda_variant(
        self, name: str, source: str = CUDA_SOURCE, manifest: str = ZERO_MANIFEST, root: str = "kernels"
    ) -> None:
        """Write a variant that needs a compiler and a GPU."""
        self.write(f"{root}/{name}/variant.yaml", manifest)
        self.write(f"{root}/{name}/kernel.cu", source)

    def run(self, *arguments: str, env: Mapping[str, str] | None = None, limit_seconds: float = 240) -> Run:
        """Run pytest in this folder, in a separate process; `env` adds to its environment."""
        start = time.perf_counter()
        self._junit.unlink(missing_ok=True)
        process = subprocess.run(
            [sys.executable, "-m", "pytest", *arguments],
            cwd=self.folder,
            env=self._environment(env),
            capture_output=True,
            text=True,
            timeout=limit_seconds,
            check=False,
        )
        seconds = time.perf_counter() - start
        return Run(process.returncode, process.stdout.splitlines(), process.stderr.splitlines(), seconds, self._tree())

    @contextlib.contextmanager
    def started(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """Run the shipped suite in a separate process, whose output can be read while it runs."""
        with subprocess.Popen(
            [sys.executable, "-m", "pytest", "--pyargs", "pytest_fa.suite", *arguments],
            cwd=self.folder,
            env=self._environment(None),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            yield process

    def run_here(self, *arguments: str, env: Mapping[str, str] | None = None) -> Run:
        """Run pytest in this folder, in this process: for runs that execute no kernel.

        A project with a conftest.py, which may change this package, gets a separate process.
        """
        if (self.folder / "conftest.py").is_file():
            return self.run(*arguments, env=env)
        start = time.perf_counter()
        self._junit.unlink(missing_ok=True)
        out, err = io.StringIO(), io.StringIO()
        streams = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
        with _as_in_a_process(self.folder, self._environment(env)), streams[0], streams[1]:
            status = pytest.main(list(arguments))
        seconds = time.perf_counter() - start
        return Run(int(status), out.getvalue().splitlines(), err.getvalue().splitlines(), seconds, self._tree())

    def suite(self, *arguments: str, env: Mapping[str, str] | None = None) -> Run:
        """Run the shipped suite."""
        return self.run("--pyargs", "pytest_fa.suite", *arguments, env=env)

    def collect(self, *arguments: str) -> Run:
        """Collect the shipped suite, in this process."""
        return self.run_here("--pyargs", "pytest_fa.suite", "--collect-only", "-q", *arguments)

    def complaint(self, *arguments: str) -> list[str]:
        """The lines of the usage error that ends a run of pytest with these arguments before it collects."""
        result = self.run_here("--collect-only", *arguments)
        assert result.ret == pytest.ExitCode.USAGE_ERROR, result.text
        return result.all_lines

    @property
    def _junit(self) -> Path:
        return self.folder / "junit.xml"

    def _tree(self) -> ET.Element:
        """The outcomes of the latest run; without elements if it wrote none."""
        return ET.parse(self._junit).getroot() if self._junit.is_file() else ET.Element("testsuites")  # noqa: S314  # trusted file

    def _environment(self, added: Mapping[str, str] | None) -> dict[str, str]:
        """The environment of an inner run in this project."""
        fixed = {"XDG_CACHE_HOME": str(self.cache), "COLUMNS": "120", "PY_COLORS": "0", "PYTEST_FA_SERVER": self.server}
        return {**inner_environment(), **fixed, **(added or {})}

    def ids(self, *arguments: str) -> list[str]:
        """The ids that the shipped suite selects, in order."""
        return self.collect(*arguments).ids

    @property
    def logs(self) -> list[Path]:
        """The record files of every run so far, oldest first."""
        paths = (self.folder / "artifacts" / "records").glob("*.jsonl")
        return sorted(paths, key=lambda path: path.stat().st_mtime_ns)

    @property
    def records(self) -> list[Record]:
        """The records of every run so far."""
        return [record for path in self.logs for record in read_records(path)]

    @property
    def modules(self) -> list[set[str]]:
        """The modules that each inner process had imported, if its conftest.py is `WRITE_MODULES`."""
        return [set(path.read_text(encoding="utf-8").splitlines()) for path in self.folder.glob("modules-*.txt")]


@contextlib.contextmanager
def _as_in_a_process(folder: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """Have this working folder and environment for a while; then forget the modules that were imported from there."""
    kept_environment, kept_path, kept_modules = dict(os.environ), list(sys.path), set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        # The package was imported long before the inner run asks for assertions in it that explain themselves.
        patch.setattr(AssertionRewritingHook, "_warn_already_imported", lambda *_: None)
        os.environ.clear()
        os.environ.update(environment)
        find_gpu.cache_clear()
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(kept_environment)
            find_gpu.cache_clear()
            sys.path[:] = kept_path
            for name in set(sys.modules) - kept_modules:
                if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(folder)):
                    del sys.modules[name]


def inner_environment() -> dict[str, str]:
    """The environment of an inner pytest: without the variables of the outer one, and without a GPU."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return {**kept, "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="session")
def resident_server() -> str:
    """The socket of the resident server of this test session, which all processes of pytest-xdist share.

    The server imports torch.  Where there is none, tests of projects are skipped.
    """
    if find_spec("torch") is None:
        pytest.skip("this environment has no torch")
    place = os.environ["FA_TEST_SERVER"]
    program = [sys.executable, "-m", "pytest_fa", "serve", "--idle-minutes", "5"]
    silent = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_RDWR, 0) for stream in range(3)]
    environment = {**inner_environment(), "PYTEST_FA_SERVER": place}
    # It ends at once if another process of pytest-xdist has started one.
    os.posix_spawn(sys.executable, program, environment, file_actions=silent, setsid=True)
    deadline = time.monotonic() + 60
    while not Path(place).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return place


NewProject = Callable[[str], Project]


@pytest.fixture(scope="session")
def new_project(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path, resident_server: str) -> NewProject:
    """`new_project("name")`: an empty project, for fixtures that several tests share."""

    def new(name: str) -> Project:
        project = Project(tmp_path_factory.mktemp(name), shared_cache, resident_server)
        project.ini()
        return project

    return new


@pytest.fixture
def project(new_project: NewProject) -> Project:
    """An empty project for one test."""
    return new_project("project")


def variants_of(ids: list[str], test: str) -> list[str]:
    """The variants that `test` runs over, in order, each once."""
    matches = [re.match(rf"{test}\[([^-\]]+)", test_id) for test_id in ids]
    return list(dict.fromkeys(match[1] for match in matches if match))


def cases_of(ids: list[str], test: str) -> list[str]:
    """The cases that `test` runs over, in order, each once."""
    matches = [re.match(rf"{test}\[[^-\]]+-(.*)\]", test_id) for test_id in ids]
    return list(dict.fromkeys(match[1] for match in matches if match))


def _outcome(case: ET.Element) -> tuple[str, str]:
    for tag, outcome in (("error", "error"), ("failure", "failed"), ("skipped", "skipped")):
        if (element := case.find(tag)) is not None:
            return outcome, element.get("message", "") if tag == "skipped" else element.text or ""
    return "passed", ""

"""`python -m pytest_fa judge` end to end: the document and the exit status, also where files and variables are hostile.

Each variant is judged once, in a folder whose ini files, conftest files, modules and environment try to change the
verdict; every test looks at one of these runs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

import pytest_fa
from pytest_fa.features.judge_command.document import EXIT_STATUSES, JudgeDocument, schema
from pytest_fa.records.log import read_records
from tests.factories import MANIFEST, PYTHON_SOURCE
from tests.projects import CASE, SHAPE, WRONG_SOURCE, NewProject, Project
from tests.tiers import nightly_after

BEFORE = "    scores ="
# Correct kernels that mostly wait, so that a busy machine changes their times little.
WAITING_SOURCE = PYTHON_SOURCE.replace("import torch\n", "import time\n\nimport torch\n", 1).replace(
    BEFORE, f"    time.sleep(SECONDS)\n{BEFORE}", 1
)
HANGING_SOURCE = PYTHON_SOURCE.replace(BEFORE, f"    while True:\n        pass\n{BEFORE}", 1)
CHEATING_SOURCE = PYTHON_SOURCE.replace(
    "    return result if",
    "    class Lazy(torch.Tensor):\n        pass\n\n    return result.as_subclass(Lazy)\n    return result if",
)
RAISING_SOURCE = PYTHON_SOURCE.replace(BEFORE, f"    raise ValueError('a hole')\n{BEFORE}", 1)

# A plugin that calls every test passed and every outcome ok; as conftest.py, as an installed plugin, and by its name.
HOSTILE_PLUGIN = """\
import pytest

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    report = yield
    report.outcome, report.longrepr = "passed", None
    if hasattr(report, "fa_record"):
        report.fa_record = type("Ok", (), {"outcome": "ok"})()
    return report

def pytest_sessionfinish(session):
    session.exitstatus = 0
"""
HOSTILE_INI = "[pytest]\naddopts = -p hostile --fa-tolerance=fp8 --fa-variant=sdpa_math\nfa_kernels = elsewhere\n"
ENDS_PYTHON = "import os\nos._exit(0)\n"


class Judged(NamedTuple):
    """One run of the command: its exit status, its document, and what it wrote to standard error."""

    status: int
    document: JudgeDocument
    log: str

    @property
    def summary(self) -> tuple[str, int]:
        """The status word and the exit status."""
        return self.document.status, self.status


def command(project: Project, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command in the project's folder."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    paths = [str(Path(pytest_fa.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    fixed = {"XDG_CACHE_HOME": str(project.cache), "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(
        [sys.executable, "-m", "pytest_fa", "judge", *words],
        cwd=project.folder,
        env={**inherited, **fixed, **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def judged(project: Project, *words: str, env: dict[str, str] | None = None) -> Judged:
    """Judge one variant on one case.  The document is the only thing on standard output."""
    process = command(project, *words, "--json", f"--case={CASE}", env=env)
    assert len(process.stdout.splitlines()) == 1, process.stdout + process.stderr
    document = msgspec.json.decode(process.stdout, type=JudgeDocument, strict=True)
    return Judged(process.returncode, document, process.stderr)


@pytest.fixture(scope="module")
def kernels(new_project: NewProject) -> Project:
    """Variants of every kind, with an ini file that only writes junit.xml."""
    project = new_project("judge")
    sources = {
        "quick": WAITING_SOURCE.replace("SECONDS", "0.01"),
        "usual": WAITING_SOURCE.replace("SECONDS", "0.02"),
        "slow": WAITING_SOURCE.replace("SECONDS", "0.05"),
        "wrong": WRONG_SOURCE,
        "hangs": HANGING_SOURCE,
        "cheats": CHEATING_SOURCE,
        "raises": RAISING_SOURCE,
    }
    for name, source in sources.items():
        project.python_variant(name, source)
    project.cuda_variant("broken", "int x = ;\n", MANIFEST)
    return project


@pytest.fixture(scope="module")
def resident() -> Iterator[socket.socket]:
    """A socket in the place of the resident server's, to which nothing may connect."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(f"{folder}/socket")
        listening.listen()
        listening.setblocking(False)
        yield listening


@pytest.fixture(scope="module")
def hostile(kernels: Project, resident: socket.socket) -> tuple[Project, dict[str, str]]:
    """The same variants beside files that try to change the verdict, and the environment that does."""
    folder = kernels.folder.with_name(f"{kernels.folder.name}-hostile")
    shutil.copytree(kernels.folder, folder)
    project = Project(folder, kernels.cache)
    for place in ("", "kernels/", "kernels/wrong/", "kernels/cheats/"):
        project.write(f"{place}conftest.py", HOSTILE_PLUGIN)
        project.write(f"{place}pytest.ini", HOSTILE_INI)
    project.write("hostile.py", HOSTILE_PLUGIN)
    for name in ("startup.py", "pytest.py", "torch.py", "msgspec.py"):
        project.write(name, ENDS_PYTHON)
    variables = {
        "PYTEST_ADDOPTS": "-p hostile",
        "PYTEST_PLUGINS": "hostile",
        "PYTHONSTARTUP": str(folder / "startup.py"),
        "PYTHONINSPECT": "1",
        "PYTEST_FA_SERVER": resident.getsockname(),
    }
    return project, variables


RUNS = {
    "quick": ("quick", "--gate-baseline=usual"),
    "slow": ("slow", "--gate-baseline=usual"),
    "wrong": ("wrong",),
    "hangs": ("hangs", "--watchdog=1"),
    "cheats": ("kernels/cheats",),
    "raises": ("raises",),
    "broken": ("broken",),
}
TRIES = 3  # a busy machine may be too noisy for a verdict; only a gate without a verdict is tried again
EXPECTED = {
    "quick": "faster",
    "slow": "slower",
    "wrong": "wrong",
    "hangs": "hung",
    "cheats": "cheat",
    "raises": "crashed",
    "broken": "not_built",
}


@pytest.fixture(scope="module")
def runs(hostile: tuple[Project, dict[str, str]]) -> dict[str, Judged]:
    """The run of each variant, made when a test first asks for it."""
    project, env = hostile

    class Made(dict[str, Judged]):
        def __missing__(self, name: str) -> Judged:
            for _ in range(TRIES):
                self[name] = judged(project, *RUNS[name], env=env)
                if self[name].document.status != "undecided":
                    break
            return self[name]

    return Made()


MARKS = {
    "broken": [pytest.mark.needs_nvcc, pytest.mark.nightly],
    "hangs": [pytest.mark.nightly],
    "quick": [pytest.mark.alone, pytest.mark.nightly],
    "slow": [pytest.mark.alone, pytest.mark.nightly],
}
NAMES = [pytest.param(name, marks=MARKS.get(name, [])) for name in RUNS]


@pytest.mark.parametrize("name", NAMES)
def test_the_status_is_that_of_the_records(runs: dict[str, Judged], name: str) -> None:
    """Each variant has its own status and exit status, whatever ini files, conftest files and variables say."""
    run = runs[name]
    assert run.summary == (EXPECTED[name], EXIT_STATUSES[EXPECTED[name]]), run.log  # type: ignore[index]
    assert (run.document.variant, run.document.exit_status) == (name, run.status)


@pytest.mark.parametrize("name", NAMES)
def test_the_document_fits_the_schema(runs: dict[str, Judged], name: str) -> None:
    """The published schema accepts each document, and rejects it without its status."""
    jsonschema: Any = pytest.importorskip("jsonschema")
    content = json.loads(msgspec.json.encode(runs[name].document))
    jsonschema.Draft202012Validator.check_schema(schema())
    jsonschema.validate(content, schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({key: value for key, value in content.items() if key != "status"}, schema())


@pytest.mark.nightly
@pytest.mark.alone
def test_a_faster_variant_has_its_ratio(runs: dict[str, Judged]) -> None:
    """The ratio and its interval are below the required ratio, and the records have the gate."""
    document = runs["quick"].document
    assert document.ratio is not None
    assert (document.ratio.shape, document.ratio.baseline, document.required_ratio) == (SHAPE, "usual", 1.0)
    assert 0 < (document.ratio.low or 0) <= (document.ratio.value or 0) <= (document.ratio.high or 2) < 1
    assert (document.failure, document.checks.passed, document.checks.failed) == (None, 1, 0)
    assert [each.shape for each in document.times] == [SHAPE]
    assert [line for line in document.not_judged if "--fa-case left it out" in line] == list(document.not_judged)
    assert document.not_judged


@pytest.mark.nightly
@pytest.mark.alone
def test_a_slower_variant_has_its_ratio(runs: dict[str, Judged]) -> None:
    """The lower end of the interval is above 1, and no check failed."""
    document = runs["slow"].document
    assert document.ratio is not None
    assert (document.ratio.low or 0) > 1
    assert document.failure is None


def test_a_wrong_variant_has_its_place(runs: dict[str, Judged], hostile: tuple[Project, dict[str, str]]) -> None:
    """The document has the checks, the place and the commands; the record file has the same record."""
    document = runs["wrong"].document
    assert document.failure is not None
    assert document.failure.place is not None
    assert (document.failure.case, document.failure.checks[0]) == (CASE, "max")
    assert document.failure.place.first_bad == (0, 0, 0, 0)
    assert document.rerun_command == f"python -P -m pytest_fa judge wrong --case={CASE}"
    assert document.records is not None
    records = read_records(hostile[0].folder / document.records)
    assert [(record.variant, record.outcome, record.other_plugins) for record in records] == [("wrong", "wrong", ())]


def test_no_resident_server_is_used(runs: dict[str, Judged], resident: socket.socket) -> None:
    """A stranger's socket in the place of the resident server's gets no connection."""
    assert runs["wrong"].summary == ("wrong", 1)
    with pytest.raises(BlockingIOError):
        resident.accept()


def test_the_rest_is_not_run_after_a_failure(runs: dict[str, Judged]) -> None:
    """A variant that is wrong, hangs or cheats is not gated: the first failure ends the run."""
    for name in ("wrong", "hangs", "cheats", "raises"):
        document = runs[name].document
        assert (document.ratio, document.checks.passed, document.checks.failed) == (None, 0, 1)
        assert document.seconds < 60


@pytest.mark.nightly
def test_without_hostile_files_the_verdict_is_the_same(kernels: Project, runs: dict[str, Judged]) -> None:
    """In a clean folder, the same variant has the same document but for paths, times and commands."""
    clean = judged(kernels, "wrong")
    assert clean.summary == runs["wrong"].summary
    assert (clean.document.failure, clean.document.reason) == (
        runs["wrong"].document.failure,
        runs["wrong"].document.reason,
    )


def test_a_variant_for_a_gpu_needs_one(kernels: Project) -> None:
    """A variant that needs a GPU, on a machine without one and without a build that fails, has the status `machine`."""
    kernels.python_variant("on_gpu", manifest=MANIFEST + 'entry: {kind: python, target: "entry:forward"}\n')
    run = judged(kernels, "on_gpu")
    assert run.summary == ("machine", 5)
    assert run.document.reason.startswith("on_gpu was not judged: on_gpu needs a GPU, and this machine has none")


@pytest.mark.parametrize(
    ("words", "reason"),
    nightly_after(
        3,
        [
            (("quack",), "no variant 'quack'; did you mean 'quick'? (see --fa-list)"),
            (("[qs][ul]*",), "judge: '[qs][ul]*' names 2 variants (quick, slow); name one of them"),
            (("kernels/none",), "judge: there is no folder 'kernels/none'; give a variant's name, or its folder"),
            ((), "judge: name a variant, or the folder of one"),
            (("quick", "--gate=fast"), "--gate: 'fast' is not a ratio; give 0.01 to 100, such as 0.95"),
            (("quick", "--speed"), "judge: unrecognized arguments: --speed"),
            (("noop",), "--gate: no selected variant can be gated: noop (overhead, computes attention)"),
        ],
    ),
    ids=["unknown", "several", "no folder", "no name", "no ratio", "unknown option", "never gated"],
)
def test_a_wrong_use_has_a_document(kernels: Project, words: tuple[str, ...], reason: str) -> None:
    """A command that cannot be run has exit status 4 and says what is wrong."""
    process = command(kernels, *words, "--json")
    document = msgspec.json.decode(process.stdout, type=JudgeDocument)
    assert (process.returncode, document.status) == (4, "usage")
    assert document.reason.startswith(reason)


@pytest.mark.nightly
def test_a_person_reads_a_few_lines(kernels: Project) -> None:
    """Without --json, standard output has the verdict, the place, the cause and the rerun command."""
    process = command(kernels, "wrong", f"--case={CASE}")
    lines = process.stdout.splitlines()
    assert (process.returncode, lines[0]) == (1, "wrong: wrong (exit status 1)")
    assert lines[1].startswith(f"  wrong-{CASE}: wrong: max error ")
    assert f"  rerun: python -P -m pytest_fa judge wrong --case={CASE}" in lines
    assert len(lines) < 20


@pytest.mark.nightly
def test_the_loop_of_the_page_ends_at_a_cheat(kernels: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop of `docs/how-to/optimiser.md` runs as it is printed: it judges proposals and ends at a cheat."""
    page = (Path(__file__).parents[3] / "docs/how-to/optimiser.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(source, names)  # noqa: S102  # the page's own code
    kernels.python_variant("proposed")
    monkeypatch.chdir(kernels.folder)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONPATH", str(Path(pytest_fa.__file__).parents[1]))
    documents: list[Any] = []

    def propose(document: Any) -> str:
        documents.append(document)
        return WRONG_SOURCE if document is None else CHEATING_SOURCE

    with pytest.raises(SystemExit, match="cheat: the output is a"):
        names["optimise"]("kernels/proposed", propose, 3)
    assert [document and document["status"] for document in documents] == [None, "wrong"]


def test_the_schema_can_be_printed(kernels: Project) -> None:
    """`judge --schema` prints the schema and needs no variant."""
    process = command(kernels, "--schema")
    assert (process.returncode, json.loads(process.stdout)) == (0, schema())

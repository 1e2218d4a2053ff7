"""The process that decides is out of a kernel's reach: its memory, its files, what it imports, and what it wrote."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import pytest_fa
from pytest_fa.features.bundle.commands import main as bundle_main
from tests.factories import PYTHON_SOURCE
from tests.projects import CASE, SHAPE, Project, inner_environment

DOCUMENTED_LOOP = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

# For an inner conftest.py: no process of the run has capabilities, as if the user were not root.
WITHOUT_CAPABILITIES = """\
import ctypes
import struct

PR_SET_SECUREBITS, NO_ROOT, CAPSET, CAPABILITY_VERSION_3 = 28, 3, 126, 0x20080522
ctypes.CDLL(None).prctl(PR_SET_SECUREBITS, NO_ROOT, 0, 0, 0)
ctypes.CDLL(None).syscall(CAPSET, struct.pack("Ii", CAPABILITY_VERSION_3, 0), bytes(24))
"""
BECOME_PYTHON = "import os, sys; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
# A forked child tries to reach the candidate that has forked it, as a control, and the process that decides: that one
# started the server, which has forked the candidate.
REACHING = """\
import ctypes
import json
import os
import pathlib

PTRACE_SEIZE = 0x4206


def reached(pid):
    libc, ways = ctypes.CDLL(None, use_errno=True), []
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    for way, attempt in (
        ("files", lambda: os.close(os.open(f"/proc/{pid}/fd/0", os.O_RDONLY))),
        ("memory", lambda: os.close(os.open(f"/proc/{pid}/mem", os.O_RDWR))),
        ("attach", lambda: libc.ptrace(PTRACE_SEIZE, pid, None, None) == 0 or os.open("", 0)),
    ):
        try:
            attempt()
        except OSError:
            continue
        ways.append(way)
    return ways


def parent_of(pid):
    return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def reach():
    out = pathlib.Path(os.environ["FA_TEST_OUT"])
    candidate = os.getpid()
    decider = parent_of(parent_of(candidate))
    if out.exists() or os.fork():
        return
    try:
        ways = {"candidate": reached(candidate), "decider": reached(decider)}
        ways["name"] = pathlib.Path(f"/proc/{decider}/cmdline").read_bytes().decode().split("\\0")
        out.with_suffix(".new").write_text(json.dumps(ways))
        out.with_suffix(".new").rename(out)
    finally:
        os._exit(0)


"""
# Calls the earlier records of its own run something else, also after the last one was written.
REWRITING = """\
import pathlib
import threading
import time


def rewrite():
    while True:
        for path in pathlib.Path("artifacts/records").glob("*.jsonl"):
            content = path.read_bytes()
            if b'"measured_at":"2' in content:
                path.write_bytes(content.replace(b'"measured_at":"2', b'"measured_at":"1'))
        time.sleep(0.001)


threading.Thread(target=rewrite, daemon=True).start()


"""
# Changes a module of the installed package that the deciding process needs for its last lines.
POISONING = """\
import os
import pathlib


def poison():
    path = pathlib.Path(os.environ["FA_TEST_PACKAGE"], "table", "answer.py")
    path.write_text("import os\\nos._exit(0)\\n")


"""


def with_calls(prefix: str, call: str) -> str:
    """The usual kernel, which calls a function of `prefix` in each call."""
    return prefix + PYTHON_SOURCE.replace("    scores =", f"    {call}\n    scores =", 1)


@pytest.mark.nightly
def test_a_run_whose_records_were_changed_is_red(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """A right kernel that rewrites records of its run: the run names the file and fails, and makes no bundle.

    The process that decides cannot be reached; the candidate, which anybody may debug, can.
    """
    project.python_variant("forger", with_calls(REACHING + REWRITING, "reach()"))
    project.write("conftest.py", WITHOUT_CAPABILITIES)
    project = dataclasses.replace(project, server="off")  # the server is a child of the process that decides
    out = project.folder / "reached.json"
    cases = f"--fa-case={CASE},{SHAPE}-seed1"
    run = project.suite(cases, "-k", "test_correct", env={"FA_TEST_OUT": str(out)})
    (line,) = [line for line in run.all_lines if line.startswith("fa: records were changed: ")]
    assert "line 1 is not the one that was written (" in line
    assert run.ret == pytest.ExitCode.TESTS_FAILED
    ways = json.loads(out.read_text())
    assert "pytest" in ways["name"], ways["name"]
    assert (ways["candidate"], ways["decider"]) == (["files", "memory", "attach"], [])

    (records,) = (project.folder / "artifacts" / "records").glob("*.jsonl")
    for status in ("0", "1"):
        places = [f"--folder={project.folder}", f"--artifacts={project.folder}/artifacts", f"--records={records}"]
        assert bundle_main(["make", *places, f"--exit-status={status}"]) == 2
        error = capsys.readouterr().err
        assert f"{records} was changed while its run's kernels ran: " in error
        assert "line 1 is not the one that was written (" in error


@pytest.mark.nightly
def test_a_module_that_is_changed_meanwhile_decides_nothing(project: Project, tmp_path: Path) -> None:
    """A kernel that changes a module which `judge` imports at its end gets no other verdict; it cannot attach."""
    package = tmp_path / "installed" / "pytest_fa"
    shutil.copytree(Path(pytest_fa.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    project.python_variant("poisoner", with_calls(REACHING + POISONING, "reach(); poison()"))
    out = tmp_path / "reached.json"
    fixed = {"XDG_CACHE_HOME": str(project.cache), "FA_TEST_PACKAGE": str(package), "FA_TEST_OUT": str(out)}
    words = ["-P", "-m", "pytest_fa", "judge", "poisoner", "--json", f"--case={CASE}"]
    process = subprocess.run(
        [sys.executable, "-c", f"{WITHOUT_CAPABILITIES}{BECOME_PYTHON}", *words],
        cwd=project.folder,
        env={**inner_environment(), **fixed, "PYTHONPATH": str(package.parent)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    document = json.loads(process.stdout)
    assert (document["status"], document["failure"]["outcome"]) == ("not_built", "build_changed"), process.stderr
    assert process.returncode == document["exit_status"] == 1
    assert f"{package}/table/answer.py changed while the variant ran" in document["reason"]
    ways = json.loads(out.read_text())
    assert "judge" in ways["name"], ways["name"]
    assert (ways["candidate"], ways["decider"]) == (["files", "memory", "attach"], [])


@pytest.mark.parametrize(
    ("returncode", "stdout"),
    [(-9, '{"status": "faster", "exit_status": 0}'), (0, '{"status": "wrong", "exit_status": 1}'), (0, ""), (0, "[]")],
)
def test_the_loop_of_the_page_believes_no_forged_document(
    monkeypatch: pytest.MonkeyPatch, returncode: int, stdout: str
) -> None:
    """The loop of `docs/how-to/optimiser.md` ends if document and return code contradict each other."""
    page = (Path(__file__).parents[2] / "docs/how-to/optimiser.md").read_text(encoding="utf-8")
    (source,) = DOCUMENTED_LOOP.findall(page)
    names: dict[str, Any] = {}
    exec(source, names)  # noqa: S102  # the page's own code

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, returncode, stdout)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(SystemExit, match=f"no verdict: exit status {returncode}"):
        names["judge"]("kernels/mine")

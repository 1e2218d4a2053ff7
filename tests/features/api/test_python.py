"""`check`, `time` and `gate` in scripts: the documentation's examples, other folders, and the end of a script."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pytest_fa.features.new.new import write_variant
from tests.projects import CASE, WRONG_SOURCE, Project

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "own-tests.md"
LEFT_SECONDS = 5.0  # after which no process of a script may be left


def run_script(folder: Path, cache: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a folder on a machine that shows no GPU."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = {**inherited, "XDG_CACHE_HOME": str(cache), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-c", text],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def without_numbers(text: str) -> str:
    """A text in which every number is `0`, and each line has only single spaces."""
    return re.sub(r"\d+(\.\d+)?(e[-+]\d+)?", "0", re.sub(r"[ ─]+", " ", text)).strip()


@pytest.mark.nightly
@pytest.mark.alone
def test_the_examples_of_the_page(tmp_path: Path, shared_cache: Path) -> None:
    """The examples of docs/how-to/own-tests.md run one after another, and the first prints what the page shows."""
    page = PAGE.read_text(encoding="utf-8")
    blocks, shown = (
        re.findall(r"```python\n(.*?)```", page, re.DOTALL),
        re.findall(r"```text\n(.*?)```", page, re.DOTALL),
    )
    write_variant("mine", "python", tmp_path / "kernels")
    process = run_script(tmp_path, shared_cache, "\n".join(blocks))
    assert (process.returncode, len(blocks)) == (0, 3), process.stderr
    assert process.stdout.startswith(" variant ")
    lines = without_numbers(process.stdout).splitlines()
    assert without_numbers(shown[0]).splitlines() == lines[:3]
    assert lines[-1].startswith("function: no variant 'mien'; did you mean 'mine'? (looked in ")


@pytest.mark.nightly
def test_a_script_elsewhere(project: Project, tmp_path: Path) -> None:
    """A script in another folder gives `kernels`; it imports no torch for a variant, and leaves no process and file."""
    project.python_variant("mine")
    text = (
        "import sys, pytest_fa\n"
        "from pytest_fa.host.fork_server import live_servers\n"
        f"record = pytest_fa.check('mine', {CASE!r}, kernels={str(project.folder / 'kernels')!r})\n"
        "print(record.outcome, 'torch' in sys.modules, *live_servers())\n"
    )
    process = run_script(tmp_path, project.cache, text)
    outcome, has_torch, *servers = process.stdout.split()
    assert (process.returncode, outcome, has_torch, len(servers)) == (0, "ok", "False", 1), process.stderr
    deadline = time.monotonic() + LEFT_SECONDS
    while time.monotonic() < deadline and any(Path("/proc", pid).exists() for pid in servers):
        time.sleep(0.05)
    assert [pid for pid in servers if Path("/proc", pid).exists()] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_the_rerun_command_of_a_record(project: Project, tmp_path: Path) -> None:
    """The rerun command of a wrong variant fails in the same way, from any folder."""
    project.python_variant("mine", WRONG_SOURCE)
    kernels = str(project.folder / "kernels")
    text = f"import pytest_fa\nprint(pytest_fa.check('mine', {CASE!r}, kernels={kernels!r}).rerun_command)\n"
    command = run_script(tmp_path, project.cache, text).stdout.strip()
    run = project.run(*command.split()[1:-2], "-k", "test_correct")
    assert (run.ret, run.outcomes) == (1, {f"test_correct[mine-{CASE}]": "failed"})


def test_an_abrupt_end_leaves_nothing(project: Project) -> None:
    """The server of a script that is killed ends as well."""
    project.python_variant("mine")
    text = (
        "import os, signal, pytest_fa\n"
        "from pytest_fa.host.fork_server import live_servers\n"
        f"pytest_fa.check('mine', {CASE!r})\n"
        "print(*live_servers(), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    process = run_script(project.folder, project.cache, text)
    (server,) = process.stdout.split()
    deadline = time.monotonic() + LEFT_SECONDS
    while time.monotonic() < deadline and Path("/proc", server).exists():
        time.sleep(0.05)
    assert (process.returncode, Path("/proc", server).exists()) == (-9, False)

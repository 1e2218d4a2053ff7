"""When the worker servers of a run start and end, seen from inside pytest's process."""

from __future__ import annotations

import pytest

from tests.projects import ONE_CASE, NewProject, Project

# Says in pytest's process whether a server runs: when manifests are read, when the summary is written, and at the end.
CONFTEST = """\
import pytest
from pytest_fa.session import run_plan
from pytest_fa.host.fork_server import live_servers

discover = run_plan.discover

def discover_and_say(*arguments):
    print(f"servers while manifests are read: {len(live_servers())}")
    return discover(*arguments)

run_plan.discover = discover_and_say

def pytest_terminal_summary(config):
    from pytest_fa.plugin.state import session_of
    server = session_of(config).runner.workers._server
    print(f"its socket in the summary: {'closed' if server._control.fileno() == -1 else 'open'}")

@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    print(f"servers at the end: {len(live_servers())}")
"""
READ, SUMMARY, END = "servers while manifests are read: ", "its socket in the summary: ", "servers at the end: "


@pytest.fixture(scope="module")
def project(new_project: NewProject) -> Project:
    """A project whose conftest.py says when servers run."""
    project = new_project("servers")
    project.python_variant("good")
    project.write("conftest.py", CONFTEST)
    return project


def test_a_server_serves_from_manifests_to_summary(project: Project) -> None:
    """The server starts before manifests are read, is let go before the summary, and has ended at the end."""
    run = project.suite("--fa-variant=good", ONE_CASE, "-k", "test_correct", "-s")
    assert run.ret == pytest.ExitCode.OK
    assert [f"{READ}1", f"{SUMMARY}closed", f"{END}0"] == [
        line for line in run.all_lines if line.startswith((READ, SUMMARY, END))
    ]


@pytest.mark.parametrize(
    ("arguments", "servers"),
    [(["--fa-variant=god"], 1), (["--fa-static"], 0), (["--setup-plan", ONE_CASE], 0), (["--fixtures-per-test"], 0)],
    ids=["typo", "static", "setup plan", "fixtures per test"],
)
def test_no_server_is_left(project: Project, arguments: list[str], servers: int) -> None:
    """A server is ended if a name is wrong, and none is started for a run without a call of a variant."""
    project.write("conftest.py", CONFTEST.replace("def pytest_terminal_summary", "def summary"))
    lines = project.suite("-s", *arguments).all_lines
    assert [f"{READ}{servers}", f"{END}0"] == [line for line in lines if line.startswith((READ, END))]

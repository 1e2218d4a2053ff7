"""The worked example of two environments: its commands are accepted."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.projects import NewProject
from tests.projects import new_project as _new_project
from tests.projects import resident_server as _resident_server
from tests.repo.test_doc_commands import REPOSITORY, commands_of_page

PAGE = "how-to/torch-versions.md"
VARIANT = "race_s_by_one_warp"
COMMANDS = commands_of_page(PAGE)

new_project, resident_server = _new_project, _resident_server  # pytest looks for fixtures in this module


@pytest.fixture(scope="module")
def ids(new_project: NewProject) -> dict[str, tuple[int, list[str]]]:
    """The exit status and the ids of the tests that each pytest command of the page selects."""
    project = new_project("ladder")
    (project.folder / "kernels").symlink_to(REPOSITORY / "kernels")
    commands = [command for command in COMMANDS if command.startswith("pytest ")]
    runs = {command: project.collect(*shlex.split(command)[1:]) for command in commands}
    return {command: (run.ret, run.ids) for command, run in runs.items()}


@pytest.mark.nightly
def test_every_command_selects_its_tests(ids: dict[str, tuple[int, list[str]]]) -> None:
    """Each pytest command of the page selects tests of the kernel that it names, and no others."""
    assert len(ids) == 7
    for command, (status, selected) in ids.items():
        names = {name for name in (VARIANT, "stage2") if f"--fa-variant={name} " in f"{command} "}
        assert (status, {re.split(r"[\[@-]", test_id)[1] for test_id in selected}) == (0, names), command

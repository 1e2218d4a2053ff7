"""The worked example of two environments: its commands are accepted, and `compare` prints what the page shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import msgspec
import pytest

from pytest_fa.__main__ import main
from pytest_fa.records.record import Record, to_json
from tests.factories import RECORD, SHAPE, build, record
from tests.plugin.conftest import NewProject
from tests.plugin.conftest import new_project as _new_project
from tests.plugin.conftest import resident_server as _resident_server
from tests.repo.test_doc_commands import REPOSITORY, commands_of_page

PAGE = "torch-versions.md"
TEXT = (REPOSITORY / "docs" / PAGE).read_text(encoding="utf-8")
VARIANT, TRIALS = "race_s_by_one_warp", 100
COMMANDS = commands_of_page(PAGE)

new_project, resident_server = _new_project, _resident_server  # pytest looks for fixtures in this module


def trials(torch: str, right: int) -> list[Record]:
    """The records of 100 trials of one build, the first `right` of which passed, under a version of torch."""
    environment = msgspec.structs.replace(RECORD.environment, torch=torch)
    builds = (build("sm_90a", kernel=(96, 0, 0)),)
    outcomes = ["ok"] * right + ["wrong"] * (TRIALS - right)
    return [
        record(
            VARIANT, f"{SHAPE}-seed{seed}", outcome=outcome, check=RECORD.check, builds=builds, environment=environment
        )
        for seed, outcome in enumerate(outcomes)
    ]


def test_compare_prints_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For 100 and 21 right trials of the same code under two versions of torch, the output is that of the page."""
    for name, torch, right in (("before", "2.1.0", TRIALS), ("after", "2.5.0", 21)):
        path = tmp_path / name / "records" / "run.jsonl"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"".join(to_json(each) + b"\n" for each in trials(torch, right)))
    monkeypatch.chdir(tmp_path)
    (command,) = [command for command in COMMANDS if command.startswith("python -m pytest_fa compare ")]
    assert main(shlex.split(command)[3:]) == 0
    (shown,) = re.findall(r"^```\n(A: .*?)```", TEXT, re.MULTILINE | re.DOTALL)
    assert capsys.readouterr().out == shown


@pytest.fixture(scope="module")
def ids(new_project: NewProject) -> dict[str, tuple[int, list[str]]]:
    """The exit status and the ids of the tests that each pytest command of the page selects."""
    project = new_project("ladder")
    (project.folder / "kernels").symlink_to(REPOSITORY / "kernels")
    commands = [command for command in COMMANDS if command.startswith("pytest ")]
    runs = {command: project.suite(*shlex.split(command)[1:], "--collect-only", "-q") for command in commands}
    return {command: (run.ret, run.ids) for command, run in runs.items()}


def test_every_command_selects_its_tests(ids: dict[str, tuple[int, list[str]]]) -> None:
    """Each pytest command of the page selects tests of the kernel that it names, and no others."""
    assert len(ids) == 7
    for command, (status, selected) in ids.items():
        names = {name for name in (VARIANT, "stage2") if f"--fa-variant={name} " in f"{command} "}
        assert (status, {re.split(r"[\[@-]", test_id)[1] for test_id in selected}) == (0, names), command


def test_the_tests_that_the_page_cites_exist() -> None:
    """`tests/device/test_races.py` requires what the page says, at the shapes that it names."""
    source = (REPOSITORY / "tests" / "device" / "test_races.py").read_text(encoding="utf-8")
    assert source.count(">= RUNS - 1") == 2
    lines = {line.partition("  #")[0] for line in source.splitlines()}
    assert {"RUNS = 20", 'TARGET_CASE = "b1h8s512d64-fp16"', 'CROWDED = "b4h16s512d64-fp16"'} <= lines

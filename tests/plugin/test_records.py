"""The results of a run: record files, saved records (--fa-save), JUnit properties, and the table."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from pytest_fa.records.log import read_records
from pytest_fa.records.read import read_record
from pytest_fa.records.record import Record
from tests.factories import PYTHON_SOURCE
from tests.projects import CASE, ONE_CASE, SHAPE, WRONG_SOURCE, NewProject, Project, Run

SECOND = f"{SHAPE}-seed1"


@dataclasses.dataclass(frozen=True)
class Kept:
    """A project after two runs with --fa-save.

    `log` is the record file of the first run, `profile` the saved records after it.
    """

    project: Project
    first: Run
    second: Run
    log: bytes
    profile: list[Record]

    @property
    def saved_path(self) -> Path:
        """The variant's saved records."""
        return self.project.folder / "profiles" / "cpu" / "good.jsonl"


@pytest.fixture(scope="module")
def kept(new_project: NewProject) -> Kept:
    """A run that judges and times a good and a wrong variant on one case, and one of the good variant on two cases."""
    project = new_project("records")
    project.python_variant("good")
    project.python_variant("wrong", WRONG_SOURCE)
    project.write("conftest.py", "")
    first = project.suite(ONE_CASE, "-k", "good or wrong", "--fa-save")
    (log,) = project.logs
    profile = read_records(project.folder / "profiles" / "cpu" / "good.jsonl")
    content = log.read_bytes()
    second = project.suite(f"--fa-case={CASE},{SECOND}", "-k", "good and test_correct", "--fa-save")
    return Kept(project, first, second, content, profile)


@pytest.mark.nightly
def test_a_record_names_what_could_have_changed_it(kept: Kept) -> None:
    """Every record names the conftest.py of its run, and no plugin of pytest, pytest-benchmark and this package."""
    for line in kept.log.splitlines():
        plugins = read_record(line).other_plugins
        assert "conftest.py" in plugins
        assert {name for name in plugins if name.startswith(("pytest_fa", "_pytest", "pytest_benchmark"))} == set()


def test_one_line_for_each_case(kept: Kept) -> None:
    """Every case that ran is one line of the record file, in order; a wrong one is judged once and not timed."""
    lines = [read_record(line) for line in kept.log.splitlines()]
    assert [(line.kind, line.id, line.outcome) for line in lines] == [
        ("correct", f"good-{CASE}", "ok"),
        ("correct", f"wrong-{CASE}", "wrong"),
        ("speed", f"good-{CASE}", "ok"),
    ]


def test_a_second_seed_has_a_tenth_of_the_repeats(kept: Kept) -> None:
    """On the CPU, the first seed of a shape is repeated up to 100 times, and another seed 10 times."""
    counts = {line.id: line.repeats.count for line in read_records(kept.saved_path) if line.repeats}
    assert counts[f"good-{SECOND}"] == 10
    assert 10 < counts[f"good-{CASE}"] <= 100


@pytest.mark.nightly
def test_a_seed_after_a_crash_has_all_repeats(new_project: NewProject) -> None:
    """A seed that was never repeated does not reduce the repeats of the next one."""
    project = new_project("crash_first")
    crash = """\
    import os, pathlib
    if not os.path.exists("seen"):
        pathlib.Path("seen").touch()
        os._exit(3)
"""
    project.python_variant("crashes", PYTHON_SOURCE.replace("    scores =", crash + "    scores =", 1))
    project.suite(f"--fa-case={CASE},{SECOND}", "--fa-variant=crashes", "-k", "test_correct")
    (log,) = project.logs
    crashed, other = (read_record(line) for line in log.read_bytes().splitlines())
    assert (crashed.outcome, crashed.repeats, other.outcome) == ("crashed", None, "ok")
    assert other.repeats is not None
    assert other.repeats.count > 10


def test_a_line_has_every_field(kept: Kept) -> None:
    """Each line has exactly the fields of a record."""
    assert [list(json.loads(line)) for line in kept.log.splitlines()] == [list(Record.__struct_fields__)] * 3


def test_a_line_says_where_it_was_made(kept: Kept) -> None:
    """A record has the environment, the role and the parts of the case."""
    record = kept.profile[0]
    assert record.case is not None
    assert (record.environment.gpu, record.role, record.case.id) == (None, "candidate", CASE)


def test_only_a_right_output_is_timed(kept: Kept) -> None:
    """The timing of the correct variant has samples; the wrong variant has no timing."""
    _, wrong, good = map(read_record, kept.log.splitlines())
    assert good.speed is not None
    assert (len(good.speed.device.samples_us) > 1, wrong.speed) == (True, None)


def test_earlier_files_stay(kept: Kept) -> None:
    """Each run writes its own record file, and the file of the first run does not change."""
    before, after = kept.project.logs
    assert (before.read_bytes(), len(read_records(after))) == (kept.log, 2)


def test_run_says_where_its_records_are(kept: Kept) -> None:
    """The end of a run shows the paths of its record file and of the saved records, relative to the project."""
    lines = [line for line in kept.second.all_lines if line.startswith(("records: ", "saved: "))]
    assert lines == [
        f"records: artifacts/records/{kept.project.logs[1].name}",
        "saved: profiles/cpu/good.jsonl: 2 results, all passed",
    ]


def test_save_keeps_earlier_lines(kept: Kept) -> None:
    """A saved record replaces the one of the same kind and case; the records of other cases stay."""
    saved = read_records(kept.saved_path)
    assert [(record.kind, record.id) for record in saved] == [
        ("correct", f"good-{CASE}"),
        ("correct", f"good-{SECOND}"),
        ("speed", f"good-{CASE}"),
    ]
    assert (saved[2] == kept.profile[1], saved[0] == kept.profile[0]) == (True, False)


def test_junit_has_a_headline(kept: Kept) -> None:
    """The JUnit file has one short `fa` property for each case that ran."""
    headlines = {
        case.get("name"): [each.get("value", "") for each in case.iter("property") if each.get("name") == "fa"]
        for case in kept.first.junit.iter("testcase")
    }
    outcomes = {name: [text.split(",")[0].split(" error ")[0] for text in texts] for name, texts in headlines.items()}
    assert outcomes == {
        f"test_correct[good-{CASE}]": ["ok"],
        f"test_correct[wrong-{CASE}]": ["wrong"],
        f"test_speed[good-{SHAPE}]": ["ok"],
        f"test_speed[wrong-{SHAPE}]": [],
    }


def test_table_has_a_row_for_each_variant(kept: Kept) -> None:
    """The terminal shows one row for each variant and shape, with its verdict."""
    rows = [line.split()[:3] for line in kept.first.all_lines if line.startswith(("  good ", "  wrong "))]
    assert rows == [["good", "ok", "2/2"], ["wrong", "WRONG", "1/1"]]


@pytest.mark.nightly
def test_a_run_without_times_keeps_the_saved_ones(project: Project) -> None:
    """With --benchmark-disable nothing is timed, and --fa-save leaves the times of an earlier run as they are."""
    project.python_variant("good")
    project.suite(ONE_CASE, "-k", "good and (test_correct or test_speed)", "--fa-save")
    saved = project.folder / "profiles" / "cpu" / "good.jsonl"
    before = {record.kind: record for record in read_records(saved)}
    assert before["speed"].speed is not None

    project.suite(ONE_CASE, "-k", "good and (test_correct or test_speed)", "--fa-save", "--benchmark-disable")
    after = {record.kind: record for record in read_records(saved)}
    assert after["speed"] == before["speed"]
    assert after["correct"].measured_at > before["correct"].measured_at


def test_folders_can_be_moved(project: Project) -> None:
    """--fa-artifacts and --fa-profiles replace the default folders."""
    project.python_variant("good")
    project.suite(ONE_CASE, "-k", "test_correct", "--fa-save", "--fa-artifacts=out", "--fa-profiles=kept")
    paths = [path for path in project.folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
    assert sorted(path.name for path in paths) == ["kept", "kernels", "out"]
    assert [len(read_records(path)) for path in project.folder.glob("*/*/*.jsonl")] == [1, 1]


def test_nothing_is_written_without_a_record(kept: Kept) -> None:
    """A run that only collects writes no record file."""
    before = kept.project.logs
    kept.project.collect()
    assert kept.project.logs == before


def test_folder_that_cannot_be_written(project: Project) -> None:
    """If records cannot be written, the run ends without an internal error."""
    project.write("kernels/broken/variant.yaml", "step: [\n")
    result = project.suite("-k", "test_build", "--fa-artifacts=pytest.ini")
    assert [line for line in result.all_lines if "INTERNALERROR" in line] == []


def test_a_failure_is_saved_and_hides_the_time(new_project: NewProject) -> None:
    """After a failure, `--fa-save` keeps the time in the file, says that it does not count, and counts the failure."""
    project = new_project("failure")
    saved = project.folder / "profiles" / "cpu" / "good.jsonl"
    run = (ONE_CASE, "-k", "good and (test_correct or test_speed)", "--fa-save")
    project.python_variant("good")
    passed = project.suite(*run)
    assert "saved: profiles/cpu/good.jsonl: 2 results, all passed" in passed.all_lines
    project.python_variant("good", WRONG_SOURCE)
    failed = project.suite(*run)
    assert [(each.kind, each.outcome) for each in read_records(saved)] == [
        ("correct", "ok"),
        ("correct", "wrong"),
        ("speed", "ok"),
    ]
    assert "saved: profiles/cpu/good.jsonl: 1 result, 1 wrong" in failed.all_lines
    (line,) = [line for line in failed.all_lines if line.startswith("fa: good at ")]
    assert re.fullmatch(
        rf"fa: good at {SHAPE}: wrong \(\S+\) and not passed since, so \S+ us of \S+ does not count", line
    )
    project.python_variant("good")
    project.suite(ONE_CASE, "-k", "good and test_correct", "--fa-save")
    assert [each.outcome for each in read_records(saved)] == ["ok", "ok"]

"""`--fa-shard`: each test runs in exactly one shard, and the merged records are those of one run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.features.shards.shards import SHARD_SUFFIX
from pytest_fa.records.files import read_record_file
from pytest_fa.records.record import Record
from tests.projects import COMPANIONS, WRONG_SOURCE, NewProject, Project

SHAPES = [f"b1h1s{size}d64-fp16" for size in (1, 2, 3, 5, 8, 13, 21)]
CASES = ",".join(f"{shape}-seed{seed}" for shape in SHAPES for seed in (0, 1))
SELECTED = (f"--fa-case={CASES}", "--fa-variant=good,wrong", "-k", "test_correct or test_build")
COUNT = 3


@pytest.fixture(scope="module")
def project(new_project: NewProject) -> Project:
    """A right and a wrong variant for the CPU; one run of both, and one run of each of three shards."""
    project = new_project("shards")
    project.python_variant("good")
    project.python_variant("wrong", WRONG_SOURCE)
    project.suite(*SELECTED, "--fa-artifacts=one")
    for number in range(1, COUNT + 1):
        words = ("-n2",) if number == COUNT else ()
        project.suite(*SELECTED, f"--fa-shard={number}/{COUNT}", f"--fa-artifacts=parts/{number}", *words)
    return project


def merge(project: Project, *folders: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m pytest_fa records merge` in the project's folder."""
    words = [sys.executable, "-m", "pytest_fa", "records", "merge", *folders, "-o", "merged.jsonl"]
    return subprocess.run(words, cwd=project.folder, capture_output=True, text=True, timeout=60, check=False)


def results_of(path: Path) -> list[tuple[object, ...]]:
    """What a run decided: kind, id, outcome, figures of the check and hashes of the tensors of each record."""
    return [_result(record) for record in read_record_file(path).records]


def _result(record: Record) -> tuple[object, ...]:
    check = msgspec.to_builtins(record.check)
    return record.kind, record.id, record.outcome, check, record.fingerprints


@pytest.mark.nightly
def test_the_merged_records_are_those_of_one_run(project: Project, snapshot: SnapshotAssertion) -> None:
    """Three shards, one of them with two workers, have the records of one run in the same order, and its status."""
    result = merge(project, "parts")
    # the wrong variant fails, except for a single key, whose weight is always 1
    assert (result.returncode, result.stderr) == (1, "")
    assert snapshot == result.stdout
    (one,) = (project.folder / "one/records").glob("*.jsonl")
    assert results_of(project.folder / "merged.jsonl") == results_of(one)


def test_a_shape_is_in_one_shard(project: Project) -> None:
    """All variants and seeds of a shape are in the same shard, and every shard has something to do."""
    shapes = []
    for number in range(1, COUNT + 1):
        (log,) = (project.folder / f"parts/{number}/records").glob("*.jsonl")
        shapes.append({record.case.shape_id for record in read_record_file(log).records if record.case})
    assert sorted(shape for part in shapes for shape in part) == sorted(SHAPES)
    assert all(shapes)


def test_a_lost_shard_is_never_green(project: Project) -> None:
    """Without the second shard, nothing is written, and its tests are named."""
    (project.folder / "merged.jsonl").unlink(missing_ok=True)
    result = merge(project, "parts/1", "parts/3")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("shard 2/3 is missing: ")
    assert not (project.folder / "merged.jsonl").exists()


def test_an_empty_shard_passes(project: Project) -> None:
    """More shards than shapes leave some without a test: they pass, and the header says which shard it is."""
    selection = (f"--fa-case={SHAPES[0]}-seed0", "--fa-variant=good", "-k", "test_correct")
    runs = [project.suite(*selection, f"--fa-shard={number}/2", "--fa-artifacts=empty") for number in (1, 2)]
    assert [run.ret for run in runs] == [0, 0]
    assert "fa: no GPU; 1 of 23 variants; shard 2 of 2" in runs[1].all_lines
    assert merge(project, "empty").returncode == 0


def test_no_selection_at_all_still_fails(project: Project) -> None:
    """A selection without any test is an error in every shard."""
    run = project.suite("--fa-shard=1/2", "-k", "nothing", "--fa-artifacts=none")
    assert run.ret == pytest.ExitCode.NO_TESTS_COLLECTED


@pytest.mark.nightly
def test_collecting_writes_no_plan(project: Project) -> None:
    """With --collect-only the shards are shown, and nothing is written."""
    ids = [set(project.ids("--fa-variant=good", f"--fa-shard={part}/2", "--fa-artifacts=seen")) for part in (1, 2)]
    assert ids[0] | ids[1] == set(project.ids("--fa-variant=good"))
    assert not ids[0] & ids[1]
    assert list(project.folder.glob(f"seen/**/*{SHARD_SUFFIX}")) == []


def test_baselines_are_in_the_shard_of_their_candidate(project: Project) -> None:
    """Whatever is timed at a shape is timed in one shard."""
    for part in (1, 2):
        ids = project.ids("--fa-variant=good", f"--fa-shard={part}/2", "-k", "test_speed")
        names = {each.partition("[")[2].partition("-b")[0] for each in ids}
        assert {"good", *COMPANIONS} == names


@pytest.mark.parametrize("text", ["0/3", "4/3", "3", "a/b", "1/", "1/100000"])
def test_wrong_parts(project: Project, text: str) -> None:
    """A part that cannot be is a usage error with an example."""
    run = project.collect(f"--fa-shard={text}")
    expected = f"ERROR: --fa-shard: '{text}' is not a part; give I/N with 1 <= I <= N <= 10000, such as 2/7"
    assert (run.ret, run.all_lines) == (pytest.ExitCode.USAGE_ERROR, [expected])

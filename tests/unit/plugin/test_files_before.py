"""A kernel that changes what is known of the machine, or records of earlier runs, is noticed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_fa.plugin.files_before import FilesBefore


@pytest.fixture
def ended_pid() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


@pytest.fixture
def running_pid() -> Iterator[int]:
    """The id of a process that runs."""
    process = subprocess.Popen(["sleep", "60"])
    yield process.pid
    process.kill()
    process.wait()


@pytest.fixture
def before(tmp_path: Path, ended_pid: int) -> FilesBefore:
    """The files of a folder with one earlier run and the noise of one GPU."""
    for folder in ("artifacts/records", "profiles/gpu"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "profiles/gpu/noise.json").write_text("{}")
    (tmp_path / f"artifacts/records/20260101T000000Z-{ended_pid}.jsonl").write_text("{}\n")
    return FilesBefore(tmp_path / "artifacts", tmp_path / "profiles")


def test_unchanged_files(before: FilesBefore) -> None:
    """Nothing is named if nothing changed, or if there is no folder."""
    assert before.changed_machine_files() == before.changed_records() == []
    nothing = FilesBefore(Path("/nowhere"), Path("/nowhere"))
    assert nothing.changed_machine_files() == nothing.changed_records() == []


@pytest.mark.parametrize("change", ["written", "added", "removed"])
def test_what_is_known_of_the_machine(before: FilesBefore, tmp_path: Path, change: str) -> None:
    """A file that decides how noisy or how fast the machine is taken to be is named, even with its old times."""
    noise, ceilings = (tmp_path / "profiles/gpu" / name for name in ("noise.json", "ceilings.json"))
    state = noise.stat()
    if change == "written":
        noise.write_text("[]")
        os.utime(noise, ns=(state.st_atime_ns, state.st_mtime_ns))
    elif change == "added":
        ceilings.write_text("{}")
    else:
        noise.unlink()
    assert [str(ceilings if change == "added" else noise)] == before.changed_machine_files()


def test_records_of_earlier_runs(before: FilesBefore, tmp_path: Path) -> None:
    """A record file that was changed or removed is named; one that is new is that of another run."""
    (path,) = (tmp_path / "artifacts/records").iterdir()
    path.with_name("20260101T000001Z-1.jsonl").write_text("{}\n")
    assert before.changed_records() == []
    path.unlink()
    assert [str(path)] == before.changed_records()


def test_a_run_that_goes_on_may_write(tmp_path: Path, running_pid: int) -> None:
    """A run beside this one appends to its own file."""
    path = tmp_path / "records" / f"20260101T000000Z-{running_pid}.jsonl"
    path.parent.mkdir()
    path.write_text("{}\n")
    before = FilesBefore(tmp_path, tmp_path)
    path.write_text("{}\n{}\n")
    assert before.changed_records() == []

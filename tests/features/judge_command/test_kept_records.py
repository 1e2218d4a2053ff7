"""The judge command believes only what it wrote itself, and says what became of its records."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_fa.build.late_imports import LateImports
from pytest_fa.features.judge_command.kept_records import KeptRecords
from pytest_fa.plugin.record_file import SUSPECT
from pytest_fa.records.log import RecordLog, read_records
from pytest_fa.records.written import read_written_or_none
from tests.factories import options, record, right_record, speed


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[KeptRecords]:
    """The records of a run that has written one."""
    finders = list(sys.meta_path)
    kept = KeptRecords(options(tmp_path, artifacts=tmp_path / "artifacts", records_folder=tmp_path / "profiles"))
    kept.append(right_record())
    yield kept
    sys.meta_path[:] = finders


def written_path(kept: KeptRecords) -> Path:
    """The path of its record file."""
    assert kept.path is not None
    return kept.path


def test_what_was_written_is_sealed(kept: KeptRecords) -> None:
    """The file has the record, and beside it stands what was written, with the exit status."""
    assert "" == kept.end(0)
    written = read_written_or_none(written_path(kept))
    assert written is not None
    assert (1, 0, "") == (written.count, written.exit_status, written.difference)
    assert kept.records == read_records(written_path(kept)) == [right_record()]


def test_imports_come_from_memory_from_its_creation_on(kept: KeptRecords) -> None:
    """Modules of this package are found in memory before any other place."""
    assert isinstance(sys.meta_path[0], LateImports)
    assert "" == kept.end(0)


@pytest.mark.usefixtures("kept")
def test_no_record_is_no_file(tmp_path: Path) -> None:
    """A run without a record has no file to seal."""
    empty = KeptRecords(options(tmp_path / "other", artifacts=tmp_path / "other"))
    assert (None, "", []) == (empty.path, empty.end(1), list(tmp_path.glob("other/*")))


def test_an_impossible_figure_is_no_record(kept: KeptRecords) -> None:
    """A record with a figure out of range is refused, and not written."""
    with pytest.raises(ValueError, match="device"):
        kept.append(record(kind="speed", speed=speed(-1.0)))
    assert 1 == len(kept.records) == len(read_records(written_path(kept)))


def forge(kept: KeptRecords) -> None:
    """Change the record file."""
    written_path(kept).write_text("{}\n")


def add_noise(kept: KeptRecords) -> None:
    """Write what is known of a GPU."""
    folder = written_path(kept).parents[2] / "profiles" / "gpu"
    folder.mkdir(parents=True)
    (folder / "noise.json").write_text("{}")


@pytest.mark.parametrize(
    ("change", "problem"),
    [(forge, ".jsonl: line 1 is not the one that was written"), (add_noise, "gpu/noise.json changed during this run")],
)
def test_a_change_is_a_problem(kept: KeptRecords, change: Callable[[KeptRecords], None], problem: str) -> None:
    """A kernel that changes the records, or what is known of the machine, is named, and the run has failed."""
    change(kept)
    found = kept.end(0)
    assert (True, True) == (problem in found, found.endswith(SUSPECT))
    written = read_written_or_none(written_path(kept))
    assert written is not None
    assert (1, found) == (written.exit_status, written.difference)


def test_a_changed_package_is_a_problem(kept: KeptRecords, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that changes a file of this package is named, although the records are right."""
    monkeypatch.setattr(LateImports, "changed_files", lambda _: ["site-packages/pytest_fa/judge/check.py"])
    assert f"site-packages/pytest_fa/judge/check.py changed during this run; {SUSPECT}" == kept.end(0)


def test_a_full_disk_is_a_problem(kept: KeptRecords, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that does not fit on the disk is lost; the line names the folder."""

    def fail(_log: RecordLog, _record: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RecordLog, "append", fail)
    kept.append(record())
    folder = written_path(kept).parent
    assert f"records were lost: {folder} cannot be written to: No space left on device" == kept.end(0)

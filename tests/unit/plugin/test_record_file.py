"""A run whose records were lost or changed has failed, whenever that happens, and says so in one line."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_fa.plugin.record_file import SUSPECT, RunFile
from pytest_fa.plugin.state import FILES_KEY, IMPORTS_KEY
from pytest_fa.plugin.terminal import Results
from pytest_fa.records.log import RecordLog
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record
from pytest_fa.records.written import read_written_or_none
from tests.factories import options, record

INCONCLUSIVE = 10


class Run:
    """The parts of pytest that the end of a run needs: a stash, an exit status, and the lines of the terminal."""

    def __init__(self, exit_status: int = 0) -> None:
        self.lines: list[str] = []
        self.session = SimpleNamespace(exitstatus=exit_status)
        terminal = SimpleNamespace(write_line=lambda line, **_: self.lines.append(line))
        plugins = {"session": self.session, "terminalreporter": terminal}
        manager = SimpleNamespace(getplugin=plugins.get)
        self.config: Any = SimpleNamespace(stash=pytest.Stash(), pluginmanager=manager)


@pytest.fixture
def file(tmp_path: Path) -> RunFile:
    """The file of a run that has written one record."""
    file = RunFile(tmp_path)
    file.append(record())
    return file


def test_an_unchanged_file_is_sealed(file: RunFile) -> None:
    """The end of a run writes what was written, with the exit status, and no line."""
    run = Run(exit_status=1)
    file.end(run.config)
    written = read_written_or_none(file.log.path)
    assert written is not None
    assert (written.count, written.sha256, written.exit_status, written.difference) == (1, file.log.sha256, 1, "")
    assert (run.lines, run.session.exitstatus) == ([], 1)


def test_a_change_after_the_summary_fails_the_run(file: RunFile) -> None:
    """A kernel that changes the file as its process ends makes a passed run a failed one, and is named."""
    run = Run()
    file.compare(run.config)
    assert not file.is_bad
    file.log.path.write_text("{}\n")
    file.end(run.config)
    assert run.session.exitstatus == pytest.ExitCode.TESTS_FAILED
    (line,) = run.lines
    assert line.startswith(f"fa: records were changed: {file.log.path}: line 1 is not the one that was written")
    written = read_written_or_none(file.log.path)
    assert written is not None
    assert (written.sha256, bool(written.difference)) == (file.log.sha256, True)


def test_a_changed_package_fails_the_run(file: RunFile) -> None:
    """A kernel that changes a file of this package makes the run a failed one, although its records are right."""
    run = Run()
    imports: Any = SimpleNamespace(changed_files=lambda: ["site-packages/pytest_fa/judge/check.py"])
    run.config.stash[IMPORTS_KEY] = imports
    file.end(run.config)
    assert run.session.exitstatus == pytest.ExitCode.TESTS_FAILED
    assert run.lines == [f"fa: records were changed: {file.changed}"]
    assert file.changed.startswith("site-packages/pytest_fa/judge/check.py changed during this run; ")


def test_a_changed_noise_file_fails_the_run(file: RunFile) -> None:
    """A kernel that changes what is known of the machine makes the run a failed one; others' records are named."""
    run = Run()
    files: Any = SimpleNamespace(changed_machine_files=lambda: ["p/noise.json"], changed_records=lambda: ["r/1.jsonl"])
    run.config.stash[FILES_KEY] = files
    file.end(run.config)
    assert run.session.exitstatus == pytest.ExitCode.TESTS_FAILED
    assert run.lines == [
        f"fa: records were changed: p/noise.json changed during this run; {SUSPECT}",
        "fa: r/1.jsonl of an earlier run changed during this run",
    ]
    file.write(run.config.pluginmanager.getplugin("terminalreporter"))
    assert len(run.lines) == 2


def test_a_run_without_records_writes_nothing(tmp_path: Path) -> None:
    """A run without a record has no file to seal."""
    RunFile(tmp_path).end(Run().config)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_named_with_its_folder(file: RunFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that does not fit on the disk is lost; the line names the folder."""

    def fail(_log: RecordLog, _record: Record) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RecordLog, "append", fail)
    file.append(record())
    problem = f"{file.log.path.parent} cannot be written to: No space left on device"
    assert file.lost == f"{problem}; make room, or type --fa-artifacts=DIR"


def test_a_lost_record_outweighs_a_missing_verdict(tmp_path: Path) -> None:
    """A gate without a verdict gives exit status 10; if a record of that run was lost, the status is 1."""
    results = Results(options(tmp_path))
    undecided = record(kind="gate", outcome=Outcome.INCONCLUSIVE)
    times = {"when": "call", "start": 1.0, "stop": 2.0, "duration": 1.0}
    report = SimpleNamespace(failed=True, fa_record=undecided, fa_companion=False, **times)
    results.take(report)
    assert results.exit_status(pytest.ExitCode.TESTS_FAILED) == INCONCLUSIVE
    results.file.lost = "a full disk"
    assert results.exit_status(pytest.ExitCode.TESTS_FAILED) == pytest.ExitCode.TESTS_FAILED
    assert results.exit_status(pytest.ExitCode.OK) == pytest.ExitCode.TESTS_FAILED

"""A run beside damaged record files: it names what cannot be read, uses the rest, and keeps what it cannot read."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.plugin.items import attach
from pytest_fa.plugin.terminal import Results
from pytest_fa.records.files import read_record_file
from tests.factories import PYTHON_SOURCE, RECORD, SPEED, options
from tests.projects import CASE, ONE_CASE, SHAPE, WRONG_SOURCE, NewProject, Project, Run

CORRECT = ("-k", "good and test_correct")


@dataclasses.dataclass(frozen=True)
class Damaged:
    """A project with a saved file of one good and three bad lines, a run beside it, and a run that saves into it."""

    project: Project
    bad_lines: list[bytes]
    beside: Run
    saving: Run

    @property
    def path(self) -> Path:
        """The saved file."""
        return self.project.folder / "profiles" / "cpu" / "good.jsonl"


@pytest.fixture(scope="module")
def damaged(new_project: NewProject) -> Damaged:
    """Save a record, add a line of a later schema, one without a time and one that was cut off, and run twice more."""
    project = new_project("damaged")
    project.python_variant("good")
    project.suite(ONE_CASE, "-k", "test_speed and good", "--fa-save")
    path = project.folder / "profiles" / "cpu" / "good.jsonl"
    line = path.read_bytes().rstrip(b"\n")
    timeless = {**json.loads(line), "speed": {**json.loads(line)["speed"], "device": None}}
    bad_lines = [line.replace(b'"schema":6', b'"schema":9'), json.dumps(timeless).encode(), line[:100]]
    path.write_bytes(b"\n".join((line, *bad_lines)))
    (project.folder / "profiles" / "another-gpu").mkdir()
    os.mkfifo(project.folder / "profiles" / "another-gpu" / "good.jsonl")
    (project.folder / "profiles" / "cpu" / "ceilings.json").write_text("{}", encoding="utf-8")
    beside = project.suite(ONE_CASE, *CORRECT)
    return Damaged(project, bad_lines, beside, project.suite(f"--fa-case={SHAPE}-seed1", *CORRECT, "--fa-save"))


def complaints(run: Run, path: str) -> list[str]:
    """The lines of a run about one file."""
    return [line for line in run.all_lines if line.startswith("fa: ") and path in line]


def test_a_run_names_the_lines_that_it_cannot_read(damaged: Damaged, snapshot: SnapshotAssertion) -> None:
    """One line has the file, the number of bad lines, the first one, its reason and what to do; the run is green."""
    assert snapshot == complaints(damaged.beside, "profiles/cpu/good.jsonl")
    assert (damaged.beside.ret, damaged.beside.outcomes) == (0, {f"test_correct[good-{CASE}]": "passed"})


def test_a_run_does_not_wait_for_a_fifo(damaged: Damaged, snapshot: SnapshotAssertion) -> None:
    """A FIFO among the saved files is named; the run does not wait for a writer."""
    assert snapshot == complaints(damaged.beside, "profiles/another-gpu/good.jsonl")


def test_a_run_names_ceilings_that_it_cannot_read(damaged: Damaged) -> None:
    """A ceilings.json that cannot be read is named, and the run has no ceilings."""
    (line,) = complaints(damaged.beside, "ceilings.json")
    assert line.startswith(f"fa: {damaged.project.folder}/profiles/cpu/ceilings.json cannot be read: Object missing")
    assert line.endswith("; measure them again with `python -m pytest_fa ceilings`")


def test_saving_keeps_the_lines_that_it_cannot_read(damaged: Damaged, snapshot: SnapshotAssertion) -> None:
    """`--fa-save` keeps every line that it cannot read unchanged, and says how many it kept."""
    saved = [line for line in damaged.saving.all_lines if line.startswith("saved: ")]
    assert snapshot == saved
    assert damaged.path.read_bytes().splitlines()[:3] == damaged.bad_lines
    kept = read_record_file(damaged.path)
    assert [record.id for record in kept.records] == [f"good-{SHAPE}-seed1", f"good-{CASE}"]
    assert damaged.saving.ret == 0


@pytest.mark.nightly
@pytest.mark.needs_nvcc
def test_static_code_names_the_lines_that_it_cannot_read(project: Project, snapshot: SnapshotAssertion) -> None:
    """`--fa-static`, which uses saved launches, names a file with a bad line and shows its tables."""
    project.cuda_variant("zero")
    project.write("profiles/nvidia-h200/zero.jsonl", "[" * 100_000)
    run = project.suite("--fa-static", "--fa-variant=zero")
    assert snapshot == complaints(run, "zero.jsonl")
    assert run.ret == 0
    rows = [line.split()[1] for line in run.outlines if line.split()[:1] == ["zero"]]
    assert rows == 2 * ["sm_80", "sm_89", "sm_90a"]


def test_a_gate_names_noise_that_it_cannot_read(project: Project) -> None:
    """A run with a gate names a noise.json that cannot be read."""
    project.python_variant("good")
    project.python_variant("wrong", WRONG_SOURCE)
    project.write("profiles/cpu/noise.json", "NaN")
    options = ("--fa-gate=0.95", "--fa-gate-baseline=good", "--fa-variant=wrong", "-k", "test_gate")
    run = project.suite(ONE_CASE, *options)
    (line,) = complaints(run, "noise.json cannot be read")
    assert line.startswith(f"fa: {project.folder}/profiles/cpu/noise.json cannot be read: JSON is malformed")
    assert line.endswith("; measure it again with `python -m pytest_fa noise`")


def test_saving_does_not_replace_what_is_no_file(project: Project) -> None:
    """If a saved file is a FIFO, the run says that records were lost, and fails."""
    project.python_variant("good")
    (project.folder / "profiles" / "cpu").mkdir(parents=True)
    os.mkfifo(project.folder / "profiles" / "cpu" / "good.jsonl")
    run = project.suite(ONE_CASE, *CORRECT, "--fa-save")
    (line,) = [line for line in run.all_lines if line.startswith("fa: records were lost: ")]
    assert "it is a FIFO, not a regular file" in line
    assert run.ret == pytest.ExitCode.TESTS_FAILED


def test_a_record_with_an_impossible_figure_is_lost(tmp_path: Path) -> None:
    """A record that could not be read again is not written; the end of the run names it, and the run fails."""
    results = Results(options(tmp_path))
    impossible = msgspec.structs.replace(SPEED, device=msgspec.structs.replace(SPEED.device, median_us=1e308))
    report = SimpleNamespace(failed=False, when="call", start=1.0, stop=2.0, duration=1.0)
    attach(report, cast("Any", None), msgspec.structs.replace(RECORD, speed=impossible), cast("Any", None))
    results.take(report)
    lines: list[str] = []
    results.write(cast("Any", SimpleNamespace(write_line=lambda line, **_: lines.append(line))))
    problem = "Expected `float` < 1000000000000.0 - at `$.speed.device.median_us`"
    assert lines == [f"fa: records were lost: {RECORD.id}: {problem}"]
    assert (results.file.is_bad, results.nothing_ran, list(tmp_path.iterdir())) == (True, False, [])


# -- out of a candidate's reach ---------------------------------------------------------------------------------------

# Appends the open files of its own process and of the process that started it to a file, which is open meanwhile, and
# whether the run has written a record yet.
LOOKING = """\
import os
import pathlib


def look():
    out = pathlib.Path(os.environ["FA_TEST_OUT"])
    with out.open("a") as stream:
        for pid in (os.getpid(), os.getppid()):
            for number in os.listdir(f"/proc/{pid}/fd"):
                try:
                    print(os.readlink(f"/proc/{pid}/fd/{number}"), file=stream)
                except OSError:
                    pass
        print("records:", len(list(out.parent.glob("artifacts/records/*.jsonl"))), file=stream)


"""


def test_a_candidate_holds_no_file_of_the_records(project: Project) -> None:
    """A worker process and its server have no descriptor of a record file, of its folder or of a saved file."""
    source = PYTHON_SOURCE.replace("import torch\n\n\n", f"import torch\n\n\n{LOOKING}")
    project.python_variant("good", source.replace("    scores =", "    look()\n    scores =", 1))
    out = project.folder / "out.txt"
    cases = f"--fa-case={CASE},{SHAPE}-seed1"
    run = project.suite(cases, *CORRECT, "--fa-save", env={"FA_TEST_OUT": str(out)})
    seen = set(out.read_text(encoding="utf-8").splitlines())
    assert (run.ret, len(project.records)) == (0, 2), run.text
    assert {"records: 0", "records: 1", str(out)} <= seen  # it looked before and after the first record was written
    folders = (f"{project.folder}/artifacts", f"{project.folder}/profiles")
    assert [path for path in seen if path.startswith(folders)] == []

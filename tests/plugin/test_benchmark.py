"""The options of pytest-benchmark keep their meaning."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pytest_fa.records.environment import read_environment
from tests.projects import CASE, ONE_CASE, SHAPE, NewProject, Project, Run

TIMED = f"test_speed[good-{SHAPE}]"


@pytest.fixture(scope="module")
def good(new_project: NewProject) -> Project:
    """A project with a variant for the CPU."""
    project = new_project("benchmark")
    project.python_variant("good")
    return project


@pytest.fixture(scope="module")
def first(good: Project) -> Run:
    """A first run with --benchmark-compare, before any run was saved."""
    return good.suite(ONE_CASE, "-k", "good", "--benchmark-compare", "--benchmark-save=one")


@pytest.fixture(scope="module")
def saved(good: Project, first: Run) -> dict[str, Any]:
    """The contents of the file that the first run saved."""
    assert first.ret == pytest.ExitCode.OK
    (path,) = good.folder.glob(".benchmarks/*/0001_one.json")
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


@pytest.fixture(scope="module")
def second(good: Project, saved: dict[str, Any]) -> Run:
    """A second run, compared with the saved one, with a histogram."""
    assert len(saved["benchmarks"]) == 1
    return good.suite(ONE_CASE, "-k", "good", "--benchmark-compare", "--benchmark-histogram=picture")


def test_compare_with_nothing(first: Run) -> None:
    """--benchmark-compare without a saved run ends with exit status 0 and without an internal error."""
    assert (first.ret, "INTERNALERROR" in first.text) == (pytest.ExitCode.OK, False)


def test_compare_with_nothing_and_no_fa_option(project: Project) -> None:
    """The same holds without an --fa option; here the run fails only because no selected test could run."""
    project.python_variant(
        "gpu_only", manifest="step: a\nbecause: b\nexpect: c\nentry: {kind: python, target: 'a:b'}\n"
    )
    result = project.suite("--benchmark-compare", "-k", "gpu_only")
    assert (result.ret, "INTERNALERROR" in result.text) == (pytest.ExitCode.TESTS_FAILED, False)


def test_compare_shows_both_runs(second: Run) -> None:
    """--benchmark-compare shows the saved run and the current one."""
    rows = [" ".join(line.split()[:2]) for line in second.all_lines if line.startswith("test_speed[")]
    assert sorted(rows) == [f"{TIMED} (0001_one)", f"{TIMED} (NOW)"]


def test_histogram_is_drawn(good: Project, second: Run) -> None:
    """--benchmark-histogram writes one histogram for the shape."""
    assert second.ret == pytest.ExitCode.OK
    assert [path.name for path in good.folder.glob("picture*.svg")] == [f"picture-{SHAPE}.svg"]


def test_saved_machine_info(saved: dict[str, Any]) -> None:
    """A saved file contains the GPU, driver, CUDA and torch that its times depend on."""
    expected = {"gpu": None, "driver": None, "cuda": None, "torch": read_environment().torch}
    assert saved["machine_info"]["fa"] == expected


def test_saved_samples_are_device_times(good: Project, saved: dict[str, Any]) -> None:
    """pytest-benchmark's samples are the record's device times in seconds, grouped by shape."""
    (benchmark,) = saved["benchmarks"]
    record = next(each for each in good.records if each.kind == "speed")
    assert record.speed is not None
    assert (benchmark["name"], benchmark["group"], benchmark["extra_info"]["variant"]) == (TIMED, SHAPE, "good")
    samples = [sample / 1e6 for sample in record.speed.device.samples_us]
    stats = [benchmark["stats"][name] for name in ("min", "max", "median", "rounds")]
    assert stats == pytest.approx([min(samples), max(samples), record.speed.device.median_us / 1e6, len(samples)])


def test_only_skips_what_is_not_timed(project: Project) -> None:
    """--benchmark-only skips test_correct and runs test_speed."""
    project.python_variant("good")
    assert project.suite(ONE_CASE, "-k", "good", "--benchmark-only").outcomes == {
        f"test_correct[good-{CASE}]": "skipped",
        TIMED: "passed",
    }


@pytest.fixture(scope="module")
def untimed(new_project: NewProject) -> tuple[Project, Run]:
    """A run with --benchmark-disable."""
    project = new_project("untimed")
    project.python_variant("good")
    return project, project.suite(ONE_CASE, "-k", "good", "--benchmark-disable")


def test_disable_judges_without_timing(untimed: tuple[Project, Run]) -> None:
    """With --benchmark-disable both tests pass, nothing is timed, and no table of times is shown."""
    project, result = untimed
    assert result.outcomes == {f"test_correct[good-{CASE}]": "passed", TIMED: "passed"}
    assert [record.speed for record in project.records] == [None, None]
    assert [line for line in result.all_lines if "benchmark '" in line] == []


def test_disable_emits_no_warning(untimed: tuple[Project, Run]) -> None:
    """With --benchmark-disable pytest-benchmark does not warn about an unused fixture."""
    assert "PytestBenchmarkWarning" not in untimed[1].text


def test_disable_keeps_the_records_apart(untimed: tuple[Project, Run]) -> None:
    """The rerun command of an untimed test_speed runs test_speed and not test_correct."""
    assert [record.rerun_command.split()[-1] for record in untimed[0].records] == ["test_correct", "test_speed"]

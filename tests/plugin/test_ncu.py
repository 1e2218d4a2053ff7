"""`--ncu` end to end, with a program that plays Nsight Compute's recorded output and kernels judged on the CPU."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest

from pytest_fa.records.record import Record
from tests.plugin.conftest import CASE, SHAPE, WRONG_SOURCE, NewProject, Project, Run

HERE = Path(__file__).parents[1]
ENVIRONMENT = {"PATH": f"{HERE / 'fakes'}{os.pathsep}{os.environ['PATH']}", "FAKE_RECORDED": str(HERE / "recorded")}

# For an inner conftest.py: calls are judged on the CPU, and counted as if they had run on a Hopper GPU.
PRETEND_COUNTERS = """\
import functools

import pytest_fa.profile.run
from pytest_fa.profile.nsight import Nsight
from pytest_fa.profile.run import CaseProfiler


def nsight(case_profiler):
    options = case_profiler._runner.options
    return Nsight(options.artifacts / "ncu", options.rootdir, (9, 0), sudo=options.ncu_sudo)


pytest_fa.profile.run.device_of = lambda variant: "cuda"
CaseProfiler._nsight = functools.cached_property(nsight)
CaseProfiler._nsight.__set_name__(CaseProfiler, "_nsight")
"""


@pytest.fixture(scope="module")
def counted(new_project: NewProject) -> Project:
    """Two variants that are right, and one that is wrong."""
    project = new_project("ncu")
    project.write("conftest.py", PRETEND_COUNTERS)
    project.python_variant("right")
    project.python_variant("wrong", WRONG_SOURCE)
    return project


def ncu(project: Project, variant: str, *more: str, **environment: str) -> Run:
    """Profile one variant on one case."""
    options = ("--ncu", f"--fa-variant={variant}", f"--fa-case={CASE}", "-p", "no:cacheprovider", *more)
    return project.suite(*options, env={**ENVIRONMENT, **environment})


@pytest.fixture(scope="module")
def run(counted: Project) -> Run:
    """The whole of one variant, profiled last."""
    return ncu(counted, "right")


@pytest.fixture(scope="module")
def record(counted: Project, run: Run) -> Record:
    """The record of its profile."""
    assert run.ret == 0, run.text
    (found,) = [each for each in counted.records if each.kind == "profile"]
    return found


def test_it_stands_beside_the_other_tests(run: Run) -> None:
    """Judged, timed and profiled in one run, each as an item; a baseline is profiled beside, not as an item."""
    assert run.ret == 0, run.text
    assert f"test_profile[right-{SHAPE}]" in run.outcomes
    assert run.outcomes[f"test_profile[right-{SHAPE}]"] == "passed"
    assert [name for name in run.outcomes if name.startswith("test_profile")] == [f"test_profile[right-{SHAPE}]"]


def test_without_the_option_there_is_no_item(counted: Project) -> None:
    """Nobody pays for what was not asked for."""
    assert [each for each in counted.ids("--fa-variant=right", f"--fa-case={CASE}") if "profile" in each] == []


def test_the_record_holds_counters_and_verdict(record: Record) -> None:
    """Counters by Nsight's names, the sentence that they decide, what the manifest expected."""
    assert record.nsight is not None
    (kernel,) = record.nsight.kernels
    assert record.id == f"right-{CASE}-verdict"
    assert kernel.counters["gpu__time_duration.sum"] == 9056.0
    assert kernel.bottleneck is not None
    assert kernel.bottleneck.bound_by == "latency"
    assert record.nsight.expect == "what the test asserts"


def test_a_profiled_run_has_no_time(record: Record) -> None:
    """What ran under a profiler was not timed."""
    assert record.speed is None


def test_sdpa_stands_beside(record: Record) -> None:
    """The fastest backend of this run was profiled at the same shape, and its counters compared."""
    assert record.nsight is not None
    assert (record.nsight.baseline or "").startswith("sdpa_")
    assert len(record.nsight.baseline_kernels) == 1
    assert record.nsight.differences == ()  # the same recording plays both


def test_files_have_fixed_names_and_an_index(counted: Project, record: Record) -> None:
    """Report, CSV, log and job by id and preset, as paths from the root; the index names them."""
    assert record.nsight is not None
    stem = f"artifacts/ncu/right-{CASE}.verdict"
    found = [record.nsight.report, record.nsight.table, record.nsight.log, record.nsight.job]
    assert [f"{stem}.{suffix}" for suffix in ("ncu-rep", "csv", "log", "job.json")] == found
    assert all((counted.folder / path).is_file() for path in found if path)
    index = json.loads((counted.folder / "artifacts" / "ncu" / "index.json").read_text(encoding="utf-8"))
    assert [(each["id"], each["report"]) for each in index] == [(f"right-{CASE}", f"{stem}.ncu-rep")]


def test_the_job_is_the_workers(counted: Project, record: Record) -> None:
    """What is profiled is what was judged: the worker's own job, judged no more and timed never."""
    assert record.nsight is not None
    job = json.loads((counted.folder / (record.nsight.job or "")).read_text(encoding="utf-8"))
    expected = {"type": "case", "judge": False, "time": False, "device": "cuda", "warm_ups": 1}
    assert expected == {key: job[key] for key in expected}
    assert job["variant"]["name"] == "right"
    assert list(record.nsight.command[-3:-1]) == ["-m", "pytest_fa.worker"]


def test_the_terminal_says_it_in_a_line(run: Run, record: Record) -> None:
    """One line with the headline counters and the report; below it the verdict and what was expected."""
    assert record.nsight is not None
    (line,) = [each for each in run.said if each.startswith(f"right-{CASE}: ")]
    assert "9.06 us; SM 7 %, tensor 32 %, exp 34 %, memory 4 %" in line
    text = run.text
    assert f"  report: {record.nsight.report} (verdict, " in text
    assert "its durations are no benchmark times" in text
    assert "latency-bound: no unit is busy" in text
    assert "  expected: what the test asserts" in text
    assert "ncu 2025.3.1.0 reads counters of this GPU (tried on an empty kernel" in text


def test_junit_names_the_report(run: Run, record: Record) -> None:
    """Report and verdict as properties of the test case."""
    assert record.nsight is not None
    (case,) = [each for each in run.junit.iter("testcase") if str(each.get("name")).startswith("test_profile")]
    properties = {str(each.get("name")): each.get("value") for each in case.iter("property")}
    assert properties["fa.ncu.report"] == record.nsight.report
    assert (properties["fa.ncu.verdict"] or "").startswith("latency-bound: ")


def test_a_call_that_is_wrong_is_not_profiled(counted: Project, tmp_path: Path) -> None:
    """Judged first: what computes something else is not worth a counter."""
    calls = tmp_path / "calls"
    run = ncu(counted, "wrong", "-k", "test_profile", FAKE_CALLS=str(calls))
    assert (run.ret, run.outcomes) == (1, {f"test_profile[wrong-{SHAPE}]": "failed"})
    assert not calls.exists()


@pytest.mark.parametrize(
    ("happening", "words"),
    [("permission", "may not read the GPU's counters"), ("unsupported-runtime", "the container's runtime keeps")],
)
def test_no_counters_change_no_outcome(counted: Project, happening: str, words: str) -> None:
    """Where nothing can be counted the profile is skipped with a sentence, and the rest is what it was."""
    run = ncu(counted, "right", "-k", "test_profile or test_correct", "-rs", FAKE_NCU=happening)
    assert run.ret == 0, run.text
    assert run.outcomes == {f"test_profile[right-{SHAPE}]": "skipped", f"test_correct[right-{CASE}]": "passed"}
    assert f"right-{CASE}-verdict: not measured ({happening}): " in run.text
    assert f"nothing will be counted: {'this user ' * (happening == 'permission')}{words}" in run.text


def test_strict_makes_it_a_failure(counted: Project) -> None:
    """`--ncu-strict`: no counters, no success."""
    run = ncu(counted, "right", "-k", "test_profile", "--ncu-strict", FAKE_NCU="permission")
    assert (run.ret, run.outcomes) == (1, {f"test_profile[right-{SHAPE}]": "failed"})


def test_nothing_but_skipped_profiles_is_red(counted: Project) -> None:
    """Where a profile was all that was asked for, and nothing was counted, nothing ran."""
    run = ncu(counted, "right", "-k", "test_profile", FAKE_NCU="permission")
    assert (run.ret, "fa: nothing ran" in run.text) == (1, True)


def test_a_filter_that_misses_is_said(counted: Project) -> None:
    """Nsight ends well and profiles nothing: that is a status, not a success."""
    run = ncu(counted, "right", "-k", "test_profile", "-rs", FAKE_NCU="no-kernels", FAKE_TRIAL="ok")
    assert "not measured (no-kernels): no kernel ran inside the NVTX range" in run.text


def test_presets_have_files_of_their_own(counted: Project) -> None:
    """Another set of counters does not write over the first one's report."""
    run = ncu(counted, "right", "-k", "test_profile", "--ncu-set=stalls")
    assert run.ret == 0, run.text
    folder = counted.folder / "artifacts" / "ncu"
    assert (folder / f"right-{CASE}.stalls.ncu-rep").is_file()


def test_a_call_of_two_kernels(counted: Project) -> None:
    """Each kernel has its verdict; the line adds their times up."""
    run = ncu(counted, "right", "-k", "test_profile", FAKE_KERNELS="3,4")
    assert run.ret == 0, run.text
    assert "13.38 us in 2 kernels" in run.text
    assert "  flash_fwd_splitkv_combine_kernel: latency-bound" in run.text


def test_processes_beside_are_refused(counted: Project) -> None:
    """One process at a time counts on a GPU."""
    run = ncu(counted, "right", "-n2")
    assert (run.ret, "--ncu: one process at a time may count on a GPU; drop -n" in run.text) == (4, True)


def test_without_a_gpu_it_is_skipped(new_project: NewProject) -> None:
    """A CPU has no counters of this kind: a reason, not a failure."""
    project = new_project("no-gpu")
    project.python_variant("right")
    run = project.suite("--ncu", f"--fa-case={CASE}", "-k", "test_profile or test_correct", "-rs", env=ENVIRONMENT)
    assert run.ret == 0, run.text
    assert "runs on the CPU here: there is nothing to count" in run.text


def test_timing_under_a_tool_is_refused(counted: Project) -> None:
    """A run inside a profiler is judged and not timed: its times would be others."""
    case = ("--fa-variant=right", f"--fa-case={CASE}", "-k", "test_speed and right")
    watched = {"CUDA_INJECTION64_PATH": "/opt/nsight/libToolsInjection64.so"}
    run = counted.suite(*case, env=watched)
    assert (run.ret, run.outcomes) == (1, {f"test_speed[right-{SHAPE}]": "failed"})
    assert "nothing is timed under a tool; give --benchmark-disable" in run.text
    assert counted.suite(*case, "--benchmark-disable", env=watched).ret == 0


def test_github_shows_the_profiles(counted: Project, tmp_path: Path) -> None:
    """A table in the summary of the step, behind what stands there."""
    summary = tmp_path / "summary.md"
    summary.write_text("before\n", encoding="utf-8")
    assert ncu(counted, "right", "-k", "test_profile", GITHUB_STEP_SUMMARY=str(summary)).ret == 0
    lines = summary.read_text(encoding="utf-8").splitlines()
    assert lines[:2] == ["before", "### Profiles (Nsight Compute)"]
    assert lines[-1].startswith(f"| `right-{CASE}-verdict` | 9.06 | latency-bound: ")


@pytest.mark.skipif(importlib.util.find_spec("pytest_html") is None, reason="pytest-html is not installed")
def test_the_html_page_links_the_report(counted: Project) -> None:
    """Paths from the page, so that the folder can be moved as a whole."""
    run = ncu(counted, "right", "-k", "test_profile", "--html=artifacts/page/report.html")
    assert run.ret == 0, run.text
    page = (counted.folder / "artifacts" / "page" / "report.html").read_text(encoding="utf-8")
    assert f"../ncu/right-{CASE}.verdict.ncu-rep" in page

"""`--ncu` end to end, with a fake ncu that replays recorded output, and kernels that are judged on the CPU."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest

from pytest_fa.features.ncu.nsight_report import NsightReport
from pytest_fa.records.record import Record
from tests.projects import CASE, SHAPE, WRONG_SOURCE, NewProject, Project, Run
from tests.tiers import nightly_after

TESTS = Path(__file__).parents[2]
ENVIRONMENT = {"PATH": f"{TESTS / 'fakes'}{os.pathsep}{os.environ['PATH']}", "FAKE_RECORDED": str(TESTS / "recorded")}

# For an inner conftest.py: calls are judged on the CPU and profiled as if they had run on a Hopper GPU.
PRETEND_COUNTERS = """\
import functools

import pytest_fa.features.ncu.profile
from pytest_fa.features.ncu.nsight import Nsight
from pytest_fa.features.ncu.profile import CaseProfiler


def nsight(case_profiler):
    options = case_profiler._runner.options
    return Nsight(options.artifacts / "ncu", options.rootdir, (9, 0), sudo=False)


pytest_fa.features.ncu.profile.device_of = lambda variant: "cuda"
CaseProfiler._nsight = functools.cached_property(nsight)
CaseProfiler._nsight.__set_name__(CaseProfiler, "_nsight")
"""


@pytest.fixture(scope="module")
def counted(new_project: NewProject) -> Project:
    """A correct variant and a wrong one."""
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
    """A run of all tests of the correct variant, including its profile."""
    return ncu(counted, "right")


@pytest.fixture(scope="module")
def record(counted: Project, run: Run) -> Record:
    """The record of the profile."""
    assert run.ret == 0, run.text
    (profile_record,) = [each for each in counted.records if each.kind == "profile"]
    return profile_record


def test_a_profile_is_a_test(run: Run) -> None:
    """A variant is judged, timed and profiled in one run by separate tests; the baseline's profile is not a test."""
    assert run.ret == 0, run.text
    assert f"test_profile[right-{SHAPE}]" in run.outcomes
    assert run.outcomes[f"test_profile[right-{SHAPE}]"] == "passed"
    assert [name for name in run.outcomes if name.startswith("test_profile")] == [f"test_profile[right-{SHAPE}]"]


def test_without_the_option_there_is_no_item(counted: Project) -> None:
    """Without --ncu there is no `test_profile`."""
    assert [each for each in counted.ids("--fa-variant=right", f"--fa-case={CASE}") if "profile" in each] == []


def test_the_record_has_counters_and_bottleneck(record: Record) -> None:
    """The record has the counters by Nsight's names, what bounds the kernel, and the manifest's expectation."""
    report = NsightReport.of(record)
    assert report is not None
    (kernel,) = report.kernels
    assert record.id == f"right-{CASE}-verdict"
    assert kernel.counters["gpu__time_duration.sum"] == 9056.0
    assert kernel.bottleneck is not None
    assert kernel.bottleneck.bound_by == "latency"
    assert report.expect == "what the test asserts"


def test_a_profiled_run_has_no_time(record: Record) -> None:
    """The record of a profile has no time."""
    assert record.speed is None


def test_the_profile_is_compared_with_sdpa(record: Record) -> None:
    """The fastest SDPA backend of this run is profiled at the same shape, and its counters are compared."""
    report = NsightReport.of(record)
    assert report is not None
    assert (report.baseline or "").startswith("sdpa_")
    assert len(report.baseline_kernels) == 1
    assert report.differences == ()  # both profiles replay the same recording


def test_files_have_fixed_names_and_an_index(counted: Project, record: Record) -> None:
    """Report, CSV, log and job are named by id and preset, with paths relative to the root; the index lists them."""
    report = NsightReport.of(record)
    assert report is not None
    stem = f"artifacts/ncu/right-{CASE}.verdict"
    paths = [report.report, report.table, report.log, report.job]
    assert [f"{stem}.{suffix}" for suffix in ("ncu-rep", "csv", "log", "job.json")] == paths
    assert all((counted.folder / path).is_file() for path in paths if path)
    index = json.loads((counted.folder / "artifacts" / "ncu" / "index.json").read_text(encoding="utf-8"))
    assert [(each["id"], each["report"]) for each in index] == [(f"right-{CASE}", f"{stem}.ncu-rep")]


def test_the_job_is_the_workers(counted: Project, record: Record) -> None:
    """The profiled process runs the worker's job for the same call, without judging or timing it."""
    report = NsightReport.of(record)
    assert report is not None
    job = json.loads((counted.folder / (report.job or "")).read_text(encoding="utf-8"))
    expected = {"type": "case", "checks_output": False, "time": False, "device": "cuda", "warm_ups": 1}
    assert expected == {key: job[key] for key in expected}
    assert job["variant"]["name"] == "right"
    assert list(report.command[-3:-1]) == ["-m", "pytest_fa.server"]


def test_the_terminal_shows_the_profile(run: Run, record: Record) -> None:
    """The terminal shows one line with the headline counters, and below it bottleneck, expectation and report."""
    report = NsightReport.of(record)
    assert report is not None
    (line,) = [each for each in run.all_lines if each.startswith(f"right-{CASE}: ")]
    assert "9.06 us; SM 7 %, tensor 32 %, exp 34 %, memory 4 %" in line
    text = run.text
    assert f"  report: {report.report} (verdict, " in text
    assert "the durations are not benchmark times" in text
    assert "latency-bound: no unit is near its peak" in text
    assert "  expected: what the test asserts" in text
    assert "ncu 2025.3.1.0 can read the counters of this GPU (tried on an empty kernel" in text


def test_junit_names_the_report(run: Run, record: Record) -> None:
    """The test case in the JUnit file has properties with the report and the bottleneck."""
    report = NsightReport.of(record)
    assert report is not None
    (case,) = [each for each in run.junit.iter("testcase") if str(each.get("name")).startswith("test_profile")]
    properties = {str(each.get("name")): each.get("value") for each in case.iter("property")}
    assert properties["fa.ncu.report"] == report.report
    assert (properties["fa.ncu.verdict"] or "").startswith("latency-bound: ")


def test_a_call_that_is_wrong_is_not_profiled(counted: Project, tmp_path: Path) -> None:
    """A wrong variant is judged first, fails, and is not profiled."""
    calls = tmp_path / "calls"
    run = ncu(counted, "wrong", "-k", "test_profile", FAKE_CALLS=str(calls))
    assert (run.ret, run.outcomes) == (1, {f"test_profile[wrong-{SHAPE}]": "failed"})
    assert not calls.exists()


@pytest.mark.parametrize(
    ("happening", "words"),
    nightly_after(
        1,
        [
            ("permission", "this user may not read the GPU's performance counters"),
            ("unsupported-runtime", "the container runtime blocks"),
        ],
    ),
)
def test_no_counters_change_no_outcome(counted: Project, happening: str, words: str) -> None:
    """If counters cannot be read, the profile is skipped with a sentence, and other outcomes do not change.

    The run is not green: it was asked for a profile, and has none.
    """
    run = ncu(counted, "right", "-k", "test_profile or test_correct", "-rs", FAKE_NCU=happening)
    assert run.ret == 1, run.text
    assert "fa: --ncu: nothing was profiled: not measured" in run.text
    assert run.outcomes == {f"test_profile[right-{SHAPE}]": "skipped", f"test_correct[right-{CASE}]": "passed"}
    assert f"right-{CASE}-verdict: not measured ({happening}): " in run.text
    assert f"no counters will be collected: {words}" in run.text


@pytest.mark.nightly
def test_strict_makes_it_a_failure(counted: Project) -> None:
    """With `--ncu-strict`, the test fails if counters cannot be read."""
    run = ncu(counted, "right", "-k", "test_profile", "--ncu-strict", FAKE_NCU="permission")
    assert (run.ret, run.outcomes) == (1, {f"test_profile[right-{SHAPE}]": "failed"})


@pytest.mark.nightly
def test_nothing_but_skipped_profiles_is_red(counted: Project) -> None:
    """A run of profiles only, all of them skipped, fails because nothing ran."""
    run = ncu(counted, "right", "-k", "test_profile", FAKE_NCU="permission")
    assert (run.ret, "fa: nothing ran" in run.text) == (1, True)


@pytest.mark.nightly
def test_a_run_without_kernels_is_not_measured(counted: Project) -> None:
    """If Nsight Compute succeeds but profiles no kernel, the status is `no-kernels` and not a success."""
    run = ncu(counted, "right", "-k", "test_profile", "-rs", FAKE_NCU="no-kernels", FAKE_TRIAL="ok")
    assert "not measured (no-kernels): no kernel ran inside the NVTX range" in run.text


@pytest.mark.nightly
def test_presets_have_separate_files(counted: Project) -> None:
    """The report of another preset does not overwrite the first one."""
    run = ncu(counted, "right", "-k", "test_profile", "--ncu-set=stalls")
    assert run.ret == 0, run.text
    folder = counted.folder / "artifacts" / "ncu"
    assert (folder / f"right-{CASE}.stalls.ncu-rep").is_file()


@pytest.mark.nightly
def test_a_call_of_two_kernels(counted: Project) -> None:
    """Each kernel of a call has its bottleneck, and the headline has the sum of their times."""
    run = ncu(counted, "right", "-k", "test_profile", FAKE_KERNELS="3,4")
    assert run.ret == 0, run.text
    assert "13.38 us in 2 kernels" in run.text
    assert "  flash_fwd_splitkv_combine_kernel: latency-bound" in run.text


def test_several_processes_are_refused(counted: Project) -> None:
    """`--ncu` with `-n2` is a usage error, because only one process at a time may profile a GPU."""
    run = ncu(counted, "right", "-n2")
    assert (run.ret, "--ncu: only one process at a time can read the counters of a GPU; drop -n" in run.text) == (
        4,
        True,
    )


def test_without_a_gpu_it_is_skipped(new_project: NewProject) -> None:
    """On a machine without a GPU the profile is skipped with a reason, a line says so, and the run is not green."""
    project = new_project("no-gpu")
    project.python_variant("right")
    run = project.suite("--ncu", f"--fa-case={CASE}", "-k", "test_profile or test_correct", "-rs", env=ENVIRONMENT)
    reason = "right runs on the CPU here, and Nsight Compute profiles only GPU kernels"
    assert (run.ret, f"fa: --ncu: nothing was profiled: {reason}" in run.all_lines) == (1, True), run.text


@pytest.mark.nightly
def test_timing_under_a_tool_is_refused(counted: Project) -> None:
    """Under a profiler test_speed fails, unless --benchmark-disable is given: the times would not be valid."""
    case = ("--fa-variant=right", f"--fa-case={CASE}", "-k", "test_speed and right")
    watched = {"CUDA_INJECTION64_PATH": "/opt/nsight/libToolsInjection64.so"}
    run = counted.suite(*case, env=watched)
    assert (run.ret, run.outcomes) == (1, {f"test_speed[right-{SHAPE}]": "failed"})
    assert "nothing is timed under a tool; give --benchmark-disable" in run.text
    assert counted.suite(*case, "--benchmark-disable", env=watched).ret == 0


@pytest.mark.nightly
def test_github_shows_the_profiles(counted: Project, tmp_path: Path) -> None:
    """The profiles are a table in GitHub's step summary, after what was in it."""
    summary = tmp_path / "summary.md"
    summary.write_text("before\n", encoding="utf-8")
    assert ncu(counted, "right", "-k", "test_profile", GITHUB_STEP_SUMMARY=str(summary)).ret == 0
    lines = summary.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "before"
    assert "### Profiles (Nsight Compute)" in lines
    assert lines[-2].startswith(f"| right-{CASE}-verdict | 9.06 | latency-bound&#58; ")


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("pytest_html") is None, reason="pytest-html is not installed")
def test_the_html_page_links_the_report(counted: Project) -> None:
    """The page of pytest-html links the report by a path relative to the page."""
    counted.ini(has_html=True)
    run = ncu(counted, "right", "-k", "test_profile", "--html=artifacts/page/report.html")
    assert run.ret == 0, run.text
    page = (counted.folder / "artifacts" / "page" / "report.html").read_text(encoding="utf-8")
    assert f"../ncu/right-{CASE}.verdict.ncu-rep" in page

"""`--fa-sanitize` end to end, with a fake compute-sanitizer that replays recorded output."""

from __future__ import annotations

import json

import pytest

from pytest_fa.features.sanitize.sanitized import Sanitized
from tests.factories import CUDA_SOURCE
from tests.features.ncu.test_ncu import ENVIRONMENT
from tests.projects import CASE, PRETEND_GPU, ZERO_MANIFEST, NewProject, Project, Run

# A kernel whose machine code contains a bulk copy.
TMA_SOURCE = CUDA_SOURCE.replace(
    "__global__ void zero_kernel(float* out) {",
    """__global__ void zero_kernel(float* out) {
  __shared__ alignas(16) float tile[64];
  unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(tile));
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 256;" ::"l"(out), "r"(at) : "memory");
""",
)


@pytest.fixture(scope="module")
def built(new_project: NewProject) -> Project:
    """A variant that is compiled, one that also has bulk copies, and one in Python."""
    project = new_project("sanitize")
    project.write("conftest.py", PRETEND_GPU)
    project.cuda_variant("zero")
    project.cuda_variant("bulk", TMA_SOURCE, ZERO_MANIFEST + "arch: [sm_90a]\n")
    project.python_variant("script")
    return project


def sanitize(project: Project, variant: str, tools: str, *more: str, **environment: str) -> Run:
    """Run these tools on one variant."""
    options = (f"--fa-sanitize={tools}", f"--fa-variant={variant}", "-k", "test_sanitize", "-rs")
    return project.suite(*options, *more, env={**ENVIRONMENT, **environment})


@pytest.mark.needs_nvcc
def test_each_tool_is_a_test(built: Project) -> None:
    """Each tool has its own test, its own process and its own line; a clean run passes."""
    run = sanitize(built, "zero", "memcheck,racecheck")
    assert run.ret == 0, run.text
    assert {"test_sanitize[zero-memcheck]": "passed", "test_sanitize[zero-racecheck]": "passed"} == run.outcomes
    records = [each for each in built.records if Sanitized.of(each) and each.variant == "zero"]
    assert [("b1h2s193d64-fp16-seed0", "clean", 0)] * 2 == [
        (str(each.case), result.status, result.count) for each in records if (result := Sanitized.of(each))
    ]
    assert "compute-sanitizer" in run.outlines
    assert f"zero-{records[0].case}-memcheck: clean (" in run.text


@pytest.mark.needs_nvcc
def test_a_cuda_entry_is_called_without_torch(built: Project) -> None:
    """A `cuda` entry is called by `plain_call`, without torch, with the built library."""
    run = sanitize(built, "zero", "memcheck")
    assert run.ret == 0, run.text
    record = built.records[-1]
    result = Sanitized.of(record)
    assert result is not None
    assert list(result.command[-2:-1]) == ["pytest_fa.features.sanitize.plain_call"]
    job = json.loads((built.folder / result.command[-1]).read_text(encoding="utf-8"))
    assert job["library"].endswith("kernel.so")


def test_a_python_entry_goes_through_the_worker(built: Project) -> None:
    """A Python entry, which needs torch, is called by the worker program."""
    run = sanitize(built, "script", "memcheck")
    assert run.ret == 0, run.text
    record = built.records[-1]
    result = Sanitized.of(record)
    assert result is not None
    assert list(result.command[-2:-1]) == ["pytest_fa.server"]


@pytest.mark.needs_nvcc
def test_findings_fail_the_test_and_are_shown(built: Project) -> None:
    """The failure and the terminal show the findings of the tool with their place in the source."""
    run = sanitize(built, "zero", "racecheck", FAKE_SANITIZER="racecheck-found")
    assert (run.ret, run.outcomes) == (1, {"test_sanitize[zero-racecheck]": "failed"})
    assert "racecheck: 12 errors or hazards" in run.text
    assert "Race reported between Read access at void attention_kernel" in run.text
    assert "kernel.cu:244" in run.text
    (rerun,) = {each.strip() for each in run.all_lines if each.strip().startswith("rerun: ")}
    assert "--fa-variant=zero --fa-sanitize=racecheck" in rerun


@pytest.mark.needs_nvcc
def test_no_summary_fails(built: Project) -> None:
    """A log without a summary, as of a tool that was cut off, fails the test."""
    run = sanitize(built, "zero", "synccheck", FAKE_SANITIZER="cut-off")
    assert (run.ret, "there is no summary line" in run.text) == (1, True)


@pytest.mark.needs_nvcc
def test_an_unsupported_tool_never_passes(built: Project) -> None:
    """If the environment does not support the tool, the test is skipped with its message; alone, it fails the run."""
    run = sanitize(built, "zero", "memcheck", FAKE_SANITIZER="refused")
    assert (run.ret, run.outcomes) == (1, {"test_sanitize[zero-memcheck]": "skipped"})
    reason = "memcheck: the container or driver does not support the tool: "
    assert f"{reason}Error: Target application terminated before first instrumented" in run.text
    assert "fa: nothing ran" in run.text


@pytest.mark.nightly
@pytest.mark.needs_nvcc
def test_bulk_copies_are_not_covered_by_racecheck(built: Project) -> None:
    """A kernel with bulk copies is skipped under racecheck, which does not track them, and checked by memcheck."""
    run = sanitize(built, "bulk", "racecheck,memcheck")
    assert {"test_sanitize[bulk-racecheck]": "skipped", "test_sanitize[bulk-memcheck]": "passed"} == run.outcomes
    reason = "not covered by racecheck, which does not track TMA copies and clusters (UBLKCP in the machine code)"
    assert reason in run.text


@pytest.mark.needs_nvcc
def test_named_cases_are_checked(built: Project) -> None:
    """With `--fa-case`, the tool runs on the first seed of each named shape."""
    shapes = ("b1h2s64d64-fp16", "b1h2s512d64-fp16")
    named = ",".join((f"{shapes[0]}-seed0", f"{shapes[0]}-seed1", f"{shapes[1]}-seed0"))
    run = sanitize(built, "zero", "memcheck", f"--fa-case={named}")
    assert (run.ret, {f"test_sanitize[zero-{shape}-memcheck]": "passed" for shape in shapes}) == (0, run.outcomes)
    records = [each for each in built.records if Sanitized.of(each)][-2:]
    assert [f"{shape}-seed0" for shape in shapes] == [str(record.case) for record in records]


@pytest.mark.needs_nvcc
def test_an_unsupported_case_is_skipped(built: Project) -> None:
    """A case that the manifest does not support is skipped with that reason, also with `--fa-require-gpu`."""
    run = sanitize(built, "zero", "memcheck", "--fa-case=b1h2s64d32-fp16-seed0", "--fa-require-gpu")
    assert (run.ret, run.outcomes) == (1, {"test_sanitize[zero-b1h2s64d32-fp16-memcheck]": "skipped"})
    assert "zero does not support b1h2s64d32-fp16: head_dim is 32" in run.text


def test_a_users_test_takes_each_tool_once(built: Project) -> None:
    """A user's test with `fa_sanitizer` and without `fa_case` runs once for each tool, on the small case."""
    source = "def test_mine(fa_variant, fa_sanitizer, fa_run):\n    fa_run.sanitize(fa_variant, fa_sanitizer)\n"
    built.write("test_mine.py", source)
    options = ("--fa-sanitize=memcheck,racecheck", "--fa-variant=script", f"--fa-case={CASE},b1h2s64d64-fp16-seed0")
    run = built.run("test_mine.py", *options, env=ENVIRONMENT)
    expected = {f"test_mine[script-{tool}]": "passed" for tool in ("memcheck", "racecheck")}
    assert (run.ret, expected) == (0, run.outcomes), run.text
    records = [each for each in built.records if Sanitized.of(each)][-2:]
    assert ["b1h2s193d64-fp16-seed0"] * 2 == [str(each.case) for each in records]


def test_without_the_option_there_is_no_item(built: Project) -> None:
    """Without --fa-sanitize there is no `test_sanitize`."""
    assert [each for each in built.ids("--fa-variant=script", f"--fa-case={CASE}") if "sanitize" in each] == []


def test_without_a_gpu_it_is_skipped(new_project: NewProject) -> None:
    """On a machine without a GPU the test is skipped with a reason."""
    project = new_project("no-gpu")
    project.python_variant("script")
    run = project.suite("--fa-sanitize=memcheck", f"--fa-case={CASE}", "-k", "test_sanitize or test_correct", "-rs")
    assert run.ret == 0, run.text
    assert "script runs on the CPU here, and compute-sanitizer checks only GPU code" in run.text

"""`--fa-sanitize` end to end, with a program that plays compute-sanitizer's recorded output."""

from __future__ import annotations

import json

import pytest

from tests.factories import CUDA_SOURCE
from tests.plugin.conftest import CASE, PRETEND_GPU, ZERO_MANIFEST, NewProject, Project, Run
from tests.plugin.test_ncu import ENVIRONMENT

# A kernel whose machine code holds a bulk copy.
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
    """A variant to compile, one with bulk copies, and one in Python."""
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
    """One item, one process and one line for each tool; clean ones pass."""
    run = sanitize(built, "zero", "memcheck,racecheck")
    assert run.ret == 0, run.text
    assert {"test_sanitize[zero-memcheck]": "passed", "test_sanitize[zero-racecheck]": "passed"} == run.outcomes
    records = [each for each in built.records if each.sanitized and each.variant == "zero"]
    assert [("b1h2s193d64-fp16-seed0", "clean", 0)] * 2 == [
        (str(each.case), each.sanitized.status, each.sanitized.count) for each in records if each.sanitized
    ]
    assert "compute-sanitizer" in run.outlines
    assert f"zero-{records[0].case}-memcheck: clean (" in run.text


@pytest.mark.needs_nvcc
def test_a_cuda_entry_is_called_without_torch(built: Project) -> None:
    """The tool watches the call without torch, on the build that was built."""
    run = sanitize(built, "zero", "memcheck")
    assert run.ret == 0, run.text
    record = built.records[-1]
    assert record.sanitized is not None
    assert list(record.sanitized.command[-2:-1]) == ["pytest_fa.sanitize.plain_call"]
    job = json.loads((built.folder / record.sanitized.command[-1]).read_text(encoding="utf-8"))
    assert job["library"].endswith("kernel.so")


def test_a_python_entry_goes_through_the_worker(built: Project) -> None:
    """It needs torch; torch's own allocator is switched off for it."""
    run = sanitize(built, "script", "memcheck")
    assert run.ret == 0, run.text
    record = built.records[-1]
    assert record.sanitized is not None
    assert list(record.sanitized.command[-2:-1]) == ["pytest_fa.worker"]


@pytest.mark.needs_nvcc
def test_findings_fail_the_test_and_are_shown(built: Project) -> None:
    """What the tool found stands in the failure and in the table's notes, with the place in the source."""
    run = sanitize(built, "zero", "racecheck", FAKE_SANITIZER="racecheck-found")
    assert (run.ret, run.outcomes) == (1, {"test_sanitize[zero-racecheck]": "failed"})
    assert (
        "zero-b1h2s193d64-fp16-seed0-racecheck: has a hazard, or may have one: racecheck: 12 errors or hazards"
        in run.text
    )
    assert "Race reported between Read access at void attention_kernel" in run.text
    assert "kernel.cu:244" in run.text
    (repeat,) = [each.strip() for each in run.said if each.strip().startswith("repeat: ")]
    assert "--fa-variant=zero --fa-sanitize=racecheck" in repeat


@pytest.mark.needs_nvcc
def test_no_summary_fails(built: Project) -> None:
    """A tool that was cut off has not found nothing."""
    run = sanitize(built, "zero", "synccheck", FAKE_SANITIZER="cut-off")
    assert (run.ret, "there is no summary line" in run.text) == (1, True)


@pytest.mark.needs_nvcc
def test_a_refusing_runtime_is_never_green(built: Project) -> None:
    """Skipped with the tool's words; alone, it leaves the run red."""
    run = sanitize(built, "zero", "memcheck", FAKE_SANITIZER="refused")
    assert (run.ret, run.outcomes) == (1, {"test_sanitize[zero-memcheck]": "skipped"})
    assert "memcheck: the runtime refuses: Error: Target application terminated before first instrumented" in run.text
    assert "fa: nothing ran" in run.text


@pytest.mark.needs_nvcc
def test_bulk_copies_are_not_covered_by_racecheck(built: Project) -> None:
    """Racecheck does not follow them: said, not shown as clean; memcheck does."""
    run = sanitize(built, "bulk", "racecheck,memcheck")
    assert {"test_sanitize[bulk-racecheck]": "skipped", "test_sanitize[bulk-memcheck]": "passed"} == run.outcomes
    assert "not covered by racecheck: it does not follow TMA copies and clusters (UBLKCP in the code)" in run.text


@pytest.mark.needs_nvcc
def test_named_cases_are_what_is_watched(built: Project) -> None:
    """A kernel with several tiles is watched on the shape that has the one in doubt; of a shape, the first seed."""
    shapes = ("b1h2s64d64-fp16", "b1h2s512d64-fp16")
    named = ",".join((f"{shapes[0]}-seed0", f"{shapes[0]}-seed1", f"{shapes[1]}-seed0"))
    run = sanitize(built, "zero", "memcheck", f"--fa-case={named}")
    assert (run.ret, {f"test_sanitize[zero-{each}-memcheck]": "passed" for each in shapes}) == (0, run.outcomes)
    records = [each for each in built.records if each.sanitized][-2:]
    assert [f"{each}-seed0" for each in shapes] == [str(each.case) for each in records]


@pytest.mark.needs_nvcc
def test_a_named_case_that_is_not_taken_is_skipped(built: Project) -> None:
    """With the manifest's reason; where a GPU is required too, since another GPU would not help."""
    run = sanitize(built, "zero", "memcheck", "--fa-case=b1h2s64d32-fp16-seed0", "--fa-require-gpu")
    assert (run.ret, run.outcomes) == (1, {"test_sanitize[zero-b1h2s64d32-fp16-memcheck]": "skipped"})
    assert "zero does not support b1h2s64d32-fp16: head_dim is 32" in run.text


def test_a_users_test_takes_each_tool_once(built: Project) -> None:
    """A test of one's own may ask for the tool alone: `fa_run.sanitize` then takes the small case."""
    source = "def test_mine(fa_variant, fa_sanitizer, fa_run):\n    fa_run.sanitize(fa_variant, fa_sanitizer)\n"
    built.write("test_mine.py", source)
    options = ("--fa-sanitize=memcheck,racecheck", "--fa-variant=script", f"--fa-case={CASE},b1h2s64d64-fp16-seed0")
    run = built.run("test_mine.py", *options, env=ENVIRONMENT)
    expected = {f"test_mine[script-{tool}]": "passed" for tool in ("memcheck", "racecheck")}
    assert (run.ret, expected) == (0, run.outcomes), run.text
    records = [each for each in built.records if each.sanitized][-2:]
    assert ["b1h2s193d64-fp16-seed0"] * 2 == [str(each.case) for each in records]


def test_without_the_option_there_is_no_item(built: Project) -> None:
    """Nobody pays for what was not asked for."""
    assert [each for each in built.ids("--fa-variant=script", f"--fa-case={CASE}") if "sanitize" in each] == []


def test_without_a_gpu_it_is_skipped(new_project: NewProject) -> None:
    """compute-sanitizer watches GPUs: a reason, not a failure."""
    project = new_project("no-gpu-to-watch")
    project.python_variant("script")
    run = project.suite("--fa-sanitize=memcheck", f"--fa-case={CASE}", "-k", "test_sanitize or test_correct", "-rs")
    assert run.ret == 0, run.text
    assert "script runs on the CPU here: compute-sanitizer watches GPUs" in run.text

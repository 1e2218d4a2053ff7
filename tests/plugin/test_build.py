"""test_build: compile errors, the limits of the manifest, --fa-arch, and the tests that depend on a build."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.factories import CUDA_SOURCE, MANIFEST
from tests.projects import CASE, ONE_CASE, PRETEND_GPU, SHAPE, NewProject, Project, Run

pytestmark = pytest.mark.needs_nvcc

BROKEN_SOURCE = CUDA_SOURCE.replace("zero_kernel<<<", "no_kernel<<<")
COMPILER_LINE = 'kernels/broken/kernel.cu:10: error: identifier "no_kernel" is undefined'
GREEDY_MANIFEST = MANIFEST + "limits: {registers_per_thread: 1, spill_bytes: 0, instructions: {STG: {max: 0}}}\n"


@pytest.fixture(scope="module")
def builds(new_project: NewProject) -> Project:
    """A variant that compiles, one that does not, one over its limits, and one that needs no compiler."""
    project = new_project("builds")
    project.cuda_variant("broken", BROKEN_SOURCE)
    project.cuda_variant("greedy", manifest=GREEDY_MANIFEST)
    project.cuda_variant("zero")
    project.python_variant("good")
    return project


@pytest.fixture(scope="module")
def run(builds: Project) -> Run:
    """A run of all variants for two architectures."""
    return builds.suite(ONE_CASE, "-k", "test_build or (test_correct and good)", "--fa-arch=sm_80,sm_90a")


def test_failing_builds_do_not_stop_others(run: Run) -> None:
    """A variant that does not compile or exceeds a limit fails alone; the others are built and run."""
    assert run.outcomes == {
        "test_build[broken]": "failed",
        "test_build[greedy]": "failed",
        "test_build[zero]": "passed",
        f"test_correct[good-{CASE}]": "passed",
    }


def test_compile_error_shows_the_compilers_line(run: Run) -> None:
    """The failure contains the compiler's own line and the complete command."""
    lines = run.failure("test_build[broken]")
    command = shlex.split(next(line for line in lines if line.startswith("command: ")))
    assert COMPILER_LINE in lines
    assert (Path(command[1]).name, command[-1]) == ("nvcc", "-ltvm_ffi")


def test_compile_error_is_shown_once(run: Run) -> None:
    """A compile error that occurs for two architectures is shown once."""
    assert run.failure("test_build[broken]").count(COMPILER_LINE) == 1


def test_broken_limits_show_figures(run: Run) -> None:
    """Each exceeded limit is named with architecture, kernel, value and limit; limits that hold are not named."""
    lines = "\n".join(run.failure("test_build[greedy]")).removeprefix("over the limit: ").splitlines()
    messages = [re.sub(r"is \d+,", "is N,", line) for line in lines if not line.startswith(" ")]
    assert messages == [
        f"{arch}: zero_kernel: {broken}"
        for arch in ("sm_80", "sm_90a")
        for broken in ("registers_per_thread is N, the limit is 1", "1 STG, the limits are 0 to 0")
    ]


def test_arch_decides_what_is_built(builds: Project, run: Run) -> None:
    """--fa-arch compiles for the selected architectures only, and the record has one build for each."""
    (record,) = [each for each in builds.records if each.variant == "zero"]
    assert run.outcomes[f"test_build[{record.id}]"] == "passed"
    assert [build.arch for build in record.builds] == ["sm_80", "sm_90a"]


@pytest.mark.parametrize(("options", "arches"), [((), "sm_90a"), (("--fa-static",), "sm_80, sm_89, sm_90a")])
def test_one_architecture_without_a_gpu(project: Project, options: tuple[str, ...], arches: str) -> None:
    """Without --fa-arch and a GPU, the last architecture of the manifest is built; with --fa-static, all are."""
    project.cuda_variant("zero")
    result = project.suite("-k", "test_build", "--fa-no-build", "--fa-cache=nowhere", *options)
    (missing,) = re.findall(r"no build in .* \(zero for (.*)\)", result.reasons["test_build[zero]"])
    assert missing == arches


def test_arch_that_a_variant_lacks(project: Project) -> None:
    """A variant with none of the selected architectures is skipped; the reason names its own and the selected ones."""
    project.cuda_variant("zero", manifest=MANIFEST + "arch: [sm_89]\n")
    result = project.suite("-k", "test_build", "--fa-arch=sm_80")
    assert result.reasons["test_build[zero]"].endswith("zero is only for sm_89; --fa-arch selects only sm_80")


def test_unknown_arch_is_a_usage_error(builds: Project) -> None:
    """A text that is no architecture is a usage error of one line."""
    result = builds.collect("--fa-arch=volta")
    complaint = (
        "ERROR: --fa-arch: 'volta' is not an architecture; write sm_ and a number, then perhaps a or f, such as "
        "sm_80, sm_90a or sm_120f"
    )
    assert (result.ret, result.all_lines) == (pytest.ExitCode.USAGE_ERROR, [complaint])


def test_an_arch_that_the_compiler_lacks_is_one_usage_error(builds: Project) -> None:
    """An architecture that nvcc does not compile for is one usage error for all variants, with those that it has."""
    result = builds.collect("-k", "test_build", "--fa-arch=sm_20,sm_80")
    (complaint,) = result.all_lines
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert re.fullmatch(
        r"ERROR: --fa-arch: nvcc [\d.]+, \S+ [\d.]+ does not compile for sm_20; it compiles for .*sm_80, .*sm_90a.*",
        complaint,
    )


@pytest.mark.nightly
def test_an_arch_of_a_manifest_that_the_compiler_lacks_fails_that_variant(project: Project) -> None:
    """If the manifest names the architecture, only that build fails, with the architectures that the compiler has."""
    project.cuda_variant("old", manifest=MANIFEST + "arch: [sm_20]\n")
    project.cuda_variant("zero", manifest=MANIFEST + "arch: [sm_80]\n")
    result = project.suite("-k", "test_build and not noop")
    assert result.outcomes == {"test_build[old]": "failed", "test_build[zero]": "passed"}
    assert re.search(
        r"arch: nvcc .* does not compile for sm_20; it compiles for .*sm_80.* \(old for sm_20\)", result.text
    )


@pytest.mark.nightly
def test_a_manifest_without_arch_is_built_for_any(project: Project) -> None:
    """A variant whose manifest names no architecture is compiled for those of --fa-arch, also newer ones."""
    project.cuda_variant("zero", manifest="")
    result = project.suite("-k", "test_build", "--fa-variant=zero", "--fa-arch=sm_90,sm_86")
    (record,) = project.records
    assert (result.ret, [build.arch for build in record.builds]) == (0, ["sm_86", "sm_90"])


@pytest.mark.nightly
def test_dependent_tests_point_to_the_failed_build(project: Project) -> None:
    """With a GPU, the tests that need a failed build are skipped with one line that points to test_build."""
    project.write("conftest.py", PRETEND_GPU)
    project.cuda_variant("broken", BROKEN_SOURCE)
    result = project.suite(ONE_CASE, "-k", "broken")
    line = "build of broken failed (see test_build[broken])"
    reasons = {
        test: reason.rpartition("Skipped: ")[2] for test, reason in result.reasons.items() if "build" not in test
    }
    assert reasons == {f"test_correct[broken-{CASE}]": line, f"test_speed[broken-{SHAPE}]": line}
    assert (result.ret, result.outcomes["test_build[broken]"]) == (pytest.ExitCode.TESTS_FAILED, "failed")
    assert [line for line in result.outlines if line == COMPILER_LINE] == [COMPILER_LINE]


def test_the_first_dependent_test_reports_a_failed_build(project: Project) -> None:
    """Without test_build in the run, the first test that needs the build fails with the compiler's whole message."""
    project.write("conftest.py", PRETEND_GPU)
    project.cuda_variant("broken", BROKEN_SOURCE)
    result = project.suite(ONE_CASE, "-k", "broken and not build")
    first, second = f"test_correct[broken-{CASE}]", f"test_speed[broken-{SHAPE}]"
    assert result.outcomes == {first: "failed", second: "skipped"}
    assert result.failure(first)[0].startswith(f"not built: {COMPILER_LINE} (broken for sm_90a)")
    assert COMPILER_LINE in result.failure(first)
    assert result.reasons[second].endswith(f"not timed: {first} failed")

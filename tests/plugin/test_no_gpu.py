"""A machine without a GPU: tests that need one are skipped with a reason, and the others run."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from pytest_fa.catalog.claims import LENGTHS
from pytest_fa.catalog.properties import GRADIENTS_ONLY, PROMISED, PROPERTIES
from tests.factories import PYTHON_MANIFEST
from tests.projects import (
    CASE,
    ONE_CASE,
    SHAPE,
    WRITE_MODULES,
    NewProject,
    Project,
    Run,
)

NEEDS_GPU = "zero needs a GPU, and this machine has none"


@pytest.fixture(scope="module")
def pair(new_project: NewProject) -> Project:
    """One variant that needs a GPU and one that does not; each inner process writes a list of its modules."""
    project = new_project("no_gpu")
    project.write("conftest.py", WRITE_MODULES)
    project.cuda_variant("zero")
    project.python_variant("good")
    return project


@pytest.fixture(scope="module")
def run(pair: Project) -> Run:
    """A run that judges both variants and times the one for the CPU."""
    return pair.suite(ONE_CASE, "-k", "test_correct or (test_speed and good)", "--fa-no-build")


def test_cpu_variants_run(run: Run) -> None:
    """A variant for the CPU is judged and timed, one that needs a GPU is skipped, and the run passes."""
    assert (run.ret, run.outcomes) == (
        pytest.ExitCode.OK,
        {
            f"test_correct[good-{CASE}]": "passed",
            f"test_correct[zero-{CASE}]": "skipped",
            f"test_speed[good-{SHAPE}]": "passed",
        },
    )


def test_missing_gpu_is_the_reason(run: Run) -> None:
    """The reason of the skip says which variant needs a GPU, and that there is none."""
    assert run.reasons[f"test_correct[zero-{CASE}]"].endswith(NEEDS_GPU)


def test_pytest_process_never_imports_torch(pair: Project, run: Run) -> None:
    """After a complete run, the pytest process has imported neither torch nor tvm-ffi."""
    assert run.ret == pytest.ExitCode.OK
    (modules,) = pair.modules
    assert modules & {"torch", "tvm_ffi", "numpy", "pytest_fa.session"} == {"pytest_fa.session"}


def test_python_variant_for_the_gpu_is_skipped(project: Project) -> None:
    """A Python variant whose manifest does not list the CPU is skipped with the same reason and the line to write."""
    project.python_variant("gpu_only", manifest=PYTHON_MANIFEST.replace("[cpu, cuda]", "[cuda]"))
    reason = project.suite(ONE_CASE, "-k", "test_correct").reasons[f"test_correct[gpu_only-{CASE}]"]
    remedy = "write `supports: {device: [cuda, cpu]}` if it also runs on a CPU"
    assert reason.endswith(f"gpu_only needs a GPU, and this machine has none; {remedy}")


@pytest.mark.alone
def test_collecting_is_quick(project: Project) -> None:
    """A default run of the shipped suite is collected in less than 12 times the time of `import pytest`.

    Both times include the start of Python.  On a usual machine, 12 times are about 2 s.
    """
    project.cuda_variant("zero")
    project.python_variant("good")
    runs = [project.suite("--collect-only", "-q") for _ in range(2)]
    claims = 1  # the mask that the Python variant supports
    properties = {*PROPERTIES} - PROMISED - GRADIENTS_ONLY
    expected = 1 + 24 + claims + 2 * (len(LENGTHS) + len(properties)) + 32
    allowed = 12 * min(seconds_to_import_pytest() for _ in range(3))
    assert (len(runs[0].ids), min(run.seconds for run in runs) < allowed) == (expected, True)


def seconds_to_import_pytest() -> float:
    """How long Python takes to start and to import pytest."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import pytest"], check=True)
    return time.perf_counter() - start

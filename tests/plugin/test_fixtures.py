"""The fixtures in a user's own tests."""

from __future__ import annotations

import re

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.factories import PYTHON_MANIFEST
from tests.projects import CASE, SHAPE, NewProject, Project, Run

FIXTURES = [
    "fa_benchmark",
    "fa_builds",
    "fa_case",
    "fa_check",
    "fa_clock",
    "fa_inputs",
    "fa_module",
    "fa_property",
    "fa_run",
    "fa_sanitizer",
    "fa_truth",
    "fa_variant",
]
REFUSED_CASE = "b1h2s64d64-bf16-seed0"

OWN_TESTS = """\
import pytest


def call(fa_module, fa_inputs):
    q, k, v, scale, causal = fa_inputs
    return fa_module(q, k, v, scale=scale, causal=causal)


def test_right(fa_module, fa_inputs, fa_check):
    check = fa_check(call(fa_module, fa_inputs))
    assert (check.passed, check.policy) == (True, "same_precision")


def test_corrupted(fa_module, fa_inputs, fa_check):
    out = call(fa_module, fa_inputs)
    out[0, 1, 7, 3] += 1.0
    fa_check(out)


def test_truth(fa_module, fa_inputs, fa_truth):
    assert (call(fa_module, fa_inputs).double() - fa_truth.out).abs().max() < 1e-3


def test_timed(fa_module, fa_case, fa_inputs, fa_benchmark):
    speed = fa_benchmark(fa_module, fa_case, fa_inputs)
    assert speed.device.median_us > 0


def test_inputs_alone(fa_inputs):
    assert fa_inputs.q.shape == (1, 2, 64, 64)


def test_other_dtype(fa_module, fa_inputs, fa_check):
    fa_check(call(fa_module, fa_inputs).float())


def test_case_alone(fa_case):
    assert fa_case.head_dim == 64


def test_variant_alone(fa_variant):
    assert fa_variant.name in ("good", "zero")


def test_module_alone(fa_module):
    assert callable(fa_module)


def test_without_any():
    pass
"""
ONLY_CHECKS = """\
def test_nothing_of_a_variant(fa_inputs, fa_truth, fa_check):
    check = fa_check(fa_truth.out.to(fa_inputs.q.dtype))
    assert check.passed
"""


@pytest.fixture(scope="module")
def own(new_project: NewProject) -> Project:
    """A project with tests of its own over a CPU variant and one that needs a GPU."""
    project = new_project("own")
    project.python_variant("good")
    project.cuda_variant("zero")
    project.write("test_own.py", OWN_TESTS)
    project.write("test_checks.py", ONLY_CHECKS)
    return project


@pytest.fixture(scope="module")
def run(own: Project) -> Run:
    """A run of the user's tests on one case that the variant supports and one that it refuses."""
    return own.run(".", f"--fa-case={CASE},{REFUSED_CASE}", "-k", "not sdpa and not noop")


def test_all_are_listed(project: Project) -> None:
    """`pytest --fixtures` lists every fixture with a sentence that ends with a period."""
    lines = project.run("--fixtures").outlines
    last_characters = {
        line.split()[0]: lines[index + 1].strip()[-1:] for index, line in enumerate(lines) if line.startswith("fa_")
    }
    assert last_characters == dict.fromkeys(FIXTURES, ".")


@pytest.mark.parametrize("test", ["test_right", "test_truth"])
def test_variant_and_case(run: Run, test: str) -> None:
    """A test with variant and case runs over every pair; it is skipped for refused cases and without a device."""
    outcomes = {name: outcome for name, outcome in run.outcomes.items() if name.startswith(f"{test}[")}
    assert outcomes == {
        f"{test}[good-{CASE}]": "passed",
        f"{test}[good-{REFUSED_CASE}]": "skipped",
        f"{test}[zero-{CASE}]": "skipped",
        f"{test}[zero-{REFUSED_CASE}]": "skipped",
    }


def test_check_fails_on_a_corrupted_output(run: Run) -> None:
    """fa_check fails a test whose output has one wrong element."""
    assert run.outcomes[f"test_corrupted[good-{CASE}]"] == "failed"


def test_check_shows_the_bounds(run: Run, snapshot: SnapshotAssertion) -> None:
    """The failure of fa_check has every bound, the number of bad elements and the worst place, and no traceback."""
    lines = run.failure(f"test_corrupted[good-{CASE}]")
    assert [line.split(":")[0] for line in lines] == [
        "wrong",
        "  policy same_precision",
        *(f"    {bound}" for bound in ("finite", "max", "rms", "row rms", "gain")),
        "  same-precision reference",
        "  elements",
        "  first bad",
        "  worst",
    ]
    assert snapshot == lines[8:10]


def test_another_dtype_is_no_output(run: Run) -> None:
    """fa_check fails an output whose dtype is not that of the inputs."""
    assert run.outcomes[f"test_other_dtype[good-{CASE}]"] == "failed"
    assert "the output is torch.float32 [1, 2, 64, 64], it must be torch.float16" in run.text


def test_benchmark_takes_part(run: Run) -> None:
    """fa_benchmark times a kernel once for each shape, and pytest-benchmark shows the times."""
    rows = [line.split()[0] for line in run.all_lines if line.startswith("test_timed[")]
    assert (run.outcomes[f"test_timed[good-{SHAPE}]"], rows) == ("passed", [f"test_timed[good-{SHAPE}]"])


@pytest.mark.parametrize("test", ["test_case_alone", "test_inputs_alone", "test_nothing_of_a_variant"])
def test_case_alone(run: Run, test: str) -> None:
    """A test with a case and without a variant runs once for every case, also for cases that variants refuse."""
    outcomes = {name: outcome for name, outcome in run.outcomes.items() if name.startswith(f"{test}[")}
    assert outcomes == {f"{test}[{CASE}]": "passed", f"{test}[{REFUSED_CASE}]": "passed"}


def test_variant_alone(run: Run) -> None:
    """A test with a variant and without a case runs once for every variant."""
    outcomes = {name: outcome for name, outcome in run.outcomes.items() if name.startswith("test_variant_alone")}
    assert outcomes == {"test_variant_alone[good]": "passed", "test_variant_alone[zero]": "passed"}


def test_module_without_a_device(run: Run) -> None:
    """fa_module skips a test whose variant needs a GPU if there is none, with that reason."""
    assert (run.outcomes["test_module_alone[good]"], run.outcomes["test_module_alone[zero]"]) == ("passed", "skipped")
    assert run.reasons["test_module_alone[zero]"].endswith("zero needs a GPU, and this machine has none")


def test_tests_without_fixtures_run_as_usual(run: Run) -> None:
    """A test that uses none of the fixtures runs as usual."""
    assert run.outcomes["test_without_any"] == "passed"


def test_own_tests_show_no_table(run: Run) -> None:
    """A user's tests without fa_run write no records and show no table."""
    assert [line for line in run.all_lines if line.startswith("records: ") or " attention kernels " in line] == []


def test_skips_emit_no_warning(run: Run) -> None:
    """A skipped timing does not warn about an unused benchmark fixture."""
    assert "PytestBenchmarkWarning" not in run.text


# Computes the output at the first call with a V, and then returns the same output at every call with this V.
KEEPS = """
KEPT = {}


def forward(q, k, v, *, scale, causal="none", out=None):
    if v.data_ptr() not in KEPT:
        scores = q.float() @ k.float().transpose(2, 3) * scale
        KEPT[v.data_ptr()] = (torch.softmax(scores, -1) @ v.float()).to(q.dtype)
    return out.copy_(KEPT[v.data_ptr()])
"""

TIMES = """
def test_timed(fa_module, fa_case, fa_inputs, fa_benchmark):
    fa_benchmark(fa_module, fa_case, fa_inputs)
"""


@pytest.mark.nightly
def test_overhead_is_timed_and_not_judged(project: Project) -> None:
    """A variant of role `overhead`, which computes nothing, is timed and not judged in a user's own test, too."""
    empty = "def forward(q, k, v, *, scale, causal='none', out=None):\n    return out\n"
    project.python_variant("good")
    project.python_variant("empty", empty, manifest=PYTHON_MANIFEST + "role: overhead\n")
    project.write("test_own.py", TIMES)
    result = project.run(".", "--fa-variant=good", f"--fa-case={CASE}", "-k", "good or empty")
    assert result.outcomes == {f"test_timed[{name}-{SHAPE}]": "passed" for name in ("good", "empty")}


@pytest.mark.nightly
def test_timed_outputs_are_judged(project: Project) -> None:
    """fa_benchmark fails a test whose timed calls return an old result."""
    project.python_variant("keeps", "import torch\n" + KEEPS)
    project.write("test_own.py", TIMES)
    result = project.run(".", "--fa-variant=keeps", f"--fa-case={CASE}", "-k", "keeps")
    assert result.outcomes == {f"test_timed[keeps-{SHAPE}]": "failed"}
    assert re.search(r"wrong: .* in an output of the timed calls", result.text)


@pytest.mark.nightly
def test_gradients_have_no_verdict_here(new_project: NewProject) -> None:
    """A test that asks for gradients fails: only dQ would be judged in this process."""
    project = new_project("gradients")
    project.ini()
    manifest = PYTHON_MANIFEST.replace("entry:forward", "entry:backward") + "computes: gradients\n"
    source = "def backward(dout, q, k, v, out, lse, *, scale, causal='none', dq, dk, dv): ...\n"
    project.python_variant("mine", source, manifest)
    project.write("test_own.py", "def test_own(fa_variant, fa_inputs, fa_check): ...\n")
    run = project.run("test_own.py", "--fa-variant=mine", f"--fa-case={SHAPE}-bwd-seed0")
    assert [*run.outcomes.values()] in (["failed"], ["error"])
    assert "asks for gradients" in run.text
    assert "use fa_run.correct" in run.text

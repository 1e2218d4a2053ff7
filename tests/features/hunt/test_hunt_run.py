"""`pytest --fa-hunt`, as a user types it."""

from __future__ import annotations

import pytest

from tests.factories import PYTHON_MANIFEST, PYTHON_SOURCE
from tests.projects import Project

pytest.importorskip("hypothesis")

WRONG_SOURCE = PYTHON_SOURCE.replace("triu(1)", "triu(0)")
EXAMPLE = "b1h1s2d64-fp16-causal-seed0"


@pytest.fixture
def hunted(project: Project) -> Project:
    """A project with a kernel whose causal mask hides one key too many."""
    project.ini()
    project.python_variant("mine", WRONG_SOURCE, PYTHON_MANIFEST)
    return project


@pytest.mark.nightly
def test_a_fault_is_told_with_its_smallest_case_and_how_to_repeat_it(hunted: Project) -> None:
    """The next hunt begins with it, and the command judges it again."""
    run = hunted.suite("--fa-hunt=mine", "--fa-hunt-seconds=8", "--fa-hunt-seed=3")
    assert run.ret == pytest.ExitCode.TESTS_FAILED
    lines = [line.strip() for line in run.failure("test_hunt[mine]")]
    (again,) = (line for line in lines if line.startswith("again: "))
    assert "-causal-" in again
    assert any(line.startswith("what matters: -causal") for line in lines)
    hunted.python_variant("mine", PYTHON_SOURCE, PYTHON_MANIFEST)
    mended = hunted.suite("--fa-hunt=mine", "--fa-hunt-seconds=1")
    assert (mended.ret, mended.outcomes) == (0, {"test_hunt[mine]": "passed"})
    assert "no fault" in mended.text


def test_an_example_is_judged_again_alone(hunted: Project) -> None:
    """With --fa-hunt-again, nothing random is judged."""
    run = hunted.suite("--fa-hunt=mine", f"--fa-hunt-again=padded_rows:{EXAMPLE},b1h1s1d64-fp16-seed0")
    assert "2 cases in" in run.text
    assert f"again: pytest --pyargs pytest_fa.suite --fa-hunt=mine --fa-hunt-again=padded_rows:{EXAMPLE}" in run.text
    unclaimed = hunted.suite("--fa-hunt=mine", "--fa-hunt-again=b1h1s1d64-bf16-seed0")
    assert unclaimed.ret == pytest.ExitCode.TESTS_FAILED
    assert "--fa-hunt-again: mine does not support b1h1s1d64-bf16: dtype is bf16" in unclaimed.text


@pytest.mark.nightly
def test_a_baseline_that_refuses_all_is_not_right(hunted: Project) -> None:
    """Nothing was judged, so the run is not green."""
    source = (
        "from pytest_fa.errors import UnsupportedCase\n\n\ndef forward(*_, **__):\n    raise UnsupportedCase('never')\n"
    )
    hunted.python_variant("mine", source, "role: baseline\n" + PYTHON_MANIFEST)
    run = hunted.suite("--fa-hunt=mine", "--fa-hunt-seconds=1")
    assert run.outcomes == {"test_hunt[mine]": "skipped"}
    assert run.ret != 0
    assert "mine refused all" in run.text


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--fa-hunt-seconds=5"], "--fa-hunt-seconds: there is no hunt; give --fa-hunt=NAME too"),
        (["--fa-hunt=mine", "--fa-hunt-seconds=soon"], "--fa-hunt-seconds: 'soon' seconds; give 1 to 86400"),
        (["--fa-hunt=mine", "--fa-hunt-seed=-1"], "--fa-hunt-seed: '-1' is no seed"),
        (["--fa-hunt=mine", f"--fa-hunt-seed={2**70}"], "is no seed; give 0 to"),
        (["--fa-hunt="], "--fa-hunt: no variant is named; give a name, or '*' for all"),
        (["--fa-hunt=mine", "--fa-hunt-again=b1"], "case 'b1' is malformed"),
        (["--fa-hunt=yours"], "--fa-hunt: no variant 'yours'"),
        (["--fa-hunt=mine", "--fa-variant=mine"], "a hunt names its variants"),
        (["--fa-hunt=mine", "--fa-case=b1h1s1d64-fp16"], "--fa-hunt-again judges one that it found"),
    ],
)
def test_what_makes_no_sense_is_refused(hunted: Project, arguments: list[str], problem: str) -> None:
    """One line says what is wrong."""
    assert any(problem in line for line in hunted.complaint("--pyargs", "pytest_fa.suite", *arguments))

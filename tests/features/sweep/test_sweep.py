"""--fa-sweep, end to end on the CPU: a wrong configuration never wins, and a fast one is confirmed, once."""

from __future__ import annotations

import os

import pytest

from tests.projects import SHAPE, ZERO_MANIFEST, NewProject, Project, Run

pytest.importorskip("optuna")

# Computes PASSES times; one of its modes is wrong.
SOURCE = """\
import torch


def forward(q, k, v, *, scale, causal="none", out=None, PASSES, MODE):
    factor = 1.5 * scale if MODE == "RACY" else scale
    for _ in range(PASSES):
        scores = q.float() @ k.float().transpose(2, 3) * factor
        result = (torch.softmax(scores, -1) @ v.float()).to(q.dtype)
    return result if out is None else out.copy_(result)
"""
MANIFEST = f"""\
entry: {{target: "entry:forward"}}
supports: {{device: [cpu, cuda]}}
defines: {{PASSES: 4, MODE: PLAIN}}
sweep:
  values: {{PASSES: [1, 4], MODE: [PLAIN, RACY]}}
  where: ["PASSES == 1 or MODE == 'PLAIN'"]
  cases: [{SHAPE}]
"""
SWEEP = ("--fa-sweep=tuned", "--fa-case=b1h2s64d64-fp16-seed0", "--fa-suite=smoke")


@pytest.fixture(scope="module")
def tuned(new_project: NewProject) -> Project:
    """A variant with a space of three configurations: the variant itself, a fast one, and a wrong one."""
    project = new_project("sweep")
    project.python_variant("tuned", SOURCE, MANIFEST)
    project.python_variant("plain")
    return project


@pytest.fixture(scope="module")
def run(tuned: Project) -> Run:
    """A whole sweep, which later tests look at."""
    return tuned.suite(*SWEEP, "--fa-trials=10")


@pytest.mark.nightly
@pytest.mark.alone
def test_the_fast_configuration_is_confirmed(run: Run) -> None:
    """The exit status is 0, and only what the gate confirmed is proposed for the manifest."""
    assert (0, "passed") == (run.ret, run.outcomes["test_sweep_end[tuned]"]), run.text
    assert 'for variant.yaml: defines: {PASSES: 1, MODE: "PLAIN"}' in run.outlines
    assert any(line.startswith("PASS tuned@PASSES=1@MODE=PLAIN < 1 x baseline: ") for line in run.outlines)
    assert any(line.startswith("best of 1: expected luck at this noise 0.0 % ") for line in run.outlines)


@pytest.mark.nightly
@pytest.mark.alone
def test_the_wrong_configuration_is_recorded(run: Run) -> None:
    """It is skipped with the check that caught it.  The variant itself is no trial."""
    reasons = [reason for reason in run.reasons.values() if reason.startswith("PASSES=1@MODE=RACY: wrong: ")]
    assert 1 == len(reasons)
    assert any(line.startswith("3 feasible configurations; 2 trials (") for line in run.outlines)


@pytest.mark.nightly
@pytest.mark.alone
def test_the_record_is_that_of_the_gate(run: Run, tuned: Project) -> None:
    """The run leaves one record, whose rerun command gates the winner against the variant."""
    assert 0 == run.ret, run.text
    (record,) = [each for each in tuned.records if each.kind == "gate"]
    assert ("tuned@PASSES=1@MODE=PLAIN", "ok") == (record.variant, record.outcome)
    assert "--fa-gate-baseline=tuned" in record.rerun_command


@pytest.mark.nightly
@pytest.mark.alone
def test_a_sweep_ends_once(run: Run, tuned: Project) -> None:
    """The same command again tries nothing and gates nothing: it shows how the sweep ended."""
    again = tuned.suite(*SWEEP, "--fa-trials=10")
    assert ({"skipped"}, 0) == (
        {outcome for test, outcome in again.outcomes.items() if test != "test_sweep_end[tuned]"},
        again.ret,
    )
    assert [line for line in run.outlines if line.startswith("the gate of ")] == [
        line for line in again.outlines if line.startswith("the gate of ")
    ]
    (line,) = [line for line in again.outlines if line.startswith("ended on ")]
    assert line.endswith(" by an earlier run; nothing was timed now")
    assert not any(line.startswith("ended on ") for line in run.outlines)


@pytest.mark.nightly
def test_without_a_better_configuration_the_status_is_10(new_project: NewProject) -> None:
    """A space in which every configuration is wrong ends with 'no configuration is better' and exit status 10."""
    project = new_project("sweep-none")
    manifest = MANIFEST.replace("where: [\"PASSES == 1 or MODE == 'PLAIN'\"]", "where: [\"MODE == 'RACY'\"]")
    project.python_variant("tuned", SOURCE, manifest)
    run = project.suite(*SWEEP, "--fa-trials=10")
    assert (10, "failed") == (run.ret, run.outcomes["test_sweep_end[tuned]"]), run.text
    assert "no configuration is better than the parent: no configuration is correct and could be timed" in run.outlines
    assert run.outlines[-1].startswith("rerun: pytest ")
    assert run.outlines[-1].endswith("-2.journal")  # another search: the same one has ended
    assert not any("for variant.yaml" in line for line in run.outlines)


@pytest.mark.nightly
def test_a_sweep_that_cannot_run_has_not_ended(new_project: NewProject) -> None:
    """Without a GPU, a CUDA variant cannot be swept: the run fails, and its last lines say so and why."""
    project = new_project("sweep-gpu")
    project.cuda_variant("tuned", manifest=ZERO_MANIFEST + "sweep: {values: {BLOCK: [32, 64]}}\n")
    run = project.suite("--fa-sweep=tuned", "--fa-trials=10")
    assert pytest.ExitCode.TESTS_FAILED == run.ret
    assert "fa: the sweep has not ended: 3 selected tests were skipped" in run.outlines
    assert any("needs a GPU" in line for line in run.outlines)


def test_one_test_for_each_trial(tuned: Project) -> None:
    """A sweep has no other tests than its trials, at most one for each feasible configuration, and its end."""
    trials = [f"test_sweep[tuned-t00{number}]" for number in (1, 2, 3)]
    assert [*trials, "test_sweep_end[tuned]"] == tuned.ids(*SWEEP)
    assert [trials[0], "test_sweep_end[tuned]"] == tuned.ids(*SWEEP, "--fa-trials=1")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--fa-sweep=plain",), "--fa-sweep: the manifest of plain has no `sweep`; write for example"),
        (("--fa-sweep=tund",), "--fa-sweep: no variant 'tund'; did you mean 'tuned'?"),
        (("--fa-sweep=tuned,plain",), "--fa-sweep: 'tuned,plain' is not the name of one variant"),
        (("--fa-sweep=tuned@PASSES=1",), "--fa-sweep: 'tuned@PASSES=1' is not the name of one variant"),
        (("--fa-sweep=tuned", "--fa-gate=0.9"), "drop --fa-gate"),
        (("--fa-sweep=tuned", "--fa-variant=plain"), "drop --fa-variant"),
        (("--fa-sweep=tuned", "--fa-trials=0"), "--fa-trials: '0' trials; give 1 to 100000, such as 100"),
        (("--fa-sweep=tuned", "--fa-sampler=tp"), "--fa-sampler: no 'tp'; did you mean 'tpe'? (allowed: tpe, nsga2)"),
    ],
)
def test_a_wrong_command_is_a_usage_error(tuned: Project, arguments: tuple[str, ...], complaint: str) -> None:
    """The message names the option, its value and what is allowed."""
    result = tuned.collect(*arguments)
    assert pytest.ExitCode.USAGE_ERROR == result.ret
    assert complaint in result.text


def test_an_empty_space_is_a_usage_error(new_project: NewProject) -> None:
    """Conditions that no combination satisfies are reported before anything is built."""
    project = new_project("sweep-empty")
    project.python_variant("tuned", SOURCE, MANIFEST.replace("PASSES == 1 or", "PASSES == 2 and"))
    result = project.collect("--fa-sweep=tuned")
    assert pytest.ExitCode.USAGE_ERROR == result.ret
    assert "--fa-sweep: no combination of the values of tuned satisfies all conditions of `sweep.where`" in result.text


def test_without_optuna_the_message_says_what_to_install(tuned: Project) -> None:
    """Optuna is an optional dependency: without it, one line says what to install."""
    tuned.write("without/optuna/__init__.py", "raise ImportError('not here')\n")
    path = os.pathsep.join(filter(None, (str(tuned.folder / "without"), os.environ.get("PYTHONPATH"))))
    result = tuned.suite("--collect-only", "-q", "--fa-sweep=tuned", env={"PYTHONPATH": path})
    assert pytest.ExitCode.USAGE_ERROR == result.ret
    expected = "ERROR: --fa-sweep needs Optuna, which is not installed; type: pip install 'pytest-fa[sweep]'"
    assert [expected] == result.all_lines


def test_a_wrong_name_names_the_option_that_was_typed(tuned: Project) -> None:
    """A sweep of a variant that is not there is reported for --fa-sweep, not for --fa-variant."""
    complaint = "ERROR: --fa-sweep: no variant 'tunned'; did you mean 'tuned'? (see --fa-list)"
    assert [complaint] == tuned.complaint("--fa-sweep=tunned")


def test_the_list_has_the_size_of_the_space(tuned: Project) -> None:
    """`--fa-list` names the variants with a sweep, the defines, and how many configurations are feasible."""
    lines = tuned.run_here("--fa-list").outlines
    assert "sweep of tuned: 3 of 4 combinations of PASSES (2), MODE (2) are feasible" in lines

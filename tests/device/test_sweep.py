"""A sweep of a CUDA kernel over several processes: one of them ends it, also with builds of another one."""

from __future__ import annotations

import pytest

from pytest_fa.__main__ import main
from tests.projects import NewProject, Run

pytest.importorskip("optuna")
pytest.importorskip("xdist")

# At this shape, 32 threads per block give four times as many blocks as 128, which occupy only 32 SMs.
SWEEP = "sweep: {values: {BLOCK_THREADS: [32, 64, 128]}, cases: [b1h8s512d64-fp16]}\n"


@pytest.fixture(scope="module")
def run(new_project: NewProject) -> Run:
    """A whole sweep of the template's kernel, in three processes."""
    project = new_project("sweep")
    kernels = project.folder / "kernels"
    assert main(["new", "mine", "--kind", "cuda", "--kernels", str(kernels)]) == 0
    with (kernels / "mine" / "variant.yaml").open("a", encoding="utf-8") as manifest:
        manifest.write(SWEEP)
    words = ("--fa-sweep=mine", "--fa-trials=10", "--fa-suite=smoke", "--fa-case=b1h8s512d64-fp16-seed0", "-n3")
    return project.suite(*words, env={"CUDA_VISIBLE_DEVICES": "0"})


@pytest.mark.quiet_gpu
def test_a_sweep_over_processes_ends_with_a_winner(run: Run) -> None:
    """The fastest configuration is confirmed by the gate, although another process may have built it."""
    assert (0, "passed") == (run.ret, run.outcomes["test_sweep_end[mine]"]), run.text
    assert "for variant.yaml: defines: {BLOCK_THREADS: 32}" in run.outlines


@pytest.mark.quiet_gpu
def test_the_variant_itself_is_no_trial(run: Run) -> None:
    """Two of three configurations are timed."""
    (line,) = [line for line in run.outlines if line.startswith("3 feasible configurations; 2 trials (")]
    assert ("2 correct" in line, "1 same code" in line) == (True, True)

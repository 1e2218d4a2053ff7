"""Every kind of entry on a GPU: a PyTorch extension, Triton, FlexAttention, and flash-attn if it is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from pytest_fa.__main__ import main
from tests.factories import MANIFEST
from tests.projects import NewProject, Project, Run

ON_GPU = {"CUDA_VISIBLE_DEVICES": "0"}
SHAPE = "b1h2s113d64-fp16-causal"
CASE = f"{SHAPE}-seed0"
CHECKED, TIMED = f"test_correct[{{}}-{CASE}]", f"test_speed[{{}}-{SHAPE}]"

# A race: each thread reads a row of shared memory that a thread of another warp writes, without a barrier between.
RACE = """\
#if RACE
  __shared__ __half rows[BLOCK_THREADS][HEAD_DIM];
  const int reader = (threadIdx.x + 32) % BLOCK_THREADS;
  const int64_t reader_row = int64_t(blockIdx.x) * BLOCK_THREADS + reader;
  const __half* reader_q = q_of_all + (reader_row < rows_of_all ? reader_row : row) * HEAD_DIM;
  for (int d = 0; d < HEAD_DIM; ++d) rows[reader][d] = reader_q[d];
  q = rows[threadIdx.x];
#endif
"""

FLEX = """\
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

compiled = torch.compile(flex_attention, dynamic=False)


def forward(q, k, v, *, scale, causal="none", out=None):
    mask = None
    if causal == "top_left":
        see = lambda batch, head, row, key: key <= row
        mask = create_block_mask(see, None, None, q.shape[2], k.shape[2], device=q.device)
    result = compiled(q, k, v, scale=scale, block_mask=mask)
    return result if out is None else out.copy_(result)
"""

FLASH_ATTN = """\
entry:
  kind: python
  target: flash_attn:flash_attn_func
  call: {keywords: {softmax_scale: scale, causal: causal}, layout: bshd}
supports: {causal: [none, bottom_right], grouped_heads: true}
"""


def new(project: Project, kind: str) -> Path:
    """Create a variant from the template of a kind with `new`, as a user does."""
    kernels = project.folder / "kernels"
    assert main(["new", "mine", "--kind", kind, "--kernels", str(kernels)]) == 0
    return kernels / "mine"


def judged(project: Project, *words: str) -> Run:
    """Run the suite on one small case, which checks and times it."""
    return project.suite(f"--fa-case={CASE}", "--fa-variant=mine*", *(words or ("-k", "mine")), env=ON_GPU)


@pytest.fixture(scope="module")
def extension(new_project: NewProject) -> dict[str, Run]:
    """Two runs: the template's extension beside a copy with a race, and the extension after an edit of its header."""
    project = new_project("extension")
    folder = new(project, "torch")
    source = (folder / "kernel.cu").read_text(encoding="utf-8")
    source = source.replace("  q += row * HEAD_DIM,", "  const __half* q_of_all = q;\n  q += row * HEAD_DIM,")
    source = source.replace("int64_t rows,", "int64_t rows_of_all,").replace("row >= rows)", "row >= rows_of_all)")
    source = source.replace("\n  float o[HEAD_DIM]", f"\n{RACE}\n  float o[HEAD_DIM]")
    (folder / "kernel.cu").write_text(source, encoding="utf-8")
    manifest = (folder / "variant.yaml").read_text(encoding="utf-8").replace("limits: { spill_bytes: 0 }\n", "")
    manifest = manifest.replace("BLOCK_THREADS: 128", "BLOCK_THREADS: 128, RACE: 0")
    more = "variants:\n  mine: {}\n  mine_racy: {role: wrong, defines: {RACE: 1}}\n"
    (folder / "variant.yaml").write_text(manifest + more, encoding="utf-8")
    runs = {"both": judged(project)}
    header = folder / "kernel.h"
    header.write_text(header.read_text(encoding="utf-8").replace("HEAD_DIM = 64", "HEAD_DIM = 32"), encoding="utf-8")
    runs["edited"] = judged(project, "--fa-variant=mine", "-k", "test_build or test_correct")
    return runs


@pytest.mark.quiet_gpu
def test_an_extension_is_judged_and_timed(extension: dict[str, Run]) -> None:
    """The template's extension is built, right and timed without an edit."""
    outcomes = extension["both"].outcomes
    assert {outcomes[test.format("mine")] for test in (CHECKED, TIMED)} == {"passed"}, extension["both"].reasons
    assert outcomes["test_build[mine]"] == "passed"


def test_a_racy_variant_of_an_extension_is_caught(extension: dict[str, Run]) -> None:
    """Two variants of one extension run in one session, and the variant that lacks a barrier fails."""
    outcomes = extension["both"].outcomes
    assert outcomes["test_build[mine_racy]"] == "passed"
    assert outcomes[CHECKED.format("mine_racy")] == "failed"


def test_an_edited_header_of_an_extension_is_rebuilt(extension: dict[str, Run]) -> None:
    """After an edit of its header the extension is rebuilt, and refuses the head_dim that it took before."""
    assert extension["edited"].outcomes[CHECKED.format("mine")] == "failed"
    assert "q must be fp16 of head_dim 64 on a GPU" in extension["edited"].reasons[CHECKED.format("mine")]


@pytest.mark.quiet_gpu
def test_a_triton_kernel_is_judged_and_timed(project: Project) -> None:
    """The template in Triton is right on a shape with tails, and holds every property."""
    new(project, "triton")
    run = project.suite("--fa-variant=mine", "--fa-suite=smoke", "-k", "mine", env=ON_GPU)
    outcomes = {outcome for name, outcome in run.outcomes.items() if "[mine-" in name}
    assert outcomes <= {"passed", "skipped"}, run.text
    assert run.outcomes["test_speed[mine-b1h2s65d64-fp16-causal]"] == "passed"
    assert run.ret == pytest.ExitCode.OK


@pytest.mark.quiet_gpu
def test_flex_attention_is_judged_and_timed(project: Project) -> None:
    """A function that torch compiles at its first call is not stopped by the watchdog."""
    entry = 'entry: {kind: python, target: "entry:forward"}\nsupports: {causal: [none, top_left]}\n'
    project.python_variant("mine", source=FLEX, manifest=MANIFEST + entry)
    run = judged(project)
    assert {run.outcomes[test.format("mine")] for test in (CHECKED, TIMED)} == {"passed"}, run.reasons


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="flash-attn is not installed")
def test_flash_attn_needs_no_code(project: Project) -> None:
    """A function of an installed package can be a variant with a manifest and no code."""
    project.write("kernels/mine/variant.yaml", MANIFEST + FLASH_ATTN)
    case = f"{SHAPE}_br-seed0"  # its mask ends at the last key
    run = project.suite(f"--fa-case={case}", "--fa-variant=mine", "-k", "mine", env=ON_GPU)
    assert {run.outcomes[f"test_correct[mine-{case}]"], run.outcomes[f"test_speed[mine-{SHAPE}_br]"]} == {"passed"}

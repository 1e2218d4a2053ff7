"""An optional baseline runs only if it is named; FlashAttention-3 is skipped with the reason where it is missing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.projects import ONE_CASE, SHAPE, NewProject, Project, variants_of
from tests.tiers import nightly_after

FOLDER = Path(__file__).parents[2] / "kernels" / "flash_attention_3"
NAMED = ("--fa-variant=usual,flash_attention_3", "--benchmark-disable")
CASES = "--fa-case=b2h4s40d64-fp16-kv2-seed0,b1h2s40d64-bf16-causal-seed0,b1h2s9d64-fp16-causal_br-sk40-seed0"
E4M3_CASES = "--fa-case=b2h3s40d64-e4m3-out_bf16-seed0,b1h2s9d64-e4m3-causal_br-sk40-bshd-out_bf16-seed0"
IN_E4M3 = ("--fa-variant=flash_attention_3_fp8", "--benchmark-disable")

# A package in place of FlashAttention-3: its operator takes the same arguments and computes on the CPU.
PACKAGE = """\
import torch

library = torch.library.Library("flash_attn_3", "DEF")
library.define(
    "fwd(Tensor q, Tensor k, Tensor v, *, Tensor(a!)? out=None, Tensor? q_descale=None, Tensor? k_descale=None, "
    "Tensor? v_descale=None, float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, "
    "int window_size_right=-1, float softcap=0.0, int num_splits=0) -> Tensor[]"
)


def times(tensor, descale):
    return tensor.float() if descale is None else tensor.float() * descale[:, None, :, None]


def fwd(q, k, v, *, out=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, is_causal=False,
        window_size_left=-1, window_size_right=-1, softcap=0.0, num_splits=0):
    assert q_descale is None or (out.dtype, q_descale.shape) == (torch.bfloat16, (k.shape[0], k.shape[2]))
    seq_q, seq_k, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    q, k, v = times(q, q_descale), times(k, k_descale), times(v, v_descale)
    keys, values = (tensor.repeat_interleave(group, 2).transpose(1, 2) for tensor in (k, v))
    scores = q.transpose(1, 2) @ keys.transpose(2, 3) * softmax_scale
    if softcap == 2:
        raise RuntimeError("This flash attention build does not support tanh softcapping.")
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(seq_q)[:, None] + seq_k - seq_q - torch.arange(seq_k)
    if window_size_left >= 0:
        scores = scores.masked_fill(distance > window_size_left, float("-inf"))
    if window_size_right >= 0:
        scores = scores.masked_fill(-distance > window_size_right, float("-inf"))
    if is_causal:
        scores += torch.full((seq_q, seq_k), float("-inf")).triu(1 + seq_k - seq_q)
    return [out.copy_((torch.softmax(scores, -1) @ values).transpose(1, 2))]


library.impl("fwd", fwd, "CPU")
"""


@pytest.fixture(scope="module")
def on_cpu(new_project: NewProject) -> Project:
    """A project with the baselines of `flash_attention_3`, whose manifest says here that they also run on a CPU."""
    project = new_project("optional")
    project.python_variant("usual")
    manifest = (FOLDER / "variant.yaml").read_text(encoding="utf-8")
    on_cpu_too = manifest.replace("\nsupports:\n", "\nsupports:\n  device: [cuda, cpu]\n")
    project.write("kernels/flash_attention_3/variant.yaml", on_cpu_too)
    source = (FOLDER / "flash_attention_3.py").read_text(encoding="utf-8")
    project.write("kernels/flash_attention_3/flash_attention_3.py", source)
    return project


@pytest.mark.parametrize(
    ("selection", "timed"),
    [((), False), (("--fa-variant=usual",), False), (("--fa-variant=usual,flash_attention_3",), True)],
)
def test_it_runs_only_if_it_is_named(on_cpu: Project, selection: tuple[str, ...], *, timed: bool) -> None:
    """An optional baseline is not timed beside the candidates of a run that does not name it."""
    names = variants_of(on_cpu.ids(ONE_CASE, *selection), "test_speed")
    assert ("sdpa_math" in names, "flash_attention_3" in names) == (True, timed)


@pytest.mark.parametrize(
    ("env", "reason"),
    nightly_after(
        1,
        [
            ({}, "No module named 'flash_attn_3'"),
            ({"FLASH_ATTN_3_LIBRARY": "/no/such/_C.so"}, "/no/such/_C.so"),
        ],
    ),
    ids=["no package", "no library"],
)
def test_it_is_skipped_where_it_is_missing(on_cpu: Project, env: dict[str, str], reason: str) -> None:
    """Without FlashAttention-3, its tests are skipped with the reason and the remedy, and the others run."""
    run = on_cpu.run(ONE_CASE, *NAMED, "-k", "test_speed and (usual or flash_attention_3)", env=env)
    skipped = f"test_speed[flash_attention_3-{SHAPE}]"
    assert run.outcomes == {f"test_speed[usual-{SHAPE}]": "passed", skipped: "skipped"}
    assert "FlashAttention-3 cannot be loaded: " in run.reasons[skipped]
    assert reason in run.reasons[skipped]
    assert run.reasons[skipped].endswith("set FLASH_ATTN_3_LIBRARY to the path of its extension")


def with_package(project: Project, source: str = PACKAGE) -> dict[str, str]:
    """The environment of a run that imports this package in place of FlashAttention-3."""
    project.write("flash_attn_3/__init__.py", "")
    project.write("flash_attn_3/_C.py", source)
    return {"PYTHONPATH": os.pathsep.join((str(project.folder), os.environ.get("PYTHONPATH", "")))}


@pytest.mark.nightly
def test_its_operator_gets_the_tensors_and_the_mask(on_cpu: Project) -> None:
    """With a package whose operator computes attention, the outputs are correct for grouped heads and both masks."""
    run = on_cpu.run(CASES, *NAMED, "-k", "test_correct and flash_attention_3", env=with_package(on_cpu))
    assert [*run.outcomes.values()] == ["passed"] * 3, run.reasons


@pytest.mark.nightly
def test_its_operator_gets_the_window_and_the_cap(on_cpu: Project) -> None:
    """An open side is -1; a build that leaves out caps skips them with its own reason."""
    cases = "--fa-case=b1h2s60d64-fp16-win9_3-sk70-seed0,b1h2s60d64-fp16-wino_5-cap50-seed0,b1h2s60d64-fp16-cap2-seed0"
    run = on_cpu.run(cases, *NAMED, "-k", "test_correct and flash_attention_3", env=with_package(on_cpu))
    assert [*run.outcomes.values()] == ["passed", "passed", "skipped"], run.reasons
    *_, reason = run.reasons.values()
    assert "was built without it: This flash attention build does not support tanh softcapping." in reason


@pytest.mark.nightly
def test_its_operator_gets_the_descales_in_e4m3(on_cpu: Project) -> None:
    """In e4m3, the operator gets the descale of each batch and head, and writes bf16: the outputs are correct."""
    run = on_cpu.run(E4M3_CASES, *IN_E4M3, "-k", "test_correct", env=with_package(on_cpu))
    assert [*run.outcomes.values()] == ["passed"] * 2, run.reasons


@pytest.mark.nightly
def test_a_build_without_e4m3_is_skipped(on_cpu: Project) -> None:
    """A FlashAttention-3 that was built without FP8 is skipped in e4m3, with its own reason and the remedy."""
    refusal = '    raise RuntimeError("This build does not support FP8.")\n'
    source = PACKAGE.replace("    seq_q, seq_k", f"{refusal}    seq_q, seq_k")
    run = on_cpu.run(E4M3_CASES, *IN_E4M3, "-k", "test_correct", env=with_package(on_cpu, source))
    assert [*run.outcomes.values()] == ["skipped"] * 2
    for reason in run.reasons.values():
        assert "FlashAttention-3 has no e4m3 here: This build does not support FP8.; it needs a GPU" in reason


def test_grouped_heads_and_fp16_outputs_are_refused_in_e4m3(on_cpu: Project) -> None:
    """Heads that share keys, and an output in fp16, are refused with the reason before the operator is called."""
    cases = "--fa-case=b1h4s40d64-e4m3-kv2-out_bf16-seed0,b1h2s40d64-e4m3-seed0"
    run = on_cpu.run(cases, *IN_E4M3, "-k", "test_correct")
    grouped, fp16 = run.reasons.values()
    assert "grouped" in grouped
    assert "the output is fp16, supports.fp8_out is bf16" in fp16

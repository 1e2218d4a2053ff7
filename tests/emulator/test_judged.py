"""The whole way of a call without a GPU: the judge, the candidate's process, the binding, and an emulated kernel."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pytest_fa.catalog.discover import discover
from tests.emulator.conftest import KERNELS
from tests.emulator.emulated import Emulator
from tests.factories import MANIFEST
from tests.projects import NewProject, Project

pytestmark = pytest.mark.needs_nvcc  # for the headers of CUDA

# A function of Python, because the package does not call a CUDA source with tensors on the CPU.
ENTRY = """\
import ctypes

import torch

from pytest_fa.candidate.cuda_forward import CudaForward

LIBRARY = "{library}"
call = CudaForward(LIBRARY, lambda size, _: torch.empty(size, dtype=torch.uint8), "attention")
emulator_set = ctypes.CDLL(LIBRARY).emulator_set
emulator_set.argtypes = (ctypes.c_uint64, ctypes.c_int, ctypes.c_int, ctypes.c_double)


def forward(q, k, v, *, scale, causal, out, lse=None, softcap=0.0, window_left=None, window_right=None, attn_bias=None,
            alibi_slopes=None, attn_mask=None, sink=None, seqlens_q=None, seqlens_k=None, k_scale=None,
            v_scale=None, block_table=None, **more):
    emulator_set(0, 2, 8, 0.5)
    tensors = dict(attn_bias=attn_bias, alibi_slopes=alibi_slopes, attn_mask=attn_mask, sink=sink)
    tensors |= dict(seqlens_q=seqlens_q, seqlens_k=seqlens_k, k_scale=k_scale, v_scale=v_scale, block_table=block_table)
    tensors |= more
    given = {{name: tensor for name, tensor in tensors.items() if tensor is not None}}
    windows = dict(window_left=window_left, window_right=window_right)
    return call(q, k, v, scale=scale, causal=causal, out=out, lse=lse, softcap=softcap or None, **windows, **given)
"""
BACKWARD = """\
import ctypes

import torch

from pytest_fa.candidate.cuda_backward import CudaBackward

LIBRARY = "{library}"
call = CudaBackward(LIBRARY, lambda size, _: torch.empty(size, dtype=torch.uint8))
emulator_set = ctypes.CDLL(LIBRARY).emulator_set
emulator_set.argtypes = (ctypes.c_uint64, ctypes.c_int, ctypes.c_int, ctypes.c_double)


def backward(dout, q, k, v, out, lse, *, scale, causal, dq, dk, dv, dlse=None, softcap=0.0, window_left=None,
             window_right=None, attn_bias=None, alibi_slopes=None, attn_mask=None, sink=None, seqlens_q=None,
             seqlens_k=None):
    emulator_set(0, 2, 8, 0.5)
    tensors = dict(attn_bias=attn_bias, alibi_slopes=alibi_slopes, attn_mask=attn_mask, sink=sink, dlse=dlse)
    tensors |= dict(seqlens_q=seqlens_q, seqlens_k=seqlens_k)
    given = {{name: tensor for name, tensor in tensors.items() if tensor is not None}}
    windows = dict(window_left=window_left, window_right=window_right)
    forward, gradients = dict(forward_out=out, forward_lse=lse, dout=dout), dict(out=dq, dk=dk, dv=dv)
    softcap = softcap or None
    call(q, k, v, scale=scale, causal=causal, softcap=softcap, **gradients, **forward, **windows, **given)
"""
CASES = (
    "b2h6s1d64-fp16-causal_br-kv2-sk192-dv72-scale0p2-cap2-biasbq-sink-bshd-seed0",
    "b2h4s65d64-bf16-win37_21-kv2-sk100-dv128-alibi-maskh-seed0",
    "b4h4s65d64-fp16-causal_br-kv2-sk150-var2-seed0",
    "b4h4s3d64-fp16-kv2-sk150-var1-page16-maskq-seed0",
    "b9h4s129d64-bf16-causal_br-kv2-var2-sink-thd-seed1",
    "b4h4s65d64-fp16-kv2-sk150-var3-page16-thd-seed0",
    "b2h4s65d64-bf16-causal-kv2-sk100-kv_e4m3_h-dv72-seed0",
    "b4h4s3d64-fp16-kv2-sk150-var1-page16-kv_int8_th-seed0",
    "b4h4s3d64-fp16-causal_br-kv2-sk150-var4-page16-append-dv128-seed0",
    "b1h2s65d64-fp16-seed0",
)


@pytest.fixture(scope="module")
def project(new_project: NewProject, tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> Project:
    """A project whose variant `emulated` is `minimal` behind the binding, with the claims of its manifest."""
    return _forward_project("minimal", "same_precision", new_project, tmp_path_factory, shared_cache)


@pytest.fixture(scope="module")
def e4m3_project(new_project: NewProject, tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> Project:
    """The same for `fp8_split`."""
    return _forward_project("fp8_split", "fp8", new_project, tmp_path_factory, shared_cache)


def _forward_project(
    name: str,
    tolerance: str,
    new_project: NewProject,
    tmp_path_factory: pytest.TempPathFactory,
    shared_cache: Path,
) -> Project:
    variant = discover((KERNELS,)).variants[name]
    project = new_project(f"judged_{name}")
    emulator = Emulator(tmp_path_factory.mktemp("emulator"), shared_cache)
    library = emulator.bound(variant, tmp_path_factory.mktemp("judged"))
    manifest = Path(variant.folder, "variant.yaml").read_text(encoding="utf-8")
    supports = re.search(r"\nsupports:\n(.*?\n)(?=\w)", manifest, re.DOTALL)
    assert supports is not None
    entry = f'entry: {{target: "entry:forward"}}\nreturns: [out, lse]\ntolerance: {tolerance}\n'
    project.python_variant(
        "emulated", ENTRY.format(library=library), f"{MANIFEST}{entry}supports:\n  device: [cpu]\n{supports[1]}"
    )
    return project


@pytest.fixture(scope="module")
def backward_project(new_project: NewProject, tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> Project:
    """The same for `backward_minimal`."""
    variant = discover((KERNELS,)).variants["backward_minimal"]
    project = new_project("backward")
    emulator = Emulator(tmp_path_factory.mktemp("emulator"), shared_cache)
    library = emulator.bound(variant, tmp_path_factory.mktemp("judged"))
    manifest = Path(variant.folder, "variant.yaml").read_text(encoding="utf-8")
    supports = re.search(r"\nsupports:\n(.*?\n)(?=\w)", manifest, re.DOTALL)
    assert supports is not None
    entry = 'entry: {target: "entry:backward"}\ncomputes: gradients\n'
    project.python_variant(
        "emulated", BACKWARD.format(library=library), f"{MANIFEST}{entry}supports:\n  device: [cpu]\n{supports[1]}"
    )
    return project


def test_a_kernel_gets_what_the_judge_made(project: Project) -> None:
    """Guard bands, strides of 0, windows, another head_dim of V and lengths reach the kernel, in either layout."""
    run = project.suite("--fa-variant=emulated", f"--fa-case={','.join(CASES)}", "-k", "test_correct")
    assert run.outcomes == {f"test_correct[emulated-{case}]": "passed" for case in CASES}, run.reasons


MIN_PROPERTIES = 10  # that apply to a kernel in e4m3 on the CPU
BACKWARD_CASES = (
    "b1h2s65d64-fp16-bwd-seed0",
    "b2h6s65d64-fp16-causal_br-kv2-sk100-dv72-scale0p2-cap2-biasbq-sink-bshd-bwd-dlse-seed0",
    "b2h4s65d64-bf16-win37_21-kv2-sk100-dv128-alibi-maskh-bwd-seed0",
    "b4h4s65d64-fp16-causal_br-kv2-sk150-var2-bwd-dlse-seed0",
)


@pytest.mark.parametrize("case", BACKWARD_CASES)
def test_a_backward_kernel_gets_what_the_judge_made(backward_project: Project, case: str) -> None:
    """The results of the forward pass, their gradients, and guarded buffers for three gradients."""
    run = backward_project.suite("--fa-variant=emulated", f"--fa-case={case}", "-k", "test_correct")
    assert run.outcomes == {f"test_correct[emulated-{case}]": "passed"}, run.reasons


@pytest.mark.nightly
def test_every_check_passes(project: Project) -> None:
    """All claims of `minimal`, and the properties, hold on the CPU."""
    run = project.suite("--fa-variant=emulated", "-k", "test_correct or test_property")
    outcomes = list(run.outcomes.values())
    assert (set(outcomes) <= {"passed", "skipped"}, outcomes.count("passed") > len(CASES)) == (True, True), run.reasons


@pytest.mark.nightly
def test_every_property_of_e4m3_holds(e4m3_project: Project) -> None:
    """Output and log-sum-exp are right on hard data, with a negative scale, and if parts of the keys are merged."""
    run = e4m3_project.suite("--fa-variant=emulated", "-k", "test_property")
    outcomes = list(run.outcomes.values())
    assert (set(outcomes) <= {"passed", "skipped"}, outcomes.count("passed") > MIN_PROPERTIES) == (True, True), (
        run.reasons
    )

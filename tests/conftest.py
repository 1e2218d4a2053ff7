"""What the tests share: a cache of their own, small variants to build and run, marks for what a machine may lack."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_fa.build.toolchain import find_toolchain
from pytest_fa.errors import ToolchainError
from pytest_fa.report.environment import find_gpu

WriteVariant = Callable[..., Path]

# What changes the text of an inner process: under CI pytest's short summary repeats whole messages.
CHANGES_OUTPUT = ("CI", "BUILD_NUMBER", "GITHUB_ACTIONS", "FORCE_COLOR", "NO_COLOR")
for _name in CHANGES_OUTPUT:
    os.environ.pop(_name, None)

# Under xdist a process and its children take one core each: torch would take all of them in every process, and the
# judge's tests would last three times as long.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

MANIFEST = """\
step: a test's variant
because: a test needs one
expect: what the test asserts
"""

# Attention by the book, in float32, with every hole that a test may want to cut into it.
PYTHON_SOURCE = """\
import torch


def forward(q, k, v, *, scale, causal="none", out=None):
    scores = q.float() @ k.float().transpose(2, 3) * scale
    if causal == "top_left":
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    result = (torch.softmax(scores, -1) @ v.float()).to(q.dtype)
    return result if out is None else out.copy_(result)
"""

PYTHON_MANIFEST = (
    MANIFEST
    + 'entry: {kind: python, target: "entry:forward"}\nsupports: {device: [cpu, cuda], causal: [none, top_left]}\n'
)

# Scores by the book, and the manifest of a probe that computes nothing else.
SCORES_SOURCE = """\
import torch


def forward(q, k, v, *, scale, causal="none", out=None):
    result = (q.float() @ k.float().transpose(2, 3) * scale).to(q.dtype)
    return result if out is None else out.copy_(result)
"""

SCORES_MANIFEST = (
    MANIFEST
    + "role: probe\ncomputes: scores\ncases: [b1h1s4d4-fp16, b1h1s32d64-fp16-sk64]\n"
    + 'entry: {kind: python, target: "entry:forward"}\nsupports: {device: [cpu, cuda], head_dim: [64, 4]}\n'
)

# Compiles in a second and writes zeros: enough for everything that the builder does.
CUDA_SOURCE = """\
#include "fa_forward.h"

#ifndef BLOCK
#define BLOCK 64
#endif

__global__ void zero_kernel(float* out) { out[threadIdx.x + blockIdx.x * BLOCK] = 0.0f; }

FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t stream) {
  zero_kernel<<<1, BLOCK, 0, stream>>>(static_cast<float*>(args->out));
  return static_cast<int>(cudaPeekAtLastError());
}
"""


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache for tests that only want something built: what one has compiled, the next one finds."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_user_cache(shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing reads or writes the user's own cache folder, and no outer option reaches an inner pytest."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared_cache))
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)


@pytest.fixture
def write_variant(tmp_path: Path) -> WriteVariant:
    """`write_variant("name", manifest=..., **{"kernel.cu": ...})`: a variant under `tmp_path/kernels`, its folder."""

    def write(name: str, *, manifest: str = MANIFEST, root: Path | None = None, **files: str) -> Path:
        folder = (root or tmp_path / "kernels") / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "variant.yaml").write_text(textwrap.dedent(manifest), encoding="utf-8")
        for filename, text in files.items():
            (folder / filename).write_text(textwrap.dedent(text), encoding="utf-8")
        return folder

    return write


def _has_nvcc(cache: Path) -> bool:
    try:
        find_toolchain(cache)
    except ToolchainError:
        return False
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU before any fixture, one of a module included, builds something for it."""
    if item.get_closest_marker("needs_gpu") and find_gpu() is None:
        pytest.skip("this machine has no GPU")


@pytest.fixture(autouse=True)
def _skip_what_this_machine_lacks(request: pytest.FixtureRequest, shared_cache: Path) -> None:
    if request.node.get_closest_marker("needs_nvcc") and not _has_nvcc(shared_cache):
        pytest.skip("this machine has no CUDA compiler")

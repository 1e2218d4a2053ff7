"""What the builder's tests share: a small variant with headers of its own, and copies of a cache with its build."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_fa.build.builder import BuildFailure, BuildOutcome, BuildReport, Say, ensure
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import ToolchainError
from pytest_fa.records.built import Build

SOURCE = """\
#include "fa_forward.h"
#include "tile.h"    // beside the source
#include "shared.h"  // in the root's include folder

#ifndef STEP
#define STEP 1
#endif

__global__ void fill_kernel(float* out) { out[threadIdx.x + blockIdx.x * BLOCK] = SHARED + STEP; }

FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t stream) {
  fill_kernel<<<1, BLOCK, 0, stream>>>(static_cast<float*>(args->out));
  return static_cast<int>(cudaPeekAtLastError());
}
"""

MANIFEST = "step: a small kernel\nbecause: the builder needs something to build\nexpect: a build\narch: [sm_80]\n"


class Workplace:
    """One variant, `tile`, with its sources and a cache under one folder."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "kernels"
        self.folder = self.root / "tile"
        self.cache = folder / "cache"

    def write(self) -> None:
        """Lay the sources down."""
        self.folder.mkdir(parents=True)
        (self.root / "include").mkdir()
        (self.folder / "kernel.cu").write_text(SOURCE, encoding="utf-8")
        (self.folder / "tile.h").write_text("#define BLOCK 64\n", encoding="utf-8")
        (self.root / "include" / "shared.h").write_text("#define SHARED 0.5f\n", encoding="utf-8")
        self.write_manifest("")

    def write_manifest(self, more: str) -> None:
        """The manifest, with more keys."""
        (self.folder / "variant.yaml").write_text(MANIFEST + more, encoding="utf-8")

    def variant(self) -> Variant:
        """The variant as its manifest stands now."""
        return read_manifest(self.folder / "variant.yaml", self.root)[0]

    def ensure(self, *, no_build: bool = False, say: Say = lambda _: None) -> BuildReport:
        """Ask the builder for the variant's one build."""
        return ensure([(self.variant(), "sm_80")], self.cache, no_build=no_build, say=say)

    def build(self, *, no_build: bool = False) -> Build:
        """The build, which must be there."""
        return build_of(self.ensure(no_build=no_build))

    def failure(self, *, no_build: bool = False, say: Say = lambda _: None) -> str:
        """Why there is no build, of which there must be none."""
        outcome = _only(self.ensure(no_build=no_build, say=say))
        assert isinstance(outcome, BuildFailure)
        return outcome.message

    def library(self) -> Path:
        """The shared library of the one build that the cache holds."""
        (found,) = (self.cache / "builds").glob("*/*/kernel.so")
        return found

    def stages(self) -> list[Path]:
        """The staging folders that lie in the cache."""
        return list(self.cache.glob(".stage-*"))


def build_of(report: BuildReport) -> Build:
    """The one outcome of a report, which must be a build."""
    outcome = _only(report)
    assert isinstance(outcome, Build), outcome.message
    return outcome


def _only(report: BuildReport) -> BuildOutcome:
    (outcome,) = report.outcomes.values()
    return outcome


@pytest.fixture(scope="session")
def _built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workplace that is built once; tests work on copies of it."""
    folder = tmp_path_factory.mktemp("built")
    place = Workplace(folder)
    place.write()
    try:
        place.build()
    except ToolchainError as problem:
        pytest.skip(str(problem))
    return folder


@pytest.fixture
def workplace(_built: Path, tmp_path: Path) -> Workplace:
    """A copy of a built workplace: its sources lie elsewhere now, its build is in its cache."""
    shutil.copytree(_built, tmp_path / "workplace")
    return Workplace(tmp_path / "workplace")


@pytest.fixture
def unbuilt(tmp_path: Path) -> Workplace:
    """Sources and an empty cache."""
    place = Workplace(tmp_path / "unbuilt")
    place.write()
    place.cache.mkdir()
    return place


@pytest.fixture
def hide_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Called, it makes this a machine without nvcc and g++, wheels included."""

    def hide() -> None:
        monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
        monkeypatch.delenv("CUDA_HOME", raising=False)
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setattr("pytest_fa.build.toolchain.find_tool", lambda _: None)

    return hide


@pytest.fixture
def forbid_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Starting any program fails the test."""

    def refuse(command: object, *_: object, **__: object) -> None:
        raise AssertionError(f"a program was started: {command}")

    with monkeypatch.context() as patch:
        patch.setattr("subprocess.Popen", refuse)
        patch.setattr("subprocess.run", refuse)
        yield

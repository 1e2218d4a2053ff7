"""Fixtures of the builder's tests: a small variant with headers, and copies of a cache with its build."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_fa.build.builder import ensure
from pytest_fa.build.outcomes import BuildFailure, BuildOutcome, BuildReport
from pytest_fa.build.units import Say
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import ToolchainError
from pytest_fa.records.built import Build

SOURCE = """\
#include "fa_forward.h"
#include "tile.h"    // next to the source
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
    """The variant `tile`, its sources and a cache, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "kernels"
        self.folder = self.root / "tile"
        self.cache = folder / "cache"

    def write(self) -> None:
        """Write the sources."""
        self.folder.mkdir(parents=True)
        (self.root / "include").mkdir()
        (self.folder / "kernel.cu").write_text(SOURCE, encoding="utf-8")
        (self.folder / "tile.h").write_text("#define BLOCK 64\n", encoding="utf-8")
        (self.root / "include" / "shared.h").write_text("#define SHARED 0.5f\n", encoding="utf-8")
        self.write_manifest("")

    def write_manifest(self, keys: str) -> None:
        """Write the manifest with these additional keys."""
        (self.folder / "variant.yaml").write_text(MANIFEST + keys, encoding="utf-8")

    def variant(self) -> Variant:
        """Return the variant of the current manifest."""
        return read_manifest(self.folder / "variant.yaml", self.root)[0]

    def ensure(self, *, no_build: bool = False, say: Say = lambda _: None) -> BuildReport:
        """Run the builder for the variant and sm_80."""
        return ensure([(self.variant(), "sm_80")], self.cache, no_build=no_build, say=say)

    def build(self, *, no_build: bool = False) -> Build:
        """Run the builder and return the build; fail if there is none."""
        return build_of(self.ensure(no_build=no_build))

    def failure(self, *, no_build: bool = False, say: Say = lambda _: None) -> str:
        """Run the builder and return the failure message; fail if there is a build."""
        outcome = _only(self.ensure(no_build=no_build, say=say))
        assert isinstance(outcome, BuildFailure)
        return outcome.message

    def library(self) -> Path:
        """Return the shared library of the only build in the cache."""
        (library,) = (self.cache / "builds").glob("*/*/kernel.so")
        return library

    def stages(self) -> list[Path]:
        """Return the staging folders in the cache."""
        return list(self.cache.glob(".stage-*"))


def build_of(report: BuildReport) -> Build:
    """Return the only outcome of a report, which must be a build."""
    outcome = _only(report)
    assert isinstance(outcome, Build), outcome.message
    return outcome


def _only(report: BuildReport) -> BuildOutcome:
    (outcome,) = report.outcomes.values()
    return outcome


@pytest.fixture(scope="session")
def _built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a workplace once per session; tests use copies of it."""
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
    """Return a copy of a built workplace in another folder, with the build in its cache."""
    shutil.copytree(_built, tmp_path / "workplace")
    return Workplace(tmp_path / "workplace")


@pytest.fixture
def unbuilt(tmp_path: Path) -> Workplace:
    """Return a workplace with sources and an empty cache."""
    place = Workplace(tmp_path / "unbuilt")
    place.write()
    place.cache.mkdir()
    return place


@pytest.fixture
def with_binding(unbuilt: Workplace, _built: Path) -> Workplace:
    """Return a workplace with sources, and a cache that has the shared binding, which takes seconds, and no build."""
    shutil.copytree(Workplace(_built).cache / "binding", unbuilt.cache / "binding")
    return unbuilt


@pytest.fixture
def hide_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that hides nvcc and g++, including those in wheels."""

    def hide() -> None:
        monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
        monkeypatch.delenv("CUDA_HOME", raising=False)
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setattr("pytest_fa.build.toolchain.find_tool", lambda _: None)

    return hide


@pytest.fixture
def forbid_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail the test if it starts a program."""

    def refuse(command: object, *_: object, **__: object) -> None:
        raise AssertionError(f"a program was started: {command}")

    with monkeypatch.context() as patch:
        patch.setattr("subprocess.Popen", refuse)
        patch.setattr("subprocess.run", refuse)
        yield

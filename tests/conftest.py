"""What the tests share: a cache of their own, small variants to build and run, marks for what a machine may lack."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest

from pytest_fa.build.toolchain import find_toolchain
from pytest_fa.errors import ToolchainError
from pytest_fa.records.environment import find_gpu
from tests.factories import MANIFEST, WriteVariant

# What changes the text of an inner process: under CI pytest's short summary repeats whole messages.
CHANGES_OUTPUT = ("CI", "BUILD_NUMBER", "GITHUB_ACTIONS", "FORCE_COLOR", "NO_COLOR")
for _name in CHANGES_OUTPUT:
    os.environ.pop(_name, None)

# Under xdist a process and its children take one core each: torch would take all of them in every process, and the
# judge's tests would last three times as long.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


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

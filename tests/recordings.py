"""What Nsight Compute and compute-sanitizer once wrote, programs that play it, and a GPU that is looked for again."""

from __future__ import annotations

import lzma
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_fa.features.ncu.nsight_report import CountedKernel
from pytest_fa.features.ncu.raw_table import read_raw_table
from pytest_fa.records.environment import find_gpu
from tests.factories import FAKES, RECORDED


@pytest.fixture(scope="session")
def recorded_kernels() -> tuple[CountedKernel, ...]:
    """Four kernels of an H200: cuDNN's, flash's two, the memory-efficient one."""
    return read_raw_table((RECORDED / "sdpa_detailed.csv").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def recorded_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report whose figures the table above holds."""
    path = tmp_path_factory.mktemp("recorded") / "sdpa_detailed.ncu-rep"
    path.write_bytes(lzma.decompress((RECORDED / "sdpa_detailed.ncu-rep.xz").read_bytes()))
    return path


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The playing programs first on PATH; the folder they lie in."""
    monkeypatch.setenv("PATH", f"{FAKES}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_RECORDED", str(RECORDED))
    return FAKES


@pytest.fixture
def fresh_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`find_gpu` looks for a GPU again in the test and after it; all GPUs are visible."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    find_gpu.cache_clear()
    yield
    find_gpu.cache_clear()

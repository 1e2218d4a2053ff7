"""Which GPU: NVML through a stand-in."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

import pytest_fa
from pytest_fa.records.environment import (
    Gpu,
    find_gpu,
    read_clocks,
    read_environment,
    turn_to_gpu,
)
from pytest_fa.records.timing import Clocks

H200 = Gpu("NVIDIA H200", "GPU-aaaa", (9, 0), "580.1", "13.1")
RTX = Gpu("NVIDIA GeForce RTX 4090", "GPU-bbbb", (8, 9), "580.1", "13.1")


class NVMLError(Exception):
    """What NVML raises."""


class FakeNvml(ModuleType):
    """As much of `pynvml` as is asked for: the given GPUs in PCI order, and a count of what is open."""

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self, *gpus: Gpu, driver: bool = True) -> None:
        super().__init__("pynvml")
        self.gpus = gpus
        self.driver = driver
        self.open = 0

    def nvmlInit(self) -> None:  # noqa: N802  # NVML's names
        """Fail where there is no driver."""
        if not self.driver:
            raise NVMLError
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        """Close what was opened."""
        self.open -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:  # noqa: N802
        """The GPU itself is its handle."""
        if index >= len(self.gpus):
            raise NVMLError
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Gpu:  # noqa: N802
        """A whole UUID only, as NVML does."""
        for gpu in self.gpus:
            if gpu.uuid == uuid:
                return gpu
        raise NVMLError

    def __getattr__(self, name: str) -> Any:
        """Every other function is a constant or reads the handle."""
        readings = {
            "nvmlSystemGetCudaDriverVersion_v2": lambda: 13010,
            "nvmlSystemGetDriverVersion": lambda: "580.1",
            "nvmlDeviceGetCount": lambda: len(self.gpus),
            "nvmlDeviceGetName": lambda gpu: gpu.name,
            "nvmlDeviceGetUUID": lambda gpu: gpu.uuid,
            "nvmlDeviceGetCudaComputeCapability": lambda gpu: list(gpu.compute_capability),
            "nvmlDeviceGetClockInfo": lambda _, domain: {1: 1980, 2: 2619}[domain],
            "nvmlDeviceGetPowerUsage": lambda _: 650500,
            "nvmlDeviceGetTemperature": lambda *_: 41,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda _: 4,
        }
        try:
            return readings[name]
        except KeyError:
            raise AttributeError(name) from None


@pytest.fixture(autouse=True)
def _fresh_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The GPU is looked for anew in each test, and what a test pretends is forgotten after it."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    find_gpu.cache_clear()
    yield
    find_gpu.cache_clear()


def pretend(monkeypatch: pytest.MonkeyPatch, *gpus: Gpu, driver: bool = True) -> FakeNvml:
    """Put a stand-in where `import pynvml` looks."""
    nvml = FakeNvml(*gpus, driver=driver)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return nvml


# -- GPU --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, H200),
        ("0", H200),
        ("1", RTX),
        ("1,0", RTX),
        (" 1 , 0", RTX),
        ("GPU-bbbb", RTX),
        ("GPU-bbbb,GPU-aaaa", RTX),
        ("", None),
        (" ", None),
        ("-1", None),
        ("-1,0", None),
        ("2", None),
        ("GPU-cccc", None),
        ("none", None),
    ],
)
def test_the_gpu_is_the_first_that_cuda_would_use(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: Gpu | None
) -> None:
    """CUDA_VISIBLE_DEVICES names it by index or UUID; an empty, negative or unknown entry builds none."""
    pretend(monkeypatch, H200, RTX)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert expected == find_gpu()


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, ["GPU-aaaa", "GPU-bbbb", "GPU-aaaa"]),
        ("1", ["GPU-bbbb"] * 3),
        ("GPU-bbbb,0", ["GPU-bbbb", "GPU-aaaa", "GPU-bbbb"]),
        ("0,-1,1", ["GPU-aaaa"] * 3),
        ("", [None] * 3),
    ],
)
def test_gpus_are_dealt_out(monkeypatch: pytest.MonkeyPatch, visible: str | None, found: list[str | None]) -> None:
    """Process 0, 1, 2 of a run each have a first GPU of their own, as far as there are any; the others stay visible."""
    pretend(monkeypatch, H200, RTX)
    first = []
    for number in range(3):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        find_gpu.cache_clear()
        turn_to_gpu(number)
        gpu = find_gpu()
        first.append(gpu.uuid if gpu else None)
    assert first == found


@pytest.mark.parametrize("driver", [True, False])
def test_without_a_device_or_a_driver_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch, *, driver: bool) -> None:
    """A machine without a driver, or with one and no device, has no GPU."""
    pretend(monkeypatch, driver=driver)
    assert find_gpu() is None


@pytest.mark.parametrize("gpus", [(H200,), ()])
def test_nvml_is_closed_again(monkeypatch: pytest.MonkeyPatch, gpus: tuple[Gpu, ...]) -> None:
    """What was opened to look is shut down, whatever was found."""
    nvml = pretend(monkeypatch, *gpus)
    find_gpu()
    read_clocks("GPU-aaaa")
    assert nvml.open == 0


def test_clocks_are_read_in_their_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """MHz, watts, degrees and NVML's throttle bits."""
    pretend(monkeypatch, H200)
    expected = Clocks(sm_mhz=1980, memory_mhz=2619, power_watts=650.5, temperature_c=41, throttle_reasons=4)
    assert expected == read_clocks("GPU-aaaa")


@pytest.mark.parametrize(("uuid", "driver"), [("GPU-cccc", True), ("GPU-aaaa", False)])
def test_clocks_that_nvml_does_not_tell_are_missing(
    monkeypatch: pytest.MonkeyPatch, uuid: str, *, driver: bool
) -> None:
    """An unknown GPU or a missing driver gives None, not zeros."""
    pretend(monkeypatch, H200, driver=driver)
    assert read_clocks(uuid) is None


def test_the_environment_names_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU, compute capability, driver and CUDA stand as text, beside the versions of what runs."""
    pretend(monkeypatch, H200)
    found = read_environment()
    expected = "NVIDIA H200", "9.0", "580.1", "13.1"
    assert expected == (found.gpu, found.compute_capability, found.driver, found.cuda)
    assert (platform.python_version(), pytest_fa.__version__) == (found.python, found.pytest_fa)


def test_the_environment_without_a_gpu_makes_up_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """What only a GPU has is missing without one."""
    pretend(monkeypatch, driver=False)
    found = read_environment()
    assert {found.gpu, found.compute_capability, found.driver, found.cuda} == {None}

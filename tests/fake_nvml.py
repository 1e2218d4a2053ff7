"""A fake of NVML's Python module, for a host with any GPUs."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pytest_fa.records.environment import Gpu


class NVMLError(Exception):
    """The exception of the fake NVML."""


class FakeNvml(ModuleType):
    """The functions of `pynvml` that are used, for these GPUs in PCI order.

    `open` counts initialisations; `pids` are the processes that use each GPU.
    """

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    NVML_COMPUTEMODE_DEFAULT = 0

    def __init__(self, *gpus: Gpu, driver: bool = True) -> None:
        super().__init__("pynvml")
        self.gpus = gpus
        self.driver = driver
        self.open = 0
        self.pids: tuple[int, ...] = ()
        self.compute_mode = 0

    def nvmlInit(self) -> None:  # noqa: N802  # NVML's names
        """Initialise; raise `NVMLError` without a driver."""
        if not self.driver:
            raise NVMLError
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        """Undo one initialisation."""
        self.open -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:  # noqa: N802
        """Return the GPU, which is its own handle."""
        if index >= len(self.gpus):
            raise NVMLError
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Gpu:  # noqa: N802
        """Return the GPU with exactly this UUID, as NVML does."""
        for gpu in self.gpus:
            if gpu.uuid == uuid:
                return gpu
        raise NVMLError

    def __getattr__(self, name: str) -> Any:
        """Return any other function: a constant, or a field of the handle."""
        readings = {
            "nvmlSystemGetCudaDriverVersion_v2": lambda: 13010,
            "nvmlSystemGetDriverVersion": lambda: "580.1",
            "nvmlDeviceGetCount": lambda: len(self.gpus),
            "nvmlDeviceGetName": lambda gpu: gpu.name,
            "nvmlDeviceGetUUID": lambda gpu: gpu.uuid,
            "nvmlDeviceGetCudaComputeCapability": lambda gpu: list(gpu.compute_capability),
            "nvmlDeviceGetClockInfo": lambda _, domain: {1: 1980, 2: 2619}[domain],
            "nvmlDeviceGetPowerUsage": lambda _: 650500,
            "nvmlDeviceGetComputeMode": lambda _: self.compute_mode,
            "nvmlDeviceGetMigMode": lambda _: [0, 1],
            "nvmlDeviceGetEccMode": lambda _: [1, 1],
            "nvmlDeviceGetEnforcedPowerLimit": lambda _: 700000,
            "nvmlDeviceGetTemperature": lambda *_: 41,
            "nvmlDeviceGetComputeRunningProcesses": lambda _: [SimpleNamespace(pid=pid) for pid in self.pids],
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda _: 4,
        }
        try:
            return readings[name]
        except KeyError:
            raise AttributeError(name) from None


def pretend(monkeypatch: pytest.MonkeyPatch, *gpus: Gpu, driver: bool = True) -> FakeNvml:
    """Replace the module `pynvml` by a fake one, and return it."""
    nvml = FakeNvml(*gpus, driver=driver)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return nvml

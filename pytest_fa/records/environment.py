"""The GPU, the software versions and other processes of this machine, read from NVML without torch."""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

import pytest_fa
from pytest_fa.catalog.variant import Device
from pytest_fa.processes import ancestors_of, name_of
from pytest_fa.records.record import Environment
from pytest_fa.records.text import printable
from pytest_fa.records.timing import Clocks

NVML_LIBRARY = "libnvidia-ml.so.1"  # as `pynvml` names it


class Gpu(msgspec.Struct, frozen=True):
    """The first GPU that CUDA would use."""

    name: str
    uuid: str
    compute_capability: tuple[int, int]
    driver: str
    cuda: str


@functools.cache
def find_gpu() -> Gpu | None:
    """Return the first visible GPU, or None if there is no driver, no device, or CUDA_VISIBLE_DEVICES is empty."""
    with _nvml() as nvml:
        handle = _first_visible(nvml) if nvml else None
        return _gpu(nvml, handle) if handle is not None else None


def find_gpus() -> list[Gpu]:
    """Return every visible GPU, in the order of CUDA_VISIBLE_DEVICES or of NVML; an entry without a GPU ends it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    with _nvml() as nvml:
        if nvml is None:
            return []
        names = visible.split(",") if visible is not None else map(str, range(nvml.nvmlDeviceGetCount()))
        handles = itertools.takewhile(lambda handle: handle is not None, (_handle(nvml, name) for name in names))
        return [_gpu(nvml, handle) for handle in handles]


def _gpu(nvml: Any, handle: Any) -> Gpu:  # noqa: ANN401  # NVML's module and handle have no types
    cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
    return Gpu(
        name=nvml.nvmlDeviceGetName(handle),
        uuid=nvml.nvmlDeviceGetUUID(handle),
        compute_capability=tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)),
        driver=nvml.nvmlSystemGetDriverVersion(),
        cuda=f"{cuda // 1000}.{cuda % 1000 // 10}",
    )


class GpuSettings(NamedTuple):
    """Settings of a GPU that change its times; a setting that NVML cannot read is None."""

    mig: bool | None
    ecc: bool | None
    power_limit_watts: float | None


def read_gpu_settings(uuid: str) -> GpuSettings:
    """Return the settings of one GPU, or of the GPU that a MIG device is a slice of."""
    with _nvml() as nvml:
        if nvml is None:
            return GpuSettings(None, None, None)

        def read(name: str) -> Any:  # noqa: ANN401  # a number, or a pair of the current and the pending mode
            try:
                return getattr(nvml, name)(nvml.nvmlDeviceGetHandleByUUID(uuid))
            except nvml.NVMLError:
                return None

        mig, ecc, limit = map(read, ("nvmlDeviceGetMigMode", "nvmlDeviceGetEccMode", "nvmlDeviceGetEnforcedPowerLimit"))
        return GpuSettings(
            mig=True if uuid.startswith("MIG-") else bool(mig[0]) if mig else None,
            ecc=bool(ecc[0]) if ecc else None,
            power_limit_watts=limit / 1000.0 if limit else None,
        )


def make_gpu_first(number: int) -> None:
    """Rotate CUDA_VISIBLE_DEVICES of this process, so that GPU `number` modulo their count becomes the first.

    The other GPUs stay visible.  Call it before any other function of this module and before CUDA is initialised.
    """
    with _nvml() as nvml:
        if nvml is None:
            return
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        entries = [str(index) for index in range(nvml.nvmlDeviceGetCount())] if visible is None else visible.split(",")
    names = list(itertools.takewhile(lambda name: name.strip() not in ("", "-1"), entries))  # CUDA stops there too
    if not names:
        return
    first = number % len(names)
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # NVML's order, in which they were counted
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join([*names[first:], *names[:first]])


def read_clocks(gpu_uuid: str) -> Clocks | None:
    """Return the current clocks, power, temperature and throttle reasons of one GPU; None if NVML cannot read them."""
    with _nvml() as nvml:
        if nvml is None:
            return None
        try:
            return _clocks(nvml, nvml.nvmlDeviceGetHandleByUUID(gpu_uuid))
        except nvml.NVMLError:
            return None


def _clocks(nvml: Any, handle: Any) -> Clocks:  # noqa: ANN401  # NVML's module and handle have no types
    return Clocks(
        sm_mhz=nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        memory_mhz=nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
        power_watts=nvml.nvmlDeviceGetPowerUsage(handle) / 1000.0,
        temperature_c=nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        throttle_reasons=nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
    )


# NVML's throttle reasons for which samples are dropped: hardware slowdown (0x08), software thermal (0x20), hardware
# thermal (0x40) and power brake (0x80).  The power cap (0x04) is normal under load: it is recorded, but drops nothing.
SLOWED_BITS = 0x08 | 0x20 | 0x40 | 0x80


class ClockMonitor:
    """Reads the clocks of one GPU through an open NVML; without a GPU, it reports no clocks and no throttling."""

    def __init__(self, nvml: Any, handle: Any) -> None:  # noqa: ANN401
        self._nvml, self._handle = nvml, handle

    def now(self) -> Clocks | None:
        """Return the current clocks, power, temperature and throttle reasons; None if they cannot be read."""
        if self._handle is None:
            return None
        try:
            return _clocks(self._nvml, self._handle)
        except self._nvml.NVMLError:
            return None

    def is_slowed(self) -> bool:
        """Return whether heat or the hardware currently throttle the GPU."""
        if self._handle is None:
            return False
        try:
            return bool(self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle) & SLOWED_BITS)
        except self._nvml.NVMLError:
            return False


@contextmanager
def clock_monitor(device: Device) -> Iterator[ClockMonitor]:
    """Keep NVML open for the first visible GPU; for `device` = `cpu`, the monitor reads nothing."""
    gpu = find_gpu() if device == "cuda" else None
    with _nvml() as nvml:
        yield ClockMonitor(nvml, nvml.nvmlDeviceGetHandleByUUID(gpu.uuid) if nvml and gpu else None)


def find_other_gpu_processes(own: Iterable[int] = ()) -> tuple[str, ...]:
    """Return the processes on the first visible GPU that do not belong to this run, as `PID NAME`.

    This process, the processes `own` and everything that they started belong to it.  So does everything that the parent
    started, if this is a worker of pytest-xdist.
    """
    gpu = find_gpu()
    with _nvml() as nvml:
        if nvml is None or gpu is None:
            return ()
        try:
            running = nvml.nvmlDeviceGetComputeRunningProcesses(nvml.nvmlDeviceGetHandleByUUID(gpu.uuid))
        except nvml.NVMLError:
            return ()
        run = {os.getpid(), *own, *([os.getppid()] if "PYTEST_XDIST_WORKER" in os.environ else [])}
        others = [process.pid for process in running if run.isdisjoint(ancestors_of(process.pid))]
        return tuple(f"{pid} {_process_name(pid)}" for pid in others)


def may_open_gpu_early() -> bool:
    """Whether a candidate may open the first visible GPU before its job.

    Not if the GPU's compute mode allows one process only, which must be the judge, or if that is not known; and not in
    a worker of pytest-xdist, because another one may be timing on this GPU.
    """
    gpu = find_gpu()
    with _nvml() as nvml:
        if nvml is None or gpu is None or "PYTEST_XDIST_WORKER" in os.environ:
            return False
        try:
            mode = nvml.nvmlDeviceGetComputeMode(nvml.nvmlDeviceGetHandleByUUID(gpu.uuid))
        except nvml.NVMLError:
            return False
        return bool(mode == nvml.NVML_COMPUTEMODE_DEFAULT)


def _process_name(pid: int) -> str:
    try:
        return printable(name_of(pid))
    except OSError:
        return "(not visible here)"


def gpu_folder(gpu: str | None) -> str:
    """Return the folder name of a GPU: `nvidia-h200` for NVIDIA H200, `cpu` for records made without a GPU."""
    name = "-".join((gpu or "cpu").lower().split())
    return re.sub(r"[/\x00-\x1f]", "-", name).lstrip(".") or "unnamed"  # the name may be that of a record file


def read_environment() -> Environment:
    """Return the GPU, the host and the software versions of this run."""
    gpu = find_gpu()
    return Environment(
        gpu=gpu.name if gpu else None,
        compute_capability=".".join(map(str, gpu.compute_capability)) if gpu else None,
        driver=gpu.driver if gpu else None,
        cuda=gpu.cuda if gpu else None,
        torch=_version("torch"),
        python=platform.python_version(),
        host=f"{platform.system()} {platform.machine()}",
        cpu=_cpu_name(),
        pytest_fa=pytest_fa.__version__,
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _has_driver() -> bool:
    """Whether NVML's library can be loaded.  This takes a hundredth of the time that importing `pynvml` takes."""
    try:
        ctypes.CDLL(NVML_LIBRARY)
    except OSError:
        return False
    return True


@contextmanager
def _nvml() -> Iterator[Any]:
    """Yield the initialised NVML module, or None without a driver; shut it down afterwards."""
    if "pynvml" not in sys.modules and not _has_driver():
        yield None
        return
    import pynvml  # noqa: PLC0415  # 20 ms, only when it is needed

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _first_visible(nvml: Any) -> Any | None:  # noqa: ANN401  # NVML's module and handle have no types
    """Return the handle of the first entry of CUDA_VISIBLE_DEVICES: an index in PCI order, or a UUID."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return _handle(nvml, "0" if visible is None else visible.split(",")[0])


def _handle(nvml: Any, entry: str) -> Any | None:  # noqa: ANN401
    """Return the handle of one entry of CUDA_VISIBLE_DEVICES, or None if there is no such GPU."""
    name = entry.strip()
    try:
        if name.startswith(("GPU-", "MIG-")):
            return nvml.nvmlDeviceGetHandleByUUID(name)
        return nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else None
    except nvml.NVMLError:
        return None

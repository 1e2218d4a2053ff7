"""Our own device code around a launch that is judged: NaN-filled shared memory, busy multiprocessors, a cold L2.

A kernel that reads shared memory which it did not write is often right on a clean chip: it finds zeros, or what its own
last launch left.  Here it finds NaN.  A kernel that lacks a barrier is often right while each block has a
multiprocessor to itself, where its warps run in step; in company they drift apart.
"""

from __future__ import annotations

import ctypes
import functools
import math
from pathlib import Path
from typing import Any

import torch

import pytest_fa
from pytest_fa.errors import FaError
from pytest_fa.records.timing import LaunchedKernel
from pytest_fa.run.guards import NAN_PATTERN

SOURCES = Path(pytest_fa.__file__).parent / "device"
POISON_THREADS = 1024
BLOCKS_AT_ONCE = 8  # on a multiprocessor, for kernels of a few hundred threads
OCCUPIED_SHARE = 0.75  # of the multiprocessors
OCCUPIED_CYCLES = 60_000  # 30 us at 2 GHz, longer than the kernels of short sequences


class NoDeviceTools(FaError):
    """Our device code cannot be run here, and why."""


@functools.cache
def device_tools(device_index: int) -> DeviceTools:
    """The tools of one GPU, compiled once per process.  Raises `NoDeviceTools`."""
    return DeviceTools(device_index)


class DeviceTools:
    """Kernels compiled by NVRTC, launched on torch's current stream or beside it."""

    def __init__(self, device_index: int) -> None:
        try:
            from cuda.bindings import driver, nvrtc  # noqa: PLC0415  # comes with torch's CUDA builds only

            self._open(device_index, driver, nvrtc)
        except (ImportError, RuntimeError, OSError) as problem:  # cuda.bindings raises RuntimeError without a library
            raise NoDeviceTools(f"{type(problem).__name__}: {problem}") from problem

    def _open(self, device_index: int, driver: Any, nvrtc: Any) -> None:  # noqa: ANN401  # no types there
        device = torch.cuda.get_device_properties(device_index)
        self.multiprocessors: int = device.multi_processor_count
        self._smem_bytes: int = device.shared_memory_per_block_optin  # type: ignore[attr-defined]  # CUDA builds have it
        self._l2_bytes = int(device.L2_cache_size)
        self._driver = driver
        with torch.cuda.device(device_index):
            self._beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            load = functools.partial(_load, driver, nvrtc, f"sm_{device.major}{device.minor}", self._smem_bytes)
            self._poison, self._occupy, self._spin = load("poison_smem"), load("occupy"), load("spin")
        rate = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CLOCK_RATE
        self.cycles_per_us = _ok(driver.cuDeviceGetAttribute(rate, _ok(driver.cuDeviceGet(device_index)))) / 1000  # kHz

    def poison_smem(self, multiprocessor_of_block: torch.Tensor | None = None) -> None:
        """Fill all shared memory with NaN, about 8 us on an H200.

        The tensor, [multiprocessors] int32, takes where each block ran.
        """
        ids = 0 if multiprocessor_of_block is None else multiprocessor_of_block.data_ptr()
        values = (NAN_PATTERN << 16 | NAN_PATTERN, self._smem_bytes // 4, ids)
        arguments = (values, (ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p))
        self._launch(self._poison, self.multiprocessors, POISON_THREADS, arguments, torch.cuda.current_stream())

    def occupy(self) -> None:
        """Keep three of four multiprocessors busy from here on for 30 us, on a stream beside the current one."""
        self._beside.wait_stream(torch.cuda.current_stream())
        blocks = int(self.multiprocessors * OCCUPIED_SHARE)
        self._launch(self._occupy, blocks, 32, ((OCCUPIED_CYCLES,), (ctypes.c_longlong,)), self._beside)

    def spin_like(self, launches: tuple[LaunchedKernel, ...], cycles: int, memsets: int = 0) -> None:
        """Kernels in the grid, block, cluster and shared memory of others, which do nothing for so many cycles.

        Kernels that wait have no more blocks than the chip holds at once.  `memsets` of a few bytes come first.
        """
        driver, stream = self._driver, torch.cuda.current_stream()
        for _ in range(memsets):
            _ok(driver.cuMemsetD32Async(self._few_bytes.data_ptr(), 0, 4, stream.cuda_stream))
        for each in launches:
            config = driver.CUlaunchConfig()
            config.gridDimX, config.gridDimY, config.gridDimZ = each.grid
            config.blockDimX, config.blockDimY, config.blockDimZ = each.block
            config.sharedMemBytes = each.dynamic_smem_bytes + each.static_smem_bytes
            config.hStream = stream.cuda_stream
            if each.cluster != (1, 1, 1):
                cluster = driver.CUlaunchAttribute()
                cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
                value = cluster.value.clusterDim
                value.x, value.y, value.z = each.cluster
                config.attrs, config.numAttrs = [cluster], 1
            most = self.multiprocessors * BLOCKS_AT_ONCE
            if cycles and math.prod(each.grid) > most and each.cluster == (1, 1, 1):
                config.gridDimX, config.gridDimY, config.gridDimZ = most, 1, 1
            arguments = ((cycles,), (ctypes.c_longlong,))
            for _ in range(each.count):
                _ok(driver.cuLaunchKernelEx(config, self._spin, arguments, 0))

    def clean_l2(self) -> None:
        """Read twice the L2's size: what was in it is gone, and nothing is left to write back."""
        self._l2_filler.sum()

    @functools.cached_property
    def _few_bytes(self) -> torch.Tensor:
        return torch.zeros(4, dtype=torch.int32, device=self._beside.device)

    @functools.cached_property
    def _l2_filler(self) -> torch.Tensor:
        return torch.zeros(2 * self._l2_bytes // 4, dtype=torch.int32, device=self._beside.device)

    def _launch(self, kernel: Any, blocks: int, threads: int, arguments: Any, stream: torch.cuda.Stream) -> None:  # noqa: ANN401
        launch = (blocks, 1, 1, threads, 1, 1, self._smem_bytes, stream.cuda_stream, arguments, 0)
        _ok(self._driver.cuLaunchKernel(kernel, *launch))


def _load(driver: Any, nvrtc: Any, arch: str, smem_bytes: int, name: str) -> Any:  # noqa: ANN401  # no types there
    """Compile `device/<name>.cu` and allow its kernel of the same name so much shared memory."""
    program = _ok(nvrtc.nvrtcCreateProgram((SOURCES / f"{name}.cu").read_bytes(), name.encode(), 0, [], []))
    _ok(nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture={arch}".encode()]))
    cubin = b" " * _ok(nvrtc.nvrtcGetCUBINSize(program))
    _ok(nvrtc.nvrtcGetCUBIN(program, cubin))
    kernel = _ok(driver.cuModuleGetFunction(_ok(driver.cuModuleLoadData(cubin)), name.encode()))
    most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _ok(driver.cuFuncSetAttribute(kernel, most, smem_bytes))
    return kernel


def _ok(answer: tuple[Any, ...]) -> Any:  # noqa: ANN401
    """The value of a call.  Raises `NoDeviceTools` with its status."""
    status, *values = answer
    if int(status) != 0:
        raise NoDeviceTools(f"CUDA answered {status!r}")
    return values[0] if values else None

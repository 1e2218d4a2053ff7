"""The package's own kernels, which change the state of the GPU before a launch that is judged.

They fill shared memory with NaN, occupy multiprocessors and evict the L2 cache.

- A kernel that reads shared memory which it never wrote is often right on an idle GPU: it reads zeros, or the values of
  its own previous launch.  After `poison_smem` it reads NaN.
- A kernel that lacks a barrier is often right while each of its blocks has a multiprocessor to itself, because the
  warps then run in step.  `occupy` makes several blocks share a multiprocessor, so that their warps drift apart.
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
from pytest_fa.gpu.guards import NAN_PATTERN
from pytest_fa.records.timing import LaunchedKernel

SOURCES = Path(pytest_fa.__file__).parent / "device"
POISON_THREADS = 1024
BLOCKS_PER_MULTIPROCESSOR = 8  # that are resident at once, for kernels of a few hundred threads per block
OCCUPIED_SHARE = 0.75  # the fraction of the multiprocessors that `occupy` keeps busy
OCCUPIED_CYCLES = 60_000  # 30 us at 2 GHz, longer than the kernels of short sequences


class NoDeviceTools(FaError):
    """The package's own kernels cannot be compiled or launched here; the message gives the reason."""


@functools.cache
def device_tools(device_index: int) -> DeviceTools:
    """The tools of one GPU.  Their kernels are compiled once per process.  Raises `NoDeviceTools`."""
    return DeviceTools(device_index)


class DeviceTools:
    """Kernels that NVRTC compiles, launched on torch's current stream; `occupy` runs on a side stream."""

    def __init__(self, device_index: int) -> None:
        try:
            from cuda.bindings import driver, nvrtc  # noqa: PLC0415  # comes with torch's CUDA builds only

            self._open(device_index, driver, nvrtc)
        except (ImportError, RuntimeError, OSError) as problem:  # cuda.bindings: RuntimeError if a library is missing
            raise NoDeviceTools(f"{type(problem).__name__}: {problem}") from problem

    def _open(self, device_index: int, driver: Any, nvrtc: Any) -> None:  # noqa: ANN401  # cuda.bindings has no types
        device = torch.cuda.get_device_properties(device_index)
        self.multiprocessors: int = device.multi_processor_count
        self._smem_bytes: int = device.shared_memory_per_block_optin  # type: ignore[attr-defined]  # CUDA builds have it
        self._l2_bytes = int(device.L2_cache_size)
        self._driver = driver
        with torch.cuda.device(device_index):
            self._side_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            load = functools.partial(_load, driver, nvrtc, f"sm_{device.major}{device.minor}", self._smem_bytes)
            self._poison, self._occupy, self._spin = load("poison_smem"), load("occupy"), load("spin")
        rate = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CLOCK_RATE
        self.cycles_per_us = _ok(driver.cuDeviceGetAttribute(rate, _ok(driver.cuDeviceGet(device_index)))) / 1000  # kHz

    def poison_smem(self, multiprocessor_of_block: torch.Tensor | None = None) -> None:
        """Fill the shared memory of every multiprocessor with NaN, which takes about 8 us on an H200.

        `multiprocessor_of_block`, [multiprocessors] int32, receives the multiprocessor on which each block ran.
        """
        ids = 0 if multiprocessor_of_block is None else multiprocessor_of_block.data_ptr()
        values = (NAN_PATTERN << 16 | NAN_PATTERN, self._smem_bytes // 4, ids)
        arguments = (values, (ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p))
        self._launch(self._poison, self.multiprocessors, POISON_THREADS, arguments, torch.cuda.current_stream())

    def occupy(self) -> None:
        """Keep three quarters of the multiprocessors busy for 30 us, on a side stream.

        The 30 us begin when earlier work on the current stream is complete.
        """
        self._side_stream.wait_stream(torch.cuda.current_stream())
        blocks = int(self.multiprocessors * OCCUPIED_SHARE)
        self._launch(self._occupy, blocks, 32, ((OCCUPIED_CYCLES,), (ctypes.c_longlong,)), self._side_stream)

    def spin_like(self, launches: tuple[LaunchedKernel, ...], cycles: int, memsets: int = 0) -> None:
        """Launch a spin kernel for each of `launches`, with the same grid, block, cluster and shared memory.

        Each block waits for `cycles` clock cycles and does nothing else; with 0 cycles the kernels are empty.  If they
        wait, a grid without clusters is cut to the blocks that are resident at once, so that it runs in one wave.
        `memsets` memsets of 16 bytes each come first.
        """
        driver, stream = self._driver, torch.cuda.current_stream()
        for _ in range(memsets):
            _ok(driver.cuMemsetD32Async(self._memset_target.data_ptr(), 0, 4, stream.cuda_stream))
        for launch in launches:
            config = driver.CUlaunchConfig()
            config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
            config.blockDimX, config.blockDimY, config.blockDimZ = launch.block
            config.sharedMemBytes = launch.dynamic_smem_bytes + launch.static_smem_bytes
            config.hStream = stream.cuda_stream
            if launch.cluster != (1, 1, 1):
                cluster = driver.CUlaunchAttribute()
                cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
                value = cluster.value.clusterDim
                value.x, value.y, value.z = launch.cluster
                config.attrs, config.numAttrs = [cluster], 1
            resident_blocks = self.multiprocessors * BLOCKS_PER_MULTIPROCESSOR
            if cycles and math.prod(launch.grid) > resident_blocks and launch.cluster == (1, 1, 1):
                config.gridDimX, config.gridDimY, config.gridDimZ = resident_blocks, 1, 1
            arguments = ((cycles,), (ctypes.c_longlong,))
            for _ in range(launch.count):
                _ok(driver.cuLaunchKernelEx(config, self._spin, arguments, 0))

    def clean_l2(self) -> None:
        """Read twice the L2's size, which evicts its content and fills it with clean lines: no write-back follows."""
        self._l2_filler.sum()

    def reset_persisting_l2(self) -> None:
        """Let the L2 forget what a kernel asked it to keep."""
        _ok(self._driver.cuCtxResetPersistingL2Cache())

    @functools.cached_property
    def _memset_target(self) -> torch.Tensor:
        return torch.zeros(4, dtype=torch.int32, device=self._side_stream.device)

    @functools.cached_property
    def _l2_filler(self) -> torch.Tensor:
        return torch.zeros(2 * self._l2_bytes // 4, dtype=torch.int32, device=self._side_stream.device)

    def _launch(self, kernel: Any, blocks: int, threads: int, arguments: Any, stream: torch.cuda.Stream) -> None:  # noqa: ANN401
        launch = (blocks, 1, 1, threads, 1, 1, self._smem_bytes, stream.cuda_stream, arguments, 0)
        _ok(self._driver.cuLaunchKernel(kernel, *launch))


def _load(driver: Any, nvrtc: Any, arch: str, smem_bytes: int, name: str) -> Any:  # noqa: ANN401  # as above
    """Compile `device/<name>.cu` and allow its kernel `<name>` up to `smem_bytes` bytes of dynamic shared memory.

    Clusters of more than eight blocks are allowed, too, where the GPU has any.
    """
    program = _ok(nvrtc.nvrtcCreateProgram((SOURCES / f"{name}.cu").read_bytes(), name.encode(), 0, [], []))
    _ok(nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture={arch}".encode()]))
    cubin = b" " * _ok(nvrtc.nvrtcGetCUBINSize(program))
    _ok(nvrtc.nvrtcGetCUBIN(program, cubin))
    kernel = _ok(driver.cuModuleGetFunction(_ok(driver.cuModuleLoadData(cubin)), name.encode()))
    max_dynamic_smem = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _ok(driver.cuFuncSetAttribute(kernel, max_dynamic_smem, smem_bytes))
    large_clusters = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
    driver.cuFuncSetAttribute(kernel, large_clusters, 1)  # refused by a GPU without clusters
    return kernel


def _ok(result: tuple[Any, ...]) -> Any:  # noqa: ANN401
    """The value that a CUDA call returned.  Raises `NoDeviceTools` if its status is not success."""
    status, *values = result
    if int(status) != 0:
        raise NoDeviceTools(f"a CUDA call returned {status!r}")
    return values[0] if values else None

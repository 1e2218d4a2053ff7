"""Dirty the shared memory of every multiprocessor before a launch that is judged.

A kernel that reads shared memory which it did not write is often right on a clean chip: it finds zeros, or what its own
last launch left.  Here it finds NaN.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch

import pytest_fa
from pytest_fa.errors import FaError
from pytest_fa.run.guards import NAN_PATTERN

SOURCE = Path(pytest_fa.__file__).parent / "device" / "dirty_smem.cu"
BLOCK_THREADS = 1024


class NoDirtier(FaError):
    """Shared memory cannot be dirtied here, and why."""


@functools.cache
def smem_dirtier(device_index: int) -> SmemDirtier:
    """The dirtier of one GPU, compiled once per process.  Raises `NoDirtier`."""
    return SmemDirtier(device_index)


class SmemDirtier:
    """A kernel, compiled by NVRTC, that fills all shared memory with NaN; one launch takes about 8 us on an H200."""

    def __init__(self, device_index: int) -> None:
        try:
            from cuda.bindings import driver, nvrtc  # noqa: PLC0415  # comes with torch's CUDA builds only
        except ImportError as problem:
            raise NoDirtier(f"cuda.bindings is not installed: {problem}") from problem
        device = torch.cuda.get_device_properties(device_index)
        self.blocks: int = device.multi_processor_count
        self._bytes: int = device.shared_memory_per_block_optin  # type: ignore[attr-defined]  # CUDA builds have it
        self._driver = driver
        with torch.cuda.device(device_index):
            cubin = _compile(nvrtc, f"sm_{device.major}{device.minor}")
            self._module = _ok(driver.cuModuleLoadData(cubin))
            self._kernel = _ok(driver.cuModuleGetFunction(self._module, b"dirty_smem"))
            most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _ok(driver.cuFuncSetAttribute(self._kernel, most, self._bytes))

    def __call__(self, multiprocessor_of_block: torch.Tensor | None = None) -> None:
        """Launch on torch's current stream; the tensor, [blocks] int32, takes where each block ran."""
        stream = torch.cuda.current_stream().cuda_stream
        ids = 0 if multiprocessor_of_block is None else multiprocessor_of_block.data_ptr()
        pattern = NAN_PATTERN << 16 | NAN_PATTERN
        values = (pattern, self._bytes // 4, ids)
        arguments = (values, (ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p))
        shape = (self.blocks, 1, 1, BLOCK_THREADS, 1, 1)
        _ok(self._driver.cuLaunchKernel(self._kernel, *shape, self._bytes, stream, arguments, 0))


def _compile(nvrtc: Any, arch: str) -> bytes:  # noqa: ANN401  # cuda.bindings has no types
    program = _ok(nvrtc.nvrtcCreateProgram(SOURCE.read_bytes(), b"dirty_smem.cu", 0, [], []))
    _ok(nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture={arch}".encode()]))
    cubin: bytes = b" " * _ok(nvrtc.nvrtcGetCUBINSize(program))
    _ok(nvrtc.nvrtcGetCUBIN(program, cubin))
    return cubin


def _ok(answer: tuple[Any, ...]) -> Any:  # noqa: ANN401
    """The value of a call.  Raises `NoDirtier` with its status."""
    status, *values = answer
    if int(status) != 0:
        raise NoDirtier(f"CUDA answered {status!r}")
    return values[0] if values else None

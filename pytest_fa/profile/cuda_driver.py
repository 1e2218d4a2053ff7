"""The few calls of CUDA's driver for a child without torch, through ctypes: nothing to compile, nothing to cache.

Memory comes from `cuMemAlloc` in exactly the size that is asked for: memcheck knows where it ends.
"""

from __future__ import annotations

import ctypes
from typing import Self

from pytest_fa.errors import DeviceLost

# A kernel that does nothing, in the oldest PTX that every supported GPU's driver compiles.
EMPTY_KERNEL = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry fa_probe() { ret; }
"""


class CudaDriver:
    """The first visible GPU's primary context, which a build's own runtime uses too."""

    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as problem:
            raise DeviceLost(f"no CUDA driver: {problem}") from None
        device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self("cuInit", 0)
        self("cuDeviceGet", ctypes.byref(device), 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self("cuCtxSetCurrent", self._context)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """The context stays: what a tool has to say at its end, it says at the process's."""

    def __call__(self, name: str, *arguments: object) -> None:
        """One call of the driver.  Raises `DeviceLost` with the call's name and CUDA's own for its status."""
        status = getattr(self._cuda, name)(*arguments)
        if status != 0:
            words = ctypes.c_char_p()
            self._cuda.cuGetErrorName(status, ctypes.byref(words))
            raise DeviceLost(f"{name}: {(words.value or str(status).encode()).decode()}")

    def allocate(self, size_bytes: int) -> int:
        """The address of `size_bytes` bytes, uninitialised; a null pointer for none."""
        address = ctypes.c_uint64()
        if size_bytes:
            self("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size_bytes))
        return address.value

    def upload(self, content: bytes) -> int:
        """The address of a copy on the device."""
        address = self.allocate(len(content))
        if content:
            self("cuMemcpyHtoD_v2", ctypes.c_uint64(address), content, ctypes.c_size_t(len(content)))
        return address

    def download(self, address: int, size_bytes: int) -> bytes:
        """What lies at an address of the device."""
        content = ctypes.create_string_buffer(size_bytes)
        if size_bytes:
            self("cuMemcpyDtoH_v2", content, ctypes.c_uint64(address), ctypes.c_size_t(size_bytes))
        return content.raw

    def synchronize(self) -> None:
        """Wait for everything."""
        self("cuCtxSynchronize")

    def launch_empty_kernel(self) -> None:
        """Compile and launch a kernel of one thread that does nothing, and wait for it."""
        module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
        self("cuModuleLoadData", ctypes.byref(module), EMPTY_KERNEL + b"\0")
        self("cuModuleGetFunction", ctypes.byref(kernel), module, b"fa_probe")
        self("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, None, None, None)
        self.synchronize()

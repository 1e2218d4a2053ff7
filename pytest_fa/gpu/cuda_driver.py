"""The CUDA driver calls that a child process without torch needs, through ctypes.

Each allocation is one `cuMemAlloc` of exactly the requested size, so that memcheck detects an access past its end.
"""

from __future__ import annotations

import ctypes
from typing import Self

from pytest_fa.errors import DeviceLost

# A kernel that does nothing, in PTX that the driver compiles for every supported GPU.
EMPTY_KERNEL = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry fa_probe() { ret; }
"""


class CudaDriver:
    """The primary context of the first visible GPU, which the CUDA runtime in a built library uses too."""

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
        """Keep the context: profilers and checkers finish their work when the process ends."""

    def __call__(self, name: str, *arguments: object) -> None:
        """Call the driver function `name`.  Raises `DeviceLost` with that name and CUDA's name of the error."""
        status = getattr(self._cuda, name)(*arguments)
        if status != 0:
            error_name = ctypes.c_char_p()
            self._cuda.cuGetErrorName(status, ctypes.byref(error_name))
            raise DeviceLost(f"{name}: {(error_name.value or str(status).encode()).decode()}")

    def allocate(self, size_bytes: int) -> int:
        """Allocate `size_bytes` uninitialised bytes on the device and return the address; 0 for no bytes."""
        address = ctypes.c_uint64()
        if size_bytes:
            self("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size_bytes))
        return address.value

    def upload(self, content: bytes) -> int:
        """Copy `content` to newly allocated device memory and return its address."""
        address = self.allocate(len(content))
        if content:
            self("cuMemcpyHtoD_v2", ctypes.c_uint64(address), content, ctypes.c_size_t(len(content)))
        return address

    def download(self, address: int, size_bytes: int) -> bytes:
        """Copy `size_bytes` bytes from a device address to the host."""
        content = ctypes.create_string_buffer(size_bytes)
        if size_bytes:
            self("cuMemcpyDtoH_v2", content, ctypes.c_uint64(address), ctypes.c_size_t(size_bytes))
        return content.raw

    def synchronize(self) -> None:
        """Wait for all work in the context."""
        self("cuCtxSynchronize")

    def launch_empty_kernel(self) -> None:
        """Compile and launch an empty kernel of one thread, and wait for it."""
        module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
        self("cuModuleLoadData", ctypes.byref(module), EMPTY_KERNEL + b"\0")
        self("cuModuleGetFunction", ctypes.byref(kernel), module, b"fa_probe")
        self("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, None, None, None)
        self.synchronize()

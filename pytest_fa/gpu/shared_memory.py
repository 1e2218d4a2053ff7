"""Memory that the judge and a candidate both see, and the tensors that lie in it.

On the CPU each piece is a sealed memory file.  On a GPU it is an allocation of its own by cuMemAlloc, outside torch's
caching allocator, because CUDA shares whole allocations: a tensor beside it would be shared, too.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from pytest_fa.errors import FaError
from pytest_fa.wire.commands import View, ViewDtype

DTYPES: dict[ViewDtype, torch.dtype] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "uint8": torch.uint8,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "bool": torch.bool,
    "int32": torch.int32,
    "int8": torch.int8,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# The size of a large piece is a multiple of it.  Otherwise, CUDA gives a process that did not allocate the piece small
# pages of memory, and its kernels take up to five times as long to read gigabytes.
PAGE_BYTES = 2**21


class NoSharedMemory(FaError):
    """This machine gives two processes no common memory; the message has the reason."""


class NotSupported(NoSharedMemory):
    """The system or CUDA does not support it; a resource that is used up is no such reason."""


class NoSharing(NoSharedMemory):
    """`require_sharing` failed: this machine does not support shared memory."""


class Piece(NamedTuple):
    """One piece of shared memory: its bytes, [size] uint8, and what another process needs to map it."""

    data: torch.Tensor
    handle: str = ""  # CUDA's, in hexadecimal
    descriptor: int | None = None  # of the memory file, on the CPU


class Memories:
    """The pieces that a process has mapped, by number."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}

    def add(self, number: int, storage: torch.UntypedStorage) -> None:
        """Add a piece."""
        self._storages[number] = storage

    def remove(self, number: int) -> None:
        """Remove a piece."""
        self._storages.pop(number, None)

    def tensor(self, view: View) -> torch.Tensor:
        """The tensor that a view names.  Raises `FaError` if no such piece is mapped."""
        if view.memory not in self._storages:
            raise FaError(f"memory {view.memory} is not mapped")
        storage = self._storages[view.memory]
        tensor = torch.empty(0, dtype=DTYPES[view.dtype], device=storage.device)
        return tensor.set_(storage, view.offset, view.shape, view.strides)


def require_sharing(device: torch.device) -> None:
    """Raise `NoSharing` if this machine does not support memory that two processes see on a device, with the reason.

    Memory or descriptors that are used up are no such reason: a variant of another run could have used them.
    """
    try:
        if device.type == "cuda":
            _require_several_contexts(device)
            free_on_gpu(allocate_on_gpu(PAGE_BYTES, device))
        else:
            _require_memory_files()
    except NotSupported as problem:
        raise NoSharing(f"two processes cannot share memory here: {problem}") from problem


def _require_memory_files() -> None:
    """Raise `NotSupported` if the system has no memory files, as some sandboxes."""
    try:
        os.close(os.memfd_create("pytest-fa", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except OSError as problem:
        if problem.errno in (errno.ENOSYS, errno.EPERM):
            raise NotSupported(str(problem)) from problem
        raise


def view_of(tensor: torch.Tensor, memory: int) -> View:
    """The view of a tensor whose storage is the piece `memory`."""
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    return View(memory, int(tensor.storage_offset()), shape, strides, DTYPE_NAMES[tensor.dtype])


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """All bytes of a storage, [size] uint8."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))


# -- the CPU ----------------------------------------------------------------------------------------------------------


def allocate_on_cpu(size_bytes: int) -> Piece:
    """A new piece.  Its size is sealed: a process that shortened it would crash the judge."""
    descriptor = os.memfd_create("pytest-fa", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return Piece(map_on_cpu(descriptor, size_bytes), descriptor=descriptor)


def map_on_cpu(descriptor: int, size_bytes: int) -> torch.Tensor:
    """The bytes of a memory file, [size_bytes] uint8.  The descriptor may be closed afterwards."""
    return torch.frombuffer(mmap.mmap(descriptor, size_bytes), dtype=torch.uint8)


# -- a GPU ------------------------------------------------------------------------------------------------------------


class _DeviceBytes:
    """What `torch.as_tensor` needs to see device memory as a tensor."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


def allocate_on_gpu(size_bytes: int, device: torch.device, free_memory: Callable[[], object] = lambda: None) -> Piece:
    """A new piece on a GPU.  If its memory is used up, `free_memory` is called before another try.

    Raises `NoSharedMemory` where CUDA cannot share memory between processes.
    """
    with _driver(device) as driver:
        status, address = driver.cuMemAlloc(size_bytes)
        if int(status) == int(driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY):
            free_memory()  # torch may then keep memory that no tensor uses
            torch.cuda.empty_cache()
            status, address = driver.cuMemAlloc(size_bytes)
        if int(status) != 0:
            raise NoSharedMemory(f"{size_bytes} bytes of GPU memory cannot be allocated: {status!r}")
        handle = _handle_of(driver, address)
    return Piece(_device_tensor(int(address), size_bytes, device), bytes(handle.reserved).hex())


def _require_several_contexts(device: torch.device) -> None:
    """Raise `NotSupported` if the GPU allows only one process at a time."""
    with _driver(device) as driver:
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_MODE
        mode = int(_ok(driver.cuDeviceGetAttribute(attribute, _ok(driver.cuCtxGetDevice()))))
        if mode != int(driver.CUcomputemode.CU_COMPUTEMODE_DEFAULT):
            raise NotSupported(
                "the GPU's compute mode allows one process only; `nvidia-smi --compute-mode=DEFAULT` allows several"
            )


def free_on_gpu(piece: Piece) -> None:
    """Give the memory of a piece back.  No tensor may use it any more."""
    with _driver(piece.data.device) as driver:
        _ok(driver.cuMemFree(piece.data.data_ptr()))


def map_on_gpu(handle: str, size_bytes: int, device: torch.device) -> torch.Tensor:
    """The bytes of another process's memory, [size_bytes] uint8.  Raises `NoSharedMemory`."""
    with _driver(device) as driver:
        ipc_handle = driver.CUipcMemHandle()
        ipc_handle.reserved = bytes.fromhex(handle)
        lazy = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        address = int(_ok(driver.cuIpcOpenMemHandle(ipc_handle, lazy.value)))
    return _device_tensor(address, size_bytes, device)


def mapped_bytes_on_gpu(data: torch.Tensor) -> int:
    """How many bytes are really mapped where `data` begins: another process may have claimed more."""
    with _driver(data.device) as driver:
        _, size_bytes = _ok_pair(driver.cuMemGetAddressRange(data.data_ptr()))
    return int(size_bytes)


def unmap_on_gpu(data: torch.Tensor) -> None:
    """Undo `map_on_gpu`."""
    with _driver(data.device) as driver:
        _ok(driver.cuIpcCloseMemHandle(data.data_ptr()))


def handle_on_gpu(tensor: torch.Tensor) -> tuple[str, int, int]:
    """CUDA's handle of the allocation that a tensor lies in, its size, and the tensor's place in it, in bytes."""
    with _driver(tensor.device) as driver:
        base, size_bytes = _ok_pair(driver.cuMemGetAddressRange(tensor.data_ptr()))
        handle = _ok(driver.cuIpcGetMemHandle(base))
    return bytes(handle.reserved).hex(), int(size_bytes), tensor.data_ptr() - int(base)


def _handle_of(driver: Any, address: Any) -> Any:  # noqa: ANN401  # cuda.bindings has no types
    """CUDA's handle of an allocation, for other processes.  Raises `NotSupported` where CUDA gives none at all."""
    status, handle = driver.cuIpcGetMemHandle(address)
    result = driver.CUresult
    if int(status) in (int(result.CUDA_ERROR_NOT_SUPPORTED), int(result.CUDA_ERROR_NOT_PERMITTED)):
        raise NotSupported(f"CUDA's sharing of memory between processes returned {status!r}")
    return _ok((status, handle))


def _device_tensor(address: int, size_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(_DeviceBytes(address, size_bytes), device=device)


@contextmanager
def _driver(device: torch.device) -> Iterator[Any]:  # cuda.bindings has no types
    """The driver's functions, while this device's context, which torch made, is the current one."""
    try:
        from cuda.bindings import driver  # noqa: PLC0415  # comes with torch's CUDA builds only
    except (ImportError, RuntimeError) as problem:
        raise NoSharedMemory(f"cuda.bindings cannot be used: {problem}") from problem
    with torch.cuda.device(device):
        torch.cuda.current_stream(device).synchronize()  # makes the context, if this is its first use
        yield driver


def _ok_pair(result: tuple[Any, ...]) -> tuple[Any, Any]:
    status, *values = result
    if int(status) != 0:
        raise NoSharedMemory(f"CUDA's sharing of memory between processes returned {status!r}")
    return (*values, None, None)[:2]


def _ok(result: tuple[Any, ...]) -> Any:  # noqa: ANN401
    return _ok_pair(result)[0]

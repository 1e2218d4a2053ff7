"""The device that a job runs on: open it, synchronize with it, and check whether its context still works."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress

import torch

from pytest_fa.catalog.variant import Device
from pytest_fa.errors import DeviceLost

MAX_KEPT_BYTES = 2**30  # of unused memory that a process keeps between two jobs: others may need the rest


def open_device(name: Device) -> torch.device:
    """Return the torch device, with its CUDA context created.  Raises `DeviceLost` if CUDA does not start."""
    device = torch.device(name)
    if device.type == "cuda":
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as problem:
            raise DeviceLost(f"CUDA does not start: {problem}") from problem
    return device


def synchronize(device: torch.device) -> None:
    """Wait for all work on `device`.

    Raises `DeviceLost` with the driver's message for an asynchronous error, such as an illegal address.  A CUDA context
    does not recover from such an error.
    """
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as problem:
            raise DeviceLost(str(problem).splitlines()[0]) from problem


def is_alive(device: torch.device) -> bool:
    """Whether the device's context still accepts work."""
    try:
        synchronize(device)
    except DeviceLost:
        return False
    return True


def give_memory_back() -> None:
    """Give the GPU memory that torch keeps without a use back to other processes, if it is more than 1 GiB."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        with suppress(RuntimeError):  # the context may be lost, which the next job notices
            unused_bytes = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            if unused_bytes > MAX_KEPT_BYTES:
                torch.cuda.empty_cache()


def peak_bytes_of(call: Callable[[], object], device: torch.device) -> int:
    """The most memory of a GPU that a call took from torch's caching allocator, beyond what was taken before."""
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before_bytes = torch.cuda.memory_allocated(device)
    call()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before_bytes


def without_gradients() -> AbstractContextManager[None]:
    """A context in which torch records no gradients, also if a function uses parameters that need them."""
    return torch.no_grad()
